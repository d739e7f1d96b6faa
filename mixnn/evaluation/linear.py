"""The paper's linear probe: a linear classifier on frozen features, trained on new random crops every epoch.

SGD, lr 30, momentum 0.9 with Nesterov (authors' code; the paper is silent), no weight decay, batch 256, 100 epochs,
lr x 0.1 at 60 and 80. The result is the last epoch. The best epoch on the test set, which the authors report, is given
under its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixnn.augment import View
from mixnn.config import calling, on_command_line
from mixnn.data.image_set import ImageSet
from mixnn.evaluation.features import features
from mixnn.evaluation.protocol import Protocol, Subject, recorded_settings
from mixnn.progress import plural

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FEW_IMAGES = 5_000  # with fewer, the probe at its rate of 30 has too few steps to settle


@dataclass(frozen=True)
class LinearProbe:
    """Settings of the probe. Nesterov without weight decay is what Classifier does: reported, not configurable."""

    epochs: int = 100
    lr: float = 30.0
    drops: tuple[int, ...] = (60, 80)
    batch_size: int = 256
    sgd_momentum: float = 0.9
    nesterov: bool = field(default=True, init=False)
    weight_decay: float = field(default=0.0, init=False)
    area: tuple[float, float] = (0.08, 1.0)
    flip: float = 0.5
    seed: int = 0


@torch.no_grad()
def linear(
    backbone: nn.Module,
    train: ImageSet,
    test: ImageSet,
    size: int,
    probe: LinearProbe,
    progress: Callable[[int, float], None] = lambda _epoch, _accuracy: None,
    group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Accuracy in percent after each epoch; the last, and the best with its epoch, by name.

    The processes of a group divide the images that are encoded; each trains the classifier on all features.
    """
    test_features = features(backbone, test, group=group)
    device = test_features.device  # the backbone's; images that do not fit there stay on the host
    train_labels, test_labels = train.labels.to(device), test.labels.to(device)
    generator = torch.Generator(device).manual_seed(probe.seed)
    view = View(size, area=probe.area, flip=probe.flip if train.mirror else 0.0)
    weight = torch.empty(train.num_classes, test_features.shape[1], device=device).normal_(0, 0.01, generator=generator)
    classifier = Classifier(weight, torch.zeros(train.num_classes, device=device), probe)
    accuracies = []
    for epoch in range(probe.epochs):
        lr = probe.lr * 0.1 ** sum(epoch >= drop for drop in probe.drops)
        order = torch.randperm(len(train), generator=generator, device=device)
        x = features(backbone, train, order, view, generator, group=group)
        for x_B, y_B in zip(x.split(probe.batch_size), train_labels[order].split(probe.batch_size), strict=True):
            classifier.step(x_B, y_B, lr)
        right = (classifier(test_features).argmax(1) == test_labels).double().mean()
        accuracies.append(round(100 * right.item(), 4))
        progress(epoch + 1, accuracies[-1])
    best = max(accuracies)
    return {"last": accuracies[-1], "best": best, "best_epoch": accuracies.index(best) + 1, "curve": accuracies}


class Classifier:
    """Softmax classifier trained by SGD with Nesterov momentum and no weight decay.

    The gradient is written out: autograd with fused SGD took 0.7 ms per step on an H200.
    """

    def __init__(self, weight_YF: Tensor, bias_Y: Tensor, probe: LinearProbe) -> None:
        self.sgd_momentum = probe.sgd_momentum
        self.weights = [weight_YF, bias_Y]
        self.momenta = [torch.zeros_like(w) for w in self.weights]

    def __call__(self, x_BF: Tensor) -> Tensor:
        return F.linear(x_BF, *self.weights)

    def step(self, x_BF: Tensor, y_B: Tensor, lr: float) -> None:
        """One step on the mean cross-entropy, whose gradient in the logits is (softmax - one-hot) / B."""
        slope_BY = self(x_BF).softmax(1)
        slope_BY.scatter_add_(1, y_B[:, None], slope_BY.new_full((1, 1), -1.0).expand(len(y_B), 1)).div_(len(y_B))
        for w, momentum, gradient in zip(self.weights, self.momenta, (slope_BY.T @ x_BF, slope_BY.sum(0)), strict=True):
            momentum.mul_(self.sgd_momentum).add_(gradient)
            w.sub_(gradient.add_(momentum, alpha=self.sgd_momentum), alpha=lr)


def _run(subject: Subject) -> tuple[dict[str, Any], dict[str, Any]]:
    train, epochs, reporter = subject.train, subject.epochs, subject.reporter
    drops = max(1, epochs * 6 // 10), max(1, epochs * 8 // 10)
    probe = LinearProbe(epochs=epochs, seed=subject.seed, drops=drops)
    if len(train) < FEW_IMAGES:
        tell = reporter.info if on_command_line() else reporter.warn  # in Python, what is only printed is not seen
        tell(
            f"the paper's linear probe needs tens of thousands of images and is unsteady with {len(train):,}: "
            f"rely on kNN or {calling('classify')} instead"
        )
    with reporter.bar("linear probe", epochs) as advance:
        found = linear(subject.backbone, train, subject.test, subject.crop_size, probe, advance, subject.group)
    flip = probe.flip if train.mirror else 0.0
    precision = "bf16 forward, fp32 features" if subject.device.type == "cuda" else "fp32"
    settings = asdict(probe) | {"flip": flip, "crop_size": subject.crop_size, "precision": precision}
    return found, settings | {"report": "last epoch; best is named"}


def _summary(result: Mapping[str, Any]) -> str:
    return f"last of {plural(result['protocol']['epochs'], 'epoch')}; best {result['best']:.2f}"


def _settings(result: Mapping[str, Any], number: str) -> dict[str, Any]:
    epoch = "last epoch" if number == "last" else f"best epoch, {result.get('best_epoch', 'not recorded')}"
    return recorded_settings(result, number) | {"report": epoch}


LINEAR = Protocol(
    name="linear",
    label="linear",
    headline="last",
    numbers={"last": "Linear probe, last epoch", "best": "Linear probe, best epoch, chosen by the test images"},
    run=_run,
    summary=_summary,
    settings=_settings,
    num_encoded=lambda subject: len(subject.test) + subject.epochs * len(subject.train),
)
