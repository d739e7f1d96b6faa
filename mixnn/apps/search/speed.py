"""How long a query takes, on vectors drawn at random: python -m mixnn.apps.search.speed 10000 100000 1000000"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np
import torch

from mixnn.apps.search.index import METHODS, ROWS, check_faiss, nearest, to_unit
from mixnn.config import UserError
from mixnn.progress import print_table

WIDTH = 512  # ResNet-18's features
REPEATS = 5


def vectors(count: int) -> np.ndarray:
    """Unit rows; memory holds them once."""
    rng, made = np.random.default_rng(0), np.empty((count, WIDTH), np.float32)
    for start in range(0, count, ROWS):
        rng.standard_normal(out=made[start : start + ROWS], dtype=np.float32)
    return to_unit(made)


def seconds(bank: np.ndarray, num_queries: int, method: str) -> list[float]:
    taken, rng = [], np.random.default_rng(1)
    for _ in range(REPEATS):
        own = [[int(i)] for i in rng.integers(0, len(bank), num_queries)]
        start = time.perf_counter()
        nearest(bank[[i for (i,) in own]], bank, 10, own, method)
        taken.append(time.perf_counter() - start)
    return sorted(taken)


def measure(sizes: list[int]) -> None:
    methods = list(METHODS)
    try:
        check_faiss()
    except UserError:
        methods.remove("faiss")
    rows = []
    for size in sizes:
        bank = vectors(size)
        for num_queries in (1, 100):
            for method in methods:
                taken = seconds(bank, num_queries, method)
                rows.append(
                    (
                        f"{size:,}",
                        str(num_queries),
                        method,
                        *(f"{1000 * t / num_queries:.1f}" for t in (taken[REPEATS // 2], taken[-1])),
                    )
                )
        del bank
    print_table(("vectors", "queries at once", "method", "median ms a query", "slowest"), rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{WIDTH} numbers a vector, {torch.get_num_threads()} threads, at most {peak:.1f} GB of memory")


if __name__ == "__main__":
    measure([int(word) for word in sys.argv[1:]] or [10_000, 100_000])
