"""figures: each shows its runs' numbers, or is skipped with the reason; the same runs give the same bytes."""

import itertools
import json
import math
import re
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from PIL import Image

import mixnn
from docs.tables import NEEDS_RUN, data_sets
from mixnn import paper
from mixnn.cli import main
from mixnn.config import UserError
from mixnn.evaluation.features import features
from mixnn.functional import unit
from mixnn.methods.mixture import share_and_scale
from mixnn.paper.figures import FIGURES, figures
from mixnn.paper.plan import load_finished, plan_row
from mixnn.paper.plots import accuracies, curves, drawing
from mixnn.paper.plots.drawing import CannotDraw, Curve, Drawing, FinishedRuns, Line
from mixnn.paper.tables import TABLES, Row, published
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.weights import load_backbone

EPOCHS = {"epochs": 12, "warmup_epochs": 2}  # of the runs made up here: others than the defaults
FROM_RESULTS = [name for name in FIGURES if name not in ("tsne", "examples", "attention-datasets")]
NO_RUN_FOLDER = "it needs a run folder on cifar10 with a checkpoint: use runs='RUN'"
COLUMNS = ["loss", "d_positive", "d_neighbors", "purity", "inconsistency", "spread", "cas_entropy", "cas_entropy_0.1"]


class Listener(Reporter):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.said: list[str] = []
        self.warned: list[str] = []

    def info(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)


def row_of(table: str, name: str) -> Row:
    return next(row for row in TABLES[table].rows if row.name == name)


def summary(row: Row, data: str = "cifar10", seed: int = 0) -> tuple[str, dict[str, Any]]:
    """A finished run of a row, made up: its name and what `Run.summary` would say."""
    (run,) = plan_row(row, data, [seed], EPOCHS)
    rng = np.random.default_rng([seed, int(run.fingerprint, 16)])
    topk = run.config.options.get("topk", 0)
    ranks = [f"{kind}_{k}" for kind in ("purity", "purity_cas") for k in range(1, topk + 1)]
    columns = [*(COLUMNS if topk else COLUMNS[:2]), *ranks]
    metrics: list[dict[str, Any]] = []
    for epoch in range(1, run.config.epochs + 1):
        metrics.append({"epoch": epoch, "step": epoch} | {column: rng.uniform(0.1, 0.9) for column in columns})
        if epoch % 4 == 0:
            metrics[-1] |= {"knn": rng.uniform(80, 90), "knn_k": 200}
    how = {"checkpoint_step": run.config.epochs, "epochs": 100}
    results = {
        "linear": {"last": rng.uniform(88, 92), "protocol": how},
        "knn": {"weighted": rng.uniform(86, 90), "protocol": how},
    }
    about = {"device": "a made-up device", "git": "abc123"} | ({"code": "d1ge57"} if seed else {})
    config = asdict(run.config)
    made = {"config": config, "command": "", "environment": about, "results": results, "metrics": metrics}
    return run.name, made


def save(folder: Path, *summaries: tuple[str, dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in summaries:
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all rows of all tables; MNN and CAS with two seeds."""
    folder = tmp_path_factory.mktemp("figures") / "results"
    for row in (row for table in TABLES.values() for row in table.rows):
        save(folder, summary(row))
    save(folder, summary(row_of("main", "MNN"), seed=1), summary(row_of("weights", "CAS"), seed=1))
    return folder


@pytest.fixture(scope="module")
def finished(results: Path) -> FinishedRuns:
    return FinishedRuns.load(results, (), "cifar10", EPOCHS)


def draw(name: str, finished: FinishedRuns) -> Drawing:
    with drawing.figure_style():
        return FIGURES[name](finished)


def lines(ax: Axes) -> dict[str, np.ndarray]:
    """The points of each curve by its label."""
    named = [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): np.asarray(line.get_xydata(), dtype=float) for line in named}


def logged(table: str, name: str, column: str, seeds: tuple[int, ...] = (0,)) -> np.ndarray:
    """Epochs and the mean over seeds of a column, straight from the summaries."""
    logs = [summary(row_of(table, name), seed=seed)[1]["metrics"] for seed in seeds]
    epochs = [record["epoch"] for record in logs[0] if column in record]
    values = [[record[column] for record in log if column in record] for log in logs]
    return np.column_stack([epochs, np.mean(values, axis=0)])


# What is drawn


@pytest.mark.parametrize(
    "name, shown",
    [
        (
            "purity-augmentation",
            {f"{m} {v}": ("augmentation", f"{m} ({v})") for m in ("MSF", "MNN") for v in ("w/w", "s/w", "s/s")},
        ),
        ("purity-methods", {name: ("main", name) for name in ("MNN", "MSF", "CMSF", "SNCLR")}),
        ("purity-neighbors", {f"K = {k}": ("neighbors", f"MNN K={k}") for k in (1, 5, 10)}),
        ("purity-support", {f"Q = {q}": ("support", str(q)) for q in (2048, 4096, 8192, 16384)}),
        (
            "purity-selection",
            {
                "nearest": ("selection", "MNN"),
                "random": ("selection", "MNN (random)"),
                "labels": ("selection", "MNN (labels)"),
            },
        ),
    ],
)
def test_purity_curves_are_the_logged_ones(finished: FinishedRuns, name: str, shown: dict[str, tuple[str, str]]):
    default = {"MNN", "MNN s/w", "K = 5", "Q = 4096", "nearest"}  # the run that has two seeds
    for ax in draw(name, finished).figure.axes:
        found = lines(ax)
        assert set(found) == set(shown)
        for label, (table, row) in shown.items():
            expected = logged(table, row, "purity", (0, 1) if label in default else (0,))
            np.testing.assert_allclose(found[label], expected, rtol=1e-12)
    ends = {text.get_text() for text in ax.texts} - {""}  # the lines that lead to the names
    assert ends == set(shown), "each curve is named at its end"


def test_no_two_methods_look_alike_in_gray():
    styles = {(str(line.style.dash), line.style.marker, line.style.filled) for line in curves.METHODS}
    assert len(styles) == len(curves.METHODS) == 12


def test_methods_shows_the_rows_of_the_main_table_that_are_there(finished: FinishedRuns, tmp_path: Path):
    whole, end = draw("methods", finished).figure.axes
    names = {row.name for row in TABLES["main"].rows}
    assert set(lines(whole)) == names
    assert set(lines(end)) == names - {"Supervised"}
    assert "Supervised" in {text.get_text() for text in whole.texts}, "named where the other panel does not have it"
    for ax in (whole, end):
        np.testing.assert_allclose(lines(ax)["SCE"], logged("main", "SCE", "knn"))
    save(tmp_path, summary(row_of("main", "BYOL")))
    alone = FinishedRuns.load(tmp_path, (), "cifar10", EPOCHS)
    assert set(lines(draw("methods", alone).figure.axes[0])) == {"BYOL"}


def test_attention_shows_inconsistency_entropy_purity_and_spread(finished: FinishedRuns):
    orders, entropies, purity, spread = draw("attention", finished).figure.axes
    seeds = {"CAS": (0, 1), "WSE, mixture (MNN)": (0, 1)}
    tables = dict.fromkeys(["CAS, gradient through it", "CAS, mixture, gradient through it"], "controls")
    for ax, column in ((orders, "inconsistency"), (purity, "purity"), (spread, "spread")):
        found = lines(ax)
        assert set(found) == {"CAS", "WSE", "MSE (MSF)", "WSE, mixture (MNN)", "CAS, mixture", *tables}
        for label, values in found.items():
            expected = logged(tables.get(label, "weights"), label, column, seeds.get(label, (0,)))
            np.testing.assert_allclose(values, expected, rtol=1e-12)
    found = lines(entropies)
    for label, column in (("temperature 1", "cas_entropy"), ("temperature 0.1", "cas_entropy_0.1")):
        np.testing.assert_allclose(found[label], logged("weights", "CAS", column, (0, 1)), rtol=1e-12)
    levels = [line.get_ydata()[0] for line in entropies.get_lines() if len(line.get_ydata()) == 2]
    assert levels == pytest.approx([math.log(5), curves.least_entropy(5)])


def test_attention_of_several_data_sets_is_drawn_once(results: Path, tmp_path: Path):
    folder = shutil.copytree(results, tmp_path / "results")
    save(folder, summary(row_of("weights", "CAS"), "cifar100"))
    finished = FinishedRuns.load(folder, (), "cifar10", EPOCHS)
    figure, caption = draw("attention-datasets", finished)
    for ax, column in zip(figure.axes, ("inconsistency", "cas_entropy", "purity"), strict=True):
        shown = lines(ax)
        assert list(shown) == ["cifar10", "cifar100"]
        np.testing.assert_allclose(shown["cifar10"], logged("weights", "CAS", column, (0, 1)), rtol=1e-12)
        log = summary(row_of("weights", "CAS"), "cifar100")[1]["metrics"]
        assert shown["cifar100"][-1, 1] == pytest.approx(log[-1][column])
    assert "Data: cifar10, cifar100." in caption
    files = figures("attention-datasets", results=folder, out=tmp_path / "out", **EPOCHS)
    assert [path.name for path in files] == [f"attention-datasets.{suffix}" for suffix in ("svg", "png", "txt")]
    with pytest.raises(CannotDraw, match="all data sets at once: use data='cifar10'"):
        draw("attention-datasets", FinishedRuns.load(folder, (), "cifar100", EPOCHS))


def test_no_attention_over_cosines_has_less_entropy_than_the_least():
    for topk in (2, 5, 10):
        cosines = np.random.default_rng(0).choice([-1.0, -0.5, 0.5, 1.0], (4000, topk))
        share = np.exp(cosines) / np.exp(cosines).sum(1, keepdims=True)
        found = (-share * np.log(share)).sum(1).min()
        assert curves.least_entropy(topk) <= found + 1e-12
        assert topk > 5 or found == pytest.approx(curves.least_entropy(topk)), "and it is reached"
    assert curves.least_entropy(5) == pytest.approx(0.705 * math.log(5), abs=1e-3)


def test_ranks_show_both_orders_and_their_difference(finished: FinishedRuns):
    levels, gains, last = draw("ranks", finished).figure.axes
    before, after = (
        {k: logged("weights", "CAS", f"{kind}_{k}", (0, 1)) for k in range(1, 6)} for kind in ("purity", "purity_cas")
    )
    for k in (1, 3, 5):
        np.testing.assert_allclose(lines(levels)[f"k = {k}"], before[k], rtol=1e-12)
        np.testing.assert_allclose(lines(levels)[f"k = {k}*"], after[k], rtol=1e-12)
    for k in range(1, 6):
        np.testing.assert_allclose(lines(gains)[f"k = {k}"][:, 1], 100 * (after[k] - before[k])[:, 1], atol=1e-9)
    for label, order in (("by nearness to z", before), ("by attention", after)):
        np.testing.assert_allclose(lines(last)[label], [[k, order[k][-1, 1]] for k in range(1, 6)], rtol=1e-12)


def test_loss_and_accuracy_show_runs_with_and_without_mixture(finished: FinishedRuns):
    shown = {
        "with mixture (MNN)": ("weights", "WSE, mixture (MNN)", (0, 1)),
        "without mixture (WSE)": ("weights", "WSE", (0,)),
        "without mixture, weights (1.5, 0.5/K)": ("controls", "re-weighting (1.5, 0.5/K), no mixture", (0,)),
    }
    axes = [*draw("loss", finished).figure.axes, *draw("accuracy", finished).figure.axes]
    for ax, column in zip(axes, ("loss", "d_positive", "d_neighbors", "knn"), strict=True):
        assert set(lines(ax)) == set(shown)
        for label, (table, row, seeds) in shown.items():
            np.testing.assert_allclose(lines(ax)[label], logged(table, row, column, seeds), rtol=1e-12)


def test_a_linear_curve_is_drawn_where_every_run_kept_one(results: Path):
    finished = FinishedRuns.load(results, (), "cifar10", EPOCHS)
    for i, run in enumerate(finished.summaries.values()):
        run["results"]["linear"]["curve"] = [80.0 + i, 81.0 + i, 82.0 + i]
    knn, linear = draw("accuracy", finished).figure.axes
    assert "kNN" in knn.get_ylabel()
    assert linear.get_xlabel() == "epoch of the linear probe"
    (wse,) = finished.of_row(row_of("weights", "WSE"))
    curve = wse["results"]["linear"]["curve"]
    np.testing.assert_array_equal(lines(linear)["without mixture (WSE)"], list(enumerate(curve, start=1)))


def test_two_seeds_make_a_mean_with_a_band_of_one_deviation(finished: FinishedRuns):
    figure, caption = draw("purity-selection", finished)
    (band,) = figure.axes[0].collections
    logs = [[r["purity"] for r in summary(row_of("main", "MNN"), seed=seed)[1]["metrics"]] for seed in (0, 1)]
    mean, std = np.mean(logs, axis=0), np.std(logs, axis=0, ddof=1)
    heights = np.asarray(band.get_paths()[0].vertices)[:, 1]
    assert heights.min() == pytest.approx((mean - std).min())
    assert heights.max() == pytest.approx((mean + std).max())
    assert "n = 2 (seeds 0, 1), 12 epochs, a made-up device, code d1ge57, commit abc123: nearest." in caption
    assert "n = 1 (seed 0), 12 epochs, a made-up device, commit abc123: labels; random." in caption


@pytest.mark.parametrize(
    "table, row, rho, scale",
    [
        ("neighbors", "MSF K=10", 0.909, 1),
        ("neighbors", "MSF K=5", 0.833, 1),
        ("neighbors", "MSF K=1", 0.5, 1),
        ("weights", "MSE, mixture", 0.417, 1),
        ("weights", "WSE", 0.5, 2),
        ("lambda", "0.9", 0.45, 2),
        ("lambda", "0.1", 0.05, 2),
        ("main", "MNN", 0.25, 2),
        ("neighbors", "MNN K=1", 0.25, 2),
        ("main", "BYOL", 0, 1),
        ("controls", "BYOL (s/w), times 2", 0, 2),
        ("controls", "MSF, weights summing to 2", 0.833, 2),
        ("controls", "MNN, weights summing to 1", 0.25, 1),
        ("controls", "re-weighting (1.5, 0.5/K), no mixture", 0.25, 2),
    ],
)
def test_share_and_scale_follow_from_the_options(table: str, row: str, rho: float, scale: float):
    (run,) = plan_row(row_of(table, row), "cifar10", [0], {})
    assert share_and_scale(run.config.options) == pytest.approx((rho, scale), abs=5e-4)


def test_share_shows_the_papers_points_and_ours(finished: FinishedRuns):
    papers, ours = draw("share", finished).figure.axes
    families = [line for family in accuracies.FAMILIES for line in family.lines]
    printed = [published(line.row, "paper", "linear", "cifar10") for line in families]
    heights = sorted(container.lines[0].get_ydata()[0] for container in papers.containers)
    assert heights == sorted([*(value for value in printed if value is not None), 89.54])
    expected = []
    for line in families:
        seeds = (0, 1) if line.name == "MNN K=5" else (0,)
        values = [summary(line.row, seed=seed)[1]["results"]["linear"]["last"] for seed in seeds]
        expected.append(float(np.mean(values)))
    assert [container.lines[0].get_ydata()[0] for container in ours.containers] == pytest.approx(expected)
    for container, line in zip(ours.containers, families, strict=True):
        (run,) = plan_row(line.row, "cifar10", [0], {})
        assert container.lines[0].get_xdata()[0] == pytest.approx(share_and_scale(run.config.options)[0], abs=0.06)


def test_main_shows_the_papers_the_authors_and_our_numbers(finished: FinishedRuns):
    figure, caption = draw("main", finished)
    axes = figure.axes
    assert "ReSSL: not in the paper's tables" in caption
    for ax, metric, key in zip(axes, ("linear", "knn"), ("last", "weighted"), strict=True):
        dots = {(str(line.get_label()), line.get_ydata()[0]): line.get_xdata()[0] for line in ax.get_lines()}
        for y, row in enumerate(TABLES["main"].rows):
            seeds = (0, 1) if row.name == "MNN" else (0,)
            ours = [summary(row, seed=seed)[1]["results"][metric][key] for seed in seeds]
            assert dots["ours", y] == pytest.approx(np.mean(ours), abs=1e-4)
            assert dots.get(("paper", y)) == published(row, "paper", metric, "cifar10")
            assert dots.get(("authors' fixed code", y)) == published(row, "fixed", metric, "cifar10")
        assert len(ax.containers) == 1, "a bar where there are two seeds"
        ressl = [row.name for row in TABLES["main"].rows].index("ReSSL")
        assert ("paper", ressl) not in dots
        assert ("authors' fixed code", ressl) in dots
    assert [tick.get_text() for tick in axes[0].get_yticklabels()] == [row.name for row in TABLES["main"].rows]


def test_main_of_shorter_runs_says_so_and_leaves_out_what_was_not_measured(tmp_path: Path):
    name, content = summary(row_of("main", "BYOL"))
    del content["results"]["linear"]
    save(tmp_path, (name, content))
    figure, caption = draw("main", FinishedRuns.load(tmp_path, (), "cifar10", EPOCHS))
    (ax,) = figure.axes
    assert ax.get_xlabel() == "kNN accuracy (%)"
    ours = "ours, epochs=12, warmup_epochs=2"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["paper", "authors' fixed code", ours]
    assert caption.startswith(f"Final kNN accuracy: paper; authors' fixed code; {ours}.")


# What is not there


@pytest.mark.parametrize("name", FIGURES)
def test_without_runs_a_figure_is_refused_with_the_reason(tmp_path: Path, name: str):
    with pytest.raises(UserError, match=f"^cannot draw {name}: .+$"):
        figures([name], results=tmp_path, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_of_all_figures_those_without_runs_are_skipped(tmp_path: Path):
    heard = Listener()
    assert figures(results=tmp_path, out=tmp_path / "out", verbose=heard) == []
    assert [text.split()[:2] for text in heard.said] == [["skipped", f"{name}:"] for name in FIGURES]


def test_one_missing_run_or_column_is_named(results: Path, tmp_path: Path):
    for path in results.glob("*.json"):
        content = json.loads(path.read_text())
        if content["config"]["options"].get("mixer") == "none":
            for record in content["metrics"]:
                record.pop("d_neighbors", None)
        if content["config"]["options"].get("views") != "w/w":
            save(tmp_path, (path.stem, content))
    with pytest.raises(UserError) as error:
        figures(["purity-augmentation", "main", "loss"], results=tmp_path, out=tmp_path / "out", **EPOCHS)
    assert str(error.value).splitlines() == [
        "cannot draw purity-augmentation: missing rows MSF (w/w); MNN (w/w): run `mixnn.reproduce('augmentation', "
        f"results='{tmp_path}', epochs=12, warmup_epochs=2)`",
        "cannot draw loss: the log of without mixture (WSE) has no d_neighbors",
    ]
    assert not (tmp_path / "out").exists()


def test_runs_with_other_settings_are_other_runs(results: Path, finished: FinishedRuns):
    assert finished.of_row(row_of("main", "MNN"))
    longer = FinishedRuns.load(results, (), "cifar10", {"epochs": 200})
    with pytest.raises(CannotDraw, match="MNN"):
        draw("purity-selection", longer)


def test_names_and_folders_that_do_not_exist_are_the_users_errors(tmp_path: Path):
    with pytest.raises(UserError, match="did you mean 'ranks'"):
        figures(["rank"], results=tmp_path)
    with pytest.raises(UserError, match=r"there is no folder .*nowhere.*\n.*results='FOLDER'.*runs='RUN'"):
        figures(results=tmp_path / "nowhere")
    with pytest.raises(UserError, match="unknown data set or folder 'digit', did you mean 'digits'"):
        figures(results=tmp_path, data="digit")


def test_what_is_said_to_be_missing_can_be_made_by_the_command_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    small = {"epochs": 1, "limit": 64, "warmup_epochs": 0, "knn_every": 1}
    Path("my results").mkdir()
    where = {"results": "my results", "data": "digits"}
    words = [word for name, value in small.items() for word in ("--setting", f"{name}={value}")]
    assert main(["figures", "methods", "--results", "my results", "--data", "digits", *words]) == 2
    (command,) = re.findall("`mixnn (.*)`", capsys.readouterr().err)
    assert main([*shlex.split(command), "--row", "BYOL", "--protocol", "knn", "--quiet"]) == 0
    assert len(figures(["methods"], **where, **small)) == 3


def test_a_run_on_other_data_is_refused_with_the_flag_to_use(trained: Run, tmp_path: Path):
    with pytest.raises(UserError, match=r"digits-run was trained on digits, .*: use data='digits'"):
        figures(["examples"], results=tmp_path, runs=[trained])


def test_a_figure_that_is_there_is_refused_before_anything_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(FIGURES, "loss", lambda _: pytest.fail("drawn"))
    (tmp_path / "cifar10-loss.txt").write_text("precious")
    with pytest.raises(UserError, match=r"cifar10-loss.txt exists: use another name, or overwrite=True"):
        figures(["loss"], results=tmp_path, out=tmp_path)
    monkeypatch.undo()
    with pytest.raises(UserError, match="cannot draw loss"):
        figures(["loss"], results=tmp_path, out=tmp_path, overwrite=True)
    assert (tmp_path / "cifar10-loss.txt").read_text() == "precious"


def test_every_line_of_every_figure_is_a_row_of_a_table():
    named = [
        *curves.METHODS,
        *curves.MIXTURE,
        curves.REWEIGHTED,
        curves.CAS,
        *curves.OTHER_WEIGHTS,
        *curves.OPTIONAL_WEIGHTS,
        *accuracies.REQUIRED,
    ]
    named += [line for figure in curves.PURITY.values() for line in figure.lines]
    named += [line for family in accuracies.FAMILIES for line in family.lines]
    for line in named:
        assert isinstance(line, Line)
        assert line.row.name == line.name


# Files


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_files_are_the_same_at_every_call_whatever_the_users_settings(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    heard = Listener()
    written = figures(results=results, out="a", verbose=heard, **EPOCHS)
    assert written == [
        Path("a") / f"cifar10-{name}.{ending}" for name in FROM_RESULTS for ending in ("svg", "png", "txt")
    ]
    several, *of_folders = heard.said
    assert several.startswith("skipped attention-datasets: it needs runs of CAS on two data sets")
    assert of_folders == [f"skipped {name}: {NO_RUN_FOLDER}" for name in ("tsne", "examples")]
    before = dict(matplotlib.rcParams)
    again = ["purity-support", "share", "main"]  # one of each way to draw
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "svg.hashsalt": None}):
        figures(again, results=results, out="b", verbose=heard, **EPOCHS)
    assert dict(matplotlib.rcParams) == before
    first, second = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert len(second) == 3 * len(again)
    assert {name: first[name] for name in second} == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"], "nothing is written elsewhere"
    for name in FROM_RESULTS:
        assert b"<svg" in first[f"cifar10-{name}.svg"]
        assert b"dc:date" not in first[f"cifar10-{name}.svg"]
        with Image.open(tmp_path / "a" / f"cifar10-{name}.png") as picture:
            assert picture.info["dpi"] == pytest.approx((200, 200), abs=0.1)
            assert picture.width in (round(drawing.COLUMN_WIDTH * 200), round(drawing.PAGE_WIDTH * 200))
        caption = first[f"cifar10-{name}.txt"].decode()
        assert "a made-up device" in caption
        assert str(tmp_path) not in caption


def tick_labels(ax: Axes) -> list[tuple[str, float, float]]:
    """Text, left and right end of the labels below the axes, as drawn."""
    FigureCanvasAgg(ax.figure).draw()
    low, high = ax.get_xlim()
    shown = [t for t in ax.xaxis.get_major_ticks() if low <= t.get_loc() <= high and t.label1.get_text()]
    boxes = [tick.label1.get_window_extent() for tick in shown]
    return sorted(
        ((t.label1.get_text(), box.x0, box.x1) for t, box in zip(shown, boxes, strict=True)), key=lambda item: item[1]
    )


@pytest.mark.parametrize("num", [1, 2, 3, 20, 200])
def test_epochs_are_whole_numbers_that_do_not_touch(num: int):
    with drawing.figure_style():
        _, axes = drawing.make_figure(drawing.PAGE_WIDTH, 2.45, 3)
        values = Curve(np.arange(1, num + 1), np.linspace(0.1, 0.2, num), None)
        for ax in axes:
            drawing.draw_over_epochs(ax, values, curves.FIRST, "made up", 0)
        for ax in axes:
            labels = tick_labels(ax)
            assert labels
            assert all(text.isdigit() for text, _, _ in labels)
            assert all(a[2] + 4 < b[1] for a, b in itertools.pairwise(labels))


@pytest.mark.parametrize("num, shown", [(1, 1), (2, 2), (3, 2), (4, 2), (12, 4), (100, 26)])
def test_the_end_of_a_curve_has_two_readings_at_least(num: int, shown: int):
    record = [{"epoch": epoch, "purity": epoch / num} for epoch in range(1, num + 1)]
    line = curves.PURITY["purity-neighbors"].lines[0]
    with drawing.figure_style():
        _, axes = drawing.make_figure(drawing.PAGE_WIDTH, 2.3, 2)
        runs = {line: [{"metrics": record}]}
        curves.draw_with_end(axes, "purity", "purity", runs, runs)
    (low, high), (bottom, top) = axes[1].get_xlim(), axes[1].get_ylim()
    inside = [r for r in record if low <= r["epoch"] <= high and bottom <= r["purity"] <= top]
    assert len(inside) == shown


def test_labels_keep_their_order_and_distance_and_move_no_more_than_they_must():
    rng = np.random.default_rng(0)
    for wanted in (rng.uniform(0, 1, 6), np.array([0.5, 0.5, 0.5]), np.array([0.1, 0.9])):
        placed = drawing.spread_labels(list(wanted), 0.1)
        assert [placed[i] for i in np.argsort(wanted, kind="stable")] == sorted(placed)
        assert all(b - a >= 0.1 - 1e-12 for a, b in itertools.pairwise(sorted(placed)))
        assert np.mean(placed) == pytest.approx(np.mean(wanted))
    assert drawing.spread_labels([0.1, 0.9], 0.1) == [0.1, 0.9]


# Run folders


def test_a_run_folder_counts_like_a_summary(tmp_path: Path):
    _, made = summary(row_of("weights", "CAS"))
    (run,) = plan_row(row_of("weights", "CAS"), "cifar10", [0], EPOCHS)
    run = Run.create(tmp_path / "cas", run.config, "a command")
    for record in made["metrics"]:
        run.log(record)
    levels, _, _ = draw("ranks", FinishedRuns.load(tmp_path / "none", [run], "cifar10", EPOCHS)).figure.axes
    np.testing.assert_allclose(lines(levels)["k = 1*"], logged("weights", "CAS", "purity_cas_1"), rtol=1e-12)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("trained") / "digits-run"
    settings: dict[str, Any] = {"limit": 128, "epochs": 1, "backbone": "resnet8", "knn_every": 0}
    return mixnn.pretrain("digits", out=out, verbose=Reporter(quiet=True), **settings)


def test_tsne_shows_every_test_image_in_its_class(trained: Run, tmp_path: Path):
    figure, caption = draw("tsne", FinishedRuns.load(tmp_path, [trained], "digits", {}))
    (ax,) = figure.axes
    test = mixnn.data.load("digits", "test").limit(128)
    classes = lines(ax)
    assert {name: len(dots) for name, dots in classes.items()} == {
        str(c): int((test.labels == c).sum()) for c in range(10)
    }
    assert {text.get_text() for text in ax.texts} == set(classes)
    assert ax.get_title(loc="left") == "MNN"
    figures(["tsne"], results=tmp_path / "none", out=tmp_path / "out", runs=[str(trained.path)], data="digits")
    with drawing.figure_style():
        files = {f"digits-tsne.{ending}": content for ending, content in drawing.encode(figure).items()}
    assert contents(tmp_path / "out") == files | {"digits-tsne.txt": caption.encode()}, "the same at every call"
    assert "128 test images" in caption
    assert "n = 1 (seed 0), 1 epoch," in caption
    assert "MNN (digits-run)" in caption
    assert str(trained.path.parent) not in caption


def test_examples_frame_neighbors_by_class(trained: Run, tmp_path: Path):
    figure, caption = draw("examples", FinishedRuns.load(tmp_path, [trained], "digits", {}))
    train, test = (mixnn.data.load("digits", split).limit(128) for split in ("train", "test"))
    rows = [figure.axes[i : i + 6] for i in range(0, len(figure.axes), 6)]
    assert [row[0].get_title(loc="center") for row in rows] == list("01234")
    backbone = load_backbone(trained)[0]
    same = 0
    for row in rows:
        name = row[0].get_title(loc="center")
        anchor = test.subset((test.labels == int(name)).nonzero()[:1, 0])
        x, bank = (unit(features(backbone, images)) for images in (anchor, train))
        nearest = (x @ bank.T)[0].topk(5).indices
        assert [ax.get_title(loc="center") for ax in row[1:]] == [str(int(train.labels[i])) for i in nearest]
        for ax in row[1:]:
            is_same = ax.get_title(loc="center") == name
            same += is_same
            color = drawing.GREEN if is_same else drawing.RED
            assert to_hex(ax.spines["top"].get_edgecolor()).lower() == color.lower()
    assert f"{same / 25:.0%} are the same" in caption
    assert "128 training images" in caption


def test_tsne_of_two_runs_with_one_title_names_their_folders(trained: Run, tmp_path: Path):
    other = Run.open(shutil.copytree(trained.path, tmp_path / "other"))
    figure, _ = draw("tsne", FinishedRuns.load(tmp_path, [trained, other], "digits", {}))
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["(a) MNN, digits-run", "(b) MNN, other"]


def test_tsne_says_why_it_cannot_be_drawn(trained: Run, tmp_path: Path):
    def reason(runs: list[Run], data: str = "digits") -> str:
        with pytest.raises(CannotDraw) as error:
            draw("tsne", FinishedRuns.load(tmp_path, runs, data, {}))
        return str(error.value)

    assert reason([trained], data="cifar10") == NO_RUN_FOLDER
    assert "at most 6" in reason([trained] * 7)
    (run,) = plan_row(row_of("main", "MNN"), "cifar10", [0], {"data_dir": str(tmp_path)})
    absent = Run.create(tmp_path / "absent", run.config, "")
    assert reason([absent], data="cifar10") == NO_RUN_FOLDER
    absent.save_checkpoint(1, {}, {})
    assert "cifar10 is not on disk" in reason([absent], data="cifar10")


def test_the_package_leaves_pyplot_alone():
    sources = [path.read_text() for path in Path(paper.__file__).parent.rglob("*.py")]
    assert not [text for text in sources if "pyplot" in text]


@pytest.mark.parametrize("folder, settings", [("results", {}), ("results/epochs20", {"epochs": 20})])
def test_the_committed_figures_are_those_of_the_committed_results(
    tmp_path: Path, folder: str, settings: dict[str, Any]
):
    committed = Path(__file__).parents[2] / folder
    for data in data_sets(load_finished(committed)):
        figures(results=committed, out=tmp_path, data=data, verbose=Reporter(quiet=True), **settings)
    captions = {path.name: path.read_text() for path in tmp_path.glob("*.txt")}
    drawn = [path for path in committed.glob("*.txt") if path.stem.partition("-")[2] not in NEEDS_RUN]
    assert {path.name: path.read_text() for path in drawn}.items() <= captions.items()
    assert {path.stem for path in committed.glob("*.png")} == {path.stem for path in committed.glob("*.txt")}
