"""Intervals for differences between runs: Student's t, paired by seed or with a pooled deviation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

CONFIDENCE = 0.95


class Spread(NamedTuple):
    """A standard deviation between runs that differ only in their seed, and its degrees of freedom."""

    std: float
    df: int


class Interval(NamedTuple):
    """A difference with its confidence interval."""

    mean: float
    low: float
    high: float


def pooled(groups: Iterable[Sequence[float]]) -> Spread | None:
    """The deviation within groups of runs, taken to be the same in all; None without a group of two runs."""
    several = [group for group in groups if len(group) > 1]
    df = sum(len(group) - 1 for group in several)
    if not df:
        return None
    squares = sum((len(group) - 1) * statistics.variance(group) for group in several)
    return Spread(math.sqrt(squares / df), df)


def paired_interval(differences: Sequence[float]) -> Interval:
    """Interval of a mean of differences, each between two runs with the same seed."""
    spread = Spread(statistics.stdev(differences), len(differences) - 1)
    return interval(statistics.fmean(differences), 1 / len(differences), spread)


def interval(mean: float, inverse_counts: float, spread: Spread) -> Interval:
    """Interval of a difference of means; `inverse_counts` is the sum of 1/n over the means."""
    half = t_quantile(0.5 + CONFIDENCE / 2, spread.df) * spread.std * math.sqrt(inverse_counts)
    return Interval(mean, mean - half, mean + half)


def t_quantile(p: float, df: float) -> float:
    """The p-quantile of Student's t distribution, for p of at least 0.5."""
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return high


def t_cdf(t: float, df: float) -> float:
    """Student's t distribution function at t of at least 0: 1 - I(df/2, 1/2, df / (df + t^2)) / 2."""
    return 1 - _incomplete_beta(df / 2, 0.5, df / (df + t * t)) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function, by its continued fraction (Lentz's method)."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    total = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        change = 1.0
        for term in (even, odd):
            d = 1 / ((1 + term * d) or tiny)
            c = (1 + term / c) or tiny
            change = c * d
            total *= change
        if abs(change - 1) < 1e-15:
            break
    return front * total / a
