"""Pre-training: from a data set and a method to a run folder."""

from __future__ import annotations

import gc
import json
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from mixnn import dist, methods
from mixnn.config import Config, Param, UserError, setting, verb
from mixnn.data import Dataset, ImageSet
from mixnn.files import LOCK, lock_run
from mixnn.processes import is_main_process
from mixnn.progress import Reporter, Silence, plural
from mixnn.runs import Run
from mixnn.runs.folder import environment
from mixnn.runs.weights import load_backbone, read_backbone
from mixnn.training.configure import check_device, choices, new_folder, open_data, resolve
from mixnn.training.schedule import short_warmup
from mixnn.training.trainer import Trainer

__all__ = ["pretrain"]

RESUMABLE_SETTINGS = {"device", "mode", "data_dir"}  # settings that may change on resume, perhaps on another machine


@verb
def pretrain(
    data: Annotated[str | Path, Param("a data set (`mixnn data` lists them), or a folder of images")] = "",
    *,
    options: Annotated[
        dict[str, Any] | None,
        Param("an option of the method; `mixnn methods NAME` lists them", flag="--set", metavar="OPTION=VALUE"),
    ] = None,
    out: Annotated[
        str | Path, Param("run folder to create [runs/DATA-METHOD; -2, -3, ... if that exists]", metavar="FOLDER")
    ] = "",
    overwrite: Annotated[bool, Param("with --out: replace the run in that folder; other files there stay")] = False,
    resume: Annotated[str | Path, Param("continue this run from its last checkpoint", metavar="RUN")] = "",
    init_from: Annotated[
        str | Path,
        Param("start a new run from the encoder of this run, or from a file of ResNet weights", metavar="RUN"),
    ] = "",
    time_budget: Annotated[
        str, Param("train for as many epochs as fit into this time, start-up included: 90s, 30m, 2h", metavar="TIME")
    ] = "",
    command: str = "mixnn.pretrain(...)",
    started: float | None = None,
    reporter: Reporter | None = None,
    **settings: Annotated[Any, Config],
) -> Run:
    """Train an encoder without labels; returns the run folder.

    `settings` are Config's fields, `options` the method's own: pretrain("cifar10", epochs=100, options={"topk": 1}).
    Settings default to the paper's; for a folder of images they are chosen, and the reasons printed. `time_budget`
    chooses the number of epochs from the measured time per step. The time counts from this call, or from `started`, a
    value of time.perf_counter(). `command` is stored in the run folder.

    Examples:
        mixnn pretrain cifar10
        mixnn pretrain ./photos --time-budget 30m --out runs/photos
        mixnn pretrain cifar10 --method msf --set topk=1 --set views=s/s --seed 3
        mixnn pretrain --resume runs/photos
    """
    reporter = (reporter or Reporter()) if is_main_process() else Silence()
    start = time.perf_counter() if started is None else started
    if resume:
        others = options or out or overwrite or init_from or time_budget
        if str(data) or others or not settings.keys() <= RESUMABLE_SETTINGS:
            raise UserError(
                f"{setting('resume')} takes its settings from the run folder; only "
                f"{', '.join(map(setting, sorted(RESUMABLE_SETTINGS)))} may differ\n"
                f"to train further, start a new run from its encoder: mixnn pretrain DATA --init-from {resume}"
            )
        run = Run.open(resume)
        with _lock(run.path):
            return _resume(run, settings, reporter)
    if isinstance(data, str) and not data:
        raise UserError("pretrain needs a data set or a folder of images: `mixnn data` lists the data sets")
    dataset = open_data(data, settings)
    folder = Path(out).expanduser() if str(out) else None
    if folder:
        _check_data_outside(folder, dataset, settings)
    if folder and is_main_process():
        Run.check_replaceable(folder, overwrite)  # before any image is read
        if (folder / LOCK).exists():
            with lock_run(folder):  # refuse to overwrite a run that another process is training
                pass
    config, images = _plan(dataset, options or {}, settings, time_budget, start, reporter)
    initial = _initial_backbone(Path(init_from).expanduser(), config, reporter) if init_from else None
    trainer = Trainer(config, images, reporter, _knn_sets(config, dataset))
    if initial is not None:
        trainer.start_from(initial, str(init_from))
    path = _reserve_folder(folder, overwrite, config)  # last, so that a failure leaves no folder
    with _lock(path):
        startup = round(time.perf_counter() - start, 1)
        about = environment(trainer.order.device) | {"method_code": methods.digest(config.method)}
        about |= {"processes": dist.size(), "startup_s": startup}
        run = _write_run(path, config, command, about)
        amount = f"{plural(len(images), 'image')}, {plural(config.epochs, 'epoch')}"
        reporter.info(f"{config.method} on {config.data}: {amount}, into {path}")
        reporter.info(f"ready after {startup} s")
        trainer.fit(run)
    if time_budget and (spent := time.perf_counter() - start) > 1.1 * _parse_duration(time_budget):
        reporter.warn(
            f"this took {spent:.0f} s, more than {setting('time_budget', time_budget)}: "
            "the plan was an estimate from the start-up time and the first steps"
        )
    return run


def _knn_sets(config: Config, dataset: Dataset) -> tuple[ImageSet, ImageSet] | None:
    """Labelled images for the kNN evaluations during training, read only if this process does any."""
    return dataset.load_labelled(config.image_size) if config.knn_every and is_main_process() else None


def _check_data_outside(out: Path, dataset: Dataset, settings: dict[str, Any]) -> None:
    """UserError if images or labels lie inside the run folder: they would look like part of the run."""
    place = out.resolve()
    folder = dataset.name if dataset.recipe is None else ""
    for given in (folder, str(settings.get("labels", "")), str(settings.get("data_dir", ""))):
        if given not in ("", "folders") and Path(given).expanduser().resolve().is_relative_to(place):
            raise UserError(
                f"{given} lies inside the run folder {out}: use another {setting('out')}, or move it out of there"
            )


def _reserve_folder(out: Path | None, overwrite: bool, config: Config) -> Path:
    """The run folder, made by the main process and known to all."""
    path = None
    if is_main_process():
        path = Run.reserve(out, overwrite) if out else new_folder(config)
    return dist.broadcast(path)


def _write_run(path: Path, config: Config, command: str, about: dict[str, Any]) -> Run:
    if not is_main_process():
        return Run(path, config)
    run = Run.create(path, config, command, overwrite=True)
    run.write("environment.json", json.dumps(about, indent=1) + "\n")
    return run


def _lock(path: Path) -> AbstractContextManager[None]:
    """Locks the run folder; the main process does so for all processes of the run."""
    return lock_run(path) if is_main_process() else nullcontext()


def _plan(
    dataset: Dataset,
    options: dict[str, Any],
    settings: dict[str, Any],
    time_budget: str,
    start: float,
    reporter: Reporter,
) -> tuple[Config, ImageSet]:
    """The configuration and its images. Reports what the images are, which settings were chosen, and why."""
    budget = _parse_duration(time_budget) if time_budget else 0.0
    if budget and "epochs" in settings:
        raise UserError(f"{setting('time_budget')} sets the number of epochs: leave out one of the two")
    config, images = resolve(dataset, options, settings)
    reporter.warn_of_skipped(images.skipped)
    for line in images.summary.lines() if images.summary else []:
        reporter.info(line)
    if config.labels:
        reporter.info(_about_labels(images, config.batch_size))
    if budget:  # other choices depend on the number of epochs
        settings = settings | {"epochs": _epochs_within(budget, start, config, images, dataset, reporter)}
        config, images = resolve(dataset, options, settings)
        if "warmup_epochs" not in settings:
            config = replace(config, warmup_epochs=min(config.warmup_epochs, short_warmup(config.epochs)))
    for choice in choices(dataset, options, settings, len(images)):
        reporter.info(str(choice))
    if 0 < config.epochs <= config.warmup_epochs:
        reporter.warn(
            f"warm-up takes {config.warmup_epochs} epochs and the run has {config.epochs}, so the learning rate never "
            f"falls: use {setting('warmup_epochs', short_warmup(config.epochs))} to change that"
        )
    return config, images


def _about_labels(images: ImageSet, batch_size: int) -> str:
    classes = f"{images.num_classes} class{'es' * (images.num_classes != 1)}"
    text = f"{images.num_labelled:,} of {len(images):,} images labelled, {classes}"
    too_few = "; too few to measure purity"
    return text if images.can_measure_purity(batch_size) else text + too_few


def _parse_duration(text: str) -> float:
    """Seconds in 90s, 30m, 2h or 1.5h. A number without a unit is refused."""
    units = {"s": 1, "m": 60, "h": 3600}
    try:
        seconds = float(text[:-1]) * units.get(text[-1:], 0)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{setting('time_budget', text)}: write it as 90s, 30m or 2h")
    return seconds


def _epochs_within(
    budget: float, start: float, config: Config, images: ImageSet, dataset: Dataset, reporter: Reporter
) -> int:
    """Epochs that fit into the budget, from a few timed steps and one kNN evaluation of a trainer that is thrown away.

    The budget includes the time already spent and one last kNN evaluation. 5% is kept for checkpoints.
    """
    trial = Trainer(replace(config, epochs=10**6, loggers=""), images, reporter, _knn_sets(config, dataset))
    step, reading = trial.seconds_per_step(), trial.seconds_per_knn()
    epoch = step * trial.steps_per_epoch + reading / max(1, config.knn_every)
    elapsed = time.perf_counter() - start
    remaining = 0.95 * (budget - elapsed - reading)
    epochs = dist.broadcast(max(1, int(remaining / epoch)))
    reporter.info(f"epochs {epochs}: {1e3 * step:.0f} ms per step, {epoch:.1f} s per epoch on this machine")
    if remaining < epoch:
        reporter.warn(
            f"{elapsed:.0f} of {budget:.0f} s have passed before the first epoch, "
            f"so training takes longer than {setting('time_budget')}"
        )
    del trial
    gc.collect()  # it refers to itself, and its memory is needed
    return epochs


def _initial_backbone(source: Path, config: Config, reporter: Reporter) -> nn.Module:
    """The backbone of another run, or ResNet weights from a file."""
    if source.is_file():
        return read_backbone(source, config)
    run = Run.open(source)
    other = run.config.backbone
    if other != config.backbone:
        raise UserError(f"{run.path} has a {other}, this run a {config.backbone}: use {setting('backbone', other)}")
    return load_backbone(run, reporter.warn)[0]


def _resume(run: Run, settings: dict[str, Any], reporter: Reporter) -> Run:
    run = replace(run, config=replace(run.config, **settings))
    run.check_data()
    check_device(run.config)
    methods.resolve_options(run.config.method, {}, run.config.options)  # they may have been edited
    tensors, state = run.load_checkpoint(reporter.warn)
    dataset = run.dataset()
    images = dataset.load(methods.find(run.config.method).split, run.config.image_size)
    trainer = Trainer(run.config, images, reporter, _knn_sets(run.config, dataset))
    trainer.load(tensors, state)
    if is_main_process():
        run.rewind(trainer.done)
    if trainer.done == trainer.total_steps:
        reporter.info(f"{run.path} is finished: step {trainer.done} of {trainer.total_steps}")
    else:
        reporter.info(f"{run.path}: resuming at step {trainer.done} of {trainer.total_steps}")
    trainer.fit(run)
    return run
