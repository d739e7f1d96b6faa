"""Cache of decoded images: a folder is decoded once per size, and later runs read the pixels from one file.

An entry's key is made of the files' names, sizes and times and the size of the crops, so a changed folder gets a new
entry. One of the times is the inode's, which nobody can set: an archive may give all its files the same date. An entry
is built in a temporary folder and renamed when complete. Of processes that start together one builds it, and the others
wait, unless the file system has no locks: then all do the work, and one result is kept.

An entry is checked in full when it is opened: sizes, and a CRC-32 of the pixels and of what is known about the files. A
damaged one is built again, with a warning. Pixels that fit in memory are read into it, so nothing that happens to the
file later can harm a running job. Larger ones stay in the file, which is read-only, and batches are read from it.

The cache has a size limit. Entries that were not used for the longest time are removed first, and never those that a
running process uses.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import re
import shutil
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from mixnn.config import UserError
from mixnn.data.archive import replace_folder
from mixnn.data.decode import Decoded, FileInfo, decode_into
from mixnn.data.stored import StoredImages
from mixnn.files import expand, scratch_folder, try_flock, wait_flock, write_atomically
from mixnn.processes import is_main_process, local_world_size
from mixnn.progress import Reporter

VERSION = 2  # increase it when decoding, or the form of an entry, changes
CHUNK = 1024  # images that are decoded and written at a time
BLOCK = 2**22  # bytes read and checked at a time
IMAGES, INFOS = "images.npy", "facts.json"  # files of an entry
ENTRY = re.compile("[0-9a-f]{32}")
MEMORY_SHARE = 0.5  # of the free memory that the images of one entry may take in all processes of a run
DISK_SHARE = 0.1  # of the disk that all entries may take by default
UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12}
RECENT = 24 * 3600.0  # seconds; where files cannot be locked, an entry used later than this may still be in use

# Entries whose pixels this process holds, with what is known about their files.
_open_entries: dict[Path, tuple[weakref.ref[np.ndarray | StoredImages], list[FileInfo | str]]] = {}


def cache_root() -> Path:
    """$MIXNN_CACHE, or the user's cache folder."""
    return expand(os.environ.get("MIXNN_CACHE") or Path.home() / ".cache" / "mixnn" / "images")


def size_limit(root: Path) -> float:
    """Bytes that the cache may take: $MIXNN_CACHE_SIZE, or a tenth of the disk."""
    text = os.environ.get("MIXNN_CACHE_SIZE", "").strip()
    if not text:
        return DISK_SHARE * shutil.disk_usage(root).total
    found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})", text.upper(), re.ASCII)
    if not found:
        raise UserError(f"MIXNN_CACHE_SIZE={text} is not a size: write it as 500MB, 20GB or 1TB")
    return float(found[1]) * UNITS[found[2]]


def decoded(folder: Path, names: Sequence[str], size: int) -> Decoded:
    """Decode the named files of a folder to size x size, or read them from the cache. Nobody may write to the array."""

    def decode(start: int, stop: int) -> Decoded:
        return Decoded(*_decode(folder, names[start:stop], size))

    return cached(files_key(folder, names, size), len(names), size, decode)


def cached(key: str, num_images: int, size: int, decode: Callable[[int, int], Decoded]) -> Decoded:
    """Read an entry of the cache, or build it with `decode(start, stop)` if it is missing.

    Other processes that want the same images wait. Nobody may write to the array.
    """
    entry = cache_root() / key
    found = _open(entry, num_images, size)
    if found is None:
        with contextlib.suppress(OSError):  # the disk is full or read-only
            entry.parent.mkdir(parents=True, exist_ok=True)
            before = _inode(entry)
            with _building(entry):
                found = _open(entry, num_images, size) if _inode(entry) != before else None  # another was faster
                if found is None:
                    _make_room(entry.parent, num_images * 3 * size * size, size_limit(entry.parent))
                    with contextlib.suppress(UserError):
                        _build(entry, num_images, size, decode)
        found = found or _open(entry, num_images, size)
    return found or decode(0, num_images)


def _inode(entry: Path) -> int:
    """Number that tells an entry from the one that replaces it; 0 if there is none."""
    try:
        return entry.stat().st_ino
    except OSError:
        return 0


@contextlib.contextmanager
def _building(entry: Path) -> Iterator[None]:
    """Hold the entry's lock; does nothing on file systems without locks."""
    path = entry.with_suffix(".lock")
    with open(path, "wb") as file:
        wait_flock(file.fileno())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # those who wait have opened it


def files_key(folder: Path, names: Sequence[str], size: int) -> str:
    """The key of an entry that is made of these files of a folder."""
    digest, place = hashlib.sha256(f"{VERSION} {size}".encode()), str(folder)
    for name in names:
        try:
            status = os.stat(os.path.join(place, name))
            digest.update(f"\n{name}\t{status.st_size}\t{status.st_mtime_ns}\t{status.st_ctime_ns}".encode())
        except OSError:
            digest.update(f"\n{name}\tmissing".encode())
    return digest.hexdigest()[:32]


def _open(entry: Path, num_files: int, size: int) -> Decoded | None:
    """A cached entry; None if it is missing or damaged."""
    if entry in _open_entries:
        reference, infos = _open_entries[entry]
        if (images := reference()) is not None:
            return Decoded(images, infos)
    if not entry.exists():
        return None
    try:
        found = _read(entry, num_files, size)
    except Exception as error:  # damaged files can raise nearly anything
        if is_main_process():
            Reporter().warn(f"{entry} in the image cache is damaged ({error}): decoding the images again")
        return None
    with contextlib.suppress(OSError):
        os.utime(entry / INFOS)  # used last
    _open_entries[entry] = weakref.ref(found.images), found.infos
    weakref.finalize(found.images, _open_entries.pop, entry, None).atexit = False
    return found


def _read(entry: Path, num_files: int, size: int) -> Decoded:
    """A cached entry, checked in full; ValueError, or an exception of any other kind, if it is damaged."""
    facts = json.loads((entry / INFOS).read_bytes())
    infos = [info if isinstance(info, str) else FileInfo(*info) for info in facts["infos"]]
    shape = (len(_readable(infos)), 3, size, size)
    header, num_bytes = _header(shape), math.prod(shape)
    file = open(entry / IMAGES, "rb")  # noqa: SIM115  (stays open, and locked, as long as the pixels are used)
    try:
        try_flock(file.fileno(), shared=True)
        is_whole = os.fstat(file.fileno()).st_size == len(header) + num_bytes
        if len(infos) != num_files or not is_whole or file.read(len(header)) != header:
            raise ValueError("it has another size than it should have")
        images: np.ndarray | StoredImages
        if num_bytes * local_world_size() <= MEMORY_SHARE * _available_memory():
            images = np.empty(shape, np.uint8)
            crc = _read_blocks(file, num_bytes, images.reshape(-1))
        else:
            images = StoredImages(file, len(header), shape)
            crc = _read_blocks(file, num_bytes, None)
        if facts["crc32"] != _checksum(crc, infos):
            raise ValueError("its checksum does not match")
    except BaseException:
        file.close()
        raise
    weakref.finalize(images, file.close).atexit = False
    return Decoded(images, infos)


def check_entry(entry: Path) -> int:
    """The number of images in a cached entry, checked in full; ValueError if it is damaged."""
    try:
        with open(entry / IMAGES, "rb") as file:
            np.lib.format.read_magic(file)
            size = np.lib.format.read_array_header_1_0(file)[0][-1]
        return len(_read(entry, len(json.loads((entry / INFOS).read_bytes())["infos"]), size).images)
    except Exception as error:  # damaged files can raise nearly anything
        raise ValueError(str(error) or type(error).__name__) from None


def _read_blocks(file: IO[bytes], num_bytes: int, target: np.ndarray | None) -> int:
    """Read the rest of a file, into the target if there is one; return its CRC-32."""
    buffer, crc = np.empty(BLOCK if target is None else 0, np.uint8), 0
    for start in range(0, num_bytes, BLOCK):
        length = min(BLOCK, num_bytes - start)
        block = buffer[:length] if target is None else target[start : start + length]
        if file.readinto(block.data) != length:  # type: ignore[attr-defined]
            raise ValueError("it became shorter")
        crc = zlib.crc32(block.data, crc)
    return crc


def _checksum(pixels_crc: int, infos: Sequence[FileInfo | str]) -> int:
    return zlib.crc32(json.dumps(infos).encode(), pixels_crc)


def _available_memory() -> float:
    """Bytes of memory that are free or can be freed, also within the limits of a container."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))]
        group = Path("/sys/fs/cgroup")
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):  # there is none
                free.append(int((group / limit).read_text()) - int((group / used).read_text()))
        return min(free)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2


def _readable(infos: Sequence[FileInfo | str]) -> list[int]:
    return [i for i, info in enumerate(infos) if isinstance(info, FileInfo)]


def _decode(folder: Path, names: Sequence[str], size: int) -> tuple[np.ndarray, list[FileInfo | str]]:
    images = np.empty((len(names), 3, size, size), np.uint8)
    infos = decode_into(images, [folder / name for name in names])
    return images[_readable(infos)], infos


def _build(entry: Path, num_images: int, size: int, decode: Callable[[int, int], Decoded]) -> None:
    """Write an entry. Its files are on the disk before it gets its name, so a crash cannot leave half of one."""
    with scratch_folder(entry.parent) as scratch:
        new = scratch / "new"
        new.mkdir()
        infos: list[FileInfo | str] = []
        crc = 0
        with open(new / IMAGES, "wb") as file:
            file.write(_header((num_images, 3, size, size)))
            for start in range(0, num_images, CHUNK):
                images, of_chunk = decode(start, min(start + CHUNK, num_images))
                pixels = np.ascontiguousarray(images[:]).data
                file.write(pixels)
                crc = zlib.crc32(pixels, crc)
                infos += of_chunk
            file.seek(0)
            file.write(_header((len(_readable(infos)), 3, size, size)))
            file.flush()
            os.fchmod(file.fileno(), 0o444)
            os.fsync(file.fileno())
        write_atomically(new / INFOS, json.dumps({"crc32": _checksum(crc, infos), "infos": infos}).encode())
        replace_folder(new, entry, scratch / "old")


def _header(shape: tuple[int, ...]) -> bytes:
    """The header of a .npy file. numpy pads it, so that its length is the same for any number of images."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()


def _make_room(root: Path, needed: int, limit: float) -> None:
    """Remove the least recently used entries until `needed` more bytes fit, or all others are in use."""
    entries = [(_last_use(path), _num_bytes(path), path) for path in root.iterdir() if ENTRY.fullmatch(path.name)]
    total = sum(num_bytes for _, num_bytes, _ in entries)
    room = min(limit, total + shutil.disk_usage(root).free) - needed
    for _, num_bytes, path in sorted(entries):
        if total > room and _remove_unused(path):
            total -= num_bytes


def _num_bytes(entry: Path) -> int:
    return sum(path.stat().st_size for path in entry.glob("*"))


def _last_use(entry: Path) -> float:
    return max((path.stat().st_mtime for path in (entry / INFOS, entry) if path.exists()), default=0.0)


def _remove_unused(entry: Path) -> bool:
    """Remove an entry, unless a process uses it."""
    with contextlib.suppress(FileNotFoundError), open(entry / IMAGES, "rb") as file:
        if not try_flock(file.fileno(), unknown=time.time() - _last_use(entry) > RECENT):
            return False
    with contextlib.suppress(OSError), scratch_folder(entry.parent) as scratch:
        entry.rename(scratch / "old")  # at once: nobody may find half an entry
        return True
    return False
