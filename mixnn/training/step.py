"""One training step, defined once and run eager, captured in a CUDA graph, or compiled.

    images[index] -> views -> method.forward_batch -> backward -> optimizer -> method.update_state

- eager runs it operator by operator.
- recorded (CUDA) means a captured step: the whole step is captured once for replay, so that the host has nothing to do.
- compiled compiles everything from images to loss, and on CUDA captures the step too. It takes longest to start and is
  hardly faster: the time lies in convolutions and in batch norm. Batch norm and small views have kernels of their own,
  and the log, hundreds of small operators, runs in parallel with the backward pass.

The step's inputs are fixed buffers, written from outside: the images' indices, the uniforms that decide every random
choice, and the learning rate. What it logs is summed on the device. It reads nothing back and prints nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mixnn.augment import View, make_views
from mixnn.config import UserError
from mixnn.data.image_set import ImageSet
from mixnn.device import compiling_in_parallel, side_stream, wait_side_stream
from mixnn.diagnostics import measure
from mixnn.dist import GradientSum, PartialBatch, own_rows
from mixnn.methods.contract import Aux, Batch, Method
from mixnn.training.optimizers import backbone_parameters, optimizer_tensors, set_learning_rate
from mixnn.training.prefetch import Prefetcher

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MODES = ("eager", "recorded", "compiled")
# cuDNN tries this many algorithms per convolution, those that look best. All of them gain 0.02 ms of 8.5 on an H200,
# and take 7 s longer to start.
ALGORITHMS_TO_TRY = 10
LOGGED = ("epoch", "step", "loss", "knn", "knn_k", "images_per_s", "seconds", "crc32")  # in each line of metrics.jsonl
WARM_UP_STEPS = 3  # before capturing: compilation, cuDNN's choice of algorithms, handles that are made on first use


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
        """`sides`: all crop sizes that later calls will use (default: that of the views).

        If steps are captured, one is captured for each of them here.
        """
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
        self.prefetcher = None if on_device else Prefetcher(images.images, batch_size, device)
        self.index = torch.zeros(batch_size, dtype=torch.long, device=device)
        shapes = [(batch_size, view.num_draws) for view in views]
        named = method.draws(batch_size)
        sizes = [math.prod(shape) for shape in [*shapes, *named.values()]]
        self.uniforms = torch.zeros(sum(sizes), device=device)  # one buffer, one launch to fill it
        self._layout = [*shapes, *named.values()], sizes, [*named]
        self.view_draws, self.draws = self._draws(self.uniforms)
        self.own_rows = own_rows(batch_size, group, device)
        self.is_partial = group is not None and len(method.image_rows(self.draws, self.own_rows)) < batch_size
        if self.is_partial and device.type == "cuda":  # its rows must be written before `_rows_to_read` reads them
            _reading_stream(device).wait_stream(torch.cuda.current_stream(device))
        self.position = torch.zeros(batch_size, dtype=torch.long, device=device)  # of a row in the prefetcher's buffer
        self.gradient_sum = None if group is None else GradientSum(method, method.student.f, group)
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
        `side`: size of the views in this step and later ones.
        """
        self._resize(side or self.views[0].size)
        self._load(index, generator, next_index)
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
        self._load(index, generator)
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
        return self.method.forward_batch(Batch(self._batch_views(), self.labels[self.index], self.index, self.draws))

    def _batch_views(self) -> tuple[Tensor | PartialBatch, ...]:
        """The views of the batch, made here; on many processes only the rows that this one needs, when it needs them.

        A process of a few needs most rows, for its student or for its teacher, and makes each view once.
        """
        if not self.is_partial:
            return self._make_views(self.index, None, self.view_draws, self.views)
        batch_size, device = len(self.index), self.index.device
        return tuple(
            PartialBatch(partial(self._make_rows, i), (batch_size, 3, view.size, view.size), device)
            for i, view in enumerate(self.views)
        )

    def _make_rows(self, i: int, rows: Tensor) -> Tensor:
        """Rows of view i."""
        return self._make_views(self.index[rows], self.position[rows], [self.view_draws[i][rows]], [self.views[i]])[0]

    def _make_views(
        self, index: Tensor, position: Tensor | None, draws: Sequence[Tensor], views: Sequence[View]
    ) -> tuple[Tensor, ...]:
        """Views of the images at `index`; if they are on the host, of those at `position` in the buffer, or of all."""
        if self.prefetcher is None:
            assert isinstance(self.images.images, Tensor)
            return make_views(self.images.images, index, draws, views, self.mean, self.std)
        return make_views(self.prefetcher.buffer, position, draws, views, self.mean, self.std)

    def _load(self, index: Tensor, generator: torch.Generator, next_index: Tensor | None = None) -> None:
        """Fill the step's inputs: indices, images that are not on the device, and uniforms."""
        if self.prefetcher is not None and self.is_partial:
            rows = self._rows_to_read(generator)
            self.uniforms.uniform_(generator=generator)
            ahead = None if next_index is None else next_index[self._rows_to_read(generator)]
            self.prefetcher.load(index[rows], ahead)
            position = torch.full((len(index),), len(index))  # of rows that are not there: using one is an error
            position[rows] = torch.arange(len(rows))
            self.position.copy_(position)
        else:
            if self.prefetcher is not None:
                self.prefetcher.load(index, next_index)
            self.uniforms.uniform_(generator=generator)
        self.index.copy_(index)

    def _resize(self, side: int) -> None:
        if side != self.views[0].size:
            self.views = [replace(view, size=side) for view in self.views]

    def _rows_to_read(self, generator: torch.Generator) -> Tensor:
        """Rows of the batch whose images this process needs with the uniforms that come next, on the host.

        The generator stays as it is. On CUDA this waits for a stream of its own, and not for the step before.
        """
        device = self.uniforms.device
        with torch.cuda.stream(_reading_stream(device)) if device.type == "cuda" else nullcontext():
            draws = torch.empty_like(self.uniforms).uniform_(generator=generator.clone_state())
            return self.method.image_rows(self._draws(draws)[1], self.own_rows).cpu().unique()

    def _draws(self, uniforms: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The parts of the uniforms: one for each view, and those of the method by name."""
        shapes, sizes, names = self._layout
        parts = [part.view(shape) for part, shape in zip(uniforms.split(sizes), shapes, strict=True)]
        return parts[: len(self.views)], dict(zip(names, parts[len(self.views) :], strict=True))

    def _run(self) -> Callable[[], None]:
        """The function that runs a step: the step itself, or the replay of one that was captured the first time."""
        kind = self.heads_only, self.views[0].size
        if kind not in self._runs:
            self._runs[kind] = self._capture() if self.captures else self._train_step
        return self._runs[kind]

    def _train_step(self) -> None:
        loss, aux = self._loss()
        check_loss(loss, type(self.method).__name__)
        with side_stream(self.index.device):
            self._accumulate(loss, aux)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.gradient_sum is not None:
            self.gradient_sum.finish()
        wait_side_stream(self.index.device)  # the log reads what follows changes
        self.optimizer.step()
        self.method.update_state(aux)

    def _accumulate(self, loss: Tensor, aux: Aux) -> None:
        measured = measure(aux.record, self.labels[self.index], self.index)
        check_metrics(aux.metrics, {*LOGGED, *measured}, type(self.method).__name__)
        names, values = log(loss, aux.metrics, measured)
        if not self.names:
            self.names = list(names)
            self.sums = self.sums.new_zeros(len(values))
        self.sums += values

    def _capture(self) -> Callable[[], None]:
        """Warm up on a side stream, put every tensor back as it was, then capture the step once for replay."""
        state = [*self.method.state_dict().values(), *self.method.buffers()]  # also buffers that are not stored
        state += optimizer_tensors(self.optimizer).values()
        before = [t.clone() for t in state]
        names, sums, count = self.names, self.sums.clone(), self.count
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if self._loss == self.loss:  # torch.compile has launches of its own
                with compiling_in_parallel(self.index.device):
                    self._train_step()
            for _ in range(WARM_UP_STEPS):
                self._train_step()
        torch.cuda.current_stream().wait_stream(stream)
        for t, saved in zip(state, before, strict=True):
            t.copy_(saved)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        # NCCL's own thread asks for events while this one captures; only what this thread does must be capturable
        mode = "global" if self.group is None else "thread_local"
        with torch.cuda.graph(graph, capture_error_mode=mode):
            self._train_step()
        self.reset()
        self.restore(names, sums, count)
        return graph.replay


@cache
def _reading_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def has_grouped_convolutions(module: torch.nn.Module) -> bool:
    """Whether any convolution is grouped: then cuDNN's search for the fastest algorithm takes half a minute, in vain.

    For other networks the search pays, since shapes never change.
    """
    return any(isinstance(m, torch.nn.Conv2d) and m.groups > 1 for m in module.modules())


def check_loss(loss: Tensor, method: str) -> None:
    """UserError for a loss that cannot be minimized."""
    if not isinstance(loss, Tensor) or loss.dim():
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"the loss of {method} must be a tensor with one number, not {what}: take a mean")
    if not loss.requires_grad:
        raise UserError(
            f"the loss of {method} has no gradient, so nothing would be trained: make it of the student's embeddings "
            "(q_BD or p_BD), without .detach(), .data or torch.no_grad()"
        )


def check_metrics(metrics: dict[str, Tensor], reserved: Collection[str], method: str) -> None:
    """UserError unless a method's own numbers are tensors without dimensions, with names that nothing else has."""
    if not isinstance(metrics, dict):
        raise UserError(f"metrics() of {method} must return a dict of scalars by name, not a {type(metrics).__name__}")
    for name, value in metrics.items():
        if name in reserved:
            raise UserError(f"metrics() of {method} returns {name!r}, which mixnn logs itself: choose another name")
        if not isinstance(value, Tensor):
            raise UserError(
                f"metrics() of {method} returns a {type(value).__name__} as {name!r}, which must be a tensor: leave "
                "out .item() or float()"
            )
        if value.dim():
            shape = tuple(value.shape)
            raise UserError(f"metrics() of {method} returns {name!r} of shape {shape}, not one number: take its mean")


@torch.no_grad()
def log(loss: Tensor, metrics: dict[str, Tensor], measured: dict[str, Tensor]) -> tuple[tuple[str, ...], Tensor]:
    """Names and values of the numbers that a step logs."""
    values = {"loss": loss.detach()} | metrics | measured
    return tuple(values), torch.stack([*values.values()]).double()
