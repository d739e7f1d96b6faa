"""mixnn: self-supervised learning of images from nearest neighbors.

Every command is a function here: `mixnn.pretrain("cifar10")`, `mixnn.evaluate("runs/x")`. Its parts are modules for
training loops of your own: mixnn.methods, mixnn.functional, mixnn.augment, mixnn.nn, mixnn.data and mixnn.evaluation.
Code of yours can add to the registries: METHODS, BACKBONES, DATASETS, VIEWS, PROTOCOLS, OPTIMIZERS, SCHEDULES, LOGGERS.
Names are looked up when first used, so that importing the package (and `mixnn --help`) does not wait for torch.
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
    from mixnn.apps.verify import verify as verify
    from mixnn.augment import VIEWS as VIEWS
    from mixnn.augment import View as View
    from mixnn.config import Config as Config
    from mixnn.config import MixnnWarning as MixnnWarning
    from mixnn.config import UserError as UserError
    from mixnn.data import DATASETS as DATASETS
    from mixnn.evaluation.evaluate import PROTOCOLS as PROTOCOLS
    from mixnn.evaluation.evaluate import evaluate as evaluate
    from mixnn.methods import METHODS as METHODS
    from mixnn.nn.backbone import BACKBONES as BACKBONES
    from mixnn.paper.bench import bench as bench
    from mixnn.paper.figures import figures as figures
    from mixnn.paper.reproduce import reproduce as reproduce
    from mixnn.runs import Run as Run
    from mixnn.runs.encoder import load as load
    from mixnn.training.diagnose import diagnose as diagnose
    from mixnn.training.loggers import LOGGERS as LOGGERS
    from mixnn.training.optimizers import OPTIMIZERS as OPTIMIZERS
    from mixnn.training.pretrain import pretrain as pretrain
    from mixnn.training.schedule import SCHEDULES as SCHEDULES

_OTHERS = {
    "Config": "mixnn.config:Config",
    "MixnnWarning": "mixnn.config:MixnnWarning",
    "UserError": "mixnn.config:UserError",
    "Run": "mixnn.runs:Run",
    "View": "mixnn.augment:View",
    "load": "mixnn.runs.encoder:load",
    "BACKBONES": "mixnn.nn.backbone:BACKBONES",
    "DATASETS": "mixnn.data:DATASETS",
    "LOGGERS": "mixnn.training.loggers:LOGGERS",
    "METHODS": "mixnn.methods:METHODS",
    "OPTIMIZERS": "mixnn.training.optimizers:OPTIMIZERS",
    "PROTOCOLS": "mixnn.evaluation.evaluate:PROTOCOLS",
    "SCHEDULES": "mixnn.training.schedule:SCHEDULES",
    "VIEWS": "mixnn.augment:VIEWS",
}
_MODULES = ("augment", "data", "evaluation", "functional", "methods", "nn")  # data and methods are commands too


def _exports() -> dict[str, str]:
    """Name -> module:name of all that the package offers; the commands are those of the command line."""
    from mixnn.cli import VERBS

    return _OTHERS | {name: home for name, (home, _) in VERBS.items() if not home.startswith("mixnn.cli.")}


def __dir__() -> list[str]:
    return sorted([*_exports(), *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mixnn.{name}")
    if name.startswith("_") or name not in (exports := _exports()):
        raise AttributeError(f"module 'mixnn' has no attribute {name!r}")
    module, _, attribute = exports[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
