"""Cache of decoded images: a folder is decoded once per size, and later runs map the array into memory.

An entry's key is made of the files' names, sizes and times and the size of the crops, so a changed folder gets a new
entry. One of the times is the inode's, which nobody can set: an archive may give all its files the same date. An entry
is built in a temporary folder and renamed when complete, so two runs that start together do the work twice and keep
one result. A damaged entry is rebuilt.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from mixnn.config import UserError
from mixnn.data.archive import replace_folder
from mixnn.data.decode import Decoded, FileInfo, decode_into
from mixnn.files import write_atomically

VERSION = 1  # increase it when decoding changes
CHUNK = 1024  # files between two progress reports
IMAGES, INFOS = "images.npy", "facts.json"  # files of an entry


def cache_root() -> Path:
    """$MIXNN_CACHE, or the user's cache folder."""
    return Path(os.environ.get("MIXNN_CACHE") or Path.home() / ".cache" / "mixnn" / "images").expanduser()


def decoded(
    folder: Path, names: Sequence[str], size: int, progress: Callable[[int, int], None] = lambda *_: None
) -> Decoded:
    """Decode the named files of a folder to size x size, or map them from the cache without loading them."""
    entry = cache_root() / _key(folder, names, size)
    found = _read(entry, len(names), size)
    if found is None:
        with contextlib.suppress(OSError, UserError):  # the disk is full or read-only, or another run was faster
            _build(entry, folder, names, size, progress)
        found = _read(entry, len(names), size)
    return found or _decode(folder, names, size)


def _key(folder: Path, names: Sequence[str], size: int) -> str:
    digest = hashlib.sha256(f"{VERSION} {size}".encode())
    for name in names:
        try:
            status = (folder / name).stat()
            digest.update(f"\n{name}\t{status.st_size}\t{status.st_mtime_ns}\t{status.st_ctime_ns}".encode())
        except OSError:
            digest.update(f"\n{name}\tmissing".encode())
    return digest.hexdigest()[:32]


def _read(entry: Path, num_files: int, size: int) -> Decoded | None:
    """A cached entry, or None if it is missing or damaged."""
    try:
        infos = [x if isinstance(x, str) else FileInfo(*x) for x in json.loads((entry / INFOS).read_text())]
        images = np.lib.format.open_memmap(entry / IMAGES, mode="r")
        num_bytes = images.offset + images.nbytes
        complete = len(infos) == num_files and num_bytes == (entry / IMAGES).stat().st_size
        expected_shape = (len(_readable(infos)), 3, size, size)
        fits = complete and images.shape == expected_shape and images.dtype == np.uint8
    except Exception:  # damaged JSON and damaged headers can raise nearly anything
        return None
    return Decoded(images, infos) if fits else None


def _readable(infos: Sequence[FileInfo | str]) -> list[int]:
    return [i for i, info in enumerate(infos) if isinstance(info, FileInfo)]


def _decode(folder: Path, names: Sequence[str], size: int) -> Decoded:
    images = np.empty((len(names), 3, size, size), np.uint8)
    infos = decode_into(images, [folder / name for name in names])
    return Decoded(images[_readable(infos)], infos)


def _build(entry: Path, folder: Path, names: Sequence[str], size: int, progress: Callable[[int, int], None]) -> None:
    """Write an entry. Its files are on the disk before it gets its name, so a crash cannot leave half of one."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{entry.name}.", suffix=".part", dir=entry.parent, ignore_cleanup_errors=True
    ) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        infos: list[FileInfo | str] = []
        with open(new / IMAGES, "wb") as file:
            _write_header(file, (len(names), 3, size, size))
            for start in range(0, len(names), CHUNK):
                chunk = _decode(folder, names[start : start + CHUNK], size)
                file.write(chunk.images.tobytes())
                infos += chunk.infos
                progress(len(infos), len(names))
            file.seek(0)
            _write_header(file, (len(_readable(infos)), 3, size, size))
            file.flush()
            os.fsync(file.fileno())
        write_atomically(new / INFOS, json.dumps(infos).encode())
        replace_folder(new, entry, Path(scratch) / "old")


def _write_header(file: IO[bytes], shape: tuple[int, ...]) -> None:
    """Write the header of a .npy file. numpy pads it, so that its length is the same for any number of images."""
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
