"""The paper's tables as data: what each row ran, and the numbers it printed (tables.yaml)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mixnn import methods
from mixnn.config import UserError, unknown
from mixnn.files import why

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


def _read(path: Path) -> tuple[list[str], dict[str, Table]]:
    content = yaml.safe_load(path.read_text())
    tables = {
        name: Table(name, table["title"], tuple(_row(row) for row in table["rows"]))
        for name, table in content["tables"].items()
    }
    return content.get("datasets", []), tables


def _row(values: Mapping[str, Any]) -> Row:
    known = [field.name for field in dataclasses.fields(Row)]
    for name in values:
        if name not in known:
            raise unknown("word in a row", name, known)
    return Row(**values)


DATASETS, TABLES = _read(Path(__file__).parent / "tables.yaml")


def tables_with(path: str | Path) -> dict[str, Table]:
    """The paper's tables and ours, and those of a file in the form of tables.yaml, if one is named."""
    if not str(path):
        return TABLES
    try:
        _, own = _read(Path(path).expanduser())
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} holds no tables ({why(error)}): docs/reproduction.md shows some") from None
    for table in own.values():
        if table.name in (*TABLES, "all"):
            raise UserError(f"{path}: a table {table.name} is there already, give yours another name")
        for row in table.rows:
            methods.resolve_options(row.method, {}, row.set)
    return TABLES | own


def number(row: Row, whose: str, metric: str, data: str) -> float | None:
    """What the paper (or the authors' fixed code) has in this cell, if anything."""
    values = getattr(row, whose).get(metric, [])
    return values[DATASETS.index(data)] if data in DATASETS and values else None
