"""A run on several processes, as torchrun starts them; with one process nothing here does anything.

    torchrun --nproc-per-node 4 -m mixnn pretrain cifar10

Only the backbones divide the work: process r of R takes images r, r + R, ... of a batch, which are whole batch-norm
groups, and the features of all are put together again. Heads, losses, searches and support sets are the same in every
process, so that a method need not know of them; draws are made for the whole batch. A run therefore has the losses
that it has in one process, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from mixnn.config import UserError, setting
from mixnn.processes import world_size


def init(device: torch.device) -> None:
    """Meet the other processes. What they settle on the host goes through gloo, tensors on CUDA through NCCL."""
    if world_size() == 1 or torch_dist.is_initialized():
        return
    try:
        torch_dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"WORLD_SIZE={world_size()}, but the other processes cannot be met ({str(error).splitlines()[0]}): "
            f"start the run with torchrun, or unset WORLD_SIZE"
        ) from None


def shutdown() -> None:
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def size() -> int:
    return torch_dist.get_world_size() if torch_dist.is_initialized() else 1


def rank() -> int:
    return torch_dist.get_rank() if torch_dist.is_initialized() else 0


@contextmanager
def _collective() -> Iterator[None]:
    """Where all processes must come."""
    try:
        yield
    except RuntimeError:
        raise UserError("another process of this run has ended; what it said tells why") from None


def broadcast(value: Any) -> Any:
    """The first process' value, in all."""
    values = [value]
    if size() > 1:
        with _collective():
            torch_dist.broadcast_object_list(values)
    return values[0]


def all_max(value: int) -> int:
    """The largest of all processes' values, in all."""
    if size() == 1:
        return value
    number = torch.tensor(value)
    with _collective():
        torch_dist.all_reduce(number, torch_dist.ReduceOp.MAX)
    return int(number)


def scatter_batch(x_B: Tensor) -> Tensor:
    """This process' rows of a batch."""
    return x_B if size() == 1 else x_B[rank() :: size()]


def gather_batch(x: Tensor, views: int = 1) -> Tensor:
    """The batch's rows from every process' share, for each of the views stacked in x.

    The gradient of a process' rows is that of its own loss: all processes have the same.
    """
    return x if size() == 1 else _GatherBatch.apply(x, views)


class _GatherBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, views: int) -> Tensor:
        ctx.views = views
        shares = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size())]
        with _collective():
            torch_dist.all_gather(shares, x.contiguous())
        return torch.stack([part.unflatten(0, (views, -1)) for part in shares], dim=2).flatten(0, 2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.unflatten(0, (ctx.views, -1, size()))[:, :, rank()].flatten(0, 1), None


class GatherBatch(nn.Module):
    """`whole`, as a layer between backbone and heads."""

    def __init__(self, views: int) -> None:
        super().__init__()
        self.views = views

    def forward(self, x: Tensor) -> Tensor:
        return gather_batch(x, self.views)


@torch.no_grad()
def sum_gradients(method: nn.Module) -> None:
    """Those of the student's backbone are sums over the processes' shares.

    All others are equal already; their mean keeps the processes from drifting apart by rounding.
    """
    if size() == 1:
        return
    shared = {id(p) for p in method.student.f.parameters()}  # type: ignore[union-attr]
    owners = [p for p in method.parameters() if p.grad is not None]
    gradients = [cast(Tensor, p.grad) for p in owners]
    for p, gradient in zip(owners, gradients, strict=True):
        if id(p) not in shared:
            gradient /= size()
    flat = torch.cat([gradient.flatten() for gradient in gradients])  # one message, not one for each
    with _collective():
        torch_dist.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


@torch.no_grad()
def average_statistics(module: nn.Module) -> None:
    """Batch norm's running statistics over all groups; in between, each process follows its own groups'.

    They move linearly, so that it makes no difference when the mean is taken.
    """
    if size() == 1:
        return
    for name, buffer in module.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            with _collective():
                torch_dist.all_reduce(buffer)
            buffer /= size()


def check(bn_groups: int) -> None:
    """Every process must have whole batch-norm groups, and with them equal shares of a batch."""
    if bn_groups % world_size():
        valid = [str(n) for n in range(1, bn_groups + 1) if bn_groups % n == 0]
        raise UserError(
            f"{world_size()} processes cannot share bn_groups={bn_groups}: start {' or '.join(valid)} of them, "
            f"or use another {setting('bn_groups')}"
        )
