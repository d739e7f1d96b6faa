"""The images themselves, by their number on the map: thumbnails, sheets of thumbnails for the page, whole images."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from PIL import Image

from mixnn.data.images import Images, to_image

SIDES = (128, 96, 64, 48, 32, 16)  # of thumbnails; multiples of JPEG's blocks, which keep neighbors on a sheet apart
SMALLEST, LARGEST = 8, 256
SHEET = 1024  # side of a sheet
SERVED = 128  # side of thumbnails that a server makes when asked for them
WHOLE = 1600  # longest side of an image as the server gives it
SAMPLE = 128  # images that sizes are estimated from
QUALITY = 85  # of JPEG; on CIFAR-10 as large as WebP of the same error, and faster to read


@dataclass(frozen=True)
class Pictures:
    """The images of a source that are on the map, in its order."""

    source: Images

    @staticmethod
    def of(source: Images, names: list[str]) -> Pictures:
        return Pictures(source.rows([source.position[name] for name in names]))

    def __len__(self) -> int:
        return len(self.source)

    def full_size(self, i: int) -> tuple[bytes, str]:
        """An image as a browser can show it, at most 1600 pixels long, and its media type."""
        image = self.source.open(i)
        small = max(image.size) <= SERVED
        image.thumbnail((WHOLE, WHOLE))
        return encode(image, "PNG" if small else "JPEG")

    def thumb(self, i: int, side: int) -> tuple[bytes, str]:
        """The centre of an image, side x side, as the encoder saw it."""
        return encode(to_image(self.source.square(i, side)), self.kind)

    @property
    def kind(self) -> str:
        """Tiny images lose too much as JPEG, and take little as PNG."""
        return "PNG" if self.native_side <= SIDES[-1] else "JPEG"

    @cached_property
    def native_side(self) -> int:
        """The side that thumbnails need to show every pixel; from a sample."""
        return max(self.source.sides, default=SMALLEST)

    def _sample(self) -> list[int]:
        return np.unique(np.linspace(0, len(self) - 1, SAMPLE).astype(int)).tolist()

    def _squares(self, index: list[int], side: int) -> np.ndarray:
        """uint8 (len(index), 3, side, side); gray where an image can no longer be read."""
        part = Pictures.of(self.source, [self.source.names[i] for i in index]).source
        squares = np.full((len(index), 3, side, side), 128, np.uint8)
        row = {name: k for k, name in enumerate(part.names)}
        for batch in part.batches(max(1, len(index)), side):
            for name, image in zip(batch.names, batch.u8, strict=True):
                squares[row[name]] = image
        return squares[[row[name] for name in part.names]]  # a file may have been given twice

    def sheets(
        self, order: np.ndarray, side: int, advance: Callable[[int], None] = lambda _: None
    ) -> Iterator[tuple[bytes, str]]:
        """Sheets of thumbnails in the order given, row by row, as image files with their media types."""
        across = SHEET // side
        for start in range(0, len(order), across * across):
            chosen = order[start : start + across * across].tolist()
            yield sheet(self._squares(chosen, side), across, self.kind)
            advance(start + len(chosen))

    def bytes_an_image(self, side: int) -> float:
        """What a thumbnail takes on a sheet; from a sample."""
        sample = self._sample()
        return len(sheet(self._squares(sample, side), 16, self.kind)[0]) / len(sample)

    def fitting_side(self, budget: float) -> int:
        """The largest useful side with which all thumbnails fit into a budget of bytes; 0 where none does."""
        native = self.native_side
        enough = min((side for side in SIDES if side >= native), default=SIDES[0])
        for side in SIDES if native >= SIDES[-1] else (max(native, SMALLEST),):
            if side <= enough and self.bytes_an_image(side) * len(self) <= budget:
                return side
        return 0


def sheet(squares: np.ndarray, across: int, kind: str) -> tuple[bytes, str]:
    """(n, 3, side, side) side by side, `across` in a row."""
    count, _, side, _ = squares.shape
    down = -(-count // across)
    full = np.zeros((down * across, 3, side, side), np.uint8)
    full[:count] = squares
    rows = full.reshape(down, across, 3, side, side).transpose(2, 0, 3, 1, 4).reshape(3, down * side, across * side)
    return encode(to_image(rows), kind)


def encode(image: Image.Image, kind: str) -> tuple[bytes, str]:
    out = io.BytesIO()
    image.save(out, kind, **({"quality": QUALITY} if kind == "JPEG" else {}))
    return out.getvalue(), f"image/{kind.lower()}"


def along_the_map(points: np.ndarray) -> np.ndarray:
    """The order of a walk on which near points come near each other (Morton's): a view then needs few sheets."""
    cell = np.clip((points + 1) * 512, 0, 1023).astype(np.uint32)
    code = np.zeros(len(points), np.uint32)
    for bit in range(10):
        for axis in range(2):
            code |= ((cell[:, axis] >> bit) & 1) << np.uint32(2 * bit + axis)
    return np.argsort(code, kind="stable")


def cached(pictures: Pictures, side: int) -> Callable[[int], tuple[bytes, str]]:
    """Thumbnails by number, the last few thousand kept."""
    return lru_cache(maxsize=4096)(lambda i: pictures.thumb(i, side))
