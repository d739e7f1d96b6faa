"""Intervals for differences between runs: Student's t, paired by seed or with a pooled deviation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

CONFIDENCE = 0.95


class PooledStd(NamedTuple):
    """A standard deviation between runs that differ only in their seed, and its degrees of freedom."""

    std: float
    df: int


class Interval(NamedTuple):
    """A difference with its confidence interval."""

    mean: float
    low: float
    high: float


def pooled(groups: Iterable[Sequence[float]]) -> PooledStd | None:
    """The deviation within groups of runs, taken to be the same in all; None without a group of two runs."""
    several = [group for group in groups if len(group) > 1]
    df = sum(len(group) - 1 for group in several)
    if not df:
        return None
    squares = sum((len(group) - 1) * statistics.variance(group) for group in several)
    return PooledStd(math.sqrt(squares / df), df)


def paired_interval(differences: Sequence[float]) -> Interval:
    """Interval of a mean of differences, each between two runs with the same seed."""
    spread = PooledStd(statistics.stdev(differences), len(differences) - 1)
    return interval(statistics.fmean(differences), 1 / len(differences), spread)


def interval(mean: float, inverse_counts: float, spread: PooledStd) -> Interval:
    """Interval of a difference of means; `inverse_counts` is the sum of 1/n over the means."""
    half = half_width(spread, inverse_counts)
    return Interval(mean, mean - half, mean + half)


def half_width(spread: PooledStd, inverse_counts: float) -> float:
    """Half of the interval of a difference of means, by Student's t; `inverse_counts` is the sum of 1/n over them."""
    from scipy.special import stdtrit  # here, because it takes a tenth of a second

    return float(stdtrit(spread.df, 0.5 + CONFIDENCE / 2)) * spread.std * math.sqrt(inverse_counts)
