"""Test images and their nearest neighbors, framed in red if they have another class (the paper's first figure)."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from torch import Tensor

from mixnn.config import UserError, setting
from mixnn.data import ImageSet
from mixnn.evaluation.features import features
from mixnn.evaluation.neighbors import nearest
from mixnn.functional import unit
from mixnn.paper.plots.drawing import GREEN, RED, CannotDraw, Drawing, FinishedRuns, caption, make_figure
from mixnn.paper.plots.tsne import backbone_of, title
from mixnn.runs import Run

NUM_ANCHORS = 5
NUM_NEIGHBORS = 5
SUPPORT_SIZE = 4096
SIDE = 0.85  # inches per image


def examples(finished: FinishedRuns) -> Drawing:
    """The first test image of each of five classes, and its five nearest training images, by the last run given."""
    runs = [run for run in finished.folders if run.has_checkpoint]
    if not runs:
        raise CannotDraw(
            f"it needs a run folder on {finished.data_name} with a checkpoint: use {setting('runs', 'RUN')}"
        )
    run = runs[-1]
    try:
        support, anchors = _images(run, finished.settings.get("data_dir", ""))
    except UserError as error:
        raise CannotDraw(str(error).splitlines()[0]) from None
    index = _neighbors(run, support, anchors)
    columns = 1 + index.shape[1]
    figure, axes = make_figure(SIDE * columns, (SIDE + 0.15) * len(anchors), columns, len(anchors))
    for i in range(len(anchors)):
        row = axes[i * columns : (i + 1) * columns]
        own = int(anchors.labels[i])
        _draw_image(row[0], anchors, i, f"{anchors.classes[own]}", "none")
        for ax, j in zip(row[1:], index[i].tolist(), strict=True):
            label = int(support.labels[j])
            _draw_image(ax, support, j, support.classes[label], GREEN if label == own else RED)
    purity = (support.labels[index] == anchors.labels[:, None]).double().mean().item()
    text = (
        f"Test images (left) and their {index.shape[1]} nearest neighbors among {len(support):,} training images, by "
        f"unit features of the student's backbone. Frames: green if the class is the same, red if not; "
        f"{purity:.0%} are the same."
    )
    return Drawing(figure, caption(text, finished.data_name, {f"{title(run)} ({run.path.name})": [run.summary()]}))


def _images(run: Run, data_dir: str) -> tuple[ImageSet, ImageSet]:
    """Training images to search, and the first test image of each of the first classes."""
    dataset, size = run.dataset(data_dir), run.config.encoding_size
    support, test = dataset.load("train", size).limit(SUPPORT_SIZE), dataset.load("test", size)
    if not (support.fully_labeled and test.fully_labeled):
        raise UserError(f"{run.config.data} has no labeled images")
    classes = sorted(set(test.labels.tolist()))[:NUM_ANCHORS]
    first = [int((test.labels == c).nonzero()[0, 0]) for c in classes]
    return support, test.subset(torch.tensor(first))


def _neighbors(run: Run, support: ImageSet, anchors: ImageSet) -> Tensor:
    """Positions in the support set of each anchor's nearest neighbors, (B, K)."""
    backbone = backbone_of(run)
    bank, queries = (unit(features(backbone, images, bf16=False)) for images in (support, anchors))
    return nearest(queries, bank, NUM_NEIGHBORS)[1].cpu()


def _draw_image(ax: Axes, images: ImageSet, i: int, name: str, frame: str) -> None:
    ax.imshow(images.images[i].permute(1, 2, 0).cpu().numpy(), interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    ax.set_title(name, loc="center", fontsize=6)
    ax.set_title("", loc="left")
    for spine in ax.spines.values():
        spine.set(visible=frame != "none", edgecolor=frame, linewidth=1.6)
