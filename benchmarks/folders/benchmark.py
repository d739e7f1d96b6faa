"""Measure `mixnn pretrain FOLDER` on labeled folders of images. Labels are only used to judge.

    python benchmarks/folders/benchmark.py FOLDERS --budget 10m --seeds 0 1 2 --out results.json
    python benchmarks/folders/benchmark.py --table results.json

FOLDERS holds one folder per data set, with a subfolder per class; prepare.py makes them. For each folder and seed, the
benchmark runs `mixnn pretrain` as a user would, and compares four kinds of features:

  raw        pixels at 8, 16 and 32 pixels; for each metric, the best of the three
  untrained  the run's network with random weights
  start      the default encoder of a folder without training
  trained    the encoder of the run

Metrics, in percent:

  nn               images whose nearest other image (cosine) has the same class; standard error sqrt(p (1 - p) / n)
  1, 5, 20 labels  accuracy on all other images with that many labels per class; mean and standard error of 10 draws.
                   Every kind of features gets the same draws. A small class keeps one image to test on.

The classifier is scikit-learn's logistic regression (L2, C = 10). The mean over all images of the folder, which needs
no labels, is subtracted from the features, and each vector is scaled to length 1. This setting was chosen for all kinds
of features: of C = 1, 10, 100 and 1000, centered or not, it was the best on average over raw pixels (16 and 32) and the
start at 96 pixels, on letters, xray, flowers and steel with 1, 5 and 20 labels (4 draws). Its mean accuracy was 55.1;
the best without centering was 53.9 (C = 100), lower for raw pixels and equal for the start.

A budget is a time, or a number of steps ("600 steps") to see how runs of equal length differ by seed, on any machine.
--options "--lr 1e-3 --batch-size 128" tries other settings.

Results are saved after each run. A later call with the same --out adds to them, so that several calls or machines can
fill one file; a folder, seed, budget and device that is already there is skipped, or replaced with --again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

import mixnn
from mixnn.config import UserError, parse_duration
from mixnn.data import Images, open_images
from mixnn.device import pick_device
from mixnn.files import write_atomically
from mixnn.progress import NullReporter
from mixnn.runs.encoder import Encoder
from mixnn.runs.folder import Run, environment
from mixnn.runs.start import open_run
from mixnn.runs.weights import initial_backbone
from mixnn.training.folder_settings import choose

PIXELS = (8, 16, 32)
LABELS = (1, 5, 20)  # per class
DRAWS = 10
C = 10.0  # of the logistic regression; chosen as described above
KINDS = ("raw", "untrained", "start", "trained")
NAMES = {"start": "ImageNet"}  # of kinds in the table, if they have another
SHOWN = ("nn", "labels_5")  # metrics in the table
KEY = ("folder", "seed", "budget", "device")  # identifies a row of the results
PRINTED_LINES = 60  # of a run's output, the last ones are kept

Metrics = dict[str, dict[str, Any]]


# --- metrics ---


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1; a row of zeros stays."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def nearest_agreement(vectors: np.ndarray, classes: np.ndarray) -> dict[str, Any]:
    """Percentage of images whose nearest other image has the same class."""
    x = unit(vectors.astype(np.float32))
    similarity = x @ x.T
    np.fill_diagonal(similarity, -np.inf)
    p, n = float(np.mean(classes[similarity.argmax(axis=1)] == classes)), len(classes)
    return {"value": 100 * p, "se": 100 * math.sqrt(p * (1 - p) / n), "n": n}


def draw_labels(classes: np.ndarray, per_class: int, draw: int) -> np.ndarray:
    """Rows to label, (n,) bool: `per_class` of each class, or fewer so that one image remains."""
    rng = np.random.default_rng(draw)
    labeled = np.zeros(len(classes), bool)
    for each in np.unique(classes):
        rows = rng.permutation(np.flatnonzero(classes == each))
        labeled[rows[: min(per_class, len(rows) - 1)]] = True
    return labeled


def label_accuracy(vectors: np.ndarray, classes: np.ndarray, per_class: int) -> dict[str, Any]:
    """Accuracy in percent on the images without a label, over the draws."""
    x, draws = unit((vectors - vectors.mean(axis=0)).astype(np.float64)), []
    for draw in range(DRAWS):
        labeled = draw_labels(classes, per_class, draw)
        # The solution is a combination of the training rows, so that their span is enough, and faster.
        z = x @ np.linalg.qr(x[labeled].T)[0] if labeled.sum() < x.shape[1] else x
        with threadpool_limits(1), warnings.catch_warnings():  # more threads are slower for matrices of this size
            warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)  # one label per class
            model = LogisticRegression(C=C, max_iter=1000).fit(z[labeled], classes[labeled])
            draws.append(100 * float(np.mean(model.predict(z[~labeled]) == classes[~labeled])))
    se = float(np.std(draws, ddof=1)) / math.sqrt(DRAWS)
    return {"value": float(np.mean(draws)), "se": se, "n": int((~labeled).sum()), "draws": draws}


def measure(vectors: np.ndarray, classes: np.ndarray) -> Metrics:
    """All metrics of one kind of features."""
    return {"nn": nearest_agreement(vectors, classes)} | {
        f"labels_{count}": label_accuracy(vectors, classes, count) for count in LABELS
    }


def best_of(candidates: dict[int, Metrics]) -> Metrics:
    """For each metric, the best of the raw pixels of several sizes, with that size."""
    names = next(iter(candidates.values()))
    best = {name: max(candidates, key=lambda side: candidates[side][name]["value"]) for name in names}
    return {name: candidates[side][name] | {"pixels": side} for name, side in best.items()}


# --- features ---


class Labeled:
    """A folder's readable images with the class of each, and its features that need no training."""

    def __init__(self, folder: Path, device: str) -> None:
        images = open_images(folder)
        unreadable = {name for batch in images.batches(256, PIXELS[0]) for name, _ in batch.skipped}
        names = [name for name in images.names if name not in unreadable]
        labels = [str(Path(name).parent) for name in names]
        names = [name for name, label in zip(names, labels, strict=True) if labels.count(label) > 1]
        self.folder, self.device, self.images = folder, device, images.named(names)
        self.class_names, self.classes = np.unique([str(Path(name).parent) for name in names], return_inverse=True)
        if len(self.class_names) < 2:
            raise UserError(f"{folder} needs a subfolder per class, at least two with two images each")
        self.raw = best_of({side: measure(read_pixels(self.images, side), self.classes) for side in PIXELS})
        with tempfile.TemporaryDirectory() as temporary, chdir(temporary):  # open_run makes a run in ./runs
            encoder = mixnn.load(open_run(folder, NullReporter()), device)
            self.start_size, self.start = encoder.size, self.measure(encoder)

    def measure(self, encoder: Encoder) -> Metrics:
        return measure(np.concatenate([vectors for _, vectors, _ in encoder.encode(self.images)]), self.classes)


def read_pixels(images: Images, side: int) -> np.ndarray:
    return np.concatenate([batch.u8.reshape(len(batch.u8), -1) for batch in images.batches(256, side)]) / np.float32(
        255
    )


def untrained(run: Run, encoder: Encoder) -> Encoder:
    """The run's network with random weights, for the same images."""
    backbone = initial_backbone(replace(run.config, init_from="none"))
    return Encoder(backbone, encoder.size, encoder.mean.cpu(), encoder.std.cpu()).to(encoder.device)


def kept_weights(run: Run, encoder: Encoder) -> str:
    """Whether training changed the encoder: "trained", or "start" if the run ended with the weights it began with."""
    before, after = initial_backbone(run.config).state_dict(), encoder.backbone.state_dict()
    same = before.keys() == after.keys() and all(torch.equal(t, after[name].cpu()) for name, t in before.items())
    return "start" if same else "trained"


# --- runs ---


def pretrain(data: Labeled, out: Path, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run `mixnn pretrain` in a process of its own; returns its command, wall time and what it printed."""
    folder, threads = data.folder, args.threads
    command = ["mixnn", "pretrain", str(folder), *length_options(args.budget, len(data.images))]
    command += ["--seed", str(seed), "--out", str(out), "--device", args.device, *shlex.split(args.options)]
    source = str(Path(mixnn.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))}
    env |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=out.parent,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed:\n{done.stdout}")

    def without_paths(text: str) -> str:
        return text.replace(str(folder.parent), "FOLDERS").replace(str(out.parent), "TMP")

    printed = without_paths(done.stdout).splitlines()[-PRINTED_LINES:]
    return {"command": without_paths(" ".join(command)), "seconds": round(seconds, 1), "printed": printed}


def length_options(budget: str, num_images: int) -> list[str]:
    """How long to train, for the command: a time, or the epochs that make the number of steps."""
    if steps := steps_in(budget):
        defaults = {choice.name: choice.value for choice in choose(num_images, 128, {}, {}, cuda=False)}
        return ["--epochs", str(max(1, round(steps * defaults["batch_size"] / num_images)))]
    return ["--time-budget", budget]


def run_one(data: Labeled, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One row of the results."""
    device = args.device
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary).resolve() / "run"
        ran = pretrain(data, out, args, seed)
        run = Run.open(out)
        encoder = mixnn.load(run, device)
        features = {
            "raw": data.raw,
            "untrained": data.measure(untrained(run, encoder)),
            "start": data.start,
            "trained": data.measure(encoder),
        }
        config = {name: value for name, value in asdict(run.config).items() if name not in ("data", "data_dir")}
        kept = kept_weights(run, encoder)
        steps = max((line["step"] for line in run.metrics()), default=0)
        judgement = run.judgement()
    key = {"folder": data.folder.name, "seed": seed, "budget": budget_key(args), "device": device_key(device)}
    counts = {"images": len(data.images), "classes": len(data.class_names), "start_size": data.start_size}
    limit = seconds_in(args.budget)
    spent = {"budget_seconds": limit, "over_percent": round(100 * (ran["seconds"] / limit - 1), 1) if limit else None}
    versions = environment(pick_device(device)) | {"numpy": np.__version__, "sklearn": sklearn.__version__}
    found = {"steps": steps, "judgement": judgement, "kept": kept, "features": features}
    return key | counts | ran | spent | found | {"config": config, "environment": versions}


def device_key(device: str) -> str:
    """`cpu`, or the name of the GPU."""
    picked = pick_device(device)
    return torch.cuda.get_device_name(picked) if picked.type == "cuda" else picked.type


def budget_key(args: argparse.Namespace) -> str:
    """The budget and the other settings of a run."""
    return f"{args.budget} {args.options}".strip()


def steps_in(budget: str) -> int:
    """The number in "600 steps"; 0 for a time."""
    return int(match[1]) if (match := re.fullmatch(r"(\d+) ?steps", budget)) else 0


def seconds_in(budget: str) -> float:
    """Seconds in a time, as pretrain takes it: 90s, 6 min or 1h30m; 0 for a number of steps."""
    try:
        return 0.0 if steps_in(budget) else parse_duration(budget)
    except UserError:
        raise UserError(f'--budget {budget}: write it as 90s, 10m, 1h30m or "600 steps"') from None


# --- results ---


def read_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of several files; of rows with the same key, the last."""
    return merge([row for path in paths for row in json.loads(path.read_text())["rows"]])


def merge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, sorted; of rows with the same key, the last."""
    by_key = {row_key(row): row for row in rows}
    return [by_key[key] for key in sorted(by_key)]


def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def save_row(path: Path, row: dict[str, Any]) -> None:
    """Add a row to the file, which another process may have written to meanwhile."""
    rows = merge([*(read_rows([path]) if path.exists() else []), row])
    write_atomically(path, (json.dumps({"rows": rows}, indent=1) + "\n").encode())


# --- table ---


def mean_metric(rows: Sequence[dict[str, Any]], kind: str, metric: str) -> tuple[float, float]:
    """Mean over the seeds of a value and of its standard error: the seeds share images and draws."""
    results = [row["features"][kind][metric] for row in rows if kind in row["features"]]
    if not results:
        return math.nan, math.nan
    return float(np.mean([r["value"] for r in results])), float(np.mean([r["se"] for r in results]))


def holds(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the trained encoder is as good as raw pixels and the start, up to a standard error, in both metrics."""
    for metric in SHOWN:
        value, se = mean_metric(rows, "trained", metric)
        if value + se < max(mean_metric(rows, kind, metric)[0] for kind in ("raw", "start")):
            return False
    return True


def adds(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether training raised one metric by more than a standard error, and lowered the other by less than one."""
    gains = []
    for metric in SHOWN:
        value, se = mean_metric(rows, "trained", metric)
        gains.append((value - mean_metric(rows, "start", metric)[0], se))
    return any(gain > se for gain, se in gains) and all(gain >= -se for gain, se in gains)


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: for each budget and device, a line per folder with the means over its seeds."""
    parts = []
    for budget, device in sorted({(row["budget"], row["device"]) for row in rows}):
        here = [row for row in rows if (row["budget"], row["device"]) == (budget, device)]
        parts.append(_format_group(here, f"{budget} on {device}"))
    return "\n\n".join(parts)


def used_for(folder: str) -> str:
    """What a folder was used for, besides measuring: nothing, most settings, or a single rule (docs/folders.md)."""
    if "_" not in folder:
        return "settings"
    return "test" if folder.startswith("w_") and folder != "w_solarcells" else "one rule"


def _format_group(rows: Sequence[dict[str, Any]], title: str) -> str:
    timed = any(row["budget_seconds"] for row in rows)
    kinds = [NAMES.get(kind, kind) for kind in KINDS]
    head = ["folder", "used for", "seeds", *(f"{metric} {kind}" for metric in ("NN", "5 labels") for kind in kinds)]
    head += ["improves", *["time / budget"] * timed]
    lines = [title, "", f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    folders = sorted({row["folder"] for row in rows})
    groups = {folder: [row for row in rows if row["folder"] == folder] for folder in folders}
    for folder, group in groups.items():
        cells = [folder, used_for(folder), str(len(group))]
        for metric in SHOWN:
            values = [mean_metric(group, kind, metric)[0] for kind in KINDS]
            cells += ["" if math.isnan(value) else f"{value:.1f}" for value in values]
            cells[-1] += f" ± {mean_metric(group, 'trained', metric)[1]:.1f}"
        cells.append("yes" if adds(group) else "no")
        spent = [f"{row['seconds'] / row['budget_seconds']:.2f}" for row in group if row["budget_seconds"]]
        cells += [", ".join(spent)] * timed
        lines.append(f"| {' | '.join(cells)} |")
    total, trained = len(groups), sum(row["kept"] == "trained" for row in rows)
    better, as_good = (sum(map(verdict, groups.values())) for verdict in (adds, holds))
    lines += [
        "",
        f"- Training improves on the ImageNet encoder on {better} of {total} folders.",
        "- The trained encoder is at most one standard error below raw pixels and the ImageNet encoder on "
        f"{as_good} of {total}.",
        f"- {'All' if trained == len(rows) else f'{trained} of'} {len(rows)} runs ended with the trained weights.",
    ]
    return "\n".join(lines)


# --- command ---


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="?", type=Path, metavar="FOLDERS", help="folder with one folder per data set")
    parser.add_argument("--budget", default="10m", help='length of each run: a time, or "600 steps" [%(default)s]')
    parser.add_argument("--options", default="", help="more options for mixnn pretrain, as one word")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run for each [0]")
    parser.add_argument("--out", type=Path, default=Path("results.json"), help="results, added to [%(default)s]")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="only these folders")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [%(default)s]")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of a run and of the features [all]")
    parser.add_argument("--again", action="store_true", help="repeat runs that the results hold already")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="only print the table of these results")
    args = parser.parse_args(arguments)
    if not args.table and not args.folders:
        parser.error("name the folder that holds the data sets, or use --table")
    return args


def list_folders(root: Path, only: str) -> list[Path]:
    """The folders to measure, sorted; UserError if a name of `only` is not there."""
    root = root.expanduser().resolve()
    present = {path.name: path for path in sorted(root.iterdir()) if path.is_dir() and path.name[0] not in "._"}
    wanted = only.split(",") if only else list(present)
    if missing := [name for name in wanted if name not in present]:
        raise UserError(f"{root} has no folder {', '.join(missing)}: prepare.py makes the folders of the benchmark")
    return [present[name] for name in wanted]


def run_benchmark(args: argparse.Namespace) -> int:
    """Run what is missing from the results; returns the number of folders and seeds that failed."""
    if args.threads:
        torch.set_num_threads(args.threads)
    seconds_in(args.budget)  # a budget that cannot be read is refused before any work
    device, failed = device_key(args.device), 0
    done = {row_key(row) for row in read_rows([args.out])} if args.out.exists() and not args.again else set()
    for folder in list_folders(args.folders, args.only):
        seeds = [seed for seed in args.seeds if (folder.name, seed, budget_key(args), device) not in done]
        data = None
        for seed in seeds:
            try:
                data = data or Labeled(folder, args.device)
                row = run_one(data, args, seed)
            except UserError as error:
                failed += 1
                print(f"{folder.name}, seed {seed}: {error}", file=sys.stderr, flush=True)
                continue
            save_row(args.out, row)
            nn = {kind: round(row["features"][kind]["nn"]["value"], 1) for kind in KINDS}
            print(f"{folder.name}, seed {seed}: {row['seconds']} s, NN {nn}", file=sys.stderr, flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        failed = 0 if args.table else run_benchmark(args)
        if args.table or args.out.exists():
            print(format_table(read_rows(args.table or [args.out])))
    except UserError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
