"""Linear probe on features that are already computed.

The protocol `linear` (linear.py) trains its classifier on new random crops every epoch, as the paper does, and needs
the encoder for that. Here there is one feature vector per image, so the classifier is fitted until it converges:
logistic regression by L-BFGS on standardized features. It has no learning rate, and the scale of the features does not
matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixnn.config import UserError
from mixnn.evaluation.features import labeled_features

PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
MAX_ITERATIONS = 200
HELD_OUT = 5  # one training row in this many decides on the penalty


@dataclass(frozen=True)
class LinearProbeResult:
    """Accuracy of `linear_probe` in percent of the test rows, and what it was computed with."""

    accuracy: float
    train_accuracy: float  # much higher than accuracy: the classifier remembers the training rows
    penalty: float
    penalty_from: str  # "given", or how it was chosen
    num_train: int
    num_test: int
    num_classes: int


def linear_probe(
    train_features: Any,
    train_labels: Any,
    test_features: Any,
    test_labels: Any,
    *,
    penalty: float | None = None,
    seed: int = 0,
) -> LinearProbeResult:
    """Accuracy of a linear classifier on features: multinomial logistic regression, fitted on the training rows.

    Features are arrays or tensors (M, F); the device of the training features does the work. Labels are numbers or
    text. Every column is scaled to mean 0 and deviation 1 on the training rows. The loss is the mean cross-entropy plus
    penalty / 2 times the sum of the squared weights. By default, a random fifth of the training rows, drawn by `seed`,
    decides among penalties of 1e-1, 1e-2, ..., 1e-5. The test rows decide nothing.

    >>> mixnn.evaluation.linear_probe(train_x, train_y, test_x, test_y).accuracy
    100.0
    """
    rows = labeled_features(train_features, train_labels, test_features, test_labels)
    if penalty is not None and not penalty > 0:
        raise UserError(f"penalty={penalty}: penalty must be more than 0")
    mean, std = rows.train.mean(0), rows.train.std(0, correction=0)
    std = torch.where(std > 1e-6 * std.max(), std, torch.ones_like(std))  # columns that are constant stay 0
    train, test = ((x - mean) / std for x in (rows.train, rows.test))
    chosen = penalty or _choose_penalty(train, rows.train_labels, rows.num_classes, seed)
    weights = _fit(train, rows.train_labels, chosen, _zeros(train, rows.num_classes))
    return LinearProbeResult(
        accuracy=_accuracy(test, rows.test_labels, weights),
        train_accuracy=_accuracy(train, rows.train_labels, weights),
        penalty=chosen,
        penalty_from="given" if penalty else f"one in {HELD_OUT} training rows, seed {seed}",
        num_train=len(train),
        num_test=len(test),
        num_classes=rows.num_classes,
    )


def _choose_penalty(x_MF: Tensor, labels_M: Tensor, num_classes: int, seed: int) -> float:
    """The penalty with the lowest cross-entropy on the held-out rows."""
    order = torch.randperm(len(x_MF), generator=torch.Generator().manual_seed(seed)).to(x_MF.device)
    held_out, rest = order.tensor_split([-(-len(x_MF) // HELD_OUT)])  # rounded up
    weights, found = _zeros(x_MF, num_classes), []
    for penalty in PENALTIES:  # each starts where the stronger one ended
        weights = _fit(x_MF[rest], labels_M[rest], penalty, weights)
        found.append(F.cross_entropy(F.linear(x_MF[held_out], *weights), labels_M[held_out]).item())
    return PENALTIES[found.index(min(found))]


def _zeros(x_MF: Tensor, num_classes: int) -> list[Tensor]:
    """Weight (Y, F) and bias (Y,)."""
    return [x_MF.new_zeros(num_classes, x_MF.shape[1]), x_MF.new_zeros(num_classes)]


def _fit(x_MF: Tensor, labels_M: Tensor, penalty: float, start: list[Tensor]) -> list[Tensor]:
    """Weight and bias at the minimum of the loss."""
    weights = [w.detach().clone().requires_grad_() for w in start]
    optimizer = torch.optim.LBFGS(
        weights, max_iter=MAX_ITERATIONS, tolerance_grad=1e-5, tolerance_change=1e-7, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(x_MF, *weights), labels_M) + penalty / 2 * weights[0].square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return [w.detach() for w in weights]


def _accuracy(x_MF: Tensor, labels_M: Tensor, weights: list[Tensor]) -> float:
    right = F.linear(x_MF, *weights).argmax(1) == labels_M
    return round(100 * right.double().mean().item(), 4)
