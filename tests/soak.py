"""make soak: a long run of a tiny network. Memory, open files, threads and disk must not grow.

    python -m tests.soak [--steps N] [--device cpu|cuda] [--mode MODE]

The run is an ordinary one on the handwritten digits, with a checkpoint, a kNN reading and a log line every 20 steps. A
reading is taken every 250 steps. The first 1,000 steps are for warming up; what grows after them is a leak.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import mixnn
from mixnn.training.trainer import Trainer

EVERY, WARM_UP = 250, 1000  # steps
MEMORY_LIMIT = 4.0  # MB that memory may grow by after the warm-up
FILES_LIMIT = (
    0.1  # MB that the run folder may grow by, besides its logs: numbers in a checkpoint have more digits later
)
LOGS = ("metrics.jsonl", "tensorboard/*")
RUN: dict[str, Any] = {
    "limit": 320, "batch_size": 16, "bn_groups": 2, "backbone": "resnet8", "support_size": 64, "hidden": 32, "dim": 16,
    "checkpoint_every": 1, "knn_every": 1, "warmup_epochs": 1,
}  # fmt: skip
STEPS_PER_EPOCH = RUN["limit"] // RUN["batch_size"]


@dataclass(frozen=True)
class Reading:
    """What a run holds after some steps; sizes in MB."""

    step: int
    memory: float
    device_memory: float
    open_files: int
    threads: int
    disk: float
    logs: float


def read(step: int, folder: Path) -> Reading:
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    on_device = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    logs = sum(path.stat().st_size for name in LOGS for path in folder.glob(name))
    return Reading(
        step,
        memory / 1e6,
        on_device / 1e6,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        disk / 1e6,
        logs / 1e6,
    )


def leaks(readings: list[Reading], warm_up: int = WARM_UP) -> list[str]:
    """What grew after the warm-up, in words."""
    later = [each for each in readings if each.step >= warm_up]
    if len(later) < 2:
        return ["the run is too short to tell: take more steps"]
    first, last, quarter = later[0], later[-1], -(-len(later) // 4)

    def growth_of(name: str) -> float:
        """From the first quarter to the last, by their medians: single readings vary."""
        values = [getattr(each, name) for each in later]
        return statistics.median(values[-quarter:]) - statistics.median(values[:quarter])

    found = []
    for name, what in (("memory", "memory"), ("device_memory", "memory of the device")):
        if (growth := growth_of(name)) > MEMORY_LIMIT:
            found.append(f"{what} grew by {growth:.1f} MB")
    for name in ("open_files", "threads"):
        if (growth := growth_of(name)) > 0:
            found.append(f"{name.replace('_', ' ')} grew by {growth:g}")
    if (growth := (last.disk - last.logs) - (first.disk - first.logs)) > FILES_LIMIT:
        found.append(f"the run folder grew by {growth:.1f} MB besides its logs")
    return found


def train(steps: int, device: str, mode: str, every: int = EVERY) -> list[Reading]:
    """Trains in a temporary folder; returns the readings."""
    readings: list[Reading] = []
    original = Trainer._one_step
    with tempfile.TemporaryDirectory(prefix="mixnn-soak-") as place:
        folder = Path(place) / "run"

        def one_step(self: Trainer) -> None:
            if self.done % every == 0 and self.done:
                readings.append(read(self.done, folder))
            original(self)

        Trainer._one_step = one_step  # type: ignore[method-assign]
        try:
            loggers = "tensorboard" if importlib.util.find_spec("tensorboard") else ""
            epochs = -(-steps // STEPS_PER_EPOCH)
            mixnn.pretrain("digits", epochs=epochs, device=device, mode=mode, loggers=loggers, out=folder, **RUN)
        finally:
            Trainer._one_step = original  # type: ignore[method-assign]
        readings.append(read(epochs * STEPS_PER_EPOCH, folder))
    return readings


def table(readings: list[Reading]) -> list[str]:
    """The readings as a table in Markdown."""
    names = [field.name for field in fields(Reading)]
    units = {"memory": "memory, MB", "device_memory": "on the device, MB", "disk": "disk, MB", "logs": "of it logs, MB"}
    rows = [[units.get(name, name.replace("_", " ")) for name in names], ["---:"] * len(names)]
    for each in readings:
        values = asdict(each).values()
        rows.append([f"{value:.3f}" if isinstance(value, float) else f"{value:,}" for value in values])
    return [f"| {' | '.join(row)} |" for row in rows]


def soak() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="A long run in which nothing may grow.")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", default="auto", help="eager, recorded or compiled")
    given = parser.parse_args()
    start = time.perf_counter()
    readings = train(given.steps, given.device, given.mode)
    found = leaks(readings)
    print("\n".join(table(readings)))
    print(f"{readings[-1].step:,} steps in {time.perf_counter() - start:.0f} s: {'; '.join(found) or 'nothing grew'}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(soak())
