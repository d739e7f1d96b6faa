"""Images: a list of named images that are decoded only when they are needed.

Every image comes at the size the caller asks for, which for an encoder is the size of its training views. So a file and
an image of a data set are seen at the same size (STL-10 is stored at 96 x 96 pixels and seen at 64 x 64), and can be
compared. `evaluate` follows the paper instead and tests STL-10 at 96.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from PIL import Image, ImageOps

from mixnn.data.decode import Decoded, FileInfo, check_header, decode, decode_all, to_rgb, upright

HEADERS = 500  # files whose headers are read to estimate how large the images are


class ImageBatch(NamedTuple):
    """The images of a batch that could be read, and the names and reasons of those that could not."""

    names: list[str]
    u8: np.ndarray  # (len(names), 3, size, size)
    skipped: list[tuple[str, str]]


@dataclass(frozen=True)
class Images(ABC):
    """Named images, in order."""

    title: str  # where they come from
    names: list[str]
    labels: Mapping[str, str] = field(default_factory=dict)  # name -> class, if the data comes with labels
    skipped: list[tuple[str, str]] = field(default_factory=list)  # files found unreadable while listing, with reasons
    has_splits: bool = False  # the names begin with train/ and test/ (or val/)
    paths: list[Path] = field(default_factory=list)  # the files; empty for images in memory

    def __len__(self) -> int:
        return len(self.names)

    @property
    def short_title(self) -> str:
        """The title without paths, for pages that are shown to others."""
        return ", ".join(Path(part).name for part in self.title.split(", "))

    @cached_property
    def position(self) -> dict[str, int]:
        """Name -> row."""
        return {name: i for i, name in enumerate(self.names)}

    @property
    def path_of(self) -> dict[str, Path]:
        """Name -> file; empty for images in memory."""
        return dict(zip(self.names, self.paths, strict=False))

    def batches(self, batch_size: int, size: int) -> Iterator[ImageBatch]:
        """All images in order, size x size; the next batch is decoded while one is in use."""
        starts = range(0, len(self), batch_size)
        with ThreadPoolExecutor(1) as reader:
            pending = [reader.submit(self._read, start, batch_size, size) for start in starts[:1]]
            for start in starts:
                batch = pending.pop().result()
                if start + batch_size < len(self):
                    pending.append(reader.submit(self._read, start + batch_size, batch_size, size))
                yield batch

    def named(self, names: Collection[str]) -> Self:
        """The images with these names, in this list's order."""
        return self.rows([i for i, name in enumerate(self.names) if name in names])

    def rows(self, index: Sequence[int]) -> Self:
        """The images at these positions, in this order, with their labels."""
        names = [self.names[i] for i in index]
        return replace(self, names=names, labels=self._labels_of(names))

    def _labels_of(self, names: Sequence[str]) -> Mapping[str, str]:
        return {name: self.labels[name] for name in names if name in self.labels}

    @abstractmethod
    def open(self, i: int, min_side: int = 0) -> Image.Image:
        """One image in its full size, upright, RGB; an error if it cannot be read.

        With `min_side`, a large JPEG may be decoded to a smaller size with sides at least that long, which is faster.
        """

    @abstractmethod
    def square(self, i: int, side: int) -> np.ndarray:
        """The center of one image as uint8 [3,side,side], as an encoder sees it; an error if it cannot be read."""

    @property
    @abstractmethod
    def sides(self) -> list[int]:
        """The shorter side of each image, or of an even sample of them."""

    @property
    def typical_side(self) -> int:
        """Median of the shorter sides; 0 if no image can be read."""
        return sorted(self.sides)[len(self.sides) // 2] if self.sides else 0

    @abstractmethod
    def digest(self, i: int) -> bytes:
        """Hash of the content: of the file, or of the pixels in memory; b"" if the file cannot be read."""

    @property
    def has_cheap_signature(self) -> bool:
        """Whether `signature` reads no images that are not in memory."""
        return True

    @abstractmethod
    def signature(self) -> list[tuple[str, int, int, int]]:
        """A value that changes when the images do, so that cached embeddings can be checked on every call."""

    @abstractmethod
    def _read(self, start: int, count: int, size: int) -> ImageBatch: ...


@dataclass(frozen=True)
class ImageFiles(Images):
    """Images in files."""

    def rows(self, index: Sequence[int]) -> Self:
        return replace(super().rows(index), paths=[self.paths[i] for i in index])

    def open(self, i: int, min_side: int = 0) -> Image.Image:
        with Image.open(self.paths[i]) as image:
            check_header(image)
            if min_side:
                image.draft(None, (min_side, min_side))
            return to_rgb(upright(image))

    def square(self, i: int, side: int) -> np.ndarray:
        return decode(self.paths[i], side)

    @cached_property
    def sides(self) -> list[int]:
        sides = []
        for path in self.paths[:: -(-len(self) // HEADERS) or 1]:
            try:
                if not path.is_file():  # a pipe named x.jpg would block
                    continue
                with Image.open(path) as image:
                    sides.append(min(image.size))
            except Exception:  # decoding them all will say which are damaged
                continue
        return sides

    def digest(self, i: int) -> bytes:
        try:
            with open(self.paths[i], "rb") as file:
                return hashlib.file_digest(file, "sha256").digest()
        except OSError:
            return b""

    def signature(self) -> list[tuple[str, int, int, int]]:
        return [(name, *_size_and_times(path)) for name, path in zip(self.names, self.paths, strict=True)]

    def _read(self, start: int, count: int, size: int) -> ImageBatch:
        names = self.names[start : start + count]
        images, reasons = decode_all(self.paths[start : start + count], size)
        kept = [i for i in range(len(names)) if i not in reasons]
        return ImageBatch([names[i] for i in kept], images[kept], [(names[i], why) for i, why in reasons.items()])


@dataclass(frozen=True)
class ImageArrays(Images):
    """Images in memory, all of one size."""

    arrays: np.ndarray = field(default_factory=lambda: np.empty((0, 3, 1, 1), np.uint8))  # [M,3,H,W]
    is_named: bool = False  # the title alone says which images they are

    @property
    def has_labels(self) -> bool:
        return bool(self.labels)

    def rows(self, index: Sequence[int]) -> Self:
        return replace(super().rows(index), arrays=self.arrays[list(index)])

    def open(self, i: int, min_side: int = 0) -> Image.Image:  # noqa: ARG002  (nothing to decode)
        return to_image(self.arrays[i])

    def square(self, i: int, side: int) -> np.ndarray:
        return resized(self.arrays[i : i + 1], side)[0]

    @cached_property
    def sides(self) -> list[int]:
        return [min(self.arrays.shape[2:])]

    def digest(self, i: int) -> bytes:
        return bytes.fromhex(content_digest(self.arrays[i]))

    def signature(self) -> list[tuple[str, int, int, int]]:
        return [(self.title if self.is_named else self._content, len(self), 0, 0)]

    @cached_property
    def _content(self) -> str:
        digest = hashlib.sha256(f"{self.names}".encode())
        digest.update(np.ascontiguousarray(self.arrays).data)
        return digest.hexdigest()

    def decoded(self, size: int) -> Decoded:
        """All images, with the properties of each."""
        height, width = self.arrays.shape[2:]
        infos: list[FileInfo | str] = [FileInfo(width, height, "RGB", content_digest(image)) for image in self.arrays]
        return Decoded(resized(self.arrays, size), infos)

    def _read(self, start: int, count: int, size: int) -> ImageBatch:
        return ImageBatch(self.names[start : start + count], resized(self.arrays[start : start + count], size), [])


def list_files(paths: Sequence[Path]) -> ImageFiles:
    """Single files, named by their paths."""
    names = [str(path) for path in paths]
    return ImageFiles(", ".join(names[:3]), names, paths=list(paths))


def _size_and_times(path: Path) -> tuple[int, int, int]:
    """Size, mtime and ctime of a file; zeros if it is missing, which reading it will report."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def content_digest(image_u8: np.ndarray) -> str:
    """SHA-1 of the size and the pixels of an image [3,H,W]: the same whatever the image came in."""
    digest = hashlib.sha1(f"{image_u8.shape}".encode(), usedforsecurity=False)
    digest.update(np.ascontiguousarray(image_u8).data)
    return digest.hexdigest()


def resized(images_u8: np.ndarray, size: int) -> np.ndarray:
    """Images (n, 3, H, W) as squares of another size, as files with these pixels would be decoded."""
    if images_u8.shape[2:] == (size, size):
        return images_u8
    squares = np.empty((len(images_u8), 3, size, size), np.uint8)
    for i, image_u8 in enumerate(images_u8):
        image = ImageOps.fit(to_image(image_u8), (size, size), Image.Resampling.BILINEAR)
        squares[i] = np.asarray(image).transpose(2, 0, 1)
    return squares


def to_image(image_u8: np.ndarray) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(image_u8.transpose(1, 2, 0)))
