"""Which images to label next. With few labels: typical ones, one from each region that has none yet (after TypiClust,
Hacohen et al. 2022, arXiv 2202.02794). With more: those the classifier hesitates over, again spread out.

Both cluster the images by k-means on mapped embeddings and take one image a cluster, so that no two tell the same.
"""

from __future__ import annotations

import warnings

import numpy as np

NEIGHBORS = 20  # within a cluster, whose mean distance says how typical an image is
FEW = 5  # labels a class, up to which typical images teach more than uncertain ones (digits: 3 to 5)
PLENTY = 20_000  # images from which on k-means looks at some at a time
POOL = 10  # uncertain images considered for each one suggested


def typical(x: np.ndarray, labelled: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Rows of `count` unlabelled images: the most typical of each cluster without a label, largest cluster first."""
    count = min(count, len(x) - len(labelled))
    cluster = clusters(x, len(labelled) + count, seed)
    size = np.bincount(cluster, minlength=len(labelled) + count)
    size[cluster[labelled]] = 0  # a label of theirs tells about their neighbors
    order = np.argsort(-size, kind="stable")
    picked = [_most_typical(x, np.flatnonzero(cluster == c)) for c in order[:count] if size[c]]
    return fill(x, labelled, np.array(picked, int), count)


def uncertain(x: np.ndarray, labelled: np.ndarray, probabilities: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Rows of `count` unlabelled images: of each cluster of doubtful ones, that with the smallest margin."""
    count = min(count, len(x) - len(labelled))
    two = np.sort(probabilities, axis=1)[:, -2:]
    margin = two[:, 1] - two[:, 0]
    margin[labelled] = np.inf
    pool = np.argsort(margin, kind="stable")[: min(POOL * count, len(x) - len(labelled))]
    cluster = clusters(x[pool], count, seed)
    first = np.unique(cluster, return_index=True)[1]  # the pool is in order of margin
    return fill(x, labelled, pool[np.sort(first)], count)


def clusters(x: np.ndarray, count: int, seed: int) -> np.ndarray:
    """The k-means cluster of each row."""
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning

    if count >= len(x):
        return np.arange(len(x))
    kind = KMeans if len(x) <= PLENTY else MiniBatchKMeans
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # copies of an image: fewer clusters, which `fill` mends
        return kind(count, n_init=3, random_state=seed).fit_predict(x)


def _most_typical(x: np.ndarray, rows: np.ndarray) -> int:
    """The row with the nearest neighbors within its cluster; of a large cluster, every so many are neighbors."""
    among = rows[:: -(-len(rows) // 2000)]
    similarity = x[rows] @ x[among].T
    k = min(NEIGHBORS + 1, len(among))  # itself too
    distance = np.sqrt(np.maximum(2 - 2 * np.partition(similarity, -k, axis=1)[:, -k:], 0))
    return int(rows[distance.mean(1).argmin()])


def fill(x: np.ndarray, labelled: np.ndarray, picked: np.ndarray, count: int) -> np.ndarray:
    """Where clusters were too few, as among copies: the image farthest from all labelled or picked, one by one."""
    if len(picked) == count:
        return picked
    taken = np.concatenate([labelled, picked])
    nearest = np.full(len(x), -1.0)  # cosine
    for row in taken:
        nearest = np.maximum(nearest, x @ x[row])
    while len(picked) < count:
        nearest[taken] = np.inf
        row = int(nearest.argmin())
        picked, taken = np.append(picked, row), np.append(taken, row)
        nearest = np.maximum(nearest, x @ x[row])
    return picked
