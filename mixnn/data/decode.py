"""Decode image files of any mode and size to square uint8 RGB arrays, and report the files that cannot be read."""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mixnn.data.stored import StoredImages

MAX_PIXELS = 2**30 // 6  # 179 megapixels, as in Pillow: enough for any camera, too little for a decompression bomb
MAX_BYTES = 2**30  # of a file; an image of MAX_PIXELS has no more, even with 16 bits per channel
# What Pillow may open. It knows more formats, and runs another program for some of them (EPS).
FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
MAX_THREADS = 16
STRIP = 2**20  # pixels that are converted at a time, so that a large image needs little memory besides its own
DRAFT_FACTOR = 4  # a JPEG is decoded at least four times as large as needed: at twice, fine detail differs by 2%
ORIENTATION = 0x0112  # EXIF tag
UPRIGHT = {  # EXIF orientation -> the operation that undoes it
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class FileInfo(NamedTuple):
    """Properties of an image before it is cropped and resized."""

    width: int
    height: int
    mode: str
    digest: str  # SHA-1 of the file's bytes, or of the pixels if there is no file


class Decoded(NamedTuple):
    """The decoded images of a list."""

    images: np.ndarray | StoredImages  # uint8 (M, 3, size, size), without those that could not be read
    infos: list[FileInfo | str]  # one per image of the list; a string is the reason why it could not be read


def decode(path: Path, size: int) -> np.ndarray:
    """Decode one image to uint8 [3,size,size]: upright, center-cropped, resized with anti-aliasing.

    A file that cannot be read raises an exception of any kind.
    """
    return decode_with_info(path, size)[0]


def decode_with_info(path: Path, size: int) -> tuple[np.ndarray, FileInfo]:
    """Decode one image as `decode` does, and describe its file."""
    if path.is_symlink() and not path.exists():
        raise ValueError("a link that leads nowhere")
    if not path.is_file():  # reading a pipe named x.jpg would block forever
        raise ValueError("not a regular file")
    with open(path, "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if not num_bytes:
            raise ValueError("empty file")
        if num_bytes > MAX_BYTES:
            raise ValueError(f"too large: {num_bytes / 1e9:.1f} GB, the limit is {MAX_BYTES / 1e9:.1f}")
        with Image.open(file) as image:  # an animation gives its first frame
            check_header(image)
            (width, height), mode = image.size, image.mode
            image.draft(None, (DRAFT_FACTOR * size, DRAFT_FACTOR * size))
            is_reduced = "progressive" not in image.info  # a progressive JPEG is held in its full size even so
            with _room.take(image.width * image.height if is_reduced else width * height):
                square = ImageOps.fit(to_rgb(upright(image)), (size, size), Image.Resampling.BILINEAR)
        file.seek(0)
        digest = hashlib.file_digest(file, lambda: hashlib.sha1(usedforsecurity=False)).hexdigest()
    return np.asarray(square).transpose(2, 0, 1), FileInfo(width, height, mode, digest)


def check_header(image: Image.Image) -> None:
    """ValueError if an image that was opened, but not yet decoded, is too large or of another format than FORMATS."""
    if image.format not in FORMATS:
        raise ValueError(f"{image.format} is not supported: convert it to JPEG or PNG")
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"too large: {image.width} x {image.height} pixels, the limit is {MAX_PIXELS:,}")


class _Room:
    """Limits how many pixels all threads together decode at a time, and so the memory they take."""

    def __init__(self) -> None:
        self._pixels, self._changed = 0, threading.Condition()

    @contextmanager
    def take(self, pixels: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._pixels or self._pixels + pixels <= MAX_PIXELS)
            self._pixels += pixels
        try:
            yield
        finally:
            with self._changed:
                self._pixels -= pixels
                self._changed.notify_all()


_room = _Room()


def upright(image: Image.Image) -> Image.Image:
    """Turn an image as its EXIF orientation says."""
    try:
        turn = UPRIGHT.get(image.getexif().get(ORIENTATION, 0))
    except Exception:  # damaged metadata can raise nearly anything; the picture is still good
        turn = None
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to 8-bit RGB. Transparent parts become white; 16-bit values are scaled instead of clipped."""
    image.load()
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.width * image.height <= STRIP:
        return _strip_to_rgb(image)
    rows = max(1, STRIP // image.width)
    found = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        found.paste(_strip_to_rgb(strip), (0, top))
    return found


def _strip_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return _gray16_to_rgb(image)
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _gray16_to_rgb(image: Image.Image) -> Image.Image:
    """Convert a gray image with 16 bits per pixel; Pillow's own conversion would clip it at 255."""
    gray = np.asarray(image)
    if image.mode == "F" or gray.min() < 0 or gray.max() > 65535:
        raise ValueError(f"pixels of mode {image.mode} have no known range; save the image with 8 or 16 bits")
    return Image.fromarray(np.rint(gray / 257).astype(np.uint8)).convert("RGB")  # 65535 = 257 * 255


def decode_all(paths: Sequence[str | Path], size: int) -> tuple[np.ndarray, dict[int, str]]:
    """Decode images to uint8 [M,3,size,size]; also returns, by index, why an image could not be read."""
    images = np.empty((len(paths), 3, size, size), np.uint8)
    return images, {i: text for i, text in enumerate(decode_into(images, paths)) if isinstance(text, str)}


def decode_into(images: np.ndarray, paths: Sequence[str | Path]) -> list[FileInfo | str]:
    """Decode images in parallel into an array; return for each file its properties, or why it could not be read."""
    files = [Path(path) for path in paths]  # outside the try: a wrong type is a bug, not an unreadable file

    def fill(i: int) -> FileInfo | str:
        try:
            images[i], info = decode_with_info(files[i], images.shape[-1])
        except Exception as error:  # a decoder can raise nearly anything for a damaged file
            return reason(error)
        return info

    # Pillow warns about odd metadata and large images. The filter is set here because all threads share it.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")
        return list(pool.map(fill, range(len(files))))


def reason(error: Exception) -> str:
    """Reason why a file could not be read, in one line and without the path that Pillow and the system add."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow can read"
    if isinstance(error, Image.DecompressionBombError):
        return f"too large: the limit is {MAX_PIXELS:,} pixels"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
