"""What an evaluation protocol is.

One of your own is a function with the decorator `PROTOCOLS.register(NAME, ...)`, in a file of yours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mixnn.data.image_set import ImageSet
from mixnn.progress import Reporter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Subject:
    """What a protocol evaluates: a frozen backbone on labeled training and test images."""

    backbone: nn.Module
    train: ImageSet
    test: ImageSet
    crop_size: int  # side of the linear probe's crops
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl; none unless it is a run
    epochs: int  # of the linear probe
    seed: int
    reporter: Reporter
    device: torch.device  # of the backbone
    precision: str = "auto"  # in which images are encoded: bf16, fp32, or auto
    group: ProcessGroup | None = None  # processes that share the work; each needs the result

    @property
    def bf16(self) -> bool | None:
        """What `features` takes: whether to encode in bf16, or None for its default."""
        return None if self.precision == "auto" else self.precision == "bf16"

    @property
    def encoding(self) -> str:
        """The precision in words, as `features` encodes by default or as asked for."""
        on_cuda = self.device.type == "cuda"
        if on_cuda if self.bf16 is None else self.bf16:
            return "bf16 forward, fp32 features"
        return "fp32, TF32 convolutions" if on_cuda else "fp32"


def recorded_settings(result: Mapping[str, Any], number: str) -> dict[str, Any]:  # noqa: ARG001
    """The settings of a result as `evaluate` wrote them, the same for all its numbers."""
    return dict(result.get("protocol", {}))


@dataclass(frozen=True)
class Protocol:
    """A way to turn features into an accuracy in percent."""

    name: str  # key in results.json, and what --protocol takes
    label: str  # in tables and pages
    headline: str  # key of the number that a table shows
    numbers: Mapping[str, str]  # every number it reports, and what that number is
    run: Callable[[Subject], tuple[dict[str, Any], dict[str, Any]]]  # -> numbers, and the settings that made them
    summary: Callable[[Mapping[str, Any]], str]  # a result in a few words, for the terminal
    num_encoded: Callable[[Subject], int] = lambda _: 0  # images that it encodes, to estimate its time
    settings: Callable[[Mapping[str, Any], str], dict[str, Any]] = recorded_settings  # those behind one of the numbers
    best: str = ""  # key of the best number over epochs, which the test images chose

    def accuracy(self, results: Mapping[str, Any]) -> float | None:
        """The headline number out of a results.json; None if it is missing."""
        return results.get(self.name, {}).get(self.headline)


def make_protocol(
    name: str,
    run: Callable[[Subject], tuple[dict[str, Any], dict[str, Any]]],
    *,
    headline: str = "accuracy",
    label: str = "",
    numbers: Mapping[str, str] | None = None,
    summary: Callable[[Mapping[str, Any]], str] = lambda _: "",
    **about: Any,
) -> Protocol:
    """The protocol of a function that is registered. By default it reports one number, `accuracy`."""
    return Protocol(name, label or name, headline, numbers or {headline: label or name}, run, summary, **about)
