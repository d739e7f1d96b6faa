"""Which runs a table needs, and which of their numbers results/ already has.

A run is known by the fingerprint of its configuration: of what can change its numbers, and differs from the defaults.
So a result stays valid when a new option appears, and rows of different tables that ask for the same run share it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixnn import methods
from mixnn.config import Config, UserError
from mixnn.data import DATASETS
from mixnn.evaluation.linear import LinearProbe
from mixnn.paper.tables import METRICS, Row, Table
from mixnn.training.configure import configure

# What says where and how a run is carried out, not what comes out.
INDIFFERENT = (
    "device",
    "mode",
    "data_dir",
    "knn_every",
    "checkpoint_every",
    "loggers",
    "resident",
    "on_error",
    "seed",
    "options",
)


@dataclass(frozen=True)
class Planned:
    """One run: a configuration, known by its fingerprint, with its seed; and what to type for it alone."""

    config: Config
    fingerprint: str
    command: str

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def name(self) -> str:
        data = Path(self.config.data).name
        return f"{data}-{self.config.method}-{self.fingerprint}-seed{self.config.seed}"


def fingerprint(config: Mapping[str, Any]) -> str:
    """Eight digits for a configuration (as a dict, its seed aside)."""
    known = {f.name: f.default for f in dataclasses.fields(Config)}
    values = {k: v for k, v in config.items() if k in known and k not in INDIFFERENT and v != known[k]}
    data = config["data"]
    if data in DATASETS and values.get("image_size") == DATASETS[data].train_size:
        values.pop("image_size")
    defaults = methods.resolve_options(config["method"], {}, {})
    options = {k: v for k, v in config["options"].items() if v != defaults.get(k)}
    named = {"data": data, "method": config["method"], "options": options}
    return hashlib.sha256(json.dumps(values | named, sort_keys=True).encode()).hexdigest()[:8]


def plan_row(row: Row, data: str, seeds: Iterable[int], settings: Mapping[str, Any]) -> list[Planned]:
    """A row's runs, one a seed."""
    runs = []
    for seed in seeds:
        given = {"method": row.method, "seed": seed, **settings}
        config = configure(data, row.set, given)
        flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        flags += [word for name, value in row.set.items() for word in ("--set", f"{name}={value}")]
        command = shlex.join(["mixnn", "pretrain", data, *flags])
        runs.append(Planned(config, fingerprint(dataclasses.asdict(config)), command))
    return runs


def plan(tables: Iterable[Table], data: str, seeds: Iterable[int], settings: Mapping[str, Any]) -> list[Planned]:
    """All runs of the tables, each once, seed by seed so that a table is whole as early as can be."""
    seen: dict[str, Planned] = {}
    for seed in seeds:
        for table in tables:
            for row in table.rows:
                for run in plan_row(row, data, [seed], settings):
                    seen.setdefault(run.name, run)
    return list(seen.values())


def last(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its last line of metrics; empty for a run of no epochs."""
    return summary["metrics"][-1] if summary["metrics"] else {}


def trained(summary: Mapping[str, Any]) -> bool:
    """Whether a run went on to its last epoch; one of no epochs has no metrics."""
    return last(summary).get("epoch", 0) == summary["config"]["epochs"]


def counting(summary: Mapping[str, Any], probe_epochs: int) -> dict[str, Any]:
    """The summary with those results alone that are of its last step, linear after a probe of so many epochs."""
    step, results = last(summary).get("step", 0), {}
    for metric in METRICS:
        how = summary["results"].get(metric, {}).get("protocol", {})
        if how.get("checkpoint_step") == step and (metric != "linear" or how["epochs"] == probe_epochs):
            results[metric] = summary["results"][metric]
    return {**summary, "results": results}


def finished(folder: Path, probe_epochs: int = LinearProbe.epochs) -> dict[tuple[str, int], dict[str, Any]]:
    """Summaries of trained runs in a folder of JSON files, by fingerprint and seed, with the results that count.

    Of several with one configuration, that with the most results; the last, where they have as many.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            summary = json.loads(path.read_text())
            if not _is_ours(summary) or not trained(summary):
                continue
            key = fingerprint(summary["config"]), summary["config"]["seed"]
            summary = counting(summary, probe_epochs)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): repair or remove it") from None
        if key not in found or len(summary["results"]) >= len(found[key]["results"]):
            found[key] = summary
    return found


def changed_since(needed: Iterable[Planned], done: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[str]:
    """Of each method whose file is another one than when its runs were made: the runs, which the table still shows."""
    older: dict[str, list[str]] = {}
    for run in needed:
        made_by = done.get((run.fingerprint, run.seed), {}).get("environment", {}).get("method_code")
        if made_by and made_by != methods.digest(run.config.method):
            older.setdefault(run.config.method, []).append(run.name)
    return [
        f"{name}'s file has changed since these runs: {', '.join(runs)}; remove their JSON to run them again"
        for name, runs in older.items()
    ]


def _is_ours(content: Any) -> bool:
    """Whether a file's content is a run's summary, of a method that is there: others may lie beside."""
    config = content.get("config") if isinstance(content, dict) else None
    if not isinstance(config, dict) or "options" not in config or not content.get("results"):
        return False
    return config.get("method") in methods.METHODS
