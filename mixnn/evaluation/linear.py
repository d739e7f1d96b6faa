"""The paper's linear probe: a linear classifier on frozen features, trained on fresh random crops every epoch.

SGD, lr 30, momentum 0.9 with Nesterov (authors' code; the paper is silent), no weight decay, batch 256, 100 epochs, lr x 0.1 at 60 and
80. The last epoch is the result; the best on the test set, which the authors print, stands beside it under its own name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixnn.augment import View
from mixnn.data.image_set import ImageSet
from mixnn.evaluation.features import features


@dataclass(frozen=True)
class Protocol:
    epochs: int = 100
    lr: float = 30.0
    drops: tuple[int, ...] = (60, 80)
    batch_size: int = 256
    sgd_momentum: float = 0.9
    nesterov: bool = True
    area: tuple[float, float] = (0.08, 1.0)
    flip: float = 0.5
    seed: int = 0


def linear(
    backbone: nn.Module,
    train: ImageSet,
    test: ImageSet,
    size: int,
    protocol: Protocol,
    progress: Callable[[int, float], None] = lambda _epoch, _accuracy: None,
) -> dict[str, Any]:
    """Accuracy in percent after the last epoch, and the best of all epochs with its number."""
    device = train.images.device
    generator = torch.Generator(device).manual_seed(protocol.seed)
    view = View(size, area=protocol.area, flip=protocol.flip if train.mirror else 0.0)
    test_features = features(backbone, test)
    weight = torch.empty(train.num_classes, test_features.shape[1], device=device).normal_(0, 0.01, generator=generator)
    classifier = [nn.Parameter(weight), nn.Parameter(torch.zeros(train.num_classes, device=device))]
    lr = torch.zeros((), device=device)
    optimizer = torch.optim.SGD(classifier, lr, protocol.sgd_momentum, nesterov=protocol.nesterov, fused=True)
    accuracies = []
    for epoch in range(protocol.epochs):
        lr.fill_(protocol.lr * 0.1 ** sum(epoch >= drop for drop in protocol.drops))
        order = torch.randperm(len(train), generator=generator, device=device)
        x = features(backbone, train, order, view, generator)
        _fit(classifier, optimizer, x, train.labels[order], protocol.batch_size)
        with torch.no_grad():
            guess = F.linear(test_features, *classifier).argmax(1)
        accuracies.append(100 * (guess == test.labels).float().mean().item())
        progress(epoch + 1, accuracies[-1])
    best = max(accuracies)
    return {"last": accuracies[-1], "best": best, "best_epoch": accuracies.index(best) + 1}


def _fit(
    classifier: list[nn.Parameter], optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, batch_size: int
) -> None:
    """One epoch; the last partial batch is kept."""
    for x_B, y_B in zip(x.split(batch_size), y.split(batch_size), strict=True):
        loss = F.cross_entropy(F.linear(x_B, *classifier), y_B)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
