import os
from pathlib import Path

import numpy as np
import pytest

from mixnn.config import UserError
from mixnn.data import stl10

COUNTS = {"train": 3, "unlabeled": 4, "test": 2}


@pytest.fixture
def images(tmp_path: Path) -> dict[str, np.ndarray]:
    """The three parts as [M,3,96,96], written as the official files hold them: each channel column by column."""
    rng = np.random.default_rng(0)
    folder = tmp_path / stl10.FOLDER
    folder.mkdir()
    made = {part: rng.integers(0, 256, (count, 3, 96, 96), np.uint8) for part, count in COUNTS.items()}
    for part, array in made.items():
        columns = [channel[:, x].tobytes() for image in array for channel in image for x in range(96)]
        (folder / f"{part}_X.bin").write_bytes(b"".join(columns))
    (folder / "train_y.bin").write_bytes(bytes([1, 10, 2]))
    (folder / "test_y.bin").write_bytes(bytes([5, 6]))
    return made


def test_images_are_upright_and_labels_start_at_zero(tmp_path: Path, images: dict[str, np.ndarray]):
    for split, expected in [("train", [0, 9, 1]), ("test", [4, 5])]:
        found, labels, classes = stl10.read(tmp_path / stl10.FOLDER, split)
        np.testing.assert_array_equal(found, images[split])
        assert labels.tolist() == expected
        assert len(classes) == 10


def test_pretraining_sees_train_then_unlabeled_with_label_minus_one(tmp_path: Path, images: dict[str, np.ndarray]):
    found, labels, _ = stl10.read(tmp_path / stl10.FOLDER, "pretrain")
    np.testing.assert_array_equal(found, np.concatenate([images["train"], images["unlabeled"]]))
    assert labels.tolist() == [0, 9, 1, -1, -1, -1, -1]


@pytest.mark.usefixtures("images")
def test_a_label_of_zero_is_damage(tmp_path: Path):
    (tmp_path / stl10.FOLDER / "test_y.bin").write_bytes(bytes([0, 6]))
    with pytest.raises(UserError, match=r"test_y.bin is damaged"):
        stl10.read(tmp_path / stl10.FOLDER, "test")


def test_the_layout_lists_every_official_file_with_its_size():
    sizes = stl10.layout()
    assert sizes["stl10_binary/unlabeled_X.bin"] == 2_764_800_000
    assert sizes["stl10_binary/train_X.bin"] == 138_240_000
    assert sizes["stl10_binary/test_y.bin"] == 8_000
    assert "stl10_binary/unlabeled_y.bin" not in sizes


@pytest.mark.usefixtures("images")
def test_images_are_read_in_blocks_and_a_file_cut_meanwhile_is_an_error(tmp_path: Path, monkeypatch):
    folder, read = tmp_path / stl10.FOLDER, np.fromfile
    expected = stl10.read(folder, "train")[0]
    monkeypatch.setattr(stl10, "BLOCK", 2)
    np.testing.assert_array_equal(stl10.read(folder, "train")[0], expected)

    def read_and_cut(file, *given):
        found = read(file, *given)
        os.truncate(folder / "train_X.bin", 2 * stl10.PIXELS)
        return found

    monkeypatch.setattr(np, "fromfile", read_and_cut)
    with pytest.raises(UserError, match=r"train_X\.bin became shorter while it was read"):
        stl10.read(folder, "train")
