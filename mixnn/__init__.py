"""mixnn: self-supervised learning of images from nearest neighbors.

Every verb of the command is a function here: `mixnn.pretrain("cifar10")`, `mixnn.evaluate("runs/x")`. Names are
looked up when first used, so that importing the package (and `mixnn --help`) does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mixnn.benchmark import bench as bench
    from mixnn.classifying import classify as classify
    from mixnn.config import Config as Config
    from mixnn.config import UserError as UserError
    from mixnn.embedding import embed as embed
    from mixnn.embedding import load as load
    from mixnn.evaluation import evaluate as evaluate
    from mixnn.exploring import explore as explore
    from mixnn.exporting import export as export
    from mixnn.plotting import figures as figures
    from mixnn.reporting import report as report
    from mixnn.reproduction import reproduce as reproduce
    from mixnn.runs import Run as Run
    from mixnn.searching import search as search
    from mixnn.showcase import demo as demo
    from mixnn.training import pretrain as pretrain
    from mixnn.training.diagnosis import diagnose as diagnose

_HOMES = {
    "Config": "mixnn.config",
    "UserError": "mixnn.config",
    "Run": "mixnn.runs",
    "bench": "mixnn.benchmark",
    "classify": "mixnn.classifying",
    "demo": "mixnn.showcase",
    "diagnose": "mixnn.training.diagnosis",
    "embed": "mixnn.embedding",
    "evaluate": "mixnn.evaluation",
    "explore": "mixnn.exploring",
    "export": "mixnn.exporting",
    "figures": "mixnn.plotting",
    "load": "mixnn.embedding",
    "pretrain": "mixnn.training",
    "report": "mixnn.reporting",
    "reproduce": "mixnn.reproduction",
    "search": "mixnn.searching",
}
__all__ = sorted([*_HOMES])


def __dir__() -> list[str]:
    return [*__all__, "data", "methods"]


def __getattr__(name: str) -> Any:
    if name in ("data", "methods"):
        return importlib.import_module(f"mixnn.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'mixnn' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
