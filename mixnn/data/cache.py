"""Decoded images, kept on disk: a folder is decoded once for each size, and read again by mapping the array.

An entry is known by its files' names, sizes and times and by the size of the crops, so a changed folder gets a new
one. One of the times is the inode's, which nobody can set: an archive may give all its files one date. An entry is
built under another name and renamed when whole: two runs that start together do the work twice and keep one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mixnn.data.decode import Facts, decode_into

VERSION = 1  # of what decode makes of a file
CHUNK = 1024  # files between two reports of progress


class Decoded(NamedTuple):
    """Images of a list of files."""

    images: np.ndarray  # (M, 3, size, size) of the files that could be read; mapped, not loaded
    facts: list[Facts | str]  # of each file, or the reason that it could not be read


def cache_root() -> Path:
    """$MIXNN_CACHE, or the user's cache folder."""
    return Path(os.environ.get("MIXNN_CACHE") or Path.home() / ".cache" / "mixnn" / "images").expanduser()


def decoded(
    folder: Path, names: Sequence[str], size: int, progress: Callable[[int, int], None] = lambda *_: None
) -> Decoded:
    """The images below a folder by these names; from the cache if it has them."""
    entry = cache_root() / _key(folder, names, size)
    if not (entry / "facts.json").is_file():
        try:
            _build(entry, folder, names, size, progress)
        except OSError:  # no room, or no right to write there: memory serves as well
            images = np.empty((len(names), 3, size, size), np.uint8)
            facts = decode_into(images, [folder / name for name in names])
            return Decoded(images[_readable(facts)], facts)
    kept = json.loads((entry / "facts.json").read_text())
    images = np.load(entry / "images.npy", mmap_mode="r")
    return Decoded(images, [f if isinstance(f, str) else Facts(*f) for f in kept])


def _readable(facts: Sequence[Facts | str]) -> list[int]:
    return [i for i, fact in enumerate(facts) if not isinstance(fact, str)]


def _key(folder: Path, names: Sequence[str], size: int) -> str:
    digest = hashlib.sha256(f"{VERSION} {size}".encode())
    for name in names:
        try:
            status = (folder / name).stat()
            digest.update(f"\n{name}\t{status.st_size}\t{status.st_mtime_ns}\t{status.st_ctime_ns}".encode())
        except OSError:
            digest.update(f"\n{name}\tmissing".encode())
    return digest.hexdigest()[:32]


def _build(entry: Path, folder: Path, names: Sequence[str], size: int, progress: Callable[[int, int], None]) -> None:
    partial = entry.with_name(f"{entry.name}.{os.getpid()}.part")
    partial.mkdir(parents=True)
    try:
        facts: list[Facts | str] = []
        with open(partial / "rows", "wb") as rows:
            for start in range(0, len(names), CHUNK):
                paths = [folder / name for name in names[start : start + CHUNK]]
                images = np.empty((len(paths), 3, size, size), np.uint8)
                found = decode_into(images, paths)
                rows.write(images[_readable(found)].tobytes())
                facts += found
                progress(len(facts), len(names))
        _as_npy(partial / "rows", partial / "images.npy", (len(_readable(facts)), 3, size, size))
        (partial / "facts.json").write_text(json.dumps(facts))
        try:
            partial.rename(entry)
        except OSError:
            if not (entry / "facts.json").is_file():  # else another run was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _as_npy(rows: Path, out: Path, shape: tuple[int, ...]) -> None:
    """The header that numpy wants, then the rows; how many there are is known only when all have been read."""
    with open(out, "wb") as file, open(rows, "rb") as source:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        shutil.copyfileobj(source, file, 2**24)
    rows.unlink()
