"""Convolutions of ResNets: on a CPU they are torch's; on CUDA in bf16 their gradients come from the side stream."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mixnn.nn import convolution
from mixnn.nn.batch_norm import SplitBatchNorm, set_views
from mixnn.nn.convolution import Convolution, _Convolution, group_sums, without_kernels
from mixnn.nn.precision import is_cast, run_parts
from mixnn.nn.resnet import ResNet
from mixnn.nn.stem import stem

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

    monkeypatch.setattr("mixnn.nn.precision.side_stream", side_stream)
    layer, x = Convolution(3, 4, 3, 1, 1), torch.randn(2, 3, 5, 5)
    weight = layer.weight * 1  # as CastAll does, a new tensor in each pass
    passes = [_Convolution.apply(x, weight, layer.stride, layer.padding, 0)[0] for _ in range(uses)]
    sum(passes).sum().backward()
    assert queued == ["gradient"] * (uses == 1)
    want = torch.autograd.grad(uses * F.conv2d(x, layer.weight, padding=1).sum(), layer.weight)[0]
    torch.testing.assert_close(layer.weight.grad, want)


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that say what they were called with, in place of those for CUDA."""
    calls = []

    def forward(x, weight, bn_groups):
        calls.append(("forward", bn_groups))
        return F.conv2d(x, weight, padding=1), torch.ones(2, 4, 3, dtype=x.dtype)

    def input_gradient(dy, weight):
        calls.append("input")
        return F.conv_transpose2d(dy, weight, padding=1)

    def weight_gradient(x, dy, weight):
        calls.append("weight")
        return torch.ops.aten.convolution_backward(
            dy, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
        )[1]

    module = SimpleNamespace(
        forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient, supports=lambda *_: True
    )
    monkeypatch.setattr(convolution, "_gluon_kernels", lambda: module)
    return calls


def test_kernels_compute_the_convolution_and_its_gradients_where_they_can(kernels):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64, requires_grad=True)
    for stride, used in ((1, ["input", "weight", ("forward", 8)]), (2, [])):
        layer = Convolution(3, 4, 3, stride, 1).double()
        y, sums = _Convolution.apply(x, layer.weight, layer.stride, layer.padding, 8)
        want = F.conv2d(x, layer.weight, stride=stride, padding=1)
        dy = torch.randn_like(y)
        torch.testing.assert_close(y, want)
        for ours, right in zip(
            torch.autograd.grad(y, (x, layer.weight), dy),
            torch.autograd.grad(want, (x, layer.weight), dy),
            strict=True,
        ):
            torch.testing.assert_close(ours, right)
        assert (sums is not None) == bool(used)
        assert sums is None or not sums.requires_grad
        assert sorted(kernels, key=str, reverse=True) == sorted(used, key=str, reverse=True)
        kernels.clear()
    with without_kernels():
        assert _Convolution.apply(x, Convolution(3, 4, 3, 1, 1).double().weight, (1, 1), (1, 1), 8)[1] is None


def test_without_gluon_there_are_no_kernels(monkeypatch):
    convolution._gluon_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "mixnn.nn.convolution_kernels", None)
    monkeypatch.delattr("mixnn.nn.convolution_kernels", raising=False)
    try:
        assert convolution._gluon_kernels() is None
    finally:
        convolution._gluon_kernels.cache_clear()


def test_sums_are_those_of_the_groups_and_of_unchanged_outputs():
    y, sums = torch.zeros(8, 4, 2, 2), torch.ones(2, 4, 4)
    assert group_sums(y, 2) is None
    y.group_sums = 2, sums, y._version
    assert group_sums(y, 2) is sums
    assert group_sums(y, 4) is None
    y.add_(1)
    assert group_sums(y, 2) is None


def test_batch_norm_passes_the_sums_on(monkeypatch):
    seen = []

    def batch_norm(x, *args):
        seen.append(args[-1])
        return x, torch.ones(2, 2, 4), x

    monkeypatch.setattr("mixnn.nn.batch_norm.batch_norm", batch_norm)
    y, sums = torch.zeros(8, 4, 2, 2), torch.ones(2, 4, 4)
    y.group_sums = 2, sums, y._version
    SplitBatchNorm(4, groups=2)(y)
    assert seen[0] is sums


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_3x3_convolutions_of_a_resnet_know_the_groups_of_their_batch_norms(name):
    blocks = [block for stage in ResNet(name, 32, bn_groups=8).children() if isinstance(stage, nn.Sequential)
              for block in stage]  # fmt: skip
    layers = [layer for block in blocks for layer in block.children() if isinstance(layer, Convolution)]
    assert {layer.bn_groups for layer in layers if layer.kernel_size == (3, 3)} == {8}


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
    x = torch.randn(512, 3, 32, 32, device="cuda")  # as many as the kernels of convolution_kernels.py need
    layers(x).square().mean().backward()
    want = [p.grad.clone() for p in layers.parameters()]
    for _ in range(10):
        layers.zero_grad()
        run_parts([layers], x, torch.bfloat16)[0].float().square().mean().backward()
        for p, gradient in zip(layers.parameters(), want, strict=True):
            assert (p.grad - gradient).norm() < 0.05 * gradient.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_resnet_is_the_same_with_and_without_kernels():
    """Outputs and gradients of a first stage in bf16, two views, with the sums for batch norm from the convolutions."""
    torch.manual_seed(0)
    network = ResNet("resnet18", 32, bn_groups=8).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(512, 3, 32, 32, device="cuda")

    class FirstStage(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1, self.layer1 = network.conv1, network.bn1, network.layer1

        def forward(self, x):
            return self.layer1(stem(self.conv1, self.bn1, x))[0]

    part = FirstStage()
    set_views(part, 2)

    def run():
        part.zero_grad()
        (y,) = run_parts([part], x, torch.bfloat16)
        y.float().square().mean().backward()
        return y.float(), *(p.grad.clone() for p in part.parameters())

    ours = run()
    with without_kernels():
        plain = run()
    for a, b in zip(ours, plain, strict=True):
        assert (a - b).norm() < 0.03 * b.norm()
