"""Curves in TensorBoard and Weights & Biases are those of metrics.jsonl."""

import sys
import types

import pytest

import mixnn
from mixnn.progress import Reporter
from mixnn.training.loggers import RunLoggers

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
    RunLoggers("wandb", run, 4, warn=print)
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


@pytest.fixture
def diary(registered):
    """What loggers are told: a class "mine", and "full", whose disk is full in the second epoch."""
    said = []

    @registered("mine")
    class Mine:
        def __init__(self, _, step):
            said.append(("start", step))

        def log(self, record):
            said.append(("log", record.pop("step")))

        def close(self):
            said.append("close")

    @registered("full")
    def full(_, record):
        if record["epoch"] == 2:
            raise OSError("the disk of the logger is full")
        said.append("not full")

    return said


def test_a_class_begins_with_the_steps_done_so_far_and_is_closed(tmp_path, diary):
    run = mixnn.pretrain("digits", out=tmp_path / "run", epochs=2, loggers="mine", **TINY)
    assert diary == [("start", 0), ("log", 2), ("log", 4), "close"]
    diary.clear()
    run = mixnn.pretrain(resume=run, epochs=3, verbose=Reporter(quiet=True))
    assert diary == [("start", 4), ("log", 6), "close"]
    assert [record["step"] for record in run.metrics()] == [2, 4, 6], "a logger gets a copy"


def test_training_goes_on_without_a_logger_that_fails(tmp_path, diary, capsys):
    run = mixnn.pretrain("digits", out=tmp_path / "run", epochs=3, loggers="full,mine", **TINY)
    assert diary == [("start", 0), "not full", ("log", 2), ("log", 4), ("log", 6), "close"]
    assert [record["epoch"] for record in run.metrics()] == [1, 2, 3]
    warning = "training goes on without the logger full, which failed: OSError: the disk of the logger is full"
    assert f"{warning} ({__file__}, line" in capsys.readouterr().err.replace("\n", "")


def test_loggers_are_closed_if_one_cannot_start_and_if_one_cannot_be_closed(tmp_path, diary, registered):
    @registered("bad")
    class Bad:
        def __init__(self, run, _):
            self.log = print
            if run.config.epochs == 1:
                raise OSError("no server")

        def log(self, record):
            pass

        def close(self):
            raise OSError("no server any more")

    with pytest.raises(OSError, match=r"no server$"):
        mixnn.pretrain("digits", out=tmp_path / "one", epochs=1, loggers="mine,bad", **TINY)
    assert diary == [("start", 0), "close"]
    diary.clear()
    run = mixnn.pretrain("digits", out=tmp_path / "two", epochs=2, loggers="bad,mine", **TINY)
    assert diary[-1] == "close"
    assert len(run.metrics()) == 2


def test_a_function_that_was_put_into_the_registry_is_a_logger_too(tmp_path, registered):  # noqa: ARG001
    seen = []
    mixnn.LOGGERS["plain"] = lambda _, record: seen.append(record["epoch"])
    mixnn.pretrain("digits", out=tmp_path / "run", epochs=2, loggers="plain", **TINY)
    assert seen == [1, 2]


@pytest.mark.parametrize("wrong", [lambda _: None, type("Short", (), {"log": lambda *_: None})])
def test_what_takes_other_arguments_is_refused_when_it_is_registered(wrong, registered):
    with pytest.raises(mixnn.UserError, match=r"the form f\(run, record\)|write __init__\(self, run, step\)"):
        registered("odd")(wrong)


@pytest.mark.parametrize("wrong", [5, type("Mute", (), {})])
def test_what_cannot_log_is_refused_when_it_is_registered(wrong, registered):
    with pytest.raises(mixnn.UserError, match="the logger odd must be a function of a run and a record, or a class"):
        registered("odd")(wrong)
