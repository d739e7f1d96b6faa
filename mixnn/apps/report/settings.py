"""What was run: the settings of a run, those that are not the defaults, its code and machine; and how runs differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mixnn import methods
from mixnn.apps.report.run_data import RunData
from mixnn.config import Config
from mixnn.data import configured_dataset
from mixnn.progress import duration, plural

OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW", "lars": "LARS"}
FIELDS = {f.name: f for f in dataclasses.fields(Config) if f.metadata}
# The settings that count in a run that was not trained, which only holds an encoder and its vectors
UNTRAINED = (
    *("data", "data_dir", "labels", "holdout", "on_error", "limit", "seed", "epochs", "device", "precision"),
    *("backbone", "init_from", "normalization", "image_size", "encode_size"),
)


def as_text(value: Any) -> str:
    """A setting or number as a person would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return " and ".join(as_text(v) for v in value)
    return "none" if value is None or value == "" else str(value)


def is_untrained(data: RunData) -> bool:
    """Whether a run is an encoder as it came. A short time budget can also end within the first epoch."""
    return not data.config.epochs and not data.metrics


def all_settings(data: RunData) -> dict[str, Any]:
    """Config's fields, the method's options and what was changed in views, as far as they count in this run."""
    config = data.config
    if is_untrained(data):
        return {name: getattr(config, name) for name in UNTRAINED}
    changes = {f"{view}.{k}": v for view, of_view in config.augmentation.items() for k, v in of_view.items()}
    return {name: getattr(config, name) for name in FIELDS} | config.options | changes


def option_fields(method: str) -> dict[str, dataclasses.Field[Any]]:
    """The options of a method; none if the method is unknown here."""
    if method not in methods.METHODS:
        return {}
    return {f.name: f for f in dataclasses.fields(methods.METHODS[method].Options)}


def help_and_source(config: Config, name: str) -> tuple[str, str]:
    """The meaning of a setting, and the source of its default."""
    view, _, part = name.partition(".")
    if part:
        return f"{part} of the view {view}", ""
    field = FIELDS.get(name) or option_fields(config.method).get(name)
    return (field.metadata["help"], field.metadata["source"]) if field is not None else ("", "")


def defaults(config: Config) -> dict[str, Any]:
    """The settings that this data set and method have by default; no options if the method is unknown here."""
    dataset = configured_dataset(config)
    recipe = dict(dataset.recipe or {})
    recipe_options = recipe.pop("options", {})
    known = option_fields(config.method)
    options = {name: f.default for name, f in known.items()} | {k: v for k, v in recipe_options.items() if k in known}
    method_recipe = methods.METHODS[config.method].recipe if known else {}
    fixed = {
        "data": config.data,
        "method": config.method,
        "image_size": dataset.train_size or config.image_size,
    }
    changes = {f"{view}.{k}": "" for view, of_view in config.augmentation.items() for k in of_view}
    return {name: f.default for name, f in FIELDS.items()} | recipe | method_recipe | options | fixed | changes


def changed_rows(data: RunData) -> list[dict[str, str]]:
    """Table rows of the settings that are not the defaults of this data set and method, with who set them."""
    config = data.config
    default = defaults(config)
    return [
        {
            "name": name,
            "value": as_text(value),
            "default": as_text(default[name]),
            "setBy": _set_by(name, data),
            "meaning": help_and_source(config, name)[0],
        }
        for name, value in all_settings(data).items()
        if name in default and value != default[name]
    ]


def _set_by(name: str, data: RunData) -> str:
    """Who chose a setting: the user, the time budget, or mixnn for these images; empty for runs that do not say."""
    if not isinstance(given := data.environment.get("given"), list):
        return ""
    if name in given:
        return "you"
    if name == "epochs" and data.config.time_budget:
        return "the time budget"
    recipe = data.config.recipe
    return "mixnn, for these images" if recipe == "auto" else f"the recipe {recipe}"


def all_rows(data: RunData) -> list[dict[str, str]]:
    """Table rows of all settings."""
    rows = []
    for name, value in all_settings(data).items():
        meaning, source = help_and_source(data.config, name)
        rows.append({"name": name, "value": as_text(value), "meaning": meaning, "source": source})
    return rows


def differences(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Table rows of the settings that differ between runs; null where a method has no such option."""
    settings = [all_settings(data) for data in runs]
    rows = []
    for name in dict.fromkeys(name for of_run in settings for name in of_run):
        values = [as_text(of_run[name]) if name in of_run else None for of_run in settings]
        if len(set(values)) > 1:
            config = next(data.config for data, of_run in zip(runs, settings, strict=True) if name in of_run)
            rows.append({"name": name, "values": values, "meaning": help_and_source(config, name)[0]})
    return rows


def overview(data: RunData) -> dict[str, str]:
    """The run in a few lines."""
    config, last = data.config, data.metrics[-1] if data.metrics else {}
    method = methods.METHODS.get(config.method)
    lr_rule = "" if config.batch_size == 256 else f" ({config.lr:g} x {config.batch_size} / 256)"
    done, planned = last.get("epoch", 0), plural(config.epochs, "epoch")
    progress = f"{done:g} of {'about ' * bool(config.time_budget)}{planned}"
    if config.time_budget and done >= config.epochs:
        progress = f"{done:g} epochs, as many as fit into {config.time_budget}"
    if "seconds" in last:
        progress += f", {duration(last['seconds'])} of training"
    if speed := last.get("step", 0) * config.batch_size / (last.get("seconds") or 1):
        progress += f", {speed:,.0f} images/s"
    size, name = config.image_size, config.method
    about = {
        "method": f"{name}: {methods.about_of(method).idea} ({methods.about_of(method).paper})" if method else name,
        "network": f"{config.backbone}, crops of {size} x {size} pixels",
        "training": f"{config.time_budget or planned}, batch size {config.batch_size}, "
        f"{OPTIMIZERS.get(config.optimizer, config.optimizer)} with learning rate {config.base_lr:g}{lr_rule}, "
        f"{plural(config.warmup_epochs, 'epoch')} of warm-up, learning-rate schedule {config.lr_shape}",
        "progress": progress,
    }
    if is_untrained(data):
        about |= {"method": "none", "training": "none", "progress": "-"}
        about["network"] = f"{config.backbone}, images of {config.encoding_size} x {config.encoding_size} pixels"
    return about | {
        "data": _data(config),
        "seed": str(config.seed),
        "machine": machine(data.environment),
        "code": code_version(data.environment),
        "command": data.command,
        "folder": str(data.run.path),
    }


def _data(config: Config) -> str:
    """The data set with the number of pre-training images, as far as it is known without reading them."""
    dataset, method = configured_dataset(config), methods.METHODS.get(config.method)
    description = f" ({dataset.description})" if dataset.description else ""
    num_images = dataset.num_images(method.split) if method else None
    if num_images:
        return f"{config.data}{description}, {plural(num_images, 'image')}"
    return f"{config.data}{description}" + (f", at most {plural(config.limit, 'image')}" if config.limit else "")


def machine(environment: Mapping[str, Any]) -> str:
    """Device, CUDA version and number of threads."""
    parts = [environment.get("device"), f"CUDA {environment['cuda']}" if environment.get("cuda") else None]
    threads = environment.get("threads")
    parts += [plural(threads, "CPU thread")] if threads else []
    return ", ".join(str(p) for p in parts if p) or "not recorded"


def code_version(environment: Mapping[str, Any]) -> str:
    """Versions of mixnn, torch and Python, with the git commit and the digest of the package."""
    versions = [f"{name} {environment[name]}" for name in ("mixnn", "torch", "python") if environment.get(name)]
    git = environment.get("git")
    if git:
        versions.insert(1, f"git {str(git).rstrip('+')}{' with uncommitted changes' if str(git).endswith('+') else ''}")
    if environment.get("code"):
        versions.append(f"package digest {environment['code']}")
    return ", ".join(versions) or "not recorded"
