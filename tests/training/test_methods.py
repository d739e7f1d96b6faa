"""Every method through the real trainer: a run that is stopped and resumed ends as one that was not, and serves."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import mixnn
from mixnn import methods
from mixnn.config import Interrupted
from mixnn.evaluation.features import features
from mixnn.progress import Reporter
from mixnn.runs import Run, checkpoint
from mixnn.runs.weights import load_backbone
from mixnn.training.configure import resolve
from mixnn.training.trainer import Trainer

QUIET = Reporter(quiet=True)
SETTINGS: dict[str, Any] = {"limit": 32, "batch_size": 16, "epochs": 2, "warmup_epochs": 0, "knn_every": 0}
OPTIONS = {"hidden": 16, "dim": 8, "support_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in methods.METHODS} | {
    "cmsf with a memory": ("cmsf", {"auxiliary": "prev_epoch", "constraint": 7, "leaky_queue": True}),
    "unmix on moco": ("unmix", {"base": "moco", "mixed": "student", "ema_per_call": True}),
    "mnn of random rows": ("mnn", {"select": "random", "lam_scope": "sample"}),
    "nnclr of labels": ("nnclr", {"select": "labels", "topk": 3}),
    "snclr mixed": ("snclr", {"weights": "wse", "mixer": "raw_renorm"}),
}
TIMING = ("seconds", "images_per_s")


def train(out: Path, case: str) -> Run:
    name, options = CASES[case]
    known = {row["name"] for row in methods.describe(name)}
    options = {key: value for key, value in OPTIONS.items() if key in known} | options
    return mixnn.pretrain("digits", method=name, options=options, out=out, verbose=QUIET, **SETTINGS)


def state(run: Run) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, others = checkpoint.load(checkpoint.list_checkpoints(run.path / "checkpoints")[0])
    return tensors, {key: value for key, value in others.items() if key != "seconds"}


def log(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in TIMING} for record in run.metrics()]


def stop_in_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = Trainer._one_step

    def one_step(self: Trainer) -> None:
        if self.done == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self)

    monkeypatch.setattr(Trainer, "_one_step", one_step)


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_run_of_every_method_goes_on_to_the_same_bits_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
):
    straight = train(tmp_path / "straight", case)
    assert len(log(straight)) == 2
    with monkeypatch.context() as patch:
        stop_in_step(patch, 3)  # of four, in the middle of the second epoch
        with pytest.raises(Interrupted):
            train(tmp_path / "stopped", case)
    stopped = mixnn.pretrain(resume=tmp_path / "stopped", verbose=QUIET)
    (tensors, others), (want, want_others) = state(stopped), state(straight)
    assert others == want_others
    assert others["step"] == 4
    assert tensors.keys() == want.keys()
    assert [name for name, t in tensors.items() if not torch.equal(t, want[name])] == []
    assert log(stopped) == log(straight)
    backbone, step = load_backbone(stopped)
    assert step == 4
    assert features(backbone, mixnn.data.load("digits", "test")).isfinite().all()


@pytest.mark.parametrize("method, options", [("mnn", {"topk": 0}), ("byol", {}), ("simclr", {}), ("unmix", {})])
def test_a_batch_larger_than_a_support_set_that_is_not_there_is_fine(method: str, options: dict[str, Any]):
    config, _ = resolve(mixnn.data.open_dataset("digits"), options, {"method": method, "batch_size": 1024})
    assert config.options.get("support_size", 512) < config.batch_size
