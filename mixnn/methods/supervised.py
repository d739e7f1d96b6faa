"""Supervised reference: cross-entropy with labels on the same backbone, optimizer and schedule.

The MNN paper copies its row from ReSSL (arXiv 2107.09282) and gives no recipe. Here: plain batch norm, one linear
layer, only crops and flips. It trains on labeled images only (on STL-10, the 5,000).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mixnn.config import Checked, option
from mixnn.methods.contract import About, Aux, Batch, Method
from mixnn.nn.encoder import Student


@dataclass(frozen=True)
class SupervisedOptions(Checked):
    """Augmentation and label smoothing."""

    view: str = option(
        "plain",
        "augmentation: plain (crop and flip), weak or strong",
        "our choice",
        choices=("plain", "weak", "strong"),
    )
    label_smoothing: float = option(0.0, "share of the target spread over all classes", "our choice", low=0, high=1)


class Supervised(Method):
    """Cross-entropy of a linear classifier on f."""

    about = About(2015, "He et al., arXiv 1512.03385", "supervised training, as an upper bound")
    Options = SupervisedOptions
    options: SupervisedOptions
    facts = ("num_classes",)
    split, recipe = "train", {"bn_groups": 1}

    def __init__(self, backbone: nn.Module | None, num_classes: int, **options: Any) -> None:
        self.num_classes = num_classes
        super().__init__(backbone, **options)

    def build(self, backbone: nn.Module, num_features: int) -> None:
        self.student = Student(backbone, nn.Linear(num_features, self.num_classes), None, views=1)

    @classmethod
    def uses_labels(cls, o: SupervisedOptions) -> bool:
        return True

    @classmethod
    def encoded_views(cls, o: SupervisedOptions) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (0,), ()

    @property
    def views(self) -> tuple[str, ...]:
        return (self.options.view,)

    def forward_batch(self, batch: Batch) -> tuple[Tensor, Aux]:
        logits, _ = self.student(*batch.views)
        loss = F.cross_entropy(logits, batch.labels_B, label_smoothing=self.options.label_smoothing)
        accuracy = (logits.detach().argmax(1) == batch.labels_B).to(logits.dtype).mean()
        return loss, Aux((), None, {"accuracy": accuracy})
