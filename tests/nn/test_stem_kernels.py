"""The CUDA kernels of the stem against plain PyTorch: on a GPU, or else in Triton's interpreter."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from mixnn.nn.batch_norm import plain_forward
from tests.interpreter import CUDA, DEVICE, INTERPRETED, runs_kernels

if CUDA or INTERPRETED:
    from mixnn.nn import stem_kernels as kernels

# images, height, width, channels, views, groups; tiles that are full, and some that are not
FULL, ODD, PARTS, WIDE = (4, 16, 16, 64, 2, 2), (18, 5, 7, 32, 1, 2), (3, 24, 24, 32, 1, 1), (4, 12, 16, 128, 2, 1)
ROWS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last
CASES = [*itertools.product((FULL, ODD, PARTS, WIDE), (ROWS, CHANNELS_LAST), (False, True))]  # the last: two gradients
if INTERPRETED:  # which takes half a second for each: all pairs of layout and gradients, and each shape
    CASES = [
        (FULL, ROWS, False),
        (FULL, CHANNELS_LAST, True),
        (ODD, CHANNELS_LAST, False),
        (PARTS, ROWS, True),
        (WIDE, CHANNELS_LAST, True),
    ]
EPS = 0.5  # large, so that its absence shows


@runs_kernels
@pytest.mark.parametrize("shape, layout, two", CASES, ids=str)
def test_convolution_batch_norm_and_relu_and_their_gradients_equal_plain_torch(shape, layout, two):
    images, height, width, channels, views, groups = shape
    rng = torch.Generator().manual_seed(0)

    def multiples(of, *shape):
        """Numbers whose products and sums are exact in bf16, so that it does not matter how they are rounded."""
        return torch.randint(-2, 3, shape, generator=rng) * of

    x, weight = multiples(0.5, images, 3, height, width) + 0.5, multiples(0.25, channels, 3, 3, 3)
    norm_weight, norm_bias = torch.rand(channels, generator=rng) + 0.5, torch.randn(channels, generator=rng)
    maps = multiples(0.25, 2, images, channels, height, width)

    exact = [t.double().requires_grad_() for t in (weight, norm_weight, norm_bias)]
    convolved = F.conv2d(x.double(), exact[0], padding=1)
    want_y, want_stats = plain_forward(convolved, None, *exact[1:], views, groups, EPS, True)
    want_y.backward((maps.sum(0) if two else maps[0]).double())

    x = x.to(DEVICE, memory_format=layout)
    weight = weight.to(DEVICE, torch.bfloat16, memory_format=layout)
    norm = norm_weight.to(DEVICE), norm_bias.to(DEVICE)
    dy, dy2 = (t.to(DEVICE, torch.bfloat16, memory_format=layout) for t in maps)
    y, stats, padded, moments = kernels.forward(x, weight, *norm, views, groups, EPS)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y.cpu().double(), want_y.detach(), rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(stats.cpu().double(), want_stats.detach(), rtol=1e-5, atol=1e-5)

    rest = y, padded, moments, weight, *norm, stats, views, groups, EPS
    d_weight, d_parameters = kernels.backward(dy, dy2 if two else None, *rest)
    assert d_weight.stride() == weight.stride()
    scale = exact[0].grad.abs().max().item()
    torch.testing.assert_close(d_weight.cpu().double(), exact[0].grad, rtol=2**-7, atol=1e-5 * scale)
    for ours, parameter in zip(d_parameters, (exact[2], exact[1]), strict=True):
        torch.testing.assert_close(ours.cpu().double(), parameter.grad, rtol=1e-4, atol=1e-3)


@runs_kernels
def test_only_the_output_is_rounded():
    """Random numbers, whose convolution is not exact in bf16: y is the nearest bf16 number or one next to it."""
    images, height, width, channels, views, groups = FULL
    rng = torch.Generator().manual_seed(1)
    x, weight = torch.randn(images, 3, height, width, generator=rng), torch.randn(channels, 3, 3, 3, generator=rng)
    x, weight = (t.bfloat16().to(DEVICE) for t in (x, weight))
    norm = torch.rand(channels, generator=rng).to(DEVICE) + 0.5, torch.randn(channels, generator=rng).to(DEVICE)
    convolved = F.conv2d(x.cpu().double(), weight.cpu().double(), padding=1)
    want, _ = plain_forward(convolved, None, *(t.cpu().double() for t in norm), views, groups, EPS, True)
    y, *_ = kernels.forward(x, weight, *norm, views, groups, EPS)
    torch.testing.assert_close(y.cpu().double(), want, rtol=2**-7, atol=1e-5)
