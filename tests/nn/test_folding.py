"""Batch norm folded into convolutions: the same features, in fewer passes."""

import copy

import pytest
import torch
from torch import nn

from mixnn.nn.backbone import build_backbone
from mixnn.nn.batch_norm import SplitBatchNorm
from mixnn.nn.folding import FoldedConv, folded

CASES = [("resnet8", 8), ("resnet18", 32), ("resnet18", 64), ("resnet50", 128), ("efficientnet_lite0", 64)]


def trained(name: str, size: int) -> nn.Module:
    """A network whose batch norms all do something, in channels_last memory, with features of order one."""
    torch.manual_seed(0)
    network = build_backbone(name, size, bn_groups=4)
    network.train()
    with torch.no_grad():
        for layer in network.modules():
            if isinstance(layer, SplitBatchNorm):
                layer.weight.uniform_(0.5, 1.5)
                layer.bias.normal_(0, 0.3)
                layer.momentum = 1.0
        network(torch.randn(16, 3, size, size))  # statistics that fit the network
    return network.to(memory_format=torch.channels_last)


def images(size: int) -> torch.Tensor:
    return torch.randn(6, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "size"), CASES)
@torch.no_grad()
def test_a_folded_copy_has_the_features_of_the_network_in_eval_mode(name: str, size: int):
    network = trained(name, size)
    copied = folded(network)
    expected = network.eval()(images(size))
    tolerance = 1e-4 if name == "resnet50" else 1e-5  # deep networks with random weights amplify rounding
    assert (copied(images(size)) - expected).norm() <= tolerance * expected.norm()
    network.double()
    torch.testing.assert_close(folded(network)(images(size).double()), network(images(size).double()))
    assert not any(isinstance(layer, SplitBatchNorm) for layer in copied.modules())
    assert not any(p.requires_grad for p in copied.parameters())


@torch.no_grad()
def test_the_network_itself_stays_as_it_is_and_the_copy_ignores_what_becomes_of_it():
    network = trained("resnet8", 8)
    before = copy.deepcopy(network.state_dict())
    copied = folded(network)
    expected = copied(images(8))
    assert network.training
    assert all(torch.equal(t, before[name]) for name, t in network.state_dict().items())
    for parameter in network.parameters():
        parameter.zero_()
    assert torch.equal(copied(images(8)), expected)


@torch.no_grad()
def test_a_copy_does_not_change_its_input_nor_mix_up_batches():
    copied, x = folded(trained("resnet18", 32)), images(32).to(memory_format=torch.channels_last)
    before, first = x.clone(), copied(x)
    assert torch.equal(x, before)
    torch.testing.assert_close(copied(x[:2]), first[:2], rtol=1e-4, atol=1e-5)


def test_networks_of_others_are_returned_as_they_are():
    """In this one the convolution's output is used twice, so that folding would change the result."""

    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), SplitBatchNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return (self.norm(y) + y).mean((2, 3))

    network = Foreign().train()
    assert folded(network) is network
    assert network.training


@torch.no_grad()
def test_batch_norm_without_weight_and_bias_is_folded_too():
    conv, norm = nn.Conv2d(3, 4, 3, bias=False), SplitBatchNorm(4, affine=False).eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    torch.testing.assert_close(FoldedConv(conv, norm)(images(8)), norm(conv(images(8))), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "size"), CASES)
@torch.no_grad()
def test_on_cuda_in_bf16_it_is_as_near_to_fp32_as_the_network_is(name: str, size: int):
    network = trained(name, size).eval().cuda()
    x, copied = images(size).cuda().to(memory_format=torch.channels_last), folded(network)
    exact = network.double()(x.double()).float()
    network.float()
    errors = []
    for one in (network, copied):
        torch.cuda.empty_cache()
        # Memory that is not initialized must not matter, so all that will be used is NaN: large blocks and small ones.
        nans = [torch.full((n,), torch.nan, device="cuda") for n in (2**27, *[2**17] * 256)]
        del nans
        with torch.autocast("cuda", torch.bfloat16):
            found = one(x).float()
        errors.append((found - exact).norm() / exact.norm())
    assert errors[1] < 1.5 * errors[0] + 1e-3
