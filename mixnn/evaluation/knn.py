"""k-nearest-neighbor classification of features, by weighted vote (the authors' code) or majority (the paper)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mixnn import dist
from mixnn.config import UserError
from mixnn.evaluation.features import check_finite, features, labeled_features
from mixnn.evaluation.neighbors import nearest
from mixnn.evaluation.protocol import Protocol, Subject, recorded_settings
from mixnn.functional import unit

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TEMPERATURE = 0.1  # of the weighted vote; authors' code


def default_k(num_images: int, num_classes: int) -> int:
    """The paper's 200; half the mean class size if classes have fewer than 400 images (none of the paper's do)."""
    return max(1, min(200, num_images // (2 * num_classes)))


def votes(similarity_BK: Tensor, labels_BK: Tensor, num_classes: int, vote: str) -> Tensor:
    """Score of each class, (B, Y): its neighbors' sum of exp(cos / temperature), or their number."""
    weight_BK = (similarity_BK / TEMPERATURE).exp() if vote == "weighted" else torch.ones_like(similarity_BK)
    return similarity_BK.new_zeros(len(similarity_BK), num_classes).scatter_add_(1, labels_BK, weight_BK)


@torch.no_grad()
def accuracy_by_vote(
    bank_MF: Tensor,
    bank_labels: Tensor,
    queries_BF: Tensor,
    labels: Tensor,
    num_classes: int,
    k: int,
    group: ProcessGroup | None = None,
) -> dict[str, float]:
    """Accuracy in percent by either vote: `weighted` and `majority`.

    Labels may be on another device than the features: those of images that stay on the host are. The processes of a
    group have the same rows, and divide the queries.
    """
    bank_labels, labels, total = bank_labels.to(bank_MF.device), labels.to(bank_MF.device), len(labels)
    queries_BF, labels = dist.scatter_batch(queries_BF, group), dist.scatter_batch(labels, group)
    similarity, index = nearest(unit(queries_BF), unit(bank_MF), k)
    accuracy = {}
    for vote in ("weighted", "majority"):
        right = int((votes(similarity, bank_labels[index], num_classes, vote).argmax(1) == labels).sum())
        accuracy[vote] = round(100 * (right if group is None else dist.all_sum(right)) / total, 4)
    return accuracy


@dataclass(frozen=True)
class KNNResult:
    """Accuracies of `knn` in percent of the test rows, and what they were computed with."""

    accuracy: float  # neighbors vote with weight exp(cosine / temperature)
    majority: float  # each neighbor has one vote
    k: int
    temperature: float
    num_train: int
    num_test: int
    num_classes: int


def knn(train_features: Any, train_labels: Any, test_features: Any, test_labels: Any, *, k: int = 0) -> KNNResult:
    """Accuracy of a kNN classifier on features: the k training rows with the largest cosine vote for their classes.

    Features are arrays or tensors (M, F); the device of the training features does the work. Labels are numbers or
    text. k = 0 means 200, or half the mean class size if classes have fewer than 400 rows. With features of images that
    were not augmented, this is the kNN protocol of `evaluate`.

    >>> mixnn.evaluation.knn(train_x, train_y, test_x, test_y, k=3).accuracy
    100.0
    """
    rows = labeled_features(train_features, train_labels, test_features, test_labels)
    if k < 0:
        raise UserError(f"k={k}: k must be at least 1, or 0 for the default")
    k = min(k or default_k(len(rows.train), rows.num_classes), len(rows.train))
    found = accuracy_by_vote(rows.train, rows.train_labels, rows.test, rows.test_labels, rows.num_classes, k)
    sizes = len(rows.train), len(rows.test), rows.num_classes
    return KNNResult(found["weighted"], found["majority"], k, TEMPERATURE, *sizes)


def _run(subject: Subject) -> tuple[dict[str, Any], dict[str, Any]]:
    train, test = subject.train, subject.test
    k = default_k(len(train), train.num_classes)
    subject = subject if subject.bf16 else replace(subject, precision="fp32")  # by default too: fp32 is cheap here
    group, bf16 = subject.group, subject.bf16
    encoded = (features(subject.backbone, images, bf16=bf16, group=group) for images in (train, test))
    bank, queries = map(check_finite, encoded)
    labels, num_classes = test.labels, train.num_classes
    found: dict[str, Any] = dict(accuracy_by_vote(bank, train.labels, queries, labels, num_classes, k, group))
    readings = [record["knn"] for record in subject.metrics if "knn" in record]
    if readings:
        found["best_reading"] = max(readings)  # of those during training
    vote = "weighted by exp(cos / temperature); majority beside it"
    settings = {"k": k, "temperature": TEMPERATURE, "vote": vote, "augmentation": "none", "features": "unit"}
    return found, settings | {"report": "last checkpoint", "precision": subject.encoding}


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
    best="best_reading",
    num_encoded=lambda subject: len(subject.train) + len(subject.test),
)
