"""Hostile input for everything that reads: a few cases of each target of `make fuzz`, and what the harness notices."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests import fuzz
from tests.fuzz import TARGETS, Outside, run_target


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_gives_a_clear_error_or_a_right_result(name: str):
    assert run_target(name, cases=25) >= 1


def write_elsewhere(_: Any, place: Path) -> None:
    (place.parent / "mixnn-outside").write_text("x")


def start_a_program(_: Any, __: Path) -> None:
    subprocess.run([sys.executable, "--version"], check=True)


def never_end(_: Any, __: Path) -> None:
    while True:
        os.stat(".")


def other_error(_: Any, __: Path) -> None:
    raise KeyError("x")


@pytest.mark.parametrize(
    "function, error",
    [(write_elsewhere, Outside), (start_a_program, Outside), (never_end, Outside), (other_error, KeyError)],
)
def test_the_harness_notices(monkeypatch: pytest.MonkeyPatch, function: Any, error: type[Exception]):
    monkeypatch.setattr(fuzz, "TIME_LIMIT", 0.3)
    monkeypatch.setitem(TARGETS, "x", (st.none, function))
    with pytest.raises(error):
        run_target("x", cases=2)
