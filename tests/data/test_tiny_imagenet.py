from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mixnn.config import UserError
from mixnn.data import cache, tiny_imagenet

IDS = ["n03", "n01", "n02"]  # wnids.txt is not sorted
COUNTS = {"train_per_class": 2, "val_per_class": 1}
LEVEL = {"n01": 10, "n02": 100, "n03": 200}  # gray level of each class


def save(path: Path, level: int, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (64, 64), (level,) * 3 if mode == "RGB" else level).save(path, "JPEG")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / tiny_imagenet.FOLDER
    for wnid in IDS:
        for i in range(2):  # every second one is a grayscale JPEG, as in the official set
            save(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", LEVEL[wnid], "L" if i else "RGB")
    for i, wnid in enumerate(["n02", "n03", "n01"]):
        save(folder / "val" / "images" / f"val_{i}.JPEG", LEVEL[wnid])
    (folder / "wnids.txt").write_text("\n".join(IDS) + "\n")
    (folder / "words.txt").write_text("n01\tgoldfish, Carassius\nn02\tfrog\nn03\tcrane, bird\nn99\tother\n")
    rows = "".join(f"val_{i}.JPEG\t{wnid}\t0\t0\t9\t9\n" for i, wnid in enumerate(["n02", "n03", "n01"]))
    (folder / "val" / "val_annotations.txt").write_text(rows)
    return folder


def test_class_is_the_rank_of_the_sorted_id_and_gray_becomes_rgb(folder: Path):
    images, labels, classes = tiny_imagenet.read(folder, "train", **COUNTS)
    assert images.shape == (6, 3, 64, 64)
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert classes == ["goldfish", "frog", "crane"]
    np.testing.assert_allclose(images.mean((1, 2, 3)), [10, 10, 100, 100, 200, 200], atol=1)


def test_the_annotated_val_images_are_the_test_set(folder: Path):
    images, labels, _ = tiny_imagenet.read(folder, "test", **COUNTS)
    assert labels.tolist() == [1, 2, 0]
    np.testing.assert_allclose(images.mean((1, 2, 3)), [100, 200, 10], atol=1)


def test_the_second_reading_gives_the_same_images_without_decoding(folder: Path, monkeypatch: pytest.MonkeyPatch):
    first = tiny_imagenet.read(folder, "train", **COUNTS)[0]
    monkeypatch.setattr(cache, "decode_into", lambda *_: pytest.fail("decoded again"))
    np.testing.assert_array_equal(tiny_imagenet.read(folder, "train", **COUNTS)[0], first)


def test_the_images_are_in_memory_and_may_be_written_to(folder: Path):
    images = tiny_imagenet.read(folder, "test", **COUNTS)[0]
    assert type(images) is np.ndarray
    assert images.flags.writeable


def test_a_missing_image_and_a_broken_one_are_named(folder: Path):
    (folder / "train" / "n02" / "images" / "n02_1.JPEG").unlink()
    with pytest.raises(
        UserError, match=r"1 train images of class n02, expected 2(.|\n)*mixnn\.data\.get\('tiny-imagenet'\)"
    ):
        tiny_imagenet.read(folder, "train", **COUNTS)
    (folder / "val" / "images" / "val_1.JPEG").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"val_1.JPEG is damaged"):
        tiny_imagenet.read(folder, "test", **COUNTS)


def test_an_annotation_of_an_unknown_class_is_damage(folder: Path):
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn77\t0\t0\t9\t9\n")
    with pytest.raises(UserError, match=r"val_annotations.txt is damaged"):
        tiny_imagenet.read(folder, "test", **COUNTS)
