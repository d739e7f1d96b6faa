"""The CUDA kernels of functional.py against plain PyTorch: on a GPU, or else in Triton's interpreter."""

import pytest
import torch

from mixnn import functional as F
from tests.interpreter import CUDA, DEVICE, INTERPRETED, runs_kernels

if CUDA or INTERPRETED:
    from mixnn import functional_kernels as kernels

SHAPES = [(1, 1), (300, 128), (7, 3, 20), (5, 2000)]
MIXERS = ("raw_renorm", "unit", "unit_renorm", "none")
LAMS = ("one number", "one draw", "a draw per row")
SIZES = [(6, 5, 128), (3, 1, 20), (1, 12, 7)]  # batch, neighbors, length
SEARCHES = [(5, 2580, 20, 5), (70, 1024, 128, 2), (3, 600, 7, 1)]  # batch, support rows, length, neighbors


def draw(*shape, seed=0):
    """Vectors of very different lengths."""
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=rng) * torch.rand(*shape[:-1], 1, generator=rng).mul(5).exp()).to(DEVICE)


def close(ours, want):
    torch.testing.assert_close(ours, want.to(ours), rtol=2e-6, atol=2e-6)


@runs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unit_rows_equal_plain_torch(shape):
    v = draw(*shape)
    every_second = draw(*shape[:-1], 2 * shape[-1], seed=1)[..., ::2]  # not contiguous
    close(kernels.unit(every_second), torch.nn.functional.normalize(every_second, dim=-1))
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


@runs_kernels
@pytest.mark.parametrize("batch, size, dim, topk", SEARCHES, ids=str)
def test_nearest_rows_are_those_of_plain_torch(batch, size, dim, topk):
    z, s = draw(batch, dim), draw(size, dim, seed=1)
    s[-1] = z[0]  # in the last chunk, which need not be full
    s[64:68] = z[0] + 0.01 * draw(4, dim, seed=2)  # several in one chunk
    assert kernels.can_search(z, s, topk)
    index = kernels.nearest_rows(z, s, topk)
    cosines = F.cosines(z.double().cpu(), s.double().cpu())
    best = cosines.topk(topk, dim=1).values
    close(cosines.gather(1, index.cpu()), best)  # equal rows, or rows of equal cosine
    assert index[0, 0] == size - 1
    assert all(len(row.unique()) == topk for row in index)


@runs_kernels
def test_rows_that_do_not_exist_are_not_found():
    """The last chunk has 20 rows of 64. Those that are missing are not nearer than rows that point the other way."""
    s = 0.05 * draw(1300, 16).sign()
    s[:, 0] = 1
    s[1280:, 0] = 0.5  # nearest to z, so that the last chunk is looked at
    z = torch.zeros(2, 16, device=DEVICE)
    z[:, 0] = -1
    index = kernels.nearest_rows(z, s, 5)
    assert ((index >= 1280) & (index < 1300)).all()
    s[1280:, 0], s[3, 0] = 1, 0.4  # now another chunk has the nearest row, and the last one is not looked at
    assert (kernels.nearest_rows(z, s, 1) == 3).all()


@runs_kernels
def test_which_rows_are_searched_by_chunks():
    z, s = torch.ones(3, 8), torch.ones(2560, 8)
    assert kernels.can_search(z, s, 5)
    assert not kernels.can_search(z, s[1:], 5)  # too few rows for five neighbors
    assert not kernels.can_search(torch.ones(3, 9), s, 5)  # lengths differ
    assert not kernels.can_search(torch.ones(3, 200), torch.ones(2560, 200), 5)  # too long for shared memory
    assert not kernels.can_search(z, s, 0)


@runs_kernels
def test_shapes_that_only_broadcasting_understands_are_not_for_the_kernel():
    neighbors, z = torch.ones(4, 3, 8), torch.ones(4, 8)
    assert all(kernels.can_mix(neighbors, z, lam) for lam in (0.5, torch.ones(1, 1, 1), torch.ones(4, 1, 1)))
    for shape in ((4, 3, 1), (1, 3, 1), (3, 1), (8,), (1, 1, 8)):
        assert not kernels.can_mix(neighbors, z, torch.ones(shape))
    assert not kernels.can_mix(neighbors, torch.ones(1, 8), 0.5)
    assert not kernels.can_mix(neighbors, torch.ones(4, 1), 0.5)


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
