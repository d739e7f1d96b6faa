"""One Dataset for names, folders and arrays: the same questions, the same images."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mixnn.config import UserError
from mixnn.data import open_dataset, to_folder

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)
LABELS = ["cat", "dog"] * 12


@pytest.mark.parametrize("images", [IMAGES, IMAGES.transpose(0, 3, 1, 2), torch.from_numpy(IMAGES)])
def test_arrays_of_either_layout_are_the_images_of_a_folder_of_them(tmp_path: Path, images):
    arrays = open_dataset(images, labels=LABELS)
    folder = open_dataset(to_folder(IMAGES, tmp_path / "x", [0, 1] * 12, ["cat", "dog"]), labels="folders")
    ours, theirs = arrays.load("train", 8), folder.load("train", 8)
    assert ours.classes == theirs.classes == ["cat", "dog"]
    order = torch.tensor([i for c in (0, 1) for i in range(24) if i % 2 == c])  # a folder is sorted by class
    assert torch.equal(ours.images[order], theirs.images)
    assert torch.equal(ours.labels[order], theirs.labels)
    assert ours.mean == pytest.approx(theirs.mean)
    assert arrays.images().labels["1"] == "dog"
    assert (arrays.recipe, arrays.has_test, arrays.images("train").typical_side) == (None, False, 8)


def test_loaded_splits_are_kept_and_pretraining_shares_the_training_images(tmp_path: Path):
    for dataset in (open_dataset("digits"), open_dataset(IMAGES), open_dataset(to_folder(IMAGES, tmp_path / "x"))):
        assert dataset.load("pretrain", 8) is dataset.load("train", 8)
        assert dataset.load("train", 8) is dataset.load("train", 8)


def test_labels_and_images_must_be_as_many():
    with pytest.raises(UserError, match="24 images and 3 labels"):
        open_dataset(IMAGES, labels=["a", "b", "c"])
