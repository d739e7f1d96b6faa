"""Write arrays of images as a folder of image files, which every command can read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mixnn.config import UserError
from mixnn.files import expand


def to_folder(
    images: Any, folder: str | Path, labels: Sequence[int] | np.ndarray | None = None, classes: Sequence[str] = ()
) -> Path:
    """Write uint8 images as PNG files, with one folder per class if there are labels.

    Images are (M, H, W, 3), (M, 3, H, W) or, for gray ones, (M, H, W). `classes` are names for the labels 0, 1, ...
    For a test split, write two folders: to_folder(x, "mine/train", y) and to_folder(x_test, "mine/test", y_test).

    >>> mixnn.data.to_folder(images, "as-files", labels=[0, 1] * 4, classes=["cat", "dog"])
    PosixPath('as-files')
    """
    array, folder = np.asarray(images), expand(folder)
    if array.ndim == 4 and array.shape[3] != 3 and array.shape[1] == 3:
        array = array.transpose(0, 2, 3, 1)
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] != 3):
        raise UserError(
            f"images are {array.dtype} {array.shape}: to_folder takes uint8 (M, H, W, 3), (M, 3, H, W) or (M, H, W)"
        )
    if labels is not None and len(labels) != len(array):
        raise UserError(f"{len(array)} images and {len(labels)} labels: to_folder needs one label per image")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: choose another folder")
    numbers = [0] * len(array) if labels is None else [int(label) for label in labels]
    if labels is not None and classes and not 0 <= min(numbers) <= max(numbers) < len(classes):
        raise UserError(f"labels run from {min(numbers)} to {max(numbers)}, but there are {len(classes)} classes")
    for name in classes:
        if name in ("", ".", "..") or {"/", "\\", "\0"} & set(name):
            raise UserError(f"{name!r} cannot be the name of a folder: rename that class")
        if list(classes).count(name) > 1:
            raise UserError(f"{name!r} is the name of two classes: rename one of them")
    names = {n: "" if labels is None else classes[n] if classes else str(n) for n in set(numbers)}
    for name in names.values():
        (folder / name).mkdir(parents=True, exist_ok=True)
    digits = len(str(len(array)))
    for i, (pixels, number) in enumerate(zip(array, numbers, strict=True)):
        Image.fromarray(pixels).save(folder / names[number] / f"{i:0{digits}}.png")
    return folder
