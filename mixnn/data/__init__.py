"""Data sets: `load(name or folder, split)` gives an ImageSet; `DATASETS` is the table of the named ones.

To add a set: one reader file that returns arrays, and one row here. A user's own images need no code; `to_folder`
makes a folder of arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mixnn.config import UserError, unknown
from mixnn.data import cifar, digits, npm, stl10, tiny_imagenet
from mixnn.data.archive import Archive
from mixnn.data.data_set import DataSet, default_root
from mixnn.data.folder import read_folder
from mixnn.data.image_set import ImageSet, channel_stats
from mixnn.data.writing import to_folder

__all__ = ["DATASETS", "SPLITS", "DataSet", "ImageSet", "Presence", "default_root", "describe", "load", "to_folder"]

SPLITS = (
    "pretrain",
    "train",
    "test",
)  # all images for self-supervised training; the labelled ones for probes; the held-out ones

_ROWS = (
    DataSet(
        name="cifar10",
        title="CIFAR-10",
        num_classes=10,
        size=32,
        train_size=32,
        splits={"pretrain": 50_000, "train": 50_000, "test": 10_000},
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        read=partial(cifar.read, cifar.CIFAR10),
        layouts=cifar.CIFAR10.layouts,
        archive=Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            cifar.CIFAR10.binary,
        ),
        fallback=npm.cifar10,
    ),
    DataSet(
        name="cifar100",
        title="CIFAR-100",
        num_classes=100,
        size=32,
        train_size=32,
        splits={"pretrain": 50_000, "train": 50_000, "test": 10_000},
        mean=(0.5071, 0.4867, 0.4408),
        std=(0.2675, 0.2565, 0.2761),
        read=partial(cifar.read, cifar.CIFAR100),
        layouts=cifar.CIFAR100.layouts,
        archive=Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            cifar.CIFAR100.binary,
        ),
    ),
    DataSet(
        name="stl10",
        title="STL-10",
        num_classes=10,
        size=96,
        train_size=64,
        splits={"pretrain": 105_000, "train": 5_000, "test": 8_000},
        mean=(0.4408, 0.4279, 0.3867),
        std=(0.2682, 0.2610, 0.2686),
        read=stl10.read,
        layouts=(stl10.layout(),),
        archive=Archive(
            "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
            "91f7769df0f17e558f3565bffb0c7dfb",
            stl10.FOLDER,
        ),
    ),
    DataSet(
        name="tiny-imagenet",
        title="Tiny-ImageNet",
        num_classes=200,
        size=64,
        train_size=64,
        splits={"pretrain": 100_000, "train": 100_000, "test": 10_000},
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2302, 0.2265, 0.2262),
        read=tiny_imagenet.read,
        layouts=(tiny_imagenet.LAYOUT,),
        archive=Archive(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "90528d7ca1a48142e341f4ef8d21d0de",
            tiny_imagenet.FOLDER,
        ),
    ),
    DataSet(
        name="digits",
        title="handwritten digits, embedded",
        num_classes=10,
        size=8,
        train_size=8,
        splits={"pretrain": 1_297, "train": 1_297, "test": 500},
        mean=None,
        std=None,
        read=digits.read,
        mirror=False,
    ),
)
DATASETS: dict[str, DataSet] = {row.name: row for row in _ROWS}


@dataclass(frozen=True)
class Presence:
    """A data set and where it was found."""

    row: DataSet
    present: bool
    where: Path | None  # None when absent or embedded

    def cells(self) -> tuple[str, ...]:
        """name, title, images (pre-training + test), classes, side, where: a row of `mixnn data`."""
        where = (
            str(self.where) if self.where else "embedded" if self.present else f"absent: mixnn data get {self.row.name}"
        )
        images = " + ".join(f"{self.row.splits[split]:,}" for split in ("pretrain", "test"))
        return self.row.name, self.row.title, images, str(self.row.num_classes), str(self.row.size), where


def load(name_or_path: str | Path, split: str, root: Path | None = None, **folder_options: Any) -> ImageSet:
    """One split of a named data set below root, or of an image folder; the options are those of `read_folder`."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name in DATASETS:
        if folder_options:
            raise UserError(f"{', '.join(folder_options)}: only for image folders, {name} has its own")
        return load_named(DATASETS[name], split, root or default_root())
    if path.is_dir():
        return read_folder(path, split, **folder_options)
    if path.exists():
        raise UserError(f"{path} is a file\ngive the folder that holds the images, or one of: {', '.join(DATASETS)}")
    raise not_found(name)


def not_found(name: str) -> UserError:
    """The error for what is neither a data set nor a folder."""
    if Path(name).name != name:  # a path: nobody writes a data set's name like that
        return UserError(f"there is no folder {name}\ngive a folder of images, or one of: {', '.join(DATASETS)}")
    return UserError(f"{unknown('data set or folder', name, DATASETS)}, or a folder of images (see: mixnn data)")


def locate(row: DataSet, root: Path) -> Path:
    """The folder that holds a named set; UserError that says how to get it where it is not on disk."""
    folder = row.find(root) if row.layouts else root
    if folder is None:
        raise row.problem(root)
    return folder


def load_named(row: DataSet, split: str, root: Path) -> ImageSet:
    folder = locate(row, root)
    images, labels, classes = row.read(folder, split)
    mean, std = row.mean, row.std
    if mean is None or std is None:
        training = images if split == "pretrain" else row.read(folder, "pretrain")[0]
        mean, std = channel_stats(torch.from_numpy(training))
    return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), None, classes, mean, std, row.mirror)


def describe(root: Path | None = None) -> list[Presence]:
    """Every named data set and whether it is on disk."""
    found = [(row, row.find(root or default_root())) for row in DATASETS.values()]
    return [Presence(row, present=where is not None or not row.layouts, where=where) for row, where in found]
