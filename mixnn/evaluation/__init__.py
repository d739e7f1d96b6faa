"""Evaluation of a run by the paper's protocols: linear probe and kNN, every result with the protocol that made it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mixnn.config import UserError
from mixnn.device import pick_device
from mixnn.evaluation.features import features
from mixnn.evaluation.knn import default_k, knn
from mixnn.evaluation.linear import Protocol, linear
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.checkpoint import write_atomically
from mixnn.runs.encoder import load_backbone
from mixnn.runs.images import is_labelled, load_split


def evaluate(
    run: str | Path | Run,
    *,
    protocols: tuple[str, ...] = ("knn", "linear"),
    epochs: int = 100,
    seed: int = 0,
    device: str = "auto",
    data_dir: str = "",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Linear probe and kNN of a run's last checkpoint; the numbers also go to its results.json."""
    run = run if isinstance(run, Run) else Run.open(run)
    say = reporter or Reporter()
    where = pick_device(device)
    backbone, step = load_backbone(run, say.warn)
    backbone.to(where, memory_format=torch.channels_last)  # type: ignore[call-overload]
    config = replace(run.config, data_dir=data_dir or run.config.data_dir)
    train, test = (load_split(config, split).to(where) for split in ("train", "test"))
    if not (is_labelled(train) and is_labelled(test)):
        raise UserError(f"{config.data} has no labels, so there is nothing to evaluate against: train with --labels")
    common = {
        "checkpoint_step": step,
        "train_images": len(train),
        "test_images": len(test),
        "precision": _precision(where),
    }
    results: dict[str, Any] = {}
    if "knn" in protocols:
        start = time.perf_counter()
        k, classes = default_k(len(train), train.num_classes), train.num_classes
        bank, queries = features(backbone, train), features(backbone, test)
        accuracy = knn(bank, train.labels, queries, test.labels, classes, k)
        protocol = {"k": k, "temperature": 0.1, "augmentation": "none", "features": "unit, student backbone", **common}
        results["knn"] = {**accuracy, "protocol": protocol, "seconds": round(time.perf_counter() - start, 2)}
    if "linear" in protocols:
        start = time.perf_counter()
        probe = Protocol(epochs=epochs, seed=seed, drops=(max(1, epochs * 6 // 10), max(1, epochs * 8 // 10)))
        with say.bar("linear probe", epochs) as advance:
            accuracy = linear(backbone, train, test, run.config.image_size, probe, advance)
        protocol = {
            **asdict(probe),
            "flip": probe.flip if train.mirror else 0.0,
            "report": "last epoch; best is named",
            **common,
        }
        results["linear"] = {**accuracy, "protocol": protocol, "seconds": round(time.perf_counter() - start, 2)}
    run.save_results(results)
    return results


def save_summary(run: str | Path, file: str | Path) -> None:
    """The run's configuration, command, environment, curves and results as one small JSON file."""
    write_atomically(Path(file), (json.dumps(Run.open(run).summary(), separators=(",", ":")) + "\n").encode())


def _precision(device: torch.device) -> str:
    return "bf16 forward, fp32 features" if device.type == "cuda" else "fp32"
