"""Images as an encoder sees them: a t-SNE map of some, their nearest training images, and all their thumbnails.

Runs on the same data show the same images, so that their maps and neighbors can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mixnn.apps.embed import encode_named
from mixnn.apps.projection import tsne
from mixnn.apps.thumbnails import sheet
from mixnn.config import UserError
from mixnn.data import Dataset, ImageSet
from mixnn.data.dataset import FolderDataset
from mixnn.data.images import resized
from mixnn.evaluation.neighbors import nearest
from mixnn.functional import unit
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.encoder import Encoder, encoder_from_checkpoint, place

SEED = 0
MAX_BANK = {"cpu": 5_000, "cuda": 200_000}  # training images to search: a CPU encodes some 100 per second (ResNet-18)
NEIGHBORS = 8  # per query in the grid
MAP_NEIGHBORS = 5  # per image among those on the map
RANDOM_ROWS, WORST_ROWS = 10, 4  # queries in the grid
MAX_SIDE = 48  # of a thumbnail in pixels
MIN_MAPPED = 5


@dataclass(frozen=True)
class Sample:
    """Images of one data set: the queries that are shown, and the training images searched for their neighbors."""

    split: str  # of the queries: "test", or "training" if there are no test images
    total: int  # images in that split
    queries: ImageSet
    bank: ImageSet
    bank_total: int
    own_B: Tensor | None  # position of each query in the bank; None if queries and bank are disjoint
    query_names: list[str]  # as a list of the images names them
    bank_names: list[str]

    @property
    def has_labels(self) -> bool:
        return bool((self.queries.labels >= 0).any())


@dataclass(frozen=True)
class Embedded:
    """A sample embedded by the encoder of one run: the map, and nearest neighbors."""

    step: int
    xy: np.ndarray | None  # (B, 2); None if there is no map
    map_index_BN: Tensor  # nearest queries
    map_cos_BN: Tensor
    index_BK: Tensor  # nearest images in the bank
    cos_BK: Tensor
    false_BK: Tensor  # the labels differ
    labeled_BK: Tensor  # both have labels


def load_sample(dataset: Dataset, size: int, num_images: int, device: torch.device) -> Sample:
    """A fixed random choice of test images, or of training images if there are no others."""
    split = "test" if dataset.has_test else "train"
    max_bank = MAX_BANK[device.type] if dataset.has_test else max(MAX_BANK[device.type], num_images)
    shown, train = dataset.load(split, size), dataset.load("train", size)
    queries_at, bank_at = _drawn(len(shown), num_images), _drawn(len(train), max_bank)
    return Sample(
        split="test" if dataset.has_test else "training",
        total=len(shown),
        queries=shown.subset(queries_at),
        bank=train.subset(bank_at),
        bank_total=len(train),
        own_B=None if dataset.has_test else torch.searchsorted(bank_at, queries_at),
        query_names=_names(dataset, split, shown, queries_at),
        bank_names=_names(dataset, "train", train, bank_at),
    )


def _drawn(total: int, count: int) -> Tensor:
    """Positions of at most `count` images, drawn at random; a larger count draws the same and more."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(SEED))[:count].sort().values


def _names(dataset: Dataset, split: str, images: ImageSet, at: Tensor) -> list[str]:
    names = images.names or dataset.images(split).names  # images of a named data set are numbered
    return [names[i] for i in at.tolist()]


def load_last_encoder(run: Run, device: torch.device, warn: Callable[[str], None]) -> tuple[Encoder, int]:
    """The encoder of the run's last usable checkpoint, and its step; UserError if there is none."""
    if not run.has_checkpoint:
        raise UserError("the run has no checkpoint")
    damaged: list[str] = []
    try:
        tensors, state = run.load_checkpoint(damaged.append)
    except UserError as error:
        raise UserError("; ".join(damaged) or str(error)) from None
    for text in damaged:
        warn(f"{text}.")
    return place(encoder_from_checkpoint(run, tensors, state), device), state["step"]


def embed_sample(
    run: Run, dataset: Dataset, encoder: Encoder, step: int, sample: Sample, reporter: Reporter
) -> Embedded:
    """The map and the neighbors of a sample by the vectors of a run, which other commands may have cached."""

    def vectors(split: str, names: list[str]) -> Tensor:
        # A run's `limit` is part of its data set. A folder's images are listed as for other commands: all of them.
        images = run.images() if isinstance(dataset, FolderDataset) else dataset.images(split)
        found = encode_named(run, images, names, MAX_BANK[encoder.device.type], encoder, reporter)
        return unit(torch.from_numpy(found).to(encoder.device))

    bank = vectors("train", sample.bank_names)
    queries = vectors("test", sample.query_names) if sample.own_B is None else bank[sample.own_B]
    if not (queries.isfinite().all() and bank.isfinite().all()):
        raise UserError("the encoder's features are NaN or inf")
    map_cos, map_index = (t.cpu() for t in nearest(queries, queries, MAP_NEIGHBORS, torch.arange(len(queries))))
    cos, index = (t.cpu() for t in nearest(queries, bank, NEIGHBORS, sample.own_B))
    labels_BK, labels_B1 = sample.bank.labels[index], sample.queries.labels[:, None]
    labeled = (labels_BK >= 0) & (labels_B1 >= 0)
    false = labeled & (labels_BK != labels_B1)
    return Embedded(step, layout(queries.cpu().numpy()), map_index, map_cos, index, cos, false, labeled)


def layout(features_BF: np.ndarray) -> np.ndarray | None:
    """t-SNE coordinates in [0, 1], (B, 2); None for too few images, or if all features are equal."""
    if len(features_BF) < MIN_MAPPED or features_BF.std(0).max() < 1e-6:
        return None
    return fit_to_square(tsne(features_BF, SEED))


def align(xy: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The map rotated or mirrored to match another one as well as possible; t-SNE's orientation is arbitrary."""
    a, b = xy - xy.mean(0), target - target.mean(0)
    u, _, v = np.linalg.svd(a.T @ b)
    return fit_to_square(a @ u @ v)


def fit_to_square(xy: np.ndarray) -> np.ndarray:
    """Points scaled into the unit square, both axes by the same factor."""
    low, high = xy.min(0), xy.max(0)
    return (xy - (low + high) / 2) / (high - low).max() + 0.5


def choose_rows(sample: Sample, embedded: list[Embedded]) -> list[tuple[int, str]]:
    """The queries of the grid, each with a title: random ones (one per class if they fit), then the worst ones."""
    order = torch.randperm(len(sample.queries), generator=torch.Generator().manual_seed(SEED)).tolist()
    labels = sample.queries.labels.tolist()
    classes = sorted({label for label in labels if label >= 0})
    one_per_class = []
    if len(classes) <= RANDOM_ROWS:
        one_per_class = [next(i for i in order if labels[i] == label) for label in classes]
    chosen = (one_per_class + [i for i in order if i not in one_per_class])[:RANDOM_ROWS]
    num_false = torch.stack([one.false_BK.sum(1) for one in embedded]).sum(0)
    worst_first = num_false.argsort(descending=True, stable=True).tolist()
    worst = [i for i in worst_first if num_false[i] > 0 and i not in chosen][:WORST_ROWS]
    return [(i, "Random images") for i in chosen] + [(i, "Most false neighbors") for i in worst]


def page_values(sample: Sample, embedded: list[Embedded]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the page needs of a data set, and of each run's embedding. Tiles are the queries, then bank images."""
    rows = choose_rows(sample, embedded)
    used = sorted({b for one in embedded for i, _ in rows for b in one.index_BK[i].tolist()})
    tile_of = {b: len(sample.queries) + n for n, b in enumerate(used)}
    bank = sample.bank.subset(torch.tensor(used, dtype=torch.long))
    images = torch.cat([sample.queries.images[:], bank.images[:]]).numpy()
    side, columns = min(images.shape[2], MAX_SIDE), math.ceil(math.sqrt(len(images)))
    about = {
        "sprite": sheet(resized(images, side), columns).data_uri,
        "side": side,
        "columns": columns,
        "count": len(sample.queries),
        "split": sample.split,
        "total": sample.total,
        "bank": len(sample.bank),
        "bankTotal": sample.bank_total,
        "labels": [*sample.queries.labels.tolist(), *bank.labels.tolist()],
        "classes": sample.queries.classes if sample.has_labels else [],
        "names": None if sample.queries.names is None else [*sample.queries.names, *(bank.names or [])],
        "rows": [{"query": i, "title": title} for i, title in rows],
    }
    first = next((one.xy for one in embedded if one.xy is not None), None)
    return about, [_run_values(one, rows, tile_of, first) for one in embedded]


def _run_values(
    embedded: Embedded, rows: list[tuple[int, str]], tile_of: dict[int, int], first: np.ndarray | None
) -> dict[str, Any]:
    xy = embedded.xy
    if xy is not None and first is not None and xy is not first:
        xy = align(xy, first)
    index, cosines, false = (t.tolist() for t in (embedded.index_BK, embedded.cos_BK, embedded.false_BK))
    grid = [
        [
            {"tile": tile_of[b], "cos": round(cos, 3), "false": is_false}
            for b, cos, is_false in zip(index[i], cosines[i], false[i], strict=True)
        ]
        for i, _ in rows
    ]
    labeled = int(embedded.labeled_BK.sum())
    return {
        "step": embedded.step,
        "xy": None if xy is None else np.rint(1000 * xy).astype(int).tolist(),
        "near": embedded.map_index_BN.tolist(),
        "nearCos": [[round(cos, 3) for cos in row] for row in embedded.map_cos_BN.tolist()],
        "grid": grid,
        "falseShare": int(embedded.false_BK.sum()) / labeled if labeled else None,
    }
