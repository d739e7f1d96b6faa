"""The image files below a folder, in the order a person would list them, and the split each belongs to."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from mixnn.config import UserError

EXTENSIONS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"}
# pictures as well, but of kinds that are not read
UNREAD = {".heic", ".heif", ".avif", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2"}
TEST_FOLDERS = ("test", "val")  # the first that stands beside train/ holds the test images


@dataclass(frozen=True)
class Listing:
    """Names relative to the folder; `test` is "" where the folder is not divided into train/ and test/ (or val/)."""

    folder: Path
    test: str
    training: list[str]
    testing: list[str]
    skipped: list[tuple[str, str]]  # (name, reason)

    def names(self, split: str) -> list[str]:
        """The names of this split, never empty."""
        if split == "test" and not self.test:
            hint = f"make the folders {self.folder}/train and {self.folder}/test, and train with --labels"
            raise UserError(f"{self.folder} has no test images\nto provide some, {hint}")
        names = self.testing if split == "test" else self.training
        if not names:
            place = self.folder / ("" if not self.test else self.test if split == "test" else "train")
            endings = " ".join(sorted(EXTENSIONS))
            raise UserError(f"no images in {place}\ngive a folder with files that end in {endings}")
        return names


def list_splits(folder: Path) -> Listing:
    """All images, or those below train/ and test/ (or val/) where both exist."""
    names, skipped = list_images(folder)
    for test in TEST_FOLDERS:
        if (folder / "train").is_dir() and (folder / test).is_dir():
            training = [name for name in names if name.startswith("train/")]
            testing = [name for name in names if name.startswith(f"{test}/")]
            return Listing(folder, test, training, testing, skipped)
    return Listing(folder, "", names, [], skipped)


def list_images(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Names in natural order, and pictures that cannot be taken with the reason. What is hidden is left out."""
    names: list[str] = []
    skipped: list[tuple[str, str]] = []
    visited: set[tuple[int, int]] = set()

    def fail(error: OSError) -> None:
        skipped.append((printable(relative(Path(error.filename), folder)), error.strerror or "cannot be read"))

    for place, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        # links are followed, but no folder is entered twice: neither a loop nor a second link can repeat images
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=natural_key)
        for file in files:
            ending = "" if file.startswith(".") else Path(file).suffix.lower()
            if ending in EXTENSIONS:
                names.append(relative(Path(place, file), folder))
            elif ending in UNREAD:
                name = printable(relative(Path(place, file), folder))
                skipped.append((name, f"{ending} is not read: convert it to JPEG or PNG"))
    skipped += [(printable(name), "its name is not valid Unicode") for name in names if printable(name) != name]
    return sorted((name for name in names if printable(name) == name), key=natural_key), skipped


def natural_key(name: str) -> tuple[list[str | int], str]:
    """2.png before 10.png; upper and lower case together."""
    parts = re.split(r"([0-9]+)", name.casefold())
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name


def relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def printable(name: str) -> str:
    """The name without the surrogates that stand for undecodable bytes: no terminal, CSV or JSON file takes those."""
    return name.encode("utf-8", "backslashreplace").decode()
