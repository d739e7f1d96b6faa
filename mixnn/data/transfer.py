"""One file over HTTP: goes on where it was cut off, tries again, and leaves what has arrived for the next call."""

from __future__ import annotations

import errno
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from mixnn.config import UserError

Progress = Callable[[int, int], None]  # bytes done, bytes in all (0 = unknown)

PAUSES = (1.0, 2.0, 4.0)  # seconds before the second, third and fourth try; a try that brought bytes starts them over
TIMEOUT = 30  # seconds without a byte
CHUNK = 1 << 20
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
REFUSALS = range(400, 500)  # the server understood and says no: asking again changes nothing


class Unreachable(UserError):
    """The host cannot be reached or does not have the file."""


def download(url: str, path: Path, progress: Progress) -> None:
    """Writes PATH.part and renames it when it is complete."""
    part = path.with_name(path.name + ".part")
    pauses = list(PAUSES)
    while True:
        before = size_of(part)
        try:
            if fetch(url, part, progress):
                os.replace(part, path)
                return
            problem = "the connection was cut"
        except (OSError, http.client.HTTPException) as error:
            if error_number(error) in DISK_ERRORS:
                raise
            cause = error.reason if type(error) is urllib.error.URLError else error
            problem = str(cause) or type(cause).__name__
            if isinstance(error, urllib.error.HTTPError) and error.code in REFUSALS:
                pauses.clear()
        if size_of(part) > before:
            pauses = list(PAUSES)
        if not pauses:
            raise unreachable(url, path, problem)
        time.sleep(pauses.pop(0))


def fetch(url: str, part: Path, progress: Progress) -> bool:
    """One request, for the bytes that `part` lacks; True when the file is complete."""
    start = size_of(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not start:
                raise
            return nothing_after(start, part, error)
    with response:
        partial = response.status == http.HTTPStatus.PARTIAL_CONTENT
        if partial and content_range(response)[0] != start:
            part.unlink()
            return False
        return receive(response, part, start if partial else 0, progress)  # not partial: Range was ignored, all is sent


def nothing_after(start: int, part: Path, error: urllib.error.HTTPError) -> bool:
    """The server has nothing from this byte on: `part` is the whole file, or no beginning of it and must go."""
    complete = content_range(error)[1] == start
    if not complete:
        part.unlink()
    return complete


def receive(response: http.client.HTTPResponse, part: Path, start: int, progress: Progress) -> bool:
    """Writes the body from byte `start` on; True when it came to its end."""
    length = response.headers.get("Content-Length")
    total = start + int(length) if length else 0
    with open(part, "ab" if start else "wb") as file:
        done = copy(response, file, start, total, progress)
    return done == total or not total  # of unknown length: the md5 will tell


def copy(response: http.client.HTTPResponse, file: IO[bytes], done: int, total: int, progress: Progress) -> int:
    # read1 hands over what has arrived: read would lose up to a chunk when the connection is cut
    while (done < total or not total) and (chunk := response.read1(CHUNK)):
        file.write(chunk)
        done += len(chunk)
        progress(done, total)
    return done


def content_range(response: http.client.HTTPResponse | urllib.error.HTTPError) -> tuple[int | None, int | None]:
    """First byte and total size of `bytes 5-9/10` or `bytes */10`."""
    match = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", response.headers.get("Content-Range") or "")
    first, total = match.groups() if match else (None, "*")
    return int(first) if first else None, int(total) if total != "*" else None


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def error_number(error: Exception) -> int | None:
    """The number the disk gave; a firewall's EPERM comes wrapped in URLError and is none of the disk's."""
    return None if isinstance(error, urllib.error.URLError) else getattr(error, "errno", None)


def unreachable(url: str, path: Path, problem: str) -> Unreachable:
    return Unreachable(
        f"{url} cannot be fetched: {problem}\n"
        f"try again later (what has arrived is kept), or fetch it elsewhere and put it at {path}"
    )
