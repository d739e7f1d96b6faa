"""Images in shards: WebDataset's tar files, and the Arrow or Parquet files of Hugging Face.

    wds:/data/train-{000..146}.tar      tar files; a sample is the files with one name: 17.jpg and 17.cls
    hf:/data/birds                      what `Dataset.save_to_disk` wrote, or a folder of .parquet files

Both give images by index. They are decoded once, a chunk at a time, into the image cache; training then reads from
there, as it does for a folder. A tar file needs no library: its headers say where each sample lies. The other kind
needs Hugging Face's datasets.
"""

from __future__ import annotations

import bisect
import io
import itertools
import os
import re
import tarfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from mixnn.config import UserError
from mixnn.data.decode import MAX_BYTES, check_header
from mixnn.files import expand

KINDS = ("wds:", "hf:")
IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "tif", "tiff", "gif")  # of a sample's image
LABEL_ENDINGS = ("cls", "txt")
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def is_shards(data: str) -> bool:
    """Whether the text names shards, and not a folder or a data set."""
    return data.startswith(KINDS)


def absolute_shards(data: str) -> str:
    """The shards by their absolute path, as a run folder stores them."""
    kind, _, place = data.partition(":")
    return f"{kind}:{expand(place).absolute()}"


def shard_files(data: str) -> list[Path]:
    """The files that hold the images; UserError if one is missing."""
    kind, _, place = data.partition(":")
    if kind == "wds":
        files = [Path(text) for text in expand_ranges(place)]
    else:
        folder = Path(place)
        files = sorted(path for path in folder.rglob("*") if path.suffix in (".arrow", ".parquet"))
        if not files:
            raise UserError(f"{data}: there are no .arrow or .parquet files: give a folder that save_to_disk wrote")
    if missing := [path for path in files if not path.is_file()]:
        raise UserError(f"{data}: {missing[0]} is missing ({len(missing)} of {len(files)} files are)")
    return files


def expand_ranges(pattern: str) -> Iterator[str]:
    """The names that a pattern stands for: a-{08..10}.tar is a-08.tar, a-09.tar and a-10.tar."""
    found = RANGE.search(pattern)
    if not found:
        yield pattern
        return
    width = len(found[1])
    for number in range(int(found[1]), int(found[2]) + 1):
        yield from expand_ranges(f"{pattern[: found.start()]}{number:0{width}}{pattern[found.end() :]}")


def open_shards(data: str) -> Any:
    """An object that gives rows with an image, and a label if there is one, by index."""
    files = shard_files(data)
    if data.startswith("wds:"):
        return TarShards(files)
    try:
        import datasets
    except ImportError:
        raise UserError("hf: needs Hugging Face's library: use pip install datasets") from None
    folder = data.removeprefix("hf:")
    if (Path(folder) / "dataset_dict.json").is_file():
        raise UserError(f"{data} has several splits: give the folder of one, as {data}/train")
    if (Path(folder) / "dataset_info.json").is_file():
        return datasets.load_from_disk(folder)
    return datasets.load_dataset("parquet", data_files=[*map(str, files)], split="train")


class TarShards:
    """Samples of uncompressed tar files by index. It holds only where each of them lies: 40 bytes per sample."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.firsts: list[int] = []  # number of the first sample of each file
        # of each sample: where its image begins, and its length; the same for its label, with length 0 if it has none
        self.places = array("Q")
        for path in files:
            self.firsts.append(len(self))
            self._index(path)
        has_labels = any(self.places[3::4])
        self.features = {"image": None, "label": None} if has_labels else {"image": None}  # its columns

    def _index(self, path: Path) -> None:
        try:
            with tarfile.open(path, "r:") as archive:
                members = (member for member in iter(archive.next, None) if member.isfile())
                for _, files in itertools.groupby(members, lambda member: _key(member.name)):
                    self._add({_ending(file.name): (file.offset_data, file.size) for file in files})
                    archive.members = []  # type: ignore[attr-defined] # it would keep all of them
        except (tarfile.TarError, OSError) as error:
            raise UserError(f"cannot read {path}: {error}\ngive tar files that are not compressed") from None

    def _add(self, sample: dict[str, tuple[int, int]]) -> None:
        image = next((sample[ending] for ending in IMAGE_ENDINGS if ending in sample), None)
        label = next((sample[ending] for ending in LABEL_ENDINGS if ending in sample), (0, 0))
        if image is not None:  # other samples are not images
            self.places.extend((*image, *label))

    def __len__(self) -> int:
        return len(self.places) // 4

    def __getitem__(self, index: int | str) -> Any:
        if isinstance(index, str):
            return [self._label(i) for i in range(len(self))]
        row = {"image": self._image(index)}
        return row | {"label": self._label(index)} if "label" in self.features else row

    def _image(self, i: int) -> Image.Image:
        if self.places[4 * i + 1] > MAX_BYTES:
            raise ValueError("too large")
        image = Image.open(io.BytesIO(self._read(i, 0)))
        check_header(image)
        return image

    def _label(self, i: int) -> str | None:
        return self._read(i, 2).decode(errors="replace").strip() or None if self.places[4 * i + 3] else None

    def _read(self, i: int, part: int) -> bytes:
        path = self.files[bisect.bisect_right(self.firsts, i) - 1]
        start, length = self.places[4 * i + part], self.places[4 * i + part + 1]
        file = os.open(path, os.O_RDONLY)
        try:
            return os.pread(file, length, start)
        finally:
            os.close(file)


def _key(name: str) -> str:
    """Name of the sample that a file belongs to: up to the first dot after the last slash."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _ending(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[2].lower()
