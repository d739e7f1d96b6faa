"""Optional loggers, in addition to metrics.jsonl: TensorBoard, Weights & Biases, and those of your own.

A logger takes one record per epoch. A resumed run continues its own curves. One of your own gets the decorator
`LOGGERS.register(NAME)`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

from mixnn.config import UserError
from mixnn.registry import Registry
from mixnn.runs import Run


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


class FunctionLogger:
    """Calls a function of the user after each epoch, with the run and the record."""

    def __init__(self, function: Callable[[Run, dict[str, Any]], object], run: Run, step: int) -> None:  # noqa: ARG002
        self.function, self.run = function, run

    def log(self, record: dict[str, Any]) -> None:
        self.function(self.run, dict(record))


def _make_logger(name: str, thing: Any) -> Callable[[Run, int], Any]:  # noqa: ARG001
    """What is called with a run and its step to begin logging: a class, or one that wraps a function."""
    return thing if isinstance(thing, type) else functools.partial(FunctionLogger, thing)


def _check_logger(name: str, logger: Any) -> None:
    wrapped = logger.args[0] if isinstance(logger, functools.partial) else getattr(logger, "log", None)
    if not callable(wrapped):
        raise UserError(
            f"the logger {name} must be a function of a run and a record, or a class with the method log(record)"
        )


LOGGERS: Registry[Any] = Registry(
    "logger", "loggers", {"tensorboard": TensorBoard, "wandb": WandB}, _make_logger, _check_logger
)
"""Registry: name -> class that is made of a run and its step and has log(record), perhaps also check() and close().

A function of a run and a record can be registered as well.
"""


def logger_names(names: str) -> list[str]:
    """The names in a comma-separated list."""
    return [name.strip() for name in names.split(",") if name.strip()]


def check_loggers(names: str) -> list[str]:
    """The loggers of a comma-separated list; an error before training if one is unknown or cannot be used."""
    found = logger_names(names)
    for name in found:
        check = getattr(LOGGERS.find(name), "check", None)
        if check:
            check()
    return found


def start_loggers(names: str, run: Run, step: int) -> list[Any]:
    """Begin logging; a resumed run has done some steps already."""
    return [LOGGERS[name](run, step) for name in check_loggers(names)]


def close_loggers(loggers: Iterable[Any]) -> None:
    """End logging, also after an error."""
    for logger in loggers:
        if close := getattr(logger, "close", None):
            close()


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"logging to {package} needs its package: run `pip install {package}`") from None
