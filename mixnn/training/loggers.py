"""Optional loggers, in addition to metrics.jsonl: TensorBoard, Weights & Biases, and those of your own.

A logger takes one record per epoch. A resumed run continues its own curves. One of your own gets the decorator
`LOGGERS.register(NAME)`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from inspect import signature
from typing import Any

from mixnn.config import UserError
from mixnn.registry import Registry, failure
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

    def __init__(self, function: Callable[[Run, dict[str, Any]], object], run: Run) -> None:
        self.function, self.run = function, run

    def log(self, record: dict[str, Any]) -> None:
        self.function(self.run, record)


def _check_logger(name: str, logger: Any) -> None:
    """UserError for what cannot log: found when it is registered, not after the first epoch."""
    is_class = isinstance(logger, type)
    called = getattr(logger, "log", None) if is_class else logger
    if not callable(called):
        raise UserError(
            f"the logger {name} must be a function of a run and a record, or a class with the method log(record)"
        )
    if not _takes_two(called):  # a method takes itself and the record
        raise UserError(f"the logger {name} must have the form {'log(self, record)' if is_class else 'f(run, record)'}")
    if is_class and not _takes_two(logger):
        raise UserError(f"the logger {name} is made of a run and a step: write __init__(self, run, step)")


def _takes_two(called: Callable[..., object]) -> bool:
    try:
        signature(called).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # some built-in functions do not say what they take
        pass
    return True


LOGGERS: Registry[Any] = Registry(
    "logger", "loggers", {"tensorboard": TensorBoard, "wandb": WandB}, check=_check_logger
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


class RunLoggers:
    """The loggers of a run, by name. A resumed run has done some steps already.

    One that fails is left out with a warning, because metrics.jsonl has all records anyway.
    """

    def __init__(self, names: str, run: Run, step: int, warn: Callable[[str], None]) -> None:
        self.active: dict[str, Any] = {}
        self.warn = warn
        try:
            for name in check_loggers(names):
                logger = LOGGERS[name]
                self.active[name] = logger(run, step) if isinstance(logger, type) else FunctionLogger(logger, run)
        except BaseException:
            self.close()
            raise

    def log(self, record: dict[str, Any]) -> None:
        for name, logger in list(self.active.items()):
            try:
                logger.log(dict(record))
            except Exception as error:
                self.warn(f"training goes on without the logger {name}, which failed: {failure(error)}")
                self._close(name)

    def close(self) -> None:
        """End logging, also after an error."""
        for name in list(self.active):
            self._close(name)

    def _close(self, name: str) -> None:
        close = getattr(self.active.pop(name), "close", None)
        try:
            if close:
                close()
        except Exception as error:
            self.warn(f"the logger {name} could not be closed: {failure(error)}")


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"logging to {package} needs its package: run `pip install {package}`") from None
