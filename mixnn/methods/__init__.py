"""Registry of the methods. One of your own is a class with the decorator `METHODS.register(NAME)`, in a file of yours.

For a training loop of your own, make one from its class: `MNN(backbone, topk=5)`; see `Method`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from mixnn.config import UserError, check_decorated, fields_of, make, option, other_default
from mixnn.methods.byol import BYOL
from mixnn.methods.cmsf import CMSF
from mixnn.methods.contract import About, Aux, Batch, Method
from mixnn.methods.mnn import MNN
from mixnn.methods.moco import MoCo
from mixnn.methods.msf import MSF
from mixnn.methods.nnclr import NNCLR
from mixnn.methods.ressl import ReSSL
from mixnn.methods.sce import SCE
from mixnn.methods.simclr import SimCLR
from mixnn.methods.snclr import SNCLR
from mixnn.methods.supervised import Supervised
from mixnn.methods.unmix import UnMix
from mixnn.registry import Registry

__all__ = [
    "BYOL",
    "CMSF",
    "METHODS",
    "MNN",
    "MSF",
    "NNCLR",
    "SCE",
    "SNCLR",
    "Aux",
    "Batch",
    "Method",
    "MoCo",
    "ReSSL",
    "SimCLR",
    "Supervised",
    "UnMix",
    "about_of",
    "build",
    "cost",
    "describe",
    "explain",
    "find",
    "has_support",
    "option",
    "other_default",
    "overview",
    "passes",
    "resolve_options",
    "uses_labels",
    "views_of",
]

REQUIRED = ("build", "encoded_views", "views", "forward_batch")  # what a method must define, or inherit from another


def _check_method(name: str, cls: Any) -> None:
    """UserError for what cannot be a method."""
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        what = getattr(cls, "__name__", type(cls).__name__)
        raise UserError(
            f"the method {name} must be a class that derives from mixnn.methods.Method, which {what} is not\n"
            "derive it from a method whose parts you want, such as mixnn.methods.MSF"
        )
    options = getattr(cls, "Options", None)
    if not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        raise UserError(
            f"the method {name} has no Options: set {cls.__name__}.Options to a dataclass of its options, or derive it "
            "from another method"
        )
    check_decorated(options)
    missing = [part for part in REQUIRED if inspect.getattr_static(cls, part) is inspect.getattr_static(Method, part)]
    if missing:
        raise UserError(
            f"the method {name} lacks {', '.join(missing)}: define them, or derive {cls.__name__} from another method"
        )


METHODS: Registry[type[Method]] = Registry(
    "method",
    "methods",
    {
        "mnn": MNN,
        "msf": MSF,
        "cmsf": CMSF,
        "byol": BYOL,
        "unmix": UnMix,
        "snclr": SNCLR,
        "nnclr": NNCLR,
        "simclr": SimCLR,
        "moco": MoCo,
        "sce": SCE,
        "ressl": ReSSL,
        "supervised": Supervised,
    },
    check=_check_method,
)


def find(name: str) -> type[Method]:
    """The class of a method."""
    return METHODS.find(name)


def resolve_options(name: str, recipe: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a method: its defaults, then what the data set's recipe has for it, then what the user gave."""
    cls = find(name).Options
    known = {f.name for f in dataclasses.fields(cls)}
    options = make(cls, f"option of {name}", {k: v for k, v in recipe.items() if k in known} | dict(given))
    return dataclasses.asdict(options)


def build(name: str, backbone: nn.Module, options: Mapping[str, Any], **facts: int) -> Method:
    """Build a method that trains this backbone; it gets those facts (num_classes, num_images) that it lists."""
    cls = find(name)
    known: dict[str, Any] = {fact: facts[fact] for fact in cls.facts}
    return cls(backbone, copy=False, **known, **options)


def views_of(name: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Which augmentation makes each view of a method: ("strong", "weak") for example."""
    cls = find(name)
    facts: dict[str, Any] = dict.fromkeys(cls.facts, 1)
    return cls(None, **facts, **options).views


def passes(name: str, options: Mapping[str, Any]) -> tuple[int, int]:
    """Number of views that the student encodes in a step, and number that the teacher encodes."""
    students, teachers = find(name).encoded_views(make(find(name).Options, f"option of {name}", options))
    return len(students), len(teachers)


def cost(name: str, options: Mapping[str, Any]) -> int:
    """Cost of a step in teacher forward passes; a student pass (forward and backward) counts as three."""
    students, teachers = passes(name, options)
    return 3 * students + teachers


def has_support(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the method keeps a support set."""
    return find(name).has_support(make(find(name).Options, f"option of {name}", options))


def uses_labels(name: str, options: Mapping[str, Any]) -> bool:
    """Whether training itself reads labels."""
    return find(name).uses_labels(make(find(name).Options, f"option of {name}", options))


def overview() -> list[tuple[str, str, str, str, str]]:
    """A row per method: name, year, idea, encoder passes of student and teacher by default, paper."""
    rows = []
    for name, cls in METHODS.items():
        students, teachers = passes(name, {})
        about = about_of(cls)
        rows.append((name, str(about.year or ""), about.idea, f"{students} + {teachers}", about.paper))
    return rows


def about_of(cls: type[Method]) -> About:
    """Where a method comes from. A class of the user's that does not say it has only the first line of its docstring.

    It does not inherit this from the method that it extends, whose idea and authors are others.
    """
    if "about" in vars(cls):
        return cls.about
    return About(0, "yours", (cls.__doc__ or "").strip().partition("\n")[0])


def explain(name: str) -> str:
    """The docstring of the method's file, or of its class."""
    cls = find(name)
    of_file = (sys.modules[cls.__module__].__doc__ or "").strip()
    of_class = inspect.cleandoc(cls.__doc__ or "")
    return of_file or of_class if "about" in vars(cls) else of_class or of_file


def describe(name: str) -> list[dict[str, str]]:
    """A row per option of a method: name, default, values, meaning, source."""
    rows = []
    options: Any = find(name).Options
    for field in fields_of(options).values():
        param = field.param
        numbers = ["a number"] if param.choices and math.isfinite(param.high) else []
        rows.append(
            {
                "name": field.name,
                "default": str(field.default),
                "values": "|".join([*param.choices, *numbers]),
                "meaning": param.help,
                "source": param.source,
            }
        )
    return rows
