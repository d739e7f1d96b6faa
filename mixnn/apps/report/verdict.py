"""What a run's curves and its judgement without labels say, in words.

`judge` is a pure function of the records in metrics.jsonl and of judgement.json. The thresholds are conventions. The
page lists them (`RULES`); they do not replace a look at the curves. Those of the judgement were measured
(training/judgement.py), and the verdict uses them as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from mixnn.apps.report.judged import Judged
from mixnn.diagnostics import MIN_KEPT, shrinkage
from mixnn.progress import plural
from mixnn.runs.weights import NO_START, STARTS
from mixnn.training.judgement import MAX_COLOR, MAX_FIRST, MIN_RANK, MIN_RANK_KEPT, MIN_RETRIEVAL

MIN_EPOCHS = 5  # too few epochs to judge below this
MIN_SPREAD, HEALTHY_SPREAD = 0.1, 0.5  # of at most 1
ONE_DIRECTION = 1.5  # effective dimensions; two tight classes have about 1, so a rising kNN accuracy outweighs it
MIN_DISTANCE = 0.01  # of d(p, z), which is 0 when all embeddings are identical
MIN_GAIN, MIN_GAIN_OF_ROOM = 0.02, 0.1  # of the full scale, and of the distance to its top at the start
MAX_FALL = 0.05  # of the full scale, below the best
MIN_RISE = 0.01  # of the full scale, in the last tenth of the epochs
MIN_WINDOW = 5  # the last tenth has at least this many epochs
MIN_ERRORS = 2.0  # standard errors that a slope must be away from 0
MAX_GROWTH = 2.0  # of the loss since the first epoch
FAILURES = ("diverged", "collapsed", "shrunk", "color", "below_start")  # reported even if the run is unfinished

# Curves that need labels, the best evidence first, with the top of their scales.
TOPS = {"knn": 100.0, "purity": 1.0, "accuracy": 1.0}
LABELS = {"knn": "kNN accuracy", "purity": "Neighbor purity", "accuracy": "Training accuracy"}
TITLES = {
    "untrained": "Not trained",
    "start": "The ImageNet encoder as it comes; not trained on these images",
    "diverged": "Diverged",
    "collapsed": "Collapsed",
    "kept_start": "Ended worse than its start, so the starting weights were kept",
    "kept_earlier": "Ended worse than its start, so earlier weights were kept",
    "shrunk": "Partial collapse",
    "color": "Learning color, not content",
    "below_start": "Worse than its start",
    "interrupted": "Unfinished",
    "short": "Too short to judge",
    "judged": "Healthy, judged without labels",
    "unlabeled": "No labels to judge by",
    "worse": "Got worse",
    "rising": "Learning, still improving at the end",
    "learning": "Learning",
    "flat": "No clear improvement",
}
RULES = [  # in order of priority
    f"diverged: the loss is missing, NaN or inf, or more than {MAX_GROWTH:g} times that of the first epoch",
    "ended worse than its start: the judgement without labels found a partial collapse, or an encoder below its start, "
    "at the end of the run",
    f"collapsed: spread is below {MIN_SPREAD:g}; or, unless kNN accuracy, purity or training accuracy improved, rank "
    f"is below {ONE_DIRECTION:g}, or d_positive is below {MIN_DISTANCE:g} while spread is unknown or below "
    f"{HEALTHY_SPREAD:g}",
    f"partial collapse: after {MIN_EPOCHS} epochs or more, spread is below {MIN_KEPT:g} of its maximum; or, unless kNN "
    f"accuracy, purity or training accuracy improved, the effective rank of the features (rank, in a run without "
    f"judgement) is below {MIN_RANK:g} and below {MIN_RANK_KEPT:.2g} of that at the start (of its maximum)",
    f"learning color, not content: unless one of these improved, the first direction has more than {MAX_FIRST:.0%} of "
    f"the features' variance, and mean color explains more than {MAX_COLOR:.0%} of that direction",
    f"worse than its start: unless one of these improved, view_retrieval is below {MIN_RETRIEVAL:.0%} of that of the "
    "weights the run started from",
    "unfinished: fewer epochs are logged than planned",
    "healthy, judged without labels: the judgement found no problem, and no curve of labels is long enough to judge by",
    f"too short to judge: fewer than {MIN_EPOCHS} epochs, or a single value of kNN accuracy or purity",
    f"got worse: the last kNN accuracy (else purity) is at least {MAX_FALL:.0%} of the scale below the best",
    f"learning: kNN accuracy, purity or, in a supervised run, training accuracy gained at least {MIN_GAIN:.0%} of the "
    f"scale and {MIN_GAIN_OF_ROOM:.0%} of the distance from the first value to the top",
    "still improving: in addition, a line fitted to kNN accuracy or purity over the last tenth of the epochs (at least "
    f"{MIN_WINDOW}) rises by at least {MIN_RISE:.0%} of the scale and {MIN_ERRORS:g} standard errors",
]

Points = list[tuple[int, float]]  # (epoch, value)


@dataclass(frozen=True)
class Verdict:
    """`state` is a key of TITLES; the sentences give the evidence."""

    state: str
    sentences: list[str]

    @property
    def title(self) -> str:
        return TITLES[self.state]


def judge(
    records: Sequence[Mapping[str, Any]],
    epochs: int,
    diverged: str = "",
    init_from: str = "",
    judged: Judged | None = None,
) -> Verdict:
    """The verdict on a run of `epochs` planned epochs: the most serious state that applies.

    diverged: why training stopped, if loss or weights became NaN or inf. init_from: where the encoder came from.
    judged: the judgement without labels.
    """
    logged = f"{records[-1]['epoch'] if records else 0} of {plural(epochs, 'planned epoch')} logged"
    if diverged:
        return Verdict("diverged", [f"Training stopped: {diverged}.", f"{logged}."])
    if not records:
        return _untrained(epochs, init_from)
    unfinished = records[-1]["epoch"] < epochs
    state, sentences = _state(records, judged)
    if unfinished:
        sentences.insert(0, f"{logged}: the run was interrupted or is still training.")
    return Verdict("interrupted" if unfinished and state not in FAILURES else state, sentences)


def _untrained(epochs: int, init_from: str) -> Verdict:
    """The verdict on a run without a logged epoch."""
    if epochs:
        return Verdict("untrained", ["No epoch was completed."])
    if init_from not in STARTS:
        origin = f"; its encoder comes from {init_from}" if init_from not in NO_START else ""
        return Verdict("untrained", [f"The run was made with 0 epochs{origin}."])
    return Verdict(
        "start",
        [
            f"{STARTS[init_from].summary}.",
            "It usually tells the subjects of photographs apart well; X-rays, drawings and text less well.",
            "A few labels show how good it is here: use `mixnn classify`. "
            "To train it on these images, use `mixnn pretrain FOLDER --time-budget 10m`.",
        ],
    )


def _state(records: Sequence[Mapping[str, Any]], judged: Judged | None) -> tuple[str, list[str]]:
    """The state of a run with at least one epoch, and the evidence."""
    last = records[-1]
    logged = {name: curve for name in TOPS if (curve := points(records, name))}
    curves = {name: curve for name, curve in logged.items() if len(curve) > 1}
    evidence = [_describe(name, curve) for name, curve in logged.items()]
    evidence += [*(judged.evidence() if judged else []), *_health(records)]
    improved = [name for name, curve in curves.items() if has_gained(curve, TOPS[name])]
    short = last["epoch"] < MIN_EPOCHS
    if reason := divergence(records):
        return "diverged", [reason, *evidence]
    if judged and (state := judged.reverted()):
        return state, [*judged.reasons(), *evidence]
    if reason := collapse(last, bool(improved)):
        return "collapsed", [reason, *evidence]
    failure = judged.failure() if judged else ""
    if judged and failure:
        evidence = [*judged.reasons(), *evidence]
        if not improved:
            return failure, evidence
    if not short and (reason := shrinkage(points(records, "spread"))):
        return "shrunk", [reason, *evidence]
    if not (short or judged or improved) and (reason := rank_fall(points(records, "rank"))):
        return "shrunk", [reason, *evidence]
    if judged and not failure and (short or not curves):
        if judged.from_weights or has_gained(judged.view_retrieval, top=1.0):
            return "judged", evidence
        return "flat", ["Views of an image are found no better than by the network before training.", *evidence]
    if short:
        return "short", [f"{plural(last['epoch'], 'epoch')} logged: too short to show a trend.", *evidence]
    if logged and not curves:
        return "short", ["A single value does not show a trend.", *evidence]
    if not curves:
        return "unlabeled", [_without_labels(last), *evidence]
    state, reasons = _trend(curves, improved)
    return state, [*reasons, *evidence]


def _without_labels(last: Mapping[str, Any]) -> str:
    measured = [name for name in ("spread", "rank", "d_positive") if is_number(last.get(name))]
    seen = "no logged number would show a collapse"
    if measured:
        seen = f"there is no sign of collapse in {', '.join(measured)}"
    return f"Without labels there is no kNN accuracy or purity to judge by; {seen}."


def _trend(curves: Mapping[str, Points], improved: Sequence[str]) -> tuple[str, list[str]]:
    """The state that curves of labels show, and the reason."""
    name, curve = next(iter(curves.items()))
    best_epoch, best = max(curve, key=lambda point: point[1])
    if best - curve[-1][1] >= MAX_FALL * TOPS[name]:
        return "worse", [f"{LABELS[name]} was best at epoch {best_epoch}, {_number(name, best)}, and is lower now."]
    if not improved:
        return "flat", ["No clear improvement since the first value."]
    name, window, rise = last_rise({name: curve for name, curve in curves.items() if name != "accuracy"})
    if rise >= MIN_RISE:
        points_gained = f"{100 * rise:.1f} percentage points"
        return "rising", [
            f"{LABELS[name]} rose by {points_gained} in the last {window} epochs: longer training may help."
        ]
    return "learning", []


def points(records: Sequence[Mapping[str, Any]], name: str) -> Points:
    """The finite values of one logged number."""
    return [(record["epoch"], float(record[name])) for record in records if is_number(record.get(name))]


def has_gained(curve: Points, top: float) -> bool:
    """Whether a curve clearly improved from its first to its last value."""
    gain, room = curve[-1][1] - curve[0][1], top - curve[0][1]
    return gain >= MIN_GAIN * top and gain >= MIN_GAIN_OF_ROOM * room


def divergence(records: Sequence[Mapping[str, Any]]) -> str:
    """The reason to call the run diverged; empty if there is none."""
    first, last = records[0].get("loss"), records[-1].get("loss")
    if not is_number(last):
        return f"The loss at epoch {records[-1]['epoch']} is missing, NaN or inf."
    if is_number(first) and last > MAX_GROWTH * first > 0:
        return f"The loss grew from {first:.3g} to {last:.3g}."
    return ""


def collapse(last: Mapping[str, Any], improved: bool) -> str:
    """The reason to call the run collapsed; empty if there is none. improved: accuracy or purity did."""
    spread, rank, distance = (last.get(name) for name in ("spread", "rank", "d_positive"))
    if is_number(spread) and spread < MIN_SPREAD:
        return f"Spread is {spread:.2g}: all images have nearly the same embedding."
    if improved:
        return ""
    if is_number(rank) and rank < ONE_DIRECTION:
        return f"Rank is {rank:.2f}: the embeddings vary mostly along one direction."
    if is_number(distance) and distance < MIN_DISTANCE and not (is_number(spread) and spread >= HEALTHY_SPREAD):
        return f"d(p, z) is {distance:.2g}; it is 0 when all embeddings are identical."
    return ""


def rank_fall(ranks: Points) -> str:
    """The reason to call a run partly collapsed by its logged rank; empty if there is none."""
    epoch, largest = max(ranks, key=lambda point: point[1], default=(0, 0.0))
    if not ranks or ranks[-1][1] >= min(MIN_RANK, MIN_RANK_KEPT * largest):
        return ""
    return (
        f"Rank fell from {largest:.1f} at epoch {epoch} to {ranks[-1][1]:.1f}: the embeddings vary in few directions."
    )


def last_rise(curves: Mapping[str, Points]) -> tuple[str, int, float]:
    """Rise of a curve over the last tenth of the epochs: the curve's name, epochs in that tenth, share of the scale.

    The curve is the first with three values there, else the one with the most.
    """
    end = max((curve[-1][0] for curve in curves.values()), default=0)
    window = max(MIN_WINDOW, math.ceil(end / 10))
    tails = {name: [point for point in curve if point[0] >= end - window] for name, curve in curves.items()}
    name = max(tails, key=lambda name: min(3, len(tails[name])), default="")
    return name, window, slope(tails[name]) * window / TOPS[name] if name else 0.0


def slope(curve: Points) -> float:
    """Slope of the least-squares line per epoch; 0 if it may be noise (fewer than three values, or a large error)."""
    if len(curve) < 3:
        return 0.0
    mean_x, mean_y = (sum(column) / len(curve) for column in zip(*curve, strict=True))
    square = sum((x - mean_x) ** 2 for x, _ in curve)
    fitted = sum((x - mean_x) * (y - mean_y) for x, y in curve) / square
    residual = sum((y - mean_y - fitted * (x - mean_x)) ** 2 for x, y in curve)
    error = math.sqrt(residual / (len(curve) - 2) / square)
    return fitted if abs(fitted) >= MIN_ERRORS * error else 0.0


def _health(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence each about loss, spread and rank."""
    loss, sentences = points(records, "loss"), []
    if len(loss) > 1:
        lowest_epoch, lowest = min(loss, key=lambda point: point[1])
        lowest_text = f"lowest at epoch {lowest_epoch:g}, {lowest:.3g}"
        sentences.append(f"Loss: {loss[0][1]:.3g} at first, {loss[-1][1]:.3g} at the end, {lowest_text}.")
    scales = (("spread", "1: fills the sphere, 0: collapsed"), ("rank", "effective dimensions; 1: collapsed"))
    for name, scale in scales:
        if curve := points(records, name):
            epoch, largest = max(curve, key=lambda point: point[1])
            fell = f", at most {largest:.2f} at epoch {epoch:g}" if f"{largest:.2f}" != f"{curve[-1][1]:.2f}" else ""
            sentences.append(f"{name.capitalize()} of the embeddings: {curve[-1][1]:.2f} at the end{fell} ({scale}).")
    return sentences


def _describe(name: str, curve: Points) -> str:
    """First and last value of a curve in a sentence."""
    (first, start), (last, end) = curve[0], curve[-1]
    if len(curve) == 1:
        return f"{LABELS[name]}: {_number(name, end)} at epoch {last}, measured once."
    return f"{LABELS[name]}: {_number(name, start)} at epoch {first}, {_number(name, end)} at epoch {last}."


def _number(name: str, value: float) -> str:
    return f"{value:.1f}%" if TOPS[name] == 100 else f"{value:.2f}"


def is_number(value: Any) -> TypeGuard[float]:
    """A finite number, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
