"""Classifiers of embeddings: logistic regression and nearest neighbors, each in one of two spaces, with confidences.

Embeddings are mapped to rows of length 1 first, as they are or standardized; labels are numbers 0..Y-1, and every class
has at least one image wherever a classifier is fitted.

Nearest neighbors are those of each class: the class wins whose k nearest labelled images are most similar, by the
weight exp(cos / 0.1) of the usual vote. With k = 1 that is the nearest neighbor's class, as ever; but where the vote
says all or nothing, here the runners-up have a score too: for k = 1 held-out log loss is half (digits, MNN).

Shapes: M images, F features, Y classes, n labelled images.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

MODELS = {"logistic": "logistic regression", "knn": "nearest neighbors"}
SPACES = ("standardized", "unit")
STRENGTHS = {"logistic": (1.0, 10.0, 100.0), "knn": (1.0, 3.0, 10.0)}  # C, and k
TEMPERATURE = 0.1  # of neighbors' weights, as in the authors' vote
CELLS = 2**24  # numbers in the largest temporary array while predicting
MAX_ITERATIONS = 1000


@dataclass(frozen=True)
class Setting:
    """One classifier among those to choose from; strength is logistic regression's C or the number of neighbors."""

    model: str
    space: str
    strength: float

    def __str__(self) -> str:
        return f"{'C' if self.model == 'logistic' else 'k'}={self.strength:g}, {self.space} embeddings"


# Best or near it on embeddings of MNN from one label a class on; what is used where labels are too few to choose.
DEFAULTS = {"logistic": Setting("logistic", "standardized", 10.0), "knn": Setting("knn", "standardized", 3.0)}


def settings(model: str) -> list[Setting]:
    """All there is to choose from, for one model or (auto) for both; the default first, so that it wins a tie."""
    models = [m for m in MODELS if model in (m, "auto")]
    every = [Setting(m, space, strength) for m in models for space in SPACES for strength in STRENGTHS[m]]
    return sorted(every, key=lambda setting: setting != DEFAULTS[setting.model])


@dataclass(frozen=True)
class Frame:
    """Mean and spread of each feature over all images, labelled or not: what standardizes them needs no label."""

    mean: np.ndarray
    scale: np.ndarray

    @staticmethod
    def of(vectors: np.ndarray) -> Frame:
        spread = vectors.std(0, dtype=np.float64)
        floor = 0.01 * spread.mean() or 1.0  # a feature that is never active must not be blown up
        return Frame(vectors.mean(0, dtype=np.float64), np.maximum(spread, floor))

    def map(self, vectors: np.ndarray, space: str) -> np.ndarray:
        """(M, F) embeddings as rows of length 1."""
        x = vectors.astype(np.float64)
        x = (x - self.mean) / self.scale if space == "standardized" else x
        return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads of the linear algebra only wait for each other over matrices as small as these.

    50 labels on two cores that others used too: 10 s with one thread, 55 s with two; 1,000 labels: 26 s and 313 s.
    """
    import sklearn.linear_model  # noqa: F401  (brings libraries of its own, which must be there to be told)
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    with threadpool_limits(1):
        yield


Arrays = dict[str, np.ndarray]


def fit(x: np.ndarray, y: np.ndarray, chosen: Sequence[Setting]) -> list[Arrays]:
    """What each of these settings learns from the same mapped embeddings.

    Logistic regressions are fitted one after the other, each starting where the last ended.
    """
    return _fit_logistic(x, y, chosen) if chosen[0].model == "logistic" else [{"bank": x, "labels": y} for _ in chosen]


def _fit_logistic(x: np.ndarray, y: np.ndarray, chosen: Sequence[Setting]) -> list[Arrays]:
    from sklearn.linear_model import LogisticRegression

    model, found = LogisticRegression(max_iter=MAX_ITERATIONS, warm_start=True), []
    for setting in chosen:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of many classes with few labels; of not quite converging
            model.set_params(C=setting.strength).fit(x, y)
        coef, intercept = model.coef_.copy(), model.intercept_.copy()
        if len(coef) == 1:  # of two classes, scikit-learn keeps the second's margin alone
            coef, intercept = np.vstack([-coef / 2, coef / 2]), np.concatenate([-intercept / 2, intercept / 2])
        found.append({"coef": coef, "intercept": intercept})
    return found


def logits(x: np.ndarray, setting: Setting, arrays: Arrays, num_classes: int) -> np.ndarray:
    """(M, Y) scores of mapped embeddings, whose softmax are probabilities before calibration."""
    if setting.model == "logistic":
        return x @ arrays["coef"].T + arrays["intercept"]
    cos, found = x @ arrays["bank"].T, np.zeros((len(x), num_classes))
    for c in range(num_classes):
        own = cos[:, arrays["labels"] == c]  # (M, images of this class)
        k = min(int(setting.strength), own.shape[1])
        nearest = np.partition(own, -k, axis=1)[:, -k:]
        found[:, c] = np.log(np.exp(nearest / TEMPERATURE).mean(1))
    return found


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@dataclass(frozen=True)
class Classifier:
    """A fitted setting with its classes, the space it lives in, and the temperature that calibrates it."""

    classes: tuple[str, ...]
    setting: Setting
    frame: Frame
    arrays: Arrays
    temperature: float = 1.0

    def probabilities(self, vectors: np.ndarray) -> np.ndarray:
        """(M, Y) of (M, F) embeddings, some at a time."""
        width = max(vectors.shape[1], len(self.arrays.get("bank", ())))
        rows = max(1, CELLS // width)
        found = [np.zeros((0, len(self.classes)))]
        for start in range(0, len(vectors), rows):
            x = self.frame.map(vectors[start : start + rows], self.setting.space)
            found.append(softmax(logits(x, self.setting, self.arrays, len(self.classes)) / self.temperature))
        return np.concatenate(found)
