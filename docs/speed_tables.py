"""Tables about speed and the recipes, as Markdown, from results/bench-*.json and results/recipes/."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mixnn.paper.claims import Evidence
from mixnn.paper.growth import describe
from mixnn.paper.plan import accuracy, load_finished, runs_of
from mixnn.paper.provenance import commit_of, read_commits
from mixnn.paper.render import markdown_table, mean_text
from mixnn.paper.statistics import PooledStd, interval
from mixnn.paper.tables import DATASET_NAMES, PROBE_EPOCHS, PROTOCOLS, TABLES
from mixnn.training.recipes import RECIPES

LIBRARIES = {
    "lightly": "lightly, BYOL",
    "solo-learn": "solo-learn, BYOL",
    "plain": "plain PyTorch loop, BYOL",
    "mixnn-byol": "mixnn, BYOL",
    "mixnn-mnn": "mixnn, MNN",
}


def read(results: Path, name: str) -> dict[str, Any]:
    """What a benchmark measured."""
    found: dict[str, Any] = json.loads((results / f"bench-{name}-h200.json").read_text())
    return found


def bench_files(results: Path) -> list[Path]:
    """All files of benchmarks of a step."""
    return sorted([*results.glob("bench-*.json"), *results.glob("scaling-*.json")])


def probe_seconds(results: Path) -> str:
    """How long the paper's linear probe took in the newest runs, those whose training code is known, and in recipes."""
    newest = [run for run in load_finished(results).values() if run["environment"].get("training_code")]
    seconds = [run["results"]["linear"]["seconds"] for run in newest if "linear" in run["results"]]
    recipes = [run for path in (results / "recipes").glob("*.json") for run in json.loads(path.read_text())]
    seconds += [run["probe_s"] for run in recipes if run.get("probe_epochs") == PROBE_EPOCHS and "probe_s" in run]
    times = f"{min(seconds):.1f} to {max(seconds):.1f} s (median {statistics.median(seconds):.1f})"
    return f"**Evaluation:** the linear probe on CIFAR, {PROBE_EPOCHS} epochs, took {times} in the newest runs."


def state(results: Path) -> str:
    """The code and the machine behind the tables."""
    environments = [json.loads(path.read_text())["environment"] for path in bench_files(results)]
    commits = {commit_of(made_with, read_commits(results)) for made_with in environments}
    devices, torches = ({made_with[name] for made_with in environments} for name in ("device", "torch"))
    names = ", ".join(f"`{commit}`" for commit in sorted(commits))
    return f"{', '.join(sorted(devices))}, torch {', '.join(sorted(torches))}, the code of commit {names}."


def peers(results: Path) -> str:
    """A step in other libraries and in ours."""
    found = {name: row for name, row in read(results, "peers")["libraries"].items() if "loading" in row}
    base = found["mixnn-byol"]["loading"]["ms_per_step"]
    rows = []
    for name, row in found.items():
        ready = "the same" if name.startswith("mixnn") else f"{row['ready']['ms_per_step']:.1f}"
        ms = row["loading"]["ms_per_step"]
        rows.append([LIBRARIES[name], f"{ms:.1f}", f"{ms / base:.1f}", ready])
    heads = ["", "ms per step", "times mixnn's BYOL", "batches already on the GPU"]
    return markdown_table(heads, rows, "lrrr")


def step(results: Path) -> str:
    """One step of MNN."""
    one = read(results, "mnn")
    about = f"{one['images_per_s']:,} images/s; {one['tflops']:.0f} TFLOP/s, {_share(one)}; {_memory(one)}"
    spread = "{:.2f} to {:.2f}".format(*one["ms_spread"])
    return markdown_table(["ms per step", "range", ""], [[f"{one['ms_per_step']:.2f}", spread, about]], "rrl")


def kernels(results: Path) -> str:
    """Time by kind of kernel, of two steps."""
    steps = [read(results, name) for name in ("mnn", "resnet50-224")]
    kinds = dict.fromkeys(kind for one in steps for kind in one["share_by_kernel"])
    rows = []
    for kind in kinds:
        shares = [(one["share_by_kernel"].get(kind), one["ms_per_step"]) for one in steps]
        cells = [["-", "-"] if share is None else [f"{share * ms:.2f}", f"{share:.0%}"] for share, ms in shares]
        rows.append([kind, *cells[0], *cells[1]])
    rows.append(["all", *(text for one in steps for text in (f"{one['ms_per_step']:.2f}", ""))])
    heads = ["kernels", "ResNet-18, 32 pixels: ms", "share", "ResNet-50, 224 pixels: ms", "share"]
    facts = []
    for name, one in zip(("ResNet-18 at 32 pixels", "ResNet-50 at 224 pixels"), steps, strict=True):
        operations = f"{one['gflop_per_step'] / 1000:.2f} TFLOP per step, {one['tflops']:.0f} TFLOP/s"
        facts.append(f"- **{name}:** {operations}, {_share(one)}; {_memory(one)}.")
    return markdown_table(heads, rows, "lrrrr") + "\n\n" + "\n".join(facts)


def _share(one: Mapping[str, Any]) -> str:
    ceiling = f"{one['matmul_tflops']:.0f} that a large matrix product reaches on this GPU"
    return f"{one['share_of_ceiling']:.0%} of the ceiling, the {ceiling}"


def _memory(one: Mapping[str, Any]) -> str:
    return f"{one['peak_memory_gib']:.1f} GiB"


def methods(results: Path) -> str:
    """A step of every method."""
    names = {row.method: row.name for row in TABLES["main"].rows}
    rows = []
    for label, row in read(results, "methods")["methods"].items():
        method, _, batch = label.partition(", ")
        passes = "{} + {}".format(*row["passes"])
        cells = [f"{row['ms_per_step']:.2f}", f"{row['over_expected']:.2f}"]
        rows.append([", ".join(filter(None, [names[method], batch])), passes, *cells])
    return markdown_table(["", "passes", "ms per step", "ratio"], rows, "lrrr")


def convolutions(results: Path) -> str:
    """The convolutions of the first stage, cuDNN's and ours."""
    rows = read(results, "convolutions")["rows"]
    sides = list(dict.fromkeys(row["side"] for row in rows))
    lines = []
    for what in dict.fromkeys(row["what"] for row in rows):
        by_side = {row["side"]: row for row in rows if row["what"] == what}
        times = [by_side.get(side, {}).get(name) for side in sides for name in ("cudnn_us", "mixnn_us")]
        lines.append([what, *("" if time is None else f"{time:.1f}" for time in times)])
    heads = [text for side in sides for text in (f"{side} pixels: cuDNN", "mixnn")]
    return markdown_table(["us", *heads], lines, "l" + "r" * len(heads))


def growth(results: Path) -> str:
    """How a step grows with Q, K, the batch, the images, the backbone and the data set."""
    found = read(results, "growth")
    base = "the recipe: ResNet-18, batch 256, 32 pixels, Q 4,096, K 5"
    rows = []
    for point in found["points"]:
        what = describe(point["changes"]) if point["changes"] else base
        speed = [f"{point['ms_per_step']:.2f}", f"{point['images_per_s']:,}", f"{point['share_of_ceiling']:.0%}"]
        search = [f"{point['search_ms']:.2f}", f"{point['search_share']:.1%}"]
        rows.append([what, *speed, *search, f"{point['peak_memory_gib']:.1f}"])
    heads = ["what differs", "ms per step", "images/s", "of the ceiling", "search, ms", "of the step", "GiB"]
    return markdown_table(heads, rows, "lrrrrrr")


def recipes(results: Path) -> str:
    """Accuracies and seconds of training: the paper's settings and our recipes."""
    finished = load_finished(results)
    (mnn,) = (row for row in TABLES["main"].rows if row.name == "MNN")
    seeds = sorted({seed for _, seed in finished})
    evidence, rows = Evidence(finished), []
    for path in sorted((results / "recipes").glob("*-final.json")):
        data = path.name.removesuffix("-final.json")
        runs = runs_of(mnn, data, seeds, {}, finished)
        papers = {protocol: [accuracy(run, protocol) for run in runs] for protocol in PROTOCOLS}
        if runs:
            seconds = [run["metrics"][-1]["seconds"] for run in runs]
            rows.append([*_recipe_row(data, "the paper's", 200, seconds, *papers.values()), "", ""])
        made = json.loads(path.read_text())
        for name in RECIPES:
            own = [run for run in made if run["settings"] == {"recipe": name} and "linear" in run]
            if own:
                columns = [[run[column] for run in own] for column in ("seconds", "linear", "knn")]
                row = _recipe_row(data, f"`{name}`", RECIPES[name]["epochs"], *columns)
                compared = zip(PROTOCOLS, columns[1:], strict=True)
                rows.append([*row, *(_difference(ours, papers[p], *evidence.noise(data, p)) for p, ours in compared)])
    heads = ["data", "settings", "seeds", "epochs", "seconds of training", "linear", "kNN"]
    return markdown_table([*heads, "linear minus the paper's", "kNN minus the paper's"], rows, "llrrrrrll")


def _difference(ours: Sequence[float], theirs: Sequence[float | None], noise: PooledStd | None, source: str) -> str:
    """The difference of two means with its 95% interval, in which a noise that is only assumed has the mark ?."""
    known = [value for value in theirs if value is not None]
    if not known or noise is None:
        return ""
    _, low, high = found = interval(
        statistics.fmean(ours) - statistics.fmean(known), 1 / len(ours) + 1 / len(known), noise
    )
    return f"{found.mean:+.2f} [{low:+.2f}, {high:+.2f}]" + " ?" * source.endswith("doubled")


def _recipe_row(data: str, settings: str, epochs: int, *columns: Iterable[float | None]) -> list[str]:
    seconds, linear, knn = ([value for value in column if value is not None] for column in columns)
    means = [f"{statistics.fmean(seconds):.1f}", *(mean_text(values, with_count=False) for values in (linear, knn))]
    return [DATASET_NAMES[data], settings, str(len(linear)), str(epochs), *means]


BLOCKS: dict[str, Callable[[Path], str]] = {
    "speed-state": state,
    "speed-peers": peers,
    "speed-step": step,
    "speed-kernels": kernels,
    "speed-methods": methods,
    "speed-convolutions": convolutions,
    "speed-growth": growth,
    "speed-probe": probe_seconds,
}
