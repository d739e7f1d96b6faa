"""What the trainer makes of a configuration."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mixnn
from mixnn.config import Config
from mixnn.data import dataset as dataset_module
from mixnn.data import load
from mixnn.nn.folding import folded
from mixnn.progress import Reporter
from mixnn.runs import Run, checkpoint
from mixnn.runs.start import open_run
from mixnn.runs.weights import KEPT, STUDENT
from mixnn.training import pretrain as training
from mixnn.training import trainer as trainer_module
from mixnn.training.configure import configure
from mixnn.training.trainer import Trainer, configured_views

CONFIG = Config(data="cifar10", image_size=8, crop_area=0.3, weak_flip=0.7)
QUIET = Reporter(quiet=True)
SMALL = {"limit": 64, "batch_size": 16, "epochs": 2, "warmup_epochs": 1, "knn_every": 0, "checkpoint_every": 1}
OPTIONS = {"support_size": 32, "hidden": 16, "dim": 8}


def test_digits_are_never_flipped():
    assert [view.flip for view in configured_views(CONFIG, load("digits", "train").mirror, ("strong", "weak"))] == [
        0.0,
        0.0,
    ]


def test_the_supervised_reference_has_plain_batch_norm_unless_told_otherwise():
    assert configure("cifar10", {}, {}).bn_groups == 8
    assert configure("cifar10", {}, {"method": "supervised"}).bn_groups == 1
    assert configure("cifar10", {}, {"method": "supervised", "bn_groups": 4}).bn_groups == 4


def test_draws_are_not_the_numbers_that_made_the_weights():
    config = configure("digits", OPTIONS, SMALL | {"seed": 3, "image_size": 8})
    trainer = Trainer(config, load("digits", "train"), QUIET)
    draws = torch.rand(100, generator=trainer.generator.manual_seed(trainer.generator.initial_seed()))
    assert not torch.isin(draws, torch.rand(100, generator=torch.Generator().manual_seed(3))).any()


def test_views_follow_the_configuration():
    strong, weak = configured_views(CONFIG, True, ("strong", "weak"))
    assert (strong.flip, weak.flip) == (0.5, 0.7)
    assert strong.area == weak.area == (0.3, 1.0)
    assert strong.size == weak.size == 8
    assert (strong.jitter, strong.gray, strong.blur) == (0.8, 0.2, 0.5)
    assert (weak.jitter, weak.gray, weak.blur) == (0.0, 0.0, 0.0)


def test_a_run_saved_on_another_kind_of_device_goes_on_and_says_that_draws_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = mixnn.pretrain("digits", out=tmp_path / "run", options=OPTIONS, verbose=QUIET, **SMALL)
    newest, *_ = checkpoint.list_checkpoints(run.path / "checkpoints")
    tensors, state = checkpoint.load(newest)
    tensors["generator"], state["device"], state["step"] = torch.zeros(16, dtype=torch.uint8), "cuda", 4
    newest.unlink()
    checkpoint.save(newest.parent, 4, tensors, state)
    mixnn.pretrain(resume=run.path, verbose=QUIET)
    assert "saved on cuda, resumed on cpu: random draws differ" in " ".join(capsys.readouterr().err.split())
    assert run.metrics()[-1]["epoch"] == 2


def test_other_images_of_the_same_number_are_not_taken_for_the_runs_own(tmp_path: Path):
    run = mixnn.pretrain("digits", out=tmp_path / "run", options=OPTIONS, verbose=QUIET, **SMALL)
    newest, *_ = checkpoint.list_checkpoints(run.path / "checkpoints")
    tensors, state = checkpoint.load(newest)
    state["data"]["mean"][0] += 0.01
    checkpoint.save(newest.parent, state["step"], tensors, state)
    with pytest.raises(mixnn.UserError, match=r"has changed since the checkpoint was made: it has 64 images now"):
        mixnn.pretrain(resume=run.path, verbose=QUIET)


def test_a_folder_with_other_files_of_the_same_mean_is_not_taken_for_the_runs_own(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MIXNN_CACHE", str(tmp_path / "cache"))
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    photos = mixnn.data.to_folder(images, tmp_path / "photos")
    small = {"epochs": 1, "batch_size": 8, "device": "cpu", "options": {"hidden": 8, "dim": 8, "support_size": 8}}
    small["init_from"] = "none"
    run = mixnn.pretrain(photos, out=tmp_path / "run", verbose=QUIET, **small)
    mixnn.pretrain(resume=run.path, verbose=QUIET)
    first, second, aside = photos / "00.png", photos / "01.png", tmp_path / "aside"
    for old, new in ((first, aside), (second, first), (aside, second)):
        old.rename(new)
    with pytest.raises(mixnn.UserError, match="photos has changed"):
        mixnn.pretrain(resume=run.path, verbose=QUIET)
    newest, *_ = checkpoint.list_checkpoints(run.path / "checkpoints")
    tensors, state = checkpoint.load(newest)
    del state["data"]["files"]  # as in a checkpoint of before there was such a digest
    checkpoint.save(newest.parent, state["step"], tensors, state)
    mixnn.pretrain(resume=run.path, verbose=QUIET)


def test_an_edited_batch_size_does_not_mix_up_steps_and_epochs(tmp_path: Path):
    run = mixnn.pretrain("digits", out=tmp_path / "run", options=OPTIONS, verbose=QUIET, **SMALL)
    file = run.path / "config.yaml"
    file.write_text(file.read_text().replace("batch_size: 16", "batch_size: 32"))
    before = (run.path / "metrics.jsonl").read_text()
    with pytest.raises(mixnn.UserError, match="batch_size was 16 and is 32 now"):
        mixnn.pretrain(resume=run.path, verbose=QUIET)
    assert (run.path / "metrics.jsonl").read_text() == before


def test_a_knn_reading_that_fails_is_named_and_costs_nothing_else(tmp_path: Path, monkeypatch, capsys):
    often = SMALL | {"knn_every": 1}
    quiet = mixnn.pretrain("digits", out=tmp_path / "quiet", options=OPTIONS, verbose=QUIET, **SMALL)
    whole = mixnn.pretrain("digits", out=tmp_path / "whole", options=OPTIONS, verbose=QUIET, **often)
    capsys.readouterr()

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory\nand a long explanation")

    monkeypatch.setattr("mixnn.training.trainer.accuracy_by_vote", fail)
    failed = mixnn.pretrain("digits", out=tmp_path / "failed", options=OPTIONS, verbose=QUIET, **often)
    err = " ".join(capsys.readouterr().err.split())
    assert "no kNN reading at step 4: out of memory" in err
    assert "explanation" not in err
    for other, left_out in ((whole, {"knn", "knn_k"}), (quiet, set())):
        want = [record.keys() - left_out for record in other.metrics()]
        assert [record.keys() for record in failed.metrics()] == want
        ours, theirs = (
            checkpoint.load(checkpoint.list_checkpoints(run.path / "checkpoints")[0])[0] for run in (failed, other)
        )
        assert all(torch.equal(t, theirs[name]) for name, t in ours.items())


def test_embeddings_that_move_together_are_warned_of_once_and_after_a_resume_too(tmp_path: Path, monkeypatch, capsys):
    settings = SMALL | {"epochs": 5, "checkpoint_every": 4}
    spreads = {1: 0.6, 2: 0.9, 3: 0.7, 4: 0.6, 5: 0.3}
    honest = Trainer._means

    def told(trainer: Trainer) -> dict[str, float]:
        return honest(trainer) | {"spread": spreads[max(1, trainer.done // trainer.steps_per_epoch)]}

    monkeypatch.setattr(Trainer, "_means", told)
    run = mixnn.pretrain("digits", out=tmp_path / "run", options=OPTIONS, verbose=QUIET, **settings)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("a collapse may have begun") == 1
    assert "epoch 4: a collapse may have begun. Spread was 0.90 at epoch 2 and is 0.60" in said
    (run.path / "checkpoints" / "step-00000020.safetensors").unlink()  # back to the end of epoch 4
    mixnn.pretrain(resume=run.path, verbose=QUIET)
    assert "epoch 5: a collapse may have begun. Spread was 0.90" in " ".join(capsys.readouterr().err.split())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_images_that_stay_on_the_host_are_trained_and_read_with_the_same_result(tmp_path: Path, monkeypatch):
    often = SMALL | {"knn_every": 1, "mode": "eager"}
    there = mixnn.pretrain("digits", out=tmp_path / "there", options=OPTIONS, verbose=QUIET, **often)
    monkeypatch.setattr(mixnn.data.ImageSet, "fits", lambda *_: False)
    host = mixnn.pretrain("digits", out=tmp_path / "host", options=OPTIONS, verbose=QUIET, **often)
    for ours, theirs in zip(host.metrics(), there.metrics(), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
        assert ours["knn"] == pytest.approx(theirs["knn"], abs=10)  # of 64 images


def test_a_name_that_another_process_takes_in_the_meantime_is_not_taken_twice(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first: list[Run] = []

    class Slow(Trainer):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            monkeypatch.setattr(training, "Trainer", Trainer)
            first.append(mixnn.pretrain("digits", options=OPTIONS, verbose=QUIET, **SMALL))

    monkeypatch.setattr(training, "Trainer", Slow)
    second = mixnn.pretrain("digits", options=OPTIONS, verbose=QUIET, **SMALL)
    assert [str(run.path) for run in (*first, second)] == ["runs/digits-mnn", "runs/digits-mnn-2"]


def test_a_trainer_that_cannot_be_built_leaves_no_folder(tmp_path: Path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "Trainer", fail)
    for out in ("", "here"):
        with pytest.raises(RuntimeError, match="out of memory"):
            mixnn.pretrain("digits", out=out, options=OPTIONS, verbose=QUIET, **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_methods_options_are_arguments_like_settings(tmp_path: Path):
    given = {"method": "msf", "epochs": 0, "topk": 1, "views": "s/s", "hidden": 8}
    run = mixnn.pretrain("digits", out=tmp_path / "run", verbose=QUIET, **given)
    assert [run.config.options[name] for name in ("topk", "views", "hidden")] == [1, "s/s", 8]
    assert run.environment()["given"] == sorted(given)


def test_none_means_that_an_argument_was_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    absent = dict.fromkeys(("out", "labels", "views", "resume", "method", "seed", "topk", "verbose"))
    run = mixnn.pretrain("digits", epochs=0, limit=64, hidden=8, **absent)
    assert run.path == Path("runs/digits-mnn")
    assert run.environment()["given"] == ["epochs", "hidden", "limit"]
    assert mixnn.evaluate(run, None, labels=None, source=None, image_size=None, protocol="knn")["knn"]
    with pytest.raises(mixnn.UserError, match="pretrain needs a data set or a folder of images"):
        mixnn.pretrain(None)
    with pytest.raises(mixnn.UserError, match="unknown setting or option of mnn 'topkk'"):
        mixnn.pretrain("digits", topkk=None)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"topkk": 1}, "unknown setting or option of mnn 'topkk', did you mean 'topk'"),
        ({"epoch": 1}, "unknown setting or option of mnn 'epoch', did you mean 'epochs'"),
        ({"method": "byol", "topk": 1}, "unknown setting or option of byol 'topk'"),
        ({"topk": 1, "options": {"topk": 2}}, "topk is given twice, also in options"),
        ({"topk": -1}, "topk=-1: topk must be at least 0"),
        ({"encode_size": 16}, "encode_size=16 is for folders of images: digits is encoded at its own size, 8 pixels"),
        ({"options": [1]}, "options maps names to values, as in {topk: 5}"),
        ({"options": {1: 2}}, "options maps names to values, as in {topk: 5}"),
    ],
)
def test_a_wrong_option_is_refused_before_any_work(tmp_path: Path, given: dict[str, Any], message: str):
    with pytest.raises(mixnn.UserError, match=message):
        mixnn.pretrain("digits", out=tmp_path / "run", verbose=QUIET, **given)
    assert not (tmp_path / "run").exists()


def labeled_photos(folder: Path) -> Path:
    for i in range(24):
        path = folder / ("test" if i >= 16 else "train") / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (10 * i, 255 * (i % 2), 7)).save(path)
    return folder


def test_test_images_are_read_only_for_knn_evaluations(tmp_path: Path):
    photos = labeled_photos(tmp_path / "photos")
    (photos / "test" / "a" / "broken.png").write_text("not an image")
    common = {"labels": "folders", "on_error": "refuse", "epochs": 1, "batch_size": 8, "verbose": QUIET}
    common["init_from"] = "none"
    common["options"] = {"support_size": 8, "hidden": 8, "dim": 4}
    mixnn.pretrain(photos, out=tmp_path / "without", knn_every=0, **common)
    with pytest.raises(mixnn.UserError, match=r"broken\.png"):
        mixnn.pretrain(photos, out=tmp_path / "with", knn_every=1, **common)


def test_a_labeled_folders_training_images_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []
    real = dataset_module.load_folder
    monkeypatch.setattr(dataset_module, "load_folder", lambda *args, **kw: calls.append(args[1]) or real(*args, **kw))
    options = {"support_size": 8, "hidden": 8, "dim": 4}
    run = mixnn.pretrain(
        labeled_photos(tmp_path / "photos"),
        labels="folders",
        out=tmp_path / "run",
        epochs=1,
        batch_size=8,
        knn_every=1,
        init_from="none",
        options=options,
        verbose=QUIET,
    )
    assert sorted(calls) == ["test", "train"]
    assert "knn" in run.metrics()[-1]


def test_images_that_are_held_out_are_the_test_images_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for i in range(24):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (10 * i, 255 * (i % 2), 7)).save(path)
    common = {"labels": "folders", "epochs": 1, "batch_size": 8, "knn_every": 1, "init_from": "none"}
    common["options"] = {"support_size": 8, "hidden": 8, "dim": 4}
    run = mixnn.pretrain(tmp_path / "photos", out=tmp_path / "run", holdout=0.25, verbose=Reporter(), **common)
    assert "6 labeled images held out of training, as test images" in capsys.readouterr().err
    assert "knn" in run.metrics()[-1]
    assert run.load_checkpoint(print)[1]["data"]["images"] == 18
    protocol = mixnn.evaluate(run.path, protocol="knn", verbose=QUIET)["knn"]["protocol"]
    assert (protocol["train_images"], protocol["test_images"]) == (18, 6)
    with pytest.raises(mixnn.UserError, match=r"holdout must be from 0 to 0\.5"):
        mixnn.pretrain(tmp_path / "photos", holdout=0.6, verbose=QUIET, **common)


def test_knn_during_training_is_that_of_the_encoder_which_the_run_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[torch.Tensor] = []

    def first_weights(backbone: torch.nn.Module) -> torch.nn.Module:
        seen.append(next(backbone.parameters()).clone())
        return folded(backbone)

    monkeypatch.setattr(trainer_module, "folded", first_weights)
    small: dict[str, Any] = {"image_size": 32, "encode_size": 32, "epochs": 1, "batch_size": 8, "knn_every": 1}
    small |= {"trained_share": 0.5, "labels": "folders", "options": {"support_size": 8, "hidden": 8, "dim": 4}}
    run = mixnn.pretrain(labeled_photos(tmp_path / "photos"), out=tmp_path / "run", verbose=QUIET, **small)
    tensors, _ = run.load_checkpoint(pytest.fail)
    name = "stem.conv.weight"
    assert len(seen) == 1, "one reading"
    assert torch.equal(seen[0], tensors[KEPT + name])
    assert not torch.equal(tensors[STUDENT + name], tensors[KEPT + name])


def test_a_run_that_was_never_trained_cannot_go_on_or_be_diagnosed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = open_run(labeled_photos(tmp_path / "photos"), QUIET)
    for attempt in (mixnn.diagnose, lambda run: mixnn.pretrain(resume=run.path, epochs=1, verbose=QUIET)):
        with pytest.raises(mixnn.UserError, match=r"was not trained: use `mixnn\.pretrain\(.*photos'\)`"):
            attempt(run)


def test_images_too_small_for_the_backbone_are_refused_before_any_training(tmp_path: Path):
    small = {"image_size": 32, "epochs": 1, "out": tmp_path / "run", "verbose": QUIET}
    with pytest.raises(mixnn.UserError, match="needs images of 32 pixels or more, those of digits have 8"):
        mixnn.pretrain("digits", init_from="imagenet", **small)
    with pytest.raises(mixnn.UserError, match=r"photos have 16: use a larger encode_size"):
        mixnn.pretrain(labeled_photos(tmp_path / "photos"), encode_size=16, **small)
    assert not (tmp_path / "run").exists()
