"""Names, sizes, initial values and cost of the backbones, against what torchvision and the authors' code have."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mixnn.nn.batch_norm import SplitBatchNorm
from mixnn.nn.resnet import ResNet

WIDTHS = (64, 128, 256, 512)


def torchvision_resnet18_shapes():
    """Parameters and buffers of torchvision's resnet18 with a 3x3 stem and without fc."""
    shapes = {}

    def norm(name, channels):
        for each in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}.{each}"] = (channels,)
        shapes[f"{name}.num_batches_tracked"] = ()

    shapes["conv1.weight"] = (64, 3, 3, 3)
    norm("bn1", 64)
    before = 64
    for layer, width in enumerate(WIDTHS, start=1):
        for block in range(2):
            name = f"layer{layer}.{block}"
            shapes[f"{name}.conv1.weight"] = (width, before, 3, 3)
            norm(f"{name}.bn1", width)
            shapes[f"{name}.conv2.weight"] = (width, width, 3, 3)
            norm(f"{name}.bn2", width)
            if layer > 1 and block == 0:
                shapes[f"{name}.downsample.0.weight"] = (width, before, 1, 1)
                norm(f"{name}.downsample.1", width)
            before = width
    return shapes


def resnet18_multiplications(side):
    """Of one image through the convolutions, from kernel, channels and side of each."""
    total, before = 9 * 3 * 64 * side**2, 64
    if side >= 64:
        side //= 2
    for layer, width in enumerate(WIDTHS):
        shrinks = layer > 0
        side //= 2 if shrinks else 1
        total += (9 * before * width + 3 * 9 * width * width) * side**2
        total += before * width * side**2 if shrinks else 0
        before = width
    return total


def sides(backbone, size):
    """Side of the feature map after each stage."""
    seen = []
    for stage in backbone.stages:
        getattr(backbone, stage).register_forward_hook(lambda _m, _x, y: seen.append(y[0].shape[-1]))
    backbone.eval()(torch.zeros(1, 3, size, size))
    return seen


def test_resnet18_has_torchvisions_names_and_shapes():
    state = ResNet("resnet18", 32, 8).state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == torchvision_resnet18_shapes()


def test_resnet18_has_the_parameters_of_torchvisions_without_fc_and_large_stem():
    torchvision, fc, stems = 11_689_512, 512 * 1000 + 1000, 64 * 3 * (49 - 9)
    num = sum(p.numel() for p in ResNet("resnet18", 32, 8).parameters())
    assert num == torchvision - fc - stems == 11_168_832


@pytest.mark.parametrize("name, num_features", [("resnet18", 512), ("resnet8", 128)])
def test_features_are_the_mean_over_pixels_of_the_last_stage(name, num_features):
    backbone, kept = ResNet(name, 16, 1).eval(), []
    getattr(backbone, backbone.stages[-1]).register_forward_hook(lambda _m, _x, y: kept.append(y[0]))
    features = backbone(torch.randn(2, 3, 16, 16))
    assert features.shape == (2, num_features)
    assert backbone.num_features == num_features
    torch.testing.assert_close(features, kept[0].flatten(2).mean(2))


def test_the_max_pool_is_kept_for_images_of_64_pixels_and_more_only():
    assert sides(ResNet("resnet18", 32, 1), 32) == [32, 16, 8, 4]
    assert sides(ResNet("resnet18", 64, 1), 64) == [32, 16, 8, 4]
    assert sides(ResNet("resnet18", 96, 1), 96) == [48, 24, 12, 6]
    assert sides(ResNet("resnet8", 8, 1), 8) == [8, 4, 2]
    pool = ResNet("resnet8", 64, 1).maxpool
    assert (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1)


def test_the_stem_keeps_torchs_default_and_other_convolutions_are_kaiming_normal_by_fan_out():
    torch.manual_seed(0)
    backbone = ResNet("resnet18", 32, 8)
    bound = 1 / math.sqrt(27)  # uniform, a = sqrt(5): 1 / sqrt(fan in)
    assert backbone.conv1.weight.abs().max() <= bound
    assert backbone.conv1.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    others = {n: m for n, m in backbone.named_modules() if isinstance(m, nn.Conv2d) and n != "conv1"}
    assert len(others) == 19
    for conv in others.values():
        fan_out = conv.out_channels * conv.kernel_size[0] ** 2
        assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.03)
        assert conv.weight.abs().max() > 3 * conv.weight.std()  # a uniform law stops at 1.7
        assert conv.bias is None


def test_batch_norm_starts_at_weight_one_and_bias_zero_with_the_groups_asked_for():
    norms = [m for m in ResNet("resnet18", 32, 8).modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 20
    for norm in norms:
        assert isinstance(norm, SplitBatchNorm)
        assert norm.groups == 8
        assert (norm.weight == 1).all()
        assert (norm.bias == 0).all()


def test_a_block_is_the_residual_formula():
    torch.manual_seed(0)
    block = ResNet("resnet8", 8, 1).layer2[0].double().eval()
    x = torch.randn(2, 32, 8, 8, dtype=torch.float64)
    inside = block.bn2(block.conv2(block.bn1(block.conv1(x)).clamp(min=0)))
    want = (inside + block.downsample[1](block.downsample[0](x))).clamp(min=0)
    for out in block((x, x)):
        torch.testing.assert_close(out, want)
    assert block.conv1.stride == block.downsample[0].stride == (2, 2)
    assert block.conv2.stride == (1, 1)


@pytest.mark.parametrize("name, size", [("resnet8", 8), ("resnet8", 64), ("resnet50", 8)])
def test_gradients_are_those_of_blocks_whose_outputs_autograd_adds(name, size, monkeypatch):
    torch.manual_seed(0)
    backbone, x = ResNet(name, size, 2).double(), torch.randn(8, 3, size, size, dtype=torch.float64)

    def gradients():
        return torch.autograd.grad(backbone(x).square().sum(), list(backbone.parameters()))

    ours, forward = gradients(), SplitBatchNorm.forward
    calls = []

    def once(self, x, residual=None, relu=False, twice=False):
        calls.append(twice)
        y = forward(self, x, residual, relu)
        return (y, y) if twice else y

    monkeypatch.setattr(SplitBatchNorm, "forward", once)
    for a, b in zip(ours, gradients(), strict=True):
        torch.testing.assert_close(a, b)
    assert calls.count(True) == 1 + sum(len(getattr(backbone, stage)) for stage in backbone.stages)


@pytest.mark.parametrize("size", [32, 64])
def test_flops_are_two_a_multiplication(size):
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        ResNet("resnet18", size, 8).eval()(torch.zeros(1, 3, size, size))
    assert counter.get_total_flops() == 2 * resnet18_multiplications(size)


def test_resnet18_at_32_pixels_takes_half_a_billion_multiplications():
    assert resnet18_multiplications(32) == pytest.approx(0.555e9, rel=0.002)
