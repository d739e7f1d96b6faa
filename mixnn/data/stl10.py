"""STL-10 (Coates, Ng and Lee 2011): 96 x 96 images, few of them labeled. Pre-training uses train and unlabeled."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mixnn.data.image_set import UNLABELED, Arrays
from mixnn.data.spec import ExpectedFiles, damaged

SIZE = 96
PIXELS = 3 * SIZE * SIZE
FOLDER = "stl10_binary"
BLOCK = 1000  # images that are read at a time
COUNTS = {"train": 5_000, "unlabeled": 100_000, "test": 8_000}
CLASSES = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
PARTS = {"pretrain": ("train", "unlabeled"), "train": ("train",), "test": ("test",)}


def layout(counts: dict[str, int] = COUNTS) -> ExpectedFiles:
    """File names and their sizes in bytes."""
    images = {f"{FOLDER}/{part}_X.bin": count * PIXELS for part, count in counts.items()}
    return images | {f"{FOLDER}/{part}_y.bin": counts[part] for part in ("train", "test")}


def read(folder: Path, split: str) -> Arrays:
    """Read one split. The unlabeled images, some of other classes, get the label -1."""
    counts = {part: (folder / f"{part}_X.bin").stat().st_size // PIXELS for part in PARTS[split]}
    images = np.empty((sum(counts.values()), 3, SIZE, SIZE), np.uint8)
    start = 0
    for part, count in counts.items():
        _read_images(folder, part, images[start : start + count])
        start += count
    labels = [_read_labels(folder, part, count) for part, count in counts.items()]
    return images, np.concatenate(labels), CLASSES


def _read_images(folder: Path, part: str, images: np.ndarray) -> None:
    """Fill the array, some images at a time, so that the 2.8 GB of unlabeled images are not held twice."""
    path = folder / f"{part}_X.bin"
    with open(path, "rb") as file:
        for target in np.split(images, range(BLOCK, len(images), BLOCK)):
            block = np.fromfile(file, np.uint8, target.size)
            if block.size < target.size:
                raise damaged("stl10", folder, f"{path} became shorter while it was read")
            target[:] = block.reshape(target.shape).transpose(0, 1, 3, 2)  # from columns


def _read_labels(folder: Path, part: str, count: int) -> np.ndarray:
    path = folder / f"{part}_y.bin"
    if part == "unlabeled":
        return np.full(count, UNLABELED, np.int64)
    labels = np.fromfile(path, np.uint8).astype(np.int64) - 1  # stored as 1..10
    if labels.min() < 0 or labels.max() >= len(CLASSES):
        raise damaged("stl10", folder, f"{path} is damaged: labels outside 1..{len(CLASSES)}")
    return labels
