"""Our results next to the paper's, as a table: on the terminal, in Markdown, LaTeX or JSON."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixnn.paper.plan import Summaries, Summary, accuracy, best_accuracy, precision_of, runs_of, settings_off_recipe
from mixnn.paper.provenance import MEANINGS, marks_of
from mixnn.paper.tables import PAPER_DATASETS, PROBE_EPOCHS, PROTOCOLS, TABLES, Row, Table, published
from mixnn.progress import print_table

FORMATS = ("terminal", "markdown", "latex", "json")
COLUMNS = {
    "paper": "paper",
    "fixed": "authors' fixed code",
    "leaky": "authors' leaky code",
    "ours": "ours",
    "best": "best epoch",
    "diff": "difference",
}
OTHER_ORDER = "*"  # marks a difference between a run in the fixed order and a number with the leak
OPEN = 1.0  # points; a row that is farther from the authors' number is called open unless it is explained
LATEX_ESCAPES = str.maketrans(
    {"%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "±": r"$\pm$"}
    | {"†": r"$\dagger$", "‡": r"$\ddagger$", "§": r"\S{}"}
)
BLOCK = re.compile(r"(<!-- begin ([a-z-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


@dataclass(frozen=True)
class FilledTable:
    """A table with the cells of its rows, ready to print."""

    name: str
    title: str
    data: str
    rows: list[dict[str, Any]]
    is_recipe: bool = True  # whether our runs have the paper's settings

    def as_dict(self) -> dict[str, Any]:
        return {"table": self.name, "title": self.title, "data": self.data, "rows": self.rows}


# Cells


def fill(
    table: Table,
    data: str,
    seeds: Sequence[int],
    settings: Mapping[str, Any],
    finished: Summaries,
    commits: Mapping[str, str],
    probe_epochs: int = PROBE_EPOCHS,
    asked: int = 1,
) -> FilledTable:
    """The table with our numbers. `commits` are those of `provenance.read_commits`.

    If more seeds were `asked` for than a row has, its cells say so.
    """
    rows = cells(table, data, seeds, settings, finished, commits, asked)
    changed = settings_off_recipe(table, data, settings)
    is_recipe = not changed and probe_epochs == PROBE_EPOCHS
    return FilledTable(table.name, title(table, data, settings, probe_epochs), data, rows, is_recipe)


def cells(
    table: Table,
    data: str,
    seeds: Sequence[int],
    settings: Mapping[str, Any],
    finished: Summaries,
    commits: Mapping[str, str],
    asked: int = 1,
) -> list[dict[str, Any]]:
    """Each row's name, notes and one cell per protocol.

    A cell has the numbers of the paper and of the authors' code, the mean of ours with its deviation and number of
    runs, the mean of our best epochs, and the difference between our last epoch and the number to compare it with.
    """
    rows = []
    for row in table.rows:
        runs = runs_of(row, data, seeds, settings, finished)
        found = {p: _cell(row, p, data, runs, table.order) | {"asked": asked} for p in PROTOCOLS}
        has_number = any(cell[source] for cell in found.values() for source in ("paper", "fixed"))
        note_applies = has_number or not (row.paper or row.fixed)  # else it is about numbers on other data sets
        about = {"note": row.note if note_applies else "", "explained": row.explained.get(data, "")}
        about |= {"marks": marks_of(runs, commits), "precision": precision_of(runs[0]) if runs else ""}
        rows.append({"name": row.name} | about | found)
    return rows


def _cell(row: Row, protocol: str, data: str, runs: Sequence[Summary], order: str) -> dict[str, Any]:
    values = [value for run in runs if (value := accuracy(run, protocol)) is not None]
    best = [value for run in runs if (value := best_accuracy(run, protocol)) is not None]
    numbers = {source: published(row, source, protocol, data) for source in ("paper", "fixed", "leaky")}
    if order == "leaky":  # without a support set there is one order, and one run of theirs
        only = numbers["paper"] if row.order else numbers["fixed"]
        numbers |= {"fixed": None, "leaky": only if numbers["leaky"] is None else numbers["leaky"]}
    else:
        numbers["leaky"] = None
    source = next((source for source in ("leaky", "fixed") if numbers[source] is not None), "paper")
    ours, target = statistics.fmean(values) if values else None, numbers[source]
    difference = None if ours is None or target is None else round(ours - target, 4)
    return numbers | {
        "ours": None if ours is None else round(ours, 4),
        "std": round(statistics.stdev(values), 4) if len(values) > 1 else None,
        "n": len(values),
        "best": round(statistics.fmean(best), 4) if best and len(best) == len(values) else None,
        "difference": difference,
        "other_order": difference is not None and source == "paper" and row.order == "fixed",
    }


def title(table: Table, data: str, settings: Mapping[str, Any], probe_epochs: int) -> str:
    """The table's title, the data set, and how our runs differ from the recipe."""
    changed = {} if probe_epochs == PROBE_EPOCHS else {"epochs of the probe": (probe_epochs, PROBE_EPOCHS)}
    changed |= settings_off_recipe(table, data, settings)
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
        print(as_markdown(tables) if form == "markdown" else "\n\n".join(map(_latex, tables)))


def as_markdown(tables: Sequence[FilledTable]) -> str:
    """The tables as Markdown."""
    return "\n\n".join(map(_markdown, tables))


def _print_on_terminal(table: FilledTable) -> None:
    """One block per protocol: side by side, they would not fit on a terminal."""
    columns, body = _columns_and_body(table.rows)
    print(table.title)
    for protocol in dict.fromkeys(protocol for protocol, _ in columns):
        shown = [i for i, (p, _) in enumerate(columns) if p == protocol]
        block = [[row[0], *(row[i + 1] for i in shown)] for row in body]
        print_table([PROTOCOLS[protocol].label, *(columns[i][1] for i in shown)], block, wrap=False)
    for sentence in _footnotes(table):
        print(sentence)


def _markdown(table: FilledTable) -> str:
    columns, body = _columns_and_body(table.rows)
    lines = [f"**{table.title}**", "", markdown_table(_long_heads(columns), body)]
    footnotes = _footnotes(table)
    return "\n".join([*lines, *(["", " ".join(footnotes)] if footnotes else [])])


def _latex(table: FilledTable) -> str:
    columns, body = _columns_and_body(table.rows)
    lines = ["\\begin{tabular}{l" + "r" * len(columns) + "}", "% " + table.title]
    lines += [
        " & ".join(text.translate(LATEX_ESCAPES) for text in row) + r" \\" for row in [_long_heads(columns), *body]
    ]
    return "\n".join([*lines, "\\end{tabular}", *(f"% {sentence}" for sentence in _footnotes(table))])


def _columns_and_body(rows: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """The columns that have any text, as (protocol, column), and the text of each row."""
    texts = [{(p, c): text for p in PROTOCOLS for c, text in _cell_texts(row[p], row["marks"]).items()} for row in rows]
    protocols = [p for p in PROTOCOLS if any(text[p, c] for text in texts for c in COLUMNS)] or list(PROTOCOLS)
    columns = [(p, c) for p in protocols for c in COLUMNS if c == "ours" or any(text[p, c] for text in texts)]
    return columns, [[row["name"], *(text[c] for c in columns)] for row, text in zip(rows, texts, strict=True)]


def _cell_texts(cell: Mapping[str, Any], marks: str) -> dict[str, str]:
    """The text of a cell in each of COLUMNS. `marks` say where our runs come from."""
    texts = {k: "" if cell[k] is None else f"{cell[k]:.2f}" for k in COLUMNS if k != "diff"}
    if cell["std"] is not None:
        texts["ours"] += f" ± {cell['std']:.2f}"
    if cell["n"] and max(cell["n"], cell["asked"]) > 1:
        texts["ours"] += f" (n={cell['n']}" + (f" of {cell['asked']})" if cell["n"] < cell["asked"] else ")")
    if cell["n"]:
        texts["ours"] += f" {marks}" * bool(marks)
    difference = "" if cell["difference"] is None else f"{cell['difference']:+.2f}"
    return texts | {"diff": difference + OTHER_ORDER * cell["other_order"]}


def _long_heads(columns: Sequence[tuple[str, str]]) -> list[str]:
    return ["", *(f"{PROTOCOLS[protocol].label}: {COLUMNS[column]}" for protocol, column in columns)]


def _footnotes(table: FilledTable) -> list[str]:
    """Notes of rows, which numbers were compared, what is open, and what the marks mean."""
    rows, found = table.rows, notes(table.rows)
    if table.name in TABLES and table.data not in PAPER_DATASETS:
        found.append(f"The paper has no numbers on {table.data}.")
    compared = [(row, p, row[p]) for row in rows for p in PROTOCOLS if row[p]["difference"] is not None]
    if any(cell["leaky"] is not None for *_, cell in compared):
        found.append("Differences are to the authors' numbers in the leaky order, or to their only run.")
    elif any(cell["fixed"] is not None for *_, cell in compared):
        found.append("Differences are to the fixed code's numbers if there are any, else to the paper's.")
    if any(cell["best"] is not None for *_, cell in compared):
        found.append("They use our last epoch; the authors probably report the best one.")
    if any(cell["other_order"] for *_, cell in compared):
        found.append(f"{OTHER_ORDER} not like with like: the paper's number has the leaky order, ours the fixed one.")
    if table.is_recipe:
        found += _far_rows(compared)
    fp32 = [row["name"] for row in rows if row["precision"] == "fp32"]
    if fp32 and any(row["precision"] == "bf16" for row in rows):
        found.append(f"In fp32, the others in bf16: {'; '.join(fp32)}.")
    return found + [f"{m} {text}." for m, text in MEANINGS.items() if any(m in row["marks"] for row in rows)]


def _far_rows(compared: Sequence[tuple[Mapping[str, Any], str, Mapping[str, Any]]]) -> list[str]:
    """Rows that are more than a point from the number they are compared with: explained, or open."""
    far = [(row, p, cell) for row, p, cell in compared if abs(cell["difference"]) > OPEN]
    words = [(row["explained"], f"{row['name']} ({PROTOCOLS[p].label} {c['difference']:+.2f})") for row, p, c in far]
    unexplained = [name for why, name in words if not why]
    sentences = [f"{name} is more than a point away: {why}." for why, name in words if why]
    return sentences + ([f"Open, more than a point away: {'; '.join(unexplained)}."] if unexplained else [])


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], alignment: str = "") -> str:
    """A table in Markdown; the alignment has a letter per column, r for numbers on the right."""
    rule = "|".join("---:" if letter == "r" else "---" for letter in alignment.ljust(len(head), "l"))
    escaped = ([text.replace("|", r"\|") for text in row] for row in rows)
    return "\n".join([f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in escaped)])


def mean_text(values: Sequence[float], form: str = ".2f", with_count: bool = True) -> str:
    """The mean as text, with deviation and number if there are several values; empty if there are none."""
    if not values:
        return ""
    mean = format(statistics.fmean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):{form}}" + f" (n={len(values)})" * with_count


def replace_blocks(page: str, content: Callable[[str], str]) -> str:
    """A page of Markdown with new content between the comments `<!-- begin NAME -->` and `<!-- end NAME -->`."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{content(match[2])}\n\n{match[3]}", page)
