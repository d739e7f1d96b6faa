"""Thumbnails and sheets: the right pixels in the right place, as small as the page needs them."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mixnn.apps import thumbnails
from mixnn.apps.thumbnails import Encoded, Thumbnails, encode, preview, sheet
from mixnn.data import open_images
from mixnn.data.images import ImageArrays


def noise(count: int, side: int, seed: int = 0) -> Thumbnails:
    arrays = np.random.default_rng(seed).integers(0, 256, (count, 3, side, side), dtype=np.uint8)
    return Thumbnails(ImageArrays("noise", [str(i) for i in range(count)], arrays=arrays))


def pixels(encoded: Encoded) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(encoded.data)))


def test_png_keeps_every_pixel_and_a_data_uri_holds_the_file():
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    encoded = encode(Image.fromarray(image), lossless=True)
    np.testing.assert_array_equal(pixels(encoded), image)
    head, _, data = encoded.data_uri.partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == encoded.data
    assert encode(Image.fromarray(image), lossless=False).media_type == "image/jpeg"


def test_a_sheet_is_filled_row_by_row():
    tiles = np.stack([np.full((3, 2, 2), 50 * (i + 1), np.uint8) for i in range(3)])
    shown = pixels(sheet(tiles, columns=2))
    assert shown.shape == (4, 4, 3)
    assert shown[::2, ::2, 0].tolist() == [[50, 100], [150, 0]]


def test_a_preview_keeps_the_aspect_ratio_and_small_images_their_pixels(tmp_path: Path):
    wide, small = tmp_path / "a.jpg", tmp_path / "b.png"
    Image.new("RGB", (800, 400), "red").save(wide)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(small)
    images = open_images(tmp_path)
    large, tiny = preview(images, 0, longest=100), preview(images, 1, longest=100)
    assert pixels(large).shape == (50, 100, 3)
    assert (large.lossless, tiny.lossless) == (False, True)
    np.testing.assert_array_equal(pixels(tiny), np.asarray(Image.open(small)))
    small.unlink()
    with pytest.raises(FileNotFoundError):
        preview(images, 1, longest=100)


@pytest.mark.parametrize("side, loss", [(8, 0), (16, 0), (32, 25)])
def test_a_thumbnail_lies_in_its_slot_of_the_sheets(side: int, loss: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(thumbnails, "SHEET", 4 * side)
    arrays = np.random.default_rng(0).integers(0, 256, (37, 3, side, side), dtype=np.uint8)
    if loss:  # JPEG keeps smooth images nearly as they are
        arrays = np.broadcast_to(np.arange(37, dtype=np.uint8)[:, None, None, None] * 6, arrays.shape)
    some = Thumbnails(ImageArrays("some", [str(i) for i in range(37)], arrays=arrays))
    order = np.random.default_rng(1).permutation(37)
    sheets = [pixels(encoded) for encoded in some.sheets(order, side)]
    assert len(sheets) == 3
    for slot, i in enumerate(order):
        number, at = divmod(slot, 16)
        top, left = at // 4 * side, at % 4 * side
        tile = sheets[number][top : top + side, left : left + side]
        assert np.abs(tile.astype(int) - arrays[i].transpose(1, 2, 0)).max() <= loss


def test_an_image_that_is_gone_leaves_a_gray_thumbnail(tmp_path: Path):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (12, 12), "red").save(tmp_path / name)
    some = Thumbnails(open_images(tmp_path))
    (tmp_path / "a.png").unlink()
    shown = pixels(next(iter(some.sheets(np.arange(2), 16))))
    assert shown[0, 0].tolist() == [128, 128, 128]
    assert shown[0, 16].tolist() == [255, 0, 0]


def test_the_side_of_thumbnails_is_the_largest_that_fits():
    some = noise(200, 32)
    assert some.largest_side(1e9) == 32, "not larger than the images"
    assert some.largest_side(some.bytes_per_image(32) * 200 - 1) == 16
    assert some.largest_side(1000) == 0
    assert noise(10, 8).largest_side(1e9) == 8
    assert noise(3, 200).largest_side(1e9) == 128
