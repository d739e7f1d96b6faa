from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mixnn.config import UserError
from mixnn.data import folder as folder_module
from mixnn.data import load
from mixnn.data.folder import read_folder


def save(folder: Path, **levels: int) -> None:
    """Gray images NAME.png; a double underscore stands for a folder."""
    for name, level in levels.items():
        path = folder / (name.replace("__", "/") + ".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (20, 30), level).save(path)


def test_a_flat_folder_is_read_in_natural_order_without_labels(tmp_path: Path):
    save(tmp_path, x10=30, x9=20, a__x1=10)
    found = load(tmp_path, "pretrain", size=16)
    assert found.names == ["a/x1.png", "x9.png", "x10.png"]
    assert found.images[:, 1, 8, 8].tolist() == [10, 20, 30]
    assert found.images.shape == (3, 3, 16, 16)
    assert found.labels.tolist() == [-1, -1, -1]
    assert (found.classes, found.skipped, found.mirror) == ([], [], True)


def test_class_folders_become_labels_only_when_asked(tmp_path: Path):
    save(tmp_path, c10__a=1, c9__a=2, c9__sub__b=3, loose=4)
    found = read_folder(tmp_path, "train", labels="folders", size=8)
    assert found.classes == ["c9", "c10"]
    assert dict(zip(found.names or [], found.labels.tolist(), strict=True)) == {
        "c9/a.png": 0,
        "c9/sub/b.png": 0,
        "c10/a.png": 1,
        "loose.png": -1,
    }


def test_a_csv_labels_some_and_the_others_stay_unlabelled(tmp_path: Path):
    save(tmp_path, a=1, b=2, c=3)
    (tmp_path / "labels.csv").write_text("c.png,10\na.png,9\n")
    found = read_folder(tmp_path, "train", labels=tmp_path / "labels.csv", size=8)
    assert found.classes == ["9", "10"]
    assert found.labels.tolist() == [0, -1, 1]


def test_train_and_test_number_their_classes_alike_and_share_mean_and_std(tmp_path: Path):
    save(tmp_path, train__a__1=50, train__c__1=100, test__b__1=200, test__c__2=0)
    train, test = (read_folder(tmp_path, split, labels="folders", size=8) for split in ("train", "test"))
    assert train.classes == test.classes == ["a", "b", "c"]
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 2], [1, 2])
    assert test.names == ["test/b/1.png", "test/c/2.png"]
    assert train.mean == test.mean
    assert train.std == test.std
    np.testing.assert_allclose(train.mean, 75 / 255)
    np.testing.assert_allclose(train.std, 25 / 255)


def test_mean_and_std_come_from_a_sample_spread_over_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, **{f"train__{i}": 10 * i for i in range(10)}, test__x=255)
    monkeypatch.setattr(folder_module, "STATS_SAMPLE", 5)
    for split in ("train", "test"):
        np.testing.assert_allclose(read_folder(tmp_path, split, size=8).mean, np.mean([0, 20, 40, 60, 80]) / 255)


def test_unreadable_files_are_skipped_by_name_and_names_still_fit_the_images(tmp_path: Path):
    save(tmp_path, a=10, c=30)
    (tmp_path / "b.png").write_text("no image")
    (tmp_path / "d.jpg").touch()
    found = read_folder(tmp_path, "pretrain", size=8)
    assert found.names == ["a.png", "c.png"]
    assert found.images[:, 0, 0, 0].tolist() == [10, 30]
    assert found.skipped == [("b.png", "not an image that Pillow can read"), ("d.jpg", "empty file")]


def test_refuse_names_every_unreadable_file(tmp_path: Path):
    save(tmp_path, a=10)
    for i in range(3):
        (tmp_path / f"bad{i}.png").touch()
    with pytest.raises(
        UserError, match=r"3 files(.|\n)*bad0.png: empty file\n  bad1.png: .*\n  bad2.png(.|\n)*on_error='skip'"
    ):
        read_folder(tmp_path, "pretrain", on_error="refuse", size=8)


def test_a_folder_without_one_readable_image_is_an_error(tmp_path: Path):
    for i in range(30):
        (tmp_path / f"{i}.png").touch()
    with pytest.raises(UserError, match=r"none of the images(.|\n)*  0.png: empty file(.|\n)*and 10 more"):
        read_folder(tmp_path, "pretrain", size=8)


def test_wrong_options_are_errors_that_list_the_right_ones(tmp_path: Path):
    save(tmp_path, a=1)
    with pytest.raises(UserError, match=r"did you mean 'refuse'(.|\n)*skip, refuse"):
        read_folder(tmp_path, "train", on_error="refuze")
    with pytest.raises(UserError, match="at least 1"):
        read_folder(tmp_path, "train", size=0)


def test_labels_are_int64_even_when_there_are_none(tmp_path: Path):
    save(tmp_path, a=1)
    assert read_folder(tmp_path, "train", size=8).labels.dtype == torch.int64
