"""How every figure looks, and how it becomes files.

Sizes are those of a journal's column and page, so that nothing is scaled in print. Colors are Okabe and Ito's, which
color-blind readers can tell apart; a line also differs from others by dashes and markers, so that nothing is lost in
grayscale. Files depend on the data alone: no date, no version, no user's settings, fonts as outlines.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

COLUMN, PAGE = 3.4, 7.0  # widths in inches
DPI = 200
BLUE, RED, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GRAY = "#E69F00", "#56B4E9", "#000000", "#767676"
SOLID, DASHED, DOTTED, DASHDOT = "-", (0, (4, 1.6)), (0, (1, 1.4)), (0, (5, 1.4, 1, 1.4))
HALO = patheffects.withStroke(linewidth=1.8, foreground="white")  # around text that may lie on data
NUM_MARKERS = 8  # on a long line
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


class Look(NamedTuple):
    """Of a line; an open marker tells a second line of the same color apart."""

    color: str
    dash: Any = SOLID
    marker: str = "o"
    filled: bool = True


@contextmanager
def styled() -> Iterator[None]:
    """The style, and nothing of the user's own; all as it was afterwards."""
    import matplotlib.style

    with matplotlib.style.context(STYLE, after_reset=True):
        yield


def canvas(width: float, height: float, columns: int = 1, rows: int = 1, **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure and its panels row by row, lettered if there are several."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.07, h_pad=0.05)  # type: ignore[union-attr, call-arg]
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for letter, ax in zip("abcdef", axes if len(axes) > 1 else (), strict=False):
        ax.set_title(f"({letter})")
    return figure, axes


def lay_out(figure: Figure) -> None:
    """Give the panels their places; without drawing, which takes longer."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)


def draw_line(
    ax: Axes, x: np.ndarray, y: np.ndarray, look: Look, label: str, std: np.ndarray | None = None, turn: int = 0
) -> None:
    """A curve with few markers, `turn` shifting them against those of other curves; a band of one deviation."""
    every = max(1, len(x) // NUM_MARKERS)
    ax.plot(
        x,
        y,
        color=look.color,
        linestyle=look.dash,
        marker=look.marker,
        markerfacecolor=look.color if look.filled else "white",
        markevery=(turn * every // 5 % every, every),
        label=label,
    )
    if std is not None:
        ax.fill_between(x, y - std, y + std, color=look.color, alpha=0.18, linewidth=0)


def reference(ax: Axes, y: float, text: str, above: bool = True) -> None:
    """A level that curves are to be compared with, named on the spot."""
    ax.axhline(y, color=GRAY, linewidth=0.7, linestyle=(0, (1, 2)), zorder=0)
    place: dict[str, Any] = {"xytext": (0, 1.5 if above else -2), "textcoords": "offset points"}
    where: dict[str, Any] = {"ha": "right", "va": "bottom" if above else "top"}
    where |= {"fontsize": 6.5, "color": GRAY, "path_effects": [HALO]}
    ax.annotate(text, (1, y), xycoords=ax.get_yaxis_transform(), **place, **where)


def apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions in the same order, at least `gap` from each other, as near to the wanted ones as can be."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    blocks: list[tuple[float, int]] = []  # labels that touch move together: their common shift, and their number
    for rank, i in enumerate(order):
        shift, count = wanted[i] - rank * gap, 1
        while blocks and blocks[-1][0] >= shift:
            before, number = blocks.pop()
            shift, count = (before * number + shift * count) / (number + count), number + count
        blocks.append((shift, count))
    shifts = [shift for shift, count in blocks for _ in range(count)]
    placed = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        placed[i] = shifts[rank] + rank * gap
    return placed


def label_ends(ax: Axes) -> None:
    """A sample and the name of each curve at its right end, for a legend; call it when the axes have their limits."""
    figure = ax.get_figure()
    assert isinstance(figure, Figure)
    lay_out(figure)
    low, high = ax.get_ylim()
    gap = 8.5 / 72 * figure.dpi / ax.get_window_extent().height * (high - low)  # a line of 7 point text
    lines = [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")]
    ends = [np.asarray(line.get_xydata())[-1] for line in lines]
    for line, (x, y), height in zip(lines, ends, apart([end[1] for end in ends], gap), strict=True):
        beside = ax.get_yaxis_transform()
        sample = Line2D([1.05, 1.075, 1.1], [height] * 3)
        sample.update_from(line)
        sample.set(transform=beside, clip_on=False, markevery=[1], label="_sample")
        ax.add_artist(sample)
        ax.text(1.115, height, str(line.get_label()), transform=beside, va="center", fontsize=7)
        ax.annotate(
            "",
            (x, y),
            xytext=(1.05, height),
            textcoords=beside,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "linewidth": 0.4,
                "color": GRAY,
                "shrinkA": 1,
                "shrinkB": 2,
            },
        )


def after(epoch: float, ax: Axes) -> tuple[float, float]:
    """Limits for the part of the curves that follows an epoch: the first ones would leave the rest no room."""
    bands = [np.asarray(path.vertices) for band in ax.collections for path in band.get_paths()]
    points = np.concatenate([*(np.asarray(line.get_xydata()) for line in ax.get_lines()), *bands])
    shown = points[points[:, 0] > epoch] if (points[:, 0] > epoch).any() else points
    low, high = shown[:, 1].min(), shown[:, 1].max()
    margin = 0.06 * (high - low) or 0.1
    return low - margin, high + margin


def legend(figure: Figure, ax: Axes, columns: int = 4) -> None:
    """One legend for all panels, above them, of the curves that this one has."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(columns, len(labels)), columnspacing=1.6)


def encode(figure: Figure) -> dict[str, bytes]:
    """The figure by the ending of its file: svg, png."""
    metadata: dict[str, dict[str, Any]] = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
    lay_out(figure)
    figure.set_layout_engine("none")  # once, for both files
    files = {}
    for kind, about in metadata.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=DPI, metadata=about)
        files[kind] = buffer.getvalue()
    return files
