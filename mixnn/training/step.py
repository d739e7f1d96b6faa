"""One training step, defined once and run eager, recorded in a CUDA graph, or compiled.

    images[index] -> views -> method.forward_batch -> backward -> optimizer -> method.update_state

- eager runs it operator by operator.
- recorded (CUDA) records the whole step once for replay, so that the host has nothing to do.
- compiled compiles everything from images to loss, and on CUDA records the step too. It takes longest to start and is
  hardly faster: the time lies in convolutions and in batch norm. Batch norm and small views have kernels of their own,
  and the log, hundreds of small operators, runs in parallel with the backward pass.

The step's inputs are fixed buffers, written from outside: the images' indices, the uniforms that decide every random
choice, and the learning rate. What it logs is summed on the device. It reads nothing back and prints nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mixnn.augment import View, make_views
from mixnn.data.image_set import ImageSet
from mixnn.device import side_stream, wait_side_stream
from mixnn.diagnostics import measure
from mixnn.dist import gather_batch, scatter_batch, sum_gradients
from mixnn.methods.contract import Aux, Batch, DirectionRecord, Method
from mixnn.training.optimizers import backbone_parameters, optimizer_tensors, set_learning_rate
from mixnn.training.prefetch import Prefetcher

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MODES = ("eager", "recorded", "compiled")
# cuDNN tries this many algorithms per convolution, those that look best. All of them gain 0.02 ms of 8.5 on an H200,
# and take 7 s longer to start.
ALGORITHMS_TO_TRY = 10
WARM_UP_STEPS = 3  # before recording: compilation, cuDNN's choice of algorithms, handles that are made on first use


class Step:
    """Call it with the indices of a batch and a learning rate; `means()` reads what was logged."""

    def __init__(
        self,
        method: Method,
        images: ImageSet,
        views: list[View],
        batch_size: int,
        optimizer: torch.optim.Optimizer,
        mode: str = "eager",
        resident: bool = True,
        group: ProcessGroup | None = None,
        sides: Sequence[int] = (),
    ) -> None:
        """`sides`: those of the views that calls will ask for, if not only the views' own; recorded at once."""
        device = next(method.parameters()).device
        assert mode in MODES
        assert mode != "recorded" or device.type == "cuda"
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = not has_grouped_convolutions(method)
            torch.backends.cudnn.benchmark_limit = ALGORITHMS_TO_TRY
        self.method, self.images, self.views, self.optimizer, self.group = method, images, views, optimizer, group
        self.mean = torch.tensor(images.mean, device=device)
        self.std = torch.tensor(images.std, device=device)
        self.labels = images.labels.to(device)
        on_device = resident and isinstance(images.images, Tensor) and images.images.device == device
        own = batch_size if group is None else batch_size // group.size()  # images that this process augments
        self.prefetcher = None if on_device else Prefetcher(images.images, own, device)
        self.index = torch.zeros(batch_size, dtype=torch.long, device=device)
        shapes = [(batch_size, view.num_draws) for view in views]
        named = method.draws(batch_size)
        sizes = [math.prod(shape) for shape in [*shapes, *named.values()]]
        self.uniforms = torch.zeros(sum(sizes), device=device)  # one buffer, one launch to fill it
        parts = [part.view(s) for part, s in zip(self.uniforms.split(sizes), [*shapes, *named.values()], strict=True)]
        self.view_draws = parts[: len(views)]
        self.draws = dict(zip(named, parts[len(views) :], strict=True))
        self.names: list[str] = []
        self.sums = torch.zeros(0, dtype=torch.float64, device=device)
        self.count = 0
        self._loss: Callable[[], tuple[Tensor, Aux]] = self.loss
        if mode != "eager":
            # Search and losses are meant to be full fp32; torch's advice to use TF32 there is not wanted.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            torch._dynamo.config.recompile_limit = 1000  # runs per process; beyond it, dynamo raises an error
        if mode == "compiled":
            self._loss = torch.compile(self.loss, fullgraph=True, dynamic=False)
        self.captures = mode != "eager" and device.type == "cuda"
        self.heads_only = False
        self._runs: dict[tuple[bool, int], Callable[[], None]] = {}  # by heads_only and side of the views
        for side in [*sides[1:], *sides[:1]] or [views[0].size]:  # ends with the first, which is used first
            self._resize(side)
            self._run()

    def __call__(
        self,
        index: Tensor,
        lr: float,
        generator: torch.Generator,
        next_index: Tensor | None = None,
        backbone: float = 1.0,
        side: int = 0,
    ) -> None:
        """One step. If the indices of the next call are given, images that are not on the device are read ahead.

        `backbone` multiplies the learning rate of the backbone; with 0 it gets no gradients, which halves the work.
        `side` is that of the views, from now on.
        """
        self._resize(side or self.views[0].size)
        self._load(index, next_index)
        self.uniforms.uniform_(generator=generator)
        set_learning_rate(self.optimizer, lr, backbone)
        if self.heads_only != (backbone == 0):
            self.heads_only = backbone == 0
            for p in backbone_parameters(self.optimizer):
                p.requires_grad_(not self.heads_only)
        self._run()()
        self.count += 1

    @torch.no_grad()
    def observe(self, index: Tensor, generator: torch.Generator) -> None:
        """Log a batch without learning from it; batch norm's running statistics do move."""
        self._load(index)
        self.uniforms.uniform_(generator=generator)
        self._accumulate(*self._loss())
        self.count += 1

    def means(self) -> dict[str, float]:
        """Averages since the last reset; the one place where the host waits for the device."""
        return dict(zip(self.names, (self.sums / max(1, self.count)).tolist(), strict=True))

    def reset(self) -> None:
        self.sums.zero_()
        self.count = 0

    def restore(self, names: list[str], sums: Tensor, count: int) -> None:
        """Continue with sums that were saved in the middle of an epoch."""
        if not names:  # saved before the first step
            return
        if not self.names:
            self.names, self.sums = names, self.sums.new_zeros(len(names))
        assert names == self.names
        self.sums.copy_(sums)
        self.count = count

    def loss(self) -> tuple[Tensor, Aux]:
        """The method's loss of the batch in the buffers."""
        group, prefetched = self.group, self.prefetcher
        if prefetched is None:
            assert isinstance(self.images.images, Tensor)
            images_u8, index = self.images.images, scatter_batch(self.index, group)
        else:
            images_u8, index = prefetched.buffer, None
        view_draws = [scatter_batch(draws, group) for draws in self.view_draws]
        views = make_views(images_u8, index, view_draws, self.views, self.mean, self.std)
        views = tuple(gather_batch(view, group) for view in views)
        return self.method.forward_batch(Batch(views, self.labels[self.index], self.index, self.draws))

    def _load(self, index: Tensor, next_index: Tensor | None = None) -> None:
        if self.prefetcher is not None:
            ahead = None if next_index is None else scatter_batch(next_index, self.group)
            self.prefetcher.load(scatter_batch(index, self.group), ahead)
        self.index.copy_(index)

    def _resize(self, side: int) -> None:
        if side != self.views[0].size:
            self.views = [replace(view, size=side) for view in self.views]

    def _run(self) -> Callable[[], None]:
        """What runs the step: itself, or the replay of a recording that is made the first time."""
        kind = self.heads_only, self.views[0].size
        if kind not in self._runs:
            self._runs[kind] = self._capture() if self.captures else self._train_step
        return self._runs[kind]

    def _train_step(self) -> None:
        loss, aux = self._loss()
        with side_stream(self.index.device):
            self._accumulate(loss, aux)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        sum_gradients(self.method, self.method.student.f, self.group)
        wait_side_stream(self.index.device)  # the log reads what follows changes
        self.optimizer.step()
        self.method.update_state(aux)

    def _accumulate(self, loss: Tensor, aux: Aux) -> None:
        names, values = log(loss.detach(), aux.metrics, aux.record, self.labels[self.index], self.index)
        if not self.names:
            self.names = list(names)
            self.sums = self.sums.new_zeros(len(values))
        self.sums += values

    def _capture(self) -> Callable[[], None]:
        """Warm up on a side stream, put every tensor back as it was, then record the step once for replay."""
        state = [*self.method.state_dict().values(), *optimizer_tensors(self.optimizer).values()]
        before = [t.clone() for t in state]
        names, sums, count = self.names, self.sums.clone(), self.count
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._train_step()
        torch.cuda.current_stream().wait_stream(stream)
        for t, saved in zip(state, before, strict=True):
            t.copy_(saved)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._train_step()
        self.reset()
        self.restore(names, sums, count)
        return graph.replay


def has_grouped_convolutions(module: torch.nn.Module) -> bool:
    """Some of cuDNN's algorithms for them are so slow that to try all costs half a minute, and nothing is gained.

    For other networks trying pays, since shapes never change.
    """
    return any(isinstance(m, torch.nn.Conv2d) and m.groups > 1 for m in module.modules())


@torch.no_grad()
def log(
    loss: Tensor, metrics: dict[str, Tensor], record: DirectionRecord | None, labels_B: Tensor, index_B: Tensor
) -> tuple[tuple[str, ...], Tensor]:
    """Names and values of the numbers that a step logs."""
    values = {"loss": loss.detach()} | metrics | measure(record, labels_B, index_B)
    return tuple(values), torch.stack([v.double() for v in values.values()])
