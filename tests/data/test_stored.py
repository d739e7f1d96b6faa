"""Images in a file are those that a tensor in memory would give; a file that changes is a clear error."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mixnn.config import UserError
from mixnn.data import stored
from mixnn.data.stored import StoredImages

HEADER = 100  # bytes before the images


@pytest.fixture
def images(tmp_path: Path) -> Any:
    expected = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (12, 3, 5, 4), dtype=np.uint8))
    (tmp_path / "x.npy").write_bytes(bytes(HEADER) + expected.numpy().tobytes())
    with open(tmp_path / "x.npy", "rb") as file:
        yield expected, StoredImages(file, HEADER, expected.shape)


INDICES: dict[str, Any] = {
    "all": slice(None),
    "part": slice(3, -2),
    "one": 4,
    "last": -1,
    "list": [7, 0, 1],
    "random": torch.tensor([5, 3, 11, 4, 9, 0]),
    "neighbors in reverse": torch.tensor([4, 3, 2, 9, 10, 11, 8]),
    "repeated": torch.tensor([2, 2, 3, 2, 11]),
    "none": torch.tensor([], dtype=torch.long),
    "mask": torch.arange(12) % 3 == 1,
    "two dimensions": torch.tensor([[0, 11], [5, 6]]),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("buffers", [1024, 2])
def test_indexing_gives_what_a_tensor_gives(
    images: tuple[Tensor, StoredImages], index: Any, buffers: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stored, "MAX_BUFFERS", buffers)
    expected, found = images
    assert torch.equal(found[index], expected[index])


def test_it_has_the_shape_of_a_tensor_and_can_be_copied_to_a_device(
    images: tuple[Tensor, StoredImages], monkeypatch: pytest.MonkeyPatch
):
    expected, found = images
    for name in ("shape", "dtype", "device", "ndim", "nbytes"):
        assert getattr(found, name) == getattr(expected, name), name
    assert len(found) == len(expected)
    monkeypatch.setattr(stored, "BLOCK", 150)  # two images at a time
    assert torch.equal(found.to("cpu"), expected)


@pytest.mark.parametrize("index", [[12], torch.tensor([-13])])
def test_an_image_that_is_not_there_is_an_error(images: tuple[Tensor, StoredImages], index: Any):
    with pytest.raises(IndexError):
        images[1][index]


def test_neighbors_are_read_at_once(images: tuple[Tensor, StoredImages], monkeypatch: pytest.MonkeyPatch):
    lengths, original = [], os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        lengths.append(len(buffers))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    images[1][torch.tensor([6, 1, 5, 9, 2, 7])]
    assert lengths == [2, 3, 1]


@pytest.mark.parametrize("left", [0, HEADER, HEADER + 60 * 3 + 7])
def test_a_file_that_became_shorter_is_an_error_that_names_it(images: tuple[Tensor, StoredImages], left: int):
    os.truncate(images[1].file.name, left)
    says = r"x\.npy in the image cache can no longer be read \(it became shorter\): run the command again"
    with pytest.raises(UserError, match=says):
        images[1][torch.tensor([0, 4])]


def test_a_disk_that_fails_is_an_error_too(images: tuple[Tensor, StoredImages], monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(UserError, match=r"can no longer be read \(Input/output error\)"):
        images[1][0]
