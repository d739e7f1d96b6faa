"""Which images a configuration speaks of, and what their labels allow."""

from dataclasses import replace

import pytest
import torch

from mixnn.data import load
from mixnn.runs.images import tells_purity


@pytest.mark.parametrize(
    ("share", "batch_size", "told"),
    [(1.0, 2, True), (0.5, 256, True), (0.5, 16, True), (0.5, 8, False), (0.1, 256, False)],
)
def test_purity_is_told_where_batches_hold_pairs_of_labelled_images(share: float, batch_size: int, told: bool):
    images = load("digits", "train").limit(100)
    few = torch.where(torch.arange(100) < 100 * share, images.labels, -1)
    assert tells_purity(replace(images, labels=few), batch_size) == told
