"""mixnn: self-supervised learning of images from nearest neighbors.

Every verb of the command is a function here: `mixnn.pretrain("cifar10")`, `mixnn.evaluate("runs/x")`. Names are
looked up when first used, so that importing the package (and `mixnn --help`) does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mixnn.apps.classify.classify import classify as classify
    from mixnn.apps.demo import demo as demo
    from mixnn.apps.embed import embed as embed
    from mixnn.apps.explore.explore import explore as explore
    from mixnn.apps.export import export as export
    from mixnn.apps.report.report import report as report
    from mixnn.apps.search.search import search as search
    from mixnn.config import Config as Config
    from mixnn.config import UserError as UserError
    from mixnn.evaluation.evaluate import evaluate as evaluate
    from mixnn.paper.bench import bench as bench
    from mixnn.paper.figures import figures as figures
    from mixnn.paper.reproduce import reproduce as reproduce
    from mixnn.runs import Run as Run
    from mixnn.runs.encoder import load as load
    from mixnn.training.diagnose import diagnose as diagnose
    from mixnn.training.pretrain import pretrain as pretrain

_HOMES = {
    "Config": "mixnn.config",
    "UserError": "mixnn.config",
    "Run": "mixnn.runs",
    "bench": "mixnn.paper.bench",
    "classify": "mixnn.apps.classify.classify",
    "demo": "mixnn.apps.demo",
    "diagnose": "mixnn.training.diagnose",
    "embed": "mixnn.apps.embed",
    "evaluate": "mixnn.evaluation.evaluate",
    "explore": "mixnn.apps.explore.explore",
    "export": "mixnn.apps.export",
    "figures": "mixnn.paper.figures",
    "load": "mixnn.runs.encoder",
    "pretrain": "mixnn.training.pretrain",
    "report": "mixnn.apps.report.report",
    "reproduce": "mixnn.paper.reproduce",
    "search": "mixnn.apps.search.search",
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
