"""Nearest vectors by cosine, exactly, in bounded memory: a block of similarities at a time and a running top k.

M images, F features, B queries, K neighbors. Vectors are float32 rows of length 1, made so by `to_unit`.

Measured on two cores (`python -m mixnn.searching.speed`), faiss's flat search is slower than these matrix products at
every size, so it is there for those who ask for it and never chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from mixnn.config import UserError

QUERIES = 1024  # at a time, at most
BLOCK = 2**22  # similarities at a time: 16 MB
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
    bank_MF: np.ndarray, queries_BF: np.ndarray, topk: int, own: Sequence[Collection[int]], method: str = "exact"
) -> list[Hits]:
    """The topk rows of largest cosine for each query, without its `own`; of equal ones, the first in the bank."""
    count = min(len(bank_MF), topk + max(map(len, own), default=0) + SLACK)
    found: list[Hits] = []
    for index_BK in ENGINES[method](torch.from_numpy(bank_MF), torch.from_numpy(queries_BF), count):
        query_BF = queries_BF[len(found) : len(found) + len(index_BK)]
        for hits in _ranked(bank_MF, query_BF, index_BK.numpy()):
            mine = own[len(found)]
            found.append([hit for hit in hits if hit[0] not in mine][:topk])
    return found


def _ranked(bank_MF: np.ndarray, queries_BF: np.ndarray, index_BK: np.ndarray) -> Iterator[Hits]:
    """Cosines in float64, summed alike for every row so that equal rows tie; ties in the order of the bank."""
    step = max(1, RANKED // (index_BK.shape[1] * bank_MF.shape[1]))
    for start in range(0, len(queries_BF), step):
        index = np.sort(index_BK[start : start + step], axis=1)
        query = queries_BF[start : start + step, None].astype(np.float64)
        cos = (bank_MF[index] * query).sum(axis=2)
        for at, i, c in zip(np.argsort(-cos, axis=1, kind="stable"), index, cos, strict=True):
            yield list(zip(i[at].tolist(), np.minimum(c[at], 1.0).tolist(), strict=True))


def top(bank_MF: Tensor, queries_BF: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cosines and positions of the k nearest, (B, K), by matrix products in float32."""
    value_BK, index_BK = torch.empty(len(queries_BF), 0), torch.empty(len(queries_BF), 0, dtype=torch.long)
    rows = max(k, BLOCK // len(queries_BF))
    for start in range(0, len(bank_MF), rows):
        block_RF = bank_MF[start : start + rows]
        sim_BR = (block_RF @ queries_BF[0])[None] if len(queries_BF) == 1 else queries_BF @ block_RF.T
        value, index = sim_BR.topk(min(k, len(block_RF)), dim=1)
        value_BK, index_BK = torch.cat([value_BK, value], dim=1), torch.cat([index_BK, index + start], dim=1)
        value_BK, at = value_BK.topk(min(k, value_BK.shape[1]), dim=1)
        index_BK = index_BK.gather(1, at)
    return value_BK, index_BK


def _batches(queries_BF: Tensor, k: int) -> Iterable[Tensor]:
    """As many queries at a time as leave room for their results."""
    return queries_BF.split(max(1, min(QUERIES, BLOCK // k)))


def exact(bank_MF: Tensor, queries_BF: Tensor, k: int) -> Iterator[Tensor]:
    for queries in _batches(queries_BF, k):
        yield top(bank_MF, queries, k)[1]


def with_faiss(bank_MF: Tensor, queries_BF: Tensor, k: int) -> Iterator[Tensor]:
    """faiss's flat search (IndexFlatIP) without the index's copy of the vectors."""
    import faiss

    for queries in _batches(queries_BF, k):
        yield torch.from_numpy(faiss.knn(queries.numpy(), bank_MF.numpy(), k, faiss.METRIC_INNER_PRODUCT)[1])


def check_faiss() -> None:
    try:
        import faiss  # noqa: F401
    except ImportError:
        raise UserError("faiss is not installed: type pip install faiss-cpu, or --method exact") from None


ENGINES: dict[str, Callable[[Tensor, Tensor, int], Iterator[Tensor]]] = {"exact": exact, "faiss": with_faiss}
