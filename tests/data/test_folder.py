import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mixnn.config import UserError
from mixnn.data import folder as folder_module
from mixnn.data import load, open_dataset
from mixnn.data.folder import hold_out, list_images, list_splits


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
    found = load(tmp_path, "pretrain", labels="folders", size=8)
    assert found.classes == ["c9", "c10"]
    assert dict(zip(found.names or [], found.labels.tolist(), strict=True)) == {
        "c9/a.png": 0,
        "c9/sub/b.png": 0,
        "c10/a.png": 1,
        "loose.png": -1,
    }


def test_a_csv_labels_some_and_the_others_stay_unlabeled(tmp_path: Path):
    save(tmp_path, a=1, b=2, c=3)
    (tmp_path / "labels.csv").write_text("c.png,10\na.png,9\n")
    found = load(tmp_path, "pretrain", labels=tmp_path / "labels.csv", size=8)
    assert found.classes == ["9", "10"]
    assert found.labels.tolist() == [0, -1, 1]
    assert load(tmp_path, "train", labels=tmp_path / "labels.csv", size=8).names == ["a.png", "c.png"]


def test_train_and_test_number_their_classes_alike_and_share_mean_and_std(tmp_path: Path):
    save(tmp_path, train__a__1=50, train__c__1=100, test__b__1=200, test__c__2=0)
    train, test = (load(tmp_path, split, labels="folders", size=8) for split in ("train", "test"))
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
        np.testing.assert_allclose(load(tmp_path, split, size=8).mean, np.mean([0, 20, 40, 60, 80]) / 255)


def test_unreadable_files_are_skipped_by_name_and_names_still_fit_the_images(tmp_path: Path):
    save(tmp_path, a=10, c=30)
    (tmp_path / "b.png").write_text("no image")
    (tmp_path / "d.jpg").touch()
    found = load(tmp_path, "pretrain", size=8)
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
        load(tmp_path, "pretrain", on_error="refuse", size=8)


def test_a_folder_without_one_readable_image_is_an_error(tmp_path: Path):
    for i in range(30):
        (tmp_path / f"{i}.png").touch()
    with pytest.raises(UserError, match=r"none of the images(.|\n)*  0.png: empty file(.|\n)*and 10 more"):
        load(tmp_path, "pretrain", size=8)


def test_wrong_options_are_errors_that_list_the_right_ones(tmp_path: Path):
    save(tmp_path, a=1)
    with pytest.raises(UserError, match=r"did you mean 'refuse'(.|\n)*skip, refuse"):
        load(tmp_path, "train", on_error="refuze")
    with pytest.raises(UserError, match="at least 1"):
        load(tmp_path, "train", size=-1)


def test_labels_are_int64_even_when_there_are_none(tmp_path: Path):
    save(tmp_path, a=1)
    assert load(tmp_path, "train", size=8).labels.dtype == torch.int64


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_names_are_relative_recursive_and_in_natural_order(tmp_path: Path):
    touch(tmp_path, "img10.jpg", "img2.JPG", "Img1.png", "b/c/1.webp", "b/c/01.tiff", "a.gif")
    names, skipped = list_images(tmp_path)
    assert names == ["a.gif", "b/c/01.tiff", "b/c/1.webp", "Img1.png", "img2.JPG", "img10.jpg"]
    assert skipped == []


def test_only_images_are_listed_and_nothing_hidden(tmp_path: Path):
    touch(tmp_path, "a.jpeg", "b.txt", "jpg", "._a.jpeg", ".thumbs/a.png", "c.bmp.part", "d.ppm", "e.tif")
    assert list_images(tmp_path)[0] == ["a.jpeg", "d.ppm", "e.tif"]


def test_pictures_of_kinds_that_are_not_read_are_named(tmp_path: Path):
    touch(tmp_path, "a.jpg", "IMG_1.HEIC", "b/IMG_2.heic", ".hidden.heic", "notes.txt")
    names, skipped = list_images(tmp_path)
    assert names == ["a.jpg"]
    assert dict(skipped) == dict.fromkeys(
        ["IMG_1.HEIC", "b/IMG_2.heic"], ".heic is not supported: convert it to JPEG or PNG"
    )


def test_symlink_loops_end_and_linked_folders_are_read_once(tmp_path: Path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    touch(folder, "x/1.png")
    touch(outside, "2.png")
    (folder / "x" / "up").symlink_to(folder)
    (folder / "x" / "self").symlink_to(folder / "x" / "self")
    (folder / "y").symlink_to(outside)
    (folder / "z").symlink_to(outside)
    (outside / "back").symlink_to(folder / "x")
    assert list_images(folder)[0] == ["x/1.png", "y/2.png"]


@pytest.mark.skipif(
    os.name != "posix" or sys.platform == "darwin", reason="needs a file system with free bytes as names"
)
def test_a_name_that_is_not_unicode_is_reported_in_a_printable_form(tmp_path: Path):
    touch(tmp_path, "ok.png")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png")).touch()
    names, skipped = list_images(tmp_path)
    assert names == ["ok.png"]
    assert skipped == [("\\udcff.png", "its name is not valid Unicode")]


def test_a_folder_that_cannot_be_entered_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    touch(tmp_path, "a/1.png", "b/2.png")
    scandir = os.scandir

    def guarded(path):
        if Path(path).name == "a":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    assert list_images(tmp_path) == (["b/2.png"], [("a", "Permission denied")])


@pytest.mark.parametrize("test", ["test", "val"])
def test_train_and_test_folders_are_the_splits_and_the_rest_is_left_out(tmp_path: Path, test: str):
    touch(tmp_path, "train/a/1.png", f"{test}/a/2.png", "other/3.png", "4.png", "train2/5.png")
    listing = list_splits(tmp_path)
    assert listing.names("pretrain") == listing.names("train") == ["train/a/1.png"]
    assert listing.names("test") == [f"{test}/a/2.png"]


def test_without_them_the_folder_is_the_training_set_and_a_test_set_is_asked_for(tmp_path: Path):
    touch(tmp_path, "train/1.png", "2.png")
    listing = list_splits(tmp_path)
    assert listing.names("pretrain") == listing.names("train") == ["2.png", "train/1.png"]
    with pytest.raises(UserError, match=r"no test images\n.*/train and .*/test"):
        listing.names("test")


def test_an_empty_folder_is_an_error_that_names_the_endings(tmp_path: Path):
    touch(tmp_path, "a.txt")
    with pytest.raises(UserError, match=rf"no images in {tmp_path}\n.*\.jpeg .*\.webp"):
        list_splits(tmp_path).names("train")
    touch(tmp_path, "train/1.png", "test/x.txt")
    with pytest.raises(UserError, match=r"no images in .*/test\n"):
        list_splits(tmp_path).names("test")


def labeled_folder(folder: Path, counts: dict[str, int]) -> Path:
    for label, count in counts.items():
        for i in range(count):
            (folder / label).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (10 * i, 7 * len(label), 3)).save(folder / label / f"{i}.png")
    return folder


def test_a_holdout_takes_its_share_of_every_class_and_at_least_one(tmp_path: Path):
    photos = labeled_folder(tmp_path / "photos", {"a": 20, "b": 3, "c": 1})
    listing = open_dataset(photos, labels="folders", holdout=0.2).listing
    held = [name.split("/")[0] for name in listing.testing]
    assert (held.count("a"), held.count("b"), held.count("c")) == (4, 1, 0), "a single image stays in training"
    assert sorted(listing.training + listing.testing) == sorted(list_images(photos)[0])
    assert open_dataset(photos, labels="folders").listing.testing == [], "nothing is held out by default"


def test_which_images_are_held_out_depends_only_on_their_names(tmp_path: Path):
    photos = labeled_folder(tmp_path / "photos", {"a": 10, "b": 10})
    listing = list_splits(photos)
    label_of = {name: name[0] for name in listing.training}
    forward = hold_out(listing, label_of, 0.3)
    backward = hold_out(listing, dict(reversed(label_of.items())), 0.3)
    assert forward == backward
    assert forward.testing != listing.training[: len(forward.testing)]


def test_unlabeled_images_are_never_held_out_and_all_sets_agree(tmp_path: Path):
    photos = labeled_folder(tmp_path / "photos", {"a": 6, "b": 6})
    Image.new("RGB", (8, 8)).save(photos / "unlabeled.png")
    dataset = open_dataset(photos, labels="folders", holdout=0.5)
    pretrain, train, test = (dataset.load(split, 8) for split in ("pretrain", "train", "test"))
    assert (len(pretrain), len(train), len(test)) == (7, 6, 6)
    assert "unlabeled.png" in pretrain.names
    assert not set(pretrain.names) & set(test.names)
    assert test.labels.bincount().tolist() == [3, 3]
    assert test.mean == pretrain.mean
    assert dataset.load_labeled(8) is not None


def test_a_holdout_needs_labels_and_a_folder_without_test_images(tmp_path: Path):
    photos = labeled_folder(tmp_path / "photos", {"train/a": 3, "train/b": 3, "test/a": 2, "test/b": 2})
    with pytest.raises(UserError, match="needs labels"):
        open_dataset(photos, holdout=0.2)
    with pytest.raises(UserError, match="has test images of its own, in test/"):
        open_dataset(photos, labels="folders", holdout=0.2).load("train", 8)
    for data, says in (("digits", "for folders of images"), (np.zeros((4, 8, 8), np.uint8), "needs labels")):
        with pytest.raises(UserError, match=says):
            open_dataset(data, holdout=0.2)


def test_images_whose_names_do_not_say_so_are_listed_with_what_to_do(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for kind, name in (("JPEG", "b.img"), ("PNG", "c"), ("WEBP", "d.aspx"), ("GIF", "e.cms")):
        Image.new("RGB", (8, 8)).save(tmp_path / name, format=kind)
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").write_bytes((tmp_path / "b.img").read_bytes())
    names, skipped = list_images(tmp_path)
    assert names == ["a.png"]
    endings = {name: reason.rpartition(" ")[2] for name, reason in skipped}
    assert endings == {"b.img": ".jpg", "c": ".png", "d.aspx": ".webp", "e.cms": ".gif"}
    assert all(reason.startswith("an image whose name does not say so: rename it") for _, reason in skipped)


def test_only_some_files_of_an_unknown_kind_are_opened(tmp_path, monkeypatch):
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text("0 0.5 0.5 1 1")
    opened = []
    monkeypatch.setattr(folder_module, "_kind_of_image", lambda path: opened.append(path) or "")
    list_images(tmp_path)
    assert len(opened) == folder_module.MAX_OPENED
    for i in range(300):
        (tmp_path / f"scan.{i:05}").write_text("no image")
    opened.clear()
    list_images(tmp_path)
    assert len(opened) == folder_module.MAX_OPENED_IN_ALL
