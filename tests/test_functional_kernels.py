"""The CUDA kernels of functional.py against plain PyTorch: on a GPU, or else in Triton's interpreter.

The interpreter is chosen by an environment variable when Triton is imported, for the whole process. So without a GPU
one test runs this file in a process of its own, where the others are not skipped.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from mixnn import functional as F

if not importlib.util.find_spec("triton"):
    pytest.skip("triton is not installed", allow_module_level=True)
CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if CUDA or INTERPRETED:
    from mixnn import functional_kernels as kernels

runs_kernels = pytest.mark.skipif(not CUDA and not INTERPRETED, reason="run in the interpreter, in another process")
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array")  # the interpreter's, with numpy before 2.4
DEVICE = "cuda" if CUDA else "cpu"
SHAPES = [(1, 1), (300, 128), (7, 3, 20), (5, 2000)]
MIXERS = ("raw_renorm", "unit", "unit_renorm", "none")
LAMS = ("one number", "one draw", "a draw per row")
SIZES = [(6, 5, 128), (3, 1, 20), (1, 12, 7)]  # batch, neighbors, length
NUM_TESTS = len(SHAPES) + len(MIXERS) * len(LAMS) + 2 * len(SIZES) + 1


def draw(*shape, seed=0):
    """Vectors of very different lengths."""
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=rng) * torch.rand(*shape[:-1], 1, generator=rng).mul(5).exp()).to(DEVICE)


def close(ours, want):
    torch.testing.assert_close(ours, want.to(ours), rtol=2e-6, atol=2e-6)


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernels run in this process")
def test_kernels_equal_plain_torch_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{NUM_TESTS} passed" in done.stdout


@runs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unit_rows_equal_plain_torch(shape):
    v = draw(*shape)
    v.view(-1, shape[-1])[-1] = 0  # stays zero
    close(kernels.unit(v), torch.nn.functional.normalize(v, dim=-1))


@runs_kernels
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("lam", LAMS)
def test_mixed_targets_equal_plain_torch(mixer, lam):
    batch, topk, dim = SIZES[0]
    neighbors, z = draw(batch, topk, dim), draw(batch, dim, seed=1)
    draws = torch.rand(batch, 1, 1, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    share = {"one number": 0.3, "one draw": draws[:1], "a draw per row": draws}[lam]
    mixed = F.mix(neighbors.double(), z.double(), share if isinstance(share, float) else share.double(), mixer)
    unit_z = torch.nn.functional.normalize(z.double(), dim=-1)
    close(kernels.mixed_targets(neighbors, z, share, mixer), torch.cat([unit_z[:, None], mixed], dim=1))


@runs_kernels
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_weighted_squared_error_and_its_gradient_equal_plain_torch(size, per_row):
    batch, topk, dim = size
    p, targets = draw(batch, dim), torch.nn.functional.normalize(draw(batch, topk + 1, dim, seed=1), dim=-1)
    w = torch.rand((batch, topk + 1) if per_row else (topk + 1,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    ours, wide = p.clone().requires_grad_(), p.double().cpu().requires_grad_()
    loss = kernels.WeightedSquaredError.apply(ours, targets, w)
    want = F.weighted_squared_error(wide, targets.double().cpu(), w.double().cpu())
    (3 * loss).backward()
    (3 * want).backward()
    close(loss, want)
    close(ours.grad, wide.grad)


@runs_kernels
def test_kernels_are_for_float32_and_vectors_that_are_not_too_long():
    for tensor in (torch.ones(2, 3).double(), torch.ones(2, 3).bfloat16(), torch.ones(2, 0), torch.ones(2, 5000)):
        assert not kernels.supports(tensor)
    assert kernels.supports(torch.ones(2, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_functions_on_a_gpu_use_the_kernels_unless_a_gradient_is_needed(monkeypatch):
    calls = []
    for name in ("unit", "mixed_targets"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, name=name, real=real: calls.append(name) or real(*args))
    z, neighbors, p = draw(4, 8), draw(4, 3, 8), draw(4, 8, seed=1).requires_grad_()
    targets = F.mixed_targets(neighbors, z, 0.5, "unit")
    F.unit(z)
    assert F.weighted_squared_error(p, targets, torch.ones(4, device="cuda")).grad_fn.name() == (
        "WeightedSquaredErrorBackward"
    )
    assert calls == ["mixed_targets", "unit"]
    F.unit(p).sum().backward()
    w = torch.ones(4, device="cuda", requires_grad=True)
    F.weighted_squared_error(p, targets, w).backward()
    assert w.grad is not None
    assert calls == ["mixed_targets", "unit"]
