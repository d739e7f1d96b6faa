"""Handwritten digits, 8 x 8 pixels. They come with scikit-learn, so a first run needs no download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mixnn.data.image_set import Arrays

SIZE = 8
COUNTS = {"train": 1_297, "test": 500}
WHITE = 16  # scikit-learn stores values from 0 to 16
SPLIT_SEED = 0


def read(_: Path, split: str) -> Arrays:
    """Read one split. Consecutive digits are by the same writer, so all are shuffled with a fixed seed first."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    # RandomState and not Generator: numpy promises that its stream never changes
    order = np.random.RandomState(SPLIT_SEED).permutation(len(digits.target))
    chosen = order[COUNTS["train"] :] if split == "test" else order[: COUNTS["train"]]
    gray = np.rint(digits.images[chosen] * (255 / WHITE)).astype(np.uint8)
    images = np.ascontiguousarray(np.broadcast_to(gray[:, None], (len(chosen), 3, SIZE, SIZE)))
    return images, digits.target[chosen].astype(np.int64), [str(name) for name in digits.target_names]
