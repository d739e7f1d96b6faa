"""A run on several processes, started by torchrun. With one process, all of this does nothing.

    torchrun --nproc-per-node 4 -m mixnn pretrain cifar10

A process waits five minutes for the others to join, or as long as $MIXNN_JOIN_TIMEOUT says (30m, for example). If one
ends, the others end too, with its reason; so they do if one has sent no heartbeat for a minute, or for
$MIXNN_PEER_TIMEOUT.

Backbones are data-parallel and everything else is replicated: process r of R encodes images r, r + R, ... of a batch,
which are whole batch-norm groups, and the features of all processes are gathered. Heads, losses, searches and support
sets are the same in every process, and random numbers are drawn for the whole batch. So a method does not need to know
about processes, and losses match a single process up to rounding.

No image is sent: a view is a function of an image and its random numbers, so each process makes the rows of a view that
its own networks encode (`PartialBatch`). Features and gradients are all that a step exchanges (docs/scaling.md).

Functions of tensors take the process group as an argument, and None means that nothing is communicated. Only the
trainer asks for `run_group()`: networks in a program that uses torch.distributed for itself do not notice it.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mixnn.config import UserError, duration_text, setting
from mixnn.processes import is_main_process, join_limit, peer_limit, read_rendezvous, world_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

if torch_dist.is_available() and not torch_dist.is_initialized():
    # torch imports this module when a model is first parallelized. Its functions then hold the process group as the
    # default of an argument, so that the group outlives `destroy_process_group` and its threads may abort the process
    # at exit ("terminate called without an active exception"). Imported earlier, they hold none. Seen with torch 2.13.
    import torch.distributed.nn

POLL = 0.05  # seconds between two checks of which processes have joined
HEARTBEAT_INTERVAL = 1.0  # seconds
HEARTBEAT_TIMEOUT = 4.0  # seconds; a silent process is dead if a message to it has failed as well
GRACE = 10.0  # seconds in which a process should end by itself, once another has
ENDED = "ended "  # marks the reason, which may be empty
_all_gather = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor  # its older name
BUCKET_BYTES = 2**24  # of gradients in one message: large enough for full speed, small enough to overlap with backward


def init(device: torch.device) -> None:
    """Join the process group: gloo for values on the host, NCCL for tensors on CUDA."""
    if world_size() == 1 or torch_dist.is_initialized():
        return
    global _peers
    try:
        limit, (store, rank) = peer_limit(), _rendezvous(join_limit())
        _peers = Peers(store, rank, world_size(), limit)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        torch_dist.init_process_group(backend, store=store, rank=rank, world_size=world_size())
    except UserError:
        raise
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"WORLD_SIZE={world_size()}, but the process group cannot be joined ({str(error).splitlines()[0]}): "
            f"start the run with torchrun, or unset WORLD_SIZE"
        ) from None


def _rendezvous(limit: float) -> tuple[Store, int]:
    """Join the other processes; return the store they share, and this one's rank. UserError if some are missing.

    torch itself would wait for half an hour, and not say for which process.
    """
    rank, host, port, is_served, attempt = read_rendezvous()
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
        for key in (f"beat {rank}", f"end {rank}"):  # before the others look for them, see Peers
            store.set(key, "")
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


class PeerEnded(UserError):
    """Another process of this run has ended, so this one cannot go on."""


class Peers:
    """Record of which processes of the run are alive, and why others have ended.

    A thread sends a heartbeat every second, and reads those of the others. A process that waits for a dead one,
    in a message or for a device, cannot notice that itself: this thread then ends it.
    """

    def __init__(self, store: Store, rank: int, size: int, limit: float) -> None:
        self.store, self.rank, self.size, self.limit = store, rank, size, limit
        self.heard = dict.fromkeys(range(size), time.monotonic())  # when each process last sent a heartbeat
        self.beats = dict.fromkeys(range(size), b"")
        self.ends: dict[int, str] = {}  # rank -> why it has ended; "" if it had nothing more to do
        self.stopped = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        number, late = 0, 0.0
        while not self.stopped.wait(HEARTBEAT_INTERVAL):
            number += 1
            with suppress(RuntimeError):  # who holds the store has ended, and is silent
                self.store.set(f"beat {self.rank}", str(number))
                self._read_heartbeats()
            reason = self.reason(self.limit)
            late = late + HEARTBEAT_INTERVAL if reason else 0.0
            if late > GRACE and not self.stopped.is_set():  # the main thread should have noticed
                sys.stderr.write(f"mixnn: {reason}\n")
                sys.stderr.flush()
                os._exit(2)

    def _read_heartbeats(self) -> None:
        others = [r for r in range(self.size) if r not in self.ends]
        found = self.store.multi_get([f"{what} {r}" for what in ("beat", "end") for r in others])
        for r, beat, end in zip(others, found[: len(others)], found[len(others) :], strict=True):
            if beat != self.beats[r]:
                self.beats[r], self.heard[r] = beat, time.monotonic()
            if end:
                self.ends[r] = end.decode().removeprefix(ENDED)

    def reason(self, limit: float) -> str:
        """Reason the run must stop, or an empty string.

        A process without a heartbeat for `limit` seconds counts as dead.
        """
        for r, why in self.ends.items():
            if why and r != self.rank:
                return f"process {r} of {self.size} has ended: {why}"
        now = time.monotonic()
        silent = [r for r, heard in self.heard.items() if r not in self.ends and now - heard > limit]
        if not silent or self.rank in silent:  # a process that hears nothing of itself was suspended, or has no store
            return "process 0 or torchrun has exited" if len(silent) == self.size else ""
        if len(silent) == 1:
            which, fate = f"process {silent[0]}", "it was probably killed, or its machine was lost"
        else:
            which = f"processes {', '.join(map(str, silent))}"
            fate = "they were probably killed, or their machines were lost"
        return f"no heartbeat from {which} of {self.size}: {fate}"

    def wait_for_reason(self) -> str:
        """Wait a little until `reason` is known, after a message has failed."""
        end = time.monotonic() + 2 * HEARTBEAT_TIMEOUT
        while not (reason := self.reason(HEARTBEAT_TIMEOUT)) and time.monotonic() < end:
            time.sleep(POLL)
        return reason or "another process of this run has ended; see its error message"

    def leave(self, why: str) -> None:
        """Tell the others. If this process holds the store, it waits until they know."""
        self.stopped.set()
        with suppress(RuntimeError):
            self.store.set(f"end {self.rank}", ENDED + why)
            end = time.monotonic() + HEARTBEAT_TIMEOUT
            while why and self.rank == 0 and len(self.ends) < self.size and time.monotonic() < end:
                time.sleep(POLL)
                self._read_heartbeats()


_peers: Peers | None = None  # of this process's run


def leave(why: str) -> None:
    """Tell the other processes that this one ends, and why. After GRACE seconds it does, even if a device is busy."""
    if _peers is None:  # it has not joined a run
        return
    _peers.leave(why)
    timer = threading.Timer(GRACE, os._exit, (2,))
    timer.daemon = True
    timer.start()


def shutdown() -> None:
    global _peers
    if _peers is not None:
        _peers.leave("")
        _peers = None
    if torch_dist.is_initialized():
        gc.collect()  # NCCL waits for captured steps that hold its messages, and they are parts of reference cycles
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
    """Wrap a collective, so that a dead peer becomes a clear error."""
    try:
        yield
    except RuntimeError as error:
        if _peers is None:
            raise
        raise PeerEnded(_peers.wait_for_reason()) from error


def broadcast(value: Any) -> Any:
    """The main process's value, returned on every process."""
    values = [value]
    if size() > 1:
        with _collective():
            torch_dist.broadcast_object_list(values)
    return values[0]


@contextmanager
def main_process_first() -> Iterator[None]:
    """The main process carries out the block before all others, which may then use what it has made."""
    if not is_main_process():
        broadcast(None)
    yield
    if is_main_process():
        broadcast(None)


def gather_values(value: Any) -> list[Any]:
    """The values of all processes, by rank, returned on every process."""
    values = [value] * size()
    if size() > 1:
        with _collective():
            torch_dist.all_gather_object(values, value)
    return values


def all_max(value: int) -> int:
    """The largest value over all processes, returned on every process."""
    return _all_reduce_int(value, torch_dist.ReduceOp.MAX)


def all_sum(value: int) -> int:
    """The sum over all processes, returned on every process."""
    return _all_reduce_int(value, torch_dist.ReduceOp.SUM)


def _all_reduce_int(value: int, how: Any) -> int:
    if size() == 1:
        return value
    number = torch.tensor(value)
    with _collective():
        torch_dist.all_reduce(number, how)
    return int(number)


class PartialBatch:
    """A view whose rows are computed on demand: `x[rows]` computes only these.

    Functions and methods of tensors compute all rows. That is correct, but each process then does the work of all.
    """

    def __init__(self, make_rows: Callable[[Tensor], Tensor], shape: Sequence[int], device: torch.device) -> None:
        self.make_rows, self.shape, self.device = make_rows, torch.Size(shape), device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.make_rows(rows)

    def whole(self) -> Tensor:
        return self.make_rows(torch.arange(len(self), device=self.device))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(PartialBatch, PartialBatch.whole, (args, kwargs or {}))
        return function(*args, **kwargs)


def own_rows(batch_size: int, group: ProcessGroup | None, device: torch.device | None = None) -> Tensor:
    """Numbers of the rows of a batch that belong to this process."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    return torch.arange(rank, batch_size, size, device=device)


def scatter_batch(x_B: Tensor | PartialBatch, group: ProcessGroup | None) -> Tensor:
    """The rows of a batch that belong to this process."""
    if isinstance(x_B, PartialBatch):
        return x_B[own_rows(len(x_B), group, x_B.device)]
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
        whole = x.new_empty(group.size(), *x.shape)
        with _collective():
            _all_gather(whole.flatten(0, 1), x.contiguous(), group=group)
        return whole.unflatten(1, (views, -1)).movedim(0, 2).flatten(0, 2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        own = dy.unflatten(0, (ctx.views, -1, ctx.group.size()))[:, :, ctx.group.rank()].flatten(0, 1)
        return own, None, None


@torch.no_grad()
def gather_chunks(own: list[Tensor], num_rows: int, chunk: int, device: torch.device, group: ProcessGroup) -> Tensor:
    """All rows (num_rows, F), from the chunks of every process, which took turns with them: r, r + R, ..."""
    width = all_max(own[0].shape[1] if own else 0)  # a process may have had no chunk
    whole = torch.zeros(num_rows, width, device=device)
    for rows, part in zip(whole.split(chunk)[group.rank() :: group.size()], own, strict=True):
        rows.copy_(part)
    with _collective():
        torch_dist.all_reduce(whole, group=group)  # of rows that are zero in all processes but one
    return whole


class GatherBatch(nn.Module):
    """`gather_batch` as a layer between backbone and heads.

    Does nothing until `set_data_parallel` gives it a process group. UserError unless the input is features (B, F).
    """

    def __init__(self, views: int) -> None:
        super().__init__()
        self.views = views
        self.group: ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        return gather_batch(check_features(x), self.group, self.views)


def check_features(x: Any, rows: int | None = None, backbone: str = "backbone") -> Tensor:
    """The features (B, F) that a backbone returned, B being `rows` if given; UserError for anything else."""
    if isinstance(x, Tensor) and x.dim() == 2 and rows in (None, len(x)):
        return x
    what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
    raise UserError(f"the {backbone} must return features (B, F), and returns {what}: pool or flatten them")


def set_data_parallel(module: nn.Module, group: ProcessGroup | None) -> None:
    """Make each backbone in `module` encode only this process's rows. Every process must pass the same whole batch."""
    for part in module.modules():
        if isinstance(part, GatherBatch):
            part.group = group


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: ProcessGroup) -> None:
    """Overwrite the tensors with those of the group's first process."""
    for tensor in tensors:
        with _collective():
            torch_dist.broadcast(tensor, torch_dist.get_global_rank(group, 0), group=group)


class Bucket:
    """Parameters whose gradients are summed in one message, and the memory for it."""

    def __init__(self, parameters: list[nn.Parameter], divisor: int) -> None:
        self.parameters, self.divisor = parameters, divisor
        sizes = [p.numel() for p in parameters]
        self.flat = parameters[0].detach().new_zeros(sum(sizes))
        # in the memory order of the parameters, so that copies and the optimizer are plain loops
        parts = zip(self.flat.split(sizes), parameters, strict=True)
        self.slices = [part.as_strided(p.shape, p.stride(), part.storage_offset()) for part, p in parts]
        self.num_ready = 0
        self.message: Any = None  # torch's handle of the all-reduce, once it was sent

    @property
    def num_learning(self) -> int:
        return sum(p.requires_grad for p in self.parameters)

    @torch.no_grad()
    def send(self, group: ProcessGroup) -> None:
        if self.num_learning == 0:
            return
        found = [(total, p.grad) for total, p in zip(self.slices, self.parameters, strict=True) if p.grad is not None]
        if len(found) < len(self.slices):  # a part of the networks that this loss does not use
            self.flat.zero_()
        if found:
            torch._foreach_copy_([total for total, _ in found], [gradient for _, gradient in found])
        if self.divisor > 1:
            self.flat /= self.divisor
        with _collective():
            self.message = torch_dist.all_reduce(self.flat, group=group, async_op=True)

    def finish(self) -> None:
        if self.message is None:
            return
        with _collective():
            self.message.wait()
        for p, total in zip(self.parameters, self.slices, strict=True):
            p.grad = None if p.grad is None else total
        self.message, self.num_ready = None, 0


class GradientSum:
    """Sums gradients over processes while the backward pass is still running; call `finish` after it.

    Gradients of the data-parallel part are added up. All others are equal already, and their mean keeps the processes
    from drifting apart by rounding. Parameters are divided into buckets in the order in which a backward pass reaches
    them, and each bucket is sent when its last gradient is there. Buckets are sent in this order in every process,
    whichever is complete first. A bucket whose parameters do not learn at the time is not sent: all processes must
    freeze the same parameters in the same step.
    """

    def __init__(
        self, module: nn.Module, data_parallel: nn.Module, group: ProcessGroup, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.group = group
        summed = {id(p) for p in data_parallel.parameters()}
        parameters = [p for p in reversed([*module.parameters()]) if p.requires_grad]
        self.buckets: list[Bucket] = []
        for is_summed, part in groupby(parameters, lambda p: id(p) in summed):
            for some in split_by_bytes(part, bucket_bytes):
                self.buckets.append(Bucket(some, 1 if is_summed else group.size()))
        self.num_sent = 0
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(partial(self._ready, bucket))

    def _ready(self, bucket: Bucket, _: Tensor) -> None:
        bucket.num_ready += 1
        while self.num_sent < len(self.buckets):
            first = self.buckets[self.num_sent]
            if first.num_ready < first.num_learning:
                break
            self._send_next()

    def _send_next(self) -> None:
        self.buckets[self.num_sent].send(self.group)
        self.num_sent += 1

    def finish(self) -> None:
        """Send what is left, and replace each gradient by its sum."""
        while self.num_sent < len(self.buckets):  # a bucket with a parameter that got no gradient
            self._send_next()
        for bucket in self.buckets:
            bucket.finish()
        self.num_sent = 0


def split_by_bytes(parameters: Iterable[nn.Parameter], num_bytes: int) -> Iterator[list[nn.Parameter]]:
    """The parameters in order, in lists of at most num_bytes; a larger parameter is alone.

    Those in a list have the same type, and all of them learn or none does.
    """
    for _, alike in groupby(parameters, lambda p: (p.dtype, p.requires_grad)):
        some: list[nn.Parameter] = []
        for p in alike:
            if some and sum(q.nbytes for q in some) + p.nbytes > num_bytes:
                yield some
                some = []
            some.append(p)
        yield some


@torch.no_grad()
def average_statistics(module: nn.Module, group: ProcessGroup | None) -> None:
    """Average batch norm's running statistics over processes; between calls each process tracks its own groups.

    The update is linear, so it does not matter when the average is taken.
    """
    if group is None:
        return
    tracked = [b for name, b in module.named_buffers() if name.endswith(("running_mean", "running_var"))]
    if not tracked:
        return
    flat = torch.cat([buffer.flatten() for buffer in tracked])  # one message instead of one per layer
    with _collective():
        torch_dist.all_reduce(flat, group=group)
    flat /= group.size()
    for buffer, mean in zip(tracked, flat.split([b.numel() for b in tracked]), strict=True):
        buffer.copy_(mean)


def check_bn_groups(bn_groups: int) -> None:
    """Every process needs the same number of whole batch-norm groups."""
    if bn_groups % world_size():
        valid = [str(n) for n in range(1, bn_groups + 1) if bn_groups % n == 0]
        raise UserError(
            f"{world_size()} processes cannot share bn_groups={bn_groups}: start {' or '.join(valid)} of them, "
            f"or use another {setting('bn_groups')}"
        )
