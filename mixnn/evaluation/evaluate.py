"""Evaluation of a run by the paper's protocols: linear probe and kNN, every result with the protocol that made it."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import torch

from mixnn.config import RUN, DataDir, Device, MovedTo, Overwrite, Param, UserError, setting, unknown, verb
from mixnn.device import pick_device
from mixnn.evaluation.knn import KNN
from mixnn.evaluation.linear import LINEAR
from mixnn.evaluation.protocol import Protocol, Subject, make_protocol
from mixnn.files import check_folder_writable, check_writable, write_atomically
from mixnn.progress import Reporter, plural
from mixnn.registry import Registry
from mixnn.runs import Run
from mixnn.runs.folder import environment
from mixnn.runs.weights import trained_backbone

PROTOCOLS: Registry[Protocol] = Registry(
    "protocol", "protocols", {protocol.name: protocol for protocol in (KNN, LINEAR)}, make_protocol
)


@verb
def evaluate(
    run: Annotated[str | Path | Run, RUN],
    *,
    protocol: Annotated[str, Param(f"which evaluation: all, {', '.join(PROTOCOLS)}")] = "all",
    epochs: Annotated[int, Param("epochs of the linear probe", low=1)] = 100,
    seed: Annotated[int, Param("seed of the linear probe", low=0, high=2**63 - 1)] = 0,
    source: MovedTo = "",
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
    names = protocols_of(protocol)
    run = run if isinstance(run, Run) else Run.open(run)
    run = run.moved(source)
    reporter, where = reporter or Reporter(), pick_device(device)
    run.check_data(f"use {setting('source', 'FOLDER')}")
    check_folder_writable(run.path / "results.json")
    save = Path(save).expanduser() if str(save) else ""
    if str(save):
        check_writable(save, overwrite)
    config, dataset = run.config, run.dataset(data_dir)
    if not dataset.has_test:
        classify = f"`{run.command_line('classify')} {shlex.quote(config.labels or 'folders')}`"
        raise UserError(
            f"{config.data} has no test images to evaluate on\n"
            f"use {classify}, which only needs labels, or hold some out: mixnn pretrain ... --holdout 0.2"
        )
    tensors, state = run.load_checkpoint(reporter.warn)
    backbone = trained_backbone(run, tensors)
    backbone.to(where, memory_format=torch.channels_last)  # type: ignore[call-overload]
    train, test = (dataset.load(split, config.encoding_size).to_if_fits(where) for split in ("train", "test"))
    if not (train.fully_labelled and test.fully_labelled):
        raise UserError(f"{config.data} has no labels, so there is nothing to evaluate against: train with labels")
    trained = state["step"] // (state["data"]["images"] // config.batch_size)
    if trained < config.epochs:
        resume = f"`{run.command_line('pretrain --resume')}` continues it"
        reporter.warn(
            f"{run.path} is unfinished: evaluated after {trained} of {plural(config.epochs, 'epoch')}; {resume}"
        )
    common = {
        "checkpoint_step": state["step"],
        "trained_epochs": trained,
        "train_seed": config.seed,
        "train_images": len(train),
        "test_images": len(test),
    }
    subject = Subject(backbone, train, test, config.encoding_size, run.metrics(), epochs, seed, reporter)
    results: dict[str, Any] = {}
    for name in names:
        start = time.perf_counter()
        found, settings = PROTOCOLS[name].run(subject)
        results[name] = {**found, "protocol": settings | common, "seconds": round(time.perf_counter() - start, 2)}
    try:
        run.save_results(results | {"evaluated_with": environment(where)})
        if str(save):
            save_summary(run.path, save)
    except UserError:
        show_evaluate(results)  # so that a full disk does not cost the numbers
        raise
    return results


def protocols_of(choice: str) -> tuple[str, ...]:
    """Names of the protocols that --protocol asks for: one of them, or all."""
    if choice not in ("all", *PROTOCOLS):
        raise unknown("protocol", choice, ("all", *PROTOCOLS))
    return tuple(PROTOCOLS) if choice == "all" else (choice,)


def show_evaluate(results: dict[str, Any]) -> None:
    """Prints the accuracies, one line per protocol."""
    for name, protocol in PROTOCOLS.items():
        if name in results:
            summary = protocol.summary(results[name])
            print(f"{protocol.label:6}  {results[name][protocol.headline]:.2f}" + f"  ({summary})" * bool(summary))


def save_summary(run: str | Path, file: str | Path) -> None:
    """The run's configuration, command, environment, curves and results as one small JSON file."""
    summary = Run.open(run).summary()
    summary["metrics"] = [_short(record) for record in summary["metrics"]]
    write_atomically(Path(file), (json.dumps(summary, separators=(",", ":")) + "\n").encode())


def _short(record: dict[str, Any]) -> dict[str, Any]:
    """Six digits are more than a curve shows; the run folder keeps them all."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in record.items()}
