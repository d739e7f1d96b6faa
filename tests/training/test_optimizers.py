"""Optimizers are chosen by name, and their state travels with checkpoints under stable names."""

import pytest
import torch

import mixnn
import mixnn.progress
from mixnn.config import Config, UserError
from mixnn.training import optimizers
from mixnn.training.optimizers import OPTIMIZERS, optimizer_tensors


def test_the_state_of_sgd_has_the_names_that_checkpoints_have():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = OPTIMIZERS["sgd"](parameters, Config())
    assert {name: tuple(t.shape) for name, t in optimizer_tensors(optimizer).items()} == {
        "momentum.0": (2,),
        "momentum.1": (3,),
    }


def test_the_state_of_adamw_exists_before_the_first_step_and_each_parameter_has_its_own():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    tensors = optimizer_tensors(OPTIMIZERS["adamw"](parameters, Config(optimizer="adamw")))
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
    optimizer = OPTIMIZERS["adamw"](ours, Config(optimizer="adamw", weight_decay=weight_decay))
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


def resumed(tmp_path, optimizer):
    """The last checkpoints of an unbroken run and of one whose second epoch was trained after a resume."""
    common = {"limit": 64, "batch_size": 16, "knn_every": 0, "checkpoint_every": 1, "lr": 0.01, "optimizer": optimizer}
    common |= {"options": {"support_size": 64, "hidden": 16, "dim": 8}, "reporter": mixnn.progress.Reporter(quiet=True)}
    whole = mixnn.pretrain("digits", epochs=2, out=tmp_path / "whole", **common)
    broken = mixnn.pretrain("digits", epochs=2, out=tmp_path / "broken", **common)
    newest = sorted((broken.path / "checkpoints").iterdir())[-1]
    newest.unlink()  # back to the end of the first epoch
    mixnn.pretrain(resume=broken.path, reporter=common["reporter"])
    return whole.load_checkpoint(pytest.fail)[0], broken.load_checkpoint(pytest.fail)[0]


def test_adamw_resumes_exactly(tmp_path):
    want, got = resumed(tmp_path, "adamw")
    assert want.keys() == got.keys()
    assert got["step.0"] == 8
    assert got["exp_avg_sq.0"].any()
    assert [name for name, t in want.items() if not torch.equal(t, got[name])] == []


def test_a_new_optimizer_needs_one_row_and_resumes_exactly(tmp_path, monkeypatch):
    def rmsprop(parameters, _):
        optimizer = torch.optim.RMSprop(parameters, lr=torch.zeros(()), capturable=False, foreach=False)
        for p in parameters:
            optimizer.state[p] |= {"step": torch.zeros(()), "square_avg": torch.zeros_like(p)}
        return optimizer

    monkeypatch.setitem(optimizers.OPTIMIZERS, "rmsprop", rmsprop)
    want, got = resumed(tmp_path, "rmsprop")
    assert want.keys() == got.keys()
    assert "square_avg.0" in got
    assert all(torch.equal(t, got[name]) for name, t in want.items())
