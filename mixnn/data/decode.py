"""Image files of any mode, size and health -> square uint8 RGB arrays."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

MAX_PIXELS = 2**30 // 6  # 179 megapixels, where Pillow itself refuses: any camera passes, a decompression bomb does not
MAX_THREADS = 16  # each may hold one full-size image
DRAFT_FACTOR = 4  # a JPEG is decoded at least four times as large as needed: at twice, fine detail differs by 2%
ORIENTATION = 0x0112  # EXIF tag
UPRIGHT = {  # EXIF orientation -> what undoes it
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(path: Path, size: int) -> np.ndarray:
    """One image as uint8 [3,size,size]: upright, centre-cropped, resized with anti-aliasing; raises if unreadable."""
    if not path.is_file():  # a pipe named x.jpg would block for ever
        raise ValueError("not a regular file")
    if path.stat().st_size == 0:
        raise ValueError("empty file")
    with Image.open(path) as image:  # the first frame of an animation
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"too large: {image.width} x {image.height} pixels, at most {MAX_PIXELS:,} are decoded")
        image.draft(None, (DRAFT_FACTOR * size, DRAFT_FACTOR * size))
        square = ImageOps.fit(to_rgb(upright(image)), (size, size), Image.Resampling.BILINEAR)
        return np.asarray(square).transpose(2, 0, 1)


def upright(image: Image.Image) -> Image.Image:
    try:
        turn = UPRIGHT.get(image.getexif().get(ORIENTATION, 0))
    except Exception:  # damaged metadata can raise nearly anything and is no reason to lose the picture
        turn = None
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image.Image) -> Image.Image:
    """Eight bits RGB; transparent parts become white, sixteen bits are scaled and not clipped."""
    if image.mode.startswith("I") or image.mode == "F":
        return from_wide(image)
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def from_wide(image: Image.Image) -> Image.Image:
    """Gray with more than eight bits a pixel; Pillow's own conversion would clip it at 255."""
    gray = np.asarray(image)
    if image.mode == "F" or gray.min() < 0 or gray.max() > 65535:
        raise ValueError(f"pixels of mode {image.mode} have no known range, save it with 8 or 16 bits")
    return Image.fromarray(np.rint(gray / 257).astype(np.uint8)).convert("RGB")  # 65535 = 257 * 255


def decode_all(paths: Sequence[Path], size: int) -> tuple[np.ndarray, dict[int, str]]:
    """All images as uint8 [M,3,size,size], and the reason at the position of each that could not be read."""
    images = np.empty((len(paths), 3, size, size), np.uint8)

    def put(i: int) -> str | None:
        try:
            images[i] = decode(paths[i], size)
        except Exception as error:  # a decoder fed with garbage can raise nearly anything
            return reason(error)
        return None

    # Pillow warns about odd metadata and large images; set here and not in the threads, whose filters are shared
    with warnings.catch_warnings(), ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")
        reasons = list(pool.map(put, range(len(paths))))
    return images, {i: text for i, text in enumerate(reasons) if text is not None}


def reason(error: Exception) -> str:
    """One line, without the path that Pillow and the system add to theirs."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow can read"
    if isinstance(error, Image.DecompressionBombError):
        return f"too large, at most {MAX_PIXELS:,} pixels are decoded"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
