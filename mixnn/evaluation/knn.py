"""k-nearest-neighbor classification of features, by weighted vote (the authors' code) or majority (the paper)."""

from __future__ import annotations

import torch
from torch import Tensor

from mixnn.evaluation.neighbors import nearest
from mixnn.functional import unit


def default_k(num_images: int, num_classes: int) -> int:
    """The paper's 200, or half a class where classes are smaller than 400 images (none of the paper's four sets)."""
    return max(1, min(200, num_images // (2 * num_classes)))


def votes(similarity_BK: Tensor, labels_BK: Tensor, num_classes: int, vote: str, temperature: float = 0.1) -> Tensor:
    """Score of each class, (B, Y): the sum over its neighbors of exp(cos / temperature), or their number."""
    weight_BK = (similarity_BK / temperature).exp() if vote == "weighted" else torch.ones_like(similarity_BK)
    return similarity_BK.new_zeros(len(similarity_BK), num_classes).scatter_add_(1, labels_BK, weight_BK)


@torch.no_grad()
def knn(
    bank_MF: Tensor, bank_labels: Tensor, queries_F: Tensor, labels: Tensor, num_classes: int, k: int = 0
) -> dict[str, float]:
    """Accuracy in percent by either vote; k = 0 stands for `default_k`, a bank smaller than k is used whole.

    Labels may lie elsewhere than the features: those of images that stay on the host do.
    """
    bank_labels, labels = bank_labels.to(bank_MF.device), labels.to(bank_MF.device)
    k = min(k or default_k(len(bank_MF), num_classes), len(bank_MF))
    similarity, index = nearest(unit(queries_F), unit(bank_MF), k)
    accuracy = {}
    for vote in ("weighted", "majority"):
        guess = votes(similarity, bank_labels[index], num_classes, vote).argmax(1)
        accuracy[vote] = round(100 * int((guess == labels).sum()) / len(labels), 4)
    return accuracy
