"""Which images a configuration speaks of, and what their labels allow."""

from dataclasses import replace

import pytest
import torch

from mixnn import data
from mixnn.config import Config, UserError
from mixnn.runs import Run
from mixnn.runs.images import check_there, tells_purity


@pytest.mark.parametrize(
    ("share", "batch_size", "told"),
    [(1.0, 2, True), (0.5, 256, True), (0.5, 16, True), (0.5, 8, False), (0.1, 256, False)],
)
def test_purity_is_told_where_batches_hold_pairs_of_labelled_images(share: float, batch_size: int, told: bool):
    images = data.load("digits", "train").limit(100)
    few = torch.where(torch.arange(100) < 100 * share, images.labels, -1)
    assert tells_purity(replace(images, labels=few), batch_size) == told


def test_a_data_set_that_another_process_registered_is_told_as_one(tmp_path, monkeypatch):
    run = Run.create(tmp_path / "run", Config(data="mine"), "mixnn ...")
    with pytest.raises(UserError, match=r"mine, which .*run was trained on, is no data set here"):
        check_there(run)
    with pytest.raises(UserError, match="is gone: type --source FOLDER"):
        check_there(run, "type --source FOLDER")
    monkeypatch.setitem(data.DATASETS, "mine", data.DATASETS["digits"])
    check_there(run)
