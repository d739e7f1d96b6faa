"""benchmarks/folders: the metrics on features with known answers, the table, and a whole run on a tiny folder."""

import importlib.util
import json
import shutil
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mixnn.apps.embed import Embeddings
from mixnn.config import UserError
from mixnn.runs.encoder import load
from mixnn.runs.start import open_run

FOLDER = Path(__file__).parents[1] / "benchmarks" / "folders"


def load_script(name):
    spec = importlib.util.spec_from_file_location(f"folders_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def benchmark():
    return load_script("benchmark")


@pytest.fixture(scope="module")
def prepare():
    return load_script("prepare")


CLASSES = np.repeat(np.arange(4), 30)


def test_perfect_clusters_score_100(benchmark):
    vectors = np.eye(8)[CLASSES] + 0.01 * np.random.default_rng(0).standard_normal((120, 8))
    metrics = benchmark.measure(vectors, CLASSES)
    assert {name: result["value"] for name, result in metrics.items()} == dict.fromkeys(metrics, 100)
    assert {name: result["n"] for name, result in metrics.items()} == {
        "nn": 120,
        "labels_1": 116,
        "labels_5": 100,
        "labels_20": 40,
    }
    assert metrics["nn"]["se"] == 0


def test_random_features_score_near_chance(benchmark):
    metrics = benchmark.measure(np.random.default_rng(0).standard_normal((120, 16)), CLASSES)
    assert all(10 < result["value"] < 40 for result in metrics.values())
    p = metrics["nn"]["value"] / 100
    assert metrics["nn"]["se"] == pytest.approx(100 * (p * (1 - p) / 120) ** 0.5)
    draws = metrics["labels_5"]["draws"]
    assert len(draws) == 10
    assert metrics["labels_5"]["se"] == pytest.approx(np.std(draws, ddof=1) / 10**0.5)


def test_one_label_of_each_of_many_classes(benchmark):
    classes = np.repeat(np.arange(30), 2)
    assert benchmark.label_accuracy(np.eye(30)[classes], classes, 1)["value"] == 100


def test_an_image_is_not_its_own_neighbor(benchmark):
    vectors = np.array([[1, 0], [1, 0.1], [0, 1], [0.1, 1]])
    assert benchmark.nearest_agreement(vectors, np.array([0, 1, 0, 1]))["value"] == 0


def test_draws_leave_an_image_of_a_small_class(benchmark):
    classes = np.repeat([0, 1], [3, 40])
    labeled = benchmark.draw_labels(classes, 20, draw=0)
    assert [int(labeled[classes == each].sum()) for each in (0, 1)] == [2, 20]
    assert (labeled == benchmark.draw_labels(classes, 20, draw=0)).all()
    assert (labeled != benchmark.draw_labels(classes, 20, draw=1)).any()


def test_the_best_size_of_pixels_is_taken_for_each_metric(benchmark):
    small, large = ({"nn": {"value": a}, "labels_5": {"value": b}} for a, b in ((70, 40), (60, 50)))
    best = benchmark.best_of({8: small, 32: large})
    assert best == {"nn": {"value": 70, "pixels": 8}, "labels_5": {"value": 50, "pixels": 32}}


def test_budgets(benchmark):
    texts = ("90s", "6m", "6 min", "1h30m", "2 hours")
    assert [benchmark.seconds_in(text) for text in texts] == [90, 360, 360, 5400, 7200]
    with pytest.raises(UserError, match="--budget 10"):
        benchmark.seconds_in("10")


def row(folder, trained, start=(70, 50), raw=(60, 40), seed=0, device="cpu"):
    def metrics(values):
        return {
            name: {"value": value, "se": 1.0, "n": 100} for name, value in zip(("nn", "labels_5"), values, strict=True)
        }

    features = {
        "raw": metrics(raw),
        "untrained": metrics((30, 20)),
        "start": metrics(start),
        "trained": metrics(trained),
    }
    key = {"folder": folder, "seed": seed, "budget": "10m", "device": device}
    return key | {"features": features, "kept": "trained", "seconds": 630.0, "budget_seconds": 600.0}


def test_the_table_marks_a_folder_that_training_made_worse(benchmark):
    rows = [
        row("better", (75, 55)),
        row("same", (69.5, 50)),  # within a standard error
        row("worse", (75, 48)),
        row("pixels", (75, 55), raw=(80, 40)),  # above its start, below raw pixels
        row("seeds", (68, 50)),
        row("seeds", (71, 50), seed=1),  # the mean of both seeds is within a standard error
    ]
    lines = benchmark.format_table(rows).splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in lines if line.startswith("| ")}
    verdicts = {name: cells[name][11] for name in ("better", "same", "worse", "pixels", "seeds")}
    assert verdicts == {"better": "yes", "same": "no", "worse": "no", "pixels": "yes", "seeds": "no"}
    assert cells["better"][1:7] == ["settings", "1", "60.0", "30.0", "70.0", "75.0 ± 1.0"]
    assert cells["seeds"][2] == "2"
    assert cells["better"][-1] == "1.05"
    assert any("on 3 of 5" in line for line in lines)


def test_rows_are_replaced_or_added(benchmark, tmp_path, capsys):
    out = tmp_path / "results.json"
    for each in (row("b", (1, 1)), row("a", (2, 2)), row("b", (3, 3)), row("b", (4, 4), device="NVIDIA H200")):
        benchmark.save_row(out, each)
    rows = benchmark.read_rows([out])
    found = [(each["folder"], each["device"], each["features"]["trained"]["nn"]["value"]) for each in rows]
    assert found == [("a", "cpu", 2), ("b", "NVIDIA H200", 4), ("b", "cpu", 3)]
    assert benchmark.main(["--table", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "on NVIDIA H200" in printed
    assert "on cpu" in printed


@pytest.fixture
def folders(tmp_path):
    """Two classes of 12 images: red and blue noise."""
    rng = np.random.default_rng(0)
    for channel, name in ((0, "red"), (2, "blue")):
        (tmp_path / "folders" / "colors" / name).mkdir(parents=True)
        for i in range(12):
            pixels = rng.integers(0, 60, (32, 32, 3), np.uint8)
            pixels[..., channel] += 180
            Image.fromarray(pixels).save(tmp_path / "folders" / "colors" / name / f"{i}.png")
    return tmp_path / "folders"


def test_a_whole_run(benchmark, folders, tmp_path, monkeypatch, capsys):
    calls = []

    def pretrain(data, out, args, seed):
        calls.append((data.folder.name, args.budget, seed, args.device, args.threads))
        shutil.copytree(open_run(data.folder).path, out)
        return {"command": "mixnn pretrain", "seconds": 33.0, "printed": ["kept the start"]}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "pretrain", pretrain)
    monkeypatch.setattr(benchmark, "DRAWS", 2)
    arguments = [str(folders), "--budget", "30s", "--seeds", "3", "--out", "results.json", "--device", "cpu"]
    assert benchmark.main(arguments) == 0
    assert "| colors | settings | 1 | 100.0 |" in capsys.readouterr().out
    (found,) = json.loads(Path("results.json").read_text())["rows"]
    assert (found["folder"], found["seed"], found["budget"], found["device"]) == ("colors", 3, "30s", "cpu")
    assert (found["images"], found["classes"], found["over_percent"], found["kept"]) == (24, 2, 10.0, "start")
    assert found["features"]["trained"] == found["features"]["start"]
    assert str(tmp_path) not in Path("results.json").read_text()

    assert benchmark.main(arguments) == 0
    assert calls == [("colors", "30s", 3, "cpu", 0)], "a finished run is skipped"
    monkeypatch.setattr(benchmark, "Labeled", lambda *_: "colors")
    monkeypatch.setattr(benchmark, "run_one", lambda *_: found | {"printed": ["another run"]})
    assert benchmark.main([*arguments, "--again"]) == 0
    assert [each["printed"] for each in benchmark.read_rows([Path("results.json")])] == [["another run"]]
    assert benchmark.main([*arguments, "--only", "shapes"]) == 1
    assert "has no folder shapes" in capsys.readouterr().err


def test_a_budget_is_a_time_or_a_number_of_steps(benchmark):
    assert benchmark.length_options("10m", 640) == ["--time-budget", "10m"]
    assert benchmark.length_options("600 steps", 640) == ["--epochs", "60"]
    assert benchmark.length_options("600 steps", 400) == ["--epochs", "48"]  # of 32 images each
    assert (benchmark.seconds_in("1h30m"), benchmark.seconds_in("600 steps")) == (5400, 0)
    with pytest.raises(UserError, match="write it as"):
        benchmark.seconds_in("600 miles")


def test_the_untrained_network_has_random_weights(benchmark, folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = open_run(folders / "colors")
    encoder = load(run, "cpu")
    fresh = benchmark.untrained(run, encoder)
    assert fresh.size == encoder.size
    assert not fresh.backbone.state_dict()["stem.conv.weight"].equal(encoder.backbone.state_dict()["stem.conv.weight"])
    assert benchmark.kept_weights(run, encoder) == "start"
    assert benchmark.kept_weights(run, fresh) == "trained"


def test_prepare_says_how_to_fetch_a_missing_clone(prepare, tmp_path):
    letters = next(folder for folder in prepare.FOLDERS if folder.name == "letters")
    clone, fetch = prepare.missing_commands(tmp_path, [letters])
    assert clone.startswith("git clone ")
    assert clone.endswith(f"github.com/brendenlake/omniglot {tmp_path}/brendenlake+omniglot")
    assert fetch.endswith(letters.commit)


def test_prepare_takes_classes_from_a_table(prepare):
    pages = {"labels.csv": b"name class\na.png old\nb.png new\nc.png unknown\nz.png old\n", "a.png": b"", "b.png": b""}
    folder = prepare.Folder(
        "tools",
        "owner/tools",
        "0" * 40,
        r"(?P<key>.+\.png)",
        9,
        table="labels.csv",
        rows=r"(?P<key>\S+) (?P<label>old|new)",
    )
    found = prepare.choose(folder, [*pages, "c.png", "d.png"], pages.get)
    assert found == {"new": ["b.png"], "old": ["a.png"]}


def test_sources_list_every_folder(prepare):
    text = (FOLDER / "SOURCES.md").read_text()
    assert [f for f in prepare.FOLDERS if f"| {f.repo} @ {f.commit[:12]} |" not in text] == []
    assert text.count("\n| ") == len(prepare.FOLDERS) + 2


@pytest.mark.parametrize(("file", "budget"), [("h200.json", "600 steps"), ("h200.json", "5m"), ("cpu-10m.json", "10m")])
def test_the_page_on_folders_shows_the_tables_of_the_results(benchmark, file, budget):
    rows = benchmark.read_rows([FOLDER.parents[1] / "results" / "folders" / file])
    table = benchmark.format_table([row for row in rows if row["budget"] == budget])
    page = (FOLDER.parents[1] / "docs" / "folders.md").read_text()
    assert table.split("\n\n", 1)[1] in page


def test_the_page_on_folders_counts_where_training_helps(benchmark):
    results = FOLDER.parents[1] / "results" / "folders"
    by_folder = {}
    for file, budget in (("cpu-10m.json", "10m"), ("h200.json", "600 steps")):  # the latter, where both are there
        rows = [row for row in benchmark.read_rows([results / file]) if row["budget"] == budget]
        by_folder |= {name: [row for row in rows if row["folder"] == name] for name in {row["folder"] for row in rows}}
    count = sum(map(benchmark.adds, by_folder.values()))
    page = " ".join((FOLDER.parents[1] / "docs" / "folders.md").read_text().split())
    assert f"Training improves on the ImageNet encoder on {count} of these {len(by_folder)} folders" in page

    def clearly(rows):  # two standard errors
        found = [(benchmark.mean_metric(rows, "trained", m), start(rows, m)) for m in benchmark.SHOWN]
        gains = [(value - before, 2 * se) for (value, se), before in found]
        return any(gain > limit for gain, limit in gains) and all(gain >= -limit for gain, limit in gains)

    def start(rows, metric):
        return benchmark.mean_metric(rows, "start", metric)[0]

    assert f"With two standard errors, it would be {sum(map(clearly, by_folder.values()))} of {len(by_folder)}" in page
    tests = [rows for name, rows in by_folder.items() if name.startswith("w_") and name != "w_solarcells"]
    nn, labels = (
        statistics.mean(benchmark.mean_metric(rows, "trained", m)[0] - start(rows, m) for rows in tests)
        for m in benchmark.SHOWN
    )
    about = f"on {sum(map(benchmark.adds, tests))} of these {len(tests)} ({sum(map(clearly, tests))} with two standard"
    assert f"{about} errors), and {nn:.1f} points on average in NN and {labels:.1f} with five labels" in page


def test_the_tutorial_shows_how_far_to_trust_classify():
    accuracy = load_script("accuracy")
    rows = json.loads((FOLDER.parents[1] / "results" / "classify-accuracy.json").read_text())["rows"]
    page = (FOLDER.parents[1] / "docs" / "tutorial.md").read_text()
    assert accuracy.format_table(rows) in page
    assert f"on {len({row['folder'] for row in rows})} folders" in page


def test_what_classify_says_is_compared_with_the_truth_of_the_other_images():
    accuracy = load_script("accuracy")
    rng = np.random.default_rng(0)
    classes = np.repeat(["a", "b"], 30)
    vectors = rng.normal(size=(60, 4)) + 8 * np.equal.outer(classes, ["a", "b", "c", "d"])
    names = [f"{c}/{i}.png" for i, c in enumerate(classes)]
    found = Embeddings(names, vectors.astype(np.float32))
    found.vectors[:3] *= -1  # never labeled, always wrong
    rows = np.array([5, 10, 15, 20, 35, 40, 45, 50])
    said = accuracy.measure_draw(found, classes, rows, 0)
    assert (said["accuracy"], said["truth"]) == (100, round(100 * 49 / 52, 2))
    assert accuracy.measure_draw(found, classes, np.array([5, 35]), 0) is None, "nothing to test"
    random = accuracy.draw_rows(classes, 3, "random", 0)
    balanced = accuracy.draw_rows(classes, 3, "balanced", 0)
    assert (len(set(random)), len(set(balanced))) == (6, 6)
    assert sorted(classes[balanced]) == ["a"] * 3 + ["b"] * 3
