"""Times one training step of BYOL in lightly, solo-learn, a plain PyTorch loop and mixnn, and of MNN in mixnn.

    python benchmarks/peers                                        random images of 32 pixels
    python benchmarks/peers --data cifar10 --until 80 --limit 600  also: seconds to 80% kNN accuracy
    python benchmarks/peers --solo-learn ~/solo-learn              with solo-learn's source folder

All have a ResNet-18 with a stem for 32-pixel images, batch 256 and, on CUDA, bf16. Every library has its own heads,
loss, optimizer, transforms and data loading, with the settings that its authors give for CIFAR-10. You install lightly
(`pip install lightly`) and solo-learn (its source, with lightning, omegaconf, timm before 1.0 and scipy) yourself. A
library that does not import is left out, and the output says why.

A step is timed twice: with the library's data loading, and with batches that are on the device before the first step.
mixnn makes its views inside the step, so its two times are the same measurement.

With --until, every library trains from new weights until a kNN evaluation on the test images (mixnn's, the same for
all) reaches the accuracy. The seconds count training only: start-up is listed apart, and evaluations do not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loops import LOOPS, Loop, Task, missing

from mixnn.config import UserError
from mixnn.data import ImageSet, open_dataset
from mixnn.evaluation.features import features
from mixnn.evaluation.knn import accuracy_by_vote, default_k
from mixnn.paper.measure import random_images, synchronize
from mixnn.progress import print_table
from mixnn.runs.folder import environment

WARMUP, CALIBRATION = 20, 10  # steps


class StepTimer:
    """Counts steps and stops the loop when it has timed them for about `seconds`, after warm-up.

    The device is waited for three times only: after the warm-up, after the steps that say how many are needed, and at
    the end.
    """

    def __init__(self, device: torch.device, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.seconds, self.clock = device, seconds, clock
        self.created = self.last = clock()
        self.done, self.last_step, self.startup, self.ms = 0, -1, 0.0, 0.0

    def __call__(self) -> bool:
        self.done += 1
        if self.done == 1:
            synchronize(self.device)
            self.startup = self.clock() - self.created
        elif self.done == WARMUP:
            synchronize(self.device)
            self.last = self.clock()
        elif self.done == WARMUP + CALIBRATION:
            self._read(CALIBRATION)
            self.last_step = self.done + max(CALIBRATION, round(1e3 * self.seconds / self.ms))
        elif self.done == self.last_step:
            self._read(self.last_step - WARMUP - CALIBRATION)
            return True
        return False

    def _read(self, steps: int) -> None:
        synchronize(self.device)
        now = self.clock()
        self.ms, self.last = max(1e3 * (now - self.last) / steps, 1e-6), now


class AccuracyTimer:
    """Stops the loop when `evaluate()` reaches `target`, or after `limit` seconds of training."""

    def __init__(
        self,
        device: torch.device,
        evaluate: Callable[[], float],
        target: float,
        limit: float,
        steps_between: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self.evaluate, self.target, self.limit = device, evaluate, target, limit
        self.steps_between, self.clock = steps_between, clock
        self.done, self.spent, self.startup, self.created = 0, 0.0, 0.0, clock()
        self.resumed = self.created
        self.readings: list[dict[str, float]] = []

    def __call__(self) -> bool:
        self.done += 1
        if self.done == 1:  # compilation, worker processes, cuDNN's choice of algorithms
            synchronize(self.device)
            self.resumed = self.clock()
            self.startup = self.resumed - self.created
        is_late = self.spent + self.clock() - self.resumed >= self.limit
        if self.done % self.steps_between and not is_late:
            return False
        synchronize(self.device)
        self.spent += self.clock() - self.resumed
        self.readings.append({"step": self.done, "seconds": round(self.spent, 2), "knn": self.evaluate()})
        synchronize(self.device)
        self.resumed = self.clock()
        return is_late or self.reached

    @property
    def reached(self) -> bool:
        return bool(self.readings) and self.readings[-1]["knn"] >= self.target


def time_steps(name: str, task: Task, seconds: float) -> dict[str, Any]:
    """Milliseconds per step of a library, with and without data loading."""
    start = time.perf_counter()
    loop = LOOPS[name](task)
    result: dict[str, Any] = {"about": loop.about, "startup_s": time.perf_counter() - start}
    for kind in ("loading", "ready") if loop.loads else ("loading",):
        timer = StepTimer(task.device, seconds)
        loop.train(kind == "loading", timer)
        result[kind] = {"ms_per_step": round(timer.ms, 2), "images_per_s": round(1e3 * task.batch_size / timer.ms)}
        if kind == "loading":
            result["startup_s"] = round(result["startup_s"] + timer.startup, 1)
    return {"ready": result["loading"]} | result


def knn_accuracy(loop: Loop, train: ImageSet, test: ImageSet) -> float:
    """Accuracy in percent of the weighted vote, with the normalization that the encoder was trained with."""
    bank, queries = (features(loop.encoder, replace(s, mean=loop.mean, std=loop.std)) for s in (train, test))
    k = default_k(len(train), train.num_classes)
    return accuracy_by_vote(bank, train.labels, queries, test.labels, train.num_classes, k)["weighted"]


def time_to_accuracy(
    name: str, task: Task, test: ImageSet, target: float, limit: float, epochs_between: int
) -> dict[str, Any]:
    """Seconds of training until the kNN accuracy reaches the target, or what was reached within the limit."""
    torch.manual_seed(0)
    start = time.perf_counter()
    loop = LOOPS[name](task)
    built = time.perf_counter() - start
    sets = [images.to_if_fits(task.device) for images in (task.images, test)]
    steps = epochs_between * task.steps_per_epoch
    timer = AccuracyTimer(task.device, lambda: knn_accuracy(loop, *sets), target, limit, steps)
    loop.train(True, timer)
    return {
        "target": target,
        "seconds": timer.readings[-1]["seconds"] if timer.reached else None,
        "trained_s": timer.readings[-1]["seconds"] if timer.readings else None,
        "epochs": round(timer.done / task.steps_per_epoch, 1),
        "startup_s": round(built + timer.startup, 1),
        "best_knn": max((reading["knn"] for reading in timer.readings), default=None),
        "readings": timer.readings,
    }


def load_images(data: str, data_dir: str, size: int) -> tuple[ImageSet, ImageSet | None]:
    """Training and test images: random ones without a test set, or those of a named data set or a folder."""
    if data == "random":
        return random_images(size), None
    dataset = open_dataset(data, data_dir)
    train, test = dataset.load("train"), dataset.load("test")
    if train.size != (size, size):
        raise UserError(
            f"the images of {data} have {train.size[0]} x {train.size[1]} pixels: use --image-size {train.size[0]}"
        )
    return train, test


def compare(
    names: list[str], task: Task, test: ImageSet | None, options: argparse.Namespace, save: Callable[[Any], None]
) -> dict[str, Any]:
    """Measurements by library; a library that fails has a sentence instead. `save` is called after each."""
    result: dict[str, Any] = {
        "environment": environment(task.device),
        "settings": {"data": options.data, "batch_size": task.batch_size, "workers": task.workers},
        "libraries": {},
    }
    for name in names:
        reason = missing(name, task)
        if reason:
            print(f"{name} does not import, and is left out: {reason}", file=sys.stderr)
            result["libraries"][name] = {"left_out": reason}
            continue
        found: dict[str, Any] = {}
        result["libraries"][name] = found
        try:
            if options.seconds:
                found |= time_steps(name, task, options.seconds)
            if options.until and test is not None:
                gc.collect()
                found["until"] = time_to_accuracy(name, task, test, options.until, options.limit, options.every)
        except Exception as error:  # one library must not cost the others their measurement
            found["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{name} failed: {found['failed']}", file=sys.stderr)
        save(result)
        gc.collect()  # trainers are parts of reference cycles
        if task.device.type == "cuda":
            torch.cuda.empty_cache()
    save(result)
    return result


def show(result: dict[str, Any]) -> None:
    """Print the tables: ms per step, and seconds to the accuracy where that was asked for."""
    about = result["environment"]
    print(f"{about['device']}, torch {about['torch']}, batch {result['settings']['batch_size']}")
    timed = {name: row for name, row in result["libraries"].items() if "ready" in row}
    heads = ("library", "ms, with loading", "images/s", "ms, batches on the device", "images/s", "first step", "what")
    if timed:
        print_table(heads, [_row(name, row) for name, row in timed.items()])
    until = {name: row["until"] for name, row in result["libraries"].items() if "until" in row}
    if until:
        target = next(iter(until.values()))["target"]
        heads = ("library", f"seconds to {target:g}% kNN", "epochs", "best kNN", "start-up")
        print_table(heads, [_until_row(name, row) for name, row in until.items()])


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    numbers = [
        f"{row[k][n]:,.{d}f}" for k in ("loading", "ready") for n, d in (("ms_per_step", 2), ("images_per_s", 0))
    ]
    return name, *numbers, f"{row['startup_s']:.1f} s", row["about"]


def _until_row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    if not row["readings"]:
        return name, "no evaluation", f"{row['epochs']:g}", "", f"{row['startup_s']:.1f} s"
    seconds = f"not within {row['trained_s']:.1f}" if row["seconds"] is None else f"{row['seconds']:.1f}"
    return name, seconds, f"{row['epochs']:g}", f"{row['best_knn']:.2f}", f"{row['startup_s']:.1f} s"


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="random", help="random, cifar10, or a folder of images [random]")
    parser.add_argument("--data-dir", default="", help="where data sets are kept")
    parser.add_argument("--image-size", type=int, default=32, help="side of the images [32]")
    parser.add_argument("--only", default=",".join(LOOPS), help="libraries to time, with commas [all]")
    parser.add_argument("--solo-learn", type=Path, default=None, metavar="FOLDER", help="source of solo-learn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1), help="of a DataLoader [cores]")
    parser.add_argument("--mode", default="auto", help="how mixnn runs a step, as in `mixnn bench` [auto]")
    parser.add_argument("--seconds", type=float, default=5.0, help="of timing per measurement; 0: none [5]")
    parser.add_argument("--until", type=float, default=0.0, metavar="PERCENT", help="train to this kNN accuracy")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds per library, with --until [600]")
    parser.add_argument("--epochs", type=int, default=200, help="length of the schedules, with --until [200]")
    parser.add_argument("--every", type=int, default=1, help="epochs between kNN evaluations [1]")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the numbers to this file")
    options = parser.parse_args(words)
    options.only = options.only.split(",")
    unknown = [name for name in options.only if name not in LOOPS]
    if unknown:
        parser.error(f"unknown library {unknown[0]!r}: --only takes {', '.join(LOOPS)}")
    if not options.until and not options.seconds:
        parser.error("--seconds 0 times no steps: use --until as well")
    if options.until and options.data == "random":
        parser.error("--until needs images with labels: use --data cifar10, or a folder")
    if options.solo_learn is not None and not (options.solo_learn / "solo").is_dir():
        parser.error(f"there is no folder solo in {options.solo_learn}: --solo-learn takes the source of solo-learn")
    return options


def main(words: list[str]) -> dict[str, Any]:
    options = parse(words)
    try:
        train, test = load_images(options.data, options.data_dir, options.image_size)
    except UserError as error:
        raise SystemExit(f"{error}") from None
    shared = {name: getattr(options, name) for name in ("batch_size", "workers", "epochs", "mode", "solo_learn")}
    task = Task(train, torch.device(options.device), **shared)

    def save(result: dict[str, Any]) -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    result = compare(options.only, task, test, options, save)
    show(result)
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
