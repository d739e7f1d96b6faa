"""Nearest neighbors, near-duplicates and outliers among vectors, by cosine. Never all pairs in memory at once.

M images in the bank, F features, B queries, K neighbors. Vectors are float32 rows of length 1, made by `center_rows`:
an encoder's own vectors point in similar directions, so any two images have a high cosine. Less the mean of the bank,
the cosine of two random images is about 0, and like and unlike images are further apart (notes/log.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from mixnn.config import UserError, setting
from mixnn.evaluation import neighbors

METHODS = ("exact", "faiss")  # matrix products are faster than faiss's flat search at every size (notes/log.md)
ROWS = 2**14  # vectors normalized at a time
EXTRA = 10  # candidates beyond the k requested: float32 cannot rank nearly equal cosines, so float64 decides
RANKED = 2**21  # float64 numbers at a time: 16 MB
BLOCK = 2048  # side of a block of similarities: 16 MB, and some 200 MB of pairs if all its images are alike
NEIGHBORS = 10  # neighbors that describe how isolated an image is
SAMPLE = 2000  # images, evenly spaced, that represent a large set
MIN_TIMES_NEARER, MAX_TIMES_NEARER = 5, 100  # near-duplicates are this many times nearer than the usual neighbor
MIN_CENTERED = 20  # images; the mean of fewer depends too much on each: less their mean, two images are opposites
MIN_VARIANCE = 1e-3  # of unit vectors; below this, all images are copies, or the encoder has collapsed
TOLERANCE = 1e-6  # rounding error of a float32 cosine

Hits = list[tuple[int, float]]  # positions and cosines, nearest first


def bank_mean(bank_MF: np.ndarray) -> np.ndarray:
    """Mean of unit rows, to be subtracted from bank and queries; 0 if there are too few rows or they are all alike."""
    mean_F = bank_MF.mean(axis=0, dtype=np.float64)
    if len(bank_MF) < MIN_CENTERED or 1 - mean_F @ mean_F < MIN_VARIANCE:
        mean_F[:] = 0
    return mean_F.astype(np.float32)


def center_rows(vectors_MF: np.ndarray, mean_F: np.ndarray) -> np.ndarray:
    """Subtract the bank's mean from unit rows, in place, and scale them to length 1 again."""
    vectors_MF -= mean_F
    return normalize_rows(vectors_MF)


def normalize_rows(vectors_MF: np.ndarray) -> np.ndarray:
    """Scale every row to length 1, in place: a second copy of a million rows would take 2 GB."""
    for start in range(0, len(vectors_MF), ROWS):
        rows = vectors_MF[start : start + ROWS]
        length = np.linalg.norm(rows, axis=1, keepdims=True)
        if not np.isfinite(length).all():
            raise UserError("the encoder's vectors contain NaN or inf: the run has diverged, train it again")
        rows /= np.maximum(length, 1e-12)
    return vectors_MF


def nearest(
    queries_BF: np.ndarray, bank_MF: np.ndarray, k: int, exclude: Sequence[Collection[int]], method: str = "exact"
) -> list[Hits]:
    """The k images of largest cosine for each query, without its `exclude`; equal ones in the order of the bank."""
    num_candidates = min(len(bank_MF), k + max(map(len, exclude), default=0) + EXTRA)
    if method == "faiss":
        import faiss

        index_BK = faiss.knn(queries_BF, bank_MF, num_candidates, faiss.METRIC_INNER_PRODUCT)[1]
    else:
        queries, bank = torch.from_numpy(queries_BF), torch.from_numpy(bank_MF)
        index_BK = neighbors.nearest(queries, bank, num_candidates)[1].numpy()
    ranked = _rank(queries_BF, bank_MF, index_BK)
    return [[hit for hit in hits if hit[0] not in left_out][:k] for hits, left_out in zip(ranked, exclude, strict=True)]


def _rank(queries_BF: np.ndarray, bank_MF: np.ndarray, index_BK: np.ndarray) -> Iterator[Hits]:
    """Candidates by their cosine in float64, summed in one order so that equal rows tie; ties by position."""
    step = max(1, RANKED // (index_BK.shape[1] * bank_MF.shape[1]))
    for start in range(0, len(queries_BF), step):
        index = np.sort(index_BK[start : start + step], axis=1)
        query = queries_BF[start : start + step, None].astype(np.float64)
        cos = (bank_MF[index] * query).sum(axis=2)
        for order, i, c in zip(np.argsort(-cos, axis=1, kind="stable"), index, cos, strict=True):
            yield list(zip(i[order].tolist(), np.minimum(c[order], 1.0).tolist(), strict=True))


def check_faiss() -> None:
    try:
        import faiss  # noqa: F401
    except ImportError:
        raise UserError(
            f"faiss is not installed: run pip install faiss-cpu, or use {setting('method', 'exact')}"
        ) from None


def near_duplicates(
    bank_MF: np.ndarray,
    threshold: float,
    advance: Callable[[int], None] = lambda _: None,
    also_linked: Callable[[slice, slice], tuple[np.ndarray, np.ndarray]] | None = None,
) -> list[Hits]:
    """Groups of images linked by cosines of at least the threshold, most similar groups first.

    `also_linked` gives more pairs to link, positions a[i] < b[i], in a block of all pairs. Each group
    lists positions, with cosines to its first image. A member may be below the threshold to the first one if it is
    linked to that by others, or by `also_linked`.
    """
    group_M = np.arange(len(bank_MF))
    for done, (rows, columns) in enumerate(_blocks(len(bank_MF)), 1):
        if len(np.unique(np.concatenate([group_M[rows], group_M[columns]]))) > 1:  # else there is nothing to link
            group_M = _merge(group_M, *similar_pairs(bank_MF, rows, columns, threshold - TOLERANCE))
            group_M = _merge(group_M, *also_linked(rows, columns)) if also_linked else group_M
        advance(done)
    found = []
    order = np.argsort(group_M, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(group_M[order])) + 1):
        if len(members) > 1:
            cos = np.minimum(bank_MF[members] @ bank_MF[members[0]], 1.0)
            cos[0] = 1.0
            ranked = (0, *(np.argsort(-cos[1:], kind="stable") + 1))
            found.append([(int(members[i]), float(cos[i])) for i in ranked])
    return sorted(found, key=lambda group: (-round(group[1][1], 5), group[0][0]))


def num_blocks(num_images: int) -> int:
    sides = -(-num_images // BLOCK)
    return sides * (sides + 1) // 2


def _blocks(num_images: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the blocks in the upper triangle."""
    parts = [slice(start, start + BLOCK) for start in range(0, num_images, BLOCK)]
    return ((rows, columns) for i, rows in enumerate(parts) for columns in parts[i:])


def similar_pairs(bank_MF: np.ndarray, rows: slice, columns: slice, lowest: float) -> tuple[np.ndarray, np.ndarray]:
    """Positions a < b of the pairs in a block whose cosine is `lowest` or more."""
    similar = torch.from_numpy(bank_MF[rows]) @ torch.from_numpy(bank_MF[columns]).T >= lowest
    a, b = (similar.triu(1) if rows == columns else similar).nonzero(as_tuple=True)
    return a.numpy() + rows.start, b.numpy() + columns.start


def _merge(group_M: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Group numbers after linking the images a[i] and b[i]."""
    a, b = group_M[a], group_M[b]
    apart = a != b
    if not apart.any():
        return group_M
    links = coo_array((np.ones(apart.sum(), bool), (a[apart], b[apart])), shape=(len(group_M), len(group_M)))
    return connected_components(links, directed=False)[1][group_M]


def lowest_similarity(bank_MF: np.ndarray, group: Sequence[int]) -> float:
    """The lowest cosine between two images of a group; a very large group is sampled."""
    some = bank_MF[list(group[:: -(-len(group) // SAMPLE)])]
    return float((some @ some.T).min())


def default_threshold(bank_MF: np.ndarray) -> tuple[float, str]:
    """Choose a similarity that different images rarely reach; return it with its reason in words.

    Duplicates must be `times` nearer than an image usually is to its tenth neighbor (the median of 1 - cosine over a
    sample). The tenth is used so that an image with a few copies counts like any other.

    `times` is chosen so that about one pair of different images reaches the threshold by chance. It assumes that the
    distance to neighbor k grows like a power of k, which follows from the tenth and the twentieth neighbor. For
    photographs `times` would be 2 to 3, and MIN_TIMES_NEARER is on the safe side; for handwritten digits it is 20.
    """
    bank, k = torch.from_numpy(bank_MF), min(NEIGHBORS, len(bank_MF) - 1)
    sample, last = torch.arange(0, len(bank), -(-len(bank) // SAMPLE)), min(2 * k, len(bank_MF) - 1)
    cosines = neighbors.nearest(bank[sample], bank, last, sample)[0].median(dim=0).values.clamp(max=1.0)
    near, far = (1 - float(cosines[i - 1]) for i in (k, last))
    times = (k * len(bank) / 2) ** math.log2(far / near) if last == 2 * k and near > TOLERANCE else 0.0
    times = float(np.clip(times, MIN_TIMES_NEARER, MAX_TIMES_NEARER))
    usual = f"an image usually is to its neighbor number {k} ({1 - near:.4f})"
    return round(1 - near / times, 5), f"so a pair must be {times:.0f} times closer than {usual}"


def mean_similarity(bank_MF: np.ndarray, k: int, advance: Callable[[int], None] = lambda _: None) -> np.ndarray:
    """Mean cosine of every image to its k nearest others, (M,): low for outliers."""
    bank = torch.from_numpy(bank_MF)
    return neighbors.nearest(bank, bank, k, torch.arange(len(bank)), advance)[0].mean(dim=1).numpy()
