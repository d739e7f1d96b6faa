"""docs/data.md from top to bottom: its code runs, and it lists what the code takes."""

import re
from pathlib import Path

import pytest

import mixnn
from mixnn.progress import Reporter
from mixnn.training.pretrain import pretrain

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
FAST = {"init_from": "none", "image_size": 8, "batch_size": 8, "knn_every": 0, "device": "cpu"}
FAST |= {"options": {"support_size": 8, "hidden": 8, "dim": 4}}


def test_the_pages_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """With a tiny network, for an epoch instead of ten minutes."""

    def fast(data, **given):
        if given.pop("time_budget", ""):
            given["epochs"] = 1
        return pretrain(data, **given | ({} if "resume" in given else FAST), verbose=Reporter(quiet=True))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mixnn, "pretrain", fast, raising=False)
    names: dict = {}
    for block in BLOCKS:
        exec(block, names)
    printed = capsys.readouterr().out
    assert "(64, " in printed
    assert "['0', '1', '2']" in printed
    assert len(names["fitted"].predict(names["images"][6:10])) == 4
    assert names["run"].metrics()[-1]["epoch"] == 2
    assert len(names["nearest"]["queries"][0]["nearest"]) == 3
    assert names["page"].is_file()
