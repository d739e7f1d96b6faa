"""Images that an object of the user's gives by index: a torch Dataset, a Hugging Face Dataset, or a list of images.

An item is an image (PIL, array or tensor), a tuple (image, label), or a row with a column for each. Items are read when
they are needed and never all kept, so the object may be larger than memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from mixnn.config import UserError
from mixnn.data.decode import Decoded, FileInfo, reason, to_rgb, upright
from mixnn.data.images import ImageBatch, Images, content_digest, to_image
from mixnn.data.labels import label_text, scalar

IMAGE_COLUMNS = ("image", "img")  # names of columns, the preferred one first
LABEL_COLUMNS = ("label", "labels")
READ_TWICE = 8  # images, because a random flip leaves about half of them as they are
SIDES_SAMPLE = 64  # items that are read to estimate how large the images are
ARRAY_SHAPES = "(M, H, W, 3), (M, 3, H, W) or (M, H, W)"


def uint8_images(images: Any) -> np.ndarray:
    """Images as uint8 [M,3,H,W], from an array or tensor in any of ARRAY_SHAPES. Floats must lie in 0..1.

    Three dimensions of which the last is 3 or 4, or the first 3, are refused: they are more likely one image in color
    than gray images.
    """
    array = images.detach().cpu().numpy() if isinstance(images, Tensor) else np.asarray(images)
    if array.ndim == 3 and (array.shape[2] in (3, 4) or array.shape[0] == 3):
        give = "image[..., :3][None]" if array.shape[2] == 4 and array.shape[0] != 3 else "image[None]"
        gray = "" if array.shape[2] == 3 else "\nif these are gray images, give images[:, None]"
        raise UserError(f"images have the shape {array.shape}, which looks like one image: give {give}{gray}")
    if array.ndim == 4 and array.shape[1] != 3 and (array.shape[3] == 3 or array.shape[1] != 1):
        array = array.transpose(0, 3, 1, 2)
    elif array.ndim == 3:
        array = array[:, None]
    if array.ndim != 4 or array.shape[1] not in (1, 3) or 0 in array.shape[1:]:
        raise UserError(f"images have the shape {np.shape(images)}: give {ARRAY_SHAPES}")
    if array.dtype.kind == "f":
        low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
        if not 0 <= low <= high <= 1:
            raise UserError(
                f"images are {array.dtype} with values from {low:.3g} to {high:.3g}: give uint8, or floats from 0 to 1 "
                "(without normalization, which mixnn does itself)"
            )
        array = np.rint(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise UserError(f"images are {array.dtype}: give uint8, or floats from 0 to 1")
    return np.ascontiguousarray(np.broadcast_to(array, (len(array), 3, *array.shape[2:])))


class ItemInfo(NamedTuple):
    """Properties of an item that was read, or why it could not be read; and its label."""

    info: FileInfo | str
    label: str | None


class Items:
    """A user's object as images and labels by index. `infos` are those of the items read so far."""

    def __init__(self, source: Any) -> None:
        self.source, self.infos = source, dict[int, ItemInfo]()
        if not len(source):
            raise UserError("the data has no images")
        features = getattr(source, "features", None)
        features = features if isinstance(features, Mapping) else {}
        first = source[0]
        self.columns: tuple[str, str] | None = None  # of image and label, if an item is a row
        if isinstance(first, Mapping):
            image = _column("image", [*first], IMAGE_COLUMNS, _of_type(features, "Image"))
            self.columns = image, _column("label", [*first], LABEL_COLUMNS, _of_type(features, "ClassLabel"))
        label = features.get(self.columns[1]) if self.columns else None
        self.has_column_access = bool(features)  # source["label"] gives all labels and decodes no image
        self.classes: Sequence[str] = getattr(label, "names", None) or getattr(source, "classes", None) or ()
        second = first[1] if isinstance(first, tuple | list) and len(first) > 1 else None
        self.has_labels = bool(self.columns[1]) if self.columns else scalar(second) is not None
        self.read(0)  # an error here is told at once; other images that cannot be read are skipped later
        if any(map(self._is_random, range(min(READ_TWICE, len(source))))):
            raise UserError("an image differs each time it is read: leave out random transforms")

    def __len__(self) -> int:
        return len(self.source)

    def _is_random(self, i: int) -> bool:
        """Whether an image differs when it is read again; False if it cannot be read."""
        try:
            return self.read(i).tobytes() != self.read(i).tobytes()
        except Exception:  # of the user's code
            return False

    def _parts(self, item: Any) -> tuple[Any, Any]:
        """Image and label of an item; None for a label that is missing or not a class."""
        if self.columns:
            image, label = item[self.columns[0]], item.get(self.columns[1])
        elif isinstance(item, tuple | list) and item:
            image, label = item[0], item[1] if len(item) > 1 else None
        else:
            image, label = item, None
        return image, label_text(label, self.classes)

    def read(self, i: int) -> Image.Image:
        """The image of an item, upright and in RGB; if it cannot be read, the error that the object raises."""
        label = None
        try:
            value, label = self._parts(self.source[i])
            image, mode = as_image(value)
        except Exception as error:
            self.infos[i] = ItemInfo(reason(error), label)
            raise
        digest = content_digest(np.asarray(image).transpose(2, 0, 1))
        self.infos[i] = ItemInfo(FileInfo(*image.size, mode, digest), label)
        return image

    def info(self, i: int) -> ItemInfo:
        """Properties and label of an item, which is read if it has not been."""
        if i not in self.infos:
            with contextlib.suppress(Exception):  # the ItemInfo says why
                self.read(i)
        return self.infos[i]

    def label(self, i: int) -> str | None:
        if not self.has_labels:
            return None
        return self._label_column[i] if self.has_column_access else self.info(i).label

    @cached_property
    def _label_column(self) -> list[str | None]:
        assert self.columns is not None
        return [label_text(label, self.classes) for label in self.source[self.columns[1]]]


def _of_type(features: Mapping[str, Any], kind: str) -> list[str]:
    """Columns whose feature is of this class; by name, since the package it comes from need not be installed."""
    return [name for name, feature in features.items() if type(feature).__name__ == kind]


def _column(what: str, columns: Sequence[str], names: Sequence[str], typed: Sequence[str]) -> str:
    """The column that holds the image or the label: by its type if that tells, otherwise by its name."""
    if len(typed) == 1:
        return typed[0]
    found = [name for name in names if name in (typed or columns)]
    if not found and what == "image":
        several = f"the columns {', '.join(typed)} hold images" if typed else f"no column of {', '.join(columns)} does"
        raise UserError(f"one column must be called image and hold the images: {several}")
    return found[0] if found else ""


def as_image(value: Any) -> tuple[Image.Image, str]:
    """A PIL image in RGB, and its mode before. Arrays and tensors are one image of ARRAY_SHAPES."""
    if isinstance(value, Mapping) and value.get("bytes"):  # how Hugging Face stores an image that is not decoded
        value = Image.open(io.BytesIO(value["bytes"]))
    if isinstance(value, Image.Image):
        return to_rgb(upright(value)), value.mode
    if isinstance(value, np.ndarray | Tensor):
        return to_image(uint8_images(value[None])[0]), "RGB"
    raise UserError(f"an item is a {type(value).__name__}: give PIL images, arrays or tensors, alone or with a label")


class ItemLabels(Mapping[str, str]):
    """Name -> label of a list of items. The items are read on first use, unless they have been."""

    def __init__(self, items: Items, names: Sequence[str]) -> None:
        self._items, self._names = items, names

    @cached_property
    def _known(self) -> dict[str, str]:
        found = {name: self._items.label(int(name)) for name in self._names}
        return {name: label for name, label in found.items() if label is not None}

    def __getitem__(self, name: str) -> str:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


@dataclass(frozen=True)
class ImageItems(Images):
    """The images of a user's object. A name is the index of an item."""

    items: Items = field(kw_only=True)

    @property
    def has_labels(self) -> bool:
        return self.items.has_labels if isinstance(self.labels, ItemLabels) else bool(self.labels)

    def _labels_of(self, names: Sequence[str]) -> Mapping[str, str]:
        own = isinstance(self.labels, ItemLabels)
        return ItemLabels(self.items, names) if own else super()._labels_of(names)

    def open(self, i: int, min_side: int = 0) -> Image.Image:  # noqa: ARG002  (an object has one size to offer)
        return self.items.read(int(self.names[i]))

    def square(self, i: int, side: int) -> np.ndarray:
        image = ImageOps.fit(self.open(i), (side, side), Image.Resampling.BILINEAR)
        return np.asarray(image).transpose(2, 0, 1)

    def _infos(self, rows: Sequence[int]) -> list[FileInfo | str]:
        return [self.items.info(int(self.names[i])).info for i in rows]

    @cached_property
    def sides(self) -> list[int]:
        infos = self._infos(range(0, len(self), -(-len(self) // SIDES_SAMPLE) or 1))
        return [min(info.width, info.height) for info in infos if isinstance(info, FileInfo)]

    def digest(self, i: int) -> bytes:
        info = self._infos([i])[0]
        return bytes.fromhex(info.digest) if isinstance(info, FileInfo) else b""

    @property
    def has_cheap_signature(self) -> bool:
        return False

    def signature(self) -> list[tuple[str, int, int, int]]:
        parts = [info.digest if isinstance(info, FileInfo) else "" for info in self._infos(range(len(self)))]
        return [(hashlib.sha256(" ".join([*self.names, *parts]).encode()).hexdigest(), len(self), 0, 0)]

    def decoded(self, size: int) -> Decoded:
        """All images that can be read, with the properties of each."""
        return self.decoded_part(size, 0, len(self))

    def decoded_part(self, size: int, start: int, stop: int, forget: bool = False) -> Decoded:
        """Images from `start` to `stop` that can be read. With `forget`, nothing is remembered: they may be many."""
        found = Decoded(self._read(start, stop - start, size).u8, self._infos(range(start, stop)))
        if forget:
            self.items.infos.clear()
        return found

    def _read(self, start: int, count: int, size: int) -> ImageBatch:
        names, skipped = list[str](), list[tuple[str, str]]()
        last = min(start + count, len(self))
        images = np.empty((last - start, 3, size, size), np.uint8)
        for i in range(start, last):
            try:
                images[len(names)] = self.square(i, size)
            except Exception as error:  # a user's object can raise anything
                skipped.append((self.names[i], reason(error)))
            else:
                names.append(self.names[i])
        return ImageBatch(names, images[: len(names)], skipped)
