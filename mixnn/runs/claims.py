"""One run, one process: locks that the system releases when their process ends, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mixnn.config import UserError

try:
    import fcntl
except ImportError:  # no such locks on this system: one process at a time, then
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"  # in a run folder


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether this process has the file's lock. The file stays: who removed it could remove another's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        yield fcntl is None or _locked(file.fileno())


@contextmanager
def held(run: Path) -> Iterator[None]:
    """A run folder for this process alone: two that train in it would mix their logs and delete each other's files."""
    with ExitStack() as stack:
        try:
            mine = stack.enter_context(claim(run / LOCK))
        except OSError as error:
            raise UserError(f"cannot write {run / LOCK}: {error.strerror}") from None
        if not mine:
            raise UserError(f"another process is training {run}: wait for its end, or stop it first")
        yield


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no such locks on this file system
        return True
    return True
