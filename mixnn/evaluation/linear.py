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
from mixnn.device import AsyncScalar, side_stream, wait_side_stream
from mixnn.evaluation.features import check_finite, features
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
    bf16: bool | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Accuracy in percent after each epoch; the last, and the best with its epoch, by name.

    On CUDA the classifier learns an epoch while the crops of the next one are encoded. So an accuracy is read when the
    next epoch is under way: waiting for each would leave the device idle. The processes of a group divide the images
    that are encoded; each trains the classifier on all features.
    """
    test_features = check_finite(features(backbone, test, bf16=bf16, group=group))
    device = test_features.device  # the backbone's; images that do not fit there stay on the host
    train_labels, test_labels = train.labels.to(device), test.labels.to(device)
    generator = torch.Generator(device).manual_seed(probe.seed)
    view = View(size, area=probe.area, flip=probe.flip if train.mirror else 0.0)
    weight = torch.empty(train.num_classes, test_features.shape[1], device=device).normal_(0, 0.01, generator=generator)
    classifier = Classifier(weight, torch.zeros(train.num_classes, device=device), probe)
    accuracies: list[float] = []
    right: list[AsyncScalar] = []  # shares of the test images, one for each epoch
    held: list[Tensor] = []  # what the classifier learns from; the memory must not be reused meanwhile

    def read(epochs: int) -> None:
        """Read back the accuracies of the first `epochs` epochs that were not reported yet."""
        for share in right[len(accuracies) : epochs]:
            accuracies.append(round(100 * share.item(), 4))
            progress(len(accuracies), accuracies[-1])

    for epoch in range(probe.epochs):
        lr = probe.lr * 0.1 ** sum(epoch >= drop for drop in probe.drops)
        order = torch.randperm(len(train), generator=generator, device=device)
        x = features(backbone, train, order, view, generator, bf16=bf16, group=group)
        y = train_labels[order]
        wait_side_stream(device)
        held = [x, y]
        with side_stream(device):
            classifier.learn(x, y, lr)
            right.append(AsyncScalar((classifier(test_features).argmax(1) == test_labels).double().mean()))
        read(epoch if device.type == "cuda" else epoch + 1)
    wait_side_stream(device)
    held.clear()
    read(probe.epochs)
    best = max(accuracies)
    return {"last": accuracies[-1], "best": best, "best_epoch": accuracies.index(best) + 1, "curve": accuracies}


class Classifier:
    """Softmax classifier trained by SGD with Nesterov momentum and no weight decay.

    The gradient is written out: autograd with fused SGD took 0.7 ms per step on an H200. On CUDA an epoch is captured
    in a graph, once for each learning rate, because its small kernels take longer to launch than to run.
    """

    def __init__(self, weight_YF: Tensor, bias_Y: Tensor, probe: LinearProbe) -> None:
        self.sgd_momentum, self.batch_size = probe.sgd_momentum, probe.batch_size
        self.weights = [weight_YF, bias_Y]
        self.momenta = [torch.zeros_like(w) for w in self.weights]
        self._inputs: tuple[Tensor, Tensor] | None = None  # of the recorded epochs
        self._recorded: dict[float, torch.cuda.CUDAGraph] = {}  # by learning rate

    def __call__(self, x_BF: Tensor) -> Tensor:
        return F.linear(x_BF, *self.weights)

    def learn(self, x_NF: Tensor, y_N: Tensor, lr: float) -> None:
        """One epoch, in this order. All epochs have the same number of images."""
        if x_NF.device.type != "cuda":
            self._steps(x_NF, y_N, lr)
            return
        self._inputs = self._inputs or (torch.empty_like(x_NF), torch.empty_like(y_N))
        for recorded, new in zip(self._inputs, (x_NF, y_N), strict=True):
            recorded.copy_(new)
        if lr not in self._recorded:
            self._recorded[lr] = self._record(*self._inputs, lr)
        self._recorded[lr].replay()

    def _steps(self, x_NF: Tensor, y_N: Tensor, lr: float) -> None:
        for x_B, y_B in zip(x_NF.split(self.batch_size), y_N.split(self.batch_size), strict=True):
            self.step(x_B, y_B, lr)

    def _record(self, x_NF: Tensor, y_N: Tensor, lr: float) -> torch.cuda.CUDAGraph:
        state = [*self.weights, *self.momenta]
        before = [t.clone() for t in state]
        self.step(x_NF[: self.batch_size], y_N[: self.batch_size], lr)  # makes cuBLAS's handle
        for t, saved in zip(state, before, strict=True):
            t.copy_(saved)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._steps(x_NF, y_N, lr)
        return graph

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
        found = linear(
            subject.backbone, train, subject.test, subject.crop_size, probe, advance, subject.bf16, subject.group
        )
    flip = probe.flip if train.mirror else 0.0
    settings = asdict(probe) | {"flip": flip, "crop_size": subject.crop_size, "precision": subject.encoding}
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
    best="best",
    num_encoded=lambda subject: len(subject.test) + subject.epochs * len(subject.train),
)
