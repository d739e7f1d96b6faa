"""Runs with a time budget, on a clock that the tests move: they end in time, whatever the machine does."""

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mixnn
from mixnn.apps.report.verdict import judge
from mixnn.config import Config, Interrupted, duration_text, parse_duration
from mixnn.data import load
from mixnn.progress import Reporter
from mixnn.runs import Run, checkpoint
from mixnn.training import configure
from mixnn.training import trainer as trainer_module
from mixnn.training.judgement import max_useful_steps
from mixnn.training.pretrain import start_pretrain
from mixnn.training.schedule import MIN_STEPS, TimePlan, learning_rate
from mixnn.training.step import Step
from mixnn.training.trainer import FIRST_SAVE, SAVE_EVERY, Trainer
from tests.clock import Clock, use_clock

QUIET = Reporter(quiet=True)
BUDGET = 600.0
STEPS_PER_EPOCH = 4
SMALL: dict[str, Any] = {"limit": 64, "batch_size": 16, "bn_groups": 1, "backbone": "resnet8", "device": "cpu"}
OPTIONS = {"support_size": 32, "hidden": 16, "dim": 8}
BASE_LR = 0.5 * 16 / 256  # of the digits' recipe


class Machine:
    """Steps, checkpoints and kNN evaluations that do nothing but move the clock; notes the learning rates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[["Machine"], float]) -> None:
        self.clock, self.seconds = Clock(1000.0), seconds
        self.save_seconds = self.knn_seconds = 0.0
        self.started, self.rates, self.times = self.clock.now, [], []
        self.saves: list[tuple[float, int]] = []
        self.num_readings = 0
        save = Run.save_checkpoint

        def step(step: Step, _index: Any, lr: float, *_: Any) -> None:
            self.rates.append(lr)
            self.clock.now += self.seconds(self)
            self.times.append(self.now)
            step.names, step.sums = ["loss"], torch.zeros(1, dtype=torch.float64)
            step.count += 1

        def save_checkpoint(run: Run, number: int, *parts: Any) -> Path:
            self.clock.now += self.save_seconds
            self.saves.append((self.now, number))
            return save(run, number, *parts)

        def read(_: Trainer) -> dict[str, float]:
            self.clock.now += self.knn_seconds
            self.num_readings += 1
            return {"knn": 50.0, "knn_k": 5}

        monkeypatch.setattr(Step, "__call__", step)
        monkeypatch.setattr(Run, "save_checkpoint", save_checkpoint)
        monkeypatch.setattr(Trainer, "_knn", read)
        monkeypatch.setattr(Trainer, "_estimate_knn", lambda *_: self.knn_seconds)

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self.clock.now - self.started

    def pretrain(self, out: Path, **settings: Any) -> Run:
        """A run whose start-up took 20 seconds."""
        self.clock.now = self.started + 20
        common = SMALL | {"knn_every": 0, "time_budget": duration_text(BUDGET)}
        given = {name: value for name, value in (common | settings).items() if value is not None}
        about: dict[str, Any] = {"started": self.started, "clock": self.clock, "reporter": QUIET}
        return start_pretrain("digits", out=out, settings=given, options=OPTIONS, **about)

    def resume(self, run: Path, **settings: Any) -> Run:
        """Another process, which starts on a clock of its own."""
        self.clock.now = self.started = 50.0
        self.rates, self.times = [], []
        return start_pretrain(resume=run, clock=self.clock, reporter=QUIET, settings=settings)

    def schedule(self, run: Run) -> list[float]:
        """The learning rates of the steps that count, without those that only measured the pace."""
        return self.rates[-last_state(run)["step"] :]


def last_state(run: Run) -> dict[str, Any]:
    return checkpoint.load(checkpoint.list_checkpoints(run.path / "checkpoints")[0])[1]


def assert_rises_then_falls_to_nothing(rates: list[float]) -> None:
    top = rates.index(max(rates))
    assert all(a <= b for a, b in itertools.pairwise(rates[: top + 1]))
    assert all(a >= b for a, b in itertools.pairwise(rates[top:]))
    assert max(rates) > 0.9 * BASE_LR
    assert rates[-1] < 0.02 * BASE_LR


MACHINES: dict[str, Callable[[Machine], float]] = {
    "steady": lambda _: 0.7,
    "slow steps": lambda _: 19.0,
    "twice as slow from the middle on": lambda m: 0.5 if m.now < BUDGET / 2 else 1.0,
    "twice as fast from the middle on": lambda m: 1.0 if m.now < BUDGET / 2 else 0.5,
    "slow start": lambda m: 8.0 if len(m.rates) < 12 else 0.4,
    "a stall": lambda m: 90.0 if len(m.rates) == 200 else 0.7,
    "restless": lambda m: (0.2, 0.9, 0.4, 2.0, 0.3)[len(m.rates) % 5],
    "slower and slower": lambda m: 0.3 + m.now / 200,
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("knn_every", [0, 10])
def test_a_run_ends_in_time_whatever_the_pace(tmp_path: Path, monkeypatch, machine: str, knn_every: int):
    box = Machine(monkeypatch, MACHINES[machine])
    box.save_seconds, box.knn_seconds = 3.0, 15.0
    run = box.pretrain(tmp_path / "run", knn_every=knn_every)
    assert 0.97 * BUDGET <= box.now <= 1.03 * BUDGET
    assert_rises_then_falls_to_nothing(box.schedule(run))
    record, state = run.metrics()[-1], last_state(run)
    assert record["step"] == state["step"] > 0, "the last step is logged and saved"
    assert ("knn" in record) == bool(knn_every)
    assert run.config.epochs == Run.open(run.path).config.epochs == state["step"] // STEPS_PER_EPOCH
    assert record["epoch"] == pytest.approx(state["step"] / STEPS_PER_EPOCH, abs=0.01)
    assert judge(run.metrics(), run.config.epochs).state != "interrupted"


def test_a_slow_machine_at_the_very_end_costs_less_than_five_percent(tmp_path: Path, monkeypatch):
    box = Machine(monkeypatch, lambda m: 0.7 if m.now < 0.98 * BUDGET else 7.0)
    box.pretrain(tmp_path / "run")
    assert box.now <= 1.05 * BUDGET


def test_evaluations_take_at_most_a_tenth_of_the_time_and_the_last_one_is_kept(tmp_path: Path, monkeypatch):
    box = Machine(monkeypatch, lambda _: 0.5)
    box.knn_seconds = 20.0
    run = box.pretrain(tmp_path / "run", knn_every=1)
    assert 2 <= box.num_readings <= 0.1 * BUDGET / 20 + 1
    assert "knn" in run.metrics()[-1]
    assert 0.97 * BUDGET <= box.now <= 1.03 * BUDGET


def test_an_evaluation_that_would_take_too_long_is_left_out(tmp_path: Path, monkeypatch, capsys):
    box = Machine(monkeypatch, lambda _: 0.5)
    box.knn_seconds = 100.0
    run = box.pretrain(tmp_path / "run", knn_every=1)
    assert box.num_readings == 0
    assert 0.97 * BUDGET <= box.now <= 1.03 * BUDGET
    assert "a kNN evaluation would take 100 of 600 s and is left out" in " ".join(capsys.readouterr().err.split())
    assert run.metrics()


def test_the_time_of_an_evaluation_is_estimated_from_a_few_images(monkeypatch):
    clock, slow = Clock(), iter((9.0, 0.01, 0.02))  # seconds per image; the first time is slower

    def encode(*args: Any, **_: Any) -> torch.Tensor:
        clock.now += next(slow) * len(args[2])
        return torch.zeros(1)

    config = Config(data="digits", image_size=8, time_budget="1h", options=OPTIONS, **SMALL)
    sets = load("digits", "train"), load("digits", "test")
    trainer = Trainer(config, sets[0], QUIET, sets, clock=clock)
    monkeypatch.setattr(trainer_module, "features", encode)
    assert trainer._estimate_knn(*sets) == pytest.approx(0.02 * sum(map(len, sets)))


def test_the_reserve_grows_with_what_is_done_at_the_end():
    clock = Clock()
    plan = TimePlan(100.0, 0.0, clock)
    before = plan.reserve()
    for seconds in (2.0, 4.0, 60.0):  # a single slow one does not count
        with plan.timing("judgement"):
            clock.now += seconds
    assert plan.reserve() == before + 4.0
    assert plan.left() == 100 - 66 - plan.reserve()


def test_two_slow_steps_at_the_beginning_are_no_reason_to_give_up():
    plan = TimePlan(100.0, 0.0, Clock())
    nearly_enough = plan.left() / (0.8 * MIN_STEPS)
    assert not plan.pace_known([nearly_enough] * 2), "later steps may be faster"
    assert plan.pace_known([nearly_enough] * 4)
    assert plan.pace_known([3 * nearly_enough] * 2), "hopeless"


def test_what_the_end_will_take_follows_the_pace():
    clock = Clock()
    plan = TimePlan(100.0, 0.0, clock)
    with plan.timing("judgement"):
        clock.now += 4
    plan.begin([9.0, 1.0, 1.0], 0)
    assert plan.cost("judgement") == 4
    plan.paces = [1.5]
    assert plan.cost("judgement") == 6
    plan.paces = [50.0]
    assert plan.cost("judgement") == 8, "not everything gets slower with the steps"


@pytest.mark.parametrize(("budget", "steps"), [(600.0, 120), (100.0, 50)], ids=["more steps fit", "fewer steps fit"])
def test_a_plan_with_a_limit_of_steps_ends_there_or_in_time(budget: float, steps: int):
    clock = Clock(0.0)
    plan = TimePlan(budget, clock.now, clock, max_steps=120)
    plan.begin([2.0, 2.0, 2.0, 2.0], 0)
    done, rates = 0, []
    while not plan.over:
        plan.begin_step()
        rates.append(plan.learning_rate(1.0))
        clock.now += 2.0
        plan.end_step(lambda: None)
        done += 1
    assert done == steps
    assert rates[0] == 1.0
    assert rates[-1] < 0.01, "the schedule is that of a run with this many steps"


def test_images_that_the_start_knows_get_fewer_steps():
    assert [max_useful_steps(share) for share in (0.0, 0.35, 0.75, 1.0)] == [600, 923, 2400, 5000]


def test_a_run_from_good_weights_ends_before_its_time_if_more_steps_would_harm(tmp_path: Path, monkeypatch, capsys):
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    small = SMALL | {"limit": 0}
    start = start_pretrain(
        images, out=tmp_path / "start", settings=small | {"epochs": 1}, options=OPTIONS, reporter=QUIET
    )
    box = Machine(monkeypatch, lambda _: 0.5)
    monkeypatch.setattr(trainer_module, "max_useful_steps", lambda share: 200 if share == 0.3 else 0)
    monkeypatch.setattr(trainer_module, "trained_share", lambda *_: 0.3)
    settings = small | {"time_budget": duration_text(BUDGET), "init_from": str(start.path)}
    timing: dict[str, Any] = {"started": box.started, "clock": box.clock, "reporter": Reporter()}
    run = start_pretrain(images, out=tmp_path / "run", settings=settings, options=OPTIONS, **timing)
    assert run.metrics()[-1]["step"] == 200
    assert "longer training would not help" in capsys.readouterr().err


def test_the_images_are_looked_at_once_although_the_number_of_epochs_is_known_later(tmp_path: Path, monkeypatch):
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    seen = []
    monkeypatch.setattr(configure, "mirrored_unlike", lambda images: seen.append(images) or 0.0)
    box = Machine(monkeypatch, lambda _: 5.0)
    settings = SMALL | {"limit": 0, "time_budget": duration_text(BUDGET), "init_from": "none"}
    timing: dict[str, Any] = {"started": box.started, "clock": box.clock, "reporter": QUIET}
    start_pretrain(images, out=tmp_path / "run", settings=settings, options=OPTIONS, **timing)
    assert len(seen) == 1


@pytest.mark.parametrize("pace", [2.0, 40.0, 900.0])
def test_a_budget_that_is_too_short_says_what_is_needed_and_keeps_the_first_weights(
    tmp_path: Path, monkeypatch, capsys, pace: float
):
    clock = Clock()
    use_clock(monkeypatch, clock, lambda _: pace)
    given = SMALL | {"options": OPTIONS, "knn_every": 0, "verbose": QUIET}
    run = mixnn.pretrain("digits", out=tmp_path / "run", time_budget="30s", **given)
    said = " ".join(capsys.readouterr().err.split())
    assert "too short to train" in said
    assert f"at least {MIN_STEPS} steps are needed" in said
    assert "or more, with overwrite=True" in said
    assert "was not trained" in said
    needed = parse_duration(said.split("time_budget='")[1].split("'")[0])
    assert needed >= MIN_STEPS * pace
    assert clock.now <= max(30.0, pace), "one step is enough to see it"
    monkeypatch.undo()
    untrained = mixnn.pretrain("digits", out=tmp_path / "untrained", epochs=0, **given)
    ours, theirs = (run.load_checkpoint(print)[0] for run in (run, untrained))
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items() if name != "sums")
    assert run.config.epochs == 0
    assert judge(run.metrics(), run.config.epochs).state == "untrained"


def test_measuring_the_pace_leaves_no_trace():
    config = Config(data="digits", image_size=8, time_budget="1h", options=OPTIONS, **SMALL)
    trainer = Trainer(config, load("digits", "train"), QUIET)
    before = {name: t.clone() for name, t in trainer.state()[0].items() if name != "sums"}
    trainer.measure()
    after = trainer.state()[0]
    assert trainer.plan.steps_left > 0
    assert trainer.done == 0
    assert all(torch.equal(after[name], t) for name, t in before.items())


def test_the_warm_up_is_a_tenth_of_the_time_unless_the_user_has_one(tmp_path: Path, monkeypatch):
    def rising_share(**given: Any) -> float:
        box = Machine(monkeypatch, lambda _: 2.0)
        rates = box.schedule(box.pretrain(tmp_path / str(len(given)), **given))
        monkeypatch.undo()
        return rates.index(max(rates)) / len(rates)

    epochs = BUDGET / 2 / STEPS_PER_EPOCH
    assert rising_share() == pytest.approx(5 / epochs, abs=0.02), "at most five epochs"
    assert rising_share(warmup_epochs=30) == pytest.approx(30 / epochs, abs=0.05)


# Resuming


def stop_at(step: int, pace: float = 1.0) -> Callable[[Machine], float]:
    """The process is asked to stop in this step, counting those that measure the pace."""

    def seconds(machine: Machine) -> float:
        if len(machine.rates) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return pace

    return seconds


def test_a_resumed_run_uses_the_rest_of_its_time_and_its_learning_rate_goes_on(tmp_path: Path, monkeypatch):
    box = Machine(monkeypatch, stop_at(250))
    with pytest.raises(Interrupted):
        box.pretrain(tmp_path / "run")
    spent, last_rate = box.now, box.rates[-1]
    assert 0.3 * BASE_LR < last_rate < BASE_LR
    assert last_state(Run.open(tmp_path / "run"))["time"]["spent"] == pytest.approx(spent, abs=2)
    box.seconds = lambda _: 2.0
    run = box.resume(tmp_path / "run")
    assert spent + box.now == pytest.approx(BUDGET, rel=0.03)
    rates = box.rates
    assert 0.98 * last_rate < rates[0] <= last_rate
    assert rates[-1] < 0.02 * BASE_LR
    assert all(a >= b for a, b in itertools.pairwise(rates))
    before = (run.path / "metrics.jsonl").read_text(), run.config
    again = box.resume(run.path)
    assert box.rates == [], "it is finished"
    assert ((run.path / "metrics.jsonl").read_text(), again.config) == before


def test_a_run_that_died_after_its_last_checkpoint_is_finished_on_resume(tmp_path: Path, monkeypatch):
    box = Machine(monkeypatch, lambda _: 7.0)
    log = Run.log

    def die(run: Run, record: dict[str, Any]) -> None:
        if record["step"] % STEPS_PER_EPOCH:  # only the last one ends in the middle of an epoch
            raise RuntimeError("killed")
        log(run, record)

    monkeypatch.setattr(Run, "log", die)
    with pytest.raises(RuntimeError, match="killed"):
        box.pretrain(tmp_path / "run")
    assert judge(Run.open(tmp_path / "run").metrics(), Run.open(tmp_path / "run").config.epochs).state == "interrupted"
    monkeypatch.setattr(Run, "log", log)
    run = box.resume(tmp_path / "run")
    assert box.rates == []
    assert run.metrics()[-1]["step"] == last_state(run)["step"]
    assert judge(run.metrics(), Run.open(run.path).config.epochs).state != "interrupted"


def test_a_slow_run_is_saved_soon_and_then_at_least_every_ten_minutes(tmp_path: Path, monkeypatch):
    box = Machine(monkeypatch, lambda _: 12.0)
    many = {"limit": 1280, "epochs": 3, "warmup_epochs": 1, "time_budget": None}  # an epoch takes 16 minutes
    run = box.pretrain(tmp_path / "run", **many)
    times = [20.0, *(time for time, _ in box.saves)]
    assert times[1] - times[0] <= FIRST_SAVE + 12
    assert all(b - a <= SAVE_EVERY + 12 for a, b in itertools.pairwise(times))
    assert any(step % 80 for _, step in box.saves)
    assert [record["step"] for record in run.metrics()] == [80, 160, 240]
    assert run.metrics()[-1]["seconds"] == pytest.approx(2880)
    assert run.metrics()[0]["images_per_s"] == round(16 / 12)


def test_a_checkpoint_in_the_middle_of_an_epoch_changes_no_bit(tmp_path: Path, monkeypatch):
    given = SMALL | {"options": OPTIONS, "knn_every": 0, "epochs": 3, "warmup_epochs": 1, "verbose": QUIET}
    plain = mixnn.pretrain("digits", out=tmp_path / "plain", **given)
    monkeypatch.setattr(trainer_module, "FIRST_SAVE", 0.0)
    monkeypatch.setattr(trainer_module, "SAVE_EVERY", 0.0)
    often = mixnn.pretrain("digits", out=tmp_path / "often", **given)
    last_two = [int(path.stem.split("-")[1]) for path in checkpoint.list_checkpoints(often.path / "checkpoints")]
    assert last_two == [12, 11]
    ours, theirs = (run.load_checkpoint(print)[0] for run in (often, plain))
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())
    checkpoint.list_checkpoints(often.path / "checkpoints")[0].unlink()
    mixnn.pretrain(resume=often.path, verbose=QUIET)
    ours = often.load_checkpoint(print)[0]
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())


# How a budget is written


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("90s", 90),
        ("6m", 360),
        ("6min", 360),
        ("30 min", 1800),
        ("2h", 7200),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("1h2m3s", 3723),
        ("45 s", 45),
        ("2 hours", 7200),
        ("1 Hour", 3600),
        ("10 minutes", 600),
        ("2 hrs 30 mins 10 secs", 9010),
        ("30 seconds", 30),
        ("0.5s", 0.5),
    ],
)
def test_a_time_budget_is_read(text: str, seconds: float):
    assert parse_duration(text) == seconds
    assert parse_duration(duration_text(seconds)) == seconds


@pytest.mark.parametrize(
    "text", ["soon", "0m", "0", "-5m", "m", "infh", "inf", "nan", "10", 10, 10.5, "30m1h", "1h30", " ", "9" * 400 + "h"]
)
def test_a_time_budget_that_is_none(text: Any):
    with pytest.raises(mixnn.UserError, match="write it as 90s, 6m, 1h30m or 2 hours"):
        mixnn.pretrain("digits", time_budget=text, verbose=QUIET)


def test_a_time_budget_and_epochs_exclude_each_other():
    with pytest.raises(mixnn.UserError, match="leave out one of the two"):
        mixnn.pretrain("digits", time_budget="1m", epochs=3, verbose=QUIET)


def test_the_budget_is_part_of_the_configuration_and_older_files_lack_it(tmp_path: Path, monkeypatch):
    run = Machine(monkeypatch, lambda _: 5.0).pretrain(tmp_path / "run")
    assert Run.open(run.path).config.time_budget == "10m"
    file = run.path / "config.yaml"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if "time_budget" not in line))
    assert Run.open(run.path).config.time_budget == ""


def test_tables_refuse_a_time_budget():
    with pytest.raises(mixnn.UserError, match="use epochs instead of time_budget"):
        mixnn.reproduce("ablation", data="digits", time_budget="1m", verbose=QUIET)


# Making a run longer


def test_more_epochs_follow_the_schedule_of_the_new_total_and_repeat_no_warm_up(tmp_path: Path, monkeypatch):
    box = Machine(monkeypatch, lambda _: 1.0)
    fixed = {"epochs": 5, "warmup_epochs": 1, "time_budget": None}
    run = box.pretrain(tmp_path / "run", **fixed)
    longer = box.resume(run.path, epochs="10")
    assert box.rates == [learning_rate(step, BASE_LR, STEPS_PER_EPOCH, 40) for step in range(20, 40)]
    assert [record["epoch"] for record in longer.metrics()] == list(range(1, 11))
    assert Run.open(run.path).config.epochs == 10


def test_more_epochs_say_so_in_one_line_and_fewer_than_done_are_refused(tmp_path: Path, monkeypatch, capsys):
    box = Machine(monkeypatch, lambda _: 1.0)
    run = box.pretrain(tmp_path / "run", epochs=5, warmup_epochs=1, time_budget=None)
    with pytest.raises(mixnn.UserError, match="has trained for 5 epochs already: use epochs=5 or more"):
        box.resume(run.path, epochs=4)
    with pytest.raises(mixnn.UserError, match="leave out one of the two"):
        box.resume(run.path, epochs=8, time_budget="1m")
    assert Run.open(run.path).config.epochs == 5
    start_pretrain(resume=run.path, settings={"epochs": 8}, clock=box.clock, reporter=Reporter())
    said = " ".join(capsys.readouterr().err.split())
    assert "resuming at step 20 of 32; 8 epochs instead of 5, so the learning rate is 0.0" in said


def test_a_fixed_run_that_is_made_longer_keeps_other_settings_of_its_file(tmp_path: Path, monkeypatch):
    box = Machine(monkeypatch, lambda _: 1.0)
    run = box.pretrain(tmp_path / "run", epochs=2, warmup_epochs=1, time_budget=None, device="auto")
    box.resume(run.path, epochs=3, device="cpu")
    assert Run.open(run.path).config.device == "auto"


@pytest.mark.parametrize("before", [{"epochs": 50, "warmup_epochs": 5, "time_budget": None}, {"time_budget": "5m"}])
def test_more_time_is_added_to_any_run_and_its_learning_rate_falls_to_nothing_again(
    tmp_path: Path, monkeypatch, before: dict[str, Any]
):
    box = Machine(monkeypatch, lambda _: 1.0)
    run = box.pretrain(tmp_path / "run", **before)
    done, spent = last_state(run)["step"], last_state(run).get("time", {}).get("spent", 200.0)
    run = box.resume(run.path, time_budget="4m")
    assert box.now == pytest.approx(240, rel=0.03)
    steps = last_state(run)["step"] - done
    rates = box.rates[-steps:]
    assert 200 < steps < 240
    start = 0.5 * BASE_LR  # half a cosine, at about half of its way
    assert rates[0] == pytest.approx(start, rel=0.35)
    assert all(a >= b for a, b in itertools.pairwise(rates))
    assert rates[-1] < 0.02 * BASE_LR
    stored = Run.open(run.path).config
    assert parse_duration(stored.time_budget) == pytest.approx(spent + 240, abs=0.1)
    assert stored.epochs == (done + steps) // STEPS_PER_EPOCH
    steps_logged = [record["step"] for record in run.metrics()]
    assert steps_logged == sorted(set(steps_logged))


def test_a_time_budgeted_run_may_get_a_number_of_epochs(tmp_path: Path, monkeypatch):
    box = Machine(monkeypatch, lambda _: 5.0)
    run = box.pretrain(tmp_path / "run")
    done = last_state(run)["step"]
    assert done % STEPS_PER_EPOCH, "it ended in the middle of an epoch"
    epochs = done // STEPS_PER_EPOCH + 10
    run = box.resume(run.path, epochs=epochs)
    assert len(box.rates) == epochs * STEPS_PER_EPOCH - done
    assert all(a >= b for a, b in itertools.pairwise(box.rates))
    assert 0 < box.rates[-1] < box.rates[0] < BASE_LR
    stored = Run.open(run.path).config
    assert (stored.epochs, stored.time_budget) == (epochs, "")
    assert judge(run.metrics(), stored.epochs).state != "interrupted"


def test_more_time_helps_a_run_whose_budget_was_too_short(tmp_path: Path, monkeypatch):
    box = Machine(monkeypatch, lambda _: 1.0)
    run = box.pretrain(tmp_path / "run", time_budget="25s")
    assert last_state(run)["step"] == 0
    run = box.resume(run.path, time_budget="5m")
    assert box.now == pytest.approx(300, rel=0.03)
    assert_rises_then_falls_to_nothing(box.schedule(run))
