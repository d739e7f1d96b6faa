"""Settings for a folder of images, each with its reason. What the user gave is never changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mixnn.config import setting
from mixnn.nn.efficientnet import MIN_SIZE
from mixnn.progress import plural
from mixnn.runs.start import DEFAULT_START, ENCODE_SIZE
from mixnn.runs.weights import NO_START, says_normalization, start_defaults
from mixnn.training.schedule import short_warmup

TRAIN_SIZE, LR, HIDDEN = 128, 2.4e-3, 1024
CROP_AREA = 0.4  # smallest crops; for a start that knows the images, see judgement.views_for

SEEN_ON_CUDA, SEEN_ON_CPU = 10_000_000, 100_000  # images a run from nothing should see: minutes on a GPU or two cores
FEW_STEPS = 5_000
STEPS_ON_CUDA, STEPS_ON_CPU = 1_200, 600  # of a run that starts from good weights
RECIPE = "recipe"  # the reason of settings that belong together, perhaps with a name; the log has the measurements
OPTIONS = ("support_size", "hidden", "symmetric")


class Choice(NamedTuple):
    """One setting, and why."""

    name: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.value}: {self.reason}"


def lines(found: Sequence[Choice]) -> list[str]:
    """What to print about the choices: a line for each reason, and one for the settings of a recipe."""
    recipes: dict[str, list[str]] = {}
    for choice in found:
        if choice.reason.partition(" ")[0] == RECIPE:
            recipes.setdefault(choice.reason, []).append(f"{choice.name} {choice.value}")
    other = [str(choice) for choice in found if choice.reason not in recipes]
    return other + [f"{reason}: {', '.join(settings)}" for reason, settings in recipes.items()]


class Chooser:
    """Collects choices: what the user gave is used as it is, the rest is recorded with its reason."""

    def __init__(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.known = {k: v for k, v in (*given.items(), *options.items()) if (k, str(v)) != ("image_size", "0")}
        self.found: list[Choice] = []

    def value(self, name: str, own: Any, reason: str) -> Any:
        """The user's value; otherwise ours, which is then recorded."""
        if name in self.known:
            return type(own)(self.known[name])
        self.found.append(Choice(name, own, reason))
        self.known[name] = own  # a later choice does not change it
        return own


def choose(num: int, side: int, given: Mapping[str, Any], options: Mapping[str, Any], cuda: bool) -> list[Choice]:
    """Settings for `num` images with a typical shorter side, to add to what the user gave.

    OPTIONS names those that are options of the method.
    """
    chooser = Chooser(given, options)
    known = chooser.known
    if "init_from" not in known and "backbone" in known:
        start, why = "none", f"no weights to start from were given for {known['backbone']}"
    elif int(known.get("image_size", MIN_SIZE)) < MIN_SIZE:
        start, why = "none", f"{DEFAULT_START} weights need crops of {MIN_SIZE} pixels or more"
    else:
        start, why = DEFAULT_START, f"use {setting('init_from', 'none')} to start from nothing"
    start = chooser.value("init_from", start, why)
    (_from_nothing if start in NO_START else _from_weights)(chooser, start, num, side, cuda)
    return chooser.found


def from_start(start: str) -> list[Choice]:
    """Settings that follow from the weights that a run starts from."""
    unsaid = f"as for published weights; the file does not say, so use {setting('normalization')} if it was another"
    found = []
    for name, own in start_defaults(start).items():
        guessed = name == "normalization" and not says_normalization(start)
        found.append(Choice(name, own, unsaid if guessed else f"as {start} needs it"))
    return found


def _from_weights(chooser: Chooser, start: str, num: int, _: int, cuda: bool) -> None:
    """Settings of a run that adapts good weights to a folder. They were found by measurement (notes/log.md)."""
    value = chooser.value
    for choice in from_start(start):
        value(*choice)
    value("image_size", TRAIN_SIZE, "training crops of this side are fast")
    value("encode_size", ENCODE_SIZE, "features are best at this side, also of smaller images")
    batch = value("batch_size", *_batch(num, cuda, largest=64))
    steps = STEPS_ON_CUDA if cuda else STEPS_ON_CPU
    epochs = max(2, round(steps * batch / max(1, num)))
    epochs = value("epochs", epochs, f"about {steps:,} steps; use {setting('time_budget', '10m')} to set the time")
    if epochs:
        value("warmup_epochs", short_warmup(epochs), "a tenth of the epochs, at most 5")
    value("mirror", "yes", f"photographs may be mirrored; for text, digits or maps use {setting('mirror', 'no')}")
    value(
        "support_size",
        max(_support(num), batch),
        "embeddings to find neighbors in: up to half the images, but at least 16 and a batch",
    )
    lr = LR * math.sqrt(min(1, STEPS_ON_CPU / max(1, epochs * num / batch)))  # measured with 600 and 5,000 steps
    lr = float(f"{lr:.2g}")
    recipe = {"optimizer": "adamw", "lr": lr, "weight_decay": 1e-4, "batch_norm": "frozen", "bn_groups": 1}
    recipe |= {"symmetric": False, "crop_area": CROP_AREA, "weak_flip": 0.5, "hidden": HIDDEN}
    recipe |= {"heads_first": "auto"}
    for name, own in recipe.items():
        value(name, own, RECIPE)


def _from_nothing(chooser: Chooser, _: str, num: int, side: int, cuda: bool) -> None:
    """Settings of a run with random weights."""
    value = chooser.value
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
    value(
        "support_size",
        max(_support(num), batch),
        "embeddings to find neighbors in: up to half the images, but at least 16 and a batch",
    )
    if not cuda:
        value("hidden", 256, "smaller heads, which only training uses, for a CPU")


def _support(num: int) -> int:
    return 2 ** max(4, min(12, (max(2, num) // 2).bit_length() - 1))


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


def _batch(num: int, cuda: bool, largest: int = 256) -> tuple[int, str]:
    if num >= 4096 and largest > 64:
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
