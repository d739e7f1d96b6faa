"""Figures over epochs: kNN of every method, purity, attention (CAS), purity by rank, what mixing does to the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from mixnn.paper.plots.material import Curve, Drawing, Lacking, Line, Material, Summary, caption, curve, mean_and_std
from mixnn.paper.plots.style import (
    BLACK,
    BLUE,
    COLUMN,
    DASHDOT,
    DASHED,
    DOTTED,
    GREEN,
    ORANGE,
    PAGE,
    PURPLE,
    RED,
    SKY,
    SOLID,
    Look,
    after,
    canvas,
    draw_line,
    label_ends,
    legend,
    reference,
)

FIRST, SECOND, THIRD, FOURTH = Look(BLUE), Look(RED, DASHED, "s"), Look(GREEN, DASHDOT, "^"), Look(PURPLE, DOTTED, "D")
TOP = 1.03  # of an axis for shares, so that markers at 1 are whole
Runs = Mapping[Line, Sequence[Summary]]


@dataclass(frozen=True)
class Purity:
    """One of the paper's four panels of purity over epochs."""

    text: str
    lines: tuple[Line, ...]
    zoom: bool = True  # into the last quarter, where curves come to lie close to each other

    def __call__(self, material: Material) -> Drawing:
        runs = material.needed(self.lines, ["purity"])
        figure, axes = canvas(PAGE, 2.3, 2) if self.zoom else canvas(COLUMN, 2.3)
        draw_with_end(axes, "purity", "purity", runs, runs)
        axes[0].set_ylim(0, TOP)
        label_ends(axes[-1])
        text = f"Purity over training: share of neighbors with the anchor's label, {self.text}."
        text += " (b) is the end of (a)." if self.zoom else ""
        return Drawing(figure, caption(text, material.name, named(runs)))


def regimes(method: str, dash: object, filled: bool) -> tuple[Line, ...]:
    looks = {"w/w": (ORANGE, "^"), "s/w": (BLUE, "o"), "s/s": (RED, "s")}
    return tuple(
        Line("augmentation", f"{method} ({views})", Look(color, dash, marker, filled), f"{method} {views}")
        for views, (color, marker) in looks.items()
    )


METHODS = tuple(
    Line("main", name, look)
    for name, look in {
        "MNN": Look(BLUE),
        "MSF": Look(SKY, DASHED, "s"),
        "CMSF": Look(SKY, DOTTED, "^", filled=False),
        "BYOL": Look(GREEN, DASHED, "D"),
        "UnMix": Look(GREEN, DOTTED, "v", filled=False),
        "SimCLR": Look(RED, DASHED, "s", filled=False),
        "NNCLR": Look(RED, DOTTED, "^"),
        "SNCLR": Look(RED, DASHDOT, "o"),
        "MoCo v2": Look(ORANGE, DASHED, "D", filled=False),
        "SCE": Look(ORANGE, DOTTED, "v"),
        "ReSSL": Look(ORANGE, DASHDOT, "o", filled=False),
        "Supervised": Look(BLACK, SOLID, "x"),
    }.items()
)

PURITY = {
    "purity-methods": Purity(
        "in methods with five neighbors", tuple(m for m in METHODS if m.name in ("MNN", "MSF", "CMSF", "SNCLR"))
    ),
    "purity-augmentation": Purity(
        "by the augmentation of the two views (s strong, w weak)",
        (*regimes("MSF", DASHED, False), *regimes("MNN", SOLID, True)),
    ),
    "purity-neighbors": Purity(
        "by the number of neighbors K",
        tuple(Line("neighbors", f"MNN K={k}", look, f"K = {k}") for k, look in ((1, SECOND), (5, FIRST), (10, THIRD))),
    ),
    "purity-support": Purity(
        "by the size Q of the support set",
        tuple(
            Line("support", str(size), look, f"Q = {size}")
            for size, look in ((2048, SECOND), (4096, FIRST), (8192, THIRD), (16384, FOURTH))
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


def methods(material: Material) -> Drawing:
    """kNN readings of all methods, of as many as there are; the end of those without labels once more."""
    runs = material.optional(METHODS, ["knn"])
    if not runs:
        raise Lacking(f"{METHODS[0].name} or any other row ({material.making('main')})")
    figure, axes = canvas(PAGE, 3.2, 2)
    without = {line: found for line, found in runs.items() if line.name != "Supervised"}
    draw_with_end(axes, "knn", "kNN accuracy (%)", runs, without or runs)
    label_ends(axes[1])
    for line in runs.keys() - without.keys() if without else ():
        end = curve(runs[line], "knn")
        place = float(end.epochs[-1]), float(end.mean[-1])
        axes[0].annotate(line.title, place, (0, 4), textcoords="offset points", ha="right", fontsize=7)
    text = "kNN accuracy, read during training (a); (b) is the end of (a), of the methods without labels."
    return Drawing(figure, caption(text, material.name, named(runs)))


CAS = Line("weights", "CAS", SECOND)
OTHER_WEIGHTS = (Line("weights", "WSE", FIRST), Line("weights", "MSE (MSF)", THIRD))
BESIDE = (
    Line("weights", "WSE, mixture (MNN)", FOURTH),
    Line("weights", "CAS, mixture", Look(ORANGE, DASHED, "s", filled=False)),
    Line("controls", "CAS, gradient through it", Look(BLACK, DOTTED, "x")),
    Line("controls", "CAS, mixture, gradient through it", Look(BLACK, DASHDOT, "P", filled=False)),
)


def attention(material: Material) -> Drawing:
    """Inconsistency and entropy of the attention; purity and spread under it, against those under other weights."""
    common = ["purity", "inconsistency", "spread"]
    runs = material.needed((CAS, *OTHER_WEIGHTS), common)
    runs |= material.needed((CAS,), [*common, "cas_entropy", "cas_entropy_0.1"])
    runs |= material.optional(BESIDE, common)
    own = runs[CAS]
    topk = own[0]["config"]["options"]["topk"]
    figure, (orders, entropies, purities, spreads) = canvas(PAGE, 4.4, 2, 2)
    for ax, column in ((orders, "inconsistency"), (purities, "purity"), (spreads, "spread")):
        draw_column(ax, runs, column)
        ax.set(xlabel="epoch", ylabel=column, ylim=(0, TOP))
    reference(orders, 1 - 1 / topk, "random orders")
    for i, (column, look, label) in enumerate(
        (("cas_entropy", CAS.look, "temperature 1"), ("cas_entropy_0.1", Look(SKY, DOTTED, "v"), "temperature 0.1"))
    ):
        draw_curve(entropies, curve(own, column), look, label, i)
    reference(entropies, math.log(topk), f"ln {topk}")
    reference(entropies, least_entropy(topk), "least possible at temperature 1", above=False)
    entropies.set(xlabel="epoch", ylabel="entropy of CAS (nats)", ylim=(0, 1.15 * math.log(topk)))
    entropies.legend(loc="lower right")
    legend(figure, orders, columns=3)
    text = (
        "Attention (CAS) over training. (a) Share of ranks at which the orders by attention and by nearness to z name "
        f"different neighbors; random orders of {topk} give {1 - 1 / topk:g}. (b) Entropy of the attention over "
        f"the {topk} neighbors in the run CAS, and of the same cosines at temperature 0.1; cosines lie "
        f"within [-1, 1], so at temperature 1 it cannot be less than {least_entropy(topk):.3f}. (c) Purity of the "
        "neighbors under different weights, and (d) the spread of the embeddings: 1 if they fill the sphere, 0 if all "
        "are one. Where the label does not say so, no gradient goes through the attention."
    )
    return Drawing(figure, caption(text, material.name, named(runs)))


def least_entropy(topk: int) -> float:
    """The least that a softmax over K cosines can have at temperature 1, nats."""

    def entropy(high: int) -> float:
        """With so many cosines at 1, the others at -1: in each of them it rises, then falls, so its least is here."""
        total = high * math.e**2 + topk - high
        return math.log(total) - high * 2 * math.e**2 / total

    return min(entropy(high) for high in range(1, topk + 1))


def ranks(material: Material) -> Drawing:
    """Purity of the k-th neighbor before and after re-ordering by attention."""
    runs = material.needed((CAS,), ["purity_1", "purity_cas_1"])
    topk = min(run["config"]["options"]["topk"] for run in runs[CAS])
    figure, (levels, gains, last) = canvas(PAGE, 2.45, 3)
    shown = sorted({1, (topk + 1) // 2, topk})
    for column, dash, star in (("purity", SOLID, ""), ("purity_cas", DASHED, "*")):
        for i, (k, color, marker) in enumerate(zip(shown, (BLUE, GREEN, RED), "o^s", strict=False)):
            look = Look(color, dash, marker, filled=not star)
            draw_curve(levels, curve(runs[CAS], f"{column}_{k}"), look, f"k = {k}{star}", i)
    levels.set(xlabel="epoch", ylabel="purity of rank k", ylim=(0, TOP))
    levels.legend(loc="lower right")
    everyone = range(1, topk + 1)
    cycle = (FIRST, Look(SKY, DOTTED, "v"), THIRD, FOURTH, SECOND, Look(ORANGE, DASHED, "P"), Look(BLACK, SOLID, "x"))
    for k in everyone:
        gain = curve(runs[CAS], f"purity_cas_{k}", less=f"purity_{k}")
        gain = Curve(gain.epochs, 100 * gain.mean, None if gain.std is None else 100 * gain.std)
        draw_curve(gains, gain, cycle[(k - 1) % len(cycle)], f"k = {k}", k)
    reference(gains, 0, "")
    gains.set(xlabel="epoch", ylabel="gain by re-ordering (points)")
    label_ends(gains)
    for column, look, label in (("purity", FIRST, "by nearness to z"), ("purity_cas", SECOND, "by attention")):
        ends = [curve(runs[CAS], f"{column}_{k}") for k in everyone]
        std = None if ends[0].std is None else np.array([e.std[-1] for e in ends if e.std is not None])
        draw_line(last, np.array(everyone), np.array([e.mean[-1] for e in ends]), look, label, std)
    last.set(xlabel="rank k", ylabel="purity of rank k, last epoch", xticks=list(everyone))
    last.legend(loc="best")
    text = (
        "Purity by rank in the run weighted by attention (CAS, no mixture). (a) Share of k-th neighbors with the "
        "anchor's label; k counts from the nearest to z, k* from the largest attention. (b) Purity of rank k* less "
        "that of rank k, in percentage points. (c) Both orders at the last epoch."
    )
    return Drawing(figure, caption(text, material.name, named(runs)))


MIXTURE = (
    Line("weights", "WSE, mixture (MNN)", FIRST, "with mixture (MNN)"),
    Line("weights", "WSE", SECOND, "without mixture (WSE)"),
)
REWEIGHTED = Line("controls", "re-weighting (1.5, 0.5/K), no mixture", THIRD, "without mixture, weights (1.5, 0.5/K)")
TERMS = {"loss": "loss", "d_positive": r"$d(p, z)$", "d_neighbors": r"mean over $i$ of $d(p, z_i)$"}


def loss(material: Material) -> Drawing:
    """The loss with and without mixture, and apart the two distances it is made of."""
    runs = material.needed(MIXTURE, list(TERMS)) | material.optional([REWEIGHTED], list(TERMS))
    warmup = max(run["config"]["warmup_epochs"] for found in runs.values() for run in found)
    figure, axes = canvas(PAGE, 2.45, 3)
    for ax, (column, label) in zip(axes, TERMS.items(), strict=True):
        draw_column(ax, runs, column)
        ax.set(xlabel="epoch", ylabel=label, ylim=after(warmup, ax))
    legend(figure, axes[0])
    text = (
        "Loss over training with and without mixture (a), and the two distances it is made of, measured alike in all "
        "runs: d(p, z) (b), and the mean of d(p, z_i) over the un-mixed neighbors (c). The loss falls by mixing "
        "wherever neighbors are farther from p than z is, whatever is learned, so (a) alone shows no less noise. The "
        f"vertical scales are those of the epochs after the warm-up of {warmup}."
    )
    return Drawing(figure, caption(text, material.name, named(runs)))


def accuracy(material: Material) -> Drawing:
    """kNN readings with and without mixture; the linear probe's own curve where all runs have one."""
    runs = material.needed(MIXTURE, ["knn"]) | material.optional([REWEIGHTED], ["knn"])
    probed = {line: probe(found) for line, found in runs.items()}
    both = all(curve_ is not None for curve_ in probed.values())
    figure, axes = canvas(PAGE if both else COLUMN, 2.45, 2 if both else 1)
    draw_column(axes[0], runs, "knn")
    axes[0].set(xlabel="epoch", ylabel="kNN accuracy (%)")
    for i, (line, of_probe) in enumerate(probed.items() if both else ()):
        assert of_probe is not None
        draw_curve(axes[1], of_probe, line.look, line.title, i)
        axes[1].set(xlabel="epoch of the linear probe", ylabel="linear accuracy (%)")
    legend(figure, axes[0], columns=3 if both else 1)
    text = "Accuracy with and without mixture: kNN of the backbone's features, read during training"
    text += " (a), and the test accuracy of the linear probe after each of its epochs (b)." if both else "."
    return Drawing(figure, caption(text, material.name, named(runs)))


def probe(runs: Sequence[Summary]) -> Curve | None:
    """Test accuracy after each epoch of the linear probe, if all runs kept it."""
    kept = [run["results"].get("linear", {}).get("curve") for run in runs]
    if not all(kept) or len({len(values) for values in kept}) > 1:
        return None
    return Curve(np.arange(1, len(kept[0]) + 1), *mean_and_std(np.array(kept, dtype=float)))


def draw_column(ax: Axes, runs: Runs, column: str) -> None:
    for i, (line, found) in enumerate(runs.items()):
        draw_curve(ax, curve(found, column), line.look, line.title, i)


def draw_with_end(axes: Sequence[Axes], column: str, label: str, runs: Runs, at_end: Runs) -> None:
    """Over all epochs and, in a second panel, over the last quarter (two readings, at least) on a scale of its own."""
    for ax in axes:
        draw_column(ax, runs if ax is axes[0] else at_end, column)
        ax.set(xlabel="epoch", ylabel=label)
    for ax in axes[1:]:
        epochs = np.unique(np.concatenate([np.asarray(line.get_xdata()) for line in ax.get_lines()]))
        start = min(0.75 * epochs[-1], epochs[-2:][0])
        margin = 0.02 * (epochs[-1] - start)
        ax.set(xlim=(start - margin, epochs[-1] + margin), ylim=after(start - margin, ax))


def draw_curve(ax: Axes, values: Curve, look: Look, label: str, turn: int) -> None:
    ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1))
    draw_line(ax, values.epochs, values.mean, look, label, values.std, turn)


def named(runs: Runs) -> dict[str, Sequence[Summary]]:
    return {line.title: found for line, found in runs.items()}
