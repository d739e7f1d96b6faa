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


def test_an_unknown_optimizer_is_refused_before_any_work(tmp_path):
    with pytest.raises(UserError, match=r"unknown optimizer 'sgdd', did you mean 'sgd'"):
        mixnn.pretrain("digits", optimizer="sgdd", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_new_optimizer_needs_one_row_and_resumes_exactly(tmp_path, monkeypatch):
    def rmsprop(parameters, _):
        optimizer = torch.optim.RMSprop(parameters, lr=torch.zeros(()), capturable=False, foreach=False)
        for p in parameters:
            optimizer.state[p] |= {"step": torch.zeros(()), "square_avg": torch.zeros_like(p)}
        return optimizer

    monkeypatch.setitem(optimizers.OPTIMIZERS, "rmsprop", rmsprop)
    common = {"limit": 64, "batch_size": 16, "knn_every": 0, "checkpoint_every": 1, "lr": 0.01, "optimizer": "rmsprop"}
    common |= {"options": {"support_size": 64, "hidden": 16, "dim": 8}, "reporter": mixnn.progress.Reporter(quiet=True)}
    whole = mixnn.pretrain("digits", epochs=2, out=tmp_path / "whole", **common)
    broken = mixnn.pretrain("digits", epochs=2, out=tmp_path / "broken", **common)
    newest = sorted((broken.path / "checkpoints").iterdir())[-1]
    newest.unlink()  # back to the end of the first epoch
    mixnn.pretrain(resume=broken.path, reporter=common["reporter"])
    (want, _), (got, _) = whole.load_checkpoint(pytest.fail), broken.load_checkpoint(pytest.fail)
    assert want.keys() == got.keys()
    assert "square_avg.0" in got
    assert all(torch.equal(t, got[name]) for name, t in want.items())
