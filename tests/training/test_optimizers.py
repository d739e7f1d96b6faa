"""Optimizers are chosen by name, and their state travels with checkpoints under stable names."""

import pytest
import torch

import mixnn
import mixnn.progress
from mixnn.config import Config, UserError
from mixnn.training.optimizers import (
    MIN_WEIGHT_NORM,
    POLYNOMIALS,
    VECTOR_LR_SCALE,
    OptimizerState,
    can_be_captured,
    make_optimizer,
    optimizer_tensors,
    orthogonal,
    parameter_groups,
    set_learning_rate,
)


def make(parameters, **settings):
    return make_optimizer(((f"p{i}", p) for i, p in enumerate(parameters)), Config(**settings))


def test_the_state_of_sgd_has_the_names_that_checkpoints_have():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = make(parameters)
    assert {name: tuple(t.shape) for name, t in optimizer_tensors(optimizer).items()} == {
        "momentum.0": (2,),
        "momentum.1": (3,),
    }


def test_the_state_of_adamw_exists_before_the_first_step_and_each_parameter_has_its_own():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    tensors = optimizer_tensors(make(parameters, optimizer="adamw"))
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    assert shapes == {
        "step.0": (),
        "exp_avg.0": (2,),
        "exp_avg_sq.0": (2,),
        "step.1": (),
        "exp_avg.1": (3,),
        "exp_avg_sq.1": (3,),
    }
    assert len({t.data_ptr() for t in tensors.values()}) == 6
    assert not any(t.any() for t in tensors.values())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_takes_torchs_steps(weight_decay):
    def quadratic(parameters):
        a, b = parameters
        return (a.square() * torch.tensor([1.0, 30.0])).sum() + (a.sum() * b).square().sum()

    ours, theirs = (
        [torch.nn.Parameter(torch.tensor(values)) for values in ([1.0, -2.0], [3.0, 0.5, -1.0])] for _ in range(2)
    )
    optimizer = make(ours, optimizer="adamw", weight_decay=weight_decay)
    reference = torch.optim.AdamW(theirs, weight_decay=weight_decay, foreach=False, fused=False)
    for lr in (0.0, 0.05, 0.1, 0.1, 0.03):
        optimizer.param_groups[0]["lr"].fill_(lr)
        reference.param_groups[0]["lr"] = lr
        for parameters, each in ((ours, optimizer), (theirs, reference)):
            each.zero_grad()
            quadratic(parameters).backward()
            each.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours[0], torch.tensor([1.0, -2.0]), atol=0.1)


def test_an_unknown_optimizer_is_refused_before_any_work(tmp_path):
    with pytest.raises(UserError, match=r"unknown optimizer 'sgdd', did you mean 'sgd'"):
        mixnn.pretrain("digits", optimizer="sgdd", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def resumed(tmp_path, optimizer, **settings):
    """The last checkpoints of an unbroken run and of one whose second epoch was trained after a resume."""
    common = {"limit": 64, "batch_size": 16, "knn_every": 0, "checkpoint_every": 1, "lr": 0.01, "optimizer": optimizer}
    common |= settings
    common |= {"options": {"support_size": 64, "hidden": 16, "dim": 8}, "verbose": mixnn.progress.Reporter(quiet=True)}
    whole = mixnn.pretrain("digits", epochs=2, out=tmp_path / "whole", **common)
    broken = mixnn.pretrain("digits", epochs=2, out=tmp_path / "broken", **common)
    newest = sorted((broken.path / "checkpoints").iterdir())[-1]
    newest.unlink()  # back to the end of the first epoch
    mixnn.pretrain(resume=broken.path, verbose=common["verbose"])
    return whole.load_checkpoint(pytest.fail)[0], broken.load_checkpoint(pytest.fail)[0]


def test_adamw_resumes_exactly(tmp_path):
    want, got = resumed(tmp_path, "adamw")
    assert want.keys() == got.keys()
    assert got["step.0"] == 8
    assert got["exp_avg_sq.0"].any()
    assert [name for name, t in want.items() if not torch.equal(t, got[name])] == []


class Odd(torch.optim.Optimizer):
    """Remembers all kinds of things, most of them only from the first step on."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "calls": 0, "betas": (0.9, 0.5)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["calls"] += 1
            shared = self.state.setdefault("all", {"total": torch.zeros((), dtype=torch.float64), "seen": 0})
            shared["seen"] += len(group["params"])
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"count": 0, "rate": 1.0, "mean": torch.zeros_like(p, dtype=torch.float64)}
                    state |= {"last": [], "limits": (None, "none"), "by_sign": {1: torch.zeros(1), -1: 0.5}}
                state["count"] += 1
                state["rate"] *= 0.9 + 0.01 * group["calls"] / (1 + shared["seen"])
                state["mean"].lerp_(p.grad.double(), 0.1)
                state["last"] = [*state["last"], p.grad.mean()][-2:]
                state["by_sign"][1] += p.grad.sign().mean()
                state["by_sign"][-1] += float(state["by_sign"][1])
                shared["total"] += state["mean"].norm()
                push = state["mean"] + sum(state["last"]) + state["by_sign"][1].double() / state["count"]
                step = group["lr"] * state["rate"] / (1 + shared["total"] + abs(state["by_sign"][-1]))
                p.sub_((step * push).to(p.dtype))


def test_an_optimizer_with_odd_state_resumes_exactly(tmp_path, monkeypatch):
    monkeypatch.setitem(mixnn.OPTIMIZERS, "odd", lambda groups, _: Odd(groups))
    want, got = resumed(tmp_path, "odd")
    assert want.keys() == got.keys()
    assert {"mean.0", "last.0.1", "by_sign.0.1", "total.all"} <= got.keys()
    assert want["mean.0"].dtype == torch.float64
    assert [name for name, t in want.items() if not torch.equal(t, got[name])] == []


class Wrapped(torch.optim.SGD):
    """An optimizer with a format of its own, as those have that wrap another one."""

    speed = 1.0

    def step(self):
        self.speed *= 0.5
        for group in self.param_groups:
            group["lr"] = group["lr"] * (1 + self.speed)
        super().step()

    def state_dict(self):
        return super().state_dict() | {"speed": self.speed}

    def load_state_dict(self, saved):
        self.speed = saved.pop("speed")
        super().load_state_dict(saved)


def test_an_optimizer_with_a_format_of_its_own_resumes_exactly(tmp_path, monkeypatch):
    def wrapped(groups, _):
        plain = [{k: v for k, v in group.items() if k != "names"} for group in groups]
        return Wrapped(plain, lr=0.1, momentum=0.9)

    monkeypatch.setitem(mixnn.OPTIMIZERS, "wrapped", wrapped)
    want, got = resumed(tmp_path, "wrapped")
    assert any(name.endswith("momentum_buffer") for name in got)
    assert [name for name, t in want.items() if not torch.equal(t, got[name])] == []


def test_an_optimizer_that_leaves_parameters_out_is_refused(monkeypatch):
    def first_group(groups, config):  # noqa: ARG001
        return torch.optim.SGD(groups[:1], lr=0.1)

    monkeypatch.setitem(mixnn.OPTIMIZERS, "first", first_group)
    named = list(torch.nn.Linear(2, 2).named_parameters())
    config = Config(data="digits", optimizer="first", decayed="weights")
    with pytest.raises(UserError, match=r"^the optimizer first lacks 1 of 2 parameters, among them bias: pass"):
        make_optimizer(named, config)
    named[1][1].requires_grad_(False)
    assert len(make_optimizer(named, config).param_groups) == 1


def test_steps_that_are_undone_leave_no_state_behind():
    """As a run with a time budget does, to measure its pace."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = Odd([parameter])
    state = OptimizerState(optimizer)
    before = state.save()
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state
    state.load(*before)
    assert not optimizer.state
    assert optimizer.param_groups[0]["calls"] == 0


def test_what_a_checkpoint_cannot_hold_is_refused_with_its_name():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["history"] = {1, 2}
    with pytest.raises(UserError, match=r"keeps a set \(history.0\), which a checkpoint cannot hold"):
        OptimizerState(optimizer).save()


def test_a_checkpoint_from_before_other_optimizers_is_read():
    """Such a checkpoint has momentum.0, momentum.1 and so on, and no list of what the optimizer remembers."""
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = make(parameters)
    OptimizerState(optimizer).load({"momentum.0": torch.full((2,), 2.0), "momentum.1": torch.full((3,), 3.0)}, None)
    assert [optimizer.state[p]["momentum_buffer"].tolist() for p in parameters] == [[2.0] * 2, [3.0] * 3]


# Parameter groups and LARS


def test_biases_and_norms_can_go_without_weight_decay():
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
    (everything,) = parameter_groups(network.named_parameters(), Config(weight_decay=0.1))
    assert (len(everything["params"]), everything["weight_decay"]) == (6, 0.1)
    for settings in ({"decayed": "weights"}, {"optimizer": "lars"}):
        weights, others = parameter_groups(network.named_parameters(), Config(weight_decay=0.1, **settings))
        assert (weights["names"], weights["weight_decay"]) == (["0.weight", "2.weight"], 0.1)
        assert (others["names"], others["weight_decay"]) == (["0.bias", "1.weight", "1.bias", "2.bias"], 0.0)


def test_each_group_has_its_share_of_the_learning_rate():
    one, two = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": [one], "lr": torch.zeros(())}, {"params": [two], "lr_scale": 0.1}], lr=1.0)
    set_learning_rate(optimizer, 0.5)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.05]


def test_lars_follows_its_formula():
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in ((4, 3), (4,), (2, 2))]
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    optimizer = make(parameters, optimizer="lars", weight_decay=0.1, sgd_momentum=0.8)
    weights, momenta = [v.double() for v in values], [torch.zeros(v.shape, dtype=torch.float64) for v in values]
    for lr in (0.5, 2.0, 3.0):
        set_learning_rate(optimizer, lr)
        gradients = [torch.randn(v.shape, generator=generator) for v in values]
        gradients[2].zero_()
        for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            parameter.grad, update = gradient, gradient.double()
            if i != 1:  # a bias is updated as it is
                update = update + 0.1 * weights[i]
                update = update * 1e-3 * weights[i].square().sum().sqrt() / update.square().sum().sqrt()
            momenta[i] = 0.8 * momenta[i] + update
            weights[i] = weights[i] - lr * momenta[i]
        optimizer.step()
    for parameter, value in zip(parameters, weights, strict=True):
        torch.testing.assert_close(parameter.detach().double(), value, rtol=1e-5, atol=1e-6)


def test_lars_leaves_zero_weights_and_zero_gradients_finite():
    parameters = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2, 2))]
    optimizer = make(parameters, optimizer="lars", weight_decay=0.1)
    parameters[0].grad, parameters[1].grad = torch.ones(2, 2), torch.zeros(2, 2)
    set_learning_rate(optimizer, 0.5)
    optimizer.step()
    assert parameters[0].tolist() == [[-0.5] * 2] * 2  # as SGD
    assert parameters[1].tolist() == [[0.0] * 2] * 2


@pytest.mark.parametrize("optimizer", ["lars", "adamw"])
def test_a_run_with_parameter_groups_resumes_exactly(tmp_path, optimizer):
    want, got = resumed(tmp_path, optimizer, decayed="weights")
    assert [name for name, t in want.items() if not torch.equal(t, got[name])] == []


# Muon


def test_orthogonal_matrices_have_singular_values_near_one():
    rng = torch.Generator().manual_seed(0)
    for rows, columns in ((8, 27), (32, 8), (16, 16)):
        matrices = torch.randn(3, rows, columns, generator=rng) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
        found = orthogonal(matrices)
        assert found.shape == matrices.shape
        values, before = torch.linalg.svdvals(found), torch.linalg.svdvals(matrices)
        assert values.max() < 1.25
        assert values[before > 0.006 * before.norm(dim=1, keepdim=True)].min() > 0.75
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        likeness = torch.cosine_similarity(found.flatten(1), (left @ right).flatten(1))
        assert likeness.min() > 0.9, "the singular vectors stay"


def test_singular_values_far_from_equal_stay_bounded_in_bf16():
    rng = torch.Generator().manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(4, 64, 256, generator=rng), full_matrices=False)
    scales = torch.stack([torch.arange(1.0, 65) ** -power for power in (0, 1, 2, 8)])
    values = torch.linalg.svdvals(orthogonal((left * scales[:, None] @ right).bfloat16()).float())
    assert values.max() < 1.25
    assert values[:2].min() > 0.7  # of the others, most are below 0.006
    assert values[2, :8].min() > 0.7


def test_singular_values_that_rounding_makes_too_large_do_not_explode():
    values = torch.linspace(
        0.01, 1.07, 1000, dtype=torch.float64
    )  # 1 is the largest that a matrix of length 1 can have
    for a, b, c in POLYNOMIALS:
        values = (a * values + b * values**3 + c * values**5) * 1.04
        assert 0 < values.min() < values.max() < 2.3
    assert 0.7 < values.min() < values.max() < 1.35


def test_zeros_around_a_matrix_do_not_change_how_it_is_made_orthogonal():
    matrices = torch.randn(2, 6, 27, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    padded = orthogonal(torch.nn.functional.pad(matrices, (0, 5, 0, 10)))
    torch.testing.assert_close(padded[:, :6, :27], orthogonal(matrices))
    assert padded[:, 6:].count_nonzero() == padded[:, :, 27:].count_nonzero() == 0


def muon_parameters():
    torch.manual_seed(0)
    shapes = (6, 3, 3, 3), (6, 27), (40, 8), (6,)  # two wide matrices and a tall one
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn(p.shape)
    return parameters


def test_muon_turns_weights_by_the_learning_rate_and_others_as_sgd_does():
    parameters = muon_parameters()
    before = [p.detach().clone() for p in parameters]
    optimizer = make(parameters, optimizer="muon", weight_decay=0.1)
    set_learning_rate(optimizer, 0.02)
    optimizer.step()
    for p, old in zip(parameters[:3], before, strict=False):
        step = orthogonal(p.grad.flatten(1)[None])[0].view(p.shape)
        moved = old - 0.02 * old.norm() * step / step.norm()
        torch.testing.assert_close(p.detach(), moved * old.norm() / moved.norm(), rtol=1e-3, atol=1e-4)
    update = parameters[3].grad + 0.1 * before[3]  # with weight decay
    torch.testing.assert_close(parameters[3].detach(), before[3] - 0.02 * VECTOR_LR_SCALE * update)


def test_the_length_of_weights_stays_in_muon_wherever_gradients_point():
    parameters = muon_parameters()
    lengths = [p.norm().item() for p in parameters[:3]]
    optimizer = make(parameters, optimizer="muon")
    set_learning_rate(optimizer, 0.1)
    for sign in (1, -1):
        for _ in range(100):
            for p in parameters:
                p.grad = sign * p.detach() + 0.1 * torch.randn(p.shape)  # toward zero, then away from it
            optimizer.step()
        assert [p.norm().item() for p in parameters[:3]] == pytest.approx(lengths, rel=1e-3)


def test_muon_has_nesterov_momentum():
    parameters = muon_parameters()
    optimizer = make(parameters, optimizer="muon", sgd_momentum=0.5)
    gradients = [p.grad.clone() for p in parameters]
    optimizer.step()
    for p in parameters:
        p.grad = torch.randn(p.shape)
    before, newer = parameters[0].detach().clone(), parameters[0].grad.clone()
    set_learning_rate(optimizer, 0.01)
    optimizer.step()
    momentum = newer + 0.5 * gradients[0]
    moved = (parameters[0].detach() - before).flatten()
    want = -orthogonal((newer + 0.5 * momentum).flatten(1)[None]).flatten()
    assert torch.cosine_similarity(moved, want, dim=0) > 0.999


def test_muon_leaves_zero_weights_and_zero_gradients_finite_and_skips_what_has_none():
    parameters = muon_parameters()
    parameters[0].data.zero_()
    parameters[1].grad.zero_()
    parameters[2].grad = None
    before = [p.detach().clone() for p in parameters]
    optimizer = make(parameters, optimizer="muon")
    set_learning_rate(optimizer, 0.1)
    optimizer.step()
    assert all(p.isfinite().all() for p in parameters)
    assert parameters[0].any()
    assert torch.equal(parameters[2], before[2])
    assert can_be_captured(optimizer)


def test_muon_lets_weights_that_start_from_zero_grow():
    parameters = muon_parameters()
    parameters[0].data.zero_()
    parameters[2].data.mul_(1e-6)
    optimizer = make(parameters, optimizer="muon")
    set_learning_rate(optimizer, 0.1)
    for _ in range(20):
        optimizer.step()  # always in the same direction
    for p in (parameters[0], parameters[2]):
        assert MIN_WEIGHT_NORM <= p.norm().item() < 2 * MIN_WEIGHT_NORM


def test_only_state_in_tensors_that_exists_before_the_first_step_is_captured():
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    assert all(can_be_captured(make([parameter], optimizer=name)) for name in ("sgd", "adamw", "lars"))
    assert not can_be_captured(Odd([parameter]))
    assert not can_be_captured(torch.optim.SGD([parameter], lr=0.1, momentum=0.9))
