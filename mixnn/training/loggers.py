"""Optional loggers: TensorBoard and Weights & Biases, in addition to metrics.jsonl.

A logger takes one record per epoch. A resumed run continues its own curves.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from inspect import signature
from typing import Any, Protocol

from mixnn.config import UserError, unknown
from mixnn.runs import Run


class Logger(Protocol):
    """What the trainer calls."""

    def log(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder's tensorboard/: `tensorboard --logdir RUN`."""

    def __init__(self, run: Run, step: int) -> None:
        writer = self.check().SummaryWriter
        self.writer = writer(str(run.path / "tensorboard"), purge_step=step + 1 if step else None)

    @staticmethod
    def check() -> Any:
        return _import("torch.utils.tensorboard", "tensorboard")

    def log(self, record: dict[str, Any]) -> None:
        for name, value in _numbers(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A run of the project `mixnn` (or $WANDB_PROJECT), named as the run folder."""

    def __init__(self, run: Run, step: int) -> None:
        wandb = _import("wandb", "wandb")
        name = run.path.resolve().name
        settings = dataclasses.asdict(run.config)
        resume = "allow" if step else None
        project = os.environ.get("WANDB_PROJECT", "mixnn")
        try:
            self.run = wandb.init(project=project, name=name, id=name, resume=resume, config=settings, dir=run.path)
        except wandb.Error as error:
            raise UserError(f"Weights & Biases could not start: {error}") from None

    @staticmethod
    def check() -> None:
        """Fail if nobody is logged in, where that can be asked without a prompt (wandb 0.31)."""
        login = _import("wandb", "wandb").login
        online = os.environ.get("WANDB_MODE", "online") in ("online", "shared")
        if online and "prompt" in signature(login).parameters and not login(prompt=False):
            raise UserError("nobody is logged in to Weights & Biases: run `wandb login`, or set WANDB_MODE=offline")

    def log(self, record: dict[str, Any]) -> None:
        self.run.log(_numbers(record), step=record["step"])

    def close(self) -> None:
        self.run.finish()


LOGGERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB}


def check_loggers(names: str) -> list[str]:
    """The loggers of a comma-separated list; an error before training if one is unknown or cannot be used."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in LOGGERS:
            raise unknown("logger", name, LOGGERS)
        LOGGERS[name].check()
    return found


def start_loggers(names: str, run: Run, step: int) -> list[Logger]:
    return [LOGGERS[name](run, step) for name in check_loggers(names)]


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"logging to {package} needs its package: run `pip install {package}`") from None
