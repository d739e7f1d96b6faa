"""Figures of final accuracies: against the neighbors' share of the loss, and ours beside the paper's."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mixnn.methods.mixture import share_and_scale
from mixnn.paper.plan import plan_row
from mixnn.paper.plots.material import Drawing, Lacking, Line, Material, Summary, caption
from mixnn.paper.plots.style import BLACK, BLUE, GRAY, PAGE, RED, Look, canvas
from mixnn.paper.render import cells, differences, measured, notes
from mixnn.paper.tables import METRICS, TABLES, number

LABELS = {"linear": "linear accuracy (%)", "knn": "kNN accuracy (%)"}


@dataclass(frozen=True)
class Family:
    """Rows with one marker, as (table, row)."""

    title: str
    marker: str
    rows: tuple[tuple[str, str], ...]

    @property
    def lines(self) -> list[Line]:
        labels = {"lambda": "MNN, lambda "}
        return [Line(t, name, Look(BLACK, marker=self.marker), labels.get(t, "") + name) for t, name in self.rows]


# Regression methods with one strong and one weak view, so that nothing else than share and scale differs.
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
# Runs that span the shares: without them there is little to see.
ENOUGH = tuple(
    Line(*row, Look(BLACK)) for row in (FAMILIES[0].rows[0], ("neighbors", "MNN K=5"), ("neighbors", "MSF K=5"))
)


class Point(NamedTuple):
    """One setting: where it lies, and what it scored."""

    rho: float
    scale: float
    marker: str
    value: float
    std: float = 0.0
    foreign: float | None = None  # share of neighbors that are not the anchor's own image, if that may differ from rho


def share(material: Material) -> Drawing:
    """Accuracy against the neighbors' share rho and the loss's scale s, the paper's and ours."""
    runs = _with_linear(material)
    panels = {"paper": _published(material), "ours": [_own(line, found, material) for line, found in runs.items()]}
    panels = {whose: points for whose, points in panels.items() if points}
    figure, axes = canvas(PAGE, 2.8, len(panels), sharex=True, sharey=True)
    for ax, (whose, points) in zip(axes, panels.items(), strict=True):
        beside = Beside()
        for point in points:
            _dot(ax, beside(point.rho), point)
        ax.set_title(f"{ax.get_title(loc='left')} {whose}".strip())
        ax.set(xlabel=r"neighbors' share $\rho$ of the loss's weights", ylabel=LABELS["linear"], xlim=(-0.04, 1))
        ax.tick_params(labelleft=True)
    _share_legend(figure)
    text = (
        "Linear accuracy against rho, the neighbors' share of the loss's weights, and s, the sum of the weights "
        "(random lambda at its mean, 0.5; re-normalisation neglected). Points of one share are drawn a little apart. "
        "Ours have no leaky queue, and one strong and one weak view."
    )
    if "paper" in panels:
        text += (
            " The paper's were made with a queue that let direction 2>1 find its own image: lines lead to "
            "rho(1 - 1/2K), the share of foreign neighbors if it always did; its BYOL is the authors' own run, with "
            "two strong views."
        )
    return Drawing(figure, caption(text, material.name, {line.title: found for line, found in runs.items()}))


def _place(line: Line, material: Material) -> tuple[float, float, int]:
    options = plan_row(line.row, material.data, [0], material.settings)[0].config.options
    return *share_and_scale(options), options.get("topk", 0)


def _published(material: Material) -> list[Point]:
    """The paper's points; and BYOL's of the authors' own run, as the paper copies another paper's."""
    points = []
    for line in (line for family in FAMILIES for line in family.lines):
        value = number(line.row, "paper", "linear", material.data)
        if value is not None:
            rho, scale, topk = _place(line, material)
            points.append(Point(rho, scale, line.look.marker, value, foreign=rho * (1 - 1 / (2 * topk))))
    byol = number(Line("main", "BYOL", Look(BLACK)).row, "fixed", "linear", material.data)
    return points if byol is None else [*points, Point(0.0, 1.0, FAMILIES[0].marker, byol)]


def _own(line: Line, runs: Sequence[Summary], material: Material) -> Point:
    values = [value for value in (measured("linear", run) for run in runs) if value is not None]
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    rho, scale, _ = _place(line, material)
    return Point(rho, scale, line.look.marker, statistics.fmean(values), std)


def _with_linear(material: Material) -> dict[Line, list[Summary]]:
    """The runs of all families that were probed; Lacking without those that span the shares."""
    for line, found in material.needed(ENOUGH, []).items():
        if not any(measured("linear", run) is not None for run in found):
            raise Lacking(f"a linear probe of {line.name}")
    every = [line for family in FAMILIES for line in family.lines]
    there = {
        line: [run for run in found if measured("linear", run) is not None]
        for line, found in material.optional(every, []).items()
    }
    return {line: found for line, found in there.items() if found}


def _fill(scale: float) -> dict[str, Any]:
    """Open blue markers where weights sum to 1, filled red ones where they sum to more."""
    color = RED if scale > 1.5 else BLUE
    return {"color": color, "markerfacecolor": color if scale > 1.5 else "white", "markersize": 4.6}


class Beside:
    """Points of one share a little apart, in turn to the right and to the left, for their bars to be seen."""

    def __init__(self) -> None:
        self.taken: Counter[float] = Counter()

    def __call__(self, rho: float) -> float:
        number = self.taken[round(rho, 6)]
        self.taken[round(rho, 6)] += 1
        return rho + 0.013 * (-(-number // 2) if number % 2 else -number // 2)


def _dot(ax: Axes, x: float, point: Point) -> None:
    if point.foreign is not None:
        ends, heights = [point.foreign, x], [point.value, point.value]
        ax.plot(ends, heights, color=GRAY, linewidth=0.6, marker="|", markevery=[0], zorder=1)
    bars: dict[str, Any] = {"elinewidth": 0.7, "capsize": 1.5, "capthick": 0.7} if point.std else {}
    std = [point.std] if point.std else None
    ax.errorbar([x], [point.value], yerr=std, fmt=point.marker, zorder=3, **_fill(point.scale), **bars)


def _share_legend(figure: Figure) -> None:
    def handle(marker: str, look: dict[str, Any], label: str) -> Line2D:
        return Line2D([], [], linestyle="none", marker=marker, label=label, **look)

    kinds = [
        handle(f.marker, {"color": BLACK, "markerfacecolor": "white", "markersize": 4.6}, f.title) for f in FAMILIES
    ]
    scales = [handle("o", _fill(s), f"s = {s:g}") for s in (1.0, 2.0)]
    figure.legend(handles=[*kinds, *scales], loc="outside upper center", ncols=8, columnspacing=1.0, handletextpad=0.1)


def main(material: Material) -> Drawing:
    """The main table as dots: the paper's numbers, those of the authors' fixed code, ours."""
    table = TABLES["main"]
    rows = cells(table, material.data, material.seeds, material.settings, material.done)
    metrics = [m for m in METRICS if any(row[m]["ours"] is not None for row in rows)]
    if not metrics:
        raise Lacking(f"any evaluated run of {material.making('main')}")
    figure, axes = canvas(PAGE, 0.9 + 0.2 * len(rows), len(metrics), sharey=True)
    for ax, metric in zip(axes, metrics, strict=True):
        for y, row in enumerate(rows):
            _compare(ax, y, row[metric])
        ax.set(xlabel=LABELS[metric], ylim=(len(rows) - 0.5, -0.5))
        ax.locator_params(axis="x", nbins=6)  # labels of four digits do not touch
        ax.tick_params(left=False)
        ax.spines["left"].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [row["name"] for row in rows])
    shown = {line.get_label() for ax in axes for line in ax.get_lines()}
    changed = [f"{name}={ours}" for name, (ours, _) in differences(table, material.data, material.settings).items()]
    names = {whose: whose for whose in WHOSE if whose in shown} | {"ours": ", ".join(["ours", *changed])}
    handles = [Line2D([], [], linestyle="none", label=name, **WHOSE[whose]) for whose, name in names.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, handletextpad=0.2)
    panels = [LABELS[m].removesuffix(" (%)") for m in metrics]
    panels = [f"{name} ({letter})" for name, letter in zip(panels, "ab", strict=False)] if panels[1:] else panels
    text = " ".join([f"Final {' and '.join(panels)}: {'; '.join(names.values())}.", *notes(rows)])
    found = {row.name: runs for row in table.rows if (runs := material.runs(row))}
    return Drawing(figure, caption(text, material.name, found))


WHOSE: dict[str, dict[str, Any]] = {
    "paper": {"marker": "o", "color": BLACK, "markerfacecolor": "white", "markersize": 5.5},
    "authors' fixed code": {"marker": "d", "color": BLUE, "markerfacecolor": "white", "markersize": 4.5},
    "ours": {"marker": "s", "color": RED, "markersize": 3.6},
}


def _compare(ax: Axes, y: int, cell: Mapping[str, Any]) -> None:
    """One row's dots on a line that is as long as they are apart."""
    values = dict(zip(WHOSE, (cell["paper"], cell["fixed"], cell["ours"]), strict=True))
    there = [value for value in values.values() if value is not None]
    ax.axhline(y, color="0.92", linewidth=0.6, zorder=0)
    if len(there) > 1:
        ax.plot([min(there), max(there)], [y, y], color="0.7", linewidth=1.4, zorder=1)
    for whose, value in values.items():
        if value is not None:
            ax.plot([value], [y], linestyle="none", label=whose, zorder=3, **WHOSE[whose])
    if cell["std"]:
        ax.errorbar(
            [cell["ours"]], [y], xerr=[cell["std"]], fmt="none", ecolor=RED, elinewidth=0.8, capsize=2, zorder=2
        )
