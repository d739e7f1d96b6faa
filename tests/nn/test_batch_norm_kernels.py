"""The CUDA kernels of batch norm against plain PyTorch: on a GPU, or else in Triton's interpreter."""

import pytest
import torch

from mixnn.nn import batch_norm
from mixnn.nn.batch_norm import SplitBatchNorm, set_views
from tests.interpreter import CUDA, DEVICE, INTERPRETED, runs_kernels

if CUDA or INTERPRETED:
    from mixnn.nn import batch_norm_kernels as kernels

EPS = 1e-5
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2**-9, torch.bfloat16: 2**-7}
FORMS = [  # residual, ReLU, two gradients
    (False, False, False),
    (False, True, True),
    (True, True, False),
    (True, True, True),
    (True, False, False),
]
LAYOUTS = [  # images, channels, side (0: vectors), views, groups; pixels that do and do not fill tiles
    (8, 32, 3, 1, 1),
    (8, 64, 5, 2, 2),
    (6, 96, 3, 3, 2),
    (12, 128, 0, 2, 1),
    (2, 64, 9, 1, 2),
    (8, 64, 8, 1, 2),
]


CASES = [  # every layout with one form in float32 and with another in bf16
    (layout, FORMS[(i + 3 * j) % len(FORMS)], dtype)
    for i, layout in enumerate(LAYOUTS)
    for j, dtype in enumerate((torch.float32, torch.bfloat16))
]


def tensors(images, channels, side, dtype=torch.float32):
    """x, residual, dy and dy2 in channels_last, weight and bias. Gradients are quarters, so that their sum is exact."""
    rng = torch.Generator().manual_seed(0)
    shape = (images, channels, side, side) if side else (images, channels)
    maps = [torch.randn(shape, generator=rng) * (1 + i) + i for i in range(4)]
    maps[2:] = [m.mul(4).round().div(4).clamp(-15, 15) for m in maps[2:]]
    if side:
        maps = [m.contiguous(memory_format=torch.channels_last) for m in maps]
    vectors = [torch.rand(channels, generator=rng) - 0.5 * i for i in range(2)]
    return [m.to(DEVICE, dtype) for m in maps] + [v.to(DEVICE) for v in vectors]


@pytest.fixture
def small_tiles(monkeypatch):
    """Several chunks per cell, of different sizes, and several tiles per chunk, with small tensors."""
    monkeypatch.setattr(kernels, "SUM_ROWS", 16)
    monkeypatch.setattr(kernels, "SUM_PROGRAMS", 4)
    monkeypatch.setattr(kernels, "FORWARD", kernels.Tiles(alone=0, rows=64, warps=4))
    monkeypatch.setattr(kernels, "RESIDUAL", kernels.Tiles(alone=0, rows=32, warps=4))
    monkeypatch.setattr(kernels, "BACKWARD", kernels.Tiles(alone=0, rows=128, warps=4))


def close(ours, want, dtype=torch.float32):
    torch.testing.assert_close(ours, want, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def compare(layout, form, dtype):
    """Forward and backward against plain PyTorch; returns everything that the kernels computed."""
    (images, channels, side, views, groups), (residual, relu, two) = layout, form
    bits = residual and relu  # as backward needs them
    x, extra, dy, dy2, weight, bias = tensors(images, channels, side, dtype)
    args = (x, extra if residual else None, weight, bias, views, groups, EPS, relu)
    y, stats, signs = kernels.forward(*args)
    want_y, want_stats = batch_norm.plain_forward(*args)
    close(y, want_y, dtype)
    close(stats, want_stats)
    assert y.stride() == x.stride()
    assert signs.numel() == (y.numel() // 8 if bits else 0)
    args = (stats, weight, bias, views, groups, EPS, relu)
    grads = kernels.backward(dy, dy2 if two else None, x, signs if bits else None, *args)
    wants = batch_norm.plain_backward(dy, dy2 if two else None, x, y if bits else None, *args)
    for ours, want in zip(grads[:2], wants[:2], strict=True):
        close(ours, want, dtype)
    torch.testing.assert_close(grads[2], wants[2], rtol=1e-4, atol=1e-3)  # sums, not means
    return y, stats, signs, *grads


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("layout, form, dtype", CASES, ids=str)
def test_kernels_equal_plain_torch(layout, form, dtype):
    compare(layout, form, dtype)


@runs_kernels
@pytest.mark.parametrize("layout, form, dtype", [(a, b, torch.float16) for a, b, _ in CASES[::2]], ids=str)
def test_kernels_equal_plain_torch_if_a_cell_is_one_tile(layout, form, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "bn_sum_kernel", None)  # not needed
    monkeypatch.setattr(kernels, "bn_sum_slope_kernel", None)
    compare(layout, form, dtype)


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
def test_moments_come_from_the_sums_of_a_convolution_if_its_parts_do_not_cross_views(monkeypatch):
    x, _, _, _, weight, bias = tensors(24, 64, 5)
    of_pairs = torch.stack([x, x * x]).sum((3, 4)).view(2, 6, 2, 2, 64).sum(2).view(2, 12, 64)  # images n and n + 2
    for views, used in ((3, True), (4, False)):
        args = x, None, weight, bias, views, 2, EPS, True
        want = batch_norm.plain_forward(*args)
        with monkeypatch.context() as patch:
            if used:
                patch.setattr(kernels, "bn_sum_kernel", None)  # not needed
            y, stats, _ = kernels.forward(*args, of_pairs)
        close(stats, want[1])
        close(y, want[0])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("layout", [(64, 64, 8, 2, 2), (16, 512, 16, 1, 8), (64, 32, 16, 1, 1)], ids=str)
def test_replays_of_a_graph_of_two_streams_give_the_bits_of_the_first_call(layout):
    wants = compare(layout, FORMS[2], torch.bfloat16)
    images, channels, side, views, groups = layout
    x, extra, dy, _, weight, bias = tensors(images, channels, side, torch.bfloat16)

    def run():
        y, stats, signs = kernels.forward(x, extra, weight, bias, views, groups, EPS, True)
        rest = x, signs, stats, weight, bias, views, groups, EPS, True
        return y, stats, signs, *kernels.backward(dy, None, *rest)

    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            outputs = run()
        outputs += run()
        torch.cuda.current_stream().wait_stream(other)
    for _ in range(50):
        for t in outputs:
            t.zero_()
        graph.replay()
        assert all(map(torch.equal, outputs, [*wants, *wants]))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_streams_have_their_own_counters_which_are_kept_for_graphs(monkeypatch):
    monkeypatch.setattr(kernels, "_counters_of", {})
    device, streams = torch.device("cuda", torch.cuda.current_device()), [torch.cuda.Stream() for _ in range(2)]
    rows = []
    for stream in [*streams, *streams]:
        with torch.cuda.stream(stream):
            rows.append(kernels.zeroed_counters(device, 8).data_ptr())
    assert rows[:2] == rows[2:]
    assert rows[0] != rows[1]
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured = kernels.zeroed_counters(device, 8)
        captured.zero_()  # torch warns of a graph without work
    assert captured.data_ptr() not in rows
    assert captured._base is not None  # a row of the buffer that was made before


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operator_uses_the_kernels_on_a_gpu(dtype, monkeypatch):
    x, extra, _, _, weight, bias = tensors(16, 64, 5, dtype)
    calls = []
    real = kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *args: calls.append(1) or real(*args))
    batch_norm.batch_norm(x, extra, weight, bias, 2, 4, EPS, True)
    assert calls == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("residual", [False, True])
def test_two_gradients_equal_their_sum_by_autograd(residual):
    x, extra = tensors(64, 64, 16, torch.bfloat16)[:2]
    dy, dy2 = torch.randn_like(x), torch.randn_like(x)  # their sum is rounded
    layer = SplitBatchNorm(64, groups=4).cuda()
    set_views(layer, 2)
    inputs = [x.requires_grad_(), *([extra.requires_grad_()] if residual else [])]
    pair = layer(*inputs, relu=True, twice=True)
    ours = torch.autograd.grad(pair, [*inputs, *layer.parameters()], [dy, dy2])
    y = layer(*inputs, relu=True)
    wants = torch.autograd.grad([y, y], [*inputs, *layer.parameters()], [dy, dy2])
    for a, b in zip(ours[:-2], wants[:-2], strict=True):
        close(a, b, torch.bfloat16)
    if residual:
        assert torch.equal(ours[1], wants[1])
    for a, b in zip(ours[-2:], wants[-2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


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
