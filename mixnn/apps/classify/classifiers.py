"""Classifiers of embeddings: how they are fitted and chosen, how accurate they are, and what more labels would give.

There are two models, logistic regression and nearest neighbors, each on standardized or on plain embeddings; either
way, rows are scaled to length 1. A class's score in nearest neighbors is the mean of exp(cos / 0.1) over its own k
nearest labelled images. With k = 1 this predicts the nearest neighbor's class, as the usual vote does, but the other
classes get a score too, which halves the held-out log loss (digits, MNN).

Two cross-validations are nested. `select_settings` compares settings on the labels it is given. `held_out_predictions`
gives it all folds but one and predicts that one, so neither a fit, nor a choice, nor a calibration has seen the labels
that accuracy is measured on. (Standardizing uses all images, but no labels.)

Shapes: M images, F features, Y classes, n labelled images.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from scipy.stats import binomtest, norm
from scipy.stats import t as student_t
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from mixnn.apps.embed import Embeddings
from mixnn.data.folder import natural_key
from mixnn.progress import Reporter

MODELS = {"logistic": "logistic regression", "knn": "nearest neighbors"}
SPACES = ("standardized", "unit")
STRENGTHS = {"logistic": (1.0, 10.0, 100.0), "knn": (1.0, 3.0, 10.0)}  # C, and k
TEMPERATURE = 0.1  # of the neighbors' weights, as in the authors' vote
MAX_ITERATIONS = 1000
MAX_CELLS = 2**24  # numbers in the largest temporary array while predicting

INNER_FOLDS = 3  # for choosing settings; five choose no better (digits, 2 to 10 labels per class)
MAX_CHOOSING = 1000  # labels used to choose settings; more would only cost time
# Held-out predictions share training images, so n of them say less than n independent ones. Counted in full, 95%
# intervals contained the accuracy on fresh data in 89 to 94% of simulated sets; counted as 0.7 n, in 94 to 97% (nearest
# neighbors, 15 to 120 labels, 150 to 200 sets each; logistic regression with 15 labels: 25 of 30 either way).
EFFECTIVE = 0.7
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


# Best or nearly best on MNN's embeddings from one label per class on; used where labels are too few to choose.
DEFAULTS = {"logistic": Setting("logistic", "standardized", 10.0), "knn": Setting("knn", "standardized", 3.0)}


def list_settings(model: str) -> list[Setting]:
    """All settings of one model, or of both for "auto"; the defaults come first, so that they win ties."""
    models = [m for m in MODELS if model in (m, "auto")]
    every = [Setting(m, space, strength) for m in models for space in SPACES for strength in STRENGTHS[m]]
    return sorted(every, key=lambda setting: setting != DEFAULTS[setting.model])


@dataclass(frozen=True)
class Scaler:
    """Mean and standard deviation of each feature over all images, labelled or not."""

    mean: np.ndarray
    scale: np.ndarray

    @staticmethod
    def fit(vectors: np.ndarray) -> Scaler:
        std = vectors.std(0, dtype=np.float64)
        floor = 0.01 * std.mean() or 1.0  # keeps a feature that is never active from being blown up
        return Scaler(vectors.mean(0, dtype=np.float64), np.maximum(std, floor))

    def transform(self, vectors: np.ndarray, space: str) -> np.ndarray:
        """(M, F) embeddings as rows of length 1."""
        x = vectors.astype(np.float64)
        x = (x - self.mean) / self.scale if space == "standardized" else x
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

    Logistic regressions are warm-started, each from the one before.
    """
    if settings[0].model == "knn":
        return [{"bank": x, "labels": y} for _ in settings]
    model, fitted = LogisticRegression(max_iter=MAX_ITERATIONS, warm_start=True), []
    for setting in settings:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # many classes with few labels; not quite converged
            model.set_params(C=setting.strength).fit(x, y)
        coef, intercept = model.coef_.copy(), model.intercept_.copy()
        if len(coef) == 1:  # for two classes, scikit-learn keeps only the margin of the second
            coef, intercept = np.vstack([-coef / 2, coef / 2]), np.concatenate([-intercept / 2, intercept / 2])
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
class LabelledSet:
    """Labelled embeddings: vectors (n, F), class numbers y (n,), class names, and the scaler of all images."""

    vectors: np.ndarray
    y: np.ndarray
    classes: tuple[str, ...]
    scaler: Scaler

    @staticmethod
    def select(embeddings: Embeddings, labels: dict[str, str]) -> tuple[np.ndarray, LabelledSet]:
        """The rows that have a label, and the set they form."""
        rows = np.array([i for i, name in enumerate(embeddings.names) if name in labels])
        names = [labels[embeddings.names[i]] for i in rows]
        classes = tuple(sorted(set(names), key=natural_key))
        number = {name: i for i, name in enumerate(classes)}
        y = np.array([number[name] for name in names])
        return rows, LabelledSet(embeddings.vectors[rows], y, classes, Scaler.fit(embeddings.vectors))

    def subset(self, rows: np.ndarray) -> LabelledSet:
        return LabelledSet(self.vectors[rows], self.y[rows], self.classes, self.scaler)

    def fit(self, setting: Setting, temperature: float = 1.0) -> Classifier:
        (parameters,) = fit_settings(self.scaler.transform(self.vectors, setting.space), self.y, [setting])
        return Classifier(self.classes, setting, self.scaler, parameters, temperature)


def can_hold_out(y: np.ndarray) -> bool:
    """Whether at least two classes have at least two labels each."""
    return int((np.bincount(y) > 1).sum()) > 1


def stratified_folds(y: np.ndarray, num_folds: int, rng: np.random.Generator) -> np.ndarray:
    """Fold of each label, (n,); at most as many folds as the largest class has labels.

    A class with a single label is in no fold (-1): it is always trained on and never tested.
    """
    counts = np.bincount(y)
    rows, fold = np.flatnonzero(counts[y] > 1), np.full(len(y), -1)
    seed = int(rng.integers(2**32))
    splitter = StratifiedKFold(min(num_folds, int(counts.max())), shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class with fewer labels than folds is missing from some
        for i, (_, test) in enumerate(splitter.split(rows, y[rows])):
            fold[rows[test]] = i
    return fold


def stratified_sample(y: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of about `count` labels, in proportion to the classes, but two per class if it has them."""
    if len(y) <= count:
        return np.arange(len(y))
    rows = [rng.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]
    return np.sort(np.concatenate([r[: max(2, round(len(r) * count / len(y)))] for r in rows]))


def out_of_fold_scores(data: LabelledSet, settings: Sequence[Setting], fold: np.ndarray) -> dict[Setting, np.ndarray]:
    """Scores (n, Y) of each label by a classifier fitted without its fold; NaN for rows in no fold."""
    num_classes = len(data.classes)
    scores = {setting: np.full((len(data.y), num_classes), math.nan) for setting in settings}
    for model, space in dict.fromkeys((s.model, s.space) for s in settings):
        path = sorted((s for s in settings if (s.model, s.space) == (model, space)), key=lambda s: s.strength)
        x = data.scaler.transform(data.vectors, space)
        for f in np.unique(fold[fold >= 0]):
            test = fold == f
            for setting, parameters in zip(path, fit_settings(x[~test], data.y[~test], path), strict=True):
                scores[setting][test] = class_scores(x[test], setting, parameters, num_classes)
    return scores


def log_loss(scores: np.ndarray, y: np.ndarray, temperature: float = 1.0) -> float:
    """Mean of -log p(label)."""
    return float(-log_softmax(scores / temperature, axis=1)[np.arange(len(y)), y].mean())


def calibration_temperature(scores: np.ndarray, y: np.ndarray) -> float:
    """Temperature with the lowest log loss on held-out scores; a prior keeps it near 1 where labels are few."""

    def cost(log_t: float) -> float:
        return len(y) * log_loss(scores, y, math.exp(log_t)) + log_t**2 / 2

    return math.exp(minimize_scalar(cost, bounds=(-4, 4), method="bounded", options={"xatol": 0.01}).x)


@dataclass(frozen=True)
class CrossValidated:
    """A setting with its cross-validated accuracy and log loss after calibration; NaN if nothing could be held out."""

    setting: Setting
    accuracy: float = math.nan
    log_loss: float = math.nan
    temperature: float = 1.0


def select_settings(data: LabelledSet, settings: Sequence[Setting], rng: np.random.Generator) -> list[CrossValidated]:
    """The best setting of each model, best model first; the defaults if nothing can be held out."""
    if not can_hold_out(data.y):
        return [CrossValidated(DEFAULTS[model]) for model in dict.fromkeys(s.model for s in settings)]
    data = data.subset(stratified_sample(data.y, MAX_CHOOSING, rng))
    fold = stratified_folds(data.y, INNER_FOLDS, rng)
    y, ranked = data.y[fold >= 0], []
    for setting, scores in out_of_fold_scores(data, settings, fold).items():
        scores = scores[fold >= 0]
        temperature = calibration_temperature(scores, y)
        accuracy = float((scores.argmax(1) == y).mean())
        ranked.append(CrossValidated(setting, accuracy, log_loss(scores, y, temperature), temperature))
    ranked.sort(key=lambda result: result.log_loss)  # less noisy than accuracy where labels are few
    best: dict[str, CrossValidated] = {}
    for result in ranked:
        best.setdefault(result.setting.model, result)
    return list(best.values())


# --- accuracy ---


class HeldOut(NamedTuple):
    """Held-out rows (m,) of the labelled set, and their probabilities (m, Y)."""

    rows: np.ndarray
    probabilities: np.ndarray  # by the model chosen in each fold
    by_model: dict[str, np.ndarray]


def num_outer_folds(y: np.ndarray) -> int:
    """Ten folds up to 100 labels, else five; at most as many as the largest class has labels.

    With few labels, training without a fifth of them would underestimate the accuracy.
    """
    return min(10 if len(y) <= 100 else 5, int(np.bincount(y).max()))


def held_out_predictions(
    data: LabelledSet,
    settings: Sequence[Setting],
    rng: np.random.Generator,
    advance: Callable[[int], None] = lambda _: None,
) -> HeldOut | None:
    """Nested cross-validation: each label is predicted by what was chosen and fitted without its fold.

    None if there are too few labels.
    """
    if not can_hold_out(data.y):
        return None
    fold = stratified_folds(data.y, num_outer_folds(data.y), rng)
    probabilities = np.full((len(data.y), len(data.classes)), math.nan)
    by_model = {model: probabilities.copy() for model in dict.fromkeys(s.model for s in settings)}
    for f in range(int(fold.max()) + 1):
        test, rest = fold == f, data.subset(np.flatnonzero(fold != f))
        ranked = select_settings(rest, settings, rng)
        for best in ranked:
            classifier = rest.fit(best.setting, best.temperature)
            by_model[best.setting.model][test] = classifier.predict_proba(data.vectors[test])
        probabilities[test] = by_model[ranked[0].setting.model][test]
        advance(f + 1)
    rows = np.flatnonzero(fold >= 0)
    return HeldOut(rows, probabilities[rows], {model: p[rows] for model, p in by_model.items()})


def wilson_interval(right: int, count: int, effective: float = 1.0) -> tuple[float, float]:
    """95% interval of a proportion (Wilson 1927), as if only `effective * count` of the trials were independent."""
    z = norm.ppf(0.975) / math.sqrt(effective)  # a larger z does the same as a smaller count
    interval = binomtest(right, count).proportion_ci(2 * norm.cdf(z) - 1, method="wilson")
    return float(interval.low), float(interval.high)


def accuracy_with_interval(predicted: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Accuracy of held-out predictions and its 95% interval, in percent."""
    right = int((predicted == y).sum())
    low, high = wilson_interval(right, len(y), EFFECTIVE)
    return {"accuracy": percent(right / len(y)), "low": percent(low), "high": percent(high)}


@one_thread()
def held_out_accuracy(embeddings: Embeddings, labels: dict[str, str], *, model: str, seed: int) -> dict[str, float]:
    """Accuracy and interval alone, on the folds that `train_classifier` uses with this seed."""
    data = LabelledSet.select(embeddings, labels)[1]
    held = held_out_predictions(data, list_settings(model), np.random.default_rng([seed, 0]))
    assert held, "only called where labels can be held out"
    return accuracy_with_interval(held.probabilities.argmax(1), data.y[held.rows])


def percent(share: float) -> float:
    """In percent with six decimals, so that rounding again for display gives the same as rounding once."""
    return round(100 * float(share), 6)


# --- learning curve ---


def learning_curve(
    data: LabelledSet,
    settings: Sequence[Setting],
    seed: int,
    draws: int = CURVE_DRAWS,
    advance: Callable[[int], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Accuracy with 1, 2, 5, 10, ... labels per class, settings chosen each time; empty if labels are too few.

    A draw holds out a quarter of each class, but at least one label, and trains on the first m of the others, for each
    m in turn. So points of a draw differ only in the labels added. A class with fewer than m labels gives all it has;
    the curve ends where most classes have fewer.
    """
    if not can_hold_out(data.y):
        return []
    counts = np.bincount(data.y)
    pool = counts - np.where(counts > 1, np.maximum(1, np.round(CURVE_TESTED * counts)), 0).astype(int)
    steps = [m for m in CURVE_STEPS if m <= np.median(pool)] or [1]
    accuracies: list[list[float]] = [[] for _ in steps]
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw])
        rows = [rng.permutation(np.flatnonzero(data.y == c)) for c in range(len(counts))]
        test = data.subset(np.concatenate([r[p:] for r, p in zip(rows, pool, strict=True)]))
        for m, values in zip(steps, accuracies, strict=True):
            if m > 10 and draw >= max(5, draws // 4):
                break
            train = data.subset(np.concatenate([r[: min(m, p)] for r, p in zip(rows, pool, strict=True)]))
            classifier = train.fit(select_settings(train, settings, rng)[0].setting)
            predicted = classifier.predict_proba(test.vectors).argmax(1)
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


@one_thread()
def train_classifier(
    embeddings: Embeddings,
    labels: dict[str, str],
    *,
    model: str = "auto",
    seed: int = 0,
    suggested: Collection[str] = (),
    draws: int = CURVE_DRAWS,
    reporter: Reporter | None = None,
) -> TrainingResult:
    """Choose a classifier, fit it on all labels, and estimate its accuracy from labels held out.

    `suggested`: images that were suggested for labelling, which are not a random sample.
    """
    reporter = reporter or Reporter(quiet=True)
    rows, data = LabelledSet.select(embeddings, labels)
    settings = list_settings(model)
    with reporter.bar("cross-validation", num_outer_folds(data.y)) as advance:
        held = held_out_predictions(data, settings, np.random.default_rng([seed, 0]), advance)
    with reporter.bar("learning curve, draws", draws) as advance:
        curve = learning_curve(data, settings, seed, draws, advance)
    best = select_settings(data, settings, np.random.default_rng([seed, 1]))[0]
    classifier = data.fit(best.setting, best.temperature)
    probabilities = classifier.predict_proba(embeddings.vectors)
    names = [embeddings.names[i] for i in rows]
    results = {
        "images": len(embeddings),
        "labelled": len(data.y),
        "classes": {c: int(count) for c, count in zip(data.classes, np.bincount(data.y), strict=True)},
        "classifier": _describe(best),
        "held_out": _held_out_results(held, data, names) if held else None,
        "notes": _notes(held, data, _num_suggested(embeddings.names, names, suggested)),
        "curve": curve,
        "predicted": summarize_predictions(np.delete(probabilities, rows, axis=0), data.classes),
    }
    return TrainingResult(classifier, probabilities, results)


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


def _held_out_results(held: HeldOut, data: LabelledSet, names: Sequence[str]) -> dict[str, Any]:
    """Accuracy with its interval, and the mistakes."""
    y, predicted, confidence = data.y[held.rows], held.probabilities.argmax(1), held.probabilities.max(1)
    wrong = predicted != y
    counts, right = (np.bincount(labels, minlength=len(data.classes)) for labels in (y, y[~wrong]))
    tested = np.flatnonzero(counts)
    confusions = Counter(zip(y[wrong].tolist(), predicted[wrong].tolist(), strict=True)).most_common(MAX_LISTED)
    doubtful = [i for i in np.argsort(-confidence, kind="stable") if wrong[i] and confidence[i] >= CONFIDENT]
    return {
        "images": len(y),
        **accuracy_with_interval(predicted, y),
        "balanced_accuracy": percent(float((right[tested] / counts[tested]).mean())),
        "mean_confidence": percent(float(confidence.mean())),
        "commonest": data.classes[int(counts.argmax())],
        "commonest_share": percent(counts.max() / len(y)),
        "models": {model: accuracy_with_interval(p.argmax(1), y) for model, p in held.by_model.items()},
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


def _num_suggested(names: Sequence[str], labelled: Sequence[str], suggested: Collection[str]) -> int:
    """Number of labelled images that had been suggested; 0 if it is no more than chance would give."""
    count = len(set(suggested) & set(labelled))
    by_chance = len(labelled) * len(set(suggested) & set(names)) / len(names)
    return count if count > by_chance + 2 * math.sqrt(by_chance) else 0


def _notes(held: HeldOut | None, data: LabelledSet, num_suggested: int) -> list[str]:
    """Limits of the accuracy that these labels can show, a sentence or two each."""
    if not held:
        return [
            "Accuracy is not known yet: measuring it takes two labels in each of two classes. "
            "Label more images, or check the predictions by eye."
        ]
    single = [repr(c) for c, count in zip(data.classes, np.bincount(data.y), strict=True) if count == 1]
    listed = ", ".join(single[:5]) + (f" and {len(single) - 5} more" if len(single) > 5 else "")
    notes = [f"Classes with one label are trained on but never tested: {listed}."] if single else []
    if num_suggested:
        notes.append(
            f"{num_suggested:,} of the {len(data.y):,} labelled images {'was' if num_suggested == 1 else 'were'} "
            "suggested, so the labels are not a random sample. Accuracy on other images may be higher or lower."
        )
    return notes
