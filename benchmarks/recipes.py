"""Compare recipes: seconds of training and accuracy on held-out training images. The test images choose nothing.

    python benchmarks/recipes.py cifar10 --seconds 60 --out screen.json              the candidates below, 60 s each
    python benchmarks/recipes.py cifar10 --only paper,one-way --jobs 2 --out screen.json
    python benchmarks/recipes.py cifar10 --candidates mine.json --out mine-results.json
    python benchmarks/recipes.py cifar10 --final fast,best --seeds 0,1,2 --out final.json
    python benchmarks/recipes.py --table screen.json

A candidate is a set of settings, options of the method and parts of views, as `mixnn pretrain` takes them. A file of
candidates is a JSON list: [{"name": "larger-rate", "settings": {"lr": 0.12, "strong.blur": 0}}, ...].

Each candidate is trained on the training images without HELD_OUT of them, which a fixed seed draws. Then kNN and the
linear probe are measured on these, by the product's own protocols. With --seconds, a candidate gets as many epochs as
fit into that time of training, from the time of its steps; otherwise it has its own.

--final trains on all training images and measures on the test images. It takes names of recipes and of candidates.
Use it when the choice is made.

Results are saved after each run. A later call with the same --out skips what is there, so that a list can be finished
in several calls. With --jobs, several candidates run at once, each in a process of its own. Their seconds are then
those of a shared machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mixnn
from mixnn.config import UserError, unknown
from mixnn.data import DATASETS, Dataset
from mixnn.data.dataset import NamedDataset
from mixnn.data.image_set import Arrays
from mixnn.data.spec import DatasetSpec, data_root
from mixnn.device import pick_device
from mixnn.evaluation.evaluate import evaluate
from mixnn.files import write_atomically
from mixnn.paper.measure import milliseconds_per_call
from mixnn.progress import NullReporter, Reporter, print_table
from mixnn.runs.folder import environment
from mixnn.training.configure import resolve, split_options
from mixnn.training.pretrain import pretrain
from mixnn.training.recipes import RECIPES
from mixnn.training.schedule import short_warmup
from mixnn.training.trainer import Trainer
from mixnn.training.views import view_changes

HELD_OUT, SEED = 5_000, 17  # how many training images are held out, and the seed that draws them
TIMED_STEPS = 30  # per size of the crops, to find out how many epochs fit
KEY = ("name", "settings", "data", "seed", "held_out", "seconds_allowed", "probe_epochs")  # identifies a result

Settings = dict[str, Any]
Row = dict[str, Any]

ONE_WAY: Settings = {"symmetric": False, "batch_size": 512, "bn_groups": 16, "momentum": 0.98, "weak_flip": 0.5}
SMALL: Settings = {**ONE_WAY, "resolution": "75%:0.9", "strong.blur": 0.0, "momentum_end": 1.0}
CANDIDATES: dict[str, Settings] = {
    "paper": {},
    "one-way": ONE_WAY,
    "small": SMALL,
    "small-two-way": {"resolution": "75%:0.9", "strong.blur": 0.0, "momentum_end": 1.0, "weak_flip": 0.5},
    "small-lr": {**SMALL, "lr": 0.12},
    "smaller-first": {**SMALL, "resolution": "50%:0.25,75%:0.9"},
    "small-muon": {**SMALL, "optimizer": "muon", "lr": 0.006},
    "small-large-targets": {**SMALL, "weak.area": [0.5, 1.0]},
    "small-two-students": {**SMALL, "student_views": 2, "batch_size": 256, "bn_groups": 8},
    "small-blur": {**SMALL, "strong.blur": 0.5},
    "small-constant": {**SMALL, "momentum_end": 0.0},
    "small-heads": {**SMALL, "hidden": 4096, "dim": 256},
    "small-linear": {**SMALL, "lr_shape": "linear"},
}


# Data


def held_out(spec: DatasetSpec, count: int) -> DatasetSpec:
    """The data set without some of its training images, which take the place of the test images."""
    total = spec.splits["train"]
    if spec.splits["pretrain"] != total:
        raise UserError(f"{spec.name} has other images for pre-training than for the probe: use another data set")
    if not 0 < count < total:
        raise UserError(f"--held-out {count}: give 1 to {total - 1}")
    order = np.random.default_rng(SEED).permutation(total)
    rows = {"test": np.sort(order[:count]), "train": np.sort(order[count:])}

    def read(folder: Path, split: str) -> Arrays:
        images, labels, classes = spec.read(folder, "train")
        chosen = rows["test" if split == "test" else "train"]
        return images[chosen], labels[chosen], classes

    splits = {"pretrain": total - count, "train": total - count, "test": count}
    return replace(spec, name=f"{spec.name}-held-out", read=read, splits=splits)


def open_data(job: Row) -> Dataset:
    spec = DATASETS.find(job["data"])
    spec = held_out(spec, job["held_out"]) if job["held_out"] else spec
    root = data_root(job["data_dir"])
    return NamedDataset(spec=spec, root=root, limit=job["settings"].get("limit", 0))


# One run


def split_settings(settings: Settings) -> tuple[Settings, Settings]:
    """Settings and options as `pretrain` takes them, and its `views`."""
    views = {name: value for name, value in settings.items() if "." in name}
    return {name: value for name, value in settings.items() if name not in views}, views


def epochs_in(seconds: float, dataset: Dataset, settings: Settings) -> tuple[Settings, dict[int, float]]:
    """Settings for that time of training: epochs, and the mode of its steps; and ms per step for each side of crops."""
    plain, views = split_settings(settings)
    plain, options = split_options(plain, {})
    plain |= {"augmentation": view_changes(views)[0]} if views else {}
    config, images = resolve(dataset, options, plain)
    trainer = Trainer(config, images, NullReporter())
    size, device = config.batch_size, trainer.order.device
    index = trainer.image_order[:size]
    times, began, mean = {}, 0.0, 0.0
    for side, until in trainer.stages:

        def step(side: int = side) -> None:
            trainer.step(index, 0.0, trainer.generator, side=side)

        times[side] = milliseconds_per_call(step, TIMED_STEPS if device.type == "cuda" else 2, device)
        mean += (until - began) * times[side] / 1e3
        began = until
    return {"epochs": max(1, math.floor(seconds / (mean * trainer.steps_per_epoch))), "mode": trainer.mode}, times


def run_one(job: Row) -> Row:
    """Trains and evaluates one candidate; a failure is a result too."""
    began = time.perf_counter()
    try:
        found = _measure(job)
    except (UserError, RuntimeError) as error:
        found = {"error": (str(error).splitlines() or [type(error).__name__])[0]}
    gc.collect()  # the trainer is a part of reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {name: job[name] for name in KEY} | found | {"total_s": round(time.perf_counter() - began, 1)}


def _measure(job: Row) -> Row:
    settings = dict(job["settings"])
    settings |= {"seed": job["seed"], "device": job["device"], "knn_every": 0}
    dataset, row = open_data(job), {}
    if job["seconds_allowed"]:
        length, times = epochs_in(job["seconds_allowed"], dataset, settings)
        settings |= length
        settings.setdefault("warmup_epochs", short_warmup(settings["epochs"]))
        row["ms_per_step"] = {str(side): round(ms, 3) for side, ms in times.items()}
    plain, views = split_settings(settings)
    with tempfile.TemporaryDirectory() if not job["runs"] else nullcontext(job["runs"]) as folder:
        out = Path(folder) / f"{job['name']}-seed{job['seed']}"
        verbose = Reporter(quiet=True)
        run = pretrain(dataset, views=views or None, out=out, overwrite=True, verbose=verbose, **plain)
        run = replace(run, data=dataset)
        results = evaluate(run, epochs=job["probe_epochs"], device=job["device"], verbose=verbose)
        last, about = run.metrics()[-1], run.environment()
    row |= {"epochs": last["epoch"], "steps": last["step"], "seconds": last["seconds"]}
    row |= {"startup_s": about["startup_s"], "loss": last["loss"], "images_per_s": last["images_per_s"]}
    row |= {"knn": results["knn"]["weighted"], "linear": results["linear"]["last"]}
    row |= {"probe_s": results["linear"]["seconds"], "config": asdict(run.config) | {"data_dir": ""}}
    return row | {"environment": environment(pick_device(job["device"]))}


# All runs


def make_jobs(args: argparse.Namespace) -> list[Row]:
    """What to run, in order: all candidates with the first seed, then with the next."""
    candidates = load_candidates(args.candidates)
    names = args.final or args.only or [*candidates]
    known = [*candidates, *(RECIPES if args.final else ())]
    for name in names:
        if name not in known:
            raise unknown("candidate", name, known)
    common = {"data": args.data, "data_dir": args.data_dir, "device": args.device, "runs": args.runs}
    common |= {"held_out": 0 if args.final else args.held_out, "probe_epochs": args.probe_epochs}
    common |= {"seconds_allowed": args.seconds}
    jobs = []
    for seed in args.seeds:
        for name in names:
            is_recipe = bool(args.final) and name in RECIPES
            settings = {"recipe": name} if is_recipe else candidates[name]
            jobs.append({"name": name, "settings": settings | args.common, "seed": seed, **common})
    return jobs


def load_candidates(file: str) -> dict[str, Settings]:
    """Candidates by name: those of a JSON file, or the built-in ones."""
    if not file:
        return CANDIDATES
    try:
        found = {each["name"]: dict(each["settings"]) for each in json.loads(Path(file).read_text())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a list of candidates ({error}): --help shows one") from None
    return found


def run_all(jobs: Sequence[Row], num_processes: int, pool: type[Executor] = ProcessPoolExecutor) -> Iterator[Row]:
    """Results as they are ready. One process at a time is this one, which then tunes cuDNN once for all runs."""
    if num_processes == 1:
        yield from map(run_one, jobs)
        return
    with pool(num_processes, mp_context=get_context("spawn")) as executor:  # type: ignore[call-arg]
        for future in as_completed([executor.submit(run_one, job) for job in jobs]):
            yield future.result()


def key_of(row: Row) -> str:
    return json.dumps([row[name] for name in KEY], sort_keys=True)


def table(rows: Sequence[Row]) -> None:
    """Prints a line for each candidate, with means over its seeds; the best linear accuracy first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key_of(row | {"seed": None}), []).append(row)
    done = [group for group in groups.values() if all("linear" in row for row in group)]
    lines = []
    for group in sorted(done, key=lambda group: -statistics.mean(row["linear"] for row in group)):
        spread = f" ± {statistics.stdev(row['linear'] for row in group):.2f}" if len(group) > 1 else ""
        means = {name: statistics.mean(row[name] for row in group) for name in ("epochs", "seconds", "knn", "linear")}
        numbers = f"{means['epochs']:.0f}", f"{means['seconds']:.1f}", f"{means['knn']:.2f}"
        lines.append((group[0]["name"], str(len(group)), *numbers, f"{means['linear']:.2f}{spread}"))
    print_table(("candidate", "seeds", "epochs", "seconds", "kNN", "linear"), lines)
    for row in rows:
        if "error" in row:
            print(f"{row['name']}, seed {row['seed']}: {row['error']}")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names, numbers = (lambda text: text.split(",")), (lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("data", nargs="?", default="cifar10", help="a named data set")
    parser.add_argument("--data-dir", default="", help="where data sets are kept")
    parser.add_argument("--candidates", default="", help="JSON file of candidates [the built-in ones]")
    parser.add_argument("--only", type=names, default=[], help="names of candidates, in the order to run them")
    parser.add_argument("--final", type=names, default=[], help="recipes or candidates to measure on the test images")
    parser.add_argument("--seeds", type=numbers, default=[0])
    parser.add_argument("--seconds", type=float, default=0.0, help="of training; sets the number of epochs")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="training images to measure on")
    parser.add_argument("--common", type=json.loads, default={}, help="settings of all runs, a JSON object; they win")
    parser.add_argument("--probe-epochs", type=int, default=100, help="of the linear probe")
    parser.add_argument("--jobs", type=int, default=1, help="candidates that run at once")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", default="", help="keep the run folders here")
    parser.add_argument("--out", type=Path, default=None, help="JSON file of results, which is added to")
    parser.add_argument("--table", type=Path, default=None, help="only print the results in this file")
    args = parser.parse_args(words)
    if args.table:
        table(json.loads(args.table.read_text()))
        return
    rows = json.loads(args.out.read_text()) if args.out and args.out.exists() else []
    rows = [row for row in rows if "error" not in row]  # these are tried again
    done = {key_of(row) for row in rows}
    jobs = [job for job in make_jobs(args) if key_of(job) not in done]
    for row in run_all(jobs, args.jobs):
        rows.append(row)
        if args.out:
            write_atomically(args.out, (json.dumps(rows, indent=1) + "\n").encode())
        found = row.get("error") or f"{row['seconds']} s, kNN {row['knn']:.2f}, linear {row['linear']:.2f}"
        print(f"{row['name']}, seed {row['seed']}: {found} ({row['total_s']} s in all)", flush=True)
    table(rows)


if __name__ == "__main__":
    try:
        main()
    except mixnn.UserError as error:
        raise SystemExit(f"recipes.py: {error}") from None
