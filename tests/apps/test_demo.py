"""The demo, cut to one epoch."""

from pathlib import Path

import pytest
from PIL import Image

import mixnn
from mixnn.apps.demo import show_demo
from mixnn.config import UserError
from mixnn.progress import Reporter


def test_the_demo_ends_with_its_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    result = mixnn.demo(seed=0, out=tmp_path / "demo", epochs=1, verbose=Reporter(quiet=True))
    table = result["table"]
    assert list(table) == ["raw pixels", "untrained network", "MNN"]
    expected = {"kNN": 98.2, "1": 66.4, "5": 86.8, "all": 98.2}
    assert table["raw pixels"] == pytest.approx(expected, abs=1.0), "of 500 images, a CPU's rounding moves a few"
    assert table["raw pixels"]["1"] > table["untrained network"]["1"]
    assert capsys.readouterr().out == ""
    show_demo(result)
    out = capsys.readouterr().out
    assert "raw pixels" in out
    assert "neighbors.png" in out
    with Image.open(result["picture"]) as picture:
        assert min(picture.size) > 500
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 50, "an empty picture has few colors"


def test_a_run_of_another_command_in_the_home_folder_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = mixnn.pretrain("digits", epochs=0, device="cpu", out="~/mine", verbose=Reporter(quiet=True))
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="was not made by the demo"):
        mixnn.demo(out="~/mine", epochs=1, verbose=Reporter(quiet=True))
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
