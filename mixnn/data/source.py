"""Where images to embed come from: a folder, single files, or a data set; decoded in batches, the next one ahead.

Every image comes at the size asked for, which is the encoder's own, a data set's too: STL-10's images of 96 x 96 pixels
and a file are then both seen at 64 x 64, the size of the training views, and like is compared with like. (The paper
tests STL-10 at 96, and so does `evaluate`.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from mixnn import data
from mixnn.config import UserError
from mixnn.data.decode import decode_all
from mixnn.data.listing import EXTENSIONS, list_images


class Images(NamedTuple):
    """A batch: images that could be read, and the names of all."""

    names: list[str]
    u8: np.ndarray  # (len(names), 3, size, size)
    skipped: list[tuple[str, str]]  # names and reasons of those that could not


@dataclass(frozen=True)
class Source:
    """Named images, read when asked for."""

    title: str
    names: list[str]
    paths: list[Path] = field(default_factory=list)
    arrays: np.ndarray | None = None  # a data set's images, as they are
    labels: dict[str, str] = field(default_factory=dict)  # by name; a data set's own
    skipped: list[tuple[str, str]] = field(default_factory=list)  # found unreadable while listing

    def __len__(self) -> int:
        return len(self.names)

    def batches(self, batch_size: int, size: int) -> Iterator[Images]:
        """In order; while one batch is used, the next is being decoded."""
        starts = range(0, len(self), batch_size)
        with ThreadPoolExecutor(1) as ahead:
            coming = [ahead.submit(self._read, start, batch_size, size) for start in starts[:1]]
            for start in starts:
                batch = coming.pop().result()
                if start + batch_size < len(self):
                    coming.append(ahead.submit(self._read, start + batch_size, batch_size, size))
                yield batch

    def _read(self, start: int, count: int, size: int) -> Images:
        names = self.names[start : start + count]
        if self.arrays is not None:
            return Images(names, resized(self.arrays[start : start + count], size), [])
        images, reasons = decode_all(self.paths[start : start + count], size)
        kept = [i for i in range(len(names)) if i not in reasons]
        return Images([names[i] for i in kept], images[kept], [(names[i], why) for i, why in reasons.items()])

    @property
    def short_title(self) -> str:
        """Without the folders it lies in: a page may be shown to others."""
        return ", ".join(Path(part).name for part in self.title.split(", "))

    def only(self, names: Collection[str]) -> Source:
        """Those of these names, in the order of the source."""
        rows = [i for i, name in enumerate(self.names) if name in names]
        paths = [self.paths[i] for i in rows] if self.paths else []
        return Source(
            self.title, [self.names[i] for i in rows], paths, None if self.arrays is None else self.arrays[rows]
        )

    def signature(self) -> list[tuple[str, int, int, int]]:
        """What tells whether the images are still the same: names, and files' sizes and times."""
        if self.arrays is not None:
            return [(self.title, len(self), 0, 0)]
        return [(name, *_size_and_times(path)) for name, path in zip(self.names, self.paths, strict=True)]


def _size_and_times(path: Path) -> tuple[int, int, int]:
    """Zeros of a link that leads nowhere, or a file that is gone: reading it will say so."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def resized(images_u8: np.ndarray, size: int) -> np.ndarray:
    """(n, 3, H, W), H = W, as files of these pixels would be decoded."""
    if images_u8.shape[2:] == (size, size):
        return images_u8
    images = [to_image(u8).resize((size, size), Image.Resampling.BILINEAR) for u8 in images_u8]
    return np.stack([np.asarray(image).transpose(2, 0, 1) for image in images])


def to_image(image_u8: np.ndarray) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(image_u8.transpose(1, 2, 0)))


def open_source(given: str | Path | Sequence[str | Path], data_dir: str = "", split: str = "train") -> Source:
    """A folder (recursively), a file, several files, or a data set's name (`split` of it)."""
    if not isinstance(given, str | Path):
        return _files([Path(path).expanduser() for path in given])
    if str(given) in data.DATASETS:
        images = data.load(str(given), split, Path(data_dir).expanduser() if data_dir else None)
        names = images.names or [f"{given}/{split}/{i}" for i in range(len(images))]
        labels = {n: images.classes[y] for n, y in zip(names, images.labels.tolist(), strict=True) if y >= 0}
        return Source(f"{given}, {split}", names, arrays=images.images.numpy(), labels=labels)
    path = Path(given).expanduser()
    if path.is_file():
        return _files([path])
    if not path.is_dir():
        raise UserError(f"{given} is neither a folder, an image file, nor a data set (`mixnn data` lists those)")
    names, skipped = list_images(path)
    if not names:
        raise UserError(f"no images in {path}\ngive a folder with files that end in {' '.join(sorted(EXTENSIONS))}")
    return Source(str(path), names, [path / name for name in names], skipped=skipped)


def _files(paths: list[Path]) -> Source:
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is no file")
    return Source(", ".join(str(p) for p in paths[:3]), [str(p) for p in paths], paths)
