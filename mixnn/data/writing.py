"""Write arrays of images as a folder of image files, which every command can read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mixnn.config import UserError
from mixnn.data.images import to_image
from mixnn.data.items import uint8_images
from mixnn.files import expand


def to_folder(
    images: Any, folder: str | Path, labels: Sequence[int] | np.ndarray | None = None, classes: Sequence[str] = ()
) -> Path:
    """Write images as PNG files, with one folder per class if there are labels.

    Images are uint8, or floats from 0 to 1: (M, H, W, 3), (M, 3, H, W) or, for gray ones, (M, H, W). `classes` are the
    names of the labels 0, 1, ... Images with the label -1 (unknown) go next to the class folders. For a test split,
    write two folders: to_folder(x, "mine/train", y) and to_folder(x_test, "mine/test", y_test).

    >>> mixnn.data.to_folder(images, "as-files", labels=[0, 1] * 4, classes=["cat", "dog"])
    PosixPath('as-files')
    """
    array, folder = uint8_images(images), expand(folder)
    if not len(array):
        raise UserError("there are no images to write")
    if labels is not None and len(labels) != len(array):
        raise UserError(f"{len(array)} images and {len(labels)} labels: to_folder needs one label per image")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: choose another folder")
    numbers = [-1] * len(array) if labels is None else [int(label) for label in labels]
    if min(numbers) < -1:
        raise UserError(f"a label is {min(numbers)}: give -1 if it is unknown, or a number from 0")
    if classes and max(numbers) >= len(classes):
        raise UserError(f"labels run to {max(numbers)}, but there are {len(classes)} classes")
    for name in classes:
        if name in ("", ".", "..") or {"/", "\\", "\0"} & set(name):
            raise UserError(f"{name!r} cannot be the name of a folder: rename that class")
        if list(classes).count(name) > 1:
            raise UserError(f"{name!r} is the name of two classes: rename one of them")
    names = {n: "" if n == -1 else classes[n] if classes else str(n) for n in set(numbers)}
    for name in names.values():
        (folder / name).mkdir(parents=True, exist_ok=True)
    digits, is_gray = len(str(len(array))), bool((array == array[:, :1]).all())
    for i, (pixels, number) in enumerate(zip(array, numbers, strict=True)):
        image = Image.fromarray(pixels[0]) if is_gray else to_image(pixels)
        image.save(folder / names[number] / f"{i:0{digits}}.png")
    return folder
