"""bench measures and counts; no test depends on how fast it is."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mixnn
from mixnn.paper import bench as benchmark
from mixnn.paper import growth, measure
from mixnn.paper.baseline import time_baseline
from mixnn.progress import Reporter

TINY = {"image_size": 8, "batch_size": 16, "steps": 1, "device": "cpu", "verbose": Reporter(quiet=True)}
OPTIONS = {"support_size": 32, "hidden": 16, "dim": 8}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch):
    """Few images and repeats, and a plain loop of a moment: the times themselves are not what is tested."""
    monkeypatch.setattr(measure, "NUM_IMAGES", 256)
    monkeypatch.setattr(measure, "REPEATS", 1)
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


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "matmul_tflops", lambda _: 0.1)
    mixnn.bench(options=OPTIONS, baseline=False, save="~/bench.json", **TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_a_machine_too_slow_to_have_a_hundredth_of_a_teraflop_is_measured_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(benchmark, "matmul_tflops", lambda _: 0.004)
    result = mixnn.bench(options=OPTIONS, baseline=False, **TINY)
    assert result["matmul_tflops"] == 0
    assert result["share_of_ceiling"] == pytest.approx(
        result["gflop_per_step"] / result["ms_per_step"] / 0.004, abs=0.001
    )


def test_flops_are_those_of_two_student_and_two_teacher_passes(monkeypatch: pytest.MonkeyPatch):
    """For 32 images: one student forward, a backward of twice that (less the stem's input), one teacher forward."""
    monkeypatch.setattr(benchmark, "matmul_tflops", lambda _: 0.1)  # seconds of work that this test does not need
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
        config = measure.bench_config("ressl", {"support_size": 64}, "", 8, batch_size, "cpu", "auto")
        return list(benchmark._doubled({"ressl": config}, num_images=256))

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


def test_random_images_are_bounded_by_memory_but_fill_a_batch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "MAX_BYTES", 3 * 8 * 8 * 20)
    assert len(measure.random_images(8)) == 20
    assert len(measure.random_images(8, at_least=32)) == 32
    many = measure.random_images(4, count=600)  # more than NUM_IMAGES: the rest repeats
    assert len(many) == len(many.labels) == 600
    assert (many.images[256] == many.images[0]).all()


@pytest.fixture
def _tiny_axes(monkeypatch: pytest.MonkeyPatch):
    axes = {"support_size": (64,), "topk": (2,), "batch_size": (32,), "image_size": (12,), "num_images": (40,)}
    monkeypatch.setitem(growth.AXES, "cpu", axes)
    monkeypatch.setattr(growth, "matmul_tflops", lambda _: 0.1)


@pytest.mark.usefixtures("_tiny_axes")
def test_growth_changes_one_setting_per_point_and_times_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    result = mixnn.bench(options=OPTIONS, grow=True, save=tmp_path / "growth.json", **TINY)
    assert json.loads((tmp_path / "growth.json").read_text()) == result
    points = {growth.describe(point["changes"]): point for point in result["points"]}
    assert list(points) == ["base", "Q 64", "K 2", "batch 32", "pixels 12", "images 40"]
    assert points["images 40"]["num_images"] == 40
    assert points["batch 32"]["gflop_per_step"] == pytest.approx(2 * points["base"]["gflop_per_step"], abs=0.11)
    assert points["pixels 12"]["gflop_per_step"] > 1.5 * points["base"]["gflop_per_step"]
    for point in points.values():
        assert point["search_ms"] > 0
        assert point["search_share"] == pytest.approx(point["search_ms"] / point["ms_per_step"], abs=1e-3)
    benchmark.show_bench(result)
    assert "of the step" in capsys.readouterr().out


@pytest.mark.usefixtures("_tiny_axes")
def test_growth_of_a_method_without_a_support_set_has_no_search(tmp_path: Path):
    options = {"hidden": 16, "dim": 8}
    result = mixnn.bench("byol", options=options, grow=True, save=tmp_path / "growth.json", **TINY)
    assert [growth.describe(point["changes"]) for point in result["points"]] == [
        "base",
        "batch 32",
        "pixels 12",
        "images 40",
    ]
    assert {point["search_ms"] for point in result["points"]} == {0}


@pytest.mark.usefixtures("_tiny_axes")
def test_a_point_that_needs_too_much_memory_is_skipped(monkeypatch: pytest.MonkeyPatch):
    def measure_step(config, *args):
        if config.batch_size == 32:
            raise torch.OutOfMemoryError
        return measure.measure_step(config, *args)

    monkeypatch.setattr(growth, "measure_step", measure_step)
    result = mixnn.bench(options=OPTIONS, grow=True, **TINY)
    skipped = [point for point in result["points"] if "skipped" in point]
    assert skipped == [{"changes": {"batch_size": 32}, "skipped": "out of memory"}]
    benchmark.show_bench(result)


def test_growth_is_of_one_method():
    with pytest.raises(mixnn.UserError, match="one method"):
        mixnn.bench("all", grow=True, **TINY)


def test_a_search_finds_the_neighbors_that_the_step_would_find():
    """The searches that are timed alone call the method's own, once per direction."""
    config = measure.bench_config("mnn", OPTIONS, "", 8, 16, "cpu", "auto")
    trainer = measure.measure_step(config, measure.random_images(8), 1, torch.device("cpu"), Reporter(quiet=True))[1]
    calls = []
    own = trainer.method.neighbors
    trainer.method.neighbors = lambda *args: calls.append(args) or own(*args)
    assert measure.search_milliseconds(trainer, torch.device("cpu"), 1) > 0
    assert [args[0] for args in calls[:2]] == [0, 1]
    assert calls[0][1].shape == (16, 8)
    assert calls[0][2].z_QD.shape == (32, 8)
