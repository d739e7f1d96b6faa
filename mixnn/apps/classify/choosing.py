"""Which classifier, and how good: settings by cross-validation, accuracy from folds that had no part in the choice.

Two loops, one inside the other. `choose` compares settings by cross-validation over the labels it is given. `held_out`
gives it all folds but one, fits what it chose, and predicts that one: so the accuracy reported is of images that
neither a fit, nor a choice of settings, nor a calibration has seen. (What standardizes embeddings is of all images,
and knows no label.) A class with one label is always trained on and never tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mixnn.apps.classify.models import DEFAULTS, Classifier, Frame, Setting, fit, logits, softmax

CHOICE_FOLDS = 3  # of the inner loop; five choose no better (digits, 2 to 10 labels a class)
CHOOSING = 1000  # labels that settings are chosen with at most; the rest would only cost time


@dataclass(frozen=True)
class Task:
    """Labelled embeddings: vectors (n, F), labels (n,) as numbers of classes, and the frame of all images."""

    vectors: np.ndarray
    y: np.ndarray
    classes: tuple[str, ...]
    frame: Frame

    def at(self, rows: np.ndarray) -> Task:
        return Task(self.vectors[rows], self.y[rows], self.classes, self.frame)

    def train(self, setting: Setting, temperature: float = 1.0) -> Classifier:
        (arrays,) = fit(self.frame.map(self.vectors, setting.space), self.y, [setting])
        return Classifier(self.classes, setting, self.frame, arrays, temperature)


def folds(y: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """The fold of each label, (n,): classes dealt out evenly; -1, in no fold, where a class has one label alone."""
    fold, dealt = np.full(len(y), -1), 0
    for c in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == c))
        if len(rows) > 1:
            fold[rows] = (dealt + np.arange(len(rows))) % count
            dealt += len(rows)
    return fold


def testable(y: np.ndarray) -> bool:
    """Whether labels can be held out: at least two classes have at least two."""
    return int((np.unique(y, return_counts=True)[1] > 1).sum()) > 1


def sample(y: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of at most about `count` labels, of every class its share and at least two if it has them."""
    if len(y) <= count:
        return np.arange(len(y))
    rows = [rng.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]
    return np.sort(np.concatenate([r[: max(2, round(len(r) * count / len(y)))] for r in rows]))


def out_of_fold(task: Task, chosen: Sequence[Setting], fold: np.ndarray) -> dict[Setting, np.ndarray]:
    """Scores (n, Y) of each label by a classifier fitted without its fold; rows in no fold stay NaN."""
    num_classes = len(task.classes)
    found = {setting: np.full((len(task.y), num_classes), math.nan) for setting in chosen}
    for model, space in dict.fromkeys((s.model, s.space) for s in chosen):
        path = sorted((s for s in chosen if (s.model, s.space) == (model, space)), key=lambda s: s.strength)
        x = task.frame.map(task.vectors, space)
        for f in np.unique(fold[fold >= 0]):
            test = fold == f
            for setting, arrays in zip(path, fit(x[~test], task.y[~test], path), strict=True):
                found[setting][test] = logits(x[test], setting, arrays, num_classes)
    return found


def log_loss(scores: np.ndarray, y: np.ndarray, temperature: float = 1.0) -> float:
    """Mean of -log p(label)."""
    return float(-np.log(np.maximum(softmax(scores / temperature)[np.arange(len(y)), y], 1e-300)).mean())


def calibrate(scores: np.ndarray, y: np.ndarray) -> float:
    """The temperature that makes held-out scores the best probabilities; held near 1 where labels are few."""

    def cost(log_t: float) -> float:
        return len(y) * log_loss(scores, y, math.exp(log_t)) + log_t**2 / 2

    low, high = -4.0, 4.0
    while high - low > 0.01:  # one valley: narrow it by thirds
        a, b = (2 * low + high) / 3, (low + 2 * high) / 3
        low, high = (low, b) if cost(a) < cost(b) else (a, high)
    return math.exp((low + high) / 2)


@dataclass(frozen=True)
class Candidate:
    """A setting with its cross-validated accuracy and calibrated log loss; NaN where nothing could be held out."""

    setting: Setting
    accuracy: float = math.nan
    loss: float = math.nan
    temperature: float = 1.0


def choose(task: Task, options: Sequence[Setting], rng: np.random.Generator) -> list[Candidate]:
    """The best setting of each model, the best of all first; the models' defaults where nothing can be held out."""
    models = dict.fromkeys(s.model for s in options)
    if not testable(task.y):
        return [Candidate(DEFAULTS[model]) for model in models]
    task = task.at(sample(task.y, CHOOSING, rng))
    fold = folds(task.y, CHOICE_FOLDS, rng)
    tested, found = fold >= 0, []
    for setting, scores in out_of_fold(task, options, fold).items():
        scores, y = scores[tested], task.y[tested]
        temperature = calibrate(scores, y)
        right = float((scores.argmax(1) == y).mean())
        found.append(Candidate(setting, right, log_loss(scores, y, temperature), temperature))
    ranked = sorted(found, key=lambda candidate: candidate.loss)  # steadier than accuracy where labels are few
    return [next(c for c in ranked if c.setting.model == m) for m in dict.fromkeys(c.setting.model for c in ranked)]


@dataclass(frozen=True)
class HeldOut:
    """Predictions of labels that were held out: rows (m,) of the task, and (m, Y) probabilities of each model."""

    rows: np.ndarray
    best: np.ndarray  # of whichever model was chosen in each fold
    models: dict[str, np.ndarray] = field(default_factory=dict)


def held_out(
    task: Task, options: Sequence[Setting], rng: np.random.Generator, advance: Callable[[int], None] = lambda _: None
) -> HeldOut | None:
    """Each label predicted by what is chosen and fitted without its fold; None if labels are too few."""
    if not testable(task.y):
        return None
    fold = folds(task.y, num_folds(len(task.y)), rng)
    empty = np.full((len(task.y), len(task.classes)), math.nan)
    best, models = empty.copy(), {model: empty.copy() for model in dict.fromkeys(s.model for s in options)}
    for f in np.unique(fold[fold >= 0]):
        test, rest = fold == f, task.at(np.flatnonzero(fold != f))
        for i, candidate in enumerate(choose(rest, options, rng)):
            found = rest.train(candidate.setting, candidate.temperature).probabilities(task.vectors[test])
            models[candidate.setting.model][test] = found
            if i == 0:
                best[test] = found
        advance(int(f) + 1)
    rows = np.flatnonzero(fold >= 0)
    return HeldOut(rows, best[rows], {model: found[rows] for model, found in models.items()})


def num_folds(num_labels: int) -> int:
    """Of the outer loop: where labels are few, training without a fifth of them would look worse than it is."""
    return 10 if num_labels <= 100 else 5


def wilson(right: float, count: float, z: float = 1.96) -> tuple[float, float]:
    """95% interval of a share, `right` of `count` (Wilson 1927): sound for few, and where all are right."""
    p, zz = right / count, z * z / count
    middle, half = p + zz / 2, z * math.sqrt(p * (1 - p) / count + zz / (4 * count))
    return max(0.0, (middle - half) / (1 + zz)), min(1.0, (middle + half) / (1 + zz))
