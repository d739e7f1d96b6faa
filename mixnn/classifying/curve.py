"""How accuracy grows with labels: the whole procedure, choice of settings included, from 1, 2, 5, 10, ... a class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mixnn.classifying.choosing import Task, choose, testable
from mixnn.classifying.models import Setting

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
    return [_point(m, found) for m, found in zip(steps, right, strict=True)]


def _point(m: int, found: list[float]) -> dict[str, Any]:
    mean, (low, high) = np.mean(found), np.percentile(found, SPREAD)
    values = {"accuracy": mean, "low": low, "high": high}
    return {"labels_per_class": m, **{k: round(float(v), 2) for k, v in values.items()}, "draws": len(found)}
