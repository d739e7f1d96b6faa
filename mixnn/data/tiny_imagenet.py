"""Tiny-ImageNet: 200 classes of 64 x 64 JPEGs, in the official zip's layout. Its val images serve as the test set."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mixnn.config import UserError
from mixnn.data.decode import decode_all
from mixnn.data.image_set import Arrays
from mixnn.data.spec import Layout, damaged

NAME = "tiny-imagenet"
FOLDER = "tiny-imagenet-200"
SIZE = 64
TRAIN_PER_CLASS = 500
VAL_PER_CLASS = 50
LAYOUT: Layout = {f"{FOLDER}/{file}": None for file in ("wnids.txt", "words.txt", "val/val_annotations.txt")}


def read(
    folder: Path, split: str, train_per_class: int = TRAIN_PER_CLASS, val_per_class: int = VAL_PER_CLASS
) -> Arrays:
    """One split; the class number is the rank of the sorted WordNet id."""
    ids = sorted((folder / "wnids.txt").read_text().split())
    list_files, expected = (val_files, val_per_class) if split == "test" else (train_files, train_per_class)
    files, labels = list_files(folder, ids)
    counts = np.bincount(labels, minlength=len(ids)) if labels else np.zeros(len(ids), int)
    for wnid, count in zip(ids, counts, strict=True):
        if count != expected:
            raise broken(folder, f"{folder} is damaged: {count} {split} images of class {wnid}, expected {expected}")
    return (
        cached_images(folder, files, "val" if split == "test" else "train"),
        np.array(labels, np.int64),
        class_names(folder, ids),
    )


def train_files(folder: Path, ids: list[str]) -> tuple[list[Path], list[int]]:
    found = [
        (path, i) for i, wnid in enumerate(ids) for path in sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
    ]
    return [path for path, _ in found], [i for _, i in found]


def val_files(folder: Path, ids: list[str]) -> tuple[list[Path], list[int]]:
    rank = {wnid: i for i, wnid in enumerate(ids)}
    rows = [line.split("\t") for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()]
    if not all(len(row) > 1 and row[1] in rank for row in rows):
        raise broken(folder, f"{folder / 'val' / 'val_annotations.txt'} is damaged")
    return [folder / "val" / "images" / row[0] for row in rows], [rank[row[1]] for row in rows]


def class_names(folder: Path, ids: list[str]) -> list[str]:
    """The first of the synonyms that words.txt lists for each id."""
    words = dict(line.partition("\t")[::2] for line in (folder / "words.txt").read_text().splitlines())
    return [words.get(wnid, wnid).split(",")[0] for wnid in ids]


def cached_images(folder: Path, files: Sequence[Path], part: str) -> np.ndarray:
    """The decoded images, kept beside the JPEGs: decoding 100,000 takes a minute, reading the array a second."""
    cache = folder / f"mixnn-{part}-{SIZE}.npy"
    shape = (len(files), 3, SIZE, SIZE)
    try:
        images = np.load(cache, allow_pickle=False)
        if images.shape == shape and images.dtype == np.uint8:
            return images
    except (OSError, ValueError, EOFError):
        pass  # absent or cut short: made anew
    images, reasons = decode_all(files, SIZE)
    for i, reason in reasons.items():
        raise broken(folder, f"{files[i]} is damaged: {reason}")
    keep(images, cache)
    return images


def keep(images: np.ndarray, cache: Path) -> None:
    """Renamed into place when complete, so a run that is killed or runs beside this one never leaves half a file."""
    part = cache.with_suffix(f".{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            np.save(file, images, allow_pickle=False)
        os.replace(part, cache)
    except OSError:  # a read-only or full disk costs the next run a minute, nothing else
        with contextlib.suppress(OSError):
            part.unlink()


def broken(folder: Path, what: str) -> UserError:
    return damaged(NAME, folder, what)
