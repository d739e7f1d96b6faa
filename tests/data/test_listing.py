import os
import sys
from pathlib import Path

import pytest

from mixnn.config import UserError
from mixnn.data.listing import list_images, list_splits


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
        ["IMG_1.HEIC", "b/IMG_2.heic"], ".heic is not read: convert it to JPEG or PNG"
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
