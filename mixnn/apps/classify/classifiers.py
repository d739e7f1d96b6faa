"""Classifiers of embeddings: how they are fitted and chosen, how accurate they are, and what more labels would give.

There are two models, logistic regression and nearest neighbors, each on standardized or on plain embeddings; either
way, rows are scaled to length 1. A class's score in nearest neighbors is the mean of exp(cos / 0.1) over its own k
nearest labeled images. With k = 1 this predicts the nearest neighbor's class, as the usual vote does, but the other
classes get a score too, which halves the held-out log loss (digits, MNN).

Two cross-validations are nested. `select_settings` compares settings on the labels it is given. `held_out_predictions`
gives it all labels but those of a fold and predicts these, so neither a fit, nor a choice, nor a calibration has seen
the labels that accuracy is measured on. (Standardizing uses all images, but no labels.) A fold holds out one label of
every class, so that no class is at a disadvantage when its label is predicted (notes/log.md has the measurements).

Shapes: M images, F features, Y classes, n labeled images.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from scipy.stats import norm, ranksums
from scipy.stats import t as student_t
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from mixnn.apps.embed import Embeddings
from mixnn.config import setting as spell
from mixnn.data.folder import natural_key
from mixnn.progress import Reporter, reporter_for

MODELS = {"logistic": "logistic regression", "knn": "nearest neighbors"}
SPACES = ("centered", "standardized")
STRENGTHS = {"logistic": (1.0, 10.0, 100.0), "knn": (1.0, 3.0, 10.0)}  # C, and k
TEMPERATURE = 0.1  # of the neighbors' weights, as in the authors' vote
MAX_ITERATIONS = 1000
MAX_CELLS = 2**24  # numbers in the largest temporary array while predicting

OUTER_FOLDS, FEWER_FOLDS = 10, 5  # up to MANY_LABELS labels, and above
MANY_LABELS = 500
INNER_FOLDS = 3  # for choosing settings; five choose no better (digits, 2 to 10 labels per class)
# Labels used to choose settings: for the classifier, and in each fold of a test. 500 for the classifier as well would
# double the error of its confidences (0.9 to 1.7 points, digits, 1,200 labels); in the folds more would take long.
MAX_CHOOSING, MAX_IN_FOLDS = 1000, 500
# Held-out predictions share training images, so n of them say less than n independent ones. Counted in full, 95%
# intervals contained the accuracy on fresh data in 91 to 93% of simulated sets; counted as 0.7 n, in 95 to 99% (nearest
# neighbors, 15 to 50 labels, 150 sets each; logistic regression with 15 labels, 50 sets: 86 and 92%).
EFFECTIVE_SHARE = 0.7
# A class counts in the accuracy by its number of labels and PRIOR_LABELS more: of few labels drawn at random, some
# classes get more by chance, and are then learned better. One label cannot be tested; its class is taken to be
# UNTESTED times as accurate as the others. With two or three random labels per class, the interval then contains the
# truth in 91% of draws instead of 81% (notes/log.md).
PRIOR_LABELS, UNTESTED = 1.0, 0.5  # _notes says "half"
# Labeled images are alike if their nearest labeled image is nearer than that of unlabeled images by more standard
# errors than this. 258 draws at random, per class or by `suggest` reached 2.8; 48 groups on a map had 5.4 and more.
MAX_ALIKE = 4.0
ALIKE_SAMPLE = 2000  # images of either kind that are compared
FEW_TO_LEARN_FROM = 5  # labels per class below which a test that trains on one less may miss the accuracy
# Calibration on fewer labels than this per class is rough: with the ImageNet encoder, the average confidence was off by
# 13 to 21 points in one of ten draws of 2 to 5 labels per class (notes/log.md).
FEW_TO_CALIBRATE = 10
# Standard deviation of the log of a temperature around `Setting.usual_temperature`. It keeps 15 labels from deciding:
# with 3 labels per class the worst of 78 draws was 18 points too confident instead of 24 (notes/log.md).
TEMPERATURE_SPREAD = 0.5
CONFIDENT = 0.9  # from this confidence on, a label that contradicts a prediction is doubtful
MAX_LISTED = 20  # confusions and doubtful labels in the results

CURVE_STEPS = (1, 2, 5, 10, 20, 50, 100)  # labels per class
CURVE_DRAWS = 20  # up to 10 labels per class; beyond, a quarter: these vary less and cost more
CURVE_TESTED = 0.25  # share of each class's labels that a draw holds out
CURVE_SPREAD = (5, 95)  # percentiles over draws


# --- models ---


@dataclass(frozen=True)
class Setting:
    """A model, the space it works in, and its strength: C of logistic regression, or the number of neighbors."""

    model: str
    space: str
    strength: float

    def __str__(self) -> str:
        return f"{'C' if self.model == 'logistic' else 'k'}={self.strength:g}, {self.space} embeddings"

    @property
    def usual_temperature(self) -> float:
        """The temperature to expect before any label is held out: 0.3, 0.55 and 1 for C = 1, 10, 100; 1 for neighbors.

        A smaller C shrinks the scores of logistic regression more than it lowers its accuracy.
        """
        return (self.strength / 100) ** 0.26 if self.model == "logistic" else 1.0


# Best or nearly best with the ImageNet encoder from one label per class on; used where labels are too few to choose.
DEFAULTS = {"logistic": Setting("logistic", "centered", 100.0), "knn": Setting("knn", "centered", 3.0)}
# Nats of log loss, over all labels, by which another setting must beat the first one. Without it, 2 to 5 labels per
# class often chose a worse one by chance: 0.7 points of accuracy on average (notes/log.md).
HANDICAP_NATS = 4.0


def list_settings(model: str) -> list[Setting]:
    """All settings of one model, or of both for "auto"; the defaults come first, the usual choice first of all."""
    models = [m for m in MODELS if model in (m, "auto")]
    every = [Setting(m, space, strength) for m in models for space in SPACES for strength in STRENGTHS[m]]
    return sorted(every, key=lambda setting: setting != DEFAULTS[setting.model])


@dataclass(frozen=True)
class Scaler:
    """Mean and standard deviation of each feature over all images, labeled or not."""

    mean: np.ndarray
    scale: np.ndarray

    @staticmethod
    def fit(vectors: np.ndarray) -> Scaler:
        std = vectors.std(0, dtype=np.float64)
        floor = 0.01 * std.mean() or 1.0  # keeps a feature that is never active from being blown up
        return Scaler(vectors.mean(0, dtype=np.float64), np.maximum(std, floor))

    def transform(self, vectors: np.ndarray, space: str) -> np.ndarray:
        """(M, F) embeddings as rows of length 1; in the space "unit", which older classifiers have, nothing else."""
        x = vectors.astype(np.float64)
        if space != "unit":
            x -= self.mean
        if space == "standardized":
            x /= self.scale
        return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


@contextmanager
def one_thread() -> Iterator[None]:
    """Linear algebra on one thread: with matrices this small, threads mostly wait for each other.

    On two busy cores, 50 labels took 10 s with one thread and 55 s with two; 1,000 labels took 26 s and 313 s.
    """
    with threadpool_limits(1):
        yield


Parameters = dict[str, np.ndarray]


def fit_settings(x: np.ndarray, y: np.ndarray, settings: Sequence[Setting]) -> list[Parameters]:
    """Parameters for settings of one model and space, from transformed embeddings; every class needs an image.

    Logistic regressions are warm-started, each from the one before. If there are far fewer images than features, they
    are fitted in the subspace that the images span, where the solution lies.
    """
    if settings[0].model == "knn":
        return [{"bank": x, "labels": y} for _ in settings]
    axes = None
    if 4 * len(x) < x.shape[1]:
        axes, r = np.linalg.qr(x.T)
        x = r.T
    model, fitted = LogisticRegression(max_iter=MAX_ITERATIONS, warm_start=True), []
    for setting in settings:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # many classes with few labels; not quite converged
            model.set_params(C=setting.strength).fit(x, y)
        coef, intercept = model.coef_.copy(), model.intercept_.copy()
        if len(coef) == 1:  # for two classes, scikit-learn keeps only the margin of the second
            coef, intercept = np.vstack([-coef / 2, coef / 2]), np.concatenate([-intercept / 2, intercept / 2])
        coef = coef if axes is None else coef @ axes.T
        fitted.append({"coef": coef, "intercept": intercept})
    return fitted


def class_scores(x: np.ndarray, setting: Setting, parameters: Parameters, num_classes: int) -> np.ndarray:
    """Logits (M, Y) of transformed embeddings, before calibration."""
    if setting.model == "logistic":
        return x @ parameters["coef"].T + parameters["intercept"]
    cos, scores = x @ parameters["bank"].T, np.zeros((len(x), num_classes))
    for c in range(num_classes):
        own = cos[:, parameters["labels"] == c]  # (M, images of this class)
        k = min(int(setting.strength), own.shape[1])
        nearest = np.partition(own, -k, axis=1)[:, -k:]
        scores[:, c] = np.log(np.exp(nearest / TEMPERATURE).mean(1))
    return scores


@dataclass(frozen=True)
class Classifier:
    """A fitted setting with all that prediction needs; the temperature calibrates its confidences."""

    classes: tuple[str, ...]
    setting: Setting
    scaler: Scaler
    parameters: Parameters
    temperature: float = 1.0

    def predict_proba(self, vectors: np.ndarray) -> np.ndarray:
        """Probabilities (M, Y) for embeddings (M, F), computed in chunks."""
        width = max(vectors.shape[1], len(self.parameters.get("bank", ())))
        chunk = max(1, MAX_CELLS // width)
        probabilities = [np.zeros((0, len(self.classes)))]
        for start in range(0, len(vectors), chunk):
            x = self.scaler.transform(vectors[start : start + chunk], self.setting.space)
            scores = class_scores(x, self.setting, self.parameters, len(self.classes))
            probabilities.append(softmax(scores / self.temperature, axis=1))
        return np.concatenate(probabilities)


# --- choice by cross-validation ---


@dataclass(frozen=True)
class LabeledSet:
    """Labeled embeddings: vectors (n, F), class numbers y (n,), class names, and the scaler of all images."""

    vectors: np.ndarray
    y: np.ndarray
    classes: tuple[str, ...]
    scaler: Scaler
    _spaces: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    @staticmethod
    def select(embeddings: Embeddings, labels: dict[str, str]) -> tuple[np.ndarray, LabeledSet]:
        """The rows that have a label, and the set they form."""
        rows = np.array([i for i, name in enumerate(embeddings.names) if name in labels])
        names = [labels[embeddings.names[i]] for i in rows]
        classes = tuple(sorted(set(names), key=natural_key))
        number = {name: i for i, name in enumerate(classes)}
        y = np.array([number[name] for name in names])
        return rows, LabeledSet(embeddings.vectors[rows], y, classes, Scaler.fit(embeddings.vectors))

    def subset(self, rows: np.ndarray) -> LabeledSet:
        spaces = {space: x[rows] for space, x in self._spaces.items()}
        return LabeledSet(self.vectors[rows], self.y[rows], self.classes, self.scaler, spaces)

    def in_space(self, space: str) -> np.ndarray:
        """The transformed vectors for cross-validation, computed once, with at most n numbers each.

        If there are fewer labels than features, the vectors are given in coordinates of the subspace they span. Inner
        products are the same, so both models predict the same for these images, up to the solver's tolerance, in a
        fraction of the time.
        """
        if space not in self._spaces:
            self._spaces[space] = _reduced(self.scaler.transform(self.vectors, space))
        return self._spaces[space]

    def alone(self) -> LabeledSet:
        """Rotate the vectors into at most n coordinates of their own, which no other subset shares."""
        spaces = {space: _reduced(x) for space, x in self._spaces.items()}
        return LabeledSet(self.vectors, self.y, self.classes, self.scaler, spaces)

    def fit(self, setting: Setting, temperature: float = 1.0) -> Classifier:
        (parameters,) = fit_settings(self.scaler.transform(self.vectors, setting.space), self.y, [setting])
        return Classifier(self.classes, setting, self.scaler, parameters, temperature)


def _reduced(x: np.ndarray) -> np.ndarray:
    """Vectors with the same inner products, in coordinates of the subspace that they span if that has fewer."""
    return np.linalg.qr(x.T).R.T if x.shape[1] > len(x) else x


def can_hold_out(y: np.ndarray) -> bool:
    """Whether at least two classes have at least two labels each."""
    return int((np.bincount(y) > 1).sum()) > 1


def balanced_folds(y: np.ndarray, num_folds: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows that each fold holds out: one label of every class, or an equal share if a class has more than `num_folds`.

    A class with fewer labels than folds takes turns, in a new order each round, so its labels are held out more than
    once. A class with a single label is in no fold: it is always trained on and never tested.
    """
    folds: list[list[int]] = [[] for _ in range(num_folds)]
    for c in np.flatnonzero(np.bincount(y) > 1):
        own = np.flatnonzero(y == c)
        rounds = [rng.permutation(own) for _ in range(-(-num_folds // len(own)))]
        order = np.concatenate(rounds)[: max(num_folds, len(own))]
        for i, rows in enumerate(folds):
            rows.extend(order[i::num_folds].tolist())
    return [np.array(rows) for rows in folds]


def stratified_sample(y: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of about `count` labels, in proportion to the classes, but two per class if it has them."""
    if len(y) <= count:
        return np.arange(len(y))
    rows = [rng.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]
    return np.sort(np.concatenate([r[: max(2, round(len(r) * count / len(y)))] for r in rows]))


def out_of_fold_scores(
    data: LabeledSet, settings: Sequence[Setting], folds: Sequence[np.ndarray]
) -> dict[Setting, np.ndarray]:
    """Scores (n, Y) of each label by classifiers fitted without its fold, their mean; NaN for rows in no fold."""
    times = np.zeros((len(data.y), 1))
    for held in folds:
        times[held] += 1
    times[times == 0] = math.nan
    scores = {setting: np.zeros((len(data.y), len(data.classes))) for setting in settings}
    for model, space in dict.fromkeys((s.model, s.space) for s in settings):
        path = sorted((s for s in settings if (s.model, s.space) == (model, space)), key=lambda s: s.strength)
        x = data.in_space(space)
        for held in folds:
            rest = np.delete(np.arange(len(x)), held)
            for setting, parameters in zip(path, fit_settings(x[rest], data.y[rest], path), strict=True):
                scores[setting][held] += class_scores(x[held], setting, parameters, len(data.classes))
    return {setting: total / times for setting, total in scores.items()}


def log_loss(scores: np.ndarray, y: np.ndarray, temperature: float = 1.0) -> float:
    """Mean of -log p(label)."""
    return float(-log_softmax(scores / temperature, axis=1)[np.arange(len(y)), y].mean())


def calibration_temperature(scores: np.ndarray, y: np.ndarray, usual: float = 1.0) -> float:
    """Temperature with the lowest log loss on held-out scores; a prior keeps it near `usual` where labels are few."""

    def cost(log_t: float) -> float:
        prior = ((log_t - math.log(usual)) / TEMPERATURE_SPREAD) ** 2 / 2
        return len(y) * log_loss(scores, y, math.exp(log_t)) + prior

    return math.exp(minimize_scalar(cost, bounds=(-4, 4), method="bounded", options={"xatol": 0.01}).x)


@dataclass(frozen=True)
class CrossValidated:
    """A setting with its cross-validated accuracy and log loss after calibration; NaN if nothing could be held out."""

    setting: Setting
    accuracy: float = math.nan
    log_loss: float = math.nan
    temperature: float = 1.0


def select_settings(
    data: LabeledSet, settings: Sequence[Setting], rng: np.random.Generator, most: int = MAX_IN_FOLDS
) -> list[CrossValidated]:
    """The best setting of each model by at most `most` labels, best model first; defaults if none can be held out."""
    if not can_hold_out(data.y):
        defaults = [DEFAULTS[model] for model in dict.fromkeys(s.model for s in settings)]
        return [CrossValidated(setting, temperature=setting.usual_temperature) for setting in defaults]
    data = data.subset(stratified_sample(data.y, most, rng)).alone()
    folds = balanced_folds(data.y, min(INNER_FOLDS, int(np.bincount(data.y).max())), rng)
    tested = np.unique(np.concatenate(folds))
    y, ranked = data.y[tested], []
    for setting, scores in out_of_fold_scores(data, settings, folds).items():
        scores = scores[tested]
        temperature = calibration_temperature(scores, y, setting.usual_temperature)
        accuracy = float((scores.argmax(1) == y).mean())
        ranked.append(CrossValidated(setting, accuracy, log_loss(scores, y, temperature), temperature))
    handicap = {setting: HANDICAP_NATS / len(y) for setting in settings[1:]}
    ranked.sort(key=lambda r: r.log_loss + handicap.get(r.setting, 0))  # less noisy than accuracy where labels are few
    best: dict[str, CrossValidated] = {}
    for result in ranked:
        best.setdefault(result.setting.model, result)
    return list(best.values())


# --- accuracy ---


class HeldOut(NamedTuple):
    """Held-out rows (m,) of the labeled set, their class numbers (m,) and their probabilities (m, Y)."""

    rows: np.ndarray
    y: np.ndarray
    probabilities: np.ndarray  # by the model chosen in each fold
    by_model: dict[str, np.ndarray]
    counts: np.ndarray  # labels of each class (Y,), also of those that cannot be held out

    @property
    def right(self) -> np.ndarray:
        return self.probabilities.argmax(1) == self.y

    @property
    def class_shares(self) -> np.ndarray:
        """Estimated share of each class among other images (Y,)."""
        shares: np.ndarray = (self.counts + PRIOR_LABELS) / (self.counts + PRIOR_LABELS).sum()
        return shares

    @property
    def weights(self) -> np.ndarray:
        """Weights (m,) whose product with `right` is the estimated accuracy on other images."""
        tested = np.bincount(self.y, minlength=len(self.counts))
        weights: np.ndarray = (self.class_shares / np.maximum(tested, 1))[self.y]
        return weights * (1 + UNTESTED * (1 / weights.sum() - 1))


def num_outer_folds(y: np.ndarray) -> int:
    """Number of outer folds: more for few labels, as training without a fifth of them would lower the accuracy."""
    return OUTER_FOLDS if len(y) <= MANY_LABELS else FEWER_FOLDS


def held_out_predictions(
    data: LabeledSet,
    settings: Sequence[Setting],
    rng: np.random.Generator,
    advance: Callable[[int], None] = lambda _: None,
) -> HeldOut | None:
    """Nested cross-validation: each label is predicted by what was chosen and fitted without its fold.

    A label that several folds hold out gets the mean of their probabilities. None if there are too few labels.
    """
    if not can_hold_out(data.y):
        return None
    for space in dict.fromkeys(setting.space for setting in settings):
        data.in_space(space)
    total, times = np.zeros((len(data.y), len(data.classes))), np.zeros((len(data.y), 1))
    by_model = {model: total.copy() for model in dict.fromkeys(s.model for s in settings)}
    for i, held in enumerate(balanced_folds(data.y, num_outer_folds(data.y), rng)):
        rest = data.subset(np.delete(np.arange(len(data.y)), held))
        ranked = select_settings(rest, settings, rng)
        for best in ranked:
            predicted = _predict(rest, data.subset(held), best)
            by_model[best.setting.model][held] += predicted
            total[held] += predicted if best is ranked[0] else 0
        times[held] += 1
        advance(i + 1)
    rows = np.flatnonzero(times)
    means = {model: p[rows] / times[rows] for model, p in by_model.items()}
    return HeldOut(rows, data.y[rows], total[rows] / times[rows], means, np.bincount(data.y))


def _predict(rest: LabeledSet, held: LabeledSet, best: CrossValidated) -> np.ndarray:
    """Probabilities of the held-out labels by a classifier of the rest; both are subsets of one set."""
    x, y = rest.in_space(best.setting.space), rest.y
    (parameters,) = fit_settings(x, y, [best.setting])
    scores = class_scores(held.in_space(best.setting.space), best.setting, parameters, len(rest.classes))
    return softmax(scores / best.temperature, axis=1)


def wilson_interval(share: float, count: float) -> tuple[float, float]:
    """95% interval of a proportion that `count` independent trials gave (Wilson 1927); it need not be whole."""
    z = float(norm.ppf(0.975))
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


def effective_count(weights: np.ndarray) -> float:
    """Number of independent trials that held-out predictions with these weights are worth."""
    return EFFECTIVE_SHARE * float(weights.sum()) ** 2 / float((weights**2).sum())


def accuracy_with_interval(right: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Accuracy of held-out predictions, with the weights of `HeldOut`, and its 95% interval, in percent."""
    accuracy = min(1.0, float(weights @ right))
    low, high = wilson_interval(accuracy, effective_count(weights))
    return {"accuracy": percent(accuracy), "low": percent(low), "high": percent(high)}


def alikeness(labeled: np.ndarray, unlabeled: np.ndarray, scaler: Scaler, seed: int) -> float:
    """How much more alike the labeled images (their vectors) are than chance would make them, in standard errors.

    For each labeled and each unlabeled image, the nearest other labeled one is found. If labels are chosen at random,
    neither kind is nearer to it (Wilcoxon's rank-sum test). In a group from a map, the labeled images are.
    """
    rng = np.random.default_rng([seed, 4])
    labeled, unlabeled = (x[rng.permutation(len(x))[:ALIKE_SAMPLE]] for x in (labeled, unlabeled))
    if not len(unlabeled):
        return 0.0
    x = scaler.transform(np.concatenate([labeled, unlabeled]), "centered")
    cosines = x @ x[: len(labeled)].T
    np.fill_diagonal(cosines, -np.inf)
    nearest = cosines.max(1)
    return float(ranksums(nearest[: len(labeled)], nearest[len(labeled) :]).statistic)


@one_thread()
def held_out(embeddings: Embeddings, labels: dict[str, str], *, model: str, seed: int) -> HeldOut:
    """The held-out predictions alone, on the folds that `train_classifier` uses with this seed."""
    data = LabeledSet.select(embeddings, labels)[1]
    held = held_out_predictions(data, list_settings(model), np.random.default_rng([seed, 0]))
    assert held, "only called where labels can be held out"
    return held


def percent(share: float) -> float:
    """The share in percent with six decimals, so that rounding again for display equals rounding once."""
    return round(100 * float(share), 6)


# --- learning curve ---


def learning_curve(
    data: LabeledSet,
    settings: Sequence[Setting],
    seed: int,
    draws: int = CURVE_DRAWS,
    advance: Callable[[int], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Accuracy with 1, 2, 5, 10, ... labels per class; empty if labels are too few.

    A draw holds out a quarter of each class, but at least one label, and trains on the first m of the others, for each
    m in turn. So points of a draw differ only in the labels added. A class with fewer than m labels gives all it has;
    the curve ends where most classes have fewer. Up to 10 labels per class, settings are chosen in each draw. From 20
    on they are chosen in the first draw and kept, since they hardly differ and choosing takes long; so later draws test
    on some labels that were used to choose.
    """
    if not can_hold_out(data.y):
        return []
    for space in dict.fromkeys(setting.space for setting in settings):
        data.in_space(space)
    counts = np.bincount(data.y)
    pool = counts - np.where(counts > 1, np.maximum(1, np.round(CURVE_TESTED * counts)), 0).astype(int)
    steps = [m for m in CURVE_STEPS if m <= np.median(pool)] or [1]
    accuracies: list[list[float]] = [[] for _ in steps]
    chosen: dict[int, CrossValidated] = {}
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw])
        rows = [rng.permutation(np.flatnonzero(data.y == c)) for c in range(len(counts))]
        test = data.subset(np.concatenate([r[p:] for r, p in zip(rows, pool, strict=True)]))
        for m, values in zip(steps, accuracies, strict=True):
            if m > 10 and draw >= max(5, draws // 4):
                break
            train = data.subset(np.concatenate([r[: min(m, p)] for r, p in zip(rows, pool, strict=True)]))
            if m <= 10 or m not in chosen:
                chosen[m] = select_settings(train, settings, rng)[0]
            predicted = _predict(train, test, chosen[m]).argmax(1)
            values.append(100 * float((predicted == test.y).mean()))
        advance(draw + 1)
    return [curve_point(m, now, before) for m, now, before in zip(steps, accuracies, [[], *accuracies], strict=False)]


def curve_point(labels_per_class: int, now: list[float], before: list[float]) -> dict[str, Any]:
    """Mean and spread over draws; from the second point on, also the gain over the one before with its 95% interval."""
    low, high = np.percentile(now, CURVE_SPREAD)
    values = {"accuracy": np.mean(now), "low": low, "high": high}
    gains = [b - a for a, b in zip(before, now, strict=False)]  # draw by draw
    if len(gains) > 1:
        # draws share labels, so the variance of their mean is corrected (Nadeau and Bengio, 2003)
        error = np.std(gains, ddof=1) * math.sqrt(1 / len(gains) + CURVE_TESTED / (1 - CURVE_TESTED))
        mean, half = np.mean(gains), student_t.ppf(0.975, len(gains) - 1) * error
        values |= {"gain": mean, "gain_low": mean - half, "gain_high": mean + half}
    rounded = {key: round(float(value), 6) for key, value in values.items()}
    return {"labels_per_class": labels_per_class, **rounded, "draws": len(now)}


# --- all of it ---


class TrainingResult(NamedTuple):
    classifier: Classifier
    probabilities: np.ndarray  # (M, Y), of all images
    results: dict[str, Any]  # ready for JSON; accuracies in percent
    held: HeldOut | None


@one_thread()
def train_classifier(
    embeddings: Embeddings,
    labels: dict[str, str],
    *,
    model: str = "auto",
    seed: int = 0,
    suggested: Collection[str] = (),
    copies: Collection[str] = (),
    draws: int = CURVE_DRAWS,
    reporter: Reporter | None = None,
) -> TrainingResult:
    """Choose a classifier, fit it on all labels, and estimate its accuracy from labels held out.

    `suggested`: images that were suggested for labeling, which are not a random sample. `copies`: labeled images that
    are copies of others. They are learned from but not tested, because a copy of a tested image gives the label away.
    """
    reporter = reporter or reporter_for(False)
    rows, every = LabeledSet.select(embeddings, labels)
    originals = np.array([i for i, row in enumerate(rows) if embeddings.names[row] not in copies])
    data = every.subset(originals) if copies else every  # what is tested
    settings = list_settings(model)
    with reporter.bar("cross-validation", num_outer_folds(data.y)) as advance:
        held = held_out_predictions(data, settings, np.random.default_rng([seed, 0]), advance)
    with reporter.bar("learning curve, draws", draws) as advance:
        curve = learning_curve(data, settings, seed, draws, advance)
    best = select_settings(data, settings, np.random.default_rng([seed, 1]), MAX_CHOOSING)[0]
    classifier = every.fit(best.setting, best.temperature)
    probabilities = classifier.predict_proba(embeddings.vectors)
    names = [embeddings.names[i] for i in rows[originals]]
    unlabeled = np.delete(embeddings.vectors, rows, axis=0)
    alike = alikeness(data.vectors, unlabeled, every.scaler, seed) > MAX_ALIKE
    results = {
        "images": len(embeddings),
        "labeled": len(every.y),
        "copies": len(every.y) - len(data.y),
        "classes": {c: int(count) for c, count in zip(every.classes, np.bincount(every.y), strict=True)},
        "classifier": _describe(best),
        "held_out": _held_out_results(held, data, names) | {"labels_alike": alike} if held else None,
        "notes": _notes(held, data, len(every.y), _num_suggested(embeddings.names, names, suggested), alike),
        "curve": curve,
        "predicted": summarize_predictions(np.delete(probabilities, rows, axis=0), data.classes),
    }
    return TrainingResult(classifier, probabilities, results, held)


def summarize_predictions(probabilities: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    """Number of images predicted, in all, with confidence, and per class."""
    counts = np.bincount(probabilities.argmax(1), minlength=len(classes))
    return {
        "images": len(probabilities),
        "sure": int((probabilities.max(1, initial=0) >= CONFIDENT).sum()),
        "mean_confidence": percent(probabilities.max(1).mean()) if len(probabilities) else None,
        "by_class": {c: int(count) for c, count in zip(classes, counts, strict=True)},
    }


def _describe(best: CrossValidated) -> dict[str, Any]:
    validated = not math.isnan(best.log_loss)
    return {
        "model": best.setting.model,
        "setting": str(best.setting),
        "space": best.setting.space,
        "strength": best.setting.strength,
        "temperature": round(best.temperature, 4),
        "cv_accuracy": percent(best.accuracy) if validated else None,  # of the best of many: a little optimistic
        "cv_log_loss": round(best.log_loss, 4) if validated else None,
    }


def _held_out_results(held: HeldOut, data: LabeledSet, names: Sequence[str]) -> dict[str, Any]:
    """Accuracy with its interval, and the mistakes."""
    y, predicted, confidence = held.y, held.probabilities.argmax(1), held.probabilities.max(1)
    wrong = ~held.right
    counts, right = (np.bincount(labels, minlength=len(data.classes)) for labels in (y, y[~wrong]))
    tested = np.flatnonzero(counts)
    confusions = Counter(zip(y[wrong].tolist(), predicted[wrong].tolist(), strict=True)).most_common(MAX_LISTED)
    doubtful = [i for i in np.argsort(-confidence, kind="stable") if wrong[i] and confidence[i] >= CONFIDENT]
    return {
        "images": len(y),
        **accuracy_with_interval(held.right, held.weights),
        "balanced_accuracy": percent(float((right[tested] / counts[tested]).mean())),
        "right": percent(np.average(held.right, weights=held.weights)),  # without classes that cannot be held out
        "mean_confidence": percent(np.average(confidence, weights=held.weights)),
        "commonest": data.classes[int(held.class_shares.argmax())],
        "commonest_share": percent(held.class_shares.max()),
        "models": {model: accuracy_with_interval(p.argmax(1) == y, held.weights) for model, p in held.by_model.items()},
        "per_class": {
            data.classes[c]: {"images": int(counts[c]), "accuracy": percent(right[c] / counts[c])} for c in tested
        },
        "confusions": [
            {"label": data.classes[a], "taken_for": data.classes[b], "images": count} for (a, b), count in confusions
        ],
        "doubtful": [
            {
                "file": names[held.rows[i]],
                "label": data.classes[y[i]],
                "predicted": data.classes[predicted[i]],
                "confidence": round(float(confidence[i]), 4),
            }
            for i in doubtful[:MAX_LISTED]
        ],
    }


def _num_suggested(names: Sequence[str], labeled: Sequence[str], suggested: Collection[str]) -> int:
    """Number of labeled images that had been suggested; 0 if it is no more than chance would give."""
    count = len(set(suggested) & set(labeled))
    by_chance = len(labeled) * len(set(suggested) & set(names)) / len(names)
    return count if count > by_chance + 2 * math.sqrt(by_chance) else 0


def _notes(held: HeldOut | None, data: LabeledSet, num_labeled: int, num_suggested: int, alike: bool) -> list[str]:
    """Limits of the accuracy that these labels can show, a sentence or two each. `data` is without copies."""
    counts, notes = np.bincount(data.y), []
    if copies := num_labeled - len(data.y):
        notes.append(
            f"{copies:,} of the {num_labeled:,} labeled images {'is a copy' if copies == 1 else 'are copies'} of "
            "others. A copy is learned from but not tested."
        )
    if not held:
        why = (
            "no class has a second label that could be held out to test on"
            if counts.max() == 1
            else "measuring it takes two labels in each of two classes"
        )
        advice = "Label a second image of each class, or check the predictions by eye."
        return [*notes, f"Accuracy is not known yet: {why}. {advice}"]
    single = [repr(c) for c, count in zip(data.classes, counts, strict=True) if count == 1]
    listed = ", ".join(single[:5]) + (f" and {len(single) - 5} more" if len(single) > 5 else "")
    if alike:
        notes.append(
            "The labeled images are more alike than images chosen at random, as a group on a map is. The accuracy on "
            f"all other images is probably much lower. Label some that {spell('suggest', 20)} picks, or random ones."
        )
    if single:
        notes.append(
            f"Classes with one label are trained on but never tested: {listed}. "
            "The accuracy assumes that they are half as accurate as the others."
        )
    if np.median(counts[counts > 1]) < FEW_TO_LEARN_FROM:
        few = f"Most classes have fewer than {FEW_TO_LEARN_FROM} labels"
        notes.append(
            f"{few}, and each test trains on one less per class. "
            "So the accuracy on other images tends to be higher, and may lie above the interval."
            if counts.max() - counts.min() <= 1
            else f"{few}, so the accuracy is rough."
        )
    if num_suggested:
        notes.append(
            f"{num_suggested:,} of the {len(data.y):,} labeled images {'was' if num_suggested == 1 else 'were'} "
            "suggested, so the labels are not a random sample. Accuracy on other images may be higher or lower."
        )
    return notes
