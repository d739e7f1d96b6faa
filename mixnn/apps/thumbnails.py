"""Thumbnails for web pages: images encoded for a browser, one by one or many on a sheet.

preview(images, 0, longest=192).data_uri      one image, for an <img> element
sheet(tiles_u8, columns=20).data_uri          many square images in one picture
Thumbnails(images).sheets(order, side=64)     all images of a source on sheets, read as they are needed
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from PIL import Image

from mixnn.data.images import Images, to_image

SIDES = (128, 96, 64, 48, 32, 16)  # multiples of JPEG's blocks, so that neighbors on a sheet do not bleed
MIN_SIDE, MAX_SIDE = 8, 256
SHEET = 1024  # side of a sheet in pixels; the explore page relies on it
SAMPLE = 128  # images from which the size of a sheet is estimated
QUALITY = 85  # of JPEG; on CIFAR-10 as large as WebP at the same error, and faster to decode


class Encoded(NamedTuple):
    """An image file in memory."""

    data: bytes
    media_type: str

    @property
    def lossless(self) -> bool:
        return self.media_type == "image/png"

    @property
    def base64(self) -> str:
        return base64.b64encode(self.data).decode()

    @property
    def data_uri(self) -> str:
        return f"data:{self.media_type};base64,{self.base64}"


def encode(image: Image.Image, lossless: bool) -> Encoded:
    """The image as PNG (lossless) or JPEG."""
    file = io.BytesIO()
    if lossless:
        image.save(file, "PNG", optimize=True)
        return Encoded(file.getvalue(), "image/png")
    image.save(file, "JPEG", quality=QUALITY)
    return Encoded(file.getvalue(), "image/jpeg")


def preview(images: Images, i: int, longest: int, lossless_up_to: int = 64) -> Encoded:
    """One image with its aspect ratio, at most `longest` pixels long; an error if it cannot be read.

    Images whose longer side is at most `lossless_up_to` become PNG, all others JPEG.
    """
    image = images.open(i, min_side=2 * longest)
    lossless = max(image.size) <= lossless_up_to
    image.thumbnail((longest, longest))
    return encode(image, lossless)


def sheet(tiles_u8: np.ndarray, columns: int, lossless: bool = True) -> Encoded:
    """Square tiles (n, 3, side, side), row by row on one picture; unused places stay black."""
    count, _, side, _ = tiles_u8.shape
    rows = -(-count // columns)
    places = np.zeros((rows * columns, 3, side, side), np.uint8)
    places[:count] = tiles_u8
    grid = places.reshape(rows, columns, 3, side, side).transpose(2, 0, 3, 1, 4)
    return encode(to_image(grid.reshape(3, rows * side, columns * side)), lossless)


@dataclass(frozen=True)
class Thumbnails:
    """Square thumbnails of a list of images, by position."""

    images: Images

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def native_side(self) -> int:
        """The side at which a thumbnail shows every pixel of the largest image; from a sample."""
        return max(self.images.sides, default=MIN_SIDE)

    @property
    def lossless(self) -> bool:
        """Whether to use PNG: tiny images lose too much as JPEG, and are small as PNG."""
        return self.native_side <= SIDES[-1]

    def square(self, i: int, side: int) -> Encoded:
        """The center of an image, as the encoder sees it; an error if it cannot be read."""
        return encode(to_image(self.images.square(i, side)), self.lossless)

    def sheets(
        self, order: np.ndarray, side: int, advance: Callable[[int], None] = lambda _: None
    ) -> Iterator[Encoded]:
        """Sheets of at most 1024 x 1024 pixels, with the thumbnails in this order, row by row."""
        columns = SHEET // side
        for start in range(0, len(order), columns * columns):
            index = order[start : start + columns * columns].tolist()
            yield sheet(self._tiles(index, side), columns, self.lossless)
            advance(start + len(index))

    def bytes_per_image(self, side: int) -> float:
        """Average size of a thumbnail on a sheet, estimated from a sample."""
        sample = np.unique(np.linspace(0, len(self) - 1, SAMPLE).astype(int)).tolist()
        return len(sheet(self._tiles(sample, side), 16, self.lossless).data) / len(sample)

    def largest_side(self, budget: float) -> int:
        """The largest useful side at which all thumbnails fit into this many bytes; 0 if none does."""
        native = self.native_side
        enough = min((side for side in SIDES if side >= native), default=SIDES[0])
        for side in SIDES if native >= SIDES[-1] else (max(native, MIN_SIDE),):
            if side <= enough and self.bytes_per_image(side) * len(self) <= budget:
                return side
        return 0

    def _tiles(self, index: list[int], side: int) -> np.ndarray:
        """uint8 (len(index), 3, side, side); gray where an image can no longer be read."""
        part = self.images.rows(index)
        tiles = np.full((len(index), 3, side, side), 128, np.uint8)
        row = {name: k for k, name in enumerate(part.names)}
        for batch in part.batches(max(1, len(index)), side):
            for name, image in zip(batch.names, batch.u8, strict=True):
                tiles[row[name]] = image
        return tiles[[row[name] for name in part.names]]  # a file may have been given twice
