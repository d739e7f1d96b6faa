"""A run folder belongs to one process, and is free again however that process ends."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from mixnn import files
from mixnn.config import UserError
from mixnn.files import LOCK, lock_run, try_lock

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
