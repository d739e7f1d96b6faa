"""Settings for a folder of images, each with its reason. What the user gave is never changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mixnn.config import setting
from mixnn.progress import plural
from mixnn.training.schedule import short_warmup

SEEN_ON_CUDA, SEEN_ON_CPU = 10_000_000, 100_000  # images a run should see: some minutes on a GPU or on two cores
FEW_STEPS = 5_000
OPTIONS = ("support_size", "hidden")


class Choice(NamedTuple):
    """One setting, and why."""

    name: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.value}: {self.reason}"


def choose(num: int, side: int, given: Mapping[str, Any], options: Mapping[str, Any], cuda: bool) -> list[Choice]:
    """Settings for `num` images with a typical shorter side, to add to what the user gave.

    OPTIONS names those that are options of the method.
    """
    found: list[Choice] = []
    known = {k: v for k, v in (*given.items(), *options.items()) if (k, str(v)) != ("image_size", "0")}

    def value(name: str, own: Any, reason: str) -> Any:
        """The user's value; otherwise ours, which is then recorded."""
        if name in known:
            return type(own)(known[name])
        found.append(Choice(name, own, reason))
        return own

    size = value("image_size", *_size(side, cuda))
    value("backbone", *(("resnet18", "there is a GPU") if cuda else ("resnet8", "small enough for a CPU")))
    batch = value("batch_size", *_batch(num, cuda))
    in_32s = batch >= 256 and batch % 32 == 0
    value(
        "bn_groups",
        batch // 32 if in_32s else 1,
        "groups of 32, as in the paper" if in_32s else "batch norm uses the whole batch",
    )
    epochs = value("epochs", *_epochs(num, cuda))
    steps = epochs * max(1, num // max(1, batch))
    if 0 < steps < FEW_STEPS:
        value("lr", 0.3, f"larger than usual, because the run has only {plural(steps, 'step')}")
    if steps:
        value("warmup_epochs", short_warmup(epochs), "a tenth of the epochs, at most 5")
    if size < 16:
        value("crop_area", 0.6, "a small part of such a tiny image shows too little")
    value("mirror", "yes", f"photographs may be mirrored; for text, digits or maps use {setting('mirror', 'no')}")
    support = 2 ** max(4, min(12, (max(2, num) // 2).bit_length() - 1))
    value("support_size", max(support, batch), "embeddings to find neighbors in; at most half the images")
    if not cuda:
        value("hidden", 256, "smaller heads, which only training uses, for a CPU")
    return found


def _size(side: int, cuda: bool) -> tuple[int, str]:
    text = f"the shorter side is about {side} pixels"
    if side <= 0:
        return 64, "no image header could be read"
    if side < 32:
        return max(8, side // 4 * 4), text
    if not cuda:
        return 32, f"{text}, and 32 is fast on a CPU"
    for size, enough in ((128, 160), (96, 96), (64, 48)):
        if side >= enough:
            return size, text
    return 32, text


def _batch(num: int, cuda: bool) -> tuple[int, str]:
    if num >= 4096:
        return (256, "as in the paper") if cuda else (128, "large enough for a CPU")
    size = 64 if num >= 512 else max(2, min(32, num // 4))
    return size, f"{num:,} images give {plural(max(1, num // size), 'step')} per epoch"


def _epochs(num: int, cuda: bool) -> tuple[int, str]:
    seen, low, high = (SEEN_ON_CUDA, 50, 800) if cuda else (SEEN_ON_CPU, 10, 200)
    epochs = max(low, min(high, round(seen / max(1, num))))
    return (
        epochs,
        f"{plural(epochs * num, 'image')} in all; use {setting('time_budget', '30m')} to limit the time instead",
    )
