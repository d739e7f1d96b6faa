"""Pictures: images as a few gray pixels, by which a copy is found that was saved at another size or quality.

An encoder notices the fine structure that such a copy has lost, and may find it no nearer than other images. In small
pictures, a copy differs a little everywhere, and two views of one scene differ much at one place. So the largest
difference of any pixel decides. Copies that were cropped differ everywhere; an encoder finds those.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mixnn.apps.search.similarity import similar_pairs
from mixnn.data.images import Images

SIDE = 32  # pixels
MAX_DIFFERENCE = 0.4  # of a pixel in two pictures that are copies, in standard deviations of a picture (notes/log.md)
MIN_COSINE = 0.99  # of two pictures that are compared pixel by pixel, which takes longer
MIN_CONTRAST = 2.0  # standard deviation of the gray levels, of 255; below it, a picture is blank and like no other
BATCH = 256  # images read at a time
PAIRS = 4096  # compared at a time


class PictureEncoder:
    """Encoder that turns images into pictures instead of vectors."""

    num_features = SIDE**2
    origin = "pixels"

    def encode(self, images: Images) -> Iterator[tuple[list[str], np.ndarray, list[tuple[str, str]]]]:
        """Yield for each batch: names, their pictures, and (name, reason) of the images that cannot be read."""
        for batch in images.batches(BATCH, SIDE):
            yield batch.names, make_pictures(batch.u8), batch.skipped


def make_pictures(images_BCHW: np.ndarray) -> np.ndarray:
    """Pictures of squares, (B, 1024): gray levels less their mean, scaled to length 1; blank ones are zeros."""
    gray = images_BCHW.mean(1, dtype=np.float32).reshape(-1, SIDE**2)
    gray -= gray.mean(1, keepdims=True)
    length = np.linalg.norm(gray, axis=1, keepdims=True)
    return np.divide(gray, length, out=np.zeros_like(gray), where=length >= MIN_CONTRAST * SIDE)


def copy_pairs(pictures_MP: np.ndarray, rows: slice, columns: slice) -> tuple[np.ndarray, np.ndarray]:
    """Positions a < b of the pictures in a block that are copies of each other."""
    a, b = similar_pairs(pictures_MP, rows, columns, MIN_COSINE)
    parts = [slice(start, start + PAIRS) for start in range(0, len(a), PAIRS)]
    same = [are_copies(pictures_MP[a[part]], pictures_MP[b[part]]) for part in parts]
    kept = np.concatenate([np.zeros(0, bool), *same])
    return a[kept], b[kept]


def are_copies(a_NP: np.ndarray, b_NP: np.ndarray) -> np.ndarray:
    """Which of these pairs of pictures are copies, (N,); blank ones are not."""
    is_near = np.abs(a_NP - b_NP).max(axis=1) * SIDE <= MAX_DIFFERENCE
    return is_near & a_NP.any(axis=1) & b_NP.any(axis=1)
