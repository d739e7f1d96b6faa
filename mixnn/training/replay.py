"""Replay: train a part of a run once more, in a temporary folder, to see whether the same bits come out.

`replay_interval` goes from the checkpoint before the last to the last one. `replay_resume` takes a few new steps twice:
without a break, and with a stop, a checkpoint and a resume in the middle.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mixnn import methods
from mixnn.config import Config, Interrupted, UserError, saved_config
from mixnn.files import scratch_folder
from mixnn.progress import NullReporter
from mixnn.runs import Run, checkpoint
from mixnn.runs.weights import KEPT
from mixnn.training.pretrain import RESUMABLE_SETTINGS, judge_again
from mixnn.training.trainer import Trainer

REPLAY_STEPS = 2  # steps before and after the stop in `replay_resume`
PACE_STEPS = 3  # after these, the time that the rest will take is estimated

Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]  # what checkpoint.load returns


class OutOfTime(Exception):
    """The replay would take longer than allowed."""


@dataclass(frozen=True)
class Comparison:
    """How many tensors were compared, which of them differ, and by how much at most."""

    first: int  # step where the replay began
    last: int
    num_tensors: int
    different: list[str]  # names, the one with the largest difference first
    largest: float = 0.0  # inf if that is not a number


def replay_interval(run: Run, before: Checkpoint, after: Checkpoint, device: str, until: float) -> Comparison:
    """Train from one checkpoint to the next and compare the result with that one.

    `until`: a reading of time.perf_counter at which the replay gives up with OutOfTime.
    """
    config = _config(run, after[1], device)
    found = _train_to(run, config, before, after[1]["step"], until, judged=True)[0]
    # The weights that a run keeps because it ended worse than it began may be those of an earlier moment.
    leave_out = KEPT if run.judgement().get("kept", 1.0) < 1 else "\n"
    expected = {name: t for name, t in after[0].items() if not name.startswith(leave_out)}
    return _compare(found, expected, before[1]["step"], after[1]["step"])


def replay_resume(run: Run, start: Checkpoint, device: str, until: float) -> Comparison:
    """Train a few steps from a checkpoint twice, the second time with a stop and a resume, and compare the two."""
    config = _config(run, start[1], device)
    step = start[1]["step"]
    epochs = 2 * math.ceil(step * config.batch_size / start[1]["data"]["images"]) + 2 * REPLAY_STEPS
    config = replace(config, epochs=max(config.epochs, epochs))  # a finished run would not train further
    whole = _train_to(run, config, start, step + 2 * REPLAY_STEPS, until)[0]
    middle = _train_to(run, config, start, step + REPLAY_STEPS, until)
    with scratch_folder(Path(tempfile.gettempdir())) as scratch:
        stopped = checkpoint.load(checkpoint.save(scratch, step + REPLAY_STEPS, *middle))
    last = step + 2 * REPLAY_STEPS
    return _compare(_train_to(run, config, stopped, last, until)[0], whole, step, last)


def _config(run: Run, state: dict[str, Any], device: str) -> Config:
    """The settings that a checkpoint was trained with, without what does not change its tensors."""
    then = saved_config(state["settings"]) if "settings" in state else run.config
    here = {name: getattr(run.config, name) for name in (*RESUMABLE_SETTINGS, "data", "labels")}
    here |= {"device": device, "mode": "eager" if run.config.mode == "auto" else run.config.mode}
    return replace(then, **here, time_budget="", knn_every=0, loggers="")


def _train_to(run: Run, config: Config, start: Checkpoint, step: int, until: float, judged: bool = False) -> Checkpoint:
    """Tensors and state after a step, trained from a checkpoint."""
    dataset = run.dataset(config.data_dir)
    with run.explain_unknown_names(), scratch_folder(Path(tempfile.gettempdir())) as scratch:
        images = dataset.load(methods.find(config.method).split, config.reading_size)
        trainer = _Replayer(config, images, NullReporter(), network=run.network)
        trainer.load(*start)
        trainer.last_step, trainer.until = step, until
        temporary = replace(run, path=scratch, config=config)
        if judged and dataset.recipe is None and not trainer.over:
            judge_again(trainer, temporary)
        try:
            trainer.fit(temporary)
        except _Reached:
            tensors, state = trainer.state()
            return {name: t.detach().cpu().clone() for name, t in tensors.items()}, state
        except Interrupted:
            raise KeyboardInterrupt from None
    raise UserError(f"the training ended at step {trainer.done}, before step {step}")


class _Reached(Exception):
    """The step to which the replay trains is done."""


class _Replayer(Trainer):
    """A trainer that stops where it would save its last step, and saves nothing."""

    last_step = 0
    until = math.inf
    began = 0.0
    steps_taken = 0

    def _one_step(self) -> None:
        self.began = self.began or time.perf_counter()
        super()._one_step()
        self.steps_taken += 1
        now, left = time.perf_counter(), self.last_step - self.done
        pace = (now - self.began) / self.steps_taken if self.steps_taken >= PACE_STEPS else 0.0
        if left and now + left * pace > self.until:
            raise OutOfTime

    def _unlogged(self, run: Run) -> bool:  # noqa: ARG002
        return False

    def _save_due(self) -> bool:
        return self.done == self.last_step

    def _save(self, run: Run) -> None:  # noqa: ARG002
        if self.done == self.last_step:
            raise _Reached


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor], first: int, last: int) -> Comparison:
    """Compare tensors of the same names bit for bit."""
    sizes = {
        name: _difference(found[name], expected[name])
        for name in expected
        if name in found and _bytes(found[name]) != _bytes(expected[name])
    }
    different = sorted(sizes, key=lambda name: -sizes[name])
    return Comparison(first, last, len(expected.keys() & found.keys()), different, max(sizes.values(), default=0.0))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors; inf if they are not numbers of one shape."""
    if one.shape != other.shape or not (one.is_floating_point() and other.is_floating_point()):
        return math.inf
    largest = float((one.double().cpu() - other.double().cpu()).abs().max())
    return largest if math.isfinite(largest) else math.inf


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Let torch use this many threads in the block: on a CPU, the order of sums depends on it. 0: leave it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
