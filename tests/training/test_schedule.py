"""The learning rate of the authors' code: an inclusive linear warm-up, then half a cosine."""

import itertools
import math

import pytest

import mixnn
from mixnn.training.schedule import TimePlan, crop_side, learning_rate

STEPS, WARMUP, BASE = 200 * 195, 5 * 195, 0.06  # the paper's CIFAR run


def lr(step):
    return learning_rate(step, BASE, WARMUP, STEPS)


@pytest.mark.parametrize(
    "step, want",
    [(0, 0.0), (974, 0.06), (975, 0.06), (STEPS - 1, 1.0e-10)],
    ids=["first", "last of warm-up", "first of cosine", "last"],
)
def test_endpoints_are_those_of_the_authors_run(step, want):
    assert lr(step) == pytest.approx(want, rel=0.05, abs=1e-12)


def test_warm_up_is_an_inclusive_line_and_the_rest_half_a_cosine():
    for step in (1, 100, 487, 973):
        assert lr(step) == pytest.approx(BASE * step / (WARMUP - 1))
    for step in (976, 10_000, 30_000, 38_000):
        assert lr(step) == pytest.approx(BASE / 2 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))))
    middle = WARMUP + (STEPS - WARMUP) // 2
    assert lr(middle) == pytest.approx(BASE / 2, rel=1e-3)


def test_the_rate_rises_through_warm_up_and_falls_ever_after():
    rates = [lr(step) for step in range(STEPS)]
    assert all(a < b for a, b in itertools.pairwise(rates[:WARMUP]))
    assert all(a > b for a, b in itertools.pairwise(rates[WARMUP:]))
    assert max(rates) == pytest.approx(BASE)
    assert min(rates) == 0


def test_without_warm_up_the_cosine_starts_at_once():
    rates = [learning_rate(step, 1.0, 0, 4) for step in range(4)]
    assert rates == pytest.approx([1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4])


@pytest.mark.parametrize("warmup, total", [(1, 1), (1, 4), (4, 4), (10, 4)])
def test_degenerate_runs_have_rates_between_zero_and_base(warmup, total):
    assert all(0 <= learning_rate(step, 1.0, warmup, total) <= 1 for step in range(total))


def test_a_linear_rate_falls_in_a_straight_line_after_the_same_warm_up():
    rates = [learning_rate(step, 1.0, 3, 7, "linear") for step in range(7)]
    assert rates == pytest.approx([0, 0.5, 1, 1, 0.75, 0.5, 0.25])
    plan = TimePlan(10.0, 0.0, lambda: 0.0, progress=0.6, warmup=0.2, shape="linear")
    assert plan.learning_rate(2.0) == pytest.approx(1.0)


def test_each_side_of_the_crops_is_used_up_to_its_share_of_the_run():
    stages = [(16, 0.25), (24, 0.5), (32, 1.0)]
    assert [crop_side(stages, i / 8) for i in range(9)] == [16, 16, 24, 24, 32, 32, 32, 32, 32]


def test_a_schedule_of_the_users_multiplies_the_rate_after_the_warm_up(monkeypatch):
    monkeypatch.setattr(mixnn.SCHEDULES, "_entries", dict(mixnn.SCHEDULES._entries))
    mixnn.SCHEDULES.register("late")(lambda progress: 1.0 if progress < 0.5 else 0.1)
    assert [learning_rate(step, 2.0, 2, 6, "late") for step in range(6)] == pytest.approx([0, 2, 2, 2, 0.2, 0.2])
    plan = TimePlan(10.0, 0.0, lambda: 0.0, progress=0.7, warmup=0.2, shape="late")
    assert plan.learning_rate(2.0) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "wrong",
    [
        *(0.5, lambda _: None, lambda _: math.nan, lambda progress: 0.5 - progress),
        lambda progress: -1.0 if 0.6 < progress < 0.9 else 1.0,
    ],
)
def test_what_gives_no_learning_rate_is_refused_when_it_is_registered(wrong):
    with pytest.raises(
        mixnn.UserError, match=r"the schedule odd must (turn progress \(0 to 1\) into a number|be a function)"
    ):
        mixnn.SCHEDULES.register("odd")(wrong)
    assert "odd" not in mixnn.SCHEDULES


def test_an_unknown_schedule_is_refused_before_training(tmp_path):
    with pytest.raises(mixnn.UserError, match="unknown schedule 'cosin', did you mean 'cosine'"):
        mixnn.pretrain("digits", out=tmp_path / "run", lr_shape="cosin")
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_needs_its_schedule_before_it_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(mixnn.SCHEDULES, "_entries", dict(mixnn.SCHEDULES._entries))
    monkeypatch.setattr(mixnn.SCHEDULES, "_origins", {})
    mixnn.SCHEDULES.register("late")(lambda _: 1.0)
    given = {"backbone": "resnet8", "limit": 64, "batch_size": 32, "bn_groups": 1, "knn_every": 0, "verbose": False}
    run = mixnn.pretrain("digits", epochs=1, warmup_epochs=0, lr_shape="late", out=tmp_path / "run", **given)
    del mixnn.SCHEDULES["late"]
    with pytest.raises(mixnn.UserError, match="unknown schedule 'late'"):
        mixnn.pretrain(resume=run, epochs=3, verbose=False)
    assert len(run.metrics()) == 1
