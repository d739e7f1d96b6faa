"""Evaluation of a run by the paper's protocols: linear probe and kNN, every result with the protocol that made it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from mixnn.config import RUN, DataDir, Device, Overwrite, Param, UserError, verb
from mixnn.data import ImageSet
from mixnn.device import pick_device
from mixnn.evaluation.features import features
from mixnn.evaluation.knn import default_k, knn
from mixnn.evaluation.linear import Protocol, linear
from mixnn.files import check_writable, write_atomically
from mixnn.progress import Reporter, plural
from mixnn.runs import Run
from mixnn.runs.folder import environment
from mixnn.runs.images import check_there, is_labelled, load_split, placed
from mixnn.runs.weights import student_backbone

PROTOCOLS = {"all": ("knn", "linear"), "knn": ("knn",), "linear": ("linear",)}
FEW = 5_000  # labelled images with which the probe, at its rate of 30, has too few steps to settle


@verb
def evaluate(
    run: Annotated[str | Path | Run, RUN],
    *,
    protocol: Annotated[str, Param("which evaluation", choices=tuple(PROTOCOLS))] = "all",
    epochs: Annotated[int, Param("epochs of the linear probe", low=1)] = 100,
    seed: Annotated[int, Param("seed of the linear probe", low=0, high=2**63 - 1)] = 0,
    device: Device = "auto",
    data_dir: DataDir = "",
    save: Annotated[str | Path, Param("also write the run, curves and results to one JSON file", metavar="FILE")] = "",
    overwrite: Overwrite = False,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """kNN and linear probe of a run's last checkpoint; the numbers also go to its results.json.

    `save`: a file for the whole run, curves and results, as one JSON.

    Examples:
        mixnn evaluate runs/cifar10-mnn
        mixnn evaluate runs/cifar10-mnn --protocol knn --json
    """
    if str(save):
        check_writable(save, overwrite)
    run = run if isinstance(run, Run) else Run.open(run)
    reporter, where = reporter or Reporter(), pick_device(device)
    check_there(run)
    tensors, state = run.load_checkpoint(reporter.warn)
    backbone = student_backbone(run, tensors)
    backbone.to(where, memory_format=torch.channels_last)  # type: ignore[call-overload]
    config = replace(run.config, data_dir=str(data_dir) or run.config.data_dir)
    train, test = (placed(load_split(config, split), where) for split in ("train", "test"))
    if not (is_labelled(train) and is_labelled(test)):
        raise UserError(f"{config.data} has no labels, so there is nothing to evaluate against: train it with labels")
    trained = state["step"] // (state["data"]["images"] // config.batch_size)
    if trained < config.epochs:
        how_on = f"`{run.typed('pretrain --resume')}` goes on"
        reporter.warn(
            f"{run.path} is unfinished: evaluated after {trained} of {plural(config.epochs, 'epoch')}; {how_on}"
        )
    common = {
        "checkpoint_step": state["step"],
        "trained_epochs": trained,
        "train_seed": config.seed,
        "train_images": len(train),
        "test_images": len(test),
    }
    results: dict[str, Any] = {}
    for name in PROTOCOLS[protocol]:
        start = time.perf_counter()
        if name == "knn":
            found, how = _knn(run, backbone, train, test)
        else:
            probe = Protocol(epochs=epochs, seed=seed, drops=(max(1, epochs * 6 // 10), max(1, epochs * 8 // 10)))
            found, how = _linear(backbone, train, test, config.image_size, probe, reporter)
        results[name] = {**found, "protocol": how | common, "seconds": round(time.perf_counter() - start, 2)}
    run.save_results(results | {"evaluated_with": environment(where)})
    if str(save):
        save_summary(run.path, save)
    return results


def show_evaluate(results: dict[str, Any]) -> None:
    """Print the accuracies, one line per protocol."""
    if "knn" in results:
        r = results["knn"]
        print(f"kNN     {r['weighted']:.2f}  (k={r['protocol']['k']}, weighted vote; majority {r['majority']:.2f})")
    if "linear" in results:
        r = results["linear"]
        print(f"linear  {r['last']:.2f}  (last of {plural(r['protocol']['epochs'], 'epoch')}; best {r['best']:.2f})")


def _knn(run: Run, backbone: nn.Module, train: ImageSet, test: ImageSet) -> tuple[dict[str, Any], dict[str, Any]]:
    k = default_k(len(train), train.num_classes)
    bank, queries = (features(backbone, images, bf16=False) for images in (train, test))  # once, so precision is cheap
    found: dict[str, Any] = dict(knn(bank, train.labels, queries, test.labels, train.num_classes, k))
    readings = [record["knn"] for record in run.metrics() if "knn" in record]
    if readings:
        found["best_reading"] = max(readings)  # of those during training
    vote = "weighted by exp(cos / temperature); majority beside it"
    how = {"k": k, "temperature": 0.1, "vote": vote, "augmentation": "none", "features": "unit, student backbone"}
    precision = "fp32, TF32 convolutions" if bank.is_cuda else "fp32"
    return found, how | {"report": "last checkpoint", "precision": precision}


def _linear(
    backbone: nn.Module, train: ImageSet, test: ImageSet, size: int, probe: Protocol, reporter: Reporter
) -> tuple[dict[str, Any], dict[str, Any]]:
    if len(train) < FEW:
        few = f"the paper's linear probe is made for tens of thousands of images, and swings with {len(train):,}"
        reporter.info(f"{few}: kNN, or mixnn classify, tells more")
    with reporter.bar("linear probe", probe.epochs) as advance:
        found = linear(backbone, train, test, size, probe, advance)
    flip = probe.flip if train.mirror else 0.0
    precision = "bf16 forward, fp32 features" if next(backbone.parameters()).is_cuda else "fp32"
    how = asdict(probe) | {"flip": flip, "crop_size": size, "precision": precision}
    return found, how | {"report": "last epoch; best is named"}


def save_summary(run: str | Path, file: str | Path) -> None:
    """The run's configuration, command, environment, curves and results as one small JSON file."""
    summary = Run.open(run).summary()
    summary["metrics"] = [_short(record) for record in summary["metrics"]]
    write_atomically(Path(file), (json.dumps(summary, separators=(",", ":")) + "\n").encode())


def _short(record: dict[str, Any]) -> dict[str, Any]:
    """Six digits are more than a curve shows; the run folder keeps them all."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in record.items()}
