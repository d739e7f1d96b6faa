"""Pictures: copies at another size or quality are told from other images, however alike those are."""

import io

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from mixnn.apps.pictures import MIN_COSINE, SIDE, PictureEncoder, are_copies, copy_pairs, make_pictures
from mixnn.data.images import ImageArrays, resized

COUNT = 200
CHANGES = {
    "as JPEG": lambda image: _jpeg(image, 40),
    "enlarged": lambda image: image.resize((150, 150), Image.Resampling.BICUBIC),
    "reduced": lambda image: image.resize((70, 70), Image.Resampling.BICUBIC),
    "darker": lambda image: image.point(lambda level: 0.8 * level),
}


def _jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


def squares(images: list[Image.Image]) -> np.ndarray:
    arrays = [np.asarray(image.convert("RGB")).transpose(2, 0, 1)[None] for image in images]
    return np.concatenate([resized(array, SIDE) for array in arrays])


@pytest.fixture(scope="module")
def digits() -> list[Image.Image]:
    grays = np.uint8(load_digits().images[:COUNT] * 255 / 16)
    return [Image.fromarray(gray).resize((100, 100), Image.Resampling.BICUBIC) for gray in grays]


def pairs_of(pictures: np.ndarray) -> set[tuple[int, int]]:
    every = slice(0, len(pictures))
    return set(zip(*(side.tolist() for side in copy_pairs(pictures, every, every)), strict=True))


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_is_nearly_the_same_picture_and_another_image_is_not(digits, change):
    copies = [CHANGES[change](image) for image in digits[:40]]
    assert pairs_of(make_pictures(squares([*digits, *copies]))) == {(i, COUNT + i) for i in range(40)}


def test_one_place_that_differs_makes_another_picture(digits):
    """Two photographs of one scene have a higher cosine than some copies."""
    other = digits[0].copy()
    other.paste(digits[0].getpixel((50, 50)) ^ 255, (48, 48, 52, 52))
    pictures = make_pictures(squares([digits[0], other, _jpeg(digits[0], 40)]))
    assert pictures[0] @ pictures[1] > MIN_COSINE
    assert pairs_of(pictures) == {(0, 2)}


def test_pairs_are_those_of_the_block_however_many_are_compared_at_a_time(digits, monkeypatch):
    pictures = np.repeat(make_pictures(squares(digits[:10])), 3, axis=0)
    monkeypatch.setattr("mixnn.apps.pictures.PAIRS", 4)
    assert pairs_of(pictures) == {(i, j) for i in range(30) for j in range(i + 1, 30) if i // 3 == j // 3}
    a, b = copy_pairs(pictures, slice(0, 2), slice(2, 30))
    assert (a.tolist(), b.tolist()) == ([0, 1], [2, 2])


def test_a_picture_has_no_brightness_and_no_contrast_and_a_blank_one_is_like_no_other():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 100, (1, 3, SIDE, SIDE), np.uint8)
    blank = np.stack([np.full((3, SIDE, SIDE), level, np.uint8) for level in (0, 128, 255)])
    faint = (blank[:1] + rng.integers(0, 3, blank[:1].shape)).astype(np.uint8)  # noise of a JPEG
    pictures = make_pictures(np.concatenate([image, 2 * image + 40, blank, faint]))
    assert pictures.shape == (6, SIDE**2)
    assert pairs_of(pictures) == {(0, 1)}
    assert not pictures[2:].any()
    assert not are_copies(pictures[2:3], pictures[3:4]).any()


def test_images_are_encoded_in_batches_with_their_names(digits):
    arrays = squares(digits)
    images = ImageArrays("digits", [str(i) for i in range(COUNT)], arrays=arrays)
    batches = list(PictureEncoder().encode(images))
    assert [name for names, _, _ in batches for name in names] == images.names
    np.testing.assert_allclose(np.concatenate([some for _, some, _ in batches]), make_pictures(arrays), atol=1e-6)
