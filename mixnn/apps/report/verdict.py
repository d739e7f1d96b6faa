"""What a run's curves say, in words. `judge` is pure: the records of metrics.jsonl in, a verdict out.

The thresholds below are conventions, written out on the page (`RULES`), and no substitute for looking at the curves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from mixnn.diagnostics import MIN_KEPT, shrinkage
from mixnn.progress import plural

MIN_EPOCHS = 5  # fewer say nothing
MIN_SPREAD, HEALTHY_SPREAD = 0.1, 0.5  # of 1
MIN_RANK = 1.5  # effective dimensions; two tight classes have about 1, so a rising kNN outweighs it
MIN_DISTANCE = 0.01  # of d(p, z), whose trivial minimum is 0: everything at one point
MIN_GAIN, MIN_GAIN_OF_ROOM = 0.02, 0.1  # of the full scale, and of what was left to gain at the start
MAX_FALL = 0.05  # of the full scale, below the best
MIN_RISE = 0.01  # of the full scale, in the last tenth
MIN_WINDOW = 5  # epochs that the last tenth has at least
MIN_ERRORS = 2.0  # standard errors that a slope must be away from 0
MAX_GROWTH = 2.0  # of the loss over its first epoch
GRAVE = ("diverged", "collapsed", "shrunk")  # whether a run was finished or not

TOPS = {"knn": 100.0, "purity": 1.0, "accuracy": 1.0}  # full scales of the curves that labels make, best evidence first
LABELS = {"knn": "kNN accuracy", "purity": "Purity of the neighbors", "accuracy": "Training accuracy"}
TITLES = {
    "untrained": "Nothing was trained",
    "diverged": "Diverged",
    "collapsed": "Collapsed",
    "shrunk": "Partly collapsed",
    "interrupted": "Unfinished",
    "short": "Too short to say",
    "unlabelled": "No labels to judge by",
    "worse": "Got worse",
    "rising": "Learning, and still rising at the end",
    "learning": "Learning",
    "flat": "Hardly moved",
}
RULES = [
    f"diverged: the loss is no number, or more than {MAX_GROWTH:g} times that of the first epoch",
    f"collapsed: spread below {MIN_SPREAD:g}; or rank below {MIN_RANK:g}, or d_positive below {MIN_DISTANCE:g} with a "
    f"spread that is unknown or below {HEALTHY_SPREAD:g}, unless kNN or purity rose well",
    f"partly collapsed: spread below {MIN_KEPT:g} of the largest it had",
    f"too short to say: fewer than {MIN_EPOCHS} epochs, or a single reading of what labels tell",
    f"got worse: the last reading of kNN (else purity) is {MAX_FALL:.0%} of the scale or more below the best",
    f"learning: kNN, purity or, of a supervised run, training accuracy gained at least {MIN_GAIN:.0%} of the scale "
    f"and {MIN_GAIN_OF_ROOM:.0%} of what was left to gain at the first reading",
    f"still rising: a line through kNN or purity over the last tenth of the epochs ({MIN_WINDOW} or more) rises "
    f"by {MIN_RISE:.0%} of the scale or more, and by {MIN_ERRORS:g} standard errors",
    "unfinished: fewer epochs are logged than were planned",
]

Points = list[tuple[int, float]]  # (epoch, value)


@dataclass(frozen=True)
class Verdict:
    """`state` is a key of TITLES; the sentences say on what it rests."""

    state: str
    sentences: list[str]

    @property
    def title(self) -> str:
        return TITLES[self.state]


def judge(records: Sequence[Mapping[str, Any]], epochs: int, diverged: str = "", init_from: str = "") -> Verdict:
    """The verdict on a run of so many planned epochs; the gravest state that applies comes first.

    `diverged` is why training ended, if loss or weights became no numbers; `init_from`, where the encoder came from.
    """
    logged = f"{records[-1]['epoch'] if records else 0} of {plural(epochs, 'epoch')} logged"
    if diverged:
        return Verdict("diverged", [f"Training ended: {diverged}.", f"{logged}."])
    if not records:
        taken = f"; its encoder is that of {init_from}" if init_from else ""
        return Verdict("untrained", ["No epoch was finished." if epochs else f"The run was made with 0 epochs{taken}."])
    last = records[-1]
    unfinished = last["epoch"] < epochs
    state, sentences = _state(records)
    if unfinished:
        sentences.insert(0, f"{logged}: interrupted, or still running; the folder does not say which.")
    return Verdict("interrupted" if unfinished and state not in GRAVE else state, sentences)


def _state(records: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    last = records[-1]
    read = {name: curve for name in TOPS if (curve := points(records, name))}
    curves = {name: curve for name, curve in read.items() if len(curve) > 1}
    told = [_told(name, curve) for name, curve in read.items()] + _health(records)
    rose = [name for name, curve in curves.items() if has_gained(curve, TOPS[name])]
    if reason := divergence(records):
        return "diverged", [reason, *told]
    if reason := collapse(last, bool(rose)):
        return "collapsed", [reason, *told]
    if last["epoch"] < MIN_EPOCHS:
        return "short", [f"{plural(last['epoch'], 'epoch')} cannot tell learning from chance.", *told]
    if read and not curves:
        return "short", ["One reading cannot tell whether it rises.", *told]
    if reason := shrinkage(points(records, "spread")):
        return "shrunk", [reason, *told]
    if not curves:
        hint = "Without labels neither kNN nor purity can be read; the curves can only rule out a collapse, and do."
        return "unlabelled", [hint, *told]
    name, curve = next(iter(curves.items()))
    best_epoch, best = max(curve, key=lambda point: point[1])
    if best - curve[-1][1] >= MAX_FALL * TOPS[name]:
        text = f"{LABELS[name]} was {_number(name, best)} at epoch {best_epoch} and has fallen since."
        return "worse", [text, *told]
    if not rose:
        return "flat", ["No curve that labels make is well above its first reading.", *told]
    name, window, rise = last_rise({name: curve for name, curve in curves.items() if name != "accuracy"})
    if rise >= MIN_RISE:
        text = f"{LABELS[name]} rose by {100 * rise:.1f} points of 100 in the last {window} epochs: more should help."
        return "rising", [text, *told]
    return "learning", told


def points(records: Sequence[Mapping[str, Any]], name: str) -> Points:
    """The finite readings of one number."""
    return [(record["epoch"], float(record[name])) for record in records if is_number(record.get(name))]


def has_gained(curve: Points, top: float) -> bool:
    gain, room = curve[-1][1] - curve[0][1], top - curve[0][1]
    return gain >= MIN_GAIN * top and gain >= MIN_GAIN_OF_ROOM * room


def divergence(records: Sequence[Mapping[str, Any]]) -> str:
    """Why the loss is out of bounds, or nothing."""
    first, last = records[0].get("loss"), records[-1].get("loss")
    if not is_number(last):
        return f"The loss of epoch {records[-1]['epoch']} is no number."
    if is_number(first) and last > MAX_GROWTH * first > 0:
        return f"The loss grew from {first:.3g} to {last:.3g}."
    return ""


def collapse(last: Mapping[str, Any], rose: bool) -> str:
    """Why the embeddings are all alike, or nothing; `rose` says that kNN or purity did."""
    spread, rank, distance = (last.get(name) for name in ("spread", "rank", "d_positive"))
    if is_number(spread) and spread < MIN_SPREAD:
        return f"Spread is {spread:.2g}: all images have nearly the same embedding."
    if rose:
        return ""
    if is_number(rank) and rank < MIN_RANK:
        return f"Rank is {rank:.2f}: the embeddings differ along one direction only."
    if is_number(distance) and distance < MIN_DISTANCE and not (is_number(spread) and spread >= HEALTHY_SPREAD):
        return f"The loss is at its trivial minimum: d(p, z) is {distance:.2g}, as it is when all embeddings are one."
    return ""


def last_rise(curves: Mapping[str, Points]) -> tuple[str, int, float]:
    """Of the first curve with three readings in the last tenth: its name, the tenth's epochs, its rise from 0 to 1."""
    end = max((curve[-1][0] for curve in curves.values()), default=0)
    window = max(MIN_WINDOW, math.ceil(end / 10))
    tails = {name: [point for point in curve if point[0] >= end - window] for name, curve in curves.items()}
    name = max(tails, key=lambda name: min(3, len(tails[name])), default="")
    return name, window, slope(tails[name]) * window / TOPS[name] if name else 0.0


def slope(curve: Points) -> float:
    """Of the least-squares line, an epoch; 0 if it may be noise: fewer than three readings, or within its error."""
    if len(curve) < 3:
        return 0.0
    mean_x, mean_y = (sum(column) / len(curve) for column in zip(*curve, strict=True))
    square = sum((x - mean_x) ** 2 for x, _ in curve)
    found = sum((x - mean_x) * (y - mean_y) for x, y in curve) / square
    left = sum((y - mean_y - found * (x - mean_x)) ** 2 for x, y in curve)
    error = math.sqrt(left / (len(curve) - 2) / square)
    return found if abs(found) >= MIN_ERRORS * error else 0.0


def _health(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Loss, spread and rank in a sentence each."""
    loss, last = points(records, "loss"), records[-1]
    told = [f"Loss from {loss[0][1]:.3g} to {loss[-1][1]:.3g}."] if len(loss) > 1 else []
    meanings = (("spread", "1 fills the sphere, 0 is collapse"), ("rank", "effective dimensions; 1 is collapse"))
    return told + [f"{n.capitalize()} {last[n]:.2f} ({text})." for n, text in meanings if is_number(last.get(n))]


def _told(name: str, curve: Points) -> str:
    (first, start), (last, end) = curve[0], curve[-1]
    if len(curve) == 1:
        return f"{LABELS[name]} {_number(name, end)} (epoch {last}, the only reading)."
    return f"{LABELS[name]} from {_number(name, start)} (epoch {first}) to {_number(name, end)} (epoch {last})."


def _number(name: str, value: float) -> str:
    return f"{value:.1f}%" if TOPS[name] == 100 else f"{value:.2f}"


def is_number(value: Any) -> TypeGuard[float]:
    """Finite, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
