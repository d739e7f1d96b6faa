"""A point on the map for every image, so that similar images lie together; and clusters of the vectors.

`auto` is t-SNE (scikit-learn) of all images up to 4,000. Its time per image grows with their number: 1,797 images take
9 s, 3,000 take 17 s and 5,000 take 37 s on one core (Xeon, scikit-learn 1.9). Of more images, a random 4,000 are laid
out by t-SNE, and each other image is placed at the weighted mean of its nearest neighbors among them, leaving out
neighbors that lie far away on the map.

How many of the 10 true nearest neighbors of such an image are among its 50 nearest on the map:

| data                                              | PCA | mean of 5 nearest | this | t-SNE of all |
| ------------------------------------------------- | --- | ----------------- | ---- | ------------ |
| digits, 400 of 1,797 by t-SNE                     | 57% | 71%               | 76%  | 86%          |
| CIFAR-10, gradient histograms, 2,000 of 20,000    | 4%  | 7%                | 19%  |              |
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
MIN_TSNE = 10  # fewer images have too few neighbors for t-SNE
PLACED_BY = 10  # neighbors that decide where another image is placed, weighted by exp(SHARPNESS * cosine)
SHARPNESS = 20.0
REACH = 6.0  # ignore neighbors farther than this from the nearest one on the map, in median gaps between images
JITTER = 0.25  # random offset in the same unit, so that no two images share a point
MAX_CLUSTERS = 20


class MapLayout(NamedTuple):
    """Where the images lie, and how that was computed, in words."""

    points: np.ndarray  # float32 (N, 2), within -1..1
    name: str


def lay_out(vectors: np.ndarray, how: str, seed: int, device: torch.device) -> MapLayout:
    """The layout `auto`, `tsne` (of all images, however long it takes) or `pca` of unit vectors (N, F)."""
    n = len(vectors)
    if how == "pca" or n < MIN_TSNE:
        return MapLayout(fit_to_frame(principal(vectors, 2)), "the first two principal components")
    if how == "tsne" or n <= MAX_TSNE:
        return MapLayout(fit_to_frame(tsne(vectors, seed)), "t-SNE")
    chosen = np.sort(np.random.default_rng(seed).permutation(n)[:MAX_TSNE])
    name = f"t-SNE of {MAX_TSNE:,} images, every other image next to its nearest neighbors among them"
    points = place_others(vectors, chosen, tsne(vectors[chosen], seed), seed, device)
    return MapLayout(fit_to_frame(points), name)


def place_others(
    vectors: np.ndarray, chosen: np.ndarray, points: np.ndarray, seed: int, device: torch.device
) -> np.ndarray:
    """Points of all images (N, 2), given those of the chosen ones."""
    from sklearn.neighbors import NearestNeighbors

    gap = float(np.median(NearestNeighbors(n_neighbors=1).fit(points).kneighbors()[0]))
    bank = torch.from_numpy(vectors).to(device)
    cosines, index = (t.cpu().numpy() for t in nearest(bank, bank[chosen], PLACED_BY))
    close = np.linalg.norm(points[index] - points[index[:, :1]], axis=2) <= REACH * gap
    weights = close * np.exp(SHARPNESS * (cosines - cosines[:, :1]))
    placed = (weights[:, :, None] * points[index]).sum(1) / weights.sum(1)[:, None]
    placed += JITTER * gap * np.random.default_rng(seed).normal(size=placed.shape)
    placed[chosen] = points
    return placed


def fit_to_frame(points: np.ndarray) -> np.ndarray:
    """Points centered and scaled to -1..1, both axes by the same factor."""
    low, high = points.min(0), points.max(0)
    half = max(float((high - low).max()) / 2, 1e-12)
    return np.ascontiguousarray((points - (low + high) / 2) / half, np.float32)


def cluster(vectors: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Cluster number of each image by k-means of unit vectors; cluster 0 is the largest."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    x = principal(vectors, min(COMPONENTS, vectors.shape[1]))
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # collapsed vectors have fewer clusters than requested
        found = KMeans(count, n_init=1, random_state=seed).fit_predict(x)
    _, found, sizes = np.unique(found, return_inverse=True, return_counts=True)
    return np.argsort(np.argsort(-sizes, kind="stable"), kind="stable")[found]


def num_clusters(num_images: int, num_classes: int) -> int:
    """The number of classes if there are labels, else a number that a person can look through."""
    return min(max(2, num_classes or round((num_images / 20) ** 0.5)), MAX_CLUSTERS, num_images)


def morton_order(points: np.ndarray) -> np.ndarray:
    """Positions of the points along a Z-order curve: points close on the map are close in this order.

    Thumbnails are stored in this order, so that a part of the map needs few sheets.
    """
    cell = np.clip((points + 1) * 512, 0, 1023).astype(np.uint32)
    code = np.zeros(len(points), np.uint32)
    for bit in range(10):
        for axis in range(2):
            code |= ((cell[:, axis] >> bit) & 1) << np.uint32(2 * bit + axis)
    return np.argsort(code, kind="stable")
