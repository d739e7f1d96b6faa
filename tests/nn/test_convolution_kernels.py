"""The convolution kernels in Gluon, which has no interpreter: compiled anywhere, run on Hopper GPUs."""

import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
VERSIONS = "3.6", "3.7"
if not triton.__version__.startswith(VERSIONS):
    pytest.skip(f"the kernels are not for Triton {triton.__version__}", allow_module_level=True)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SHAPES = [(512, 32, 32), (516, 24, 24), (264, 56, 56), (528, 7, 32)]  # images, height, width

COMPILE = """
from contextlib import nullcontext
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0
    get_active_torch_device = lambda self: torch.device("cpu")


driver.set_active(Hopper())
run = JITFunction.run


def compile_only(kernel, *args, grid, warmup, **options):
    compiled = run(kernel, *args, grid=grid, warmup=True, **options)
    products = compiled.asm["ptx"].count("wgmma.mma_async")
    print(compiled.metadata.name, compiled.metadata.shared, products)


from mixnn.nn import convolution_kernels as kernels

x, weight = torch.zeros(512, 64, 32, 32, dtype=torch.bfloat16), torch.zeros(64, 64, 3, 3, dtype=torch.bfloat16)
with patch.object(JITFunction, "run", compile_only), patch("torch.cuda.device_of", lambda x: nullcontext()):
    kernels.forward(x, weight, 8)
    kernels.input_gradient(x, weight)
    kernels.weight_gradient(x, x, weight)
"""


def test_the_kernels_are_used_with_these_versions_alone():
    from mixnn.nn import convolution_kernels as kernels

    assert kernels.VERSIONS == VERSIONS


def test_the_kernels_compile_for_hopper_without_a_gpu():
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = re.findall(r"(\w+) (\d+) (\d+)", done.stdout)
    assert [name for name, _, _ in compiled] == ["conv_kernel", "conv_kernel", "conv_weight_kernel", "add_kernel"]
    # A product of 64 channels is four instructions: 3 rows of 9 products for two teams; 3 of 128 pixels for three teams
    assert [int(num) for _, _, num in compiled] == [216, 216, 72, 0]
    assert all(int(shared) <= 227 * 1024 for _, shared, _ in compiled)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolution_gradients_and_sums_equal_torchs(shape):
    from mixnn.nn import convolution_kernels as kernels

    images, height, width = shape
    rng = torch.Generator("cuda").manual_seed(0)
    x, dy = (
        torch.randn(images, height, width, 64, device="cuda", generator=rng).bfloat16().permute(0, 3, 1, 2)
        for _ in range(2)
    )
    weight = (torch.randn(64, 64, 3, 3, device="cuda", generator=rng) / 24).bfloat16()
    assert kernels.supports(x, weight)

    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    want = F.conv2d(exact_x, exact_weight, padding=1)
    want.backward(dy.double())

    y, sums = kernels.forward(x, weight, 4)
    torch.testing.assert_close(y.double(), want.detach(), rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(kernels.input_gradient(dy, weight).double(), exact_x.grad, rtol=2**-8, atol=1e-4)
    gradient = kernels.weight_gradient(x, dy, weight)
    scale = exact_weight.grad.abs().max()
    torch.testing.assert_close(gradient.double() / scale, exact_weight.grad / scale, rtol=2**-8, atol=1e-4)

    if width not in (32, 64):
        assert sums is None  # columns beyond the image would count
        return
    per_image = torch.stack([y.double(), y.double().square()]).sum((3, 4))
    of_groups = per_image.unflatten(1, (-1, 4)).sum(1)
    torch.testing.assert_close(sums.double().unflatten(1, (-1, 4)).sum(1), of_groups, rtol=1e-4, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_results_are_the_same_bits_every_time():
    from mixnn.nn import convolution_kernels as kernels

    torch.manual_seed(0)
    x = torch.randn(512, 32, 32, 64, device="cuda").bfloat16().permute(0, 3, 1, 2)
    weight = torch.randn(64, 64, 3, 3, device="cuda").bfloat16()
    first = *kernels.forward(x, weight, 8), kernels.input_gradient(x, weight), kernels.weight_gradient(x, x, weight)
    for _ in range(20):
        again = *kernels.forward(x, weight, 8), kernels.input_gradient(x, weight), kernels.weight_gradient(x, x, weight)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    "images, channels, width, supported",
    [(512, 64, 32, True), (512, 128, 32, False), (512, 64, 20, False), (510, 64, 32, False), (64, 64, 32, False)],
)
def test_convolutions_that_would_not_fill_the_gpu_are_left_to_cudnn(images, channels, width, supported):
    from mixnn.nn import convolution_kernels as kernels

    x = torch.zeros(images, channels, 32, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(channels, channels, 3, 3, device="cuda", dtype=torch.bfloat16)
    assert kernels.supports(x, weight) == supported
    assert not kernels.supports(x.float(), weight)
