"""What a step shows besides its loss: how good its neighbors are, and whether its embeddings collapse.

Pure functions of a step's directions, so that they are compiled and captured with it. `NAMES` says what each number
means. All are means over a batch and over both directions; an epoch's line in metrics.jsonl has their mean over steps.
`shrinkage` follows the spread over epochs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mixnn import functional as F
from mixnn.methods.contract import DirectionRecord

NAMES = {
    "d_positive": "how far predictions are from their targets: 0 perfect, 2 unrelated; d(p, z), squared distance",
    "d_neighbors": "how far predictions are from the neighbors, likewise: mean of d(p, z_i), before mixing",
    "spread": "how different embeddings are: 1 as much as can be, 0 collapsed; deviation of unit z x sqrt(D)",
    "rank": "in how many directions z varies, 1 is collapsed: (sum of variances)^2 / sum of squared covariances",
    "purity": "share of neighbors with the anchor's label; images without one do not count",
    "purity_k": "share of anchors with the label of neighbor number k, by nearness to z",
    "purity_cas_k": "share of anchors with the label of neighbor number k, by attention (CAS)",
    "inconsistency": "research: share of ranks at which nearness to z and attention (CAS) name different neighbors; "
    "for random orders of K, 1 - 1/K",
    "cas_entropy": "research: entropy of the attention (CAS) over K neighbors, nats; at most ln K",
    "cas_entropy_0.1": "research: entropy of the attention (CAS) at temperature 0.1, nats",
    "own_image": "share of images that find themselves among their neighbors: near 0, unless there are copies",
    "norm_ratio": "research: length of neighbors, mean of |z_i| / |z|; 1 if raw mixing equals mixing directions",
    "cos_neighbors": "mean over neighbors z_i of cos(z, z_i)",
    "accuracy": "share of training images classified correctly, augmented as in training",
}

# Share of its largest spread that a run should keep: good runs on CIFAR-10 kept 0.84 or more, failed ones 0.24 and 0.32
MIN_KEPT = 0.7


@torch.no_grad()
def measure(record: DirectionRecord | None, labels_B: Tensor, index_B: Tensor) -> dict[str, Tensor]:
    """Every number of NAMES that these directions allow."""
    if record is None:
        return {}
    q, p, z, _, neighbors, neighbor_labels, images = (
        column.flatten(0, 1) for column in record
    )  # rows of both directions
    out = {"d_positive": (2 - 2 * _dot(p, z)).mean(), "spread": F.spread(z), "rank": effective_dimensions(z)}
    if not neighbors.shape[1]:
        return out
    labels, index = labels_B.repeat(len(record.z_ABD)), index_B.repeat(len(record.z_ABD))
    topk = neighbors.shape[1]
    out["d_neighbors"] = (2 - 2 * _dot(p[:, None], neighbors)).mean()
    out["cos_neighbors"] = _dot(z[:, None], neighbors).mean()
    out["norm_ratio"] = (neighbors.norm(dim=2) / z.norm(dim=1, keepdim=True).clamp(min=1e-12)).mean()
    out["own_image"] = (images == index[:, None]).any(1).to(z.dtype).mean()
    # Neighbors without a label do not count, but rows of the support set never written count as wrong.
    counts = (labels >= 0)[:, None] & ((neighbor_labels >= 0) | (images < 0))
    out["purity"] = F.purity(neighbor_labels, labels, counts)
    sharp = F.attention(q, neighbors, 0.1)
    order = sharp.argsort(dim=1, descending=True, stable=True)  # the same at any temperature
    out["inconsistency"] = (order != torch.arange(topk, device=order.device)).to(z.dtype).mean()
    out["cas_entropy"] = torch.special.entr(F.attention(q, neighbors)).sum(1).mean()
    out["cas_entropy_0.1"] = torch.special.entr(sharp).sum(1).mean()
    both = [torch.cat([columns, columns.gather(1, order)], dim=1) for columns in (neighbor_labels, counts)]
    by_rank = F.purity(both[0], labels, both[1], dim=0).unbind()
    for k in range(topk):
        out[f"purity_{k + 1}"], out[f"purity_cas_{k + 1}"] = by_rank[k], by_rank[topk + k]
    return out


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (F.unit(a) * F.unit(b)).sum(-1)


def effective_dimensions(z_BD: Tensor) -> Tensor:
    """Participation ratio of the eigenvalues of unit z's covariance: D if all are equal, 1 if only one is not 0."""
    centered = F.unit(z_BD) - F.unit(z_BD).mean(0)
    covariance = centered.T @ centered
    return centered.square().sum().square() / covariance.square().sum().clamp(min=1e-30)


def effective_rank(eigenvalues: Tensor) -> Tensor:
    """exp(entropy) of a covariance's eigenvalues, scaled to sum to 1 (Roy and Vetterli, 2007)."""
    shares = eigenvalues.clamp(min=0)
    shares = shares / shares.sum().clamp(min=1e-30)
    return torch.special.entr(shares).sum().exp()


def shrinkage(spreads: Sequence[tuple[int, float]]) -> str:
    """A warning if embeddings that had spread have moved together again, else ""; points are (epoch, spread).

    This can go on for long before they collapse to a point, while kNN accuracy still rises.
    """
    if not spreads:
        return ""
    epoch, largest = max(spreads, key=lambda point: point[1])
    if spreads[-1][1] >= MIN_KEPT * largest:
        return ""
    return f"Spread was {largest:.2f} at epoch {epoch} and is {spreads[-1][1]:.2f}: embeddings have moved together."
