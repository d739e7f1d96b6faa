from __future__ import annotations

import threading

import pytest
import torch

from mixnn.device import _KernelCompiler, compiling_in_parallel


def test_kernels_compile_in_parallel_without_a_launch_and_from_every_thread(monkeypatch):
    jit = pytest.importorskip("triton.runtime.jit")
    compiling = pytest.importorskip("triton.runtime._async_compile")
    runs = []

    def run(kernel, *args, grid, warmup, **options):
        runs.append((kernel, args, grid, warmup, options, compiling.active_mode.get() is not None))

    monkeypatch.setattr(jit.JITFunction, "run", run)
    kernel = jit.JITFunction(test_kernels_compile_in_parallel_without_a_launch_and_from_every_thread)
    with compiling_in_parallel(torch.device("cpu")):
        kernel[(1,)](1, num_warps=4)
        thread = threading.Thread(target=lambda: kernel[(1,)](2))
        thread.start()
        thread.join()
    kernel[(1,)](3)
    assert runs == [
        (kernel, (1,), (1,), True, {"num_warps": 4}, True),
        (kernel, (2,), (1,), True, {}, True),
        (kernel, (3,), (1,), False, {}, False),
    ]


def test_what_no_kernel_has_written_is_a_valid_index_or_noise():
    pytest.importorskip("triton")
    state = torch.get_rng_state()
    like = torch.ones(3, dtype=torch.float64)
    with compiling_in_parallel(torch.device("cpu")):
        made = torch.empty(1000, dtype=torch.long), like.new_empty(1000), torch.empty_like(like, dtype=torch.int32)
    assert not made[0].any()
    assert not made[2].any()
    assert 0.9 < made[1].std() < 1.1
    assert torch.equal(torch.get_rng_state(), state)


def test_kernels_are_compiled_in_threads_and_errors_come_later():
    def fails():
        raise ValueError("no kernel")

    with _KernelCompiler(torch.device("cpu")) as threads:
        kernel, failed = threads.submit(lambda: "kernel"), threads.submit(fails)
    assert kernel.result() == "kernel"
    with pytest.raises(ValueError, match="no kernel"):
        failed.result()
