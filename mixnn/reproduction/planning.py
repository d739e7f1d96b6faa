"""Which runs a table needs, and which of them results/ already has.

A run is known by the fingerprint of its configuration: of what can change its numbers, and differs from the defaults.
So a result stays valid when a new option appears, and rows of different tables that ask for the same run share it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixnn import methods
from mixnn.config import Config, UserError
from mixnn.data import DATASETS
from mixnn.reproduction.tables import Row, Table
from mixnn.training.setup import configure

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
    """One run: a configuration, known by its fingerprint, with its seed."""

    config: Config
    fingerprint: str

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
        config = configure(data, row.set, {**settings, "method": row.method, "seed": seed})
        runs.append(Planned(config, fingerprint(dataclasses.asdict(config))))
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


def finished(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Summaries of finished runs in a folder of JSON files, by fingerprint and seed."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            summary = json.loads(path.read_text())
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}): repair or remove it") from None
        config = summary.get("config", {}) if isinstance(summary, dict) else {}
        if "options" in config and summary.get("results"):
            found[fingerprint(config), config["seed"]] = summary
    return found
