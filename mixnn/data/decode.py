"""Image files of any mode, size and health -> square uint8 RGB arrays."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

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


class Facts(NamedTuple):
    """What a file is, before it is cropped and resized."""

    width: int
    height: int
    mode: str
    digest: str  # of the file's bytes


def decode(path: Path, size: int) -> np.ndarray:
    """One image as uint8 [3,size,size]: upright, centre-cropped, resized with anti-aliasing; raises if unreadable."""
    return inspect(path, size)[0]


def inspect(path: Path, size: int) -> tuple[np.ndarray, Facts]:
    """The same, and what is known of the file."""
    if path.is_symlink() and not path.exists():
        raise ValueError("a link that leads nowhere")
    if not path.is_file():  # a pipe named x.jpg would block for ever
        raise ValueError("not a regular file")
    content = path.read_bytes()
    if not content:
        raise ValueError("empty file")
    with Image.open(io.BytesIO(content)) as image:  # the first frame of an animation
        facts = Facts(*image.size, image.mode, hashlib.sha1(content, usedforsecurity=False).hexdigest())
        if facts.width * facts.height > MAX_PIXELS:
            raise ValueError(f"too large: {facts.width} x {facts.height} pixels, at most {MAX_PIXELS:,} are decoded")
        image.draft(None, (DRAFT_FACTOR * size, DRAFT_FACTOR * size))
        square = ImageOps.fit(to_rgb(upright(image)), (size, size), Image.Resampling.BILINEAR)
        return np.asarray(square).transpose(2, 0, 1), facts


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


def decode_all(paths: Sequence[str | Path], size: int) -> tuple[np.ndarray, dict[int, str]]:
    """All images as uint8 [M,3,size,size], and the reason at the position of each that could not be read."""
    images = np.empty((len(paths), 3, size, size), np.uint8)
    return images, {i: text for i, text in enumerate(decode_into(images, paths)) if isinstance(text, str)}


def decode_into(images: np.ndarray, paths: Sequence[str | Path]) -> list[Facts | str]:
    """Fill an array of square images, in parallel; returns each file's facts, or the reason that it has none."""
    files = [Path(path) for path in paths]  # here, for what is no path at all is no unreadable file

    def put(i: int) -> Facts | str:
        try:
            images[i], facts = inspect(files[i], images.shape[-1])
        except Exception as error:  # a decoder fed with garbage can raise nearly anything
            return reason(error)
        return facts

    # Pillow warns about odd metadata and large images; set here and not in the threads, whose filters are shared
    with warnings.catch_warnings(), ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")
        return list(pool.map(put, range(len(files))))


def reason(error: Exception) -> str:
    """One line, without the path that Pillow and the system add to theirs."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow can read"
    if isinstance(error, Image.DecompressionBombError):
        return f"too large, at most {MAX_PIXELS:,} pixels are decoded"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
