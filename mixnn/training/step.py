"""One training step, defined once and run eager, compiled or captured in a CUDA graph.

    images[index] -> views -> method.forward -> backward -> SGD -> method.after_step

Eager runs it operator by operator. Captured, on CUDA, compiles the making of views and the log (small operators by the
hundred) and records the whole step once for replay; the networks' time lies in convolutions and in batch norm, which
has kernels of its own. Compiled compiles all from images to loss, and on CUDA records that: the longest start, for a
step that is hardly faster.

The step is a closure of tensors: which images, the uniforms that decide every random choice, and the learning rate
are written into fixed buffers from outside; what it logs is summed on the device. It reads nothing back and prints
nothing.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mixnn.augment import View, augment, normalize
from mixnn.data.image_set import ImageSet
from mixnn.diagnostics import measure
from mixnn.dist import gather_batch, scatter_batch, size, sum_gradients
from mixnn.methods.contract import Aux, Batch, Seen
from mixnn.training.feed import Feed

MODES = ("eager", "compiled", "captured")
# Pixels of a view's batch up to which cuDNN tries all its algorithms (0) and not the ten that look best: worth 3% of a
# step with 256 images of 32 x 32. With larger images each trial takes longer.
MOST_PIXELS = 2**19
WARM_UP_STEPS = 3  # before recording: compilation, cuDNN's choice of algorithms, lazily made handles


class Step:
    """Call it with the images of a batch and a learning rate; read `means()` when the numbers are wanted."""

    def __init__(
        self,
        method: Any,
        images: ImageSet,
        views: list[View],
        batch_size: int,
        optimizer: torch.optim.Optimizer,
        mode: str = "eager",
        resident: bool = True,
    ) -> None:
        device = next(method.parameters()).device
        assert mode in MODES
        assert mode != "captured" or device.type == "cuda"
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # shapes never change, so trying every algorithm once pays
            small = batch_size * views[0].size ** 2 <= MOST_PIXELS
            torch.backends.cudnn.benchmark_limit = 0 if small else 10
        self.method, self.images, self.views, self.optimizer = method, images, views, optimizer
        self.mean = torch.tensor(images.mean, device=device)
        self.std = torch.tensor(images.std, device=device)
        self.labels = images.labels.to(device)
        at_hand = resident and images.images.device == device
        self.feed = None if at_hand else Feed(images.images, batch_size // size(), device)
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
        self._make_views, self._log = make_views, log
        if mode != "eager":
            # Search and losses are meant to be full fp32; torch's advice to use TF32 there is not wanted.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            torch._dynamo.config.recompile_limit = 1000  # of runs in one process; past it, an error
        if mode == "compiled":
            self._loss = torch.compile(self.loss, fullgraph=True, dynamic=False)
        if mode == "captured":
            self._make_views, self._log = compiled(make_views), compiled(log)
        self._run = self._body
        if mode != "eager" and device.type == "cuda":
            self._run = self._capture()

    def __call__(self, index: Tensor, lr: float, generator: torch.Generator, coming: Tensor | None = None) -> None:
        """`coming` are the images of the next call, if known: those that are not on the device are read ahead."""
        self._put(index, coming)
        self.uniforms.uniform_(generator=generator)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(lr)
        self._run()
        self.count += 1

    @torch.no_grad()
    def observe(self, index: Tensor, generator: torch.Generator) -> None:
        """Log a batch without learning from it; batch norm's running statistics do move."""
        self._put(index)
        self.uniforms.uniform_(generator=generator)
        self._note(*self._loss())
        self.count += 1

    def means(self) -> dict[str, float]:
        """Averages since the last reset; the one place where the host waits for the device."""
        return dict(zip(self.names, (self.sums / max(1, self.count)).tolist(), strict=True))

    def reset(self) -> None:
        self.sums.zero_()
        self.count = 0

    def restore(self, names: list[str], sums: Tensor, count: int) -> None:
        """Go on with sums that were saved in the middle of an epoch."""
        if not names:  # saved before the first step
            return
        if not self.names:
            self.names, self.sums = names, self.sums.new_zeros(len(names))
        assert names == self.names
        self.sums.copy_(sums)
        self.count = count

    def loss(self) -> tuple[Tensor, Aux]:
        """From the buffers to the method's loss."""
        images_u8 = self.images.images[scatter_batch(self.index)] if self.feed is None else self.feed.buffer
        view_draws = [scatter_batch(draws) for draws in self.view_draws]
        views = self._make_views(images_u8, view_draws, self.views, self.mean, self.std)
        views = tuple(gather_batch(view) for view in views)
        return self.method(Batch(views, self.labels[self.index], self.index, self.draws))

    def _put(self, index: Tensor, coming: Tensor | None = None) -> None:
        if self.feed is not None:
            self.feed.put(scatter_batch(index), None if coming is None else scatter_batch(coming))
        self.index.copy_(index)

    def _body(self) -> None:
        loss, aux = self._loss()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        sum_gradients(self.method)
        self.optimizer.step()
        self.method.after_step(aux)
        self._note(loss, aux)

    def _note(self, loss: Tensor, aux: Aux) -> None:
        names, values = self._log(loss, aux.metrics, aux.seen, self.labels[self.index], self.index)
        if not self.names:
            self.names = list(names)
            self.sums = self.sums.new_zeros(len(values))
        self.sums += values

    def _capture(self) -> Callable[[], None]:
        """Warm up on a side stream, put every tensor back as it was, then record the step once for replay."""
        state = [*self.method.state_dict().values(), *_buffers(self.optimizer)]
        before = [t.clone() for t in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._body()
        torch.cuda.current_stream().wait_stream(stream)
        for t, saved in zip(state, before, strict=True):
            t.copy_(saved)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._body()
        self.reset()
        return graph.replay


def make_views(
    images_u8: Tensor, draws: list[Tensor], views: list[View], mean: Tensor, std: Tensor
) -> tuple[Tensor, ...]:
    """A batch's views, ready for the networks."""
    return tuple(normalize(augment(images_u8, u, view), mean, std) for u, view in zip(draws, views, strict=True))


@torch.no_grad()
def log(
    loss: Tensor, metrics: dict[str, Tensor], seen: Seen | None, labels_B: Tensor, index_B: Tensor
) -> tuple[tuple[str, ...], Tensor]:
    """Names and numbers that a step leaves to be summed."""
    values = {"loss": loss.detach()} | metrics | measure(seen, labels_B, index_B)
    return tuple(values), torch.stack([v.double() for v in values.values()])


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Once for all runs of a process that augment, or look for neighbors, alike."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def sgd(parameters: list[torch.nn.Parameter], momentum: float, weight_decay: float) -> torch.optim.SGD:
    """SGD whose learning rate is a tensor (no host read, no recompilation) and whose momentum exists from the start."""
    lr = torch.zeros((), device=parameters[0].device)
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)
    for p in parameters:  # zeros here equal torch's own first step, and can be saved, loaded and captured
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return optimizer


def _buffers(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [state["momentum_buffer"] for state in optimizer.state.values()]
