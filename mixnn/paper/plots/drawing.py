"""What all figures share: the runs they show, how curves look, the caption, and the files.

Widths are those of a journal's column and page, so that nothing is scaled in print. Colors are Okabe and Ito's, which
color-blind readers can tell apart. Curves also differ in dashes and markers, so that nothing is lost in grayscale.
Files depend on the runs alone: they contain no date or version, ignore the user's settings, and have fonts as outlines.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from mixnn.config import calling, on_command_line
from mixnn.paper.plan import RunKey, Summaries, Summary, key_of, load_finished, runs_of
from mixnn.paper.tables import PROTOCOLS, TABLES, Row
from mixnn.progress import plural
from mixnn.runs import Run

COLUMN_WIDTH, PAGE_WIDTH = 3.4, 7.0  # inches
DPI = 200
BLUE, RED, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GRAY = "#E69F00", "#56B4E9", "#000000", "#767676"
SOLID, DASHED, DOTTED, DASHDOT = "-", (0, (4, 1.6)), (0, (1, 1.4)), (0, (5, 1.4, 1, 1.4))
HALO = patheffects.withStroke(linewidth=1.8, foreground="white")  # around text that may lie on data
NUM_MARKERS = 8  # on a long curve
STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.2,
    "lines.markeredgewidth": 0.8,
    "svg.hashsalt": "mixnn",
    "svg.fonttype": "path",
}


class CannotDraw(Exception):
    """A figure cannot be drawn; the text says why, and what to do."""


class Drawing(NamedTuple):
    figure: Figure
    caption: str


# Runs


class LineStyle(NamedTuple):
    """Color, dash and marker of a curve; open markers tell a second curve of the same color apart."""

    color: str
    dash: Any = SOLID
    marker: str = "o"
    filled: bool = True


@dataclass(frozen=True)
class Line:
    """A line in a figure: the row of a table whose runs it shows, its style and its label."""

    table: str
    name: str
    style: LineStyle
    custom_label: str = ""

    @property
    def label(self) -> str:
        return self.custom_label or self.name

    @property
    def row(self) -> Row:
        return next(row for row in TABLES[self.table].rows if row.name == self.name)


RunsByLine = Mapping[Line, Sequence[Summary]]


@dataclass(frozen=True)
class FinishedRuns:
    """The finished runs on one data set that figures are drawn from."""

    data: str
    settings: Mapping[str, Any]
    results: Path
    summaries: Summaries
    folders: tuple[Run, ...]  # the run folders among them, for figures that need a checkpoint

    @staticmethod
    def load(results: Path, runs: Iterable[Run], data: str, settings: Mapping[str, Any]) -> FinishedRuns:
        """The summaries in the folder `results`, and the run folders `runs` that are on this data set."""
        folders = tuple(run for run in runs if run.config.data == data)
        summaries: dict[RunKey, Summary] = dict(load_finished(results))
        for run in folders:
            summary = run.summary()
            summaries[key_of(summary)] = summary
        return FinishedRuns(data, settings, results, summaries, folders)

    @property
    def data_name(self) -> str:
        """The data set's name in file names and captions."""
        return Path(self.data).name

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for _, seed in self.summaries})

    def of_row(self, row: Row) -> list[Summary]:
        """The finished runs of a row, by seed."""
        return runs_of(row, self.data, self.seeds, self.settings, self.summaries)

    def required(self, lines: Sequence[Line], columns: Sequence[str]) -> dict[Line, list[Summary]]:
        """The runs of each line that logged all columns; CannotDraw if a line has none."""
        finished = {line: self.of_row(line.row) for line in lines}
        complete = {line: [run for run in runs if _has_columns(run, columns)] for line, runs in finished.items()}
        missing: dict[str, list[str]] = {}
        for line in (line for line in lines if not finished[line]):
            missing.setdefault(line.table, []).append(line.name)
        reasons = [
            f"missing row{'s' * (len(names) > 1)} {'; '.join(names)}: run {self.command(table)}"
            for table, names in missing.items()
        ]
        for line in (line for line in lines if finished[line] and not complete[line]):
            unlogged = [c for c in columns if not any(_has_columns(run, [c]) for run in finished[line])]
            reasons.append(f"the log of {line.label} has no {', '.join(unlogged or columns)}")
        if reasons:
            raise CannotDraw("; ".join(reasons))
        return complete

    def optional(self, lines: Sequence[Line], columns: Sequence[str]) -> dict[Line, list[Summary]]:
        """The runs of each line that logged all columns, without lines that have none."""
        found = {line: [run for run in self.of_row(line.row) if _has_columns(run, columns)] for line in lines}
        return {line: runs for line, runs in found.items() if runs}

    def command(self, table: str) -> str:
        """The command or call that makes a table's runs."""
        given: dict[str, Any] = {"data": self.data} if self.data != "cifar10" else {}
        given |= {"results": str(self.results)} if self.results != Path("results") else {}
        if not on_command_line():
            return f"`{calling('reproduce', table, **given, **self.settings)}`"
        words = [word for name, value in self.settings.items() for word in ("--setting", f"{name}={value}")]
        return f"`{' '.join([calling('reproduce', table, **given), *map(shlex.quote, words)])}`"


def _has_columns(run: Summary, columns: Sequence[str]) -> bool:
    return all(any(column in record for record in run["metrics"]) for column in columns)


class Curve(NamedTuple):
    """A number over epochs, as the mean over seeds; `std` is None if there is one seed."""

    epochs: np.ndarray
    mean: np.ndarray
    std: np.ndarray | None

    @staticmethod
    def over_seeds(epochs: Sequence[int], values: np.ndarray) -> Curve:
        """The curve of values (seeds, epochs)."""
        return Curve(np.array(epochs), values.mean(0), values.std(0, ddof=1) if len(values) > 1 else None)

    @staticmethod
    def logged(runs: Sequence[Summary], column: str, minus: str = "") -> Curve:
        """A column of the runs' logs, minus another one if given, at the epochs where all runs have it."""
        columns = [column, minus] if minus else [column]
        logs = [
            {r["epoch"]: r[column] - (r[minus] if minus else 0) for r in run["metrics"] if all(c in r for c in columns)}
            for run in runs
        ]
        epochs = sorted(set.intersection(*(set(log) for log in logs)))
        if not epochs:
            raise CannotDraw(f"there is no epoch at which all runs logged {column}")
        return Curve.over_seeds(epochs, np.array([[log[epoch] for epoch in epochs] for log in logs], dtype=float))


# Drawing


@contextmanager
def figure_style() -> Iterator[None]:
    """STYLE instead of the user's own settings, which are restored afterwards."""
    import matplotlib.style

    with matplotlib.style.context(STYLE, after_reset=True):
        yield


def make_figure(
    width: float, height: float, columns: int = 1, rows: int = 1, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its panels row by row, with letters if there are several."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.07, h_pad=0.05)  # type: ignore[union-attr, call-arg]
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for letter, ax in zip("abcdef", axes if len(axes) > 1 else (), strict=False):
        ax.set_title(f"({letter})")
    return figure, axes


def apply_layout(figure: Figure) -> None:
    """Place the panels without drawing, which would take longer."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)


def draw_curve(ax: Axes, curve: Curve, style: LineStyle, label: str, index: int = 0) -> None:
    """A curve with a few markers and a band of one standard deviation.

    `index` is the curve's number in its panel: markers of different curves are shifted against each other.
    """
    x, y, std = curve
    every = max(1, len(x) // NUM_MARKERS)
    ax.plot(
        x,
        y,
        color=style.color,
        linestyle=style.dash,
        marker=style.marker,
        markerfacecolor=style.color if style.filled else "white",
        markevery=(index * every // 5 % every, every),
        label=label,
    )
    if std is not None:
        ax.fill_between(x, y - std, y + std, color=style.color, alpha=0.18, linewidth=0)


def draw_over_epochs(ax: Axes, curve: Curve, style: LineStyle, label: str, index: int = 0) -> None:
    """A curve over epochs, on an axis that has integer ticks."""
    ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1))
    draw_curve(ax, curve, style, label, index)


def draw_column(ax: Axes, runs: RunsByLine, column: str) -> None:
    """A column of the log over epochs, one curve per line."""
    for index, (line, found) in enumerate(runs.items()):
        draw_over_epochs(ax, Curve.logged(found, column), line.style, line.label, index)


def draw_reference(ax: Axes, y: float, text: str, above: bool = True) -> None:
    """A dotted level to compare curves with, and its name at the right end."""
    ax.axhline(y, color=GRAY, linewidth=0.7, linestyle=(0, (1, 2)), zorder=0)
    place: dict[str, Any] = {"xytext": (0, 1.5 if above else -2), "textcoords": "offset points"}
    align: dict[str, Any] = {"ha": "right", "va": "bottom" if above else "top"}
    style: dict[str, Any] = {"fontsize": 6.5, "color": GRAY, "path_effects": [HALO]}
    ax.annotate(text, (1, y), xycoords=ax.get_yaxis_transform(), **place, **align, **style)


def spread_labels(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions in the same order, at least `gap` apart and as near as possible (least squares) to the wanted ones."""
    from sklearn.isotonic import isotonic_regression

    order = np.argsort(wanted, kind="stable")
    offsets = gap * np.arange(len(order))
    positions = np.empty(len(order))
    positions[order] = isotonic_regression(np.asarray(wanted, dtype=float)[order] - offsets) + offsets
    return positions.tolist()


def label_ends(ax: Axes) -> None:
    """A legend at the curves' right ends: a sample and the label of each; call it when the axes have their limits."""
    figure = ax.get_figure()
    assert isinstance(figure, Figure)
    apply_layout(figure)
    low, high = ax.get_ylim()
    gap = 8.5 / 72 * figure.dpi / ax.get_window_extent().height * (high - low)  # a line of 7 point text
    lines = [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")]
    ends = [np.asarray(line.get_xydata())[-1] for line in lines]
    transform = ax.get_yaxis_transform()  # x as a share of the panel's width, y as data
    for line, (x, y), height in zip(lines, ends, spread_labels([end[1] for end in ends], gap), strict=True):
        sample = Line2D([1.05, 1.075, 1.1], [height] * 3)
        sample.update_from(line)
        sample.set(transform=transform, clip_on=False, markevery=[1], label="_sample")
        ax.add_artist(sample)
        ax.text(1.115, height, str(line.get_label()), transform=transform, va="center", fontsize=7)
        connector = {"arrowstyle": "-", "linewidth": 0.4, "color": GRAY, "shrinkA": 1, "shrinkB": 2}
        place: dict[str, Any] = {"xytext": (1.05, height), "textcoords": transform, "annotation_clip": False}
        ax.annotate("", (x, y), **place, arrowprops=connector)


def limits_after(epoch: float, ax: Axes) -> tuple[float, float]:
    """Limits of the y-axis that fit the curves after an epoch; earlier values would leave them little room."""
    bands = [np.asarray(path.vertices) for band in ax.collections for path in band.get_paths()]
    points = np.concatenate([*(np.asarray(line.get_xydata()) for line in ax.get_lines()), *bands])
    shown = points[points[:, 0] > epoch] if (points[:, 0] > epoch).any() else points
    low, high = shown[:, 1].min(), shown[:, 1].max()
    margin = 0.06 * (high - low) or 0.1
    return low - margin, high + margin


def shared_legend(figure: Figure, ax: Axes, columns: int = 4) -> None:
    """One legend above all panels, with the curves of the panel `ax`."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(columns, len(labels)), columnspacing=1.6)


def accuracy_label(protocol: str) -> str:
    """Axis label of an accuracy."""
    return f"{PROTOCOLS[protocol].label} accuracy (%)"


# Caption and files


def by_label(runs: RunsByLine) -> dict[str, Sequence[Summary]]:
    return {line.label: found for line, found in runs.items()}


def caption(text: str, data: str, runs: Mapping[str, Sequence[Summary]]) -> str:
    """What the figure shows, then the seeds, epochs, device and code of the runs, which are given by label."""
    band = " Bands and bars: one standard deviation over n seeds." if any(len(r) > 1 for r in runs.values()) else ""
    groups: dict[str, list[str]] = {}
    for label, summaries in runs.items():
        groups.setdefault(_description(summaries), []).append(label)
    described = " ".join(f"Runs with {description}: {'; '.join(labels)}." for description, labels in groups.items())
    return f"{text}{band} Data: {data}. {described}\n"


def _description(summaries: Sequence[Summary]) -> str:
    """Seeds, epochs, device and code of runs with one configuration."""
    seeds = ", ".join(sorted({str(run["config"]["seed"]) for run in summaries}, key=int))
    epochs = plural(summaries[0]["config"]["epochs"], "epoch")
    devices = ", ".join(sorted({run["environment"].get("device") or "unknown device" for run in summaries}))
    code = ", ".join(sorted({_code_version(run["environment"]) for run in summaries}))
    return f"n = {len(summaries)} (seed{'s' * (len(summaries) > 1)} {seeds}), {epochs}, {devices}, {code}"


def _code_version(environment: Mapping[str, Any]) -> str:
    """The digest of the package's files or, for older runs, the commit."""
    kinds = (("code", "code"), ("git", "commit"))
    return next((f"{word} {environment[name]}" for name, word in kinds if environment.get(name)), "unknown code")


def encode(figure: Figure) -> dict[str, bytes]:
    """The content of the figure's files by suffix: svg, png."""
    metadata: dict[str, dict[str, Any]] = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
    apply_layout(figure)
    figure.set_layout_engine("none")  # once, for both files
    files = {}
    for suffix, about in metadata.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, dpi=DPI, metadata=about)
        files[suffix] = buffer.getvalue()
    return files
