"""Images of an index by the cosine of their vectors: the nearest found in float32, and ranked anew in float64.

M images, F features, B queries, K neighbors. Vectors are float32 rows of length 1, made so by `to_unit`.

Measured on two cores (`python -m mixnn.apps.search.speed`), faiss's flat search is slower than matrix products at every
size, so it is there for those who ask for it and never chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch

from mixnn.config import UserError, setting
from mixnn.evaluation import neighbors

METHODS = ("exact", "faiss")
ROWS = 2**14  # vectors made unit at a time
SLACK = 10  # more than asked for are ranked anew in float64, where float32 cannot tell which of two is nearer
RANKED = 2**21  # float64 numbers at a time: 16 MB

Hits = list[tuple[int, float]]  # positions and cosines, nearest first


def to_unit(vectors_MF: np.ndarray) -> np.ndarray:
    """Every row divided by its length, in place: a second copy of a million rows would take 2 GB."""
    for start in range(0, len(vectors_MF), ROWS):
        rows = vectors_MF[start : start + ROWS]
        length = np.linalg.norm(rows, axis=1, keepdims=True)
        if not np.isfinite(length).all():
            raise UserError("the encoder's vectors are not finite, so nothing can be compared: the run has diverged")
        rows /= np.maximum(length, 1e-12)
    return vectors_MF


def nearest(
    queries_BF: np.ndarray, bank_MF: np.ndarray, topk: int, own: Sequence[Collection[int]], method: str = "exact"
) -> list[Hits]:
    """The topk rows of largest cosine for each query, without its `own`; of equal ones, the first in the bank."""
    count = min(len(bank_MF), topk + max(map(len, own), default=0) + SLACK)
    find = _with_faiss if method == "faiss" else _exactly
    ranked = _ranked(queries_BF, bank_MF, find(queries_BF, bank_MF, count))
    return [[hit for hit in hits if hit[0] not in mine][:topk] for hits, mine in zip(ranked, own, strict=True)]


def _exactly(queries_BF: np.ndarray, bank_MF: np.ndarray, k: int) -> np.ndarray:
    return neighbors.nearest(torch.from_numpy(queries_BF), torch.from_numpy(bank_MF), k)[1].numpy()


def _with_faiss(queries_BF: np.ndarray, bank_MF: np.ndarray, k: int) -> np.ndarray:
    """faiss's flat search (IndexFlatIP) without the index's copy of the vectors."""
    import faiss

    return faiss.knn(queries_BF, bank_MF, k, faiss.METRIC_INNER_PRODUCT)[1]


def _ranked(queries_BF: np.ndarray, bank_MF: np.ndarray, index_BK: np.ndarray) -> Iterator[Hits]:
    """Cosines in float64, summed alike for every row so that equal rows tie; ties in the order of the bank."""
    step = max(1, RANKED // (index_BK.shape[1] * bank_MF.shape[1]))
    for start in range(0, len(queries_BF), step):
        index = np.sort(index_BK[start : start + step], axis=1)
        query = queries_BF[start : start + step, None].astype(np.float64)
        cos = (bank_MF[index] * query).sum(axis=2)
        for at, i, c in zip(np.argsort(-cos, axis=1, kind="stable"), index, cos, strict=True):
            yield list(zip(i[at].tolist(), np.minimum(c[at], 1.0).tolist(), strict=True))


def check_faiss() -> None:
    try:
        import faiss  # noqa: F401
    except ImportError:
        raise UserError(
            f"faiss is not installed: run pip install faiss-cpu, or use {setting('method', 'exact')}"
        ) from None
