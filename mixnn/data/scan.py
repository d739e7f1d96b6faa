"""What a folder of images is, in a few numbers: sizes, modes, unreadable files, exact duplicates."""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mixnn.data.decode import FileInfo
from mixnn.progress import plural


@dataclass(frozen=True)
class Scan:
    """Of the images that could be read."""

    num_images: int
    sides: tuple[int, int, int]  # shorter side: smallest, median, largest
    modes: dict[str, int]
    duplicates: list[list[str]]  # names of files with the same bytes
    num_skipped: int
    digest: str  # of all files' bytes

    def lines(self) -> list[str]:
        """A sentence or two for the user."""
        low, median, high = self.sides
        modes = ", ".join(f"{count:,} {mode}" for mode, count in self.modes.items())
        sides = f"shorter side {low}" if low == high else f"shorter side {low} to {high}, median {median}"
        lines = [f"{plural(self.num_images, 'image')}, {sides} pixels; modes: {modes}"]
        if self.num_skipped:
            lines.append(f"{plural(self.num_skipped, 'file')} that cannot be read left out")
        if self.duplicates:
            extra = sum(len(group) - 1 for group in self.duplicates)
            example = " = ".join(self.duplicates[0][:2])
            lines.append(
                f"{plural(extra, 'file')} with the same content as another ({example}); kept, and counted twice"
            )
        return lines


def scan(names: Sequence[str], facts: Sequence[FileInfo], num_skipped: int) -> Scan:
    sides = [min(f.width, f.height) for f in facts]
    groups: dict[str, list[str]] = {}
    for name, f in zip(names, facts, strict=True):
        groups.setdefault(f.digest, []).append(name)
    copies = [group for group in groups.values() if len(group) > 1]
    modes = dict(Counter(f.mode for f in facts).most_common())
    spread = min(sides), round(statistics.median(sides)), max(sides)
    digest = hashlib.sha256("".join(f.digest for f in facts).encode()).hexdigest()[:32]
    return Scan(len(facts), spread, modes, copies, num_skipped, digest)
