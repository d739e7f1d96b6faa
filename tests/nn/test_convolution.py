"""Convolutions of ResNets: on a CPU they are torch's; on CUDA in bf16 their gradients come from the side stream."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mixnn.nn.convolution import Convolution, _Convolution
from mixnn.nn.precision import is_cast, run_parts

SHAPES = [(3, 64, 3, 1, 1), (3, 16, 7, 2, 3), (32, 48, 1, 2, 0), (32, 32, 3, 2, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_a_cpu_it_is_torchs_convolution(shape):
    x = torch.randn(2, shape[0], 9, 9)
    layer = Convolution(*shape)
    assert torch.equal(layer(x), F.conv2d(x, layer.weight, stride=shape[3], padding=shape[4]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_function_that_splits_the_gradients_has_torchs_gradients(shape):
    torch.manual_seed(0)
    layer = Convolution(*shape).double()
    x = torch.randn(2, shape[0], 9, 9, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, (x, layer.weight), dy)
    ours, sums = _Convolution.apply(x, layer.weight, layer.stride, layer.padding, 8)
    assert sums is None
    torch.testing.assert_close(ours, y)
    torch.testing.assert_close(torch.autograd.grad(ours, (x, layer.weight), dy), want)


@pytest.mark.parametrize("uses", [1, 2])
def test_a_layer_that_is_used_twice_does_not_use_the_side_stream(uses, monkeypatch):
    """Autograd would add its gradients before anything waits for that stream."""
    queued = []

    @contextmanager
    def side_stream(*_):
        queued.append("gradient")
        yield

    monkeypatch.setattr("mixnn.nn.convolution.side_stream", side_stream)
    layer, x = Convolution(3, 4, 3, 1, 1), torch.randn(2, 3, 5, 5)
    weight = layer.weight * 1  # as CastAll does, a new tensor in each pass
    passes = [_Convolution.apply(x, weight, layer.stride, layer.padding, 0)[0] for _ in range(uses)]
    sum(passes).sum().backward()
    assert queued == ["gradient"] * (uses == 1)
    want = torch.autograd.grad(uses * F.conv2d(x, layer.weight, padding=1).sum(), layer.weight)[0]
    torch.testing.assert_close(layer.weight.grad, want)


def test_only_the_small_stem_has_kernels():
    assert [Convolution(*shape).is_small_stem() for shape in SHAPES] == [True, False, False, False]
    assert not Convolution(3, 48, 3, 1, 1).is_small_stem()  # not a power of two


def test_cast_weights_are_told_from_others():
    """Only their gradients may come from the side stream."""
    seen = []

    class Layer(nn.Linear):
        def forward(self, x):
            seen.append(is_cast(self.weight))
            return super().forward(x)

    x = torch.randn(2, 3)
    run_parts([Layer(3, 3)], x, torch.bfloat16)
    run_parts([Layer(3, 3)], x, torch.float32)
    with torch.no_grad():
        run_parts([Layer(3, 3)], x, torch.bfloat16)
    assert seen == [True, False, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_from_the_side_stream_equal_those_in_float32():
    """Many layers and steps, so that memory is used again while the side stream still reads it, if it may be."""
    torch.manual_seed(0)
    layers = nn.Sequential(Convolution(3, 64, 3, 1, 1), *(Convolution(64, 64, 3, 1, 1) for _ in range(8))).cuda()
    layers = layers.to(memory_format=torch.channels_last)
    x = torch.randn(128, 3, 32, 32, device="cuda")
    layers(x).square().mean().backward()
    want = [p.grad.clone() for p in layers.parameters()]
    for _ in range(10):
        layers.zero_grad()
        run_parts([layers], x, torch.bfloat16)[0].float().square().mean().backward()
        for p, gradient in zip(layers.parameters(), want, strict=True):
            assert (p.grad - gradient).norm() < 0.05 * gradient.norm()
