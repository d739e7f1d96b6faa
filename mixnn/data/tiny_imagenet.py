"""Tiny-ImageNet: 200 classes of 64 x 64 JPEG files, in the official zip's layout. The val images are the test set."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mixnn.config import UserError
from mixnn.data.cache import decoded
from mixnn.data.image_set import Arrays
from mixnn.data.spec import ExpectedFiles, damaged

NAME = "tiny-imagenet"
FOLDER = "tiny-imagenet-200"
SIZE = 64
TRAIN_PER_CLASS = 500
VAL_PER_CLASS = 50
LAYOUT: ExpectedFiles = {f"{FOLDER}/{file}": None for file in ("wnids.txt", "words.txt", "val/val_annotations.txt")}


def read(
    folder: Path, split: str, train_per_class: int = TRAIN_PER_CLASS, val_per_class: int = VAL_PER_CLASS
) -> Arrays:
    """Read one split. Classes are numbered in the order of their WordNet ids."""
    ids = sorted(set(_read_text(folder, "wnids.txt").split()))
    if not ids or not all(wnid.isalnum() and wnid.isascii() and len(wnid) < 32 for wnid in ids):
        raise _damaged(folder, f"{folder / 'wnids.txt'} is damaged: expected one id per line, such as n01443537")
    list_files, expected = (_val_files, val_per_class) if split == "test" else (_train_files, train_per_class)
    files, labels = list_files(folder, ids)
    counts = np.bincount(labels, minlength=len(ids)) if labels else np.zeros(len(ids), int)
    for wnid, count in zip(ids, counts, strict=True):
        if count != expected:
            raise _damaged(folder, f"{folder} is damaged: {count} {split} images of class {wnid}, expected {expected}")
    return _read_images(folder, files), np.array(labels, np.int64), _class_names(folder, ids)


def _train_files(folder: Path, ids: list[str]) -> tuple[list[str], list[int]]:
    """File names below the folder, and the class number of each."""
    files: list[str] = []
    labels: list[int] = []
    for i, wnid in enumerate(ids):
        found = sorted(path.name for path in (folder / "train" / wnid / "images").glob("*.JPEG"))
        files += [f"train/{wnid}/images/{name}" for name in found]
        labels += [i] * len(found)
    return files, labels


def _val_files(folder: Path, ids: list[str]) -> tuple[list[str], list[int]]:
    """File names below the folder, and the class number of each, from val_annotations.txt."""
    rank = {wnid: i for i, wnid in enumerate(ids)}
    rows = [line.split("\t") for line in _read_text(folder, "val/val_annotations.txt").splitlines()]
    present = {path.name for path in (folder / "val" / "images").glob("*")}
    if not all(len(row) > 1 and row[0] in present and row[1] in rank for row in rows):
        raise _damaged(folder, f"{folder / 'val' / 'val_annotations.txt'} is damaged")
    return [f"val/images/{row[0]}" for row in rows], [rank[row[1]] for row in rows]


def _class_names(folder: Path, ids: list[str]) -> list[str]:
    """The first synonym that words.txt lists for each id."""
    text = (folder / "words.txt").read_text(encoding="utf-8", errors="replace")
    words = dict(line.partition("\t")[::2] for line in text.splitlines())
    return [words.get(wnid, wnid).split(",")[0] for wnid in ids]


def _read_text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise _damaged(folder, f"{folder / name} is damaged: it is not UTF-8 text") from None


def _read_images(folder: Path, files: list[str]) -> np.ndarray:
    """Decoded images in memory: decoding 100,000 takes a minute, reading them from the cache a second."""
    images, infos = decoded(folder, files, SIZE)
    for file, info in zip(files, infos, strict=True):
        if isinstance(info, str):
            raise _damaged(folder, f"{folder / file} is damaged: {info}")
    return np.asarray(images[:])


def _damaged(folder: Path, problem: str) -> UserError:
    return damaged(NAME, folder, problem)
