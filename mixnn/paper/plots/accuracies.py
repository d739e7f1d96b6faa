"""Figures of final accuracies: against the neighbors' share of the loss, and the main table as dots."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mixnn.methods.mixture import share_and_scale
from mixnn.paper.plan import Summary, plan_row, settings_off_recipe
from mixnn.paper.plan import accuracy as headline_accuracy
from mixnn.paper.plots.drawing import (
    BLACK,
    BLUE,
    GRAY,
    PAGE_WIDTH,
    RED,
    CannotDraw,
    Drawing,
    FinishedRuns,
    Line,
    LineStyle,
    accuracy_label,
    by_label,
    caption,
    make_figure,
)
from mixnn.paper.render import cells, notes
from mixnn.paper.tables import PROTOCOLS, TABLES, published


@dataclass(frozen=True)
class Family:
    """Rows that are drawn with the same marker, as (table, row)."""

    title: str
    marker: str
    rows: tuple[tuple[str, str], ...]

    @property
    def lines(self) -> list[Line]:
        labels = {"lambda": "MNN, lambda "}
        return [Line(t, name, LineStyle(BLACK, marker=self.marker), labels.get(t, "") + name) for t, name in self.rows]


# Regression methods with one strong and one weak view, so that only the share and the scale differ.
FAMILIES = (
    Family("BYOL", "s", (("controls", "BYOL (s/w)"), ("controls", "BYOL (s/w), times 2"))),
    Family(
        "MSF",
        "^",
        (
            *(("neighbors", f"MSF K={k}") for k in (1, 5, 10)),
            ("controls", "MSF, weights summing to 2"),
        ),
    ),
    Family("MSE, mixture", "v", (("weights", "MSE, mixture"),)),
    Family("WSE, no mixture", "D", (("weights", "WSE"), ("controls", "WSE, no mixture, summing to 1"))),
    Family("(1.5, 0.5/K), no mixture", "P", (("controls", "re-weighting (1.5, 0.5/K), no mixture"),)),
    Family(
        "MNN",
        "o",
        (
            *(("neighbors", f"MNN K={k}") for k in (1, 5, 10)),
            *(("lambda", f"0.{lam}") for lam in (1, 3, 5, 7, 9)),
            ("controls", "MNN, weights summing to 1"),
        ),
    ),
)
# The runs that span the range of shares; without them there is little to see.
REQUIRED = tuple(
    Line(*row, LineStyle(BLACK)) for row in (FAMILIES[0].rows[0], ("neighbors", "MNN K=5"), ("neighbors", "MSF K=5"))
)


class Point(NamedTuple):
    """The linear accuracy of one row."""

    rho: float  # the neighbors' share of the loss's weights
    scale: float  # the sum of the weights
    marker: str
    accuracy: float
    std: float = 0.0
    foreign: float | None = None  # share of neighbors that are not the anchor's own image, if it may differ from rho


def share(finished: FinishedRuns) -> Drawing:
    """Linear accuracy against the neighbors' share rho and the loss's scale s, the paper's and ours."""
    runs = _linear_runs(finished)
    panels = {
        "paper": _paper_points(finished),
        "ours": [_our_point(line, found, finished) for line, found in runs.items()],
    }
    panels = {source: points for source, points in panels.items() if points}
    figure, axes = make_figure(PAGE_WIDTH, 2.8, len(panels), sharex=True, sharey=True)
    for ax, (source, points) in zip(axes, panels.items(), strict=True):
        for x, point in zip(_side_by_side(point.rho for point in points), points, strict=True):
            _draw_point(ax, x, point)
        ax.set_title(f"{ax.get_title(loc='left')} {source}".strip())
        xlabel = r"neighbors' share $\rho$ of the loss's weights"
        ax.set(xlabel=xlabel, ylabel=accuracy_label("linear"), xlim=(-0.04, 1))
        ax.tick_params(labelleft=True)
    _share_legend(figure)
    text = (
        "Linear accuracy against rho, the neighbors' share of the loss's weights, and s, the sum of the weights "
        "(random lambda at its mean, 0.5; re-normalization neglected). Points with the same share are drawn a little "
        "apart. Our runs have no leaky queue, and one strong and one weak view."
    )
    if "paper" in panels:
        text += (
            " The paper's runs had a queue in which direction 2>1 could find the anchor's own image: lines lead to "
            "rho(1 - 1/2K), the share of other images if it always did. The paper's BYOL is the authors' own run, "
            "with two strong views."
        )
    return Drawing(figure, caption(text, finished.data_name, by_label(runs)))


def _share_scale_and_topk(line: Line, finished: FinishedRuns) -> tuple[float, float, int]:
    options = plan_row(line.row, finished.data, [0], finished.settings)[0].config.options
    return *share_and_scale(options), options.get("topk", 0)


def _paper_points(finished: FinishedRuns) -> list[Point]:
    """The paper's points, and BYOL's of the authors' own run, since the paper copies it from another paper."""
    points = []
    for line in (line for family in FAMILIES for line in family.lines):
        value = published(line.row, "paper", "linear", finished.data)
        if value is not None:
            rho, scale, topk = _share_scale_and_topk(line, finished)
            points.append(Point(rho, scale, line.style.marker, value, foreign=rho * (1 - 1 / (2 * topk))))
    byol = published(Line("main", "BYOL", LineStyle(BLACK)).row, "fixed", "linear", finished.data)
    return points if byol is None else [*points, Point(0.0, 1.0, FAMILIES[0].marker, byol)]


def _our_point(line: Line, runs: Sequence[Summary], finished: FinishedRuns) -> Point:
    values = [value for run in runs if (value := headline_accuracy(run, "linear")) is not None]
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    rho, scale, _ = _share_scale_and_topk(line, finished)
    return Point(rho, scale, line.style.marker, statistics.fmean(values), std)


def _linear_runs(finished: FinishedRuns) -> dict[Line, list[Summary]]:
    """The runs of all families that have a linear accuracy; CannotDraw without those that span the shares."""
    every = [line for family in FAMILIES for line in family.lines]
    probed = {
        line: [run for run in found if headline_accuracy(run, "linear") is not None]
        for line, found in {**finished.required(REQUIRED, []), **finished.optional(every, [])}.items()
    }
    for line in REQUIRED:
        if not probed[line]:
            raise CannotDraw(f"{line.name} has no linear probe: run {finished.command(line.table)}")
    return {line: probed[line] for line in every if probed.get(line)}


def _marker_look(scale: float) -> dict[str, Any]:
    """Open blue markers if the weights sum to 1, filled red ones if they sum to 2."""
    color = RED if scale > 1.5 else BLUE
    return {"color": color, "markerfacecolor": color if scale > 1.5 else "white", "markersize": 4.6}


def _side_by_side(shares: Iterable[float]) -> list[float]:
    """Positions on the axis; equal shares lie a little apart, to the right and left in turn, so that bars are seen."""
    positions, count = [], Counter[float]()
    for rho in shares:
        number = count[round(rho, 6)]
        count[round(rho, 6)] += 1
        positions.append(rho + 0.013 * (-(-number // 2) if number % 2 else -number // 2))
    return positions


def _draw_point(ax: Axes, x: float, point: Point) -> None:
    if point.foreign is not None:
        ends, heights = [point.foreign, x], [point.accuracy, point.accuracy]
        ax.plot(ends, heights, color=GRAY, linewidth=0.6, marker="|", markevery=[0], zorder=1)
    bars: dict[str, Any] = {"elinewidth": 0.7, "capsize": 1.5, "capthick": 0.7} if point.std else {}
    std = [point.std] if point.std else None
    ax.errorbar([x], [point.accuracy], yerr=std, fmt=point.marker, zorder=3, **_marker_look(point.scale), **bars)


def _share_legend(figure: Figure) -> None:
    def handle(marker: str, style: dict[str, Any], label: str) -> Line2D:
        return Line2D([], [], linestyle="none", marker=marker, label=label, **style)

    kinds = [
        handle(f.marker, {"color": BLACK, "markerfacecolor": "white", "markersize": 4.6}, f.title) for f in FAMILIES
    ]
    scales = [handle("o", _marker_look(s), f"s = {s:g}") for s in (1.0, 2.0)]
    figure.legend(handles=[*kinds, *scales], loc="outside upper center", ncols=8, columnspacing=1.0, handletextpad=0.1)


SOURCES: dict[str, dict[str, Any]] = {
    "paper": {"marker": "o", "color": BLACK, "markerfacecolor": "white", "markersize": 5.5},
    "authors' fixed code": {"marker": "d", "color": BLUE, "markerfacecolor": "white", "markersize": 4.5},
    "ours": {"marker": "s", "color": RED, "markersize": 3.6},
}


def main(finished: FinishedRuns) -> Drawing:
    """The main table as dots: the numbers of the paper, of the authors' fixed code, and ours."""
    table = TABLES["main"]
    rows = cells(table, finished.data, finished.seeds, finished.settings, finished.summaries, {})
    protocols = [p for p in PROTOCOLS if any(row[p]["ours"] is not None for row in rows)]
    if not protocols:
        raise CannotDraw(f"there is no evaluated run: run {finished.command('main')}")
    figure, axes = make_figure(PAGE_WIDTH, 0.9 + 0.2 * len(rows), len(protocols), sharey=True)
    for ax, protocol in zip(axes, protocols, strict=True):
        for y, row in enumerate(rows):
            _draw_row(ax, y, row[protocol])
        ax.set(xlabel=accuracy_label(protocol), ylim=(len(rows) - 0.5, -0.5))
        ax.locator_params(axis="x", nbins=6)  # labels of four digits do not touch
        ax.tick_params(left=False)
        ax.spines["left"].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [row["name"] for row in rows])
    shown = {line.get_label() for ax in axes for line in ax.get_lines()}
    changed = settings_off_recipe(table, finished.data, finished.settings)
    names = {source: source for source in SOURCES if source in shown}
    names["ours"] = ", ".join(["ours", *(f"{name}={ours}" for name, (ours, _) in changed.items())])
    handles = [Line2D([], [], linestyle="none", label=name, **SOURCES[source]) for source, name in names.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, handletextpad=0.2)
    panels = [f"{PROTOCOLS[p].label} accuracy" for p in protocols]
    panels = [f"{name} ({letter})" for name, letter in zip(panels, "ab", strict=False)] if panels[1:] else panels
    text = " ".join([f"Final {' and '.join(panels)}: {'; '.join(names.values())}.", *notes(rows)])
    found = {row.name: runs for row in table.rows if (runs := finished.of_row(row))}
    return Drawing(figure, caption(text, finished.data_name, found))


def _draw_row(ax: Axes, y: int, cell: Mapping[str, Any]) -> None:
    """The dots of one row, and a line that connects them."""
    values = dict(zip(SOURCES, (cell["paper"], cell["fixed"], cell["ours"]), strict=True))
    present = [value for value in values.values() if value is not None]
    ax.axhline(y, color="0.92", linewidth=0.6, zorder=0)
    if len(present) > 1:
        ax.plot([min(present), max(present)], [y, y], color="0.7", linewidth=1.4, zorder=1)
    for source, value in values.items():
        if value is not None:
            ax.plot([value], [y], linestyle="none", label=source, zorder=3, **SOURCES[source])
    if cell["std"]:
        ax.errorbar(
            [cell["ours"]], [y], xerr=[cell["std"]], fmt="none", ecolor=RED, elinewidth=0.8, capsize=2, zorder=2
        )
