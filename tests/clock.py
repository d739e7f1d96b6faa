"""A clock that only moves when a test says so, for runs with a time budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mixnn.training.trainer import Trainer


class Clock:
    """Calling it tells the seconds; `now` is set by the test."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def use_clock(monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: Callable[[Trainer], float]) -> None:
    """Every trainer follows this clock, on which its steps take these seconds."""
    make, step = Trainer.__init__, Trainer._one_step

    def init(self: Trainer, *args: Any, **given: Any) -> None:
        make(self, *args, **given | {"clock": clock, "started": clock()})

    def one_step(self: Trainer) -> None:
        step(self)
        clock.now += seconds(self)

    monkeypatch.setattr(Trainer, "__init__", init)
    monkeypatch.setattr(Trainer, "_one_step", one_step)
