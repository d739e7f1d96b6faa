"""k-nearest-neighbor classification of features, by weighted vote (the authors' code) or majority (the paper)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mixnn.evaluation.features import features
from mixnn.evaluation.neighbors import nearest
from mixnn.evaluation.protocol import Protocol, Subject, recorded_settings
from mixnn.functional import unit


def default_k(num_images: int, num_classes: int) -> int:
    """The paper's 200; half the mean class size if classes have fewer than 400 images (none of the paper's do)."""
    return max(1, min(200, num_images // (2 * num_classes)))


def votes(similarity_BK: Tensor, labels_BK: Tensor, num_classes: int, vote: str, temperature: float = 0.1) -> Tensor:
    """Score of each class, (B, Y): its neighbors' sum of exp(cos / temperature), or their number."""
    weight_BK = (similarity_BK / temperature).exp() if vote == "weighted" else torch.ones_like(similarity_BK)
    return similarity_BK.new_zeros(len(similarity_BK), num_classes).scatter_add_(1, labels_BK, weight_BK)


@torch.no_grad()
def knn(
    bank_MF: Tensor, bank_labels: Tensor, queries_F: Tensor, labels: Tensor, num_classes: int, k: int = 0
) -> dict[str, float]:
    """Accuracy in percent by either vote. k = 0 means `default_k`; k is at most the number of images in the bank.

    Labels may be on another device than the features: those of images that stay on the host are.
    """
    bank_labels, labels = bank_labels.to(bank_MF.device), labels.to(bank_MF.device)
    k = min(k or default_k(len(bank_MF), num_classes), len(bank_MF))
    similarity, index = nearest(unit(queries_F), unit(bank_MF), k)
    accuracy = {}
    for vote in ("weighted", "majority"):
        guess = votes(similarity, bank_labels[index], num_classes, vote).argmax(1)
        accuracy[vote] = round(100 * int((guess == labels).sum()) / len(labels), 4)
    return accuracy


def _run(subject: Subject) -> tuple[dict[str, Any], dict[str, Any]]:
    train, test = subject.train, subject.test
    k = default_k(len(train), train.num_classes)
    bank, queries = (features(subject.backbone, images, bf16=False) for images in (train, test))  # fp32 is cheap here
    found: dict[str, Any] = dict(knn(bank, train.labels, queries, test.labels, train.num_classes, k))
    readings = [record["knn"] for record in subject.metrics if "knn" in record]
    if readings:
        found["best_reading"] = max(readings)  # of those during training
    vote = "weighted by exp(cos / temperature); majority beside it"
    settings = {"k": k, "temperature": 0.1, "vote": vote, "augmentation": "none", "features": "unit, student backbone"}
    precision = "fp32, TF32 convolutions" if bank.is_cuda else "fp32"
    return found, settings | {"report": "last checkpoint", "precision": precision}


def _summary(result: Mapping[str, Any]) -> str:
    return f"k={result['protocol']['k']}, weighted vote; majority {result['majority']:.2f}"


def _settings(result: Mapping[str, Any], number: str) -> dict[str, Any]:
    settings = recorded_settings(result, number)
    if number == "majority":
        settings.pop("temperature", None)
        return settings | {"vote": "majority"}
    return settings | {"vote": "weighted by exp(cos / temperature)"}


KNN = Protocol(
    name="knn",
    label="kNN",
    headline="weighted",
    numbers={"weighted": "kNN, weighted vote", "majority": "kNN, majority vote"},
    run=_run,
    summary=_summary,
    settings=_settings,
)
