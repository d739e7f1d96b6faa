"""What a run folder holds, read: what was run, with which settings, where; and what is missing.

A part that cannot be read is left out and named; only a folder that is no run's is refused.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mixnn import methods
from mixnn.apps.report.verdict import is_number
from mixnn.config import Config, UserError
from mixnn.data import DATASETS, configured_dataset
from mixnn.progress import duration, plural
from mixnn.runs import Run, checkpoint
from mixnn.runs.folder import DIVERGED

NAMES_OF_RESULTS = {"linear": "Linear probe", "knn": "kNN"}
FIELDS = {f.name: f for f in dataclasses.fields(Config) if f.metadata}


@dataclasses.dataclass
class Facts:
    """One run, read; `missing` is a sentence for each part that is not there."""

    run: Run
    name: str
    command: str
    environment: dict[str, Any]
    results: dict[str, Any]
    records: list[dict[str, Any]]
    diverged: str  # why training ended, where that is known
    missing: list[str]

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def init_from(self) -> str:
        """Where the encoder came from, if the command says so."""
        found = re.search(r"--init-from[ =]('[^']*'|\S+)", self.command)
        return found[1].strip("'") if found else ""


def read(path: str | Path) -> Facts:
    """All but weights and images; UserError for a folder that no run made."""
    run = Run.open(path)
    if not (run.path / "command.txt").is_file() or not isinstance(run.config.options, dict):
        raise UserError(f"{path} is no run folder, though it has a config.yaml; `mixnn pretrain` makes one")
    missing: list[str] = []

    def part(what: str, read: Callable[[], Any], empty: Any) -> Any:
        try:
            value = read()
        except (OSError, ValueError) as error:
            missing.append(f"{what} cannot be read: {error}.")
            return empty
        if type(value) is not type(empty):
            missing.append(f"{what} is not what a run writes.")
            return empty
        return value

    facts = Facts(
        run=run,
        name=run.path.name or run.path.resolve().name,
        command=part("command.txt", lambda: _text(run.path / "command.txt"), ""),
        environment=part("environment.json", lambda: _json(run.path / "environment.json"), {}),
        results=_checked(part("results.json", run.results, {})),
        records=[
            r for r in part("metrics.jsonl", run.metrics, []) if isinstance(r, dict) and is_number(r.get("epoch"))
        ],
        diverged=part(DIVERGED, lambda: _text(run.path / DIVERGED), ""),
        missing=missing,
    )
    missing += gaps(facts)
    return facts


def gaps(facts: Facts) -> list[str]:
    """What a run lacks, or has of an older checkpoint than its last; a sentence each."""
    missing, run = [], facts.run
    if not facts.records and run.config.epochs:
        missing.append("No epoch is logged, so there are no curves.")
    there = bool(checkpoint.list_checkpoints(run.path / "checkpoints"))
    if run.dataset().has_test and not facts.results.keys() >= NAMES_OF_RESULTS.keys():
        how = f": `{run.typed('evaluate')}` does that." if there else ", for the run has no checkpoint."
        missing.append(f"Linear probe and kNN are not both evaluated{how}")
    for name in ("knn", "linear"):
        step = facts.results.get(name, {}).get("protocol", {}).get("checkpoint_step")
        if there and facts.records and step is not None and step < facts.records[-1].get("step", 0):
            label, now = NAMES_OF_RESULTS[name], facts.records[-1]["step"]
            missing.append(f"{label} is of step {step}, and the run went on to {now}: `{run.typed('evaluate')}` again.")
    return missing


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}


def _checked(results: dict[str, Any]) -> dict[str, Any]:
    """Without results that are not in the form `evaluate` writes."""
    known = (*NAMES_OF_RESULTS, "evaluated_with")
    return {k: v for k, v in results.items() if k not in known or _is_result(v)}


def _is_result(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("protocol", {}), dict)


def text(value: Any) -> str:
    """A setting or a number as a person would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return " and ".join(text(v) for v in value)
    return "none" if value is None or value == "" else str(value)


# What was run


def settings(config: Config) -> dict[str, Any]:
    """Config's fields and the method's options, flat."""
    return {name: getattr(config, name) for name in FIELDS} | config.options


def meaning(config: Config, name: str) -> tuple[str, str]:
    """What a setting means, and where its default comes from."""
    field = FIELDS.get(name) or option_fields(config.method).get(name)
    return (field.metadata["help"], field.metadata["source"]) if field is not None else ("", "")


def option_fields(method: str) -> dict[str, dataclasses.Field[Any]]:
    if method not in methods.METHODS:
        return {}
    return {f.name: f for f in dataclasses.fields(methods.METHODS[method].Options)}


def defaults(config: Config) -> dict[str, Any]:
    """What the same data and method have if nothing else is typed; nothing of a method that is not known here."""
    dataset = configured_dataset(config)
    recipe = dict(dataset.recipe or {})
    options = recipe.pop("options", {})
    known = option_fields(config.method)
    own = {name: f.default for name, f in known.items()} | {k: v for k, v in options.items() if k in known}
    wanted = methods.METHODS[config.method].recipe if known else {}
    size = dataset.train_size or config.image_size
    fixed = {"data": config.data, "method": config.method, "image_size": size}
    return {name: f.default for name, f in FIELDS.items()} | recipe | wanted | own | fixed


def changed(config: Config) -> list[dict[str, str]]:
    """Settings that are not the defaults of this data set and method."""
    usual = defaults(config)
    return [
        {"name": name, "value": text(value), "default": text(usual[name]), "meaning": meaning(config, name)[0]}
        for name, value in settings(config).items()
        if name in usual and value != usual[name]
    ]


def every(config: Config) -> list[dict[str, str]]:
    rows = []
    for name, value in settings(config).items():
        what, source = meaning(config, name)
        rows.append({"name": name, "value": text(value), "meaning": what, "source": source})
    return rows


def card(facts: Facts) -> dict[str, str]:
    """The run in a few lines."""
    c, last = facts.config, facts.records[-1] if facts.records else {}
    known = DATASETS.get(c.data)
    images = known.splits[methods.METHODS[c.method].split] if known and c.method in methods.METHODS else 0
    count = (
        f", {plural(min(images, c.limit or images), 'image')}"
        if images
        else f", at most {plural(c.limit, 'image')}" * bool(c.limit)
    )
    about = methods.METHODS[c.method].about if c.method in methods.METHODS else None
    scaled = "" if c.batch_size == 256 else f" ({c.lr:g} x {c.batch_size} / 256)"
    done = f"{last.get('epoch', 0)} of {plural(c.epochs, 'epoch')}"
    seconds = f", {duration(last['seconds'])} of training" if "seconds" in last else ""
    images_per_s = last.get("step", 0) * c.batch_size / (last.get("seconds") or 1)
    speed = f", {images_per_s:,.0f} images/s" if images_per_s else ""
    return {
        "data": f"{c.data}{f' ({known.title})' if known else ''}{count}",
        "method": f"{c.method}: {about.idea} ({about.paper})" if about else c.method,
        "network": f"{c.backbone}, crops of {c.image_size} x {c.image_size} pixels",
        "training": f"{plural(c.epochs, 'epoch')}, batch {c.batch_size}, SGD with lr {c.base_lr:g}{scaled}, "
        f"{plural(c.warmup_epochs, 'epoch')} of warm-up, then a cosine",
        "seed": str(c.seed),
        "progress": done + seconds + speed,
        "machine": machine(facts.environment),
        "code": code(facts.environment),
        "command": facts.command,
        "folder": str(facts.run.path),
    }


def machine(environment: Mapping[str, Any]) -> str:
    parts = [environment.get("device"), f"CUDA {environment['cuda']}" if environment.get("cuda") else None]
    threads = environment.get("threads")
    parts += [plural(threads, "CPU thread")] if threads else []
    return ", ".join(str(p) for p in parts if p) or "not recorded"


def code(environment: Mapping[str, Any]) -> str:
    versions = [f"{name} {environment[name]}" for name in ("mixnn", "torch", "python") if environment.get(name)]
    git = environment.get("git")
    if git:
        versions.insert(1, f"git {str(git).rstrip('+')}{' with uncommitted changes' if str(git).endswith('+') else ''}")
    if environment.get("code"):
        versions.append(f"digest of the package {environment['code']}")
    return ", ".join(versions) or "not recorded"
