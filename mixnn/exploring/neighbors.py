"""Exact nearest neighbors by cosine: matrix products of a few rows at a time, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

PIECE = 2**25  # cosines held at a time: 128 MiB


@torch.no_grad()
def nearest(
    queries: np.ndarray,
    bank: np.ndarray,
    k: int,
    device: torch.device,
    *,
    own: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of `bank` most like each query, nearest first: index int64 and cosine float32, both (len(queries), k).

    Both hold unit vectors. own: queries are the bank, and no row is its own neighbor.
    """
    k = min(k, len(bank) - own)
    bank_t = torch.from_numpy(bank).to(device).T
    index, cosine = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
    step = max(1, PIECE // max(1, len(bank)))
    for start in range(0, len(queries), step):
        sim = torch.from_numpy(queries[start : start + step]).to(device) @ bank_t
        if own:
            sim.diagonal(start).fill_(-torch.inf)
        values, at = sim.topk(k, dim=1)
        index[start : start + step], cosine[start : start + step] = at.cpu().numpy(), values.cpu().numpy()
        advance(min(start + step, len(queries)))
    return index, cosine


def purity(index: np.ndarray, labels: np.ndarray) -> float:
    """Percent of all neighbors whose label is that of the image; pairs with an unlabelled image (-1) do not count."""
    pairs = (labels[:, None] >= 0) & (labels[index] >= 0)
    same = pairs & (labels[index] == labels[:, None])
    return 100 * float(same.sum()) / max(1, int(pairs.sum()))
