"""Figures over epochs: kNN of all methods, purity, attention (CAS), purity by rank, and the effect of mixing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes

from mixnn.config import setting
from mixnn.paper.plan import Summary
from mixnn.paper.plots.drawing import (
    BLACK,
    BLUE,
    COLUMN_WIDTH,
    DASHDOT,
    DASHED,
    DOTTED,
    GREEN,
    ORANGE,
    PAGE_WIDTH,
    PURPLE,
    RED,
    SKY,
    SOLID,
    CannotDraw,
    Curve,
    Drawing,
    FinishedRuns,
    Line,
    LineStyle,
    RunsByLine,
    accuracy_label,
    by_label,
    caption,
    draw_column,
    draw_curve,
    draw_over_epochs,
    draw_reference,
    label_ends,
    limits_after,
    make_figure,
    shared_legend,
)
from mixnn.paper.tables import PAPER_DATASETS

FIRST, SECOND, THIRD, FOURTH = (
    LineStyle(BLUE),
    LineStyle(RED, DASHED, "s"),
    LineStyle(GREEN, DASHDOT, "^"),
    LineStyle(PURPLE, DOTTED, "D"),
)
TOP = 1.03  # upper limit of axes for shares, so that markers at 1 are not cut off


@dataclass(frozen=True)
class Purity:
    """A figure of purity over epochs."""

    compared: str  # ends the caption's first sentence
    lines: tuple[Line, ...]
    zoom: bool = True  # a second panel for the last quarter, where the curves lie close to each other

    def __call__(self, finished: FinishedRuns) -> Drawing:
        runs = finished.required(self.lines, ["purity"])
        figure, axes = make_figure(PAGE_WIDTH, 2.3, 2) if self.zoom else make_figure(COLUMN_WIDTH, 2.3)
        draw_with_end(axes, "purity", "purity", runs, runs)
        axes[0].set_ylim(0, TOP)
        label_ends(axes[-1])
        text = f"Purity over training: share of neighbors with the anchor's label, {self.compared}."
        text += " (b) enlarges the end of (a)." if self.zoom else ""
        return Drawing(figure, caption(text, finished.data_name, by_label(runs)))


def _augmentation_lines(method: str, dash: object, filled: bool) -> tuple[Line, ...]:
    looks = {"w/w": (ORANGE, "^"), "s/w": (BLUE, "o"), "s/s": (RED, "s")}
    return tuple(
        Line("augmentation", f"{method} ({views})", LineStyle(color, dash, marker, filled), f"{method} {views}")
        for views, (color, marker) in looks.items()
    )


METHODS = tuple(
    Line("main", name, style)
    for name, style in {
        "MNN": LineStyle(BLUE),
        "MSF": LineStyle(SKY, DASHED, "s"),
        "CMSF": LineStyle(SKY, DOTTED, "^", filled=False),
        "BYOL": LineStyle(GREEN, DASHED, "D"),
        "UnMix": LineStyle(GREEN, DOTTED, "v", filled=False),
        "SimCLR": LineStyle(RED, DASHED, "s", filled=False),
        "NNCLR": LineStyle(RED, DOTTED, "^"),
        "SNCLR": LineStyle(RED, DASHDOT, "o"),
        "MoCo v2": LineStyle(ORANGE, DASHED, "D", filled=False),
        "SCE": LineStyle(ORANGE, DOTTED, "v"),
        "ReSSL": LineStyle(ORANGE, DASHDOT, "o", filled=False),
        "Supervised": LineStyle(BLACK, SOLID, "x"),
    }.items()
)

PURITY = {
    "purity-methods": Purity(
        "in methods with five neighbors", tuple(m for m in METHODS if m.name in ("MNN", "MSF", "CMSF", "SNCLR"))
    ),
    "purity-augmentation": Purity(
        "by the augmentation of the two views (s strong, w weak)",
        (*_augmentation_lines("MSF", DASHED, False), *_augmentation_lines("MNN", SOLID, True)),
    ),
    "purity-neighbors": Purity(
        "by the number of neighbors K",
        tuple(
            Line("neighbors", f"MNN K={k}", style, f"K = {k}") for k, style in ((1, SECOND), (5, FIRST), (10, THIRD))
        ),
    ),
    "purity-support": Purity(
        "by the size Q of the support set",
        tuple(
            Line("support", str(size), style, f"Q = {size}")
            for size, style in ((2048, SECOND), (4096, FIRST), (8192, THIRD), (16384, FOURTH))
        ),
    ),
    "purity-selection": Purity(
        "by how neighbors are selected from the support set: the nearest, at random, or the nearest of the anchor's "
        "label",
        (
            Line("selection", "MNN (labels)", THIRD, "labels"),
            Line("selection", "MNN", FIRST, "nearest"),
            Line("selection", "MNN (random)", SECOND, "random"),
        ),
        zoom=False,
    ),
}


def methods(finished: FinishedRuns) -> Drawing:
    """kNN accuracy of all methods that have a run; a second panel enlarges the end, without the supervised one."""
    runs = finished.optional(METHODS, ["knn"])
    if not runs:
        raise CannotDraw(f"no method has a run: run {finished.command('main')}")
    figure, axes = make_figure(PAGE_WIDTH, 3.2, 2)
    unsupervised = {line: found for line, found in runs.items() if line.name != "Supervised"}
    draw_with_end(axes, "knn", accuracy_label("knn"), runs, unsupervised or runs)
    label_ends(axes[1])
    for line in runs.keys() - unsupervised.keys() if unsupervised else ():
        curve = Curve.logged(runs[line], "knn")
        end = float(curve.epochs[-1]), float(curve.mean[-1])
        axes[0].annotate(line.label, end, (0, 4), textcoords="offset points", ha="right", fontsize=7)
    text = "kNN accuracy during training (a). (b) enlarges the end of (a), without the supervised reference."
    return Drawing(figure, caption(text, finished.data_name, by_label(runs)))


CAS = Line("weights", "CAS", SECOND)
OTHER_WEIGHTS = (Line("weights", "WSE", FIRST), Line("weights", "MSE (MSF)", THIRD))
OPTIONAL_WEIGHTS = (
    Line("weights", "WSE, mixture (MNN)", FOURTH),
    Line("weights", "CAS, mixture", LineStyle(ORANGE, DASHED, "s", filled=False)),
    Line("controls", "CAS, gradient through it", LineStyle(BLACK, DOTTED, "x")),
    Line("controls", "CAS, mixture, gradient through it", LineStyle(BLACK, DASHDOT, "P", filled=False)),
)


def attention(finished: FinishedRuns) -> Drawing:
    """Inconsistency and entropy of the attention; purity and spread with it and with other weights."""
    common = ["purity", "inconsistency", "spread"]
    runs = finished.required((CAS, *OTHER_WEIGHTS), common)
    runs |= finished.required((CAS,), [*common, "cas_entropy", "cas_entropy_0.1"])
    runs |= finished.optional(OPTIONAL_WEIGHTS, common)
    topk = runs[CAS][0]["config"]["options"]["topk"]
    figure, (orders, entropies, purities, spreads) = make_figure(PAGE_WIDTH, 4.4, 2, 2)
    for ax, column in ((orders, "inconsistency"), (purities, "purity"), (spreads, "spread")):
        draw_column(ax, runs, column)
        ax.set(xlabel="epoch", ylabel=column, ylim=(0, TOP))
    draw_reference(orders, 1 - 1 / topk, "random orders")
    for i, (column, style, label) in enumerate(
        (
            ("cas_entropy", CAS.style, "temperature 1"),
            ("cas_entropy_0.1", LineStyle(SKY, DOTTED, "v"), "temperature 0.1"),
        )
    ):
        draw_over_epochs(entropies, Curve.logged(runs[CAS], column), style, label, i)
    draw_reference(entropies, math.log(topk), f"ln {topk}")
    draw_reference(entropies, least_entropy(topk), "least possible at temperature 1", above=False)
    entropies.set(xlabel="epoch", ylabel="entropy of CAS (nats)", ylim=(0, 1.15 * math.log(topk)))
    entropies.legend(loc="lower right")
    shared_legend(figure, orders, columns=3)
    text = (
        "Attention (CAS) over training. (a) Share of ranks at which the orders by attention and by nearness to z name "
        f"different neighbors; random orders of {topk} give {1 - 1 / topk:g}. (b) Entropy of the attention over "
        f"the {topk} neighbors in the run CAS, and of the same cosines at temperature 0.1; cosines lie "
        f"within [-1, 1], so at temperature 1 it cannot be less than {least_entropy(topk):.3f}. (c) Purity of the "
        "neighbors with different weights, and (d) the spread of the embeddings: 1 if they fill the sphere, 0 if all "
        "are the same. Gradients flow through the attention only where the label says so."
    )
    return Drawing(figure, caption(text, finished.data_name, by_label(runs)))


DATASET_LOOKS = dict(zip(PAPER_DATASETS, (FIRST, SECOND, FOURTH, THIRD), strict=True))


def attention_datasets(finished: FinishedRuns) -> Drawing:
    """Inconsistency and entropy of the attention, and purity, on every data set that has a run of CAS."""
    columns = {"inconsistency": "inconsistency", "cas_entropy": "entropy of CAS (nats)", "purity": "purity"}
    on = {data: replace(finished, data=data).optional([CAS], list(columns)) for data in DATASET_LOOKS}
    runs = {data: found[CAS] for data, found in on.items() if found}
    if len(runs) < 2:
        raise CannotDraw(f"it needs runs of CAS on two data sets: run {finished.command('weights')}")
    if finished.data != next(iter(runs)):
        raise CannotDraw(f"it shows all data sets at once: use {setting('data', next(iter(runs)))}")
    figure, axes = make_figure(PAGE_WIDTH, 2.3, 3)
    for ax, (column, label) in zip(axes, columns.items(), strict=True):
        for i, (data, found) in enumerate(runs.items()):
            draw_over_epochs(ax, Curve.logged(found, column), DATASET_LOOKS[data], data, i)
        ax.set(xlabel="epoch", ylabel=label, ylim=(0, TOP))
    topk = next(iter(runs.values()))[0]["config"]["options"]["topk"]
    axes[1].set_ylim(0, 1.15 * math.log(topk))
    draw_reference(axes[1], math.log(topk), f"ln {topk}")
    shared_legend(figure, axes[0])
    text = (
        "Attention (CAS, no mixture) by data set. (a) Share of ranks at which the orders by attention and by nearness "
        "to z name different neighbors. (b) Entropy of the attention over the neighbors. (c) Purity of the neighbors."
    )
    return Drawing(figure, caption(text, ", ".join(runs), runs))


def least_entropy(topk: int) -> float:
    """Smallest possible entropy, in nats, of a softmax over K cosines at temperature 1."""

    def entropy(high: int) -> float:
        """Entropy with `high` cosines at 1 and the others at -1.

        In each cosine the entropy rises, then falls, so it is least where all are extreme.
        """
        total = high * math.e**2 + topk - high
        return math.log(total) - high * 2 * math.e**2 / total

    return min(entropy(high) for high in range(1, topk + 1))


def ranks(finished: FinishedRuns) -> Drawing:
    """Purity of the k-th neighbor before and after re-ordering by attention."""
    runs = finished.required((CAS,), ["purity_1", "purity_cas_1"])
    topk = min(run["config"]["options"]["topk"] for run in runs[CAS])
    figure, (levels, gains, last) = make_figure(PAGE_WIDTH, 2.45, 3)
    shown = sorted({1, (topk + 1) // 2, topk})
    for column, dash, star in (("purity", SOLID, ""), ("purity_cas", DASHED, "*")):
        for i, (k, color, marker) in enumerate(zip(shown, (BLUE, GREEN, RED), "o^s", strict=False)):
            style = LineStyle(color, dash, marker, filled=not star)
            draw_over_epochs(levels, Curve.logged(runs[CAS], f"{column}_{k}"), style, f"k = {k}{star}", i)
    levels.set(xlabel="epoch", ylabel="purity of rank k", ylim=(0, TOP))
    levels.legend(loc="lower right")
    all_ranks = range(1, topk + 1)
    cycle = (
        FIRST,
        LineStyle(SKY, DOTTED, "v"),
        THIRD,
        FOURTH,
        SECOND,
        LineStyle(ORANGE, DASHED, "P"),
        LineStyle(BLACK, SOLID, "x"),
    )
    for k in all_ranks:
        gain = Curve.logged(runs[CAS], f"purity_cas_{k}", minus=f"purity_{k}")
        points = Curve(gain.epochs, 100 * gain.mean, None if gain.std is None else 100 * gain.std)
        draw_over_epochs(gains, points, cycle[(k - 1) % len(cycle)], f"k = {k}", k)
    draw_reference(gains, 0, "")
    gains.set(xlabel="epoch", ylabel="gain by re-ordering (points)")
    label_ends(gains)
    for column, style, label in (("purity", FIRST, "by nearness to z"), ("purity_cas", SECOND, "by attention")):
        curves = [Curve.logged(runs[CAS], f"{column}_{k}") for k in all_ranks]
        std = None if curves[0].std is None else np.array([c.std[-1] for c in curves if c.std is not None])
        draw_curve(last, Curve(np.array(all_ranks), np.array([c.mean[-1] for c in curves]), std), style, label)
    last.set(xlabel="rank k", ylabel="purity of rank k, last epoch", xticks=list(all_ranks))
    last.legend(loc="best")
    text = (
        "Purity by rank in the run weighted by attention (CAS, no mixture). (a) Share of k-th neighbors with the "
        "anchor's label; k counts from the nearest to z, k* from the largest attention. (b) Purity of rank k* less "
        "that of rank k, in percentage points. (c) Both orders at the last epoch."
    )
    return Drawing(figure, caption(text, finished.data_name, by_label(runs)))


MIXTURE = (
    Line("weights", "WSE, mixture (MNN)", FIRST, "with mixture (MNN)"),
    Line("weights", "WSE", SECOND, "without mixture (WSE)"),
)
REWEIGHTED = Line("controls", "re-weighting (1.5, 0.5/K), no mixture", THIRD, "without mixture, weights (1.5, 0.5/K)")
TERMS = {"loss": "loss", "d_positive": r"$d(p, z)$", "d_neighbors": r"mean over $i$ of $d(p, z_i)$"}


def loss(finished: FinishedRuns) -> Drawing:
    """The loss with and without mixture, and the two distances it is made of."""
    runs = finished.required(MIXTURE, list(TERMS)) | finished.optional([REWEIGHTED], list(TERMS))
    warmup = max(run["config"]["warmup_epochs"] for found in runs.values() for run in found)
    figure, axes = make_figure(PAGE_WIDTH, 2.45, 3)
    for ax, (column, label) in zip(axes, TERMS.items(), strict=True):
        draw_column(ax, runs, column)
        ax.set(xlabel="epoch", ylabel=label, ylim=limits_after(warmup, ax))
    shared_legend(figure, axes[0])
    text = (
        "Loss over training with and without mixture (a), and the two distances it is made of, measured in the same "
        "way in all runs: d(p, z) (b), and the mean of d(p, z_i) over the un-mixed neighbors (c). Mixing lowers the "
        "loss wherever neighbors are farther from p than z is, whatever is learned, so (a) alone is no evidence of "
        f"less noise. The vertical axes fit the epochs after the {warmup} epochs of warm-up."
    )
    return Drawing(figure, caption(text, finished.data_name, by_label(runs)))


def accuracy(finished: FinishedRuns) -> Drawing:
    """kNN accuracy with and without mixture; also the linear probe's learning curve if all runs have one."""
    runs = finished.required(MIXTURE, ["knn"]) | finished.optional([REWEIGHTED], ["knn"])
    probes = {line: curve for line, found in runs.items() if (curve := probe_curve(found))}
    both = len(probes) == len(runs)
    figure, axes = make_figure(PAGE_WIDTH if both else COLUMN_WIDTH, 2.45, 2 if both else 1)
    draw_column(axes[0], runs, "knn")
    axes[0].set(xlabel="epoch", ylabel=accuracy_label("knn"))
    if both:
        for i, (line, curve) in enumerate(probes.items()):
            draw_over_epochs(axes[1], curve, line.style, line.label, i)
        axes[1].set(xlabel="epoch of the linear probe", ylabel=accuracy_label("linear"))
    shared_legend(figure, axes[0], columns=3 if both else 1)
    text = "Accuracy with and without mixture: kNN on the backbone's features during training"
    text += " (a), and the test accuracy of the linear probe after each of its epochs (b)." if both else "."
    return Drawing(figure, caption(text, finished.data_name, by_label(runs)))


def probe_curve(runs: Sequence[Summary]) -> Curve | None:
    """Test accuracy after each epoch of the linear probe; None if a run lacks it."""
    curves = [run["results"].get("linear", {}).get("curve") for run in runs]
    if not all(curves) or len({len(values) for values in curves}) > 1:
        return None
    return Curve.over_seeds(range(1, len(curves[0]) + 1), np.array(curves, dtype=float))


def draw_with_end(axes: Sequence[Axes], column: str, label: str, runs: RunsByLine, at_end: RunsByLine) -> None:
    """A column over all epochs and, in a second panel, over the last quarter, which has at least two values."""
    for ax in axes:
        draw_column(ax, runs if ax is axes[0] else at_end, column)
        ax.set(xlabel="epoch", ylabel=label)
    for ax in axes[1:]:
        epochs = np.unique(np.concatenate([np.asarray(line.get_xdata()) for line in ax.get_lines()]))
        start = min(0.75 * epochs[-1], epochs[-2:][0])
        margin = 0.02 * (epochs[-1] - start)
        ax.set(xlim=(start - margin, epochs[-1] + margin), ylim=limits_after(start - margin, ax))
