"""Arrays become a folder of files that reads as the same images."""

from pathlib import Path

import numpy as np
import pytest

import mixnn
from mixnn.progress import Reporter

RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 256, (40, 9, 9, 3), dtype=np.uint8), np.arange(40) % 3


def test_images_and_labels_come_back_as_they_were(tmp_path: Path):
    mixnn.data.to_folder(X, tmp_path / "mine" / "train", Y, classes=["cat", "dog", "eel"])
    channels_first = X[:6].transpose(0, 3, 1, 2)
    mixnn.data.to_folder(channels_first, tmp_path / "mine" / "test", Y[:6], classes=["cat", "dog", "eel"])
    for split, count in (("train", 40), ("test", 6)):
        images = mixnn.data.load(tmp_path / "mine", split, labels="folders", size=9)
        order = [int(Path(name).stem) for name in images.names]
        assert sorted(order) == list(range(count))
        assert np.array_equal(images.images.permute(0, 2, 3, 1).numpy(), X[order])
        assert [images.classes[label] for label in images.labels] == [["cat", "dog", "eel"][Y[i]] for i in order]


def test_without_labels_and_in_gray(tmp_path: Path):
    folder = mixnn.data.to_folder(X[..., 0], tmp_path / "gray")
    images = mixnn.data.load(folder, "pretrain", size=9)
    assert images.names == [f"{i:02}.png" for i in range(40)]
    assert np.array_equal(images.images[:, 1].numpy(), X[..., 0])
    assert (images.labels == -1).all()


@pytest.mark.parametrize("classes", [["cat", "dog", "eel"], []])
def test_an_image_whose_class_is_unknown_lies_beside_the_class_folders(tmp_path: Path, classes: list[str]):
    labels = np.where(np.arange(40) < 4, -1, Y)
    folder = mixnn.data.to_folder(X / 255, tmp_path / "mine", labels, classes)
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [f"{i:02}.png" for i in range(4)]
    images = mixnn.data.load(folder, "pretrain", labels="folders", size=9)
    order = [int(Path(name).stem) for name in images.names]
    assert np.array_equal(images.images.permute(0, 2, 3, 1).numpy(), X[order])
    assert images.labels.tolist() == labels[order].tolist()


@pytest.mark.parametrize(
    "words, says",
    [
        ((X.astype(float), "new"), "images are float64 .*: give uint8"),
        ((X[..., :2], "new"), r"the shape \(40, 9, 9, 2\): give"),
        ((X[0, 0], "new"), r"the shape \(9, 3\): give"),
        ((X[:0], "new"), "there are no images"),
        ((X[:0], "new", [], ["cat"]), "there are no images"),
        ((X, "new", Y - 2), "a label is -2"),
        ((X, "new", Y[:3]), "40 images and 3 labels"),
        ((X, "new", Y, ["a", "b"]), "labels run to 2, but there are 2 classes"),
        ((X, "there"), "exists and is not empty"),
        ((X, "new", Y, ["T-shirt/top", "T-shirt", "Shoe"]), "'T-shirt/top' cannot be the name of a folder"),
        ((X, "new", Y, ["a", "..", "b"]), "cannot be the name of a folder"),
        ((X, "new", Y, ["a", "", "b"]), "cannot be the name of a folder"),
        ((X, "new", Y, ["a", "b", "a"]), "'a' is the name of two classes"),
    ],
)
def test_what_cannot_be_written_is_refused_and_nothing_made(tmp_path: Path, monkeypatch, words: tuple, says: str):
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("there/file").touch()
    with pytest.raises(mixnn.UserError, match=says):
        mixnn.data.to_folder(*words)
    assert not Path("new").exists()


def test_a_run_on_arrays(tmp_path: Path):
    folder = mixnn.data.to_folder(X, tmp_path / "mine", Y)
    small = {
        "epochs": 1,
        "warmup_epochs": 0,
        "batch_size": 16,
        "knn_every": 0,
        "labels": "folders",
        "init_from": "none",
    }
    options = {"topk": np.int64(3), "lam": np.float32(0.5), "hidden": 16, "dim": 8, "support_size": 16}
    quiet = Reporter(quiet=True)
    run = mixnn.pretrain(folder, out=tmp_path / "run", options=options, lr=np.float64(0.1), verbose=quiet, **small)
    assert (run.config.options["topk"], run.config.options["lam"], run.config.lr) == (3, 0.5, 0.1)
    assert "purity_3" in run.metrics()[-1]
