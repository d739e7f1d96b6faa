"""The methods, by name. To add one: its file, and its line in METHODS."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from mixnn.config import make, unknown
from mixnn.methods.byol import BYOL
from mixnn.methods.contract import Aux, Batch
from mixnn.methods.mnn import MNN
from mixnn.methods.msf import MSF

__all__ = ["METHODS", "Aux", "Batch", "build", "describe", "explain", "find", "resolve_options", "summary"]

METHODS = {"mnn": MNN, "msf": MSF, "byol": BYOL}


def find(name: str) -> type[Any]:
    """The class of a method."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def resolve_options(name: str, recipe: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A method's full options: defaults, then the data set's recipe where the method has the knob, then the user's."""
    cls = find(name).Options
    known = {f.name for f in dataclasses.fields(cls)}
    options = make(cls, f"option of {name}", {k: v for k, v in recipe.items() if k in known} | dict(given))
    return dataclasses.asdict(options)


def build(name: str, backbone: nn.Module, options: Mapping[str, Any]) -> Any:
    """The method as a module."""
    return find(name)(backbone, **options)


def summary(name: str) -> str:
    """One line: the first of the method's file."""
    return explain(name).splitlines()[0]


def explain(name: str) -> str:
    """What the method's file says of it."""
    return (sys.modules[find(name).__module__].__doc__ or "").strip()


def describe(name: str) -> list[dict[str, str]]:
    """A method's options as rows: name, default, values, meaning, source."""
    rows = []
    for f in dataclasses.fields(find(name).Options):
        meta = f.metadata
        values = "|".join(meta["choices"])
        rows.append(
            {
                "name": f.name,
                "default": str(f.default),
                "values": values,
                "meaning": meta["help"],
                "source": meta["source"],
            }
        )
    return rows
