"""Runs the command in processes of its own, which can be killed or starved of disk; torch is imported once for all.

A fault is a module-level function; it is called in the new process with its arguments, before the command.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FORKS = multiprocessing.get_context("forkserver")
PRELOAD = ["pytest", "sklearn.datasets", "torch._dynamo", "mixnn.training", "mixnn.evaluation"]  # all that takes long
FORKS.set_forkserver_preload(PRELOAD)


class Done(NamedTuple):
    code: int  # negative: the signal that ended it
    out: str
    err: str


def command(*words: object, fault: Callable[..., None] | None = None, args: Sequence[Any] = ()) -> Done:
    """`mixnn WORDS...` on one thread, so that bits can be compared."""
    place = Path(tempfile.mkdtemp(prefix="mixnn-test-"))
    try:
        process = FORKS.Process(target=_run, args=([str(word) for word in words], fault, args, place, os.getcwd()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # else the server finds nothing to preload
            process.start()
        process.join()
        assert process.exitcode is not None
        return Done(process.exitcode, (place / "1").read_text(), (place / "2").read_text())
    finally:
        shutil.rmtree(place)


def _run(words: list[str], fault: Callable[..., None] | None, args: Sequence[Any], place: Path, cwd: str) -> None:
    for number in (1, 2):
        os.dup2(os.open(place / str(number), os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    import torch

    from mixnn.cli import main

    torch.set_num_threads(1)
    sys.argv = ["mixnn", *words]
    if fault is not None:
        fault(*args)
    sys.exit(main(words))
