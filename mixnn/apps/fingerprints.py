"""Fingerprints: images as a few pixels, by which a copy is found that was saved at another size or quality.

An encoder notices the fine structure that such a copy has lost, and may find it no nearer than other images. In a few
pixels, a copy differs a little everywhere, and two views of one scene differ much at one place. So the largest
difference of any pixel decides. Copies that were cropped differ everywhere; an encoder finds those.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mixnn.apps.search.similarity import similar_pairs
from mixnn.data.images import Images

SIDE = 32  # pixels of the gray levels
COLOR_SIDE = 8  # pixels of the colors, which JPEG and WebP store more coarsely
MAX_DIFFERENCE = 0.4  # of a gray pixel in two copies, in standard deviations of the image (notes/log.md)
MAX_COLOR_DIFFERENCE = 0.7  # of a color in two copies, in the same unit; JPEG at quality 20 has up to 0.44
MIN_COSINE = 0.99  # of the gray levels of two images that are compared pixel by pixel, which takes longer
MIN_CONTRAST = 2.0  # standard deviation of the gray levels, of 255; below it, an image is blank and like no other
BATCH = 256  # images read at a time
PAIRS = 4096  # compared at a time
GRAY = slice(0, SIDE**2)  # the columns of the gray levels


class FingerprintEncoder:
    """Encoder that turns images into fingerprints instead of features."""

    num_features = SIDE**2 + 2 * COLOR_SIDE**2
    origin = "pixels"

    def encode(self, images: Images) -> Iterator[tuple[list[str], np.ndarray, list[tuple[str, str]]]]:
        """Yield for each batch: names, their fingerprints, and (name, reason) of the images that cannot be read."""
        for batch in images.batches(BATCH, SIDE):
            yield batch.names, fingerprints(batch.u8), batch.skipped


def fingerprints(images_BCHW: np.ndarray) -> np.ndarray:
    """Fingerprints of squares of 32 pixels, (B, 1152): gray levels less their mean, of length 1, then two colors.

    Colors are red less green and blue less green, in standard deviations of the gray levels, and scaled so that the
    largest allowed difference is that of the gray levels. A blank image has zeros.
    """
    images, num, cell = images_BCHW.astype(np.float32), len(images_BCHW), SIDE // COLOR_SIDE
    gray = images.mean(1).reshape(num, SIDE**2)
    gray -= gray.mean(1, keepdims=True)
    length = np.linalg.norm(gray, axis=1, keepdims=True)
    colors = images[:, ::2] - images[:, 1:2]
    colors = colors.reshape(num, 2, COLOR_SIDE, cell, COLOR_SIDE, cell).mean((3, 5)).reshape(num, 2 * COLOR_SIDE**2)
    levels = np.hstack([gray, colors * (MAX_DIFFERENCE / MAX_COLOR_DIFFERENCE)])
    return np.divide(levels, length, out=np.zeros_like(levels), where=length >= MIN_CONTRAST * SIDE)


def copy_pairs(fingerprints_MP: np.ndarray, rows: slice, columns: slice) -> tuple[np.ndarray, np.ndarray]:
    """Positions a < b of the images in a block that are copies of each other."""
    a, b = similar_pairs(fingerprints_MP[:, GRAY], rows, columns, MIN_COSINE)
    parts = [slice(start, start + PAIRS) for start in range(0, len(a), PAIRS)]
    same = [are_copies(fingerprints_MP[a[part]], fingerprints_MP[b[part]]) for part in parts]
    kept = np.concatenate([np.zeros(0, bool), *same])
    return a[kept], b[kept]


def are_copies(a_NP: np.ndarray, b_NP: np.ndarray) -> np.ndarray:
    """Which of these pairs of fingerprints are of copies, (N,); those of blank images are not."""
    is_near = np.abs(a_NP - b_NP).max(axis=1) * SIDE <= MAX_DIFFERENCE
    return is_near & a_NP[:, GRAY].any(axis=1) & b_NP[:, GRAY].any(axis=1)
