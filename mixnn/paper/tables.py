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
from mixnn.evaluation import evaluate
from mixnn.evaluation.linear import LinearProbe
from mixnn.files import expand, read_yaml, yaml_error

# In the order of the paper's columns: linear first.
PROTOCOLS = dict(sorted(evaluate.PROTOCOLS.items(), key=lambda item: item[0] != "linear"))
PROBE_EPOCHS = LinearProbe.epochs  # the paper's; results of a longer or shorter linear probe are kept apart
DATASET_NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "stl10": "STL-10", "tiny-imagenet": "Tiny-ImageNet"}
ORDERS = ("fixed", "leaky")  # of search and push; the authors fixed a leak after the paper


@dataclass(frozen=True)
class Row:
    """One row of a table: a method with its options, and its published accuracies by protocol.

    A list of accuracies has one entry per data set of PAPER_DATASETS. The paper's own numbers have the leaky order.
    """

    name: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    paper: dict[str, list[float | None]] = field(default_factory=dict)
    fixed: dict[str, list[float | None]] = field(default_factory=dict)  # by the authors' fixed code
    # By the authors' code before the fix, where the paper has not printed their own number but another paper's.
    leaky: dict[str, list[float | None]] = field(default_factory=dict)
    explained: dict[str, str] = field(default_factory=dict)  # data set -> why our number is over a point from theirs

    @property
    def order(self) -> str:
        """When the second direction searches the support set: "fixed" or "leaky"; empty if nothing can leak."""
        options = methods.resolve_options(self.method, {}, self.options)
        if not methods.has_support(self.method, options) or not options.get("symmetric"):
            return ""
        return "leaky" if options.get("leaky_queue") else "fixed"


@dataclass(frozen=True)
class Table:
    """A table of the paper, or one of our own."""

    name: str
    title: str
    rows: tuple[Row, ...]
    order: str = ORDERS[0]


def _read(path: Path) -> tuple[list[str], dict[str, Table]]:
    """The data sets and the tables of a YAML file."""
    content = read_yaml(path)
    tables = {
        name: Table(name, table["title"], tuple(_row(row) for row in table["rows"]))
        for name, table in content["tables"].items()
    }
    return content.get("datasets", []), tables


def _row(values: Mapping[str, Any]) -> Row:
    known = [field.name for field in dataclasses.fields(Row)]
    for name in values:
        if name not in known:
            raise unknown("key in a row", name, known)
    return Row(**values)


PAPER_DATASETS, TABLES = _read(Path(__file__).parent / "tables.yaml")


def tables_with(path: str | Path) -> dict[str, Table]:
    """TABLES and, if a path is given, the tables of that file, which has the format of tables.yaml."""
    if not str(path):
        return TABLES
    try:
        _, own = _read(expand(path))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} is not a file of tables ({yaml_error(error)}): docs/reproduction.md has an example"
        ) from None
    for table in own.values():
        if table.name in (*TABLES, "all"):
            raise UserError(f"{path}: there is already a table called {table.name}; give yours another name")
        names = [row.name for row in table.rows]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise UserError(f"{path}: {table.name} has several rows called {twice[0]}; give each row a name of its own")
        for row in table.rows:
            methods.resolve_options(row.method, {}, row.options)
    return TABLES | own


def in_leaky_order(table: Table) -> Table:
    """The table with the order of the published numbers in every row where something can leak."""
    rows = [
        dataclasses.replace(row, options={**row.options, "leaky_queue": True}) if row.order == "fixed" else row
        for row in table.rows
        if row.order != "leaky"  # such a control becomes another row's copy
    ]
    return Table(table.name, f"{table.title}, leaky order", tuple(rows), "leaky")


def published(row: Row, source: str, protocol: str, data: str) -> float | None:
    """A row's accuracy in the source "paper", "fixed" or "leaky" (the authors' code); None if there is none."""
    values = getattr(row, source).get(protocol, [])
    return values[PAPER_DATASETS.index(data)] if data in PAPER_DATASETS and values else None
