"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), read from the binary or from the Python version of the official files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mixnn.data.array_pickle import Refused, load_arrays
from mixnn.data.image_set import Arrays
from mixnn.data.spec import ExpectedFiles, damaged

SIZE = 32
PIXELS = 3 * SIZE * SIZE  # bytes per image: red plane, green plane, blue plane
MAX_PICKLE = 2**29  # bytes; the largest file has 155 million


@dataclass(frozen=True)
class Cifar:
    """File names and record format of CIFAR-10 or CIFAR-100."""

    name: str
    num_classes: int
    binary: str  # folder of the binary layout
    python: str  # folder of the python layout
    files: Mapping[str, Mapping[str, int]]  # split -> file stem -> number of images
    label_bytes: int  # number of bytes before the pixels of a record; the last one is the label
    label_key: bytes
    names_binary: str
    names_python: str
    names_key: bytes

    @property
    def layouts(self) -> tuple[ExpectedFiles, ExpectedFiles]:
        files = {stem: count for split in self.files.values() for stem, count in split.items()}
        binary = {f"{self.binary}/{stem}.bin": count * (self.label_bytes + PIXELS) for stem, count in files.items()}
        return binary, {f"{self.python}/{stem}": None for stem in files}


CIFAR10 = Cifar(
    name="cifar10",
    num_classes=10,
    binary="cifar-10-batches-bin",
    python="cifar-10-batches-py",
    files={"train": {f"data_batch_{i}": 10_000 for i in range(1, 6)}, "test": {"test_batch": 10_000}},
    label_bytes=1,
    label_key=b"labels",
    names_binary="batches.meta.txt",
    names_python="batches.meta",
    names_key=b"label_names",
)
CIFAR100 = Cifar(
    name="cifar100",
    num_classes=100,
    binary="cifar-100-binary",
    python="cifar-100-python",
    files={"train": {"train": 50_000}, "test": {"test": 10_000}},
    label_bytes=2,  # coarse, fine
    label_key=b"fine_labels",
    names_binary="fine_label_names.txt",
    names_python="meta",
    names_key=b"fine_label_names",
)


def read(spec: Cifar, folder: Path, split: str) -> Arrays:
    """Read one split from the folder of either layout. Pre-training uses the training images."""
    files = spec.files["test" if split == "test" else "train"]
    read_file = _read_binary if folder.name == spec.binary else _read_python
    images, labels = zip(*(read_file(spec, folder, stem, count) for stem, count in files.items()), strict=True)
    all_labels = np.concatenate(labels).astype(np.int64)
    if all_labels.min() < 0 or all_labels.max() >= spec.num_classes:
        raise damaged(spec.name, folder, f"{folder} is damaged: labels outside 0..{spec.num_classes - 1}")
    return np.concatenate(images).reshape(-1, 3, SIZE, SIZE), all_labels, _class_names(spec, folder)


def _read_binary(spec: Cifar, folder: Path, stem: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    records = np.fromfile(folder / f"{stem}.bin", np.uint8).reshape(count, spec.label_bytes + PIXELS)
    return records[:, spec.label_bytes :], records[:, spec.label_bytes - 1]


def _read_python(spec: Cifar, folder: Path, stem: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    batch = _unpickle(spec, folder, stem)
    images, labels = batch.get(b"data"), batch.get(spec.label_key)
    if not isinstance(images, np.ndarray) or images.shape != (count, PIXELS):
        raise damaged(spec.name, folder, f"{folder / stem} is damaged: expected {count:,} images of {PIXELS} bytes")
    if not isinstance(labels, list) or len(labels) != count or not all(type(label) is int for label in labels):
        raise damaged(spec.name, folder, f"{folder / stem} is damaged: expected {count:,} labels")
    if not all(0 <= label < spec.num_classes for label in labels):  # before numpy, which takes 64 bits
        raise damaged(spec.name, folder, f"{folder / stem} is damaged: labels outside 0..{spec.num_classes - 1}")
    return images, np.array(labels)


def _unpickle(spec: Cifar, folder: Path, stem: str) -> dict[bytes, Any]:
    size = (folder / stem).stat().st_size
    if size > MAX_PICKLE:
        raise damaged(spec.name, folder, f"{folder / stem} is damaged: {size:,} bytes")
    try:
        return load_arrays((folder / stem).read_bytes())
    except Refused as error:
        raise damaged(spec.name, folder, f"{folder / stem} was refused: it contains {error}") from error


def _class_names(spec: Cifar, folder: Path) -> list[str]:
    """Class names from the file next to the images; numbers if that file is missing or incomplete."""
    names: list[str] = []
    if (folder / spec.names_binary).is_file():
        names = (folder / spec.names_binary).read_text(errors="replace").split()
    elif (folder / spec.names_python).is_file():
        listed = _unpickle(spec, folder, spec.names_python).get(spec.names_key)
        names = [
            name.decode(errors="replace") if isinstance(name, bytes) else str(name)
            for name in (listed if isinstance(listed, list) else [])
        ]
    return names if len(names) == spec.num_classes else [str(i) for i in range(spec.num_classes)]
