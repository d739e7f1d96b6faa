"""The learning rate, as a function of the step or, in a run with a time budget, of the time that is left.

After the warm-up it follows a schedule: a function from progress (0 to 1) to a factor on the learning rate. One of your
own gets the decorator `SCHEDULES.register(NAME)`, and `--lr-shape NAME` uses it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

from mixnn import dist
from mixnn.config import UserError
from mixnn.registry import Registry

MIN_STEPS = 20  # a time budget that leaves fewer steps than this trains nothing
WARMUP_SHARE, MAX_WARMUP_EPOCHS = 0.1, 5  # of a run of any length; 5 epochs are the paper's
BACKBONE_WARMUP_SHARE = 0.2  # share of the run in which the backbone's learning rate rises once it is no longer frozen
MAX_SLOWDOWN = 2.0
RECENT = 5  # the pace is the median of this many measurements, and so is the cost of a checkpoint
MAX_REPLAN_INTERVAL = 1.0  # seconds; each new plan makes the host wait for the device
MIN_REPLANS = 200  # new plans in a run, so that a short one ends in time as well
MAX_ENDING_SHARE = 0.02  # of the time, kept for leaving Python
MAX_EVALUATION_SHARE = 0.1  # of the time; evaluations that take more are left out


def _check_schedule(name: str, schedule: Any) -> None:
    """UserError for a schedule that cannot give learning rates: found now, not when the warm-up ends."""
    if not callable(schedule):
        raise UserError(f"the schedule {name} must be a function, not {schedule!r}")
    for progress in (i / 100 for i in range(101)):
        factor = schedule(progress)
        if isinstance(factor, bool) or not isinstance(factor, Real) or not 0 <= float(factor) < math.inf:
            raise UserError(
                f"the schedule {name} must turn progress (0 to 1) into a number of 0 or more; "
                f"at {progress:g} it gives {factor!r}"
            )


SCHEDULES: Registry[Callable[[float], float]] = Registry(
    "schedule",
    "schedules",
    {
        "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": lambda progress: 1 - progress,
    },
    check=_check_schedule,
)
"""Registry: name -> function from progress after the warm-up (0 to 1) to a factor on the learning rate."""


def learning_rate(step: int, base: float, warmup_steps: int, total_steps: int, shape: str = "cosine") -> float:
    """Linear from 0 to base at the last warm-up step, then base times a schedule (authors' code: half a cosine)."""
    if step < warmup_steps:
        return base * step / max(1, warmup_steps - 1)
    return base * float(SCHEDULES.find(shape)((step - warmup_steps) / max(1, total_steps - warmup_steps)))


def crop_side(stages: Sequence[tuple[int, float]], progress: float) -> int:
    """Side of the training crops at this share of the run; `stages` come from `parse_resolution`."""
    return next((side for side, until in stages if progress < until), stages[-1][0])


def backbone_rate(progress: float, heads_first: float) -> float:
    """Factor on the backbone's learning rate: 0 while the heads learn alone, then rising to 1."""
    return min(1.0, max(0.0, (progress - heads_first) / BACKBONE_WARMUP_SHARE)) if heads_first else 1.0


def short_warmup(epochs: int) -> int:
    """Epochs of warm-up for a run of any length: a tenth, at most the paper's 5, and never all of them."""
    return min(MAX_WARMUP_EPOCHS, max(1, epochs // 10)) if epochs > 1 else 0


class Cost(NamedTuple):
    """Seconds that some work took, and the seconds per step at that time: on a busy machine, both grow."""

    seconds: float
    pace: float = 0.0  # 0: not known yet


@dataclass
class TimePlan:
    """The plan of a run that is to end at a given time, or earlier if it has `max_steps`.

    From time to time, the steps that still fit are computed from the time left and the recent pace. `progress`
    goes from 0 to 1 in equal parts over the steps left. So the learning rate never jumps: if the pace changes or the
    machine stalls, the rest of the schedule becomes longer or shorter.
    """

    budget: float  # seconds for everything, start-up and the last evaluation included
    started: float  # when this process began, by the clock
    clock: Callable[[], float]
    ending: float = 0.0  # seconds that leaving Python will take
    spent: float = 0.0  # seconds that earlier processes of the run used
    progress: float = 0.0
    warmup: float = 0.0  # share of the progress in which the learning rate rises
    shape: str = "cosine"  # the schedule that it follows afterwards
    over: bool = False
    extended: bool = False  # the budget is not the one that `progress` was made for
    steps_left: int = 0
    max_steps: int = 0  # of the whole run, even if more fit; 0: no limit
    costs: dict[str, list[Cost]] = field(
        default_factory=dict
    )  # recent costs of the work at the end of the run, by its name
    total_costs: dict[str, float] = field(default_factory=dict)
    paces: list[float] = field(default_factory=list)  # recent seconds per step
    _block: int = 1  # steps between two plans
    _done: int = 0  # steps of the whole run so far
    _num_steps: int = 0  # steps since the last plan
    _block_started: float = 0.0

    def elapsed(self) -> float:
        return self.spent + self.clock() - self.started

    def reserve(self) -> float:
        """Seconds to keep for the end of the run: the usual cost of all work in `costs`, and leaving Python.

        All work after the last step belongs there: time it with `timing`, or put an estimate into `costs`.
        """
        ending = min(self.ending, MAX_ENDING_SHARE * self.budget)
        return ending + sum(self.cost(name) for name in self.costs)

    def left(self) -> float:
        """Seconds left for training steps."""
        return self.budget - self.elapsed() - self.reserve()

    def cost(self, name: str) -> float:
        """Expected seconds of a kind of work: the median of earlier times, adapted to the present pace."""
        return statistics.median([cost.seconds * self._slowdown(cost.pace) for cost in self.costs.get(name, [])] or [0])

    def _slowdown(self, pace: float) -> float:
        """Factor by which work takes longer now than at another pace; limited, as not all of it is computing."""
        return min(MAX_SLOWDOWN, max(1 / MAX_SLOWDOWN, self.pace / pace)) if self.pace and pace else 1.0

    @property
    def pace(self) -> float:
        """Seconds that a step takes at present; 0 if none was taken yet."""
        return max(1e-6, statistics.median(self.paces)) if self.paces else 0.0

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Time work that the end of the run repeats, so that time is kept for it."""
        start = self.clock()
        yield
        self.record(name, self.clock() - start)

    def record(self, name: str, seconds: float) -> None:
        """Record the seconds of work that the end of the run repeats."""
        measured = self.costs[name] if name in self.total_costs else []  # otherwise it holds an estimate
        self.costs[name] = [*measured, Cost(seconds, self.pace)][-RECENT:]
        self.total_costs[name] = self.total_costs.get(name, 0.0) + seconds

    def affords(self, name: str) -> bool:
        """Whether there is time for an evaluation now, before the end of the run."""
        return self.total_costs.get(name, 0.0) + self.cost(name) <= MAX_EVALUATION_SHARE * self.elapsed()

    def pace_known(self, times: list[float]) -> bool:
        """Whether these step times suffice to know the pace, or show that there is no time for more steps."""
        if len(times) < 2:
            return bool(times) and self.left() < times[0]
        # The first steps are slow, so two of them only tell if the time is far too short
        hopeless = self.left() < MIN_STEPS * min(times) / (2 if len(times) < 4 else 1)
        return hopeless or (len(times) >= 4 and (len(times) >= 40 or sum(times) >= 0.01 * self.budget))

    def begin(self, times: list[float], num_steps: int) -> None:
        """Make the first plan from the seconds of a few steps. `num_steps`: steps done before."""
        self._done = num_steps
        self.paces = times[1:] or times  # a first step is slower than the others
        for name, costs in self.costs.items():
            self.costs[name] = [Cost(cost.seconds, cost.pace or self.pace) for cost in costs]
        self._replan()
        if self.extended:  # the schedule of a run of all these steps, from here on
            self.progress, self.extended = num_steps / max(1, num_steps + self.steps_left), False

    def begin_step(self) -> None:
        if self._num_steps == 0:
            self._block_started = self.clock()

    def end_step(self, wait: Callable[[], object], replan: bool = False) -> None:
        """Count a step; now and then, or with `replan`, wait for the device and plan the rest again."""
        self.progress += (1 - self.progress) / max(1, self.steps_left)
        self.steps_left -= 1
        self._done += 1
        self._num_steps += 1
        if replan or self._num_steps >= self._block:
            wait()
            self.paces = [*self.paces, (self.clock() - self._block_started) / self._num_steps][-RECENT:]
            self._num_steps = 0
            self._replan()

    def _replan(self) -> None:
        """Count the steps that still fit; the main process decides for all. A step that fits by half is counted."""
        fit = max(0, int(self.left() / self.pace + 0.5))
        if self.max_steps:
            fit = min(fit, max(0, self.max_steps - self._done))
        replan_after = int(min(MAX_REPLAN_INTERVAL, self.budget / MIN_REPLANS) / self.pace)
        self.steps_left, self._block = dist.broadcast((fit, max(1, min(replan_after, fit // 2))))
        self.over = self.steps_left == 0

    def learning_rate(self, base: float) -> float:
        """Linear from 0 to base in the warm-up, then base times the schedule."""
        if self.progress < self.warmup:
            return base * self.progress / self.warmup
        return base * float(SCHEDULES.find(self.shape)((self.progress - self.warmup) / max(1e-9, 1 - self.warmup)))

    def state(self) -> dict[str, Any]:
        """The plan as a checkpoint stores it."""
        now = {"budget": self.budget, "spent": self.elapsed(), "costs": {name: self.cost(name) for name in self.costs}}
        return now | {name: getattr(self, name) for name in ("progress", "warmup", "over", "steps_left")}

    def load(self, state: dict[str, Any]) -> None:
        """Continue a plan. With another budget, the learning rate is that of a longer run from here on."""
        self.spent, self.progress, self.warmup = state["spent"], state["progress"], state["warmup"]
        self.costs = {name: [Cost(seconds)] for name, seconds in state["costs"].items()}
        self.extended = state["budget"] != self.budget
        self.over, self.steps_left = state["over"] and not self.extended, state["steps_left"]
        if self.extended and self.progress >= self.warmup:
            self.warmup = 0.0  # it is not repeated
