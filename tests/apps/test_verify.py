"""verify finds what is damaged in a run, an export or the cache, and what does not repeat; it changes nothing."""

import itertools
import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mixnn
from mixnn.apps.verify import Verification, verify
from mixnn.cli import main
from mixnn.config import UserError
from mixnn.data.cache import cache_root
from mixnn.files import lock_run
from mixnn.progress import NullReporter
from mixnn.runs import Run, checkpoint
from mixnn.runs.layout import Layout
from mixnn.training import replay as replaying
from mixnn.training.pretrain import judge_again
from mixnn.training.step import Step
from mixnn.training.trainer import Trainer

SMALL: dict[str, Any] = {"backbone": "resnet8", "bn_groups": 1, "hidden": 32, "dim": 16, "device": "cpu"}
DIGITS = SMALL | {"limit": 64, "batch_size": 16, "warmup_epochs": 0, "support_size": 64, "knn_every": 0}
PHOTOS = SMALL | {"batch_size": 4, "image_size": 16, "init_from": "none", "support_size": 8, "warmup_epochs": 0}
FILES = ("config.yaml", "environment.json", "results.json", "command.txt", "metrics.jsonl", "judgement.json")


def flip(path: Path, place: float = 0.5, bit: int = 0x80) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= bit
    path.chmod(0o644)
    path.write_bytes(content)


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def statuses(found: Verification) -> dict[str, str]:
    return {check["name"]: check["status"] for check in found["checks"]}


def wrong(found: Verification) -> list[str]:
    assert found.ok == (not found.problems)
    return [name for name, status in statuses(found).items() if status == "wrong"]


def text(found: Verification, name: str) -> str:
    (check,) = (check for check in found["checks"] if check["name"] == name)
    return str(check["text"])


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    place, rng = tmp_path_factory.mktemp("verify") / "photos", np.random.default_rng(0)
    place.mkdir()
    for i in range(16):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(place / f"{i}.png")
    return place


@pytest.fixture(scope="module")
def made(photos: Path) -> dict[str, Path]:
    """A run on digits and one on a folder, each with all that other commands leave in it."""
    digits, folder = photos.parent / "digits", photos.parent / "folder"
    mixnn.pretrain("digits", epochs=2, checkpoint_every=1, out=digits, verbose=NullReporter(), **DIGITS)
    mixnn.pretrain(photos, epochs=2, checkpoint_every=1, out=folder, verbose=NullReporter(), **PHOTOS)
    mixnn.evaluate(digits, protocol="knn")
    mixnn.embed(folder)
    mixnn.export(folder)
    mixnn.classify(folder, {f"{i}.png": "ab"[i % 2] for i in range(12)})
    return {"digits": digits, "folder": folder}


@pytest.fixture
def digits(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["digits"], tmp_path / "digits"))


@pytest.fixture
def folder(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["folder"], tmp_path / "folder"))


def checkpoints(run: Path) -> list[Path]:
    return checkpoint.list_checkpoints(run / "checkpoints")


def test_a_healthy_run_is_ok_and_its_last_interval_repeats_bit_for_bit(digits: Path, capsys):
    before = content(digits)
    found = verify(digits)
    assert found.problems == []
    assert set(statuses(found).values()) == {"ok"}
    assert statuses(found).keys() >= {"config.yaml", "checkpoints", "metrics.jsonl", "results.json", "data", "replay"}
    assert text(found, "replay").startswith("trained from step 4 to 8 once more: all ")
    assert text(found, "checkpoints").startswith("step 4, step 8:")
    assert content(digits) == before
    assert capsys.readouterr() == ("", "")


def test_a_folder_of_images_is_ok_with_all_that_was_made_from_it(folder: Path, photos: Path):
    before = content(folder), content(photos)
    found = verify(Run.open(folder))
    assert found.problems == []
    others = {"judgement.json", "embeddings", "encoder.safetensors", "classifier/classifier.npz", "replay"}
    assert statuses(found).keys() >= others
    assert text(found, "replay").endswith("have the same bits")
    assert (content(folder), content(photos)) == before


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_in_a_file_of_text_is_found_and_named(name: str, digits: Path, folder: Path):
    run = folder if name == "judgement.json" else digits
    flip(run / name)
    assert wrong(verify(run, replay=0)) == [name]


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 1.0])
def test_a_flipped_byte_in_a_checkpoint_is_found_and_a_resume_is_tried_from_the_other(place: float, digits: Path):
    newest, older = checkpoints(digits)
    flip(newest, place, 1)
    found = verify(digits)
    assert wrong(found) == [newest.name]
    assert "a resume goes on from the one before" in text(found, newest.name)
    assert text(found, "replay").startswith("4 new steps after step 4, with and without a resume")
    assert text(found, "replay").endswith("have the same bits")
    flip(older, place, 1)
    found = verify(digits)
    assert wrong(found) == [newest.name, older.name]
    assert statuses(found)["data"] == "left out"


@pytest.mark.parametrize("name", ["embeddings/*.npz", "encoder.safetensors", "classifier/classifier.npz"])
def test_a_flipped_byte_in_what_other_commands_made_is_found(name: str, folder: Path):
    path = sorted(folder.glob(name))[0]
    flip(path, bit=1)
    assert wrong(verify(folder, replay=0)) == [str(path.relative_to(folder))]


def test_numbers_that_are_not_finite_are_found(digits: Path):
    newest = checkpoints(digits)[0]
    tensors, state = checkpoint.load(newest)
    tensors["method.student.f.conv1.weight"][0] = torch.nan
    checkpoint.save(newest.parent, state["step"], tensors, state)
    found = verify(digits, replay=0)
    assert wrong(found) == [newest.name]
    assert "NaN or inf in method.student.f.conv1.weight" in text(found, newest.name)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda lines: lines[1:], "there is no line for step 4"),
        (lambda lines: lines[::-1], "the steps do not increase"),
        (lambda lines: [lines[0].replace('"step": 4', '"step": 5'), lines[1]], "do not fit together at step 5"),
        (lambda lines: [lines[0], lines[1].replace('"loss": ', '"loss": 1')], "loss at step 8 is not that of the"),
        (lambda lines: lines[:1], "the last epoch is not logged: mixnn.pretrain(resume="),
    ],
)
def test_a_log_that_is_incomplete_or_does_not_fit_the_checkpoint_is_found(change: Callable, said: str, digits: Path):
    log = digits / "metrics.jsonl"
    plain = re.sub(r', "crc32": "\w+"', "", log.read_text())  # as earlier versions wrote it
    log.write_text("".join(change(plain.splitlines(keepends=True))))
    found = verify(digits, replay=0)
    assert wrong(found) == ["metrics.jsonl"]
    assert said in text(found, "metrics.jsonl")


def test_an_edited_setting_is_wrong_unless_it_may_be_edited(digits: Path):
    config = digits / "config.yaml"
    original = config.read_text()
    config.write_text(original.replace("seed: 0", "seed: 1"))
    found = verify(digits, replay=0)
    assert wrong(found) == ["config.yaml"]
    assert "seed was 0 and is 1 now" in text(found, "config.yaml")
    config.write_text(original.replace("knn_every: 0", "knn_every: 1"))
    assert text(verify(digits, replay=0), "config.yaml").startswith("knn_every was 0 and is 1 now")
    assert verify(digits, replay=0).ok
    config.unlink()
    assert wrong(verify(digits)) == ["config.yaml"]


def test_images_that_changed_or_are_gone_are_found(folder: Path, photos: Path, tmp_path: Path):
    moved = Path(shutil.copytree(photos, tmp_path / "moved"))
    assert verify(folder, source=moved, replay=0).ok
    Image.new("RGB", (16, 16)).save(moved / "3.png")
    found = verify(folder, source=moved)
    assert wrong(found) == ["data"]
    assert statuses(found)["replay"] == "left out"
    run = Run.open(folder)
    run.update_config(data=str(tmp_path / "nowhere"))
    assert "is gone: put it back, or use source=" in text(verify(folder), "data")


def test_leftovers_and_a_run_in_training_are_noticed(digits: Path):
    left = digits / "checkpoints" / ".mixnn-999999999-0123abcd.tmp"
    left.write_bytes(b"x")
    found = verify(digits, replay=0)
    assert wrong(found) == ["temporary files"]
    assert left.name in text(found, "temporary files")
    left.unlink()
    with lock_run(digits), pytest.raises(UserError, match="another process is training"):
        verify(digits)
    assert verify(digits, replay=0).ok


def test_a_step_that_does_not_repeat_is_reported(digits: Path, monkeypatch):
    step = Step._train_step

    def noisy(self: Step) -> None:
        step(self)
        next(self.method.parameters()).data.add_(1e-3)

    monkeypatch.setattr(Step, "_train_step", noisy)
    found = verify(digits)
    assert wrong(found) == ["replay"]
    assert "trained from step 4 to 8 once more: " in text(found, "replay")
    assert "tensors differ, " in text(found, "replay")


def test_on_another_machine_the_interval_may_differ_but_a_resume_must_be_exact(digits: Path, monkeypatch):
    about = Run.open(digits).environment()
    Run.open(digits).write_environment(about | {"torch": "1.0"})
    step = Step._train_step

    def other_rounding(self: Step) -> None:
        step(self)
        next(self.method.parameters()).data.mul_(1 + 1e-6)

    monkeypatch.setattr(Step, "_train_step", other_rounding)
    found = verify(digits)
    assert found.ok
    assert "steps 4 to 8 differ by" in text(found, "replay")
    assert "with another torch than then): all" in text(found, "replay")
    monkeypatch.setattr(Step, "_train_step", _drifting(step))
    assert wrong(verify(digits)) == ["replay"]


def _drifting(step: Callable[[Step], None]) -> Callable[[Step], None]:
    """A step that depends on how often it was called."""
    calls = [0]

    def drifting(self: Step) -> None:
        step(self)
        calls[0] += 1
        next(self.method.parameters()).data.add_(1e-6 * calls[0])

    return drifting


def test_the_replay_keeps_to_its_time_and_can_be_left_out(digits: Path, monkeypatch):
    seconds = itertools.count(step=10.0)
    monkeypatch.setattr(replaying.time, "perf_counter", lambda: next(seconds))
    found = verify(digits, replay="5s")
    assert found.ok
    assert text(found, "replay") == "takes longer than 5 s: use replay='20s' or more"
    assert "replay" not in statuses(verify(digits, replay=0))
    with pytest.raises(UserError, match="replay='5': write it as 90s"):
        verify(digits, replay="5")


def test_a_resumed_run_keeps_the_layout_of_its_checkpoint(folder: Path):
    run = Run.open(folder)
    images = run.dataset().load("train", run.config.reading_size)
    trainer = Trainer(run.config, images, NullReporter())
    trainer.load(*run.load_checkpoint(pytest.fail))
    trainer.layout = kept = Layout(torch.zeros(3), 0.5)
    judge_again(trainer, run)
    assert trainer.layout is kept


def test_an_export_is_checked_with_its_card(folder: Path, capsys):
    file = folder / "encoder.safetensors"
    assert statuses(verify(file)) == {"encoder.safetensors": "ok"}
    card = folder / "encoder.safetensors.json"
    card.write_text(card.read_text().replace('"resnet8"', '"resnet9"'))
    assert "is not the one in the file" in text(verify(file), "encoder.safetensors")
    flip(file, bit=1)
    assert main(["verify", str(file)]) == 2
    out, err = capsys.readouterr()
    assert "checksum does not match" in " ".join(out.split())
    assert err == "mixnn: 1 problem found\n"


def some_weights(file: Path, run: Path) -> bytes:
    """Bytes of weights in an exported file. In ONNX, batch norm is part of the convolutions."""
    if file.suffix == ".onnx":
        import onnx

        return max((bytes(weights.raw_data) for weights in onnx.load(file).graph.initializer), key=len)
    return bytes(next(iter(mixnn.load(run).backbone.state_dict().values())).numpy().tobytes())


@pytest.mark.parametrize("form", ["onnx", "pt2", "safetensors"])
def test_every_flipped_byte_of_an_exported_program_is_found(form: str, made: dict[str, Path], tmp_path: Path):
    file = mixnn.export(made["folder"], tmp_path / f"x.{form}", output=form, verbose=NullReporter())
    assert "its checksum matches" in text(verify(file), file.name)
    whole = file.read_bytes()
    weights, name = whole.index(some_weights(file, made["folder"])), whole.rindex(b"mixnn_crc32")
    places = {*range(weights, weights + 64), *range(name - 4, min(name + 24, len(whole)))}
    places |= {*range(40), *range(len(whole) - 80, len(whole)), *range(0, len(whole), len(whole) // 300)}
    for place in sorted(places):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert wrong(verify(file)) == [file.name], place
    for length in (len(whole) - 1, len(whole) - 30, len(whole) // 2):
        file.write_bytes(whole[:length])
        assert wrong(verify(file)) == [file.name], length
    file.write_bytes(whole)
    assert verify(file).ok


@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_a_program_of_an_earlier_version_has_no_checksum_and_is_read(form: str, made: dict[str, Path], tmp_path: Path):
    file = mixnn.export(made["folder"], tmp_path / f"x.{form}", output=form, verbose=NullReporter())
    old = file.read_bytes().replace(b"mixnn_crc32", b"other_thing")
    if form == "pt2":  # each part of the archive has a checksum of its own
        with zipfile.ZipFile(file) as archive:
            parts = {name: archive.read(name).replace(b"mixnn_crc32", b"other_thing") for name in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, part in parts.items():
                archive.writestr(name, part)
        old = file.read_bytes()
    file.write_bytes(old)
    (tmp_path / f"x.{form}.json").unlink()
    found = verify(file)
    assert found.ok
    assert "it is of an earlier version and has no checksum" in text(found, file.name)


def test_every_entry_of_the_cache_is_checked(photos: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MIXNN_CACHE", str(tmp_path / "image-cache"))
    monkeypatch.chdir(tmp_path)
    for size in (8, 16):
        mixnn.data.open_dataset(photos).load("train", size)
    assert statuses(verify("cache")) == {"entries": "ok", "temporary files": "ok"}
    first, second = sorted(cache_root().iterdir())
    flip(first / "images.npy", bit=1)
    assert wrong(verify("cache")) == [first.name]
    flip(second / "facts.json", bit=1)
    assert wrong(verify(cache_root())) == [first.name, second.name]


def test_the_command_prints_the_checks_or_json_and_exits_with_0_or_2(digits: Path, capsys):
    assert main(["verify", str(digits), "--replay", "0", "--quiet"]) == 0
    assert "complete up to step 8" in capsys.readouterr().out
    flip(digits / "results.json")
    assert main(["verify", str(digits), "--replay", "0", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert [check["name"] for check in found["checks"] if check["status"] == "wrong"] == ["results.json"]


def test_what_is_none_of_these_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="there is no run folder, exported file or image cache"):
        verify(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a run folder, an exported file or an image cache"):
        verify(tmp_path)
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(UserError, match="is not an exported file"):
        verify(tmp_path / "x.txt")
