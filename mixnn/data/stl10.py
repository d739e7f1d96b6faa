"""STL-10 (Coates, Ng and Lee 2011): 96 x 96 images, few of them labeled. Pre-training uses train and unlabeled."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mixnn.data.image_set import UNLABELLED, Arrays
from mixnn.data.spec import Layout, damaged

SIZE = 96
PIXELS = 3 * SIZE * SIZE
FOLDER = "stl10_binary"
COUNTS = {"train": 5_000, "unlabeled": 100_000, "test": 8_000}
CLASSES = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
PARTS = {"pretrain": ("train", "unlabeled"), "train": ("train",), "test": ("test",)}


def layout(counts: dict[str, int] = COUNTS) -> Layout:
    """File names and their sizes in bytes."""
    images = {f"{FOLDER}/{part}_X.bin": count * PIXELS for part, count in counts.items()}
    return images | {f"{FOLDER}/{part}_y.bin": counts[part] for part in ("train", "test")}


def read(folder: Path, split: str) -> Arrays:
    """Read one split. The unlabeled images, some of other classes, get the label -1."""
    stored = [np.memmap(folder / f"{part}_X.bin", np.uint8, mode="r").reshape(-1, PIXELS) for part in PARTS[split]]
    images = np.empty((sum(map(len, stored)), 3, SIZE, SIZE), np.uint8)
    start = 0
    for part in stored:  # copied part by part, so that the 2.8 GB of unlabeled images are not held twice
        images[start : start + len(part)] = part.reshape(-1, 3, SIZE, SIZE).transpose(0, 1, 3, 2)  # from columns
        start += len(part)
    labels = [_read_labels(folder, part, len(x)) for part, x in zip(PARTS[split], stored, strict=True)]
    return images, np.concatenate(labels), CLASSES


def _read_labels(folder: Path, part: str, count: int) -> np.ndarray:
    path = folder / f"{part}_y.bin"
    if part == "unlabeled":
        return np.full(count, UNLABELLED, np.int64)
    labels = np.fromfile(path, np.uint8).astype(np.int64) - 1  # stored as 1..10
    if labels.min() < 0 or labels.max() >= len(CLASSES):
        raise damaged("stl10", folder, f"{path} is damaged: labels outside 1..{len(CLASSES)}")
    return labels
