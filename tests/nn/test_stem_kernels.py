"""The CUDA kernels of the stem against torch's convolution: on a GPU, or else in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from tests.interpreter import CUDA, DEVICE, INTERPRETED, check_in_interpreter, runs_kernels, starts_interpreter

if CUDA or INTERPRETED:
    from mixnn.nn import stem_kernels as kernels

SHAPES = [(2, 32, 32, 64), (3, 5, 7, 32), (1, 24, 24, 16), (2, 24, 24, 128)]  # images, height, width, channels
LAYOUTS = (torch.contiguous_format, torch.channels_last)
NUM_TESTS = len(SHAPES) * len(LAYOUTS)


@starts_interpreter
def test_kernels_equal_plain_torch_in_the_interpreter():
    check_in_interpreter(__file__, NUM_TESTS)


@runs_kernels
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_convolution_and_its_gradient_equal_plain_torch(shape, layout, monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAMS", 3)  # so that a program has several tiles
    batch, height, width, channels = shape
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, height, width, generator=rng).bfloat16().float().to(DEVICE, memory_format=layout)
    weight = torch.randn(channels, 3, 3, 3, generator=rng).to(DEVICE, torch.bfloat16, memory_format=layout)
    dy = torch.randn(batch, channels, height, width, generator=rng).to(DEVICE, torch.bfloat16, memory_format=layout)

    exact = weight.double().requires_grad_()
    want = F.conv2d(x.double(), exact, padding=1)
    want.backward(dy.double())

    y = kernels.forward(x, weight)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        y.double(), want.detach(), rtol=2**-7, atol=1e-4
    )  # the interpreter rounds to bf16 toward zero
    gradient = kernels.weight_gradient(x, dy, weight)
    assert gradient.stride() == weight.stride()
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=2**-7, atol=1e-3)
