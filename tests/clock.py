"""A clock that only moves when a test says so, for runs with a time budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import mixnn.training.pretrain as pretrain
from mixnn.training.trainer import Trainer


class Clock:
    """Calling it tells the seconds; `now` is set by the test."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def use_clock(monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: Callable[[Trainer], float]) -> None:
    """Every trainer and judge follows this clock, on which steps take these seconds."""
    make, step, judge = Trainer.__init__, Trainer._one_step, pretrain.judge_start

    def init(self: Trainer, *args: Any, **given: Any) -> None:
        make(self, *args, **given | {"clock": clock, "started": clock()})

    def one_step(self: Trainer) -> None:
        step(self)
        clock.now += seconds(self)

    def judge_start(*args: Any) -> Any:
        return judge(*args[:-1], clock)

    monkeypatch.setattr(pretrain, "judge_start", judge_start)
    monkeypatch.setattr(Trainer, "__init__", init)
    monkeypatch.setattr(Trainer, "_one_step", one_step)
