"""The device of a run: random numbers, a second CUDA stream, parallel compiling, asynchronous scalars and autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from mixnn import processes
from mixnn.config import UserError, setting


def pick_device(name: str) -> torch.device:
    """The device called `name`; auto is CUDA if available, else the CPU. Each process gets its own CUDA device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}; valid: auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported; valid: auto, cpu, cuda, cuda:N")
    if device.type == "cuda":
        device = _pick_cuda(name, processes.local_rank() if device.index is None else device.index)
    return device


def _pick_cuda(name: str, index: int) -> torch.device:
    if processes.world_size() > 1 and ":" in name:
        raise UserError(
            f"device {name!r} is one device, and each process needs its own: use {setting('device', 'cuda')}"
        )
    if index >= torch.cuda.device_count():
        which = f"device {name!r}" if index == 0 or ":" in name else f"a CUDA device for process {index}"
        seen = f"torch sees {torch.cuda.device_count()} CUDA devices"
        raise UserError(f"{which} is not there: {seen}; use {setting('device', 'cpu')}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)  # streams and graphs belong to the current device
    return device


@contextmanager
def seeded_generators(device: torch.device, *numbers: int) -> Iterator[None]:
    """Seed torch's default generators with these numbers inside the block; afterwards they are as they were.

    These are the generators of the CPU and of the device. Their states are on the host, so nothing waits for a device.
    Not for use while a CUDA graph is captured.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        yield


@contextmanager
def side_stream(device: torch.device, *tensors: torch.Tensor) -> Iterator[None]:
    """Run the work queued inside in parallel with what follows, until `wait_side_stream`. On a CPU it simply runs.

    `tensors` are those that the work reads and that may be freed before it ends. What the work makes may be freed at
    any time after the wait, because later work here waits for what was queued before it.

    Under torch.compile this does nothing: the compiler orders its work itself.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        yield
        return
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    _in_use.add(device)
    for tensor in tensors:
        tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        yield


def wait_side_stream(device: torch.device) -> None:
    """Make what follows wait for the work on the side stream, if there is any.

    A CUDA graph that is being captured could not wait for a stream that is not a part of it.
    """
    if torch.compiler.is_compiling():
        return
    if device in _in_use:
        _in_use.discard(device)
        torch.cuda.current_stream(device).wait_stream(_side_stream(device))
    _kept_alive.pop(device, None)


def keep_alive(tensor: torch.Tensor) -> None:
    """Keep a tensor that the side stream reads alive until the next `wait_side_stream`.

    Without a second reference, autograd might add another gradient to it in place. On a CPU this does nothing.
    """
    if tensor.is_cuda and not torch.compiler.is_compiling():
        _kept_alive.setdefault(tensor.device, []).append(tensor)


_in_use: set[torch.device] = set()  # devices whose side stream has work that nothing waited for yet
_kept_alive: dict[torch.device, list[torch.Tensor]] = {}


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def compiling_in_parallel(device: torch.device) -> Iterator[None]:
    """Compile and load the Triton kernels that the block uses, many at a time, without launching them.

    Kernels do not run, so all numbers computed inside are meaningless. This holds for every thread of the process. A
    kernel that cannot be compiled fails later, when it is launched.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.jit import JITFunction
    except ImportError:  # no Triton, or one without these: kernels compile when they are launched, one by one
        yield
        return
    with _KernelCompiler(device) as threads, AsyncCompileMode(threads, ignore_errors=True):
        context = copy_context()  # the mode is the calling thread's, and autograd's threads launch kernels too

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            del warmup
            context.copy().run(run, kernel, *args, grid=grid, warmup=True, **options)

        run = JITFunction.run
        with patch.object(JITFunction, "run", compile_only), _FillNewMemory(device):
            yield


class _KernelCompiler(ThreadPoolExecutor):
    """Threads that compile kernels and also load them, for which Triton calls a C compiler."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(initializer=_set_device, initargs=(device,))
        self.device = device

    def submit(self, compile_kernel: Callable[[], Any]) -> Any:  # type: ignore[override]
        return super().submit(self._load, compile_kernel)

    def _load(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        if self.device.type == "cuda":
            getattr(kernel, "run")  # noqa: B009 (a property that loads the kernel)
        return kernel


def _set_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


class _FillNewMemory(TorchFunctionMode):
    """Mode in which new memory is filled: indices with 0, which is valid, other numbers with noise.

    Zeros would mislead cuDNN, which may be choosing the fastest algorithms: the GPU is faster on zeros. Inside custom
    operators and in backward passes, memory is left as it is, because torch does not ask this class there.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.generator = torch.Generator(device).manual_seed(0)  # torch's own must not notice

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **kwargs or {})
        is_new = func in (torch.empty, torch.empty_like, torch.Tensor.new_empty)
        if not is_new or torch.compiler.is_compiling() or result.device != self.generator.device:
            return result
        return result.normal_(generator=self.generator) if result.dtype in _FLOATS else result.zero_()


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class AsyncScalar:
    """A number that the host reads later, without waiting for what is queued on the device in the meantime."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if value.is_cuda else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(value.device))

    def item(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._value.item())


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Turn the caller's autocast off; do nothing where there is none."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()
