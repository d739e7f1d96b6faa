"""Our results next to the paper's, as a table: on the terminal, in Markdown, LaTeX or JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixnn.paper.plan import Summaries, Summary, accuracy, changed_settings, plan_row
from mixnn.paper.tables import PROBE_EPOCHS, PROTOCOLS, Row, Table, published
from mixnn.progress import print_table

FORMATS = ("terminal", "markdown", "latex", "json")
COLUMNS = {"paper": "paper", "fixed": "authors' fixed code", "ours": "ours", "diff": "difference"}
LATEX_ESCAPES = str.maketrans({"%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "±": r"$\pm$"})


@dataclass(frozen=True)
class FilledTable:
    """A table with the cells of its rows, ready to print."""

    name: str
    title: str
    data: str
    rows: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        return {"table": self.name, "title": self.title, "data": self.data, "rows": self.rows}


# Cells


def cells(
    table: Table, data: str, seeds: Sequence[int], settings: Mapping[str, Any], finished: Summaries
) -> list[dict[str, Any]]:
    """Each row's name, note and one cell per protocol.

    A cell has the numbers of the paper and of the authors' fixed code, the mean of ours, and the difference.
    """
    rows = []
    for row in table.rows:
        runs = [finished[run.key] for run in plan_row(row, data, seeds, settings) if run.key in finished]
        found = {p: _cell(row, p, data, runs) | {"asked": len(seeds)} for p in PROTOCOLS}
        has_number = any(cell[source] for cell in found.values() for source in ("paper", "fixed"))
        note_applies = has_number or not (row.paper or row.fixed)  # else it is about numbers on other data sets
        rows.append({"name": row.name, "note": row.note if note_applies else ""} | found)
    return rows


def _cell(row: Row, protocol: str, data: str, runs: Sequence[Summary]) -> dict[str, Any]:
    values = [value for run in runs if (value := accuracy(run, protocol)) is not None]
    paper, fixed = (published(row, source, protocol, data) for source in ("paper", "fixed"))
    ours = statistics.fmean(values) if values else None
    target = paper if fixed is None else fixed
    return {
        "paper": paper,
        "fixed": fixed,
        "ours": None if ours is None else round(ours, 4),
        "std": round(statistics.stdev(values), 4) if len(values) > 1 else None,
        "n": len(values),
        "difference": None if ours is None or target is None else round(ours - target, 4),
    }


def title(table: Table, data: str, settings: Mapping[str, Any], probe_epochs: int) -> str:
    """The table's title, the data set, and how our runs differ from the recipe."""
    changed = {} if probe_epochs == PROBE_EPOCHS else {"epochs of the probe": (probe_epochs, PROBE_EPOCHS)}
    changed |= changed_settings(table, data, settings)
    words = [f"{k}={ours}" + (f" instead of {recipe}" if recipe else "") for k, (ours, recipe) in changed.items()]
    return f"{table.title}, {data}" + (f" (ours with {'; '.join(words)})" if words else "")


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The notes of the rows as sentences; rows with the same note share one."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row["note"], []).append(row["name"])
    return [f"{'; '.join(rows)}: {note}{'' if note.endswith('?') else '.'}" for note, rows in names.items() if note]


# Formats


def print_tables(tables: Sequence[FilledTable], form: str, as_list: bool = False) -> None:
    """Print tables in one of FORMATS; `as_list` makes the JSON a list even if there is only one table."""
    if form == "terminal":
        for table in tables:
            _print_on_terminal(table)
    elif form == "json":
        documents = [table.as_dict() for table in tables]
        print(json.dumps(documents if as_list else documents[0], indent=1))
    else:
        print("\n\n".join({"markdown": _markdown, "latex": _latex}[form](table) for table in tables))


def _print_on_terminal(table: FilledTable) -> None:
    columns, body = _columns_and_body(table.rows)
    heads = []
    for i, (protocol, column) in enumerate(columns):
        first = i == 0 or columns[i - 1][0] != protocol
        heads.append(f"{PROTOCOLS[protocol].label} {column}" if first else column)
    print(table.title)
    print_table(["", *heads], body, wrap=False)
    for sentence in _footnotes(table.rows):
        print(sentence)


def _markdown(table: FilledTable) -> str:
    columns, body = _columns_and_body(table.rows)
    heads = _long_heads(columns)
    lines = [f"**{table.title}**", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(text.replace("|", r"\|") for text in row) + " |" for row in body]
    footnotes = _footnotes(table.rows)
    return "\n".join([*lines, *(["", " ".join(footnotes)] if footnotes else [])])


def _latex(table: FilledTable) -> str:
    columns, body = _columns_and_body(table.rows)
    lines = ["\\begin{tabular}{l" + "r" * len(columns) + "}", "% " + table.title]
    lines += [
        " & ".join(text.translate(LATEX_ESCAPES) for text in row) + r" \\" for row in [_long_heads(columns), *body]
    ]
    return "\n".join([*lines, "\\end{tabular}", *(f"% {sentence}" for sentence in _footnotes(table.rows))])


def _columns_and_body(rows: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """The columns that have any text, as (protocol, column), and the text of each row."""
    texts = [{(p, c): text for p in PROTOCOLS for c, text in _cell_texts(row[p]).items()} for row in rows]
    protocols = [p for p in PROTOCOLS if any(text[p, c] for text in texts for c in COLUMNS)] or list(PROTOCOLS)
    columns = [(p, c) for p in protocols for c in COLUMNS if c == "ours" or any(text[p, c] for text in texts)]
    return columns, [[row["name"], *(text[c] for c in columns)] for row, text in zip(rows, texts, strict=True)]


def _cell_texts(cell: Mapping[str, Any]) -> dict[str, str]:
    """The text of a cell in each of COLUMNS."""
    texts = {k: "" if cell[k] is None else f"{cell[k]:.2f}" for k in ("paper", "fixed", "ours")}
    if cell["std"] is not None:
        texts["ours"] += f" ± {cell['std']:.2f}"
    if cell["n"] and cell["asked"] > 1:
        texts["ours"] += f" (n={cell['n']}" + (f" of {cell['asked']})" if cell["n"] < cell["asked"] else ")")
    return texts | {"diff": "" if cell["difference"] is None else f"{cell['difference']:+.2f}"}


def _long_heads(columns: Sequence[tuple[str, str]]) -> list[str]:
    return ["", *(f"{PROTOCOLS[protocol].label}: {COLUMNS[column]}" for protocol, column in columns)]


def _footnotes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    compared = [row[p] for row in rows for p in PROTOCOLS if row[p]["difference"] is not None]
    if any(cell["fixed"] is not None for cell in compared):
        return [*notes(rows), "Differences are to the fixed code's numbers if there are any, else to the paper's."]
    return notes(rows)
