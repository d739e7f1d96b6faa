"""A run folder belongs to one process, and is free again however that process ends. So are unfinished files."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from mixnn import files
from mixnn.config import UserError
from mixnn.files import LOCK, atomic_file, lock_run, scratch_folder, try_lock, write_atomically

FORKS = multiprocessing.get_context("forkserver")


def hold(run: Path, ready) -> None:
    with lock_run(run):
        ready.set()
        signal.pause()


def test_what_another_process_holds_is_refused_until_it_is_killed(tmp_path: Path):
    ready = FORKS.Event()
    other = FORKS.Process(target=hold, args=(tmp_path, ready), daemon=True)
    other.start()
    assert ready.wait(600)
    with pytest.raises(UserError, match="another process is training"), lock_run(tmp_path):
        pytest.fail("two processes have it")
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    with lock_run(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_folder_is_free_again_after_an_error(tmp_path: Path):
    with pytest.raises(OSError, match="disk"), lock_run(tmp_path):
        raise OSError("disk")  # not a word about the lock
    with lock_run(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_an_error_with_the_reason(tmp_path: Path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(UserError, match=r"cannot write .*\.lock: Is a directory"), lock_run(tmp_path):
        pass


def test_a_file_system_without_locks_does_not_stop_anyone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def flock(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with try_lock(tmp_path / "x") as mine:
        assert mine


# Temporary files


def write_and_wait(folder: Path, ready) -> None:
    with atomic_file(folder / "a.npz") as path, scratch_folder(folder) as scratch:
        path.write_text("half")
        (scratch / "part").write_text("half")
        ready.set()
        signal.pause()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_command_left_is_removed_by_the_next_and_not_before(tmp_path: Path):
    mine = [".mixnn-1-a.tmp", ".notes.txt.7.tmp", "x.tmp"]  # not named by mixnn
    for name in mine:
        (tmp_path / name).touch()
    ready = FORKS.Event()
    other = FORKS.Process(target=write_and_wait, args=(tmp_path, ready), daemon=True)
    other.start()
    assert ready.wait(600)
    write_atomically(tmp_path / "b.txt", b"")
    assert len(names(tmp_path)) == len(mine) + 3, "it is still being written"
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    write_atomically(tmp_path / "c.txt", b"")
    assert names(tmp_path) == sorted([*mine, "b.txt", "c.txt"])


def test_what_no_process_here_wrote_stays_for_a_day(tmp_path: Path):
    left = tmp_path / f".mixnn-{os.getpid()}-0123abcd.tmp"  # as if by a process of that number in another container
    left.touch()
    write_atomically(tmp_path / "a.txt", b"")
    assert left.exists()
    then = time.time() - 2 * files.ABANDONED_AFTER
    os.utime(left, (then, then))
    with atomic_file(tmp_path / "b.txt") as writing:
        os.utime(writing, (then, then))
        write_atomically(tmp_path / "c.txt", b"")
        assert writing.exists(), "it is locked"
        assert not left.exists()
        writing.write_bytes(b"")
    assert names(tmp_path) == ["a.txt", "b.txt", "c.txt"]
