"""How accuracy grows with labels: the whole procedure, choice of settings included, from 1, 2, 5, 10, ... a class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from mixnn.apps.classify.choosing import Task, choose, testable
from mixnn.apps.classify.models import Setting

STEPS = (1, 2, 5, 10, 20, 50, 100)  # labels a class; beyond, see the cross-validated accuracy
DRAWS = 20  # of up to 10 labels a class; a quarter of that of more, which vary less and cost more
TESTED = 0.25  # share of each class's labels that a draw holds out
SPREAD = (5, 95)  # percentiles over draws


def curve(
    task: Task,
    options: Sequence[Setting],
    seed: int,
    draws: int = DRAWS,
    advance: Callable[[int], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Mean accuracy in percent over draws, and where nine of ten draws lie; empty if labels cannot be held out.

    From the second point on, also the gain over the one before and its 95% interval.

    A draw holds out a quarter of each class, at least one label, and takes the first m of the others in random order
    for each m in turn, so its points differ in the labels added alone. A class with fewer than m gives what it has;
    points end where most classes have fewer.
    """
    if not testable(task.y):
        return []
    counts = np.bincount(task.y)
    pool = counts - np.where(counts > 1, np.maximum(1, np.round(TESTED * counts)), 0).astype(int)
    steps = [m for m in STEPS if m <= np.median(pool)] or [1]
    right: list[list[float]] = [[] for _ in steps]
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw])
        rows = [rng.permutation(np.flatnonzero(task.y == c)) for c in range(len(counts))]
        test = task.at(np.concatenate([r[p:] for r, p in zip(rows, pool, strict=True)]))
        for i, m in enumerate(steps):
            if m > 10 and draw >= max(5, draws // 4):
                break
            train = task.at(np.concatenate([r[: min(m, p)] for r, p in zip(rows, pool, strict=True)]))
            guess = train.train(choose(train, options, rng)[0].setting).probabilities(test.vectors).argmax(1)
            right[i].append(100 * float((guess == test.y).mean()))
        advance(draw + 1)
    return [_point(m, found, before) for m, found, before in zip(steps, right, [[], *right], strict=False)]


def _point(m: int, found: list[float], before: list[float]) -> dict[str, Any]:
    values = {"accuracy": np.mean(found)} | dict(zip(("low", "high"), np.percentile(found, SPREAD), strict=True))
    gains = [b - a for a, b in zip(before, found, strict=False)]  # draw by draw
    if len(gains) > 1:
        mean, reach = np.mean(gains), _reach(gains)
        values |= {"gain": mean, "gain_low": mean - reach, "gain_high": mean + reach}
    return {"labels_per_class": m, **{k: round(float(v), 6) for k, v in values.items()}, "draws": len(found)}


def _reach(gains: list[float]) -> float:
    """Half the 95% interval of their mean, corrected for draws that share labels (Nadeau and Bengio, 2003)."""
    count = len(gains)
    error = np.std(gains, ddof=1) * (1 / count + TESTED / (1 - TESTED)) ** 0.5
    return float(student_t.ppf(0.975, count - 1) * error)
