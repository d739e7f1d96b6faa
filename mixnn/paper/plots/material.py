"""What figures are drawn from: finished runs, found by the row of the paper's tables that they carry out."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from mixnn.paper.plan import fingerprint, finished, plan_row
from mixnn.paper.plots.style import Look
from mixnn.paper.tables import TABLES, Row
from mixnn.progress import plural
from mixnn.runs import Run

Summary = Mapping[str, Any]


class Lacking(Exception):
    """A figure cannot be drawn; the text says what it lacks."""


class Drawing(NamedTuple):
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Line:
    """The runs of one row of a table, and how their curve is named and looks."""

    table: str
    name: str
    look: Look
    label: str = ""

    @property
    def title(self) -> str:
        return self.label or self.name

    @property
    def row(self) -> Row:
        return next(row for row in TABLES[self.table].rows if row.name == self.name)


class Curve(NamedTuple):
    """A number over epochs, averaged over seeds; no deviation where there is one seed."""

    epochs: np.ndarray
    mean: np.ndarray
    std: np.ndarray | None


@dataclass(frozen=True)
class Material:
    """Summaries by fingerprint and seed, and the run folders that were given."""

    data: str
    done: Mapping[tuple[str, int], Summary]
    folders: tuple[Run, ...]
    settings: Mapping[str, Any]
    results: Path

    @staticmethod
    def gather(results: Path, runs: Iterable[Run], data: str, settings: Mapping[str, Any]) -> Material:
        folders = tuple(run for run in runs if run.config.data == data)
        done: dict[tuple[str, int], Summary] = dict(finished(results))
        for run in folders:
            summary = run.summary()
            done[fingerprint(summary["config"]), run.config.seed] = summary
        return Material(data, done, folders, settings, results)

    def making(self, table: str) -> str:
        """The command that makes a table's runs."""
        words = ["mixnn", "reproduce", table]
        words += ["--data", self.data] if self.data != "cifar10" else []
        words += ["--results", str(self.results)] if self.results != Path("results") else []
        words += [word for name, value in self.settings.items() for word in ("--setting", f"{name}={value}")]
        return f"`{shlex.join(words)}`"

    @property
    def name(self) -> str:
        """Of the data, in file names and captions."""
        return Path(self.data).name

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for _, seed in self.done})

    def runs(self, row: Row) -> list[Summary]:
        """The runs of a row, by seed."""
        wanted = plan_row(row, self.data, [0], self.settings)[0].fingerprint
        return [self.done[wanted, seed] for seed in self.seeds if (wanted, seed) in self.done]

    def needed(self, lines: Sequence[Line], columns: Sequence[str]) -> dict[Line, list[Summary]]:
        """The runs of each line that logged all columns; Lacking if a line has none."""
        there = {line: self.runs(line.row) for line in lines}
        complete = {line: [run for run in runs if has(run, columns)] for line, runs in there.items()}
        missing: dict[str, list[str]] = {}
        for line in (line for line in lines if not there[line]):
            missing.setdefault(line.table, []).append(line.name)
        reasons = [
            f"row{'s' * (len(names) > 1)} {'; '.join(names)} ({self.making(table)})" for table, names in missing.items()
        ]
        for line in (line for line in lines if there[line] and not complete[line]):
            unlogged = [c for c in columns if not any(has(run, [c]) for run in there[line])]
            reasons.append(f"{_listed(unlogged or columns)} in the log of {line.title}")
        if reasons:
            raise Lacking("; ".join(reasons))
        return complete

    def optional(self, lines: Sequence[Line], columns: Sequence[str]) -> dict[Line, list[Summary]]:
        """Likewise, leaving out the lines that have none."""
        found = {line: [run for run in self.runs(line.row) if has(run, columns)] for line in lines}
        return {line: runs for line, runs in found.items() if runs}


def has(run: Summary, columns: Sequence[str]) -> bool:
    return all(any(column in record for record in run["metrics"]) for column in columns)


def curve(runs: Sequence[Summary], column: str, less: str = "") -> Curve:
    """A column of metrics.jsonl (less another) at the epochs that all runs have it."""
    names = [column, less] if less else [column]
    logs = [
        {r["epoch"]: r[column] - (r[less] if less else 0) for r in run["metrics"] if all(n in r for n in names)}
        for run in runs
    ]
    epochs = sorted(set.intersection(*(set(log) for log in logs)))
    if not epochs:
        raise Lacking(f"an epoch at which all of its runs logged {column}")
    values = np.array([[log[epoch] for epoch in epochs] for log in logs], dtype=float)
    return Curve(np.array(epochs), *mean_and_std(values))


def mean_and_std(values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Over the first axis, which is that of the seeds."""
    return values.mean(0), values.std(0, ddof=1) if len(values) > 1 else None


def caption(text: str, data: str, runs: Mapping[str, Sequence[Summary]]) -> str:
    """What the figure shows, then what was run: seeds, epochs, device and code of every line."""
    band = " Bands and bars: one standard deviation over n seeds." if any(len(r) > 1 for r in runs.values()) else ""
    groups: dict[str, list[str]] = {}
    for label, summaries in runs.items():
        groups.setdefault(_about(summaries), []).append(label)
    what = " ".join(f"Runs with {about}: {'; '.join(labels)}." for about, labels in groups.items())
    return f"{text}{band} Data: {data}. {what}\n"


def _about(summaries: Sequence[Summary]) -> str:
    seeds = _listed(sorted({str(run["config"]["seed"]) for run in summaries}, key=int))
    epochs = plural(summaries[0]["config"]["epochs"], "epoch")  # they have one configuration
    devices = _listed(sorted({run["environment"].get("device") or "unknown device" for run in summaries}))
    code = _listed(sorted({_code(run["environment"]) for run in summaries}))
    return f"n = {len(summaries)} (seed{'s' * (len(summaries) > 1)} {seeds}), {epochs}, {devices}, {code}"


def _code(environment: Mapping[str, Any]) -> str:
    """The digest of the package's files, or of older runs the commit."""
    kinds = (("code", "code"), ("git", "commit"))
    return next((f"{word} {environment[name]}" for name, word in kinds if environment.get(name)), "unknown code")


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)
