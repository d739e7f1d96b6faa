"""STL-10 from disk to a table and a figure, on a small synthetic copy of its layout.

The real files could not be had where this was written, so nothing here says how accurate a run on STL-10 is.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import mixnn
from mixnn.data import DATASETS, stl10
from mixnn.progress import Reporter
from mixnn.runs import Run

COUNTS = {"train": 40, "unlabeled": 60, "test": 20}
SMALL = {"epochs": 1, "warmup_epochs": 0, "batch_size": 32, "backbone": "resnet8", "image_size": 16, "knn_every": 0}
QUIET = Reporter(quiet=True)


@pytest.fixture(scope="module")
def stl(tmp_path_factory: pytest.TempPathFactory):
    """The folder of a data set in STL-10's layout: ten colors with noise, 96 x 96 pixels, column by column."""
    root, rng = tmp_path_factory.mktemp("stl"), np.random.default_rng(0)
    folder = root / stl10.FOLDER
    folder.mkdir()
    colors = rng.integers(0, 200, (10, 3, 1, 1))
    for part, count in COUNTS.items():
        labels = np.arange(count) % 10
        images = (colors[labels] + rng.integers(0, 50, (count, 3, 96, 96))).astype(np.uint8)
        images.transpose(0, 1, 3, 2).tofile(folder / f"{part}_X.bin")
        if part != "unlabeled":
            (labels + 1).astype(np.uint8).tofile(folder / f"{part}_y.bin")
    counts = {"pretrain": COUNTS["train"] + COUNTS["unlabeled"], "train": COUNTS["train"], "test": COUNTS["test"]}
    small = dataclasses.replace(DATASETS["stl10"], layouts=(stl10.layout(COUNTS),), splits=counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATASETS._entries, "stl10", small)
        yield root


@pytest.fixture(scope="module")
def made(stl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results and run folder of MNN and BYOL on it, as `reproduce` makes them."""
    where = tmp_path_factory.mktemp("made")
    folders = {"results": where / "results", "runs": where / "runs"}
    settings = {**SMALL, "data_dir": str(stl)}
    mixnn.reproduce("main", data="stl10", rows=["MNN", "BYOL"], probe_epochs=1, **folders, verbose=QUIET, **settings)
    return where


def test_a_table_of_stl10_is_run_on_labeled_and_unlabeled_images(made: Path):
    summaries = [json.loads(path.read_text()) for path in (made / "results").glob("stl10-*.json")]
    assert {run["config"]["method"] for run in summaries} == {"mnn", "byol"}
    for run in summaries:
        assert run["metrics"][-1]["step"] == (COUNTS["train"] + COUNTS["unlabeled"]) // 32, "both kinds are trained on"
        assert run["results"]["knn"]["protocol"]["train_images"] == COUNTS["train"]
        assert run["results"]["linear"]["protocol"]["test_images"] == COUNTS["test"]
    mnn = next(run for run in summaries if run["config"]["method"] == "mnn")
    assert (mnn["config"]["options"]["support_size"], mnn["config"]["options"]["momentum"]) == (16384, 0.996)


def test_the_table_has_the_papers_numbers_of_stl10(made: Path, stl: Path):
    found = mixnn.reproduce(
        "main", data="stl10", rows="MNN", results=made / "results", run=False, probe_epochs=1, verbose=QUIET,
        **SMALL, data_dir=str(stl),
    )  # fmt: skip
    (row,) = found["main"]
    assert (row["linear"]["paper"], row["knn"]["paper"], row["linear"]["n"]) == (91.61, 86.65, 1)
    assert row["linear"]["other_order"], "the paper's number on STL-10 has the leaky order"


def test_tsne_draws_runs_on_several_data_sets_next_to_each_other(made: Path, stl: Path, tmp_path: Path):
    digits = {"limit": 64, "epochs": 1, "backbone": "resnet8", "batch_size": 32, "knn_every": 0}
    mixnn.pretrain("digits", out=tmp_path / "digits-run", verbose=QUIET, **digits)
    runs = [tmp_path / "digits-run", *sorted((made / "runs").glob("stl10-*"))]
    assert len(runs) == 3
    files = mixnn.figures("tsne", runs=runs, out=tmp_path / "out", results=tmp_path, data_dir=str(stl), verbose=QUIET)
    assert [path.name for path in files] == [f"digits-stl10-tsne.{suffix}" for suffix in ("svg", "png", "txt")]
    caption = files[-1].read_text()
    assert "64 test images, perplexity 21 (digits); 20 test images, perplexity" in caption
    assert "Data: digits-stl10." in caption
    assert all(Run.open(run).path.name in caption for run in runs)
    with pytest.raises(mixnn.UserError, match="was trained on"):
        mixnn.figures(["tsne", "main"], runs=runs, out=tmp_path / "two", results=tmp_path, verbose=QUIET)


def test_examples_show_the_neighbors_of_five_classes(made: Path, stl: Path, tmp_path: Path):
    run = next((made / "runs").glob("stl10-mnn-*"))
    out = {"results": tmp_path, "out": tmp_path / "out", "verbose": QUIET, "data_dir": str(stl)}
    files = mixnn.figures("examples", data="stl10", runs=[run], **out)
    assert [path.name for path in files] == [f"stl10-examples.{suffix}" for suffix in ("svg", "png", "txt")]
    caption = files[-1].read_text()
    assert "their 5 nearest neighbors among 40 training images" in caption
