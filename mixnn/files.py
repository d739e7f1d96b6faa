"""Safe files: atomic writes, refusal to replace what exists, and locks that the system frees when a process ends."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from mixnn.config import UserError, setting

try:
    import fcntl
except ImportError:  # no file locks on this system: run one process at a time
    fcntl = None  # type: ignore[assignment]

PACKAGE = Path(__file__).parent
LOCK = ".lock"  # held in a run folder while it is being trained


def write_atomically(path: Path, data: bytes) -> None:
    """All of the file or nothing of it; UserError if the disk takes no more."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:  # a second Ctrl-C too
        with contextlib.suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError):
            raise
        raise UserError(f"cannot write {path}: {error.strerror}; what was saved before is untouched") from None


def check_free(file: str | Path, overwrite: bool) -> None:
    """A file that is there is refused unless it may be replaced; a verb asks before it begins to work."""
    if Path(file).is_dir():
        raise UserError(f"{file} is a folder: type the name of a file")
    if Path(file).exists() and not overwrite:
        raise UserError(f"{file} exists: use another name, or {setting('overwrite', True)} to replace it")


def check_writable(file: str | Path, overwrite: bool) -> None:
    """The same; and the folder where it goes must be there, and open to this user."""
    if not Path(file).absolute().parent.is_dir():
        raise UserError(f"{Path(file).parent} is no folder, so {file} cannot be written there")
    if not os.access(Path(file).absolute().parent, os.W_OK):
        raise UserError(f"nothing may be written to {Path(file).absolute().parent}: type another place for {file}")
    check_free(file, overwrite)


def code_digest() -> str:
    """Twelve digits of the package's own files: which code it was, committed or not."""
    digest = hashlib.sha256()
    for path in sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".yaml")):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def why(error: Exception) -> str:
    """In one line, why a file of YAML is not what it should be."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, OSError):
        return str(error.strerror)
    return f"no {error}" if isinstance(error, KeyError) else str(error)


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Whether this process has the file's lock. The file stays: who removed it could remove another's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        yield fcntl is None or _flock(file.fileno())


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """A run folder for this process alone: two that train in it would mix their logs and delete each other's files."""
    with ExitStack() as stack:
        try:
            mine = stack.enter_context(try_lock(run / LOCK))
        except OSError as error:
            raise UserError(f"cannot write {run / LOCK}: {error.strerror}") from None
        if not mine:
            raise UserError(f"another process is training {run}: wait for its end, or stop it first")
        yield


def _flock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no such locks on this file system
        return True
    return True
