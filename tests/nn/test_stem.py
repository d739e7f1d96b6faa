"""The first layers of a ResNet as one function: the same numbers as the layers one after the other."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mixnn.functional import at_least_float32
from mixnn.nn import stem as module
from mixnn.nn.batch_norm import SplitBatchNorm, plain_forward, set_views
from mixnn.nn.convolution import Convolution, without_kernels
from mixnn.nn.precision import run_parts
from mixnn.nn.stem import has_kernels, stem

CUDA = torch.cuda.is_available()


class Stem(nn.Module):
    """Convolution, batch norm of two views and ReLU; as the layers themselves if they are not fused."""

    def __init__(self, fused: bool, channels: int = 32, groups: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.fused = Convolution(3, channels, 3, 1, 1), SplitBatchNorm(channels, groups), fused
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        set_views(self, 2)

    def forward(self, x):
        pair = stem(self.conv, self.norm, x) if self.fused else self.norm(self.conv(x), relu=True, twice=True)
        return pair[0] + 2 * pair[1]


def results(network, x, dtype=None):
    """Output, gradients and running statistics after one step."""
    (y,) = run_parts([network], x, dtype)
    at_least_float32(y).square().mean().backward()
    return y, *(p.grad for p in network.parameters()), network.norm.running_mean, network.norm.running_var


@pytest.fixture
def stand_ins(monkeypatch):
    """Kernels in plain PyTorch, in place of those for CUDA."""

    def run(x, weight, norm_weight, norm_bias, views, groups, eps):
        return plain_forward(F.conv2d(x, weight, padding=1), None, norm_weight, norm_bias, views, groups, eps, True)

    def forward(*inputs):
        calls.append("forward")
        return *run(*inputs), inputs[0], torch.zeros(())

    def backward(dy, dy2, y, x, _moments, weight, norm_weight, norm_bias, stats, *layout):
        inputs = [t.detach().requires_grad_() for t in (weight, norm_weight, norm_bias)]
        with torch.enable_grad():
            again = run(x, *inputs, *layout)
        assert torch.equal(y, again[0])
        assert torch.equal(stats, again[1])
        d_weight, d_norm, d_bias = torch.autograd.grad(again[0], inputs, dy if dy2 is None else dy + dy2)
        return d_weight, torch.stack([d_bias, d_norm])

    calls = []
    kernels = SimpleNamespace(forward=forward, backward=backward)
    monkeypatch.setitem(sys.modules, "mixnn.nn.stem_kernels", kernels)
    monkeypatch.setattr("mixnn.nn.stem_kernels", kernels, raising=False)
    monkeypatch.setattr(module, "has_kernels", lambda *_: True)
    return calls


def test_with_kernels_it_is_the_layers_one_after_the_other(stand_ins):
    x = torch.randn(8, 3, 5, 5, dtype=torch.float64)
    for ours, want in zip(results(Stem(True).double(), x), results(Stem(False).double(), x), strict=True):
        torch.testing.assert_close(ours, want)
    assert stand_ins == ["forward"]


def test_one_gradient_may_be_missing(stand_ins):
    x = torch.randn(8, 3, 5, 5, dtype=torch.float64)
    gradients = []
    for fused in (True, False):
        network = Stem(fused).double()
        second = stem(network.conv, network.norm, x)[1] if fused else network.norm(network.conv(x), relu=True)
        gradients.append(torch.autograd.grad(second.square().sum(), [*network.parameters()]))
    for ours, want in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, want)
    assert stand_ins


class OtherConvolution(Convolution):
    pass


class Batch(SimpleNamespace):
    def __len__(self):
        return self.shape[0]


def batch(*shape, **change):
    """A batch of images as has_kernels sees it, in bf16 on CUDA."""
    about = {"is_cuda": True, "requires_grad": False, "dtype": torch.bfloat16, "is_floating_point": lambda: True}
    return Batch(shape=shape, dim=lambda: len(shape), **about | change)


def layers(convolution=Convolution, channels=(3, 64), sizes=(3, 1, 1), **change):
    conv, norm = convolution(*channels, *sizes).bfloat16(), SplitBatchNorm(channels[1], 2, **change)
    set_views(norm, 2)
    return conv, norm


IMAGES = batch(8, 3, 5, 5)
HOOKS = "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"


@pytest.mark.parametrize("channels", [32, 64, 128])
def test_these_layers_have_kernels(channels):
    assert has_kernels(*layers(channels=(3, channels)), IMAGES)
    assert has_kernels(*layers(), batch(4, 3, 7, 9))


@pytest.mark.parametrize(
    "change",
    [
        {"channels": (4, 64)},
        {"channels": (3, 48)},
        {"sizes": (5, 1, 1)},
        {"sizes": (3, 2, 1)},
        {"sizes": (3, 1, 0)},
        {"convolution": OtherConvolution},
        {"affine": False},
    ],
    ids=str,
)
def test_other_layers_have_no_kernels(change):
    assert not has_kernels(*layers(**change), IMAGES)


def test_layers_in_eval_mode_or_float32_have_no_kernels():
    conv, norm = layers()
    assert not has_kernels(conv, norm.eval(), IMAGES)
    assert not has_kernels(conv.float(), norm.train(), IMAGES)


@pytest.mark.parametrize(
    "shape", [(8, 1, 5, 5), (8, 4, 5, 5), (8, 3, 5), (10, 3, 5, 5)], ids=str
)  # 10: not four groups
def test_other_shapes_have_no_kernels(shape):
    assert not has_kernels(*layers(), batch(*shape))


@pytest.mark.parametrize("change", [{"requires_grad": True}, {"is_cuda": False}, {"dtype": torch.float32}], ids=str)
def test_other_inputs_have_no_kernels(change):
    assert not has_kernels(*layers(), batch(8, 3, 5, 5, **change))
    assert not has_kernels(*layers(), batch(8, 3, 5, 5, is_floating_point=lambda: False))


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("which", [0, 1])
def test_layers_with_hooks_are_called(which, hook):
    pair = layers()
    handle = getattr(pair[which], hook)(lambda *_: None)
    assert not has_kernels(*pair, IMAGES)
    handle.remove()
    assert has_kernels(*pair, IMAGES)


def test_frozen_layers_and_a_run_without_kernels_have_none():
    conv, norm = layers()
    with without_kernels():
        assert not has_kernels(conv, norm, IMAGES)
    norm.frozen = True
    assert not has_kernels(conv, norm, IMAGES)


def test_both_outputs_share_memory(stand_ins):
    network = Stem(True).double()
    y, y2 = stem(network.conv, network.norm, torch.randn(8, 3, 5, 5, dtype=torch.float64))
    assert y.data_ptr() == y2.data_ptr()
    assert stand_ins == ["forward"]


def test_on_a_cpu_it_is_the_layers(monkeypatch):
    monkeypatch.setitem(sys.modules, "mixnn.nn.stem_kernels", None)
    x = torch.randn(8, 3, 5, 5)
    for ours, want in zip(results(Stem(True), x), results(Stem(False), x), strict=True):
        assert torch.equal(ours, want)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("side, channels", [(32, 64), (24, 64), (32, 32), (64, 128)])
def test_on_cuda_in_bf16_it_is_the_layers_up_to_rounding(side, channels):
    x = torch.randn(256, 3, side, side, device="cuda")
    fused, plain = (Stem(is_fused, channels, 8).cuda() for is_fused in (True, False))
    found = results(fused, x, torch.bfloat16)
    for ours, want in zip(found, results(plain, x, torch.bfloat16), strict=True):
        assert (ours - want).norm() < 0.01 * want.norm()
    again = results(Stem(True, channels, 8).cuda(), x, torch.bfloat16)
    assert all(map(torch.equal, found, again)), "the same bits every time"
