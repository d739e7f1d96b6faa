"""Pre-training: from a data set and a method to a run folder."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from mixnn import dist, methods
from mixnn.augment import VIEWS, View
from mixnn.config import (
    Config,
    Param,
    UserError,
    calling,
    check_options,
    checked,
    duration_text,
    method_option,
    parse_duration,
    setting,
    short_path,
    verb,
)
from mixnn.data import DATASETS, Dataset, ImageSet
from mixnn.data.dataset import is_given
from mixnn.data.image_set import normalization_text
from mixnn.device import pick_device
from mixnn.files import LOCK, check_folder_creatable, expand, lock_run
from mixnn.methods.contract import VIEW_PAIRS
from mixnn.nn.backbone import Network, name_backbone
from mixnn.processes import is_main_process, is_restart
from mixnn.progress import NullReporter, Reporter, duration, plural, reporter_for
from mixnn.runs import Run
from mixnn.runs.code import training_digest
from mixnn.runs.folder import environment
from mixnn.runs.weights import NO_START, initial_backbone
from mixnn.training.configure import check_device, choices, configure, new_folder, open_data, resolve, split_options
from mixnn.training.folder_settings import Choice, lines
from mixnn.training.judgement import Judge, judge_start, views_for
from mixnn.training.loggers import check_loggers
from mixnn.training.schedule import MAX_WARMUP_EPOCHS, MIN_STEPS, SCHEDULES, WARMUP_SHARE, TimePlan, short_warmup
from mixnn.training.trainer import Trainer
from mixnn.training.views import view_changes

__all__ = ["pretrain"]

RESUMABLE_SETTINGS = {"device", "mode", "data_dir"}  # settings that may change on resume, perhaps on another machine
# Settings that may be edited in config.yaml: none changes what is learned. The labels of a checkpoint are compared.
EDITABLE_SETTINGS = {"labels", "knn_every", "checkpoint_every", "loggers", "resident", "on_error", "imports"}
EXIT_SHARE = 0.15  # starting and leaving Python takes about this share of the time that importing torch takes
EXTENSIONS = {"epochs", "time_budget"}  # on resume, these make the run longer


@verb
def pretrain(
    data: Annotated[
        Any,
        Param(
            "a data set (`mixnn data` lists them) or a folder of images; the defaults below are the paper's for "
            "CIFAR-10, for a folder settings are chosen and printed; with --resume, where the run's images are now",
            aliases=("--source",),
        ),
    ] = "",
    *,
    options: Annotated[
        dict[str, Any] | None,
        Param("an option of the method; `mixnn methods NAME` lists them", flag="--set", metavar="OPTION=VALUE"),
    ] = None,
    views: Annotated[
        dict[str, Any] | Sequence[View | str] | str | None,
        Param(
            "a change to a view, by its kind or number: strong.blur=0.2, 1.area=0.3,1; or another view: 1=weak",
            flag="--view",
            metavar="VIEW.PART=VALUE",
        ),
    ] = None,
    out: Annotated[
        str | Path, Param("run folder to create [runs/DATA-METHOD; -2, -3, ... if that exists]", metavar="FOLDER")
    ] = "",
    overwrite: Annotated[bool, Param("replace the run in that output folder; other files there stay")] = False,
    resume: Annotated[str | Path | Run, Param("continue this run from its last checkpoint", metavar="RUN")] = "",
    verbose: bool | Reporter = False,
    **settings: Annotated[Any, Config],
) -> Run:
    """Train an encoder without labels; return the run folder.

    `data` is a data set's name, a folder, or images in memory: an array, a list of files, a torch or Hugging Face
    Dataset, ... (docs/data.md). For images in memory, `labels` may be a list with one label per image; training does
    not use it, unless the method says so.

    `settings` are Config's fields and the options of the method: pretrain("cifar10", epochs=100, topk=1). The defaults
    are the paper's; for a folder of images they are chosen, and verbose=True prints the reasons. Options may also be
    given together, as `options`.

    `backbone` may also be a torch.nn.Module from images (B, 3, H, W) to features (B, F), or a function that makes one.
    A copy of the module is trained. `views` replaces the views of the method, views=(View(32, jitter=0.8), "weak"), or
    changes them, views={"strong": {"blur": 0.2}}.

    With `time_budget` the learning rate follows the clock. Training ends in time, if necessary in the middle of an
    epoch. The time counts from this call.

    To resume a run on images in memory, pass the same images: pretrain(images, resume="runs/x"). If the images of a run
    were moved, pass their new folder.

    >>> run = mixnn.pretrain("digits", epochs=1, warmup_epochs=0, topk=3, out="runs/digits")
    >>> run.metrics()[-1]["epoch"]
    1

    Examples:
        mixnn pretrain cifar10
        mixnn pretrain ./photos --time-budget 30m --out runs/photos
        mixnn pretrain cifar10 --method msf --set topk=1 --set views=s/s --seed 3
        mixnn pretrain --resume runs/photos
    """
    given: dict[str, Any] = {"options": options, "views": views, "out": out, "overwrite": overwrite, "resume": resume}
    return start_pretrain(data, settings=settings, **given, reporter=reporter_for(verbose))


def start_pretrain(
    data: Any = "",
    *,
    settings: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    views: Any = None,
    out: str | Path = "",
    overwrite: bool = False,
    resume: str | Path | Run = "",
    reporter: Reporter,
    command: str = "mixnn.pretrain(...)",
    started: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """`pretrain` for commands. `command` is stored in the run folder.

    A time budget counts from `started`, a reading of `clock`; default: from now.
    """
    reporter = reporter if is_main_process() else NullReporter()
    settings = dict(settings or {})
    check_options(options or {})
    labels = settings.get("labels", "")
    if not isinstance(labels, str | Path):  # one per image: not a setting, since a run folder does not store them
        del settings["labels"]
    if not isinstance(settings.get("normalization", ""), str):
        settings["normalization"] = normalization_text(settings["normalization"])
    network, handed_in = None, settings.get("backbone")
    if handed_in is not None:
        settings["backbone"], network = name_backbone(handed_in)
    start = clock() if started is None else started
    timing: dict[str, Any] = {"started": start, "clock": clock, "ending": EXIT_SHARE * (clock() - start)}
    if isinstance(settings.get("time_budget"), int | float):
        settings["time_budget"] = str(settings["time_budget"])  # refused with an example, as a number without a unit is
    if settings.get("time_budget") and "epochs" in settings:
        raise UserError(f"{setting('time_budget')} sets the number of epochs: leave out one of the two")
    if resume:
        run = resume if isinstance(resume, Run) else Run.open(resume)
        if handed_in is not None and not isinstance(handed_in, str | Path):
            network = handed_in  # whatever its name is here
        if network is not None or settings.get("backbone") == run.config.backbone:
            settings.pop("backbone", None)  # given once more, so that it can be built again
        named = repr(data) if isinstance(data, str) and data in DATASETS else ""
        _check_resumable(settings, options or {}, named, {"views": views, "out": out, "overwrite": overwrite})
        run = replace(Run.open(run.path, run.network if network is None else network), data=run.data)
        with _lock(run.path), run.explain_unknown_names():
            run = run.moved(data, labels)
            return _resume(run, settings, timing, reporter)
    if is_restart() and str(out) and (again := _started_before(expand(out), command)):
        if again.has_checkpoint:
            how: dict[str, Any] = {"reporter": reporter, "started": started, "clock": clock}
            return start_pretrain(resume=again, settings={"backbone": network} if network else {}, **how)
        overwrite = True  # it was stopped before there was anything to continue
    settings, options = split_options(settings, options or {})
    settings = checked(Config, "setting", settings)
    if isinstance(views, str):
        options["views"] = views  # of the method: s/w, s/s or w/w
    elif views is not None:
        settings["augmentation"], size = view_changes(views)
        if size and settings.setdefault("image_size", size) != size:
            raise UserError(f"the views have {size} pixels: leave out {setting('image_size', settings['image_size'])}")
    given = {*settings, *options} - {"augmentation"}  # what the user chose; the report tells it from the rest
    given |= {f"{view}.{part}" for view, parts in settings.get("augmentation", {}).items() for part in parts}
    if not is_given(data):
        raise UserError(f"pretrain needs a data set or a folder of images: `{calling('data')}` lists the data sets")
    dataset = open_data(data, settings, labels)
    folder = expand(out) if str(out) else None
    if folder:
        _check_data_outside(folder, dataset, settings)
    if is_main_process():  # before any image is read
        if folder:
            Run.check_replaceable(folder, overwrite)
        check_folder_creatable(folder or Path("runs"))
        if folder and (folder / LOCK).exists():
            with lock_run(folder):  # refuse to overwrite a run that another process is training
                pass
    try:
        trainer, images = _prepare(dataset, options, settings, given, views, network, reporter, timing)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped before the first step, so nothing was saved") from None
    config = trainer.config
    path = _reserve_folder(folder, overwrite, config)  # last, so that a failure leaves no folder
    with _lock(path):
        startup = round(clock() - start, 1)
        about = environment(trainer.order.device) | {"training_code": training_digest(config.method, config.imports)}
        about |= {"processes": dist.size(), "startup_s": startup, "given": sorted(given)}
        run = replace(_write_run(path, config, command, about), network=network)
        if not dataset.is_stored:  # so that the run can be used at once; without what is decoded for training
            run = replace(run, data=dataset.emptied())
        estimated = "about " * bool(trainer.plan and config.epochs)
        amount = f"{plural(len(images), 'image')}, {estimated}{plural(config.epochs, 'epoch')}"
        reporter.info(f"{config.method} on {short_path(config.data)}: {amount}, into {path}")
        reporter.info(f"ready after {startup} s")
        return _train(run, trainer)


def _prepare(
    dataset: Dataset,
    options: dict[str, Any],
    settings: dict[str, Any],
    given: Collection[str],
    views: Any,
    network: Network | None,
    reporter: Reporter,
    timing: dict[str, Any],
) -> tuple[Trainer, ImageSet]:
    """A trainer that is ready for its first step, and its images. What suits the images is measured here."""
    config, images = _configure(dataset, options, settings, reporter)
    _check_settings(config, views)
    judged, has_start = dataset.recipe is None, config.init_from not in NO_START
    initial = initial_backbone(config, reporter.warn, network) if judged or has_start else None
    judge = None
    if initial is not None and judged:
        judge = judge_start(initial, images, has_start, pick_device(config.device), timing["clock"])
        config = _with_views(config, judge, given, reporter)
    trainer = Trainer(config, images, reporter, _knn_sets(config, dataset), network=network, **timing)
    if initial is not None and has_start:
        trainer.start_from(initial, config.init_from)
    if initial is not None and judge:
        trainer.judge_from(initial, judge)
    if trainer.plan:
        trainer.measure()
        settings = settings | {"epochs": _epochs_that_fit(trainer)}
        planned = configure(dataset, options, settings, len(images))
        trainer.config = config = _with_planned_epochs(config, planned, "warmup_epochs" in settings, trainer.plan)
    decided = {"mirror": config.mirror} | ({"crop_area": config.crop_area} if judge and has_start else {})
    for line in lines(choices(dataset, options, settings | decided, len(images))):
        reporter.info(line)
    _check_warmup(config, reporter)
    return trainer, images


def _check_resumable(settings: dict[str, Any], options: dict[str, Any], data: str, rest: dict[str, Any]) -> None:
    """UserError for what a resumed run takes from its folder."""
    others = [setting(name, value) for name, value in settings.items() if name not in RESUMABLE_SETTINGS | EXTENSIONS]
    others += [method_option(name, value) for name, value in options.items()]
    others += [data] if data else []
    others += [setting(name) if name == "views" else setting(name, value) for name, value in rest.items() if value]
    if others:
        raise UserError(
            f"{', '.join(others)}: {setting('resume')} takes its settings from the run folder; only "
            f"{', '.join(map(setting, sorted(RESUMABLE_SETTINGS)))} may differ\n"
            f"to train further, add {setting('epochs')} (the new total) or {setting('time_budget')} (added)"
        )


def _started_before(path: Path, command: str) -> Run | None:
    """The run that this command has made there, when torchrun or Slurm started it the first time."""
    run = Run.open(path) if Run.is_run_folder(path) else None
    return run if run is not None and run.command() == command else None


def _train(run: Run, trainer: Trainer) -> Run:
    """Train to the end. A run with a time budget then records how many epochs that were."""
    first = trainer.done
    trainer.fit(run)
    if trainer.done > first and trainer.judge and trainer.judge.points and not trainer.judge.is_worse:
        trainer.reporter.info(trainer.judge.summary())
    if not trainer.plan:
        return run
    epochs, seconds = trainer.done // trainer.steps_per_epoch, trainer.plan.elapsed()
    if not trainer.done:
        trainer.reporter.warn(f"{run.path} was not trained: it has the weights that it started with")
    if trainer.done > first:
        trainer.reporter.info(f"{trainer.epoch:g} epochs in {seconds:.0f} s")
    if trainer.done > first and seconds > 1.05 * trainer.plan.budget:
        trainer.reporter.warn(
            f"this took {seconds:.0f} s, more than {setting('time_budget', run.config.time_budget)}: "
            "the machine was much slower at the end than before"
        )
    return run.update_config(epochs=epochs) if is_main_process() else run


def _check_settings(config: Config, views: Any) -> None:
    """UserError for what cannot be trained, before the start is measured: that takes seconds."""
    check_loggers(config.loggers)
    kinds = methods.views_of(config.method, config.options)
    if isinstance(views, Sequence) and not isinstance(views, str) and len(views) != len(kinds):
        raise UserError(f"{config.method} has {plural(len(kinds), 'view')} ({', '.join(kinds)}), not {len(views)}")


def _with_views(config: Config, judge: Judge, given: Collection[str], reporter: Reporter) -> Config:
    """The configuration with the views that suit the start, the same for all processes, but for what the user chose."""
    if not judge.from_weights:
        return config
    views, area = dist.broadcast(views_for(judge.start))
    if "views" in config.options and "views" not in given:
        if unused := config.augmentation.keys() & {*VIEWS} - {*VIEW_PAIRS[views.value]}:
            views = Choice("views", config.options["views"], f"you changed the view {', '.join(sorted(unused))}")
        reporter.info(str(views))
        config = replace(config, options={**config.options, "views": views.value})
    if "crop_area" not in given:
        reporter.info(str(area))
        config = replace(config, crop_area=area.value)
    return config


def _knn_sets(config: Config, dataset: Dataset) -> tuple[ImageSet, ImageSet] | None:
    """Labeled images for the kNN evaluations during training, read only if this process does any."""
    return dataset.load_labeled(config.reading_size) if config.knn_every and is_main_process() else None


def _check_data_outside(out: Path, dataset: Dataset, settings: dict[str, Any]) -> None:
    """UserError if images or labels lie inside the run folder: they would look like part of the run."""
    place = out.resolve()
    folder = dataset.name if dataset.recipe is None and dataset.is_stored else ""
    for given in (folder, str(settings.get("labels", "")), str(settings.get("data_dir", ""))):
        if given not in ("", "folders") and expand(given).resolve().is_relative_to(place):
            raise UserError(
                f"{given} lies inside the run folder {out}: use another {setting('out')}, or move it out of there"
            )


def _reserve_folder(out: Path | None, overwrite: bool, config: Config) -> Path:
    """The run folder, made by the main process and known to all."""
    path = None
    if out is None and is_restart():
        raise UserError(
            f"this command was started again, and cannot continue a run whose folder it does not know: "
            f"use {setting('out', 'FOLDER')}"
        )
    if is_main_process():
        path = Run.reserve(out, overwrite) if out else new_folder(config)
    return dist.broadcast(path)


def _write_run(path: Path, config: Config, command: str, about: dict[str, Any]) -> Run:
    if not is_main_process():
        return Run(path, config)
    run = Run.create(path, config, command, overwrite=True)
    run.write_environment(about)
    return run


def _lock(path: Path) -> AbstractContextManager[None]:
    """Lock the run folder; the main process does so for all processes of the run."""
    return lock_run(path) if is_main_process() else nullcontext()


def _configure(
    dataset: Dataset, options: dict[str, Any], settings: dict[str, Any], reporter: Reporter
) -> tuple[Config, ImageSet]:
    """Read the images and configure the run; report what the images are."""
    config, images = resolve(dataset, options, settings)
    reporter.warn_of_skipped(images.skipped)
    for line in images.summary.lines() if images.summary else []:
        reporter.info(line)
    if dataset.recipe is None and "mirror" not in settings:
        how = "mirrored images look like the others" if images.mirror else "most mirrored images look unlike the others"
        other = setting("mirror", "no" if images.mirror else "yes")
        reporter.info(f"mirror {config.mirror}: {how}; use {other} to change that")
    if dataset.recipe is None and (config.labels or images.num_labeled):
        reporter.info(_about_labels(images, config.batch_size))
    if config.holdout:
        reporter.info(f"{plural(len(dataset.images('test')), 'labeled image')} held out of training, as test images")
    return config, images


def _check_warmup(config: Config, reporter: Reporter) -> None:
    if 0 < config.epochs <= config.warmup_epochs:
        reporter.warn(
            f"warm-up takes {config.warmup_epochs} epochs and the run has {config.epochs}, so the learning rate never "
            f"falls: use {setting('warmup_epochs', short_warmup(config.epochs))} to change that"
        )


def _about_labels(images: ImageSet, batch_size: int) -> str:
    classes = f"{images.num_classes} class{'es' * (images.num_classes != 1)}"
    text = f"{images.num_labeled:,} of {len(images):,} images labeled, {classes}"
    too_few = "; too few to measure purity"
    return text if images.can_measure_purity(batch_size) else text + too_few


def _epochs_that_fit(trainer: Trainer) -> int:
    """Epochs of the whole run by its first plan. If too few steps fit to be worth training, none is planned."""
    plan, reporter, done = trainer.plan, trainer.reporter, trainer.done
    assert plan is not None
    pace = plan.pace
    if dist.broadcast(plan.steps_left >= MIN_STEPS):
        epochs = math.ceil((done + plan.steps_left) / trainer.steps_per_epoch)
        if done + plan.steps_left == plan.max_steps:
            reporter.info(
                f"about {plural(epochs, 'epoch')} in {duration(plan.steps_left * pace)}: longer training would not "
                f"help and may lose accuracy; use {setting('trained_share', 1)} to train all the time"
            )
        else:
            reporter.info(f"about {plural(epochs, 'epoch')} fit: {1e3 * pace:.0f} ms per step on this machine so far")
        return epochs
    needed = 1.1 * (plan.elapsed() - plan.spent + plan.reserve() + MIN_STEPS * pace)
    reporter.warn(
        f"the time budget is too short to train: {plan.elapsed() - plan.spent:.0f} s have passed, a step takes "
        f"{pace:.2g} s, and at least {MIN_STEPS} steps are needed, so the run keeps the weights it has; "
        f"use {setting('time_budget', duration_text(math.ceil(needed)))} or more"
        + (f", with {setting('overwrite', True)}" if not done else "")
    )
    plan.over = True
    return done // trainer.steps_per_epoch


def _with_planned_epochs(config: Config, planned: Config, own_warmup: bool, plan: TimePlan) -> Config:
    """The configuration with what depends on the number of epochs, as in `planned`."""
    if not planned.epochs:
        return replace(config, epochs=0)
    warmup, share = planned.warmup_epochs, planned.warmup_epochs / max(1, planned.epochs)
    if not own_warmup:
        warmup = min(warmup, short_warmup(planned.epochs))
        share = min(WARMUP_SHARE, MAX_WARMUP_EPOCHS / max(1, planned.epochs))
    plan.warmup = min(1.0, share)
    return replace(config, epochs=planned.epochs, lr=planned.lr, warmup_epochs=warmup)


def _resume(run: Run, settings: dict[str, Any], timing: dict[str, Any], reporter: Reporter) -> Run:
    more = {name: settings[name] for name in settings.keys() & EXTENSIONS}
    old = run.config
    run = replace(run, config=replace(old, **{k: v for k, v in settings.items() if k not in more}))
    run.check_data()
    check_device(run.config)
    check_loggers(run.config.loggers)
    SCHEDULES.find(run.config.lr_shape)
    methods.resolve_options(run.config.method, {}, run.config.options)  # they may have been edited
    tensors, state = run.load_training(reporter.warn)
    check_unchanged(run, old, state)
    changes = _extension(run, state, **more) if more else {}
    config = replace(run.config, **changes)
    dist.init(pick_device(config.device))
    dataset = run.dataset()
    images = dataset.load(methods.find(config.method).split, config.reading_size)
    trainer = Trainer(config, images, reporter, _knn_sets(config, dataset), network=run.network, **timing)
    run = replace(run, data=run.data and run.data.emptied())
    trainer.load(tensors, state)
    if dataset.recipe is None and not trainer.over:
        judge_again(trainer, run)
    if is_main_process():
        run.truncate_log(trainer.done, reporter.warn)
        if not trainer.over:
            is_new = run.add_training_code(training_digest(config.method, config.imports))
            if is_new:
                reporter.warn(f"the code that trains {run.path} has changed since; it continues with today's")
            if (before := run.change_threads()) and trainer.order.device.type == "cpu":
                reporter.warn(
                    f"{run.path} used {plural(before, 'thread')} and now uses {torch.get_num_threads()}, so numbers "
                    f"differ in their last digits: OMP_NUM_THREADS={before} continues it bit for bit"
                )
    if trainer.plan and not trainer.over:
        changes |= _plan_rest(trainer)
    if run.config.data != Run.open(run.path).config.data:  # its images are the same, as `load` has checked
        changes["data"] = run.config.data
    if changes:
        run = run.update_config(**changes) if is_main_process() else replace(run, config=replace(config, **changes))
        if is_main_process():
            run.record_given(more)
        trainer.config = run.config
    reporter.info(f"{run.path}{_where_it_is(trainer, old)}")
    return _train(run, trainer)


def check_unchanged(run: Run, config: Config, state: dict[str, Any]) -> None:
    """UserError if config.yaml has other settings than the checkpoint was made with. Old checkpoints do not say.

    What made the run longer, or planned its length, was written to config.yaml after the checkpoint; that is accepted
    unless the file was edited.
    """
    may_change = RESUMABLE_SETTINGS | EDITABLE_SETTINGS
    may_change |= set() if run.was_config_edited() else EXTENSIONS | {"warmup_epochs"}
    if {state.get("settings", {}).get("data"), config.data}.isdisjoint(DATASETS):
        may_change.add("data")  # a folder may be moved: its images are compared
    if changed := settings_unlike_checkpoint(config, state, may_change):
        raise UserError(
            f"{run.path / 'config.yaml'} was changed: {'; '.join(changed)}\na run cannot change its settings: restore "
            f"the file. To train further, use {setting('epochs')}; for other settings, start a new run with "
            f"{setting('init_from', run.path)}"
        )


def settings_unlike_checkpoint(config: Config, state: dict[str, Any], may_change: Iterable[str] = ()) -> list[str]:
    """Describe the settings that differ from those of a checkpoint, except those that may change."""
    then, now = state.get("settings", {}), json.loads(json.dumps(asdict(config)))  # as a checkpoint stores it
    changed = []
    for name in [name for name in now if name in then and name not in may_change and then[name] != now[name]]:
        old, new = ({name: each[name]} if not isinstance(each[name], dict) else each[name] for each in (then, now))
        changed += [
            f"{key} was {old.get(key, 'not set')} and is {new.get(key, 'not set')} now"
            for key in {**old, **new}
            if old.get(key) != new.get(key)
        ]
    return changed


def judge_again(trainer: Trainer, run: Run) -> None:
    """Go on judging a resumed run, unless what it started from is gone."""
    layout = trainer.layout  # of the checkpoint: its scale is that of the last judgement, not of the start
    before = run.judgement(trainer.reporter.warn)
    try:
        if isinstance(run.network, nn.Module):
            raise UserError("the network that is handed in may not have the weights it had then")
        start = initial_backbone(trainer.config, network=run.network)
    except UserError as error:
        trainer.reporter.warn(f"the encoder is not compared with its start any more: {error}")
        return
    from_weights = trainer.config.init_from not in NO_START
    judge = judge_start(start, trainer.images, from_weights, trainer.order.device, trainer.clock)
    trainer.judge_from(start, judge, before.get("share"))
    trainer.layout = layout or trainer.layout
    judge.points = [point for point in before.get("points", []) if point["step"] <= trainer.done]


def _extension(run: Run, state: dict[str, Any], epochs: Any = None, time_budget: str = "") -> dict[str, Any]:
    """The settings that change if a run gets a new total of epochs, or this much more time."""
    done, spent = state["step"] / (state["data"]["images"] // run.config.batch_size), state.get("time", {})
    if time_budget:
        budget = parse_duration(time_budget) + spent.get("spent", state["seconds"])
        return {"time_budget": duration_text(budget)}
    longer = replace(run.config, epochs=epochs, time_budget="")
    if longer.epochs < done:
        raise UserError(
            f"{run.path} has trained for {done:.4g} epochs already: use {setting('epochs', math.ceil(done))} or more"
        )
    warmup = run.config.warmup_epochs
    if spent and spent["progress"] >= spent["warmup"]:
        warmup = min(warmup, int(done))  # it is not repeated
    return {"epochs": longer.epochs, "time_budget": "", "warmup_epochs": warmup}


def _plan_rest(trainer: Trainer) -> dict[str, Any]:
    """Plan the rest of a run with a time budget; return the settings that this changes."""
    plan = trainer.plan
    assert plan is not None
    extended = plan.extended
    if not extended and dist.broadcast(plan.left() <= 0):
        plan.over = True
        return {}
    trainer.measure()
    return {"epochs": _epochs_that_fit(trainer)} if extended else {}


def _where_it_is(trainer: Trainer, old: Config) -> str:
    """Describe where a resumed run is, and what is new in its settings."""
    plan, config = trainer.plan, trainer.config
    where = f"step {trainer.done}" + (f", epoch {trainer.epoch:g}" if plan else f" of {trainer.total_steps}")
    left = f", {duration(plan.budget - plan.elapsed())} left" if plan else ""
    text = f" is finished: {where}" if trainer.over else f": resuming at {where}{left}"
    if trainer.over or (config.epochs, config.time_budget) == (old.epochs, old.time_budget):
        return text
    new = f"{config.time_budget} in all" if plan else f"{plural(config.epochs, 'epoch')} instead of {old.epochs}"
    return f"{text}; {new}, so the learning rate is {trainer.learning_rate():.3g} now"
