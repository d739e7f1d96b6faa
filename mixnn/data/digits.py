"""scikit-learn's handwritten digits, 8 x 8: embedded, so that a first run needs no download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mixnn.data.image_set import Arrays

SIZE = 8
COUNTS = {"train": 1_297, "test": 500}
WHITE = 16  # scikit-learn stores 0..16
SPLIT_SEED = 0


def read(_: Path, split: str) -> Arrays:
    """A fixed split: neighbors in the file come from the same writer, so it is permuted first."""
    from sklearn.datasets import load_digits

    found = load_digits()
    # RandomState, not Generator: only its stream is promised never to change
    order = np.random.RandomState(SPLIT_SEED).permutation(len(found.target))
    chosen = order[COUNTS["train"] :] if split == "test" else order[: COUNTS["train"]]
    gray = np.rint(found.images[chosen] * (255 / WHITE)).astype(np.uint8)
    images = np.ascontiguousarray(np.broadcast_to(gray[:, None], (len(chosen), 3, SIZE, SIZE)))
    return images, found.target[chosen].astype(np.int64), [str(digit) for digit in found.target_names]
