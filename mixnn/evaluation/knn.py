"""k-nearest-neighbor classification of features, by weighted vote (the authors' code) or majority (the paper)."""

from __future__ import annotations

import torch
from torch import Tensor

from mixnn.functional import unit

CHUNK = 1000  # queries at a time; the similarities to a bank of 50,000 then take 200 MB


def votes(similarity_BK: Tensor, labels_BK: Tensor, num_classes: int, vote: str, temperature: float = 0.1) -> Tensor:
    """Score of each class, (B, Y): the sum over its neighbors of exp(cos / temperature), or their number."""
    weight_BK = (similarity_BK / temperature).exp() if vote == "weighted" else torch.ones_like(similarity_BK)
    return similarity_BK.new_zeros(len(similarity_BK), num_classes).scatter_add_(1, labels_BK, weight_BK)


@torch.no_grad()
def knn(
    bank_MF: Tensor, bank_labels: Tensor, queries_F: Tensor, labels: Tensor, num_classes: int, k: int = 200
) -> dict[str, float]:
    """Accuracy in percent by either vote. A bank smaller than k is used whole."""
    bank_MF, k = unit(bank_MF), min(k, len(bank_MF))
    correct = {"weighted": torch.zeros((), device=labels.device), "majority": torch.zeros((), device=labels.device)}
    for query, truth in zip(queries_F.split(CHUNK), labels.split(CHUNK), strict=True):
        similarity, index = (unit(query) @ bank_MF.T).topk(k, dim=1)
        for vote, count in correct.items():
            guess = votes(similarity, bank_labels[index], num_classes, vote).argmax(1)
            count += (guess == truth).sum()
    return {vote: 100 * count.item() / len(labels) for vote, count in correct.items()}
