"""t-SNE of a run's features of test images, colored by class."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from matplotlib.axes import Axes

from mixnn.apps import projection as maps
from mixnn.config import UserError, setting
from mixnn.data import ImageSet
from mixnn.device import pick_device
from mixnn.evaluation.features import features
from mixnn.functional import unit
from mixnn.paper.plots.material import Drawing, Lacking, Material, caption
from mixnn.paper.plots.style import HALO, PAGE, canvas
from mixnn.paper.tables import TABLES
from mixnn.runs import Run
from mixnn.runs.checkpoint import list_checkpoints
from mixnn.runs.images import is_labelled, load_split
from mixnn.runs.weights import load_backbone
from mixnn.training.setup import configure

MAX_IMAGES = 2000
MAX_PANELS = 6
# Paul Tol's muted colors, which color-blind readers can tell apart; a class also has a marker, and its name on it.
COLORS = (
    *("#332288", "#88CCEE", "#117733", "#DDCC77", "#CC6677"),
    *("#AA4499", "#44AA99", "#999933", "#882255", "#888888"),
)
MARKERS = "os^DvP<X>p"


def tsne(material: Material) -> Drawing:
    """A panel for each run folder that was given."""
    runs = [run for run in material.folders if list_checkpoints(run.path / "checkpoints")]
    if not runs:
        raise Lacking(f"the name of a run folder on {material.name} with a checkpoint (use {setting('runs', 'RUN')})")
    if len(runs) > MAX_PANELS:
        raise Lacking(f"room for {len(runs)} run folders: give at most {MAX_PANELS}")
    try:
        images = [_shown(run, material.settings.get("data_dir", "")) for run in runs]
        places = [embed(run, shown) for run, shown in zip(runs, images, strict=True)]
    except UserError as error:
        raise Lacking(f"what it needs ({str(error).splitlines()[0]})") from None
    columns = min(3, len(runs))
    rows, side = -(-len(runs) // columns), PAGE / max(2, columns)
    spans = [np.ptp(points, axis=0) for points in places]
    height = side * min(1.5, max(0.4, *(span[1] / span[0] for span in spans)))
    figure, axes = canvas(side * columns, (height + 0.2) * rows, columns, rows)
    for ax in axes:
        ax.set_axis_off()
    for ax in axes[len(runs) :]:
        ax.set_title("")
    titles = [title(run) for run in runs]
    titles = [f"{t}, {run.path.name}" if titles.count(t) > 1 else t for t, run in zip(titles, runs, strict=True)]
    for ax, name, shown, points in zip(axes, titles, images, places, strict=False):
        _draw(ax, points, shown)
        ax.set_title(f"{ax.get_title(loc='left')} {name}".strip())
    count, classes = len(images[0]), images[0].num_classes
    some = f" of the first {len(COLORS)} classes" if classes > len(COLORS) else ""
    text = (
        f"t-SNE of {count:,} test images{some}: the first {maps.COMPONENTS} principal components of unit "
        f"features of the student's backbone, perplexity {maps.perplexity(count):g}. Axes have no unit."
    )
    summaries = {f"{title(run)} ({run.path.name})": [run.summary()] for run in runs}
    return Drawing(figure, caption(text, material.name, summaries))


def title(run: Run) -> str:
    """The method as the paper writes it, with the options that are not its own."""
    names = {row.method: row.name for row in TABLES["main"].rows}
    own = configure(run.config.data, {}, {"method": run.config.method}).options
    changed = [f"{name}={value}" for name, value in run.config.options.items() if value != own[name]]
    return ", ".join([names.get(run.config.method, run.config.method), *changed])


def _shown(run: Run, data_dir: str) -> ImageSet:
    """At most 2,000 test images, of the first ten classes: more could not be told apart."""
    images = load_split(replace(run.config, data_dir=data_dir or run.config.data_dir), "test")
    if not is_labelled(images):
        raise UserError(f"{run.config.data} has no labelled test images")
    return images.subset((images.labels < len(COLORS)).nonzero()[:, 0]).limit(MAX_IMAGES)


def embed(run: Run, images: ImageSet) -> np.ndarray:
    """Two coordinates of each image."""
    device = pick_device("auto")
    backbone = load_backbone(run)[0].to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return maps.tsne(unit(features(backbone, images, bf16=False)).cpu().numpy(), seed=0)


def _draw(ax: Axes, points: np.ndarray, images: ImageSet) -> None:
    labels = images.labels.cpu().numpy()
    size = min(3.6, 2.6 * (MAX_IMAGES / len(points)) ** 0.5)
    for c, (color, marker) in enumerate(zip(COLORS[: images.num_classes], MARKERS, strict=False)):
        of_class = points[labels == c]
        if not len(of_class):
            continue
        name = images.classes[c]
        ax.plot(*of_class.T, marker, color=color, markersize=size, markeredgewidth=0, label=name)
        middle = np.median(of_class, axis=0)
        nearest = of_class[np.square(of_class - middle).sum(1).argmin()]  # a label lies on its class, not between parts
        ax.text(nearest[0], nearest[1], name, fontsize=7, ha="center", va="center", path_effects=[HALO])
    ax.set_aspect("equal", adjustable="datalim")
