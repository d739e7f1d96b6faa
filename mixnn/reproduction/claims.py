"""One run, one process: the same command typed twice shares the work, and needs no word between the two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on this system: one process at a time, then
    fcntl = None  # type: ignore[assignment]


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether this process has the file's lock. The system releases it when the process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        yield fcntl is None or _locked(file.fileno())


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
