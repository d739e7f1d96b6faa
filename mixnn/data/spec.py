"""DatasetSpec: one row of the table of named data sets, with its files, its recipe and where to download it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mixnn.config import UserError, on_command_line
from mixnn.data.archive import Archive
from mixnn.data.image_set import Arrays, Triple
from mixnn.files import expand

# File name relative to the root -> its size in bytes, None if any size will do. All files share their first folder.
ExpectedFiles = Mapping[str, int | None]


def default_root() -> Path:
    """Where data sets are kept: $MIXNN_DATA, or a folder in the user's cache."""
    chosen = os.environ.get("MIXNN_DATA")
    return expand(chosen) if chosen else Path.home() / ".cache" / "mixnn" / "data"


def data_root(data_dir: str | Path | None) -> Path:
    """The folder of data sets: the one that was given, or the default."""
    return expand(data_dir) if data_dir else default_root()


@dataclass(frozen=True)
class DatasetSpec:
    """A named data set: its images and splits, how its files are found and read, and its recipe."""

    name: str
    title: str
    num_classes: int
    size: int  # side of the stored images
    train_size: int  # side of the training crops
    splits: Mapping[str, int]  # number of images in "pretrain", "train" and "test"
    mean: Triple | None  # None: computed from the pre-training images
    std: Triple | None
    read: Callable[[Path, str], Arrays]  # (folder of the layout that was found, split)
    layouts: tuple[ExpectedFiles, ...] = ()  # empty: the data set is embedded and needs no files
    archive: Archive | None = None
    mirror: bool = True
    fallback: Callable[[Path], Path] | None = None  # second way to download it, if the archive's host is unreachable
    # Settings that differ from Config's defaults. "options" are for the method, which ignores those it does not have.
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def find(self, root: Path) -> Path | None:
        """The folder that holds all files at their right sizes, or None."""
        for layout in self.layouts:
            if all(wrong_file(root / file, size) is None for file, size in layout.items()):
                return layout_folder(layout, root)
        return None

    def locate(self, root: Path) -> Path:
        """The folder that holds the files; UserError that says how to download them if they are missing."""
        if not self.layouts:
            return root
        folder = self.find(root)
        if folder is None:
            raise self._problem(root)
        return folder

    def _problem(self, root: Path) -> UserError:
        command = how_to_get(self.name, root)
        for layout in self.layouts:
            if layout_folder(layout, root).is_dir():
                wrong = [wrong_file(root / file, size) for file, size in layout.items()]
                reason = next(text for text in wrong if text)
                return UserError(f"{reason}\nto download it again: {command}")
        looked = ", ".join(str(layout_folder(layout, root)) for layout in self.layouts)
        return UserError(f"{self.name} is not on disk (looked for {looked})\nto download it: {command}")


def layout_folder(layout: ExpectedFiles, root: Path) -> Path:
    return root / Path(next(iter(layout))).parts[0]


def wrong_file(path: Path, size: int | None) -> str | None:
    """Describe what is wrong with a file; None if nothing is."""
    if not path.is_file():
        return f"{path} is missing"
    actual = path.stat().st_size
    if size is not None and actual != size:
        return f"{path} is damaged: {actual:,} bytes, expected {size:,}"
    return None


def how_to_get(name: str, root: Path | None = None) -> str:
    """The command that downloads a data set: mixnn data get NAME, or in Python mixnn.data.get(NAME)."""
    where = root if root is not None and root != default_root() else None
    if not on_command_line():
        return f"mixnn.data.get({name!r}" + (f", {str(where)!r})" if where else ")")
    return f"mixnn data get {name}" + (f" --data-dir {shlex.quote(str(where))}" if where else "")


def damaged(name: str, folder: Path, what: str) -> UserError:
    """The error for files with the right sizes and wrong contents, which `get` alone would not replace."""
    return UserError(f"{what}\nremove {folder}, then use: {how_to_get(name)}")
