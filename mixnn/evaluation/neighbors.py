"""Exact nearest neighbors by cosine in bounded memory: one block of similarities at a time, and a running top k.

M rows in the bank, R rows in a block; B queries, F features, K neighbors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

QUERIES = 256  # at most this many at a time
BLOCK = 2**22  # similarities at a time: 16 MB; a larger block leaves the cache of a CPU and is slower


@torch.no_grad()
def nearest(
    queries_BF: Tensor,
    bank_MF: Tensor,
    k: int,
    own_B: Tensor | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[Tensor, Tensor]:
    """Cosines and positions of the k bank rows nearest to each query, nearest first, both (B, K).

    All rows have length 1 and are on one device, as is the result. own_B is each query's own row in the bank, which is
    left out. K is less than k if the bank has too few rows. Equal rows come in any order.
    """
    k = min(k, len(bank_MF) - (own_B is not None))
    at_once = max(1, min(QUERIES, len(queries_BF), BLOCK // max(1, k)))
    block_BR = queries_BF.new_empty(at_once, min(len(bank_MF), max(1, k, BLOCK // at_once)))
    cosines_BK = queries_BF.new_empty(len(queries_BF), k)
    index_BK = torch.empty_like(cosines_BK, dtype=torch.long)
    for start in range(0, len(queries_BF), at_once):
        part = slice(start, start + at_once)
        own = None if own_B is None else own_B[part].to(bank_MF.device)
        cosines_BK[part], index_BK[part] = _top(queries_BF[part], bank_MF, k, own, block_BR)
        advance(min(start + at_once, len(queries_BF)))
    return cosines_BK, index_BK


def _top(queries_BF: Tensor, bank_MF: Tensor, k: int, own_B: Tensor | None, block_BR: Tensor) -> tuple[Tensor, Tensor]:
    """`nearest` for a few queries, with as many bank rows at a time as the block holds.

    The block is reused: allocating it for each part fragmented the heap, which grew to gigabytes.
    """
    best_BK = queries_BF.new_empty(len(queries_BF), 0)
    index_BK = best_BK.long()
    for start in range(0, len(bank_MF), block_BR.shape[1]):
        bank_RF = bank_MF[start : start + block_BR.shape[1]]
        cos_BR = block_BR[: len(queries_BF), : len(bank_RF)]
        if len(queries_BF) == 1:  # faster than a matrix product with one row
            torch.mv(bank_RF, queries_BF[0], out=cos_BR[0])
        else:
            torch.mm(queries_BF, bank_RF.T, out=cos_BR)
        if own_B is not None:
            here = (own_B >= start) & (own_B < start + len(bank_RF))
            cos_BR[here, own_B[here] - start] = -torch.inf
        cos, index = cos_BR.topk(min(k, len(bank_RF)), dim=1)
        best_BK, index_BK = torch.cat([best_BK, cos], dim=1), torch.cat([index_BK, index + start], dim=1)
        best_BK, at = best_BK.topk(min(k, best_BK.shape[1]), dim=1)
        index_BK = index_BK.gather(1, at)
    return best_BK, index_BK
