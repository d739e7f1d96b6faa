"""bench measures and counts; no test depends on how fast it is."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import mixnn
from mixnn.paper import bench as benchmark
from mixnn.paper.baseline import time_baseline
from mixnn.progress import Reporter

TINY = {"image_size": 8, "batch_size": 16, "steps": 1, "device": "cpu", "verbose": Reporter(quiet=True)}
OPTIONS = {"support_size": 32, "hidden": 16, "dim": 8}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch):
    """Few images and repeats, and a plain loop of a moment: the times themselves are not what is tested."""
    monkeypatch.setattr(benchmark, "NUM_IMAGES", 256)
    monkeypatch.setattr(benchmark, "REPEATS", 1)
    monkeypatch.setattr(benchmark, "time_baseline", lambda *args, seconds: time_baseline(*args, seconds=seconds / 100))


def test_bench_measures_counts_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    result = mixnn.bench(options=OPTIONS, save=tmp_path / "bench.json", **TINY)
    assert capsys.readouterr().out == ""
    benchmark.show_bench(result)
    assert json.loads((tmp_path / "bench.json").read_text()) == result
    assert result["mode"] == "eager"
    assert result["times_faster"] == pytest.approx(
        result["plain_loop"]["ms_per_step"] / result["ms_per_step"], abs=0.06
    )
    assert sum(result["share_by_kernel"].values()) == pytest.approx(1, abs=0.01)
    assert "plain loop" in capsys.readouterr().out


def test_a_machine_too_slow_to_have_a_hundredth_of_a_teraflop_is_measured_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(benchmark, "_matmul_tflops", lambda _: 0.004)
    result = mixnn.bench(options=OPTIONS, baseline=False, **TINY)
    assert result["matmul_tflops"] == 0
    assert result["share_of_ceiling"] == pytest.approx(
        result["gflop_per_step"] / result["ms_per_step"] / 0.004, abs=0.001
    )


def test_flops_are_those_of_two_student_and_two_teacher_passes(monkeypatch: pytest.MonkeyPatch):
    """For 32 images: one student forward, a backward of twice that (less the stem's input), one teacher forward."""
    monkeypatch.setattr(benchmark, "_matmul_tflops", lambda _: 0.1)  # seconds of work that this test does not need
    result = mixnn.bench(options=OPTIONS, baseline=False, **TINY)
    forward = 6.14e6  # FLOPs of one image through ResNet-8 at 8 pixels, counted by hand as 2 per multiplication
    assert result["gflop_per_step"] == pytest.approx(32 * 4 * forward / 1e9, abs=0.05)


def test_bench_refuses_what_it_could_not_finish(tmp_path: Path):
    with pytest.raises(mixnn.UserError, match="nowhere"):
        mixnn.bench(options=OPTIONS, save=tmp_path / "nowhere" / "x.json", **TINY)
    with pytest.raises(mixnn.UserError, match="fewer than batch_size"):
        mixnn.bench(**(TINY | {"batch_size": 512}))
    with pytest.raises(mixnn.UserError, match="smaller than batch_size"):
        mixnn.bench(options={"support_size": 8}, **TINY)


def test_twice_the_batch_is_timed_only_where_it_fits():
    def doubled(batch_size: int) -> list[str]:
        config = benchmark._config("ressl", {"support_size": 64}, "", 8, batch_size, "cpu", "auto")
        return list(benchmark._doubled({"ressl": config}))

    assert doubled(32) == ["ressl, batch 64"]
    assert doubled(64) == []


def test_all_methods_are_compared_with_the_cost_of_their_passes_at_mnns_rate(capsys: pytest.CaptureFixture[str]):
    found = mixnn.bench("all", **TINY)
    result = found["methods"]
    benchmark.show_bench(found)
    assert list(result) == [*mixnn.methods.METHODS, "ressl, batch 32", "supervised, batch 32"]
    assert [row["batch_size"] for row in result.values()] == [16] * len(mixnn.methods.METHODS) + [32, 32]
    assert result["ressl, batch 32"]["passes"] == result["ressl"]["passes"] == [1, 1]
    rate = result["mnn"]["ms_per_step"] / 8  # two student passes cost three each, two teacher passes one
    assert result["nnclr"]["expected_ms"] == pytest.approx(6 * rate, abs=0.01)
    assert result["cmsf"]["over_expected"] == pytest.approx(result["cmsf"]["ms_per_step"] / (9 * rate), rel=0.01)
    double = result["ressl, batch 32"]
    assert double["expected_ms"] == pytest.approx(2 * 4 * rate, abs=0.01)
    assert double["over_expected"] == pytest.approx(double["ms_per_step"] / (8 * rate), rel=0.01)
    assert double["images_per_s"] == pytest.approx(32 / double["ms_per_step"] * 1e3, abs=1)
    assert double["gflop_per_step"] == pytest.approx(2 * result["ressl"]["gflop_per_step"], abs=0.11)
    assert "supervised, batch 32" in capsys.readouterr().out


def test_the_profilers_own_messages_are_not_printed():
    words = shlex.split("bench --no-baseline --steps 1 --image-size 8 --batch-size 16 --device cpu")
    done = subprocess.run([sys.executable, "-m", "mixnn", *words], capture_output=True, text=True, check=True)
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("mnn: first step after ")
