"""Curves in TensorBoard and Weights & Biases are those of metrics.jsonl."""

import sys
import types

import pytest

import mixnn
from mixnn.progress import Reporter
from mixnn.training.loggers import start_loggers

TINY = {
    "backbone": "resnet8", "limit": 64, "batch_size": 32, "bn_groups": 1, "knn_every": 0, "checkpoint_every": 1,
    "verbose": Reporter(quiet=True), "options": {"support_size": 32, "hidden": 8, "dim": 8},
}  # fmt: skip


class FakeWandB(types.ModuleType):
    """Remembers what it was told."""

    def __init__(self):
        super().__init__("wandb")
        self.started, self.records, self.finished = [], [], 0

    class Error(Exception):
        """As wandb's own."""

    logged_in = True

    def login(self, prompt=True):
        assert not prompt, "nobody is asked in the middle of a job"
        return self.logged_in

    def init(self, **settings):
        if settings["project"] == "forbidden":
            raise self.Error("no such project")
        self.started.append(settings)
        return self

    def log(self, values, step):
        self.records.append((step, values))

    def finish(self):
        self.finished += 1


def without_step(record):
    return {k: v for k, v in record.items() if k != "step"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_each_number_of_each_epoch(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = mixnn.pretrain("digits", out=tmp_path / "run", epochs=3, loggers="tensorboard", **TINY)
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    records = run.metrics()
    assert set(events.Tags()["scalars"]) == set(without_step(records[0]))
    for name in ("loss", "purity", "epoch"):
        seen = [(event.step, event.value) for event in events.Scalars(name)]
        assert seen == [(r["step"], pytest.approx(r[name], rel=1e-6)) for r in records]


def test_wandb_gets_the_configuration_and_each_epoch(tmp_path, monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    run = mixnn.pretrain("digits", out=tmp_path / "my-run", epochs=2, loggers="wandb", **TINY)
    (started,) = fake.started
    assert (started["project"], started["name"], started["resume"]) == ("mixnn", "my-run", None)
    assert started["config"]["options"]["support_size"] == 32
    assert fake.records == [(r["step"], without_step(r)) for r in run.metrics()]
    assert fake.finished == 1
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    start_loggers("wandb", run, step=4)
    assert (fake.started[1]["project"], fake.started[1]["resume"], fake.started[1]["id"]) == ("mine", "allow", "my-run")


def test_an_unknown_or_missing_logger_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    with pytest.raises(mixnn.UserError, match="unknown logger 'tensorbord', did you mean 'tensorboard'"):
        mixnn.pretrain("digits", out=tmp_path / "run", loggers="tensorbord", **TINY)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(mixnn.UserError, match="pip install wandb"):
        mixnn.pretrain("digits", out=tmp_path / "run", loggers="wandb", **TINY)
    assert not (tmp_path / "run").exists()


def test_wandb_without_a_login_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    fake = FakeWandB()
    fake.logged_in = False
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(mixnn.UserError, match="run `wandb login`, or set WANDB_MODE=offline"):
        mixnn.pretrain("digits", out=tmp_path / "run", loggers="wandb", **TINY)
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "forbidden")
    with pytest.raises(mixnn.UserError, match="Weights & Biases could not start: no such project"):
        mixnn.pretrain("digits", out=tmp_path / "run", epochs=1, loggers="wandb", **TINY)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(mixnn.LOGGERS, "_entries", dict(mixnn.LOGGERS._entries))
    monkeypatch.setattr(mixnn.LOGGERS, "_origins", {})
    return mixnn.LOGGERS.register


def test_a_function_gets_the_record_of_each_epoch_and_cannot_change_it(tmp_path, registered):
    seen = []

    @registered("mine")
    def mine(run, record):
        seen.append((run.path, dict(record)))
        record.clear()

    run = mixnn.pretrain("digits", out=tmp_path / "run", epochs=2, loggers="mine", **TINY)
    assert seen == [(run.path, record) for record in run.metrics()]


def test_a_class_begins_with_the_steps_done_so_far_and_is_closed_also_after_an_error(tmp_path, registered):
    said = []

    @registered("mine")
    class Mine:
        def __init__(self, _, step):
            said.append(("start", step))

        def log(self, record):
            said.append(("log", record["step"]))
            if record["epoch"] == 2:
                raise RuntimeError("the disk of the logger is full")

        def close(self):
            said.append("close")

    with pytest.raises(RuntimeError, match="the disk of the logger is full"):
        mixnn.pretrain("digits", out=tmp_path / "run", epochs=3, loggers="mine", **TINY)
    assert said == [("start", 0), ("log", 2), ("log", 4), "close"]
    said.clear()
    run = mixnn.pretrain(resume=tmp_path / "run", verbose=Reporter(quiet=True))
    assert said == [("start", 4), ("log", 6), "close"]
    assert [record["step"] for record in run.metrics()] == [2, 4, 6]


@pytest.mark.parametrize("wrong", [5, type("Mute", (), {})])
def test_what_cannot_log_is_refused_when_it_is_registered(wrong, registered):
    with pytest.raises(mixnn.UserError, match="the logger odd must be a function of a run and a record, or a class"):
        registered("odd")(wrong)
