"""Two coordinates for every image, so that alike images lie together; and clusters of the vectors.

`auto` is t-SNE by scikit-learn up to 4,000 images. It takes 9 s for 1,797, 17 s for 3,000 and 37 s for 5,000 on one
core (Xeon, scikit-learn 1.9): ever longer for each image. Above 4,000, as many are drawn at random and laid out, and
each other image goes to the mean of those of its nearest that lie together. How many of an image's true 10
nearest are among the 50 nearest on the map, for such images: digits, 400 of 1,797 laid out: PCA 57%, plain mean of
the 5 nearest 71%, this 76%, t-SNE of all 86%; gradient histograms of CIFAR-10, 2,000 of 20,000: 4%, 7%, 19%.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import torch

from mixnn.apps.projection import COMPONENTS, principal, tsne
from mixnn.evaluation.neighbors import nearest

LAYOUTS = ("auto", "tsne", "pca")
MAX_TSNE = 4000  # images that `auto` gives to t-SNE
MIN_TSNE = 10  # below, t-SNE has too few neighbors to work with
PLACED_BY = 10  # laid-out neighbors that place another image, weighted by exp(SHARPNESS x cosine)
SHARPNESS = 20.0
REACH = 6.0  # those farther from the nearest one, on the map, do not count; in median gaps between laid-out images
JITTER = 0.25  # in the same unit: no two images lie on one spot
MAX_CLUSTERS = 20


class Layout(NamedTuple):
    """Where the images lie, and in words how they came there."""

    points: np.ndarray  # float32 (N, 2), within -1..1
    words: str


def lay_out(vectors: np.ndarray, how: str, seed: int, device: torch.device) -> Layout:
    """`auto`, `tsne` (of all images, however long it takes) or `pca`, of unit vectors (N, F)."""
    n = len(vectors)
    if how == "pca" or n < MIN_TSNE:
        return Layout(framed(principal(vectors, 2)), "the first two principal components")
    if how == "tsne" or n <= MAX_TSNE:
        return Layout(framed(tsne(vectors, seed)), "t-SNE")
    chosen = np.sort(np.random.default_rng(seed).permutation(n)[:MAX_TSNE])
    words = f"t-SNE of {MAX_TSNE:,} images, and every other image beside those of them that it is most like"
    return Layout(framed(placed(vectors, chosen, tsne(vectors[chosen], seed), seed, device)), words)


def placed(vectors: np.ndarray, chosen: np.ndarray, points: np.ndarray, seed: int, device: torch.device) -> np.ndarray:
    """Points of all images, of which the chosen ones have theirs."""
    from sklearn.neighbors import NearestNeighbors

    gap = float(np.median(NearestNeighbors(n_neighbors=1).fit(points).kneighbors()[0]))
    everyone = torch.from_numpy(vectors).to(device)
    cosine, index = (t.cpu().numpy() for t in nearest(everyone, everyone[chosen], PLACED_BY))
    beside = np.linalg.norm(points[index] - points[index[:, :1]], axis=2) <= REACH * gap
    weight = beside * np.exp(SHARPNESS * (cosine - cosine[:, :1]))
    everywhere = (weight[:, :, None] * points[index]).sum(1) / weight.sum(1)[:, None]
    everywhere += JITTER * gap * np.random.default_rng(seed).normal(size=everywhere.shape)
    everywhere[chosen] = points
    return everywhere


def framed(points: np.ndarray) -> np.ndarray:
    """Centred and scaled to -1..1, both axes alike; y grows downwards, as on a screen."""
    low, high = points.min(0), points.max(0)
    half = max(float((high - low).max()) / 2, 1e-12)
    return np.ascontiguousarray((points - (low + high) / 2) / half, np.float32)


def cluster(vectors: np.ndarray, count: int, seed: int) -> np.ndarray:
    """k-means of unit vectors: the number of each image's cluster, the largest cluster first."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    x = principal(vectors, min(COMPONENTS, vectors.shape[1]))
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # collapsed vectors have fewer clusters than asked for
        found = KMeans(count, n_init=1, random_state=seed).fit_predict(x)
    _, found, sizes = np.unique(found, return_inverse=True, return_counts=True)
    return np.argsort(np.argsort(-sizes, kind="stable"), kind="stable")[found]


def num_clusters(num_images: int, num_classes: int) -> int:
    """As many as classes where there are labels, else a number that a person can look through."""
    return min(max(2, num_classes or round((num_images / 20) ** 0.5)), MAX_CLUSTERS, num_images)
