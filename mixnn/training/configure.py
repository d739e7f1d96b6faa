"""From what the user gave to a complete, checked configuration and its images."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from mixnn import dist, methods
from mixnn.augment import VIEWS
from mixnn.config import (
    Config,
    UserError,
    check_augmentation,
    checked,
    fields_of,
    make,
    method_option,
    setting,
    unknown,
)
from mixnn.data import DATASETS, Dataset, ImageSet, open_dataset
from mixnn.data.image_set import read_normalization
from mixnn.device import pick_device
from mixnn.files import expand
from mixnn.nn.backbone import backbone_origin, check_backbone
from mixnn.nn.efficientnet import MIN_SIZE
from mixnn.processes import world_size
from mixnn.progress import plural
from mixnn.runs import Run
from mixnn.runs.weights import NO_START, STARTS
from mixnn.training.folder_settings import OPTIONS, Choice, choose, from_start
from mixnn.training.loggers import LOGGERS, logger_names
from mixnn.training.optimizers import OPTIMIZERS
from mixnn.training.recipes import AUTO, recipe_choices, refuse_recipe
from mixnn.training.schedule import SCHEDULES


def open_data(data: Any, settings: Mapping[str, Any], labels: Any = "") -> Dataset:
    """The data set of a run that is to be configured with these settings. `labels`: one for each image in memory."""
    if isinstance(data, Dataset):
        return data
    given = checked(Config, "setting", {k: v for k, v in settings.items() if k in DATA_SETTINGS})
    options = {"limit": given.get("limit", 0), "mirror": given.get("mirror", "yes") == "yes"}
    options |= {"labels": labels} | {name: given[name] for name in ("labels", "holdout", "on_error") if name in given}
    return open_dataset(data, given.get("data_dir", ""), **options)


MAX_UNLIKE, MIRROR_SAMPLE = 0.8, 500  # share of images that mirroring may make unlike the others; images to look at
DATA_SETTINGS = ("data_dir", "labels", "holdout", "on_error", "limit", "mirror")


def configure(data: Any, options: Mapping[str, Any], settings: Mapping[str, Any], num_images: int = 0) -> Config:
    """Build the configuration of a run, without decoding an image.

    Later sources win: defaults, the recipe of the data set, the recipe given by name, the recipe of the method, and
    what the user gave. `num_images`: number of readable images in a folder, once that is known.
    """
    method = str(settings.get("method", "mnn"))
    for name in settings:
        check_setting(name, method)
    settings = checked(Config, "setting", settings)  # choices depend on them
    settings = {name: value for name, value in settings.items() if (name, value) != ("image_size", 0)}  # 0: choose it
    options = checked(methods.find(method).Options, f"option of {method}", options)
    dataset = data if isinstance(data, Dataset) else open_data(data, settings)
    recipe = dict(dataset.recipe or {})
    recipe_options = dict(recipe.pop("options", {}))
    check_augmentation(settings.get("augmentation", {}))
    augmentation = {view: dict(parts) for view, parts in settings.get("augmentation", {}).items()}
    for choice in choices(dataset, options, settings, num_images):
        view, _, part = choice.name.partition(".")
        own = recipe if choice.name in fields_of(Config) else recipe_options
        own = augmentation.setdefault(view, {}) if part else own
        own[part or choice.name] = choice.value
    settings = settings | ({"augmentation": augmentation} if augmentation else {})
    config = make(Config, "setting", recipe | methods.find(method).recipe | settings | {"data": dataset.name})
    config = replace(config, options=methods.resolve_options(config.method, recipe_options, options))
    config = replace(config, imports=imports_of(config))
    if isinstance(config.trained_share, float) and (dataset.recipe is not None or config.init_from in NO_START):
        raise UserError(f"{setting('trained_share')} is for a folder of images and weights to start from: leave it out")
    if config.encode_size and dataset.stored_size:
        raise UserError(
            f"{setting('encode_size', config.encode_size)} is for folders of images: {dataset.name} is encoded at its "
            f"own size, {dataset.stored_size} pixels, so leave it out"
        )
    check_device(config)
    check_backbone(config.backbone)
    read_normalization(config.normalization)
    OPTIMIZERS.find(config.optimizer)
    SCHEDULES.find(config.lr_shape)
    return config


def split_options(settings: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the run and options of its method, which a caller in Python gives side by side."""
    method = str(settings.get("method", "mnn"))
    known, own = {f.name for f in fields(methods.find(method).Options)}, set(fields_of(Config))
    for name in settings:
        if name not in own | known:
            raise unknown(f"setting or option of {method}", name, [*sorted(known), *fields_of(Config)])
    given = {name: value for name, value in settings.items() if name in known - own and value is not None}
    for name in given.keys() & options.keys():
        raise UserError(f"{name} is given twice, also in options: give it once")
    return {name: value for name, value in settings.items() if name in own}, {**options, **given}


def check_setting(name: str, method: str) -> None:
    """Refuse an option of the method where a setting of the run is meant."""
    if method in methods.METHODS and name in {f.name for f in fields(methods.find(method).Options)}:
        raise UserError(f"{name} is an option of the method: use {method_option(name)}")


def imports_of(config: Config) -> list[str]:
    """Files and modules of the user that hold what this configuration names."""
    kinds = [config.augmentation.get(name, {}).get("kind", "") for name in config.augmentation]
    found = [methods.METHODS.origin(config.method), OPTIMIZERS.origin(config.optimizer), DATASETS.origin(config.data)]
    found += [SCHEDULES.origin(config.lr_shape), *map(LOGGERS.origin, logger_names(config.loggers))]
    found += [backbone_origin(config.backbone), *map(VIEWS.origin, kinds), *config.imports]
    return sorted({origin for origin in found if origin})


def choices(
    dataset: Dataset, options: Mapping[str, Any], settings: Mapping[str, Any], num_images: int = 0
) -> list[Choice]:
    """Settings chosen from the images, with reasons; for a data set with a recipe, from its start and by --recipe."""
    method, recipe = str(settings.get("method", "mnn")), str(settings.get("recipe", AUTO))
    if dataset.recipe is not None:
        followed = {"backbone", "normalization"} - settings.keys()
        found = [choice for choice in from_start(str(settings.get("init_from", ""))) if choice.name in followed]
        parts = {f"{view}.{part}" for view, of_view in settings.get("augmentation", {}).items() for part in of_view}
        return found + recipe_choices(recipe, method, options, {*settings, *options, *parts})
    refuse_recipe(recipe, dataset.name)
    cuda = pick_device(str(settings.get("device", "auto"))).type == "cuda"
    unused = set(OPTIONS) - {f.name for f in fields(methods.find(method).Options)}
    unused |= set() if methods.has_support(method, options) else {"support_size"}
    files = dataset.images("train")
    chosen = choose(num_images or len(files), files.typical_side, settings, options, cuda)
    return [choice for choice in chosen if choice.name not in unused]


def resolve(dataset: Dataset, options: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[Config, ImageSet]:
    """The complete configuration, and the images it trains on."""
    config = configure(dataset, options, settings)
    dataset.normalization = config.normalization
    dist.init(pick_device(config.device))  # first: one process may take much longer to read images
    images = dataset.load(methods.find(config.method).split, config.reading_size)
    if dataset.recipe is None:  # some files may be unreadable
        config = configure(dataset, options, settings, len(images))
        if "mirror" not in settings and (not images.mirror or mirrored_unlike(images) > MAX_UNLIKE):
            dataset.mirror, images, config = False, replace(images, mirror=False), replace(config, mirror="no")
    config = replace(config, image_size=config.image_size or dataset.train_size or images.size[0])
    check_images(config, images)
    # Absolute paths, so that a run can be resumed and evaluated from any folder.
    data_dir = config.data_dir or os.environ.get("MIXNN_DATA", "")
    given = {"data_dir": data_dir, "labels": "" if config.labels == "folders" else config.labels}
    is_path = config.init_from not in (*NO_START, *STARTS) and expand(config.init_from).exists()
    given |= {"init_from": config.init_from if is_path else ""}
    paths: dict[str, Any] = {k: str(expand(v).absolute()) for k, v in given.items() if v}
    return replace(config, **paths), images


def mirrored_unlike(images: ImageSet) -> float:
    """Share of images that are less like the others when mirrored. Half where mirroring is harmless; more for digits.

    By cosines of 16 x 16 pixels, in a sample. Measured: 0.96 on digits, 0.91 on right hands, 0.87 on fruit lit from one
    side; 0.46 to 0.65 on eight folders of photographs, drawings, X-rays and textures.
    """
    index = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:MIRROR_SAMPLE]
    pixels = images.images[index.to(images.images.device)].float()
    small = torch.nn.functional.adaptive_avg_pool2d(pixels, min(16, *images.size)).cpu()
    mean = small.mean(0)
    plain, mirrored = (torch.nn.functional.normalize((x - mean).flatten(1)) for x in (small, small.flip(3)))
    own = torch.eye(len(plain), dtype=torch.bool)
    before, after = ((x @ plain.T).masked_fill(own, -2.0).amax(1) for x in (plain, mirrored))
    return float((after < before).double().mean())


def check_device(config: Config) -> None:
    on_cpu = pick_device(config.device).type == "cpu"
    if on_cpu and config.precision == "bf16":
        raise UserError(f"precision=bf16 needs CUDA: use {setting('precision', 'fp32')} or leave it out")
    if on_cpu and config.mode == "recorded":
        raise UserError(
            f"mode={config.mode} needs CUDA: use {setting('mode', 'eager')} or {setting('mode', 'compiled')}"
        )
    if world_size() > 1 and config.mode == "compiled":
        raise UserError(
            f"mode={config.mode} works with one process only: use another {setting('mode')} or leave it out"
        )
    dist.check_bn_groups(config.bn_groups)


def check_images(config: Config, images: ImageSet) -> None:
    """Limits that depend on the number of images, and on their size."""
    side = min(images.size)
    if config.backbone == "efficientnet_lite0" and side < MIN_SIZE <= config.image_size:
        larger = f"a larger {setting('encode_size')} or " if config.encode_size else ""
        raise UserError(
            f"{config.backbone} needs images of {MIN_SIZE} pixels or more, those of {config.data} have {side}: "
            f"use {larger}another {setting('backbone')}"
        )
    if len(images) < config.batch_size:
        fit, hint = len(images) // config.bn_groups * config.bn_groups, "add images"
        if fit > config.bn_groups:
            hint = f"use {setting('batch_size', fit)}"
        elif len(images) > 1:
            hint = f"use {setting('batch_size', 2)} and {setting('bn_groups', 1)} or add images"
        count = plural(len(images), "image")
        raise UserError(f"{config.data} has {count}, fewer than batch_size={config.batch_size}: {hint}")
    support = config.options.get("support_size", math.inf)
    if support < config.batch_size and methods.has_support(config.method, config.options):
        raise UserError(
            f"support_size={support} is smaller than batch_size={config.batch_size}: "
            f"use {method_option('support_size', config.batch_size)} or more"
        )


def new_folder(config: Config) -> Path:
    """runs/DATA-METHOD, numbered if it exists. Made at once, so that another process takes the next name."""
    return Run.reserve_numbered(Path("runs") / f"{Path(config.data).resolve().name}-{config.method}")
