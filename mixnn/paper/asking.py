"""Whether what was asked for exists: before anything is run, for a misspelt word may cost a day."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mixnn import methods
from mixnn.config import UserError, setting, unknown
from mixnn.data import DATASETS, not_found
from mixnn.paper.plan import plan_row
from mixnn.paper.tables import Row, Table
from mixnn.runs.images import has_test_split


def data_of(data: str | Path, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The data set and the settings; a folder and a file of labels by their whole path, as runs have them.

    What the table's rows say is no setting, and is refused.
    """
    for name in ("seed", "method", "options"):
        if name in settings:
            raise UserError(
                f"{name} is the table's to say, and no setting of its runs: "
                f"reproduce has {setting('seeds')} and {setting('rows')}"
            )
    options = {field.name for cls in methods.METHODS.values() for field in dataclasses.fields(cls.Options)}
    for name in options & settings.keys():
        own = f"{setting('tables', 'FILE')} adds your own"
        raise UserError(f"{name} is an option of methods, which the rows of a table set: {own}")
    folder, settings = Path(data).expanduser().absolute(), dict(settings)
    if str(data) in DATASETS:
        return str(data), settings
    if not folder.is_dir():
        raise not_found(str(data))
    labels = str(settings.get("labels", ""))
    if labels not in ("", "folders"):
        settings["labels"] = str(Path(labels).expanduser().absolute())
    return str(folder), settings


def seeds_of(seeds: int | Iterable[int]) -> list[int]:
    """As a list, each once; one seed may stand alone."""
    found = [seeds] if isinstance(seeds, int) else list(seeds)
    if not found or not all(isinstance(seed, int) and seed >= 0 for seed in found):
        raise UserError(f"seeds={seeds!r}: seeds takes whole numbers from 0 on, as in {setting('seeds', '0,1,2')}")
    for seed in found:
        if found.count(seed) > 1:
            raise UserError(f"seed {seed} is given {found.count(seed)} times, and its run is one: give each seed once")
    return found


def tables_of(table: str, rows: str | Sequence[str], known: Mapping[str, Table]) -> list[Table]:
    """The table, or all of those known, with the rows of these names; one name may stand alone."""
    if table != "all" and table not in known:
        raise unknown("table", table, [*known, "all"])
    tables = list(known.values()) if table == "all" else [known[table]]
    names = {row.name.lower(): row.name for t in tables for row in t.rows}
    wanted = [rows] if isinstance(rows, str) else list(rows)
    for name in wanted:
        if name.lower() not in names:
            several = f"\nname several by repeating {setting('rows')}" if "," in name else ""
            raise UserError(f"{unknown('row', name, names.values())}{several}")
    lower = [name.lower() for name in wanted]
    return _limited(tables, lambda row: not lower or row.name.lower() in lower)


def runnable(tables: Sequence[Table], data: str, settings: Mapping[str, Any]) -> tuple[list[Table], list[str]]:
    """The tables without the rows that need labels which the data's training images lack, and these rows' names."""
    config = plan_row(tables[0].rows[0], data, [0], settings)[0].config
    if not has_test_split(config):
        raise UserError(
            f"{data} gives no labelled test images to evaluate by: it needs the folders train and test, and "
            f"{setting('labels', 'folders')} or a CSV"
        )
    unlabelled = data in DATASETS and DATASETS[data].splits["pretrain"] > DATASETS[data].splits["train"]
    without = [row.name for table in tables for row in table.rows if unlabelled and _reads_labels(row)]
    return _limited(tables, lambda row: row.name not in without), sorted(set(without))


def _reads_labels(row: Row) -> bool:
    """Of all images that methods without labels train on; the supervised reference has its own, labelled ones."""
    options = methods.resolve_options(row.method, {}, row.set)
    return methods.uses_labels(row.method, options) and methods.find(row.method).split == "pretrain"


def _limited(tables: Iterable[Table], keep: Callable[[Row], bool]) -> list[Table]:
    limited = [Table(t.name, t.title, tuple(row for row in t.rows if keep(row))) for t in tables]
    return [t for t in limited if t.rows]
