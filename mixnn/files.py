"""Safe files: atomic writes, refusal to replace what exists, and locks that the system frees when a process ends.

Unfinished files and folders are called .mixnn-PID-XXXXXXXX.tmp and locked by the process that writes them. What a
killed process left behind is removed by the next command that writes into the same folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from mixnn.config import UserError, setting, shortened

try:
    import fcntl
except ImportError:  # no file locks on this system: run one process at a time
    fcntl = None  # type: ignore[assignment]

PACKAGE = Path(__file__).parent
SOURCES = (".py", ".yaml")  # endings of the package's source files
TEMPORARY = re.compile(r"\.mixnn-(\d+)-[0-9a-f]{8}\.tmp")
ABANDONED_AFTER = 24 * 3600.0  # seconds; an older temporary file without a lock was left behind, whoever wrote it
LOCK = ".lock"  # held in a run folder while it is being trained
PROBE_BYTES = 4096  # bytes that are written to see whether a folder takes files
MAX_YAML_BYTES, MAX_YAML_DEPTH, MAX_YAML_NODES = 10**6, 50, 100_000  # aliases count as what they stand for
# What a run folder consists of; no other output may replace any of it.
RUN_FILES = (
    *("config.yaml", "command.txt", "environment.json", "metrics.jsonl", "results.json", "judgement.json"),
    *("diverged.txt", LOCK),
)
# What other commands write into a run folder, if no other place is given. It belongs to that run and ends with it.
OUTPUTS = (
    *("explore.html", "report.html", "comparison.html", "nearest.html", "duplicates.html", "outliers.html"),
    *("embeddings.npz", "encoder.*"),
)
PAGE_START = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="\
"""  # of every page


def expand(path: str | Path) -> Path:
    """The path with ~ replaced by a home folder; UserError for a name that no file can have."""
    text = os.fspath(path)
    shown = shortened(text, 250)
    try:
        text.encode()
        found = Path(text).expanduser()
        os.stat(found)
    except UnicodeEncodeError:
        raise UserError(f"{shown} is not valid UTF-8: rename it, or use a link with another name") from None
    except RuntimeError:
        user = Path(text).parts[0][1:]
        raise UserError(f"{shown}: there is no user {user}; use ./~{user} for a file of this name") from None
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UserError(f"{shown}: the name is too long for a file; use a shorter one") from None
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):  # these mean that there is no such file
            raise UserError(f"{shown}: {error.strerror}") from None
    except ValueError:  # a null character
        raise UserError(f"{shown!r} cannot be the name of a file") from None
    return found


def write_atomically(path: Path, data: bytes) -> None:
    """Write the whole file or nothing; UserError if that fails."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. It becomes `path` when the block ends, and is removed if the block fails."""
    temporary = _temporary_path(path.parent)
    check_not_removed(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        with open(temporary, "xb") as file:
            try_flock(file.fileno())
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
    except BaseException as error:  # a second Ctrl-C too
        with contextlib.suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or error
        raise UserError(f"cannot write {path}: {reason}; what was saved before is untouched") from None


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent` for unfinished files. It is removed when the block ends."""
    remove_leftovers(parent)
    folder = _temporary_path(parent)
    folder.mkdir(mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try_flock(descriptor)
        yield folder
    finally:
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def _temporary_path(folder: Path) -> Path:
    return folder / f".mixnn-{os.getpid()}-{secrets.token_hex(4)}.tmp"


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files and folders of processes that were killed."""
    for path in leftovers(folder):
        with contextlib.suppress(OSError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def leftovers(folder: Path) -> list[Path]:
    """Temporary files and folders of processes that were killed."""
    found = []
    for path in folder.glob(".mixnn-*.tmp"):
        with contextlib.suppress(OSError):
            found += [path] if _is_left_over(path) else []
    return found


def _is_left_over(path: Path) -> bool:
    """Whether a temporary file belongs to a process that is gone: one of this machine, or any a day ago."""
    named = TEMPORARY.fullmatch(path.name)
    if named is None or path.is_symlink():
        return False
    is_old = time.time() - path.stat().st_mtime > ABANDONED_AFTER
    if not (is_old or _is_gone(int(named[1]))):
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return try_flock(descriptor, unknown=is_old)  # a process on another machine, or in a container, may hold it
    finally:
        os.close(descriptor)


def _is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # it belongs to another user
        return False
    return False


def _sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_may_write(file: str | Path, overwrite: bool) -> None:
    """UserError if the file exists and may not be replaced, or belongs to a run. Verbs ask before they start work."""
    path = expand(file)
    if path.is_dir():
        raise UserError(f"{file} is a folder: give the name of a file")
    if _is_part_of_run(path.absolute()):
        raise UserError(f"{file} would become part of a run folder, or replace part of it: use another name")
    if path.exists() and not overwrite:
        raise UserError(f"{file} exists: use another name, or {setting('overwrite', True)} to replace it")


def check_writable(file: str | Path, overwrite: bool) -> None:
    """UserError if a file cannot be written: `check_may_write`, and its folder must exist. Call before any work."""
    check_folder_writable(file)
    check_may_write(file, overwrite)


def check_output(given: str | Path, default: Path, overwrite: bool) -> Path:
    """The file to write: the given one or the default in a run folder, checked as `check_writable` does.

    The default is renewed without `overwrite` if it is a page that a command wrote before.
    """
    path = expand(given) if str(given) else default
    renewed = not str(given) and path.suffix == ".html" and is_written_by_mixnn(path)
    check_writable(path, overwrite or renewed)
    return path


def is_written_by_mixnn(path: Path) -> bool:
    """Whether a file with one of the names in OUTPUTS is what a command wrote, and not the user's own."""
    try:
        if path.suffix == ".html":
            with open(path, "rb") as file:
                return file.read(len(PAGE_START)) == PAGE_START.encode()
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive:
                return {"vectors.npy", "about.npy"} <= {*archive.namelist()}
        card = json.loads((path if path.suffix == ".json" else path.with_name(f"{path.name}.json")).read_bytes())
        return isinstance(card, dict) and "card_version" in card
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def check_folder_writable(file: str | Path) -> None:
    """UserError if the folder of a file does not exist, is read-only, or is on a full disk."""
    folder = expand(file).absolute().parent
    if not folder.is_dir():
        raise UserError(f"{Path(file).parent} is not a folder, so {file} cannot be written there")
    if reason := why_not_writable(folder):
        raise UserError(f"cannot write {file}: {reason}")


def check_folder_creatable(folder: Path) -> None:
    """UserError if files cannot be written into a folder, or if it cannot be made. Ask before any work is done."""
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not place.is_dir():
        raise UserError(f"{place} is a file, so {folder} cannot be a folder: use another name")
    if reason := why_not_writable(place):
        advice = "" if folder.is_absolute() else "; start this in another folder"
        raise UserError(f"cannot write into {folder}: {reason}{advice}")


def why_not_writable(folder: Path) -> str:
    """Reason why no file can be written into a folder, or an empty string. A small file is written and removed."""
    try:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "")
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        is_read_only = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        return f"the folder {folder} is read-only" if is_read_only else f"{error.strerror} in {folder}"
    return ""


def _is_part_of_run(path: Path) -> bool:
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return (run / "config.yaml").is_file() and (path.parent.name == "checkpoints" or path.name in RUN_FILES)


def code_digest() -> str:
    """Twelve hex digits that identify the package's source files, committed or not."""
    paths = [path for path in PACKAGE.rglob("*") if path.suffix in SOURCES]
    return digest_of_files({path.relative_to(PACKAGE): path.read_bytes() for path in paths})


def digest_of_files(files: Mapping[Path, bytes]) -> str:
    """Twelve hex digits that identify files, given by their paths, and their contents."""
    digest = hashlib.sha256()
    for path, content in sorted(files.items()):
        digest.update(f"{path.as_posix()}\0".encode() + content + b"\0")
    return digest.hexdigest()[:12]


def read_yaml(path: Path) -> Any:
    """The content of a YAML file that is not trusted: no code is run, and it cannot be deep or grow by its aliases."""
    if path.stat().st_size > MAX_YAML_BYTES:
        raise ValueError(f"it is longer than {MAX_YAML_BYTES:,} bytes")
    return yaml.load(path.read_text(encoding="utf-8"), _SmallLoader)


class _SmallLoader(yaml.SafeLoader):
    """yaml.SafeLoader with limits on depth and on the number of values, those that aliases repeat included."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth, self._count, self._count_of = 0, 0, dict[int, int]()  # the last: by the id of a node

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event, before = self.peek_event(), self._count
        mark: Any = event.start_mark
        self._depth += 1
        if self._depth > MAX_YAML_DEPTH:
            raise ComposerError(None, None, "too many levels", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._count += 1
            self._count_of[id(node)] = self._count - before
        elif id(node) in self._count_of:
            self._count += self._count_of[id(node)]
        else:
            raise ComposerError(None, None, "a value that contains itself", mark)
        if self._count > MAX_YAML_NODES:
            raise ComposerError(None, None, f"more than {MAX_YAML_NODES:,} values", mark)
        return node


def yaml_error(error: Exception) -> str:
    """One line that says why a YAML file could not be read."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, OSError):
        return str(error.strerror)
    return f"no {error}" if isinstance(error, KeyError) else str(error).split("\n")[0]


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Yield whether this process got the lock. The file stays: removing it could remove another process's lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        yield try_flock(file.fileno())


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Reserve a run folder: two processes that train in it would mix their logs and delete each other's files."""
    with ExitStack() as stack:
        try:
            mine = stack.enter_context(try_lock(run / LOCK))
        except OSError as error:
            raise UserError(f"cannot write {run / LOCK}: {error.strerror}") from None
        if not mine:
            raise UserError(f"another process is training {run}: wait for it to end, or stop it first")
        folder = os.open(run, os.O_RDONLY)  # while it is open, no other folder gets its number
        stack.callback(os.close, folder)
        _in_training[run.absolute()] = folder
        stack.callback(_in_training.pop, run.absolute())
        yield


_in_training: dict[Path, int] = {}  # run folders that this process has locked, and their descriptors


def check_not_removed(path: Path) -> None:
    """UserError if a file belongs to a run folder that was removed or replaced since this process locked it."""
    for run, folder in _in_training.items():
        if not path.absolute().is_relative_to(run):
            continue
        try:
            is_same = os.path.samestat(os.stat(run), os.fstat(folder))
        except OSError:
            is_same = False
        if not is_same:
            raise UserError(
                f"{run} was removed, moved or replaced during training, so {path.name} cannot be saved there\n"
                "start the training again"
            )


@contextmanager
def lock_output(path: Path, overwrite: bool) -> Iterator[None]:
    """Reserve an output file, which must be free as in `check_may_write`. A killed process leaves no lock behind."""
    lock = path.with_name(f".{path.name[:60]}.lock")
    with ExitStack() as stack:
        while True:
            file = stack.enter_context(open(lock, "w"))
            if fcntl is not None and not try_flock(file.fileno()):
                raise UserError(f"another process is writing {path}: wait for it to end, or use another name")
            with contextlib.suppress(FileNotFoundError):  # the process that held it has just removed it
                if os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):
                    break
        stack.callback(lock.unlink, missing_ok=True)
        check_may_write(path, overwrite)
        yield


def wait_flock(file: int) -> None:
    """Lock an open file, when no other process holds it; do nothing if this file system has no locks."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)


def try_flock(file: int, shared: bool = False, unknown: bool = True) -> bool:
    """Lock an open file; False if another process holds it, `unknown` if this file system has no locks."""
    if fcntl is None:
        return unknown
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no such locks on this file system
        return unknown
    return True
