"""Settings: frozen dataclasses whose fields carry their own meaning, source and limits.

`Config` is one pre-training run. A method's own options are a dataclass of the same kind in the method's file, so the
command line, the checks and `mixnn methods NAME` are all made from the fields and a new method touches neither this
file nor the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import os
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any


class UserError(ValueError):
    """A mistake of the user's: a line or two that say what to type instead. The command prints it and exits with 2."""


class Interrupted(Exception):
    """A run was asked to stop, and saved itself; the text says how to go on, `signal` is the number of what asked."""

    def __init__(self, text: str, signal: int) -> None:
        super().__init__(text)
        self.signal = signal


def unknown(kind: str, name: str, valid: Iterable[str]) -> UserError:
    """The error for a name that does not exist: the nearest valid one first, then all of them."""
    valid = list(valid)
    plain = {other.lower().lstrip("-"): other for other in valid}  # case and dashes say nothing
    close = difflib.get_close_matches(name.lower().lstrip("-"), plain, n=1)
    hint = f", did you mean {plain[close[0]]!r}?" if close else ""
    return UserError(f"unknown {kind} {name!r}{hint}\nvalid: {', '.join(valid)}")


def option(
    default: Any,
    help: str,
    source: str = "",
    *,
    choices: tuple[str, ...] = (),
    low: float = -math.inf,
    high: float = math.inf,
) -> Any:
    """A dataclass field that knows what it means, where its default comes from and which values it admits."""
    return dataclasses.field(
        default=default, metadata={"help": help, "source": source, "choices": choices, "low": low, "high": high}
    )


def other_default(cls: type, name: str, default: Any, source: str) -> Any:
    """A parent's option once more, with another default and where that comes from."""
    meta = cls.__dataclass_fields__[name].metadata  # type: ignore[attr-defined]
    return dataclasses.field(default=default, metadata=dict(meta) | {"source": source})


def _members(hint: Any) -> tuple[type, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _parse(text: str, hint: Any) -> Any:
    """The typed value of a word from the command line or a file; the first member of a union that reads it wins."""
    for kind in _members(hint):
        if kind is bool and text.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return text.lower() in ("true", "yes", "on", "1")
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        if kind is str:
            return text
    raise ValueError(text)


def _check(name: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> Any:
    """The value in the field's type; UserError if it is of another type or outside the field's limits."""
    kinds = _members(hint)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    value = str(value) if isinstance(value, os.PathLike) else value
    if isinstance(value, numbers.Number) and type(value) not in words and hasattr(value, "item"):  # numpy's
        value = value.item()
    want = " or ".join(words[k] for k in kinds)
    if isinstance(value, str):
        try:
            value = _parse(value, hint)
        except ValueError:
            raise UserError(f"{name}={value}: {name} takes {want}") from None
    if isinstance(value, int) and not isinstance(value, bool) and int not in kinds and float in kinds:
        value = float(value)
    if type(value) not in kinds:
        raise UserError(f"{name}={value}: {name} takes {want}")
    if isinstance(value, str) and limits["choices"] and value not in limits["choices"]:
        other = "; or a number" if float in kinds else ""
        raise UserError(f"{unknown(name, value, limits['choices'])}{other}")
    if isinstance(value, int | float) and not limits["low"] <= value <= limits["high"]:
        low, high = limits["low"], limits["high"]
        bound = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise UserError(f"{name}={value}: {name} must be {bound}")
    return value


@dataclasses.dataclass(frozen=True)
class Checked:
    """Base of the option dataclasses: every field made by `option` is converted and checked at once."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            if field.metadata:
                value = _check(field.name, getattr(self, field.name), hints[field.name], field.metadata)
                object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Limits that involve more than one field."""


def checked(cls: type, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Some of an option dataclass's values, in their types, each checked by itself; unknown names are errors."""
    fields, hints = {f.name: f.metadata for f in dataclasses.fields(cls)}, typing.get_type_hints(cls)
    for name in values:
        if name not in fields:
            raise unknown(kind, name, [known for known, meta in fields.items() if meta])
    return {k: _check(k, v, hints[k], fields[k]) if fields[k] else v for k, v in values.items()}


def make(cls: type, kind: str, values: Mapping[str, Any]) -> Any:
    """An instance of an option dataclass; an unknown name is an error that lists the valid ones."""
    return cls(**checked(cls, kind, values))


def check_int(name: str, value: Any, low: int, high: float = math.inf) -> int:
    """A whole number that a caller gave, checked as a setting is."""
    return _check(name, value, int, {"choices": (), "low": low, "high": high})


@dataclasses.dataclass(frozen=True)
class Config(Checked):
    """One pre-training run. Defaults are the paper's CIFAR-10 row."""

    data: str = option("cifar10", "data set name, or a folder of images")
    method: str = option("mnn", "which method; `mixnn methods` lists them")
    epochs: int = option(200, "passes over the images", "paper, table of parameters", low=0)
    batch_size: int = option(256, "images a step", "paper, table of parameters", low=2)
    seed: int = option(0, "seed of every draw: weights, order, crops, lambda, shuffle", low=0, high=2**63 - 1)
    lr: float = option(
        0.06, "learning rate at batch 256; scaled by batch_size / 256", "paper, table of parameters", low=0, high=1e38
    )
    warmup_epochs: int = option(5, "epochs of linear warm-up before the cosine", "paper, table of parameters", low=0)
    sgd_momentum: float = option(0.9, "momentum of SGD (not the teacher's)", "paper, 4.1", low=0, high=1)
    weight_decay: float = option(5e-4, "on all parameters, batch norm included", "paper, table of parameters", low=0)
    backbone: str = option("resnet18", "encoder f: resnet18, resnet34, resnet50, resnet8 (for CPUs), or timm:NAME")
    bn_groups: int = option(8, "batch-norm groups in the backbone (SplitBN)", "authors' code", low=1)
    image_size: int = option(0, "side of the training crops; 0: the data set's own", low=0, high=1024)
    crop_area: float = option(0.2, "smallest share of the image a crop may cover", "authors' code", low=0.01, high=1)
    weak_flip: float = option(
        0.9, "flip probability of the weak view", "authors' code; the paper gives none", low=0, high=1
    )
    mirror: str = option(
        "yes",
        "may views be flipped; no where a mirrored image means another thing, as text does",
        choices=("yes", "no"),
    )
    labels: str = option(
        "", "labels of a folder's images: folders (its subfolders), or a CSV of file,label; empty: none"
    )
    on_error: str = option(
        "skip", "unreadable images of a folder: skip and name them, or refuse", choices=("skip", "refuse")
    )
    limit: int = option(0, "use this many images of each split only; 0: all", low=0)
    knn_every: int = option(10, "epochs between kNN readings during training; 0: never", low=0)
    checkpoint_every: int = option(10, "epochs between checkpoints", low=1)
    loggers: str = option("", "beside metrics.jsonl, log to tensorboard, wandb, or both with a comma between")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    mode: str = option(
        "auto",
        "how a step runs: eager; captured in a CUDA graph; compiled whole as well, which starts later",
        choices=("auto", "eager", "captured", "compiled"),
    )
    resident: str = option(
        "auto",
        "keep all images on the device (auto: if they fit), or read them ahead of each step",
        choices=("auto", "yes", "no"),
    )
    precision: str = option(
        "auto",
        "bf16 on CUDA, fp32 elsewhere; in fp32, CUDA convolutions may still use TF32",
        choices=("auto", "bf16", "fp32"),
    )
    data_dir: str = option("", "where data sets are kept; empty: the user's cache folder")
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        if self.batch_size % self.bn_groups:
            fit = max(2 * self.bn_groups, self.batch_size // self.bn_groups * self.bn_groups)
            raise UserError(
                f"batch_size={self.batch_size} is no multiple of bn_groups={self.bn_groups}: "
                f"type --batch-size {fit} or another --bn-groups"
            )
        if self.batch_size == self.bn_groups:
            raise UserError(
                f"batch_size={self.batch_size} gives each of bn_groups={self.bn_groups} one image, and it needs two: "
                f"type --batch-size {2 * self.bn_groups} or a smaller --bn-groups"
            )

    @property
    def base_lr(self) -> float:
        return self.lr * self.batch_size / 256
