"""`make chaos` would notice a wrong result, and every kind of fault has its turn; it runs by hand."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from mixnn.config import Config
from mixnn.runs import Run
from tests.chaos import KINDS, Done, Wrong, check_nothing_lost, check_same, damage, log_of, schedule, table


def make_run(path: Path, weight: float = 1.0, loss: float = 0.5) -> Path:
    run = Run.create(path, Config("digits", "mnn"), "mixnn pretrain digits")
    run.log({"epoch": 1, "step": 4, "loss": loss, "seconds": random.random()})
    state = {"step": 4, "seconds": random.random(), "settings": {"data": str(path)}}
    run.save_checkpoint(4, {"method.w": torch.tensor([weight])}, state)
    return path


def test_runs_are_compared_bit_for_bit(tmp_path: Path):
    reference = make_run(tmp_path / "reference")
    check_same(make_run(tmp_path / "same"), reference)
    with pytest.raises(Wrong, match="1 of 1 tensors differ"):
        check_same(make_run(tmp_path / "other", weight=1.0 + 2**-23), reference)
    with pytest.raises(Wrong, match="the log differs"):
        check_same(make_run(tmp_path / "log", loss=0.25), reference)
    (tmp_path / "same" / ".mixnn-1-00000000.tmp").touch()
    with pytest.raises(Wrong, match="temporary files are left"):
        check_same(tmp_path / "same", reference)


def test_a_run_that_goes_back_behind_its_log_is_noticed():
    check_nothing_lost(8, Done(0, "", "run: resuming at step 8 of 16"))
    with pytest.raises(Wrong, match="step 8 was logged"):
        check_nothing_lost(8, Done(0, "", "run: resuming at step 4 of 16"))


def test_damage_changes_the_file(tmp_path: Path):
    for i in range(40):
        path = make_run(tmp_path / str(i)) / "metrics.jsonl"
        before, rng = path.read_bytes(), random.Random(i)
        damage(path, rng)
        assert not path.exists() or path.read_bytes() != before
        log_of(path.parent)  # reads what is left


def test_every_kind_has_its_turn_and_its_row():
    names = schedule(200, "")
    assert {*names} == {*KINDS}
    assert abs(len(names) - 200) <= len(KINDS)
    rows = table({"a clock": Counter(exact=2, hung=1), "a disk": Counter(refused=1)})
    assert rows[2:] == [
        "| a clock | 3 | 2 | 0 | 0 | 1 |",
        "| a disk | 1 | 0 | 1 | 0 | 0 |",
        "| all | 4 | 2 | 1 | 0 | 1 |",
    ]
