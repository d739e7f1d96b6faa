from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import mixnn
from mixnn.config import UserError
from mixnn.data import DATASETS, cifar, default_root, describe, load, open_images
from mixnn.data.image_set import channel_stats
from tests.data.test_cifar import SMALL10, write


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with a small CIFAR-10 in the binary layout, known to the table."""
    row = replace(DATASETS["cifar10"], read=partial(cifar.read, SMALL10), layouts=SMALL10.layouts)
    monkeypatch.setitem(DATASETS._entries, "cifar10", row)
    write(tmp_path, SMALL10, "binary")
    return tmp_path


def test_a_named_set_comes_with_the_numbers_of_its_row(small: Path):
    found = load("cifar10", "train", small)
    assert (len(found), found.size, found.num_classes, found.mirror) == (20, (32, 32), 10, True)
    assert found.mean == (0.4914, 0.4822, 0.4465)
    assert found.std == (0.2023, 0.1994, 0.2010)
    assert found.names is None


def test_a_missing_set_says_what_to_type_and_where_it_looked(tmp_path: Path):
    with pytest.raises(UserError) as error:
        load("cifar10", "train", tmp_path)
    text = str(error.value)
    assert "to download it: mixnn.data.get('cifar10', '" in text
    assert str(tmp_path / "cifar-10-batches-bin") in text
    assert str(tmp_path / "cifar-10-batches-py") in text


@pytest.mark.parametrize("change", [-1, -3073, 1])
def test_a_truncated_file_is_named_with_both_sizes(small: Path, change: int):
    path = small / "cifar-10-batches-bin" / "data_batch_3.bin"
    data = path.read_bytes()
    path.write_bytes((data + b"x")[: len(data) + change])
    with pytest.raises(UserError) as error:
        load("cifar10", "test", small)
    assert f"{path} is damaged: {len(data) + change:,} bytes, expected {len(data):,}" in str(error.value)
    assert "to download it again: mixnn.data.get('cifar10'" in str(error.value)


def test_a_file_missing_from_its_folder_is_named(small: Path):
    (small / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    with pytest.raises(UserError, match=r"data_batch_4.bin is missing\n.*mixnn\.data\.get\('cifar10'"):
        load("cifar10", "train", small)


def test_a_whole_python_layout_serves_where_the_binary_one_is_damaged(small: Path):
    expected = load("cifar10", "train", small)
    write(small, SMALL10, "python")
    (small / "cifar-10-batches-bin" / "data_batch_1.bin").write_bytes(b"")
    assert torch.equal(load("cifar10", "train", small).images, expected.images)


def test_an_unknown_name_gets_the_nearest_one_and_the_ways_out():
    with pytest.raises(UserError, match=r"did you mean 'cifar10'\?\n(.|\n)*folder(.|\n)*mixnn data"):
        load("cifr10", "train")


def test_an_unknown_split_lists_the_splits():
    with pytest.raises(UserError, match=r"did you mean 'pretrain'\?\nvalid: pretrain, train, test"):
        load("digits", "pretrian")


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "x.png").touch()
    with pytest.raises(UserError, match="is a file"):
        load(tmp_path / "x.png", "train")


def test_a_known_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("digits", "test").num_classes == 10
    with pytest.raises(UserError, match="no images"):
        load("./digits", "train")


def test_options_of_folders_are_refused_for_named_sets():
    with pytest.raises(UserError, match="size is for folders of images"):
        load("digits", "test", size=8)


def test_digits_are_normalised_alike_in_every_split_and_not_mirrored():
    train, test = load("digits", "pretrain"), load("digits", "test")
    assert train.mean == test.mean == channel_stats(train.images)[0]
    assert train.std == test.std
    assert not train.mirror


def test_the_folder_of_data_sets_may_be_a_text_and_begin_with_a_tilde(small: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(small.parent))
    for place in (str(small), f"~/{small.name}"):
        assert mixnn.data.get("cifar10", place) == small / "cifar-10-batches-bin"
        assert {row.where for row in describe(place) if row.present} == {small / "cifar-10-batches-bin", None}
        assert len(load("cifar10", "train", data_dir=place)) == len(open_images("cifar10", data_dir=place)) == 20


def test_describe_tells_what_is_on_disk_and_where(small: Path):
    found = {presence.spec.name: presence for presence in describe(small)}
    assert list(found) == ["cifar10", "cifar100", "stl10", "tiny-imagenet", "digits"]
    assert found["cifar10"].present
    assert found["cifar10"].where == small / "cifar-10-batches-bin"
    assert not found["stl10"].present
    assert found["digits"].present
    assert found["digits"].where is None


def test_the_default_root_is_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert default_root() == tmp_path / ".cache" / "mixnn" / "data"
    with pytest.raises(UserError, match=str(tmp_path)):
        load("stl10", "pretrain")


@pytest.mark.parametrize("row", DATASETS.values(), ids=list(DATASETS))
def test_every_row_is_complete(row):
    assert set(row.splits) == {"pretrain", "train", "test"}
    assert (row.archive is None) == (not row.layouts)
    if row.archive:
        folders = {Path(file).parts[0] for file in row.layouts[0]}
        assert folders == {row.archive.folder}, "what is fetched is what is looked for first"
        assert len(row.archive.md5) == 32
    else:
        assert [len(row.read(Path(), split)[0]) for split in row.splits] == list(row.splits.values())


def test_images_and_labels_are_writable_tensors_of_their_own(small: Path):
    found = load("cifar10", "test", small)
    found.images.zero_()
    found.labels.zero_()
    assert np.any(load("cifar10", "test", small).images.numpy())


def test_options_are_parameters_and_wrong_ones_are_refused():
    assert len(load("digits", "train", limit=5)) == 5
    assert load("digits", "train", normalization="torchvision").mean == (0.485, 0.456, 0.406)
    with pytest.raises(TypeError, match="unexpected keyword argument 'limits'"):
        load("digits", "train", limits=5)
    with pytest.raises(UserError, match="unknown normalization 'torchvison', did you mean 'torchvision'"):
        load("digits", "train", normalization="torchvison")
    with pytest.raises(UserError, match="limit=-1"):
        load("digits", "train", limit=-1)
