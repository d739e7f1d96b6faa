"""Fingerprints: copies at another size or quality are told from other images, however alike those are."""

import io

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from mixnn.apps.fingerprints import GRAY, MIN_COSINE, SIDE, FingerprintEncoder, are_copies, copy_pairs, fingerprints
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


def pairs_of(found: np.ndarray) -> set[tuple[int, int]]:
    every = slice(0, len(found))
    return set(zip(*(side.tolist() for side in copy_pairs(found, every, every)), strict=True))


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_is_found_and_another_image_is_not(digits, change):
    copies = [CHANGES[change](image) for image in digits[:40]]
    assert pairs_of(fingerprints(squares([*digits, *copies]))) == {(i, COUNT + i) for i in range(40)}


@pytest.mark.parametrize("change", ["as JPEG", "reduced", "darker"])
def test_a_copy_of_a_colored_image_is_found(digits, change):
    colored = [Image.merge("RGB", (image, digits[i + 40], digits[i + 80])) for i, image in enumerate(digits[:40])]
    copies = [CHANGES[change](image) for image in colored]
    assert pairs_of(fingerprints(squares([*colored, *copies]))) == {(i, 40 + i) for i in range(40)}


def test_one_place_that_differs_makes_another_picture(digits):
    """Two photographs of one scene have a higher cosine than some copies."""
    other = digits[0].copy()
    other.paste(digits[0].getpixel((50, 50)) ^ 255, (48, 48, 52, 52))
    found = fingerprints(squares([digits[0], other, _jpeg(digits[0], 40)]))
    assert found[0, GRAY] @ found[1, GRAY] > MIN_COSINE
    assert pairs_of(found) == {(0, 2)}


def test_pairs_are_those_of_the_block_however_many_are_compared_at_a_time(digits, monkeypatch):
    found = np.repeat(fingerprints(squares(digits[:10])), 3, axis=0)
    monkeypatch.setattr("mixnn.apps.fingerprints.PAIRS", 4)
    assert pairs_of(found) == {(i, j) for i in range(30) for j in range(i + 1, 30) if i // 3 == j // 3}
    a, b = copy_pairs(found, slice(0, 2), slice(2, 30))
    assert (a.tolist(), b.tolist()) == ([0, 1], [2, 2])


def test_gray_levels_have_no_brightness_and_no_contrast_and_a_blank_image_is_like_no_other():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 100, (1, 1, SIDE, SIDE), np.uint8).repeat(3, 1)
    blank = np.stack([np.full((3, SIDE, SIDE), level, np.uint8) for level in (0, 128, 255)])
    faint = (blank[:1] + rng.integers(0, 3, blank[:1].shape)).astype(np.uint8)  # noise of a JPEG
    found = fingerprints(np.concatenate([image, 2 * image + 40, blank, faint]))
    assert found.shape == (6, FingerprintEncoder.num_features)
    assert pairs_of(found) == {(0, 1)}
    assert not found[2:, GRAY].any()
    assert not are_copies(found[2:3], found[3:4]).any()


def test_images_are_encoded_in_batches_with_their_names(digits):
    arrays = squares(digits)
    images = ImageArrays("digits", [str(i) for i in range(COUNT)], arrays=arrays)
    batches = list(FingerprintEncoder().encode(images))
    assert [name for names, _, _ in batches for name in names] == images.names
    np.testing.assert_allclose(np.concatenate([some for _, some, _ in batches]), fingerprints(arrays), atol=1e-6)


def test_two_flags_that_differ_in_one_color_only_are_no_copies():
    """Their gray levels are nearly the same."""
    flag = np.full((60, 90, 3), 255, np.uint8)
    flag[:, 60:] = (206, 43, 55)
    france, italy = flag.copy(), flag.copy()
    france[:, :30], italy[:, :30] = (0, 85, 164), (0, 146, 70)
    images = [Image.fromarray(array) for array in (france, italy)]
    images += [_jpeg(image, 40) for image in images]
    found = fingerprints(squares(images))
    assert found[0, GRAY] @ found[1, GRAY] > MIN_COSINE
    assert pairs_of(found) == {(0, 2), (1, 3)}
