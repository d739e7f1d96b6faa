"""A table of results beside the paper's: on the terminal, as Markdown, LaTeX or JSON."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mixnn.evaluation.linear import LinearProbe
from mixnn.paper.plan import INDIFFERENT, plan_row
from mixnn.paper.tables import METRICS, Row, Table, number
from mixnn.progress import print_table

FORMATS = ("terminal", "markdown", "latex", "json")
COLUMNS = {"paper": "paper", "fixed": "authors' fixed code", "ours": "ours", "diff": "difference"}
LABELS = {"linear": "linear", "knn": "kNN"}


def measured(metric: str, summary: Mapping[str, Any]) -> float | None:
    """A run's own number: linear of the last epoch, kNN by weighted vote."""
    result = summary["results"].get(metric)
    return None if result is None else result["last" if metric == "linear" else "weighted"]


def cells(
    table: Table, data: str, seeds: Sequence[int], settings: Mapping[str, Any], done: Mapping[tuple[str, int], Any]
) -> list[dict[str, Any]]:
    """Each row's numbers: the paper's, the authors' fixed code's, ours, and how far ours is from theirs."""
    rows = []
    for row in table.rows:
        runs = [
            done[r.fingerprint, r.seed] for r in plan_row(row, data, seeds, settings) if (r.fingerprint, r.seed) in done
        ]
        found = {m: _cell(row, m, data, runs) | {"asked": len(seeds)} for m in METRICS}
        theirs = [cell[whose] for cell in found.values() for whose in ("paper", "fixed")]
        speaks_of_others = bool(row.paper or row.fixed) and not any(theirs)  # a note on numbers of other data sets
        rows.append({"name": row.name, "note": "" if speaks_of_others else row.note} | found)
    return rows


def _cell(row: Row, metric: str, data: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values = [v for v in (measured(metric, run) for run in runs) if v is not None]
    paper, fixed = (number(row, whose, metric, data) for whose in ("paper", "fixed"))
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
    """What the table shows, on which data, and in what our runs differ from the recipe."""
    differs = {} if probe_epochs == LinearProbe.epochs else {"epochs of the probe": (probe_epochs, LinearProbe.epochs)}
    differs |= differences(table, data, settings)
    words = [f"{k}={ours}" + (f" instead of {recipe}" if recipe else "") for k, (ours, recipe) in differs.items()]
    return f"{table.title}, {data}" + (f" (ours with {'; '.join(words)})" if words else "")


def differences(table: Table, data: str, settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings, as our runs have them and as the recipe does, that are not its own and can change numbers."""
    found: dict[str, tuple[Any, Any]] = {}
    for row in table.rows:
        ours, recipe = (vars(plan_row(row, data, [0], given)[0].config) for given in (settings, {}))
        found |= {k: (ours[k], recipe[k]) for k in settings if k not in INDIFFERENT and ours[k] != recipe[k]}
    return found


def render(table: Table, title: str, data: str, rows: Sequence[Mapping[str, Any]], form: str) -> str:
    """The table as text, without columns that nothing stands in; "" where the terminal was written to directly."""
    if form == "json":
        return json.dumps({"table": table.name, "title": title, "data": data, "rows": list(rows)}, indent=1)
    texts = [{(m, c): text for m in METRICS for c, text in _texts(row[m], form).items()} for row in rows]
    metrics = [m for m in METRICS if any(text[m, c] for text in texts for c in COLUMNS)] or METRICS
    columns = [(m, c) for m in metrics for c in COLUMNS if c == "ours" or any(text[m, c] for text in texts)]
    header = ["", *(f"{LABELS[m]}: {COLUMNS[c]}" for m, c in columns)]
    body = [[row["name"], *(text[column] for column in columns)] for row, text in zip(rows, texts, strict=True)]
    told = notes(rows)
    if any(row[m]["fixed"] is not None and row[m]["difference"] is not None for row in rows for m in METRICS):
        told.append("Differences are to the fixed code's numbers where there are any, else to the paper's.")
    if form == "terminal":
        print(title)
        first = {m: next(c for of, c in columns if of == m) for m in metrics}
        print_table(["", *(f"{LABELS[m]} {c}" if c == first[m] else c for m, c in columns)], body, wrap=False)
        print("".join(f"{sentence}\n" for sentence in told), end="")
        return ""
    if form == "markdown":
        lines = [f"**{title}**", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        lines += ["| " + " | ".join(c.replace("|", r"\|") for c in cells) + " |" for cells in body]
        return "\n".join([*lines, *(["", " ".join(told)] if told else [])])
    lines = ["\\begin{tabular}{l" + "r" * (len(header) - 1) + "}", "% " + title]
    lines += [" & ".join(_latex(c) for c in cells) + r" \\" for cells in [header, *body]]
    return "\n".join([*lines, "\\end{tabular}", *(f"% {sentence}" for sentence in told)])


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is to be known of rows, a sentence for those that share it."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row["note"], []).append(row["name"])
    return [f"{'; '.join(who)}: {note}{'' if note.endswith('?') else '.'}" for note, who in names.items() if note]


def _texts(cell: Mapping[str, Any], form: str) -> dict[str, str]:
    plus_minus = {"latex": r"$\pm$"}.get(form, "±")
    found = {k: "" if cell[k] is None else f"{cell[k]:.2f}" for k in ("paper", "fixed", "ours")}
    if cell["std"] is not None:
        found["ours"] += f" {plus_minus} {cell['std']:.2f}"
    if cell["n"] and cell["asked"] > 1:
        found["ours"] += f" (n={cell['n']}" + (f" of {cell['asked']})" if cell["n"] < cell["asked"] else ")")
    return found | {"diff": "" if cell["difference"] is None else f"{cell['difference']:+.2f}"}


def _latex(text: str) -> str:
    return re.sub(r"[%&_#]", lambda found: "\\" + found[0], text)
