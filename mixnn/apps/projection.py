"""Vectors projected to a few dimensions by PCA or t-SNE; the same input always gives the same output."""

from __future__ import annotations

import numpy as np

COMPONENTS = 50  # principal components that t-SNE works on


def principal(vectors: np.ndarray, count: int) -> np.ndarray:
    """Scores on the first `count` principal components, (N, count), with fixed signs; zeros if there are fewer."""
    mean = vectors.mean(0, dtype=np.float64).astype(np.float32)
    square = sum((part - mean).T @ (part - mean) for part in np.array_split(vectors, -(-len(vectors) // 4096)))
    axes = np.linalg.eigh(np.asarray(square, np.float64))[1][:, ::-1][:, :count].astype(np.float32)
    axes *= np.where(axes[np.abs(axes).argmax(0), np.arange(axes.shape[1])] < 0, -1, 1).astype(np.float32)
    scores = (vectors - mean) @ axes
    return np.pad(scores, ((0, 0), (0, count - scores.shape[1])))


def perplexity(num_images: int) -> float:
    """Perplexity for t-SNE, roughly the number of neighbors that count; smaller for few images."""
    return min(30.0, (num_images - 1) / 3)


def tsne(vectors: np.ndarray, seed: int) -> np.ndarray:
    """t-SNE of vectors (N, F) in two dimensions, (N, 2), initialized with their first two principal components."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    x = principal(vectors, min(COMPONENTS, vectors.shape[1]))
    start = x[:, :2] / max(float(x[:, 0].std()), 1e-12) * 1e-4  # the scale that scikit-learn starts from
    with threadpool_limits(1):  # threads would add forces in a different order each time
        return TSNE(perplexity=perplexity(len(x)), init=start, random_state=seed).fit_transform(x)
