import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from mixnn.data.decode import MAX_PIXELS, decode, decode_all


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def colors(path: Path) -> list[int]:
    """The one color of an image, decoded."""
    found = decode(path, 4)
    assert found.shape == (3, 4, 4)
    assert (found == found[:, :1, :1]).all()
    return found[:, 0, 0].tolist()


@pytest.mark.parametrize(
    "mode, color, suffix, expected",
    [
        ("RGB", (10, 20, 30), "png", [10, 20, 30]),
        ("L", 77, "png", [77] * 3),
        ("1", 1, "png", [255] * 3),
        ("LA", (0, 0), "png", [255] * 3),
        ("LA", (9, 255), "png", [9] * 3),
        ("RGBA", (255, 0, 0, 0), "png", [255, 255, 255]),
        ("RGBA", (0, 0, 0, 51), "webp", [204] * 3),
        ("RGBA", (7, 8, 9, 255), "tiff", [7, 8, 9]),
        ("CMYK", (0, 255, 255, 0), "tif", [255, 0, 0]),
        ("I;16", 65535, "png", [255] * 3),
        ("I;16", 257 * 100, "tiff", [100] * 3),
        ("I;16", 300, "png", [1] * 3),
        ("I", 257 * 50, "tiff", [50] * 3),
        ("RGB", (1, 2, 3), "bmp", [1, 2, 3]),
        ("RGB", (1, 2, 3), "ppm", [1, 2, 3]),
    ],
)
def test_every_mode_becomes_rgb_with_transparency_on_white(tmp_path: Path, mode, color, suffix, expected):
    path = tmp_path / f"x.{suffix}"
    Image.new(mode, (6, 5), color).save(path, **({"lossless": True} if suffix == "webp" else {}))
    assert colors(path) == expected


def test_palettes_are_resolved_and_their_transparent_entry_is_white(tmp_path: Path):
    palette = Image.new("P", (6, 5), 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    palette.save(tmp_path / "opaque.png")
    palette.save(tmp_path / "clear.png", transparency=1)
    palette.save(tmp_path / "bytes.png", transparency=bytes([255, 0]))
    assert colors(tmp_path / "opaque.png") == [200, 100, 50]
    assert colors(tmp_path / "clear.png") == colors(tmp_path / "bytes.png") == [255, 255, 255]


def test_an_animation_gives_its_first_frame(tmp_path: Path):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "lime")]
    frames[0].save(tmp_path / "x.gif", save_all=True, append_images=frames[1:])
    assert colors(tmp_path / "x.gif") == [255, 0, 0]


def test_a_cmyk_jpeg_keeps_its_colors(tmp_path: Path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "x.jpg", quality=100)
    np.testing.assert_allclose(colors(tmp_path / "x.jpg"), [255, 0, 0], atol=3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(tmp_path: Path, orientation: int):
    rng = np.random.default_rng(0)
    stored = Image.fromarray(rng.integers(0, 256, (12, 12, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "x.png", exif=exif)
    with Image.open(tmp_path / "x.png") as image:
        expected = np.asarray(ImageOps.exif_transpose(image)).transpose(2, 0, 1)
    np.testing.assert_array_equal(decode(tmp_path / "x.png", 12), expected)


def test_an_image_with_damaged_exif_is_still_read(tmp_path: Path):
    Image.new("RGB", (8, 8), "red").save(tmp_path / "x.png", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xffjunk")
    images, reasons = decode_all([tmp_path / "x.png"], 4)
    assert not reasons
    assert images[0, :, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("size, resized, box", [((40, 20), (8, 4), (2, 0, 6, 4)), ((20, 40), (4, 8), (0, 2, 4, 6))])
def test_the_shorter_side_is_resized_and_the_center_of_the_longer_one_kept(tmp_path: Path, size, resized, box):
    Image.effect_noise(size, 90).convert("RGB").save(tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        expected = np.asarray(image.resize(resized, Image.Resampling.BILINEAR).crop(box)).transpose(2, 0, 1)
    np.testing.assert_allclose(decode(tmp_path / "x.png", 4), expected, atol=1)  # rounded once or twice


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_shrinking_averages_so_a_fine_checkerboard_becomes_gray(tmp_path: Path, suffix: str):
    board = (np.indices((256, 256)).sum(0) % 2 * 255).astype(np.uint8)
    Image.fromarray(board).save(tmp_path / f"x.{suffix}", **({"quality": 100} if suffix == "jpg" else {}))
    np.testing.assert_allclose(decode(tmp_path / f"x.{suffix}", 16)[:, 1:-1, 1:-1], 127.5, atol=4)


def test_the_reduced_decoding_of_large_jpegs_does_not_show(tmp_path: Path):
    noise = Image.effect_noise((32, 32), 120).convert("RGB").resize((512, 512), Image.Resampling.BICUBIC)
    noise.save(tmp_path / "x.jpg", quality=95)
    with Image.open(tmp_path / "x.jpg") as image:
        expected = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR)).transpose(2, 0, 1).astype(int)
    difference = np.abs(decode(tmp_path / "x.jpg", 32) - expected)
    assert difference.mean() < 3, "of 255; decoded at only twice the size it is nearly 5"


def test_an_image_of_the_size_asked_for_is_not_altered(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    np.testing.assert_array_equal(decode(tmp_path / "x.png", 16), pixels.transpose(2, 0, 1))


def test_unreadable_files_are_reported_at_their_position_and_the_others_decoded(tmp_path: Path):
    Image.effect_noise((64, 64), 90).convert("RGB").save(tmp_path / "good.png")
    Image.effect_noise((64, 64), 90).convert("RGB").save(tmp_path / "whole.jpg")
    whole = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:2000])
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "bomb.png").write_bytes(png_header(60_000, 60_000))
    (tmp_path / "large.png").write_bytes(png_header(14_000, 12_900))
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    Image.new("F", (4, 4), 0.5).save(tmp_path / "float.tiff")
    os.mkfifo(tmp_path / "pipe.jpg")
    files = (
        "good.png cut.jpg cut.png empty.jpg text.jpg bomb.png large.png loop.jpg float.tiff pipe.jpg gone.jpg good.png"
    )
    names = files.split()
    images, reasons = decode_all([tmp_path / name for name in names], 8)
    expected = {
        1: "truncated",
        2: "truncated",
        3: "empty",
        4: "not an image",
        5: "too large",
        6: "too large",
        7: "",
        8: "8 or 16",
    }
    assert set(reasons) == set(range(1, 11))
    for i, text in expected.items():
        assert text in reasons[i], names[i]
    assert all("\n" not in text and str(tmp_path) not in text for text in reasons.values())
    np.testing.assert_array_equal(images[0], images[-1])


def test_the_pixel_limit_holds_even_if_pillows_own_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    (tmp_path / "bomb.png").write_bytes(png_header(MAX_PIXELS, 2))
    with pytest.raises(ValueError, match="too large"):
        decode(tmp_path / "bomb.png", 8)


def test_an_image_above_pillows_warning_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Image.new("RGB", (40, 40), "red").save(tmp_path / "x.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    images, reasons = decode_all([tmp_path / "x.png"], 8)
    assert not reasons
    assert images[0, :, 0, 0].tolist() == [255, 0, 0]


def test_a_path_may_be_a_string_and_another_type_is_a_type_error(tmp_path: Path):
    assert decode_all([str(tmp_path / "gone.png")], 8)[1] == {0: "not a regular file"}
    with pytest.raises(TypeError):
        decode_all([None], 8)  # type: ignore[list-item]
