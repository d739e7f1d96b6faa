"""From what the user typed to a full, checked configuration."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mixnn import dist, methods
from mixnn.config import RECIPES, Config, UserError, checked, make, method_option, setting
from mixnn.data import DATASETS, ImageSet
from mixnn.device import pick_device
from mixnn.nn.backbone import check_backbone
from mixnn.processes import world_size
from mixnn.progress import plural
from mixnn.runs import Run
from mixnn.runs.folder import Taken
from mixnn.runs.images import load_split, training_size
from mixnn.training.advice import OPTIONS, Choice, advise


def configure(data: str, options: Mapping[str, Any], settings: Mapping[str, Any], num: int = 0) -> Config:
    """Defaults, then the data set's recipe and the method's, then what the user gave; no image is read for it.

    `num`: of a folder's images, where they have been read.
    """
    method = str(settings.get("method", "mnn"))
    for name in settings:
        check_setting(name, method)
    settings = checked(Config, "setting", settings)  # advice reckons with them
    options = checked(methods.find(method).Options, f"option of {method}", options)
    recipe = dict(RECIPES.get(data, {}))
    recipe_options = recipe.pop("options", {})
    for choice in choices(data, options, settings, num):
        (recipe_options if choice.name in OPTIONS else recipe)[choice.name] = choice.value
    config = make(Config, "setting", recipe | methods.find(method).recipe | settings | {"data": data})
    config = replace(config, options=methods.resolve_options(config.method, recipe_options, options))
    check_device(config)
    check_backbone(config.backbone)
    return config


def check_setting(name: str, method: str) -> None:
    """Refuses an option of the method where a setting of the run is meant."""
    if method in methods.METHODS and name in {f.name for f in fields(methods.find(method).Options)}:
        raise UserError(f"{name} is an option of the method: use {method_option(name)}")


def choices(data: str, options: Mapping[str, Any], settings: Mapping[str, Any], num: int = 0) -> list[Choice]:
    """What is chosen for a folder of images, with the reasons; nothing for a data set, which has its recipe."""
    folder = Path(data).expanduser()
    if data in DATASETS or not folder.is_dir():
        return []
    cuda = pick_device(str(settings.get("device", "auto"))).type == "cuda"
    method = str(settings.get("method", "mnn"))
    unused = set(OPTIONS) - {f.name for f in fields(methods.find(method).Options)}
    unused |= set() if methods.has_support(method, options) else {"support_size"}
    return [choice for choice in advise(folder, settings, options, cuda, num) if choice.name not in unused]


def resolve(data: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[Config, ImageSet]:
    """The full configuration, and the images it speaks of."""
    config = configure(data, options, settings)
    if data in DATASETS and (config.labels or config.on_error != "skip"):
        flags = f"{setting('labels')} and {setting('on_error')}"
        raise UserError(f"{flags} are for folders of images, and {data} is a data set of its own")
    images = load_split(config, methods.find(config.method).split)
    if data not in DATASETS:  # some files may have been no images
        config = configure(data, options, settings, len(images))
    config = replace(config, image_size=training_size(config, images))
    check_images(config, images)
    # Absolute, so that a run can be resumed and evaluated from any place.
    absolute = {
        "data": "" if data in DATASETS else data,
        "data_dir": config.data_dir or os.environ.get("MIXNN_DATA", ""),
    }
    absolute["labels"] = "" if config.labels == "folders" else config.labels
    paths: dict[str, Any] = {k: str(Path(v).expanduser().absolute()) for k, v in absolute.items() if v}
    return replace(config, **paths), images


def check_device(config: Config) -> None:
    on_cpu = pick_device(config.device).type == "cpu"
    if on_cpu and config.precision == "bf16":
        raise UserError(f"precision=bf16 needs CUDA: use {setting('precision', 'fp32')} or leave it out")
    if on_cpu and config.mode == "captured":
        raise UserError(f"mode=captured needs CUDA: use {setting('mode', 'eager')} or {setting('mode', 'compiled')}")
    if world_size() > 1 and config.mode in ("captured", "compiled"):
        raise UserError(
            f"mode={config.mode} is for a run on one process: use {setting('mode', 'eager')} or leave it out"
        )
    dist.check(config.bn_groups)


def check_images(config: Config, images: ImageSet) -> None:
    """Limits that only the images can tell."""
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
    """runs/DATA-METHOD, numbered if that is taken; made at once, so that another process takes the next name."""
    stem = f"{Path(config.data).resolve().name}-{config.method}"
    number = 1
    while True:
        try:
            return Run.reserve(Path("runs") / (stem if number == 1 else f"{stem}-{number}"))
        except Taken:
            number += 1
