"""The CUDA kernels of batch norm against plain PyTorch: on a GPU, or else in Triton's interpreter.

The interpreter is chosen by an environment variable when Triton is imported, for the whole process. So without a GPU
one test runs this file in a process of its own, where the others are not skipped.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from mixnn.nn import batch_norm

if not importlib.util.find_spec("triton"):
    pytest.skip("triton is not installed", allow_module_level=True)
CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if CUDA or INTERPRETED:
    from mixnn.nn import batch_norm_kernels as kernels

runs_kernels = pytest.mark.skipif(not CUDA and not INTERPRETED, reason="run in the interpreter, in another process")
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array")  # the interpreter's, with numpy before 2.4
DEVICE = "cuda" if CUDA else "cpu"
EPS = 1e-5
FORMS = [(False, False), (False, True), (True, True)]  # residual, ReLU
LAYOUTS = [  # images, channels, side (0: vectors), views, groups; pixels that do and do not fill tiles
    (8, 32, 3, 1, 1),
    (8, 64, 5, 2, 2),
    (6, 96, 3, 3, 2),
    (12, 128, 0, 2, 1),
    (2, 64, 9, 1, 2),
]


def tensors(images, channels, side, dtype=torch.float32):
    """x, residual, dy in channels_last, weight and bias."""
    rng = torch.Generator().manual_seed(0)
    shape = (images, channels, side, side) if side else (images, channels)
    maps = [torch.randn(shape, generator=rng) * (1 + i) + i for i in range(3)]
    if side:
        maps = [m.contiguous(memory_format=torch.channels_last) for m in maps]
    vectors = [torch.rand(channels, generator=rng) - 0.5 * i for i in range(2)]
    return [m.to(DEVICE, dtype) for m in maps] + [v.to(DEVICE) for v in vectors]


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles per program, and several rounds of partial sums, with small tensors."""
    monkeypatch.setattr(kernels, "FORWARD", kernels.Tile(32, 32, 4, 2))
    monkeypatch.setattr(kernels, "BACKWARD", kernels.Tile(16, 64, 4, 2))
    monkeypatch.setattr(kernels, "SUMS", kernels.Tile(16, 64, 4, 2))
    monkeypatch.setattr(kernels, "SUM_PROGRAMS", 3)


def close(ours, want, dtype=torch.float32):
    tolerance = 2e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(ours, want, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernels run in this process")
def test_kernels_equal_plain_torch_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{2 * len(FORMS) * len(LAYOUTS) + 2} passed" in done.stdout


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("residual, relu", FORMS)
@pytest.mark.parametrize("images, channels, side, views, groups", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_equal_plain_torch(images, channels, side, views, groups, residual, relu, dtype):
    x, extra, dy, weight, bias = tensors(images, channels, side, dtype)
    args = (x, extra if residual else None, weight, bias, views, groups, EPS, relu)
    y, stats, _ = kernels.forward(*args)
    want_y, want_stats = batch_norm.plain_forward(*args)
    close(y, want_y, dtype)
    close(stats, want_stats)
    assert y.stride() == x.stride()
    saved = want_y if residual else None
    grads = kernels.backward(dy, None, x, saved, want_stats, weight, bias, views, groups, EPS, relu)
    wants = batch_norm.plain_backward(dy, None, x, saved, want_stats, weight, bias, views, groups, EPS, relu)
    for ours, want in zip(grads[:2], wants[:2], strict=True):
        close(ours, want, dtype)
    torch.testing.assert_close(grads[2], wants[2], rtol=1e-4, atol=1e-3)  # sums, not means


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operator_uses_the_kernels_on_a_gpu(dtype, monkeypatch):
    x, extra, _, weight, bias = tensors(16, 64, 5, dtype)
    calls = []
    real = kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *args: calls.append(1) or real(*args))
    batch_norm.batch_norm(x, extra, weight, bias, 2, 4, EPS, True)
    assert calls == [1]


@runs_kernels
@pytest.mark.parametrize("channels, num_groups", [(32, 1), (96, 6)])
def test_the_kernel_of_running_statistics_equals_plain_torch(channels, num_groups):
    rng = torch.Generator().manual_seed(0)
    stats, weights = torch.rand(2, num_groups, channels, generator=rng), torch.rand(num_groups, generator=rng)
    running = [torch.rand(2, channels, generator=rng).to(DEVICE) for _ in range(2)]
    running[1].copy_(running[0])
    updates = (kernels.update_running_stats, batch_norm.plain_update_running_stats)
    for update, (mean, var) in zip(updates, running, strict=True):
        update(stats.to(DEVICE), weights.to(DEVICE), mean, var, 0.19, 1.1)
    close(*running)
