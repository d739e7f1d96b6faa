"""DataSet: one row of the table of known data sets, and what to tell the user when its files are absent or damaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mixnn.config import UserError
from mixnn.data.archive import Archive
from mixnn.data.image_set import Arrays, Triple

# File name relative to the root -> its size in bytes, None where any size will do. All files share their first folder.
Layout = Mapping[str, int | None]


def default_root() -> Path:
    """Where data sets are kept: $MIXNN_DATA, or a folder in the user's cache."""
    chosen = os.environ.get("MIXNN_DATA")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "mixnn" / "data"


@dataclass(frozen=True)
class DataSet:
    name: str
    title: str
    num_classes: int
    size: int  # of the stored images
    train_size: int  # of the views made from them
    splits: Mapping[str, int]  # number of images in "pretrain", "train" and "test"
    mean: Triple | None  # None: computed from the pre-training images
    std: Triple | None
    read: Callable[[Path, str], Arrays]  # (folder of the layout found, split)
    layouts: tuple[Layout, ...] = ()  # empty: the set is embedded, nothing lies on disk
    archive: Archive | None = None
    mirror: bool = True
    fallback: Callable[[Path], Path] | None = (
        None  # another way to fetch it into a root, when the archive's host is away
    )

    def find(self, root: Path) -> Path | None:
        """The folder that holds all files at their right sizes, or None."""
        for layout in self.layouts:
            if all(wrong_file(root / file, size) is None for file, size in layout.items()):
                return layout_folder(layout, root)
        return None

    def problem(self, root: Path) -> UserError:
        """Why `find` found nothing, and what to type."""
        command = f"mixnn data get {self.name}" + ("" if root == default_root() else f" --data-dir {root}")
        for layout in self.layouts:
            if layout_folder(layout, root).is_dir():
                wrong = [wrong_file(root / file, size) for file, size in layout.items()]
                reason = next(text for text in wrong if text)
                return UserError(f"{reason}\nto fetch it anew, type: {command}")
        looked = ", ".join(str(layout_folder(layout, root)) for layout in self.layouts)
        return UserError(f"{self.name} is not on disk, looked for {looked}\nto fetch it, type: {command}")


def layout_folder(layout: Layout, root: Path) -> Path:
    return root / Path(next(iter(layout))).parts[0]


def wrong_file(path: Path, size: int | None) -> str | None:
    """What is wrong with this file, None if nothing is."""
    if not path.is_file():
        return f"{path} is missing"
    found = path.stat().st_size
    if size is not None and found != size:
        return f"{path} is damaged: {found:,} bytes, expected {size:,}"
    return None


def damaged(name: str, folder: Path, what: str) -> UserError:
    """The error for contents that are wrong where `find` sees nothing wrong: `get` alone would not help."""
    return UserError(f"{what}\nremove {folder} and type: mixnn data get {name}")
