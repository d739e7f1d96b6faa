"""The paper's tables as data: what each row ran, and the numbers it printed (paper.yaml)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mixnn.config import unknown

METRICS = ("linear", "knn")


@dataclass(frozen=True)
class Row:
    """One line of a table: a method with options, and its numbers by metric and data set."""

    name: str
    method: str
    set: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    paper: dict[str, list[float | None]] = field(default_factory=dict)
    fixed: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table of the paper, or of ours."""

    name: str
    title: str
    rows: tuple[Row, ...]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those that the paper prints in it; both where it prints none."""
        printed = {metric for row in self.rows for metric in row.paper}
        return tuple(m for m in METRICS if m in printed or not printed)


def _read() -> tuple[list[str], dict[str, Table]]:
    content = yaml.safe_load((Path(__file__).parent / "paper.yaml").read_text())
    tables = {
        name: Table(name, table["title"], tuple(Row(**row) for row in table["rows"]))
        for name, table in content["tables"].items()
    }
    return content["datasets"], tables


DATASETS, TABLES = _read()


def find(name: str) -> Table:
    if name not in TABLES:
        raise unknown("table", name, [*TABLES, "all"])
    return TABLES[name]


def number(row: Row, whose: str, metric: str, data: str) -> float | None:
    """What the paper (or the authors' fixed code) has in this cell, if anything."""
    values = getattr(row, whose).get(metric, [])
    return values[DATASETS.index(data)] if data in DATASETS and values else None
