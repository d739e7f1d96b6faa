"""Heads, student and teacher: what has a bias, what moves when, what the shuffle changes and what it does not."""

import copy

import pytest
import torch
from torch import nn

from mixnn.nn.batch_norm import set_views
from mixnn.nn.encoder import Linear, Student, Teacher, _Linear, mlp, set_compute_dtype
from mixnn.nn.precision import run_parts
from mixnn.nn.resnet import ResNet

B, SIZE = 8, 8


def networks(groups=2, views=2, dtype=torch.float64):
    torch.manual_seed(0)
    backbone = ResNet("resnet8", SIZE, groups)
    student = Student(backbone, mlp([backbone.num_features, 16, 6]), mlp([6, 16, 6]), views).to(dtype)
    return student, Teacher(student, views)


def views(num=2, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(B, 3, SIZE, SIZE, generator=rng, dtype=dtype) * (v + 1) + v for v in range(num)]


def uniforms(num=2, seed=0):
    return torch.rand(num, B, generator=torch.Generator().manual_seed(seed))


def snapshot(module):
    return {name: t.clone() for name, t in module.state_dict().items()}


def move_apart(student):
    with torch.no_grad():
        for i, p in enumerate(student.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype))


# Heads

HEADS = {  # of the authors' code: sizes, norm of the hidden layers, norm of the output; + has a bias, - has none
    "byol": ([8, 16, 4], True, "none", "Linear- norm+ ReLU Linear+"),
    "moco": ([8, 16, 4], False, "none", "Linear+ ReLU Linear+"),
    "simclr": ([8, 16, 4], True, "affine", "Linear- norm+ ReLU Linear- norm+"),
    "nnclr": ([8, 16, 16, 4], True, "affine", "Linear- norm+ ReLU Linear- norm+ ReLU Linear- norm+"),
    "snclr": ([8, 16, 16, 4], True, "plain", "Linear- norm+ ReLU Linear- norm+ ReLU Linear- norm-"),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_linear_layer_has_a_bias_unless_batch_norm_follows(head):
    sizes, hidden_norm, out_norm, want = HEADS[head]
    words = []
    for layer in mlp(sizes, out_norm, hidden_norm):
        if isinstance(layer, nn.ReLU):
            words.append("ReLU")
        else:
            kind = "Linear" if isinstance(layer, nn.Linear) else "norm"
            words.append(kind + "-+"[layer.bias is not None])
    assert " ".join(words) == want


def test_head_sizes_are_as_given_and_its_batch_norm_is_of_one_group():
    head = mlp([8, 16, 4])
    assert [tuple(layer.weight.shape) for layer in head if isinstance(layer, nn.Linear)] == [(16, 8), (4, 16)]
    assert head[1].groups == 1
    assert head[1].num_features == 16


# Student


def test_student_returns_the_projection_and_its_prediction():
    student, _ = networks(views=1)
    x = views(1)[0]
    q, p = student(x)
    reference = copy.deepcopy(student)
    want = reference.g(reference.f(x))
    torch.testing.assert_close(q, want)
    torch.testing.assert_close(p, reference.h(want))


@pytest.mark.parametrize("groups", [1, 2])
def test_stacked_views_equal_separate_passes(groups):
    student, _ = networks(groups)
    alone = copy.deepcopy(student)
    set_views(alone, 1)
    x = views()
    stacked = student(*x)
    separate = [torch.cat(part) for part in zip(*(alone(view) for view in x), strict=True)]
    for a, b in zip(stacked, separate, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    for name, t in alone.state_dict().items():  # running statistics: one update a view, in order
        torch.testing.assert_close(student.state_dict()[name], t, rtol=0, atol=1e-7)


def test_networks_return_float32_when_they_compute_in_bf16(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # emulated CPUs may promise its bf16 and not have it
    student, teacher = networks(dtype=torch.float32)
    x, full = views(dtype=torch.float32), copy.deepcopy((student, teacher))
    both = nn.ModuleList([student, teacher])
    set_compute_dtype(both, torch.bfloat16)
    half = [*student(*x), teacher(*x, shuffle=uniforms())]
    exact = [*full[0](*x), full[1](*x, shuffle=uniforms())]
    for a, b in zip(half, exact, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert 1e-4 < (a - b).norm() / b.norm() < 0.1  # bf16 was at work, and only that
    assert all(p.dtype == torch.float32 for p in both.parameters())


def test_weights_cast_together_are_those_of_autocast_and_so_are_their_gradients(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    student, _ = networks(dtype=torch.float32)
    plain, x = copy.deepcopy(student), torch.cat(views(dtype=torch.float32))
    _, q, p = run_parts([student.f, student.g, student.h], x, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        want_q = plain.g(plain.f(x))
        want_p = plain.h(want_q)
    assert q.dtype == torch.bfloat16
    assert torch.equal(q, want_q)
    assert torch.equal(p, want_p)
    p.float().square().sum().backward()
    want_p.float().square().sum().backward()
    for (name, mine), theirs in zip(student.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        assert torch.equal(mine.grad, theirs.grad), name


def test_the_pass_back_in_bf16_ends_at_a_frozen_backbone():
    student, _ = networks(dtype=torch.float32)
    student.f.requires_grad_(False)
    features, q, _ = run_parts([student.f, student.g, student.h], torch.cat(views(dtype=torch.float32)), torch.bfloat16)
    assert not features.requires_grad
    assert q.requires_grad


# Teacher


def test_the_teacher_starts_as_a_copy_of_its_own():
    student, teacher = networks()
    for part in ("f", "g"):
        theirs, mine = snapshot(getattr(student, part)), getattr(teacher, part).state_dict()
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    before = snapshot(teacher)
    move_apart(student)
    assert all(torch.equal(t, before[name]) for name, t in teacher.state_dict().items())


@pytest.mark.parametrize("momentum", [0.0, 0.99, 1.0])
def test_an_update_moves_every_parameter_by_one_minus_momentum_and_no_buffer(momentum):
    student, teacher = networks()
    move_apart(student)
    student(*views())
    before, theirs = snapshot(teacher), student.state_dict()
    teacher.update(student, momentum)
    parameters = {name for name, _ in teacher.named_parameters()}
    for name, after in teacher.state_dict().items():
        if name in parameters:
            want = momentum * before[name] + (1 - momentum) * theirs[name]
            torch.testing.assert_close(after, want, rtol=0, atol=1e-14)
            assert momentum == 1 or not torch.equal(after, before[name])
        else:
            assert torch.equal(after, before[name])


def test_the_teacher_has_no_gradient_and_leaves_the_student_alone():
    student, teacher = networks()
    before = snapshot(student)
    z = teacher(*(view.requires_grad_() for view in views()), shuffle=uniforms())
    teacher.update(student, 0.5)
    assert not z.requires_grad
    assert not any(p.requires_grad for p in teacher.parameters())
    assert all(p.requires_grad for p in student.parameters())
    assert all(torch.equal(t, before[name]) for name, t in student.state_dict().items())


@pytest.mark.parametrize("groups", [1, 2])
def test_the_teacher_stays_in_train_mode_and_normalizes_by_its_own_batch(groups):
    _, teacher = networks(groups)
    x, before = views(), snapshot(teacher)
    z = teacher(*x, shuffle=uniforms())
    assert all(module.training for module in teacher.modules())
    assert all(torch.equal(t, before[name]) for name, t in teacher.state_dict().items())  # it keeps no statistics
    for name, t in teacher.named_buffers():
        if name.endswith("running_mean"):
            t.fill_(100.0)  # what eval mode would use
    torch.testing.assert_close(teacher(*x, shuffle=uniforms()), z, rtol=0, atol=1e-12)


def test_the_shuffle_is_undone():
    """With one group, statistics do not depend on the order: the output is that of the plain pass."""
    student, teacher = networks(groups=1)
    x = views()
    want = student(*x)[0].detach()
    for seed in range(3):
        assert not torch.equal(uniforms(seed=seed).argsort(1)[0], torch.arange(B))
        torch.testing.assert_close(teacher(*x, shuffle=uniforms(seed=seed)), want, rtol=0, atol=1e-10)


def test_the_shuffle_deals_images_into_other_groups():
    student, teacher = networks(groups=2)
    x = views()
    in_order = torch.arange(B).expand(2, B) / B
    torch.testing.assert_close(teacher(*x, shuffle=in_order), student(*x)[0].detach(), rtol=0, atol=1e-10)
    a, b = (teacher(*x, shuffle=uniforms(seed=seed)) for seed in (0, 1))
    assert (a - b).abs().max() > 1e-3


def test_each_view_has_its_own_shuffle():
    _, teacher = networks(groups=2)
    x, shuffle = views(), uniforms()
    z = teacher(*x, shuffle=shuffle)
    other = teacher(*x, shuffle=torch.stack([shuffle[0], uniforms(seed=1)[0]]))
    torch.testing.assert_close(other[:B], z[:B], rtol=0, atol=1e-12)
    assert (other[B:] - z[B:]).abs().max() > 1e-3
    set_views(teacher, 1)
    for v in range(2):  # row v of the draws belongs to view v
        alone = teacher(x[v], shuffle=shuffle[v : v + 1])
        torch.testing.assert_close(alone, z.chunk(2)[v], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(4,), (2, 6), (3, 3), ()], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_that_splits_its_gradients_has_torchs(bias, shape):
    torch.manual_seed(0)
    layer, x = Linear(5, 3, bias).double(), torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True)
    inputs, dy = [x, *layer.parameters()], torch.randn(*shape, 3, dtype=torch.float64)
    want = torch.autograd.grad(layer(x), inputs, dy)
    ours = _Linear.apply(x, layer.weight, layer.bias)
    assert torch.equal(ours, layer(x))
    for a, b in zip(torch.autograd.grad(ours, inputs, dy), want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_gradient_that_the_side_stream_reads_is_not_added_to_in_place(monkeypatch):
    """In x + linear(x), the same tensor goes into the layer's gradient and into the sum of the gradients of x."""
    held = []
    monkeypatch.setattr("mixnn.nn.encoder.keep_alive", lambda dy: held.append((dy, dy.clone())))
    layer, x = Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    (x * 1 + _Linear.apply(x * 1, layer.weight, layer.bias)).square().sum().backward()
    ((dy, before),) = held
    assert torch.equal(dy, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_heads_in_bf16_have_the_gradients_of_float32():
    torch.manual_seed(0)
    head, x = mlp([64, 256, 128]).cuda(), torch.randn(512, 64, device="cuda")

    def gradients(dtype):
        head.zero_grad()
        run_parts([head], x, dtype)[0].float().square().mean().backward()
        return [p.grad.clone() for p in head.parameters()]

    want = gradients(torch.float32)
    for _ in range(10):  # memory is used again while the side stream still reads it, if it may be
        for ours, exact in zip(gradients(torch.bfloat16), want, strict=True):
            assert (ours - exact).norm() < 0.03 * exact.norm()
