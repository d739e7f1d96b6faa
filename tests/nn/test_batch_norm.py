"""The CUDA kernels of batch norm against plain PyTorch; without a GPU they run in Triton's interpreter."""

import importlib.util
import os

import pytest
import torch

from mixnn.nn import batch_norm_plain as plain
from mixnn.nn.batch_norm import batch_norm

if not importlib.util.find_spec("triton"):
    pytest.skip("triton is not installed", allow_module_level=True)
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
from mixnn.nn import batch_norm_kernels as kernels  # noqa: E402  (reads TRITON_INTERPRET

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array")  # the interpreter's, with numpy before 2.4
DEVICE = "cuda" if CUDA else "cpu"
EPS = 1e-5
FORMS = [(False, False), (False, True), (True, True)]  # residual, ReLU
LAYOUTS = [  # images, channels, side (0: vectors), views, groups; pixels that do and do not fill tiles
    (8, 32, 3, 1, 1),
    (16, 64, 5, 2, 4),
    (24, 96, 4, 3, 2),
    (12, 128, 0, 2, 1),
    (8, 64, 16, 1, 2),
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


@pytest.fixture(autouse=True)
def more_than_one_tile_a_program(monkeypatch):
    monkeypatch.setattr(kernels, "ROWS", 16)
    monkeypatch.setattr(kernels, "SUM_ROWS", 16)
    monkeypatch.setattr(kernels, "SUM_PROGRAMS", 3)
    monkeypatch.setattr(kernels, "TOTAL_CHUNKS", 2)


def close(ours, want, dtype=torch.float32):
    tolerance = 2e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(ours, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("residual, relu", FORMS)
@pytest.mark.parametrize("images, channels, side, views, groups", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_equal_plain_torch(images, channels, side, views, groups, residual, relu, dtype):
    x, extra, dy, weight, bias = tensors(images, channels, side, dtype)
    args = (x, extra if residual else None, weight, bias, views, groups, EPS, relu)
    y, stats = kernels.forward(*args)
    want_y, want_stats = plain.forward(*args)
    close(y, want_y, dtype)
    close(stats, want_stats)
    assert y.stride() == x.stride()
    saved = want_y if residual else None
    grads = kernels.backward(dy, x, saved, want_stats, weight, bias, views, groups, EPS, relu)
    wants = plain.backward(dy, x, saved, want_stats, weight, bias, views, groups, EPS, relu)
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
    batch_norm(x, extra, weight, bias, 2, 4, EPS, True)
    assert calls == [1]


@pytest.mark.parametrize("channels, num_groups", [(32, 1), (96, 6)])
def test_the_tracking_kernel_equals_plain_torch(channels, num_groups):
    rng = torch.Generator().manual_seed(0)
    stats, shares = torch.rand(2, num_groups, channels, generator=rng), torch.rand(num_groups, generator=rng)
    running = [torch.rand(2, channels, generator=rng).to(DEVICE) for _ in range(2)]
    running[1].copy_(running[0])
    for module, (mean, var) in zip((kernels, plain), running, strict=True):
        module.track(stats.to(DEVICE), shares.to(DEVICE), mean, var, 0.19, 1.1)
    close(*running)
