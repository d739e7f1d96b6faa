"""t-SNE map of test images by a run's features, colored by class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import nn

from mixnn.apps import projection
from mixnn.config import UserError, setting
from mixnn.data import ImageSet
from mixnn.device import pick_device
from mixnn.evaluation.features import features
from mixnn.functional import unit
from mixnn.paper.plots.drawing import HALO, PAGE_WIDTH, CannotDraw, Drawing, FinishedRuns, caption, make_figure
from mixnn.paper.tables import TABLES
from mixnn.runs import Run
from mixnn.runs.weights import load_backbone
from mixnn.training.configure import configure

MAX_IMAGES = 2000
MAX_PANELS = 6
# Paul Tol's muted colors, which color-blind readers can tell apart. Each class also has its own marker and its name.
COLORS = (
    *("#332288", "#88CCEE", "#117733", "#DDCC77", "#CC6677"),
    *("#AA4499", "#44AA99", "#999933", "#882255", "#888888"),
)
MARKERS = "os^DvP<X>p"


def tsne(finished: FinishedRuns) -> Drawing:
    """One panel per run folder that was given. They may be runs on several data sets."""
    runs = [run for run in finished.folders if run.has_checkpoint]
    if not runs:
        raise CannotDraw(
            f"it needs a run folder on {finished.data_name} with a checkpoint: use {setting('runs', 'RUN')}"
        )
    if len(runs) > MAX_PANELS:
        raise CannotDraw(f"{len(runs)} run folders are too many: give at most {MAX_PANELS}")
    try:
        images = [_test_images(run, finished.settings.get("data_dir", "")) for run in runs]
        maps = [_map(run, shown) for run, shown in zip(runs, images, strict=True)]
    except UserError as error:
        raise CannotDraw(str(error).splitlines()[0]) from None
    columns = min(3, len(runs))
    rows, side = -(-len(runs) // columns), PAGE_WIDTH / max(2, columns)
    spans = [np.ptp(points, axis=0) for points in maps]
    height = side * min(1.5, max(0.4, *(span[1] / span[0] for span in spans)))
    figure, axes = make_figure(side * columns, (height + 0.2) * rows, columns, rows)
    for ax in axes:
        ax.set_axis_off()
    for ax in axes[len(runs) :]:
        ax.set_title("")
    datasets = [Path(run.config.data).name for run in runs]
    prefixes = [f"{data}: " if len(set(datasets)) > 1 else "" for data in datasets]
    titles = [prefix + title(run) for prefix, run in zip(prefixes, runs, strict=True)]
    titles = [f"{t}, {run.path.name}" if titles.count(t) > 1 else t for t, run in zip(titles, runs, strict=True)]
    for ax, name, shown, points in zip(axes, titles, images, maps, strict=False):
        _draw_map(ax, points, shown)
        ax.set_title(f"{ax.get_title(loc='left')} {name}".strip())
    about = dict(zip((run.config.data for run in runs), map(_description, images), strict=True))
    several = len(about) > 1
    shown_images = "; ".join(f"{text} ({Path(data).name})" if several else text for data, text in about.items())
    text = (
        f"t-SNE of {shown_images}: the first {projection.COMPONENTS} principal components of unit "
        f"features of the student's backbone. The axes have no units."
    )
    summaries = {f"{title(run)} ({run.path.name})": [run.summary()] for run in runs}
    return Drawing(figure, caption(text, finished.data_name, summaries))


def _description(images: ImageSet) -> str:
    """How many images a panel shows, of which classes, and the perplexity."""
    some = f" of the first {len(COLORS)} classes" if images.num_classes > len(COLORS) else ""
    return f"{len(images):,} test images{some}, perplexity {projection.perplexity(len(images)):g}"


def title(run: Run) -> str:
    """The method's name in the paper, and the options that differ from its defaults."""
    names = {row.method: row.name for row in TABLES["main"].rows}
    defaults = configure(run.dataset(), {}, {"method": run.config.method}).options
    changed = [f"{name}={value}" for name, value in run.config.options.items() if value != defaults[name]]
    return ", ".join([names.get(run.config.method, run.config.method), *changed])


def _test_images(run: Run, data_dir: str) -> ImageSet:
    """At most MAX_IMAGES test images of the first ten classes; more classes could not be told apart."""
    images = run.dataset(data_dir).load("test", run.config.encoding_size)
    if not images.fully_labeled:
        raise UserError(f"{run.config.data} has no labeled test images")
    return images.subset((images.labels < len(COLORS)).nonzero()[:, 0]).limit(MAX_IMAGES)


def backbone_of(run: Run) -> nn.Module:
    """A run's backbone, on the device here."""
    device = pick_device("auto")
    return load_backbone(run)[0].to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def _map(run: Run, images: ImageSet) -> np.ndarray:
    """Coordinates (N, 2) of the images."""
    return projection.tsne(unit(features(backbone_of(run), images, bf16=False)).cpu().numpy(), seed=0)


def _draw_map(ax: Axes, points: np.ndarray, images: ImageSet) -> None:
    """The images as dots, and the name of each class on one of its own."""
    labels = images.labels.cpu().numpy()
    size = min(3.6, 2.6 * (MAX_IMAGES / len(points)) ** 0.5)
    for c, (color, marker) in enumerate(zip(COLORS[: images.num_classes], MARKERS, strict=False)):
        of_class = points[labels == c]
        if not len(of_class):
            continue
        name = images.classes[c]
        ax.plot(*of_class.T, marker, color=color, markersize=size, markeredgewidth=0, label=name)
        middle = np.median(of_class, axis=0)
        nearest = of_class[np.square(of_class - middle).sum(1).argmin()]  # the middle may lie between two clusters
        ax.text(nearest[0], nearest[1], name, fontsize=7, ha="center", va="center", path_effects=[HALO])
    ax.set_aspect("equal", adjustable="datalim")
