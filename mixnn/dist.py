"""A run on several processes, started by torchrun. With one process, all of this does nothing.

    torchrun --nproc-per-node 4 -m mixnn pretrain cifar10

A process waits five minutes for the others to join, or as long as $MIXNN_JOIN_TIMEOUT says (30m, for example).

Backbones are data-parallel and everything else is replicated: process r of R encodes images r, r + R, ... of a batch,
which are whole batch-norm groups, and the features of all processes are gathered. Heads, losses, searches and support
sets are the same in every process, and random numbers are drawn for the whole batch. So a method does not need to know
about processes, and losses match a single process up to rounding.

Functions of tensors take the process group as an argument, and None means that nothing is communicated. Only the
trainer asks for `run_group()`: networks in a program that uses torch.distributed for itself do not notice it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from mixnn.config import UserError, duration_text, setting
from mixnn.processes import join_limit, meeting_point, world_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

POLL = 0.05  # seconds between two looks at who has come


def init(device: torch.device) -> None:
    """Join the process group: gloo for values on the host, NCCL for tensors on CUDA."""
    if world_size() == 1 or torch_dist.is_initialized():
        return
    try:
        store, rank = _meet(join_limit())
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        torch_dist.init_process_group(backend, store=store, rank=rank, world_size=world_size())
    except UserError:
        raise
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"WORLD_SIZE={world_size()}, but the process group cannot be joined ({str(error).splitlines()[0]}): "
            f"start the run with torchrun, or unset WORLD_SIZE"
        ) from None


def _meet(limit: float) -> tuple[Store, int]:
    """The store through which the processes find each other, and this one's rank. All of them have come, or UserError.

    torch itself would wait for half an hour, and not say for which process.
    """
    rank, host, port, is_served, attempt = meeting_point()
    is_server = rank == 0 and not is_served
    end = time.monotonic() + limit
    try:
        server = torch_dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=is_server,
            timeout=timedelta(seconds=limit),
            wait_for_workers=False,
            multi_tenant=True,
        )
        store: Store = torch_dist.PrefixStore(f"mixnn/{attempt}", server)  # type: ignore[attr-defined]
        store.set(f"rank {rank}", "here")
        while missing := [r for r in range(world_size()) if not store.check([f"rank {r}"])]:
            if time.monotonic() > end:
                raise _missing(missing, limit)
            time.sleep(POLL)
    except RuntimeError:  # torch's own timeouts and lost connections
        if is_server:
            raise
        raise _missing([0], limit) from None
    server.set_timeout(timedelta(minutes=30))  # as torch does, for the process group
    return store, rank


def _missing(ranks: list[int], limit: float) -> UserError:
    which = f"process {ranks[0]}" if len(ranks) == 1 else f"processes {', '.join(map(str, ranks))}"
    return UserError(
        f"{which} of {world_size()} did not join this run within {duration_text(limit)}, or ended before all had "
        "joined: see the error message there\nif it only needs longer, set MIXNN_JOIN_TIMEOUT=30m for all"
    )


def shutdown() -> None:
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def run_group() -> ProcessGroup | None:
    """Process group of a run that torchrun started; None with one process."""
    return torch_dist.group.WORLD if world_size() > 1 and torch_dist.is_initialized() else None


def size() -> int:
    processes = run_group()
    return 1 if processes is None else processes.size()


def rank() -> int:
    processes = run_group()
    return 0 if processes is None else processes.rank()


@contextmanager
def _collective() -> Iterator[None]:
    """Wraps a collective, so that a dead peer becomes a clear error."""
    try:
        yield
    except RuntimeError as error:
        raise UserError("another process of this run has ended; see its error message") from error


def broadcast(value: Any) -> Any:
    """The main process's value, returned on every process."""
    values = [value]
    if size() > 1:
        with _collective():
            torch_dist.broadcast_object_list(values)
    return values[0]


def gather_values(value: Any) -> list[Any]:
    """The values of all processes, by rank, returned on every process."""
    values = [value] * size()
    if size() > 1:
        with _collective():
            torch_dist.all_gather_object(values, value)
    return values


def all_max(value: int) -> int:
    """The largest value over all processes, returned on every process."""
    if size() == 1:
        return value
    number = torch.tensor(value)
    with _collective():
        torch_dist.all_reduce(number, torch_dist.ReduceOp.MAX)
    return int(number)


def scatter_batch(x_B: Tensor, group: ProcessGroup | None) -> Tensor:
    """The rows of a batch that belong to this process."""
    return x_B if group is None else x_B[group.rank() :: group.size()]


def gather_batch(x: Tensor, group: ProcessGroup | None, views: int = 1) -> Tensor:
    """The whole batch, from the rows of every process, for each of the views stacked in x.

    Backward, a process gets the gradient of its own rows; all processes compute the same loss.
    """
    return x if group is None else _GatherBatch.apply(x, group, views)


class _GatherBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, views: int) -> Tensor:
        ctx.group, ctx.views = group, views
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        with _collective():
            torch_dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack([part.unflatten(0, (views, -1)) for part in parts], dim=2).flatten(0, 2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        own = dy.unflatten(0, (ctx.views, -1, ctx.group.size()))[:, :, ctx.group.rank()].flatten(0, 1)
        return own, None, None


class GatherBatch(nn.Module):
    """`gather_batch` as a layer between backbone and heads; without a group, as it is made, it gathers nothing.

    It refuses what is not features (B, F).
    """

    def __init__(self, views: int) -> None:
        super().__init__()
        self.views = views
        self.group: ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.dim() != 2:
            raise not_features(x)
        return gather_batch(x, self.group, self.views)


def not_features(value: object) -> UserError:
    """The error for a backbone that does not return features (B, F)."""
    what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return UserError(f"the backbone must return features (B, F), and returns {what}: pool or flatten them")


def set_data_parallel(module: nn.Module, group: ProcessGroup | None) -> None:
    """Let the backbones below encode only their own process's rows of each batch, which all processes are given."""
    for part in module.modules():
        if isinstance(part, GatherBatch):
            part.group = group


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: ProcessGroup) -> None:
    """Overwrite the tensors with those of the group's first process."""
    for tensor in tensors:
        with _collective():
            torch_dist.broadcast(tensor, torch_dist.get_global_rank(group, 0), group=group)


@torch.no_grad()
def sum_gradients(module: nn.Module, data_parallel: nn.Module, group: ProcessGroup | None) -> None:
    """Sum the gradients of the data-parallel part over processes, and average all others.

    The others are equal already; their mean keeps the processes from drifting apart by rounding.
    """
    if group is None:
        return
    summed = {id(p) for p in data_parallel.parameters()}
    owners = [p for p in module.parameters() if p.grad is not None]
    gradients = [cast(Tensor, p.grad) for p in owners]
    for p, gradient in zip(owners, gradients, strict=True):
        if id(p) not in summed:
            gradient /= group.size()
    flat = torch.cat([gradient.flatten() for gradient in gradients])  # one message instead of one per tensor
    with _collective():
        torch_dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


@torch.no_grad()
def average_statistics(module: nn.Module, group: ProcessGroup | None) -> None:
    """Average batch norm's running statistics over processes; between calls each process tracks its own groups.

    The update is linear, so it does not matter when the average is taken.
    """
    if group is None:
        return
    for name, buffer in module.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            with _collective():
                torch_dist.all_reduce(buffer, group=group)
            buffer /= group.size()


def check(bn_groups: int) -> None:
    """Every process needs the same number of whole batch-norm groups."""
    if bn_groups % world_size():
        valid = [str(n) for n in range(1, bn_groups + 1) if bn_groups % n == 0]
        raise UserError(
            f"{world_size()} processes cannot share bn_groups={bn_groups}: start {' or '.join(valid)} of them, "
            f"or use another {setting('bn_groups')}"
        )
