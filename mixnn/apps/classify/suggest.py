"""Which images to label next.

With few labels: typical images, one from each region that has no label yet (after TypiClust, Hacohen et al. 2022,
arXiv 2202.02794). With more: images that the classifier is unsure about. Either way, images are grouped by k-means and
at most one per cluster is taken, so that no two are alike.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from mixnn.apps.embed import Embeddings

TYPICAL_LABELS_PER_CLASS = 5  # below this, typical images teach more than uncertain ones (digits: 3 to 5)
NEIGHBORS = 20  # within a cluster; their mean distance says how typical an image is
MAX_NEIGHBORS_SEARCHED = 2000  # images of a cluster among which they are looked for
MAX_KMEANS = 20_000  # images; with more, k-means uses mini-batches
POOL = 10  # uncertain images considered for each one suggested


def suggest_images(
    embeddings: Embeddings, labels: dict[str, str], count: int, seed: int, probabilities: np.ndarray | None
) -> dict[str, Any]:
    """Names of images to label, the most informative first, and the criterion they were chosen by."""
    x = embeddings.unit()
    labeled = np.array([i for i, name in enumerate(embeddings.names) if name in labels], int)
    if probabilities is None or len(labels) < TYPICAL_LABELS_PER_CLASS * len(set(labels.values())):
        rows, criterion = typical(x, labeled, count, seed), "typical"
    else:
        rows, criterion = uncertain(x, labeled, probabilities, count, seed), "uncertain"
    return {"suggested": [embeddings.names[i] for i in rows], "suggested_by": criterion}


def typical(x: np.ndarray, labeled: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Rows of `count` unlabeled images: the most typical of each cluster without a label, largest cluster first."""
    count = min(count, len(x) - len(labeled))
    cluster = assign_clusters(x, len(labeled) + count, seed)
    size = np.bincount(cluster, minlength=len(labeled) + count)
    size[cluster[labeled]] = 0  # these clusters have a label already
    order = np.argsort(-size, kind="stable")
    picked = [_most_typical(x, np.flatnonzero(cluster == c)) for c in order[:count] if size[c]]
    return _add_farthest(x, labeled, np.array(picked, int), count)


def uncertain(x: np.ndarray, labeled: np.ndarray, probabilities: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Rows of `count` unlabeled images: the one with the smallest margin in each cluster of uncertain images."""
    count = min(count, len(x) - len(labeled))
    second, first = np.sort(probabilities, axis=1)[:, -2:].T
    margin = first - second
    margin[labeled] = np.inf
    pool = np.argsort(margin, kind="stable")[: min(POOL * count, len(x) - len(labeled))]
    cluster = assign_clusters(x[pool], count, seed)
    smallest = np.unique(cluster, return_index=True)[1]  # the pool is sorted by margin
    return _add_farthest(x, labeled, pool[np.sort(smallest)], count)


def assign_clusters(x: np.ndarray, count: int, seed: int) -> np.ndarray:
    """The k-means cluster of each row."""
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning

    if count >= len(x):
        return np.arange(len(x))
    kmeans = KMeans if len(x) <= MAX_KMEANS else MiniBatchKMeans
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # copies of an image give fewer clusters than asked for
        return kmeans(count, n_init=3, random_state=seed).fit_predict(x)


def _most_typical(x: np.ndarray, rows: np.ndarray) -> int:
    """The row whose nearest neighbors within its cluster are closest."""
    others = rows[:: -(-len(rows) // MAX_NEIGHBORS_SEARCHED)]
    similarity = x[rows] @ x[others].T
    k = min(NEIGHBORS + 1, len(others))  # an image is its own nearest neighbor
    distance = np.sqrt(np.maximum(2 - 2 * np.partition(similarity, -k, axis=1)[:, -k:], 0))
    return int(rows[distance.mean(1).argmin()])


def _add_farthest(x: np.ndarray, labeled: np.ndarray, picked: np.ndarray, count: int) -> np.ndarray:
    """Fill up to `count` where clusters were too few: repeatedly the image farthest from all labeled or picked."""
    if len(picked) == count:
        return picked
    taken = np.concatenate([labeled, picked])
    nearest = np.full(len(x), -1.0)  # cosine
    for row in taken:
        nearest = np.maximum(nearest, x @ x[row])
    while len(picked) < count:
        nearest[taken] = np.inf
        row = int(nearest.argmin())
        picked, taken = np.append(picked, row), np.append(taken, row)
        nearest = np.maximum(nearest, x @ x[row])
    return picked
