"""The features a classifier can use (the run's encoder, the network before training, raw pixels), and which are best.

A saved classifier records the name of its features, so that new images are turned into vectors in the same way.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.stats import binom

from mixnn.apps.classify.classifiers import (
    HeldOut,
    LabeledSet,
    accuracy_with_interval,
    can_hold_out,
    effective_count,
    held_out,
    list_settings,
    one_thread,
    percent,
    select_settings,
    stratified_sample,
)
from mixnn.apps.embed import Embeddings, Encoder, load_or_encode
from mixnn.apps.fingerprints import SIDE, copy_pairs, fingerprints
from mixnn.apps.search.similarity import bank_mean, near_duplicates, normalize_rows
from mixnn.config import UserError
from mixnn.data import Images
from mixnn.data.folder import natural_key
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.layout import Layout
from mixnn.runs.weights import initial_backbone

RUN = "this run"
START = "encoder before training"  # the weights it started from, or random ones
SIDES = (8, 16, SIDE)  # raw pixels are shrunk to one of these
LARGEST = max(SIDES)
BATCH = 256

MAX_COMPARED = 1000  # labels on which features are compared, chosen at random if there are more: it would take minutes
MAX_UNLABELED = 1000  # unlabeled images used to standardize the features that are compared
QUIET = Reporter(quiet=True)
SAME_VECTOR = 0.99999  # cosine of the vectors of identical images, up to rounding
MAX_COPIES = 20  # pairs of copies with different labels in the results
# Features are clearly better than the run's if chance alone would make them look so in fewer than this share of cases.
# Chosen by measurement (notes/log.md): with the ImageNet encoder it never picked raw pixels wrongly in 283 draws, and
# with an untrained encoder it picks them nearly as often as a margin of one standard error, which errs with both.
SIGNIFICANCE = 0.1


@dataclass(frozen=True)
class Features:
    """What a classifier sees of images: a name and a function from images to vectors. `encoder`: the one it uses."""

    name: str
    read: Callable[[Images], Embeddings]
    encoder: Encoder | None = None

    def embed(self, images: Images) -> Embeddings:
        """The vectors of all images that can be read."""
        embeddings = self.read(images)
        if not np.isfinite(embeddings.vectors).all():
            raise UserError("some embeddings are NaN or inf: the run has diverged; train it with a smaller lr")
        return embeddings


def pixels_name(side: int) -> str:
    return f"raw pixels, {side} x {side}"


def all_features(run: Run, encoder: Encoder, reporter: Reporter) -> dict[str, Features]:
    """Name -> features; the run's come first."""

    def cached(images: Images, by: Encoder = encoder, kind: str = "") -> Embeddings:
        return load_or_encode(run, images, encoder=by, kind=kind, reporter=reporter)

    found = [Features(RUN, cached, encoder)]
    if (start := _start(run, encoder)) is not None:
        found.append(Features(START, lambda images: cached(images, start, "start"), start))
    return {f.name: f for f in [*found, *map(pixel_features, SIDES)]}


def _start(run: Run, encoder: Encoder) -> Encoder | None:
    """The encoder before training; None if the run did not train, or what it started from is gone."""
    if run.config.epochs == 0 and not run.metrics():  # a short time budget can end within the first epoch
        return None
    try:
        backbone = initial_backbone(run.config)
    except UserError:
        return None
    layout = copy.deepcopy(encoder.layout)
    if layout and (judged := run.judgement()):
        layout = Layout(layout.mean, judged["start"]["spread"])
    start = Encoder(backbone, encoder.size, encoder.mean.cpu(), encoder.std.cpu(), layout=layout)
    return start.to(encoder.device)


def pixel_features(side: int) -> Features:
    return Features(pixels_name(side), lambda images: shrink(read_pixels(images), side))


def read_pixels(images: Images, reporter: Reporter = QUIET) -> Embeddings:
    """The colors of all images that can be read, at 32 x 32 pixels."""
    names, vectors = [], [np.empty((0, 3 * LARGEST**2), np.float32)]
    with reporter.bar("reading pixels", len(images)) as advance:
        for batch in images.batches(BATCH, LARGEST):
            names += batch.names
            vectors.append(batch.u8.reshape(len(batch.names), -1).astype(np.float32))
            advance(len(names))
    return Embeddings(names, np.concatenate(vectors))


def shrink(pixels: Embeddings, side: int) -> Embeddings:
    """Pixels as `read_pixels` gives them, averaged to side x side."""
    square = torch.from_numpy(pixels.vectors).view(-1, 3, LARGEST, LARGEST)
    return Embeddings(pixels.names, torch.nn.functional.adaptive_avg_pool2d(square, side).flatten(1).numpy())


# --- comparison ---


def numbered(labels: dict[str, str]) -> np.ndarray:
    """The class of each label as a number."""
    return np.unique(list(labels.values()), return_inverse=True)[1]


def sample_pixels(
    images: Images, embeddings: Embeddings, labels: dict[str, str], seed: int, reporter: Reporter = QUIET
) -> Embeddings:
    """Pixels of about MAX_COMPARED labeled images, two per class at least, and of up to MAX_UNLABELED others."""
    unlabeled = [name for name in embeddings.names if name not in labels]
    chosen = {*_sample(embeddings, labels, seed), *unlabeled[:: -(-len(unlabeled) // MAX_UNLABELED) or 1]}
    return read_pixels(images.named(chosen), reporter)


def identical_copies(embeddings: Embeddings, labels: dict[str, str]) -> set[str]:
    """Labeled images with the same vector as an earlier one with the same label.

    None if the encoder has collapsed, as all its vectors are nearly the same then.
    """
    rows = [i for i, name in enumerate(embeddings.names) if name in labels]
    unit = normalize_rows(embeddings.vectors.copy())
    if not bank_mean(unit).any():
        return set()
    groups = near_duplicates(unit[rows], SAME_VECTOR)
    return _copies([[rows[i] for i, _ in group] for group in groups], embeddings, labels)


def pixel_copies(pixels: Embeddings, labels: dict[str, str]) -> set[str]:
    """Labeled images with nearly the same pixels as an earlier one with the same label."""
    rows = [i for i, name in enumerate(pixels.names) if name in labels]
    a, b = copy_pairs(_fingerprints(pixels, rows), slice(0, len(rows)), slice(0, len(rows)))
    links = coo_array((np.ones(len(a), bool), (a, b)), shape=(len(rows), len(rows)))
    group = connected_components(links, directed=False)[1]
    return _copies([[rows[i] for i in np.flatnonzero(group == g)] for g in np.unique(group[a])], pixels, labels)


def _copies(groups: list[list[int]], images: Embeddings, labels: dict[str, str]) -> set[str]:
    """All but the first image of each label in each group of rows."""
    copies: set[str] = set()
    for group in groups:
        names = sorted((images.names[i] for i in group), key=natural_key)
        first = {labels[name]: name for name in reversed(names)}
        copies |= {name for name in names if first[labels[name]] != name}
    return copies


def compare(
    features: dict[str, Features],
    images: Images,
    embeddings: Embeddings,
    pixels: Embeddings,
    labels: dict[str, str],
    held: HeldOut,
    *,
    model: str,
    seed: int,
    reporter: Reporter = QUIET,
) -> dict[str, Any]:
    """Held-out accuracy in percent of the run, the network before training and raw pixels: same labels, same folds.

    `embeddings` and `held` are the run's, `pixels` a sample of the images. If it has only a part of the labeled ones,
    that part is used. For each of the others, `ahead` is its lead over the run, `error` the standard error of this
    difference, `only` how many labels it alone predicts right, `run_only` how many the run alone, and `p` the
    probability of this or more by chance (`mcnemar_p_value`). Empty if that part is too small for a test.
    """
    chosen = {name: labels[name] for name in pixels.names if name in labels}
    if len(chosen) < len(labels):
        if not can_hold_out(numbered(chosen)):
            return {}
        held = held_out(embeddings, chosen, model=model, seed=seed)
    sides = {side: shrink(pixels, side) for side in SIDES}
    side = best_side(sides, chosen, seed)
    others = {pixels_name(side): sides[side]}
    if START in features:
        others[START] = features[START].embed(images.named({*pixels.names}))
    weights = held.weights
    accuracy: dict[str, dict[str, float]] = {RUN: accuracy_with_interval(held.right, weights)}
    for name, vectors in others.items():
        reporter.info(f"comparing with {name}")
        right = held_out(vectors, chosen, model=model, seed=seed).right
        ahead, error = paired_difference(right, held.right, weights)
        only, run_only = int((right & ~held.right).sum()), int((held.right & ~right).sum())
        accuracy[name] = accuracy_with_interval(right, weights) | {"ahead": percent(ahead), "error": percent(error)}
        accuracy[name] |= {"only": only, "run_only": run_only, "p": mcnemar_p_value(only, run_only)}
    return {"labels": len(chosen), "accuracy": accuracy}


def best_features(comparison: dict[str, Any]) -> str:
    """The most accurate features that are clearly better than the run's (p < SIGNIFICANCE); else the run's."""
    rows = {name: row for name, row in comparison["accuracy"].items() if row.get("p", 1) < SIGNIFICANCE}
    clearly = {name: row["ahead"] for name, row in rows.items() if row["ahead"] > 0}
    return max(clearly, key=lambda name: clearly[name], default=RUN)


def _sample(embeddings: Embeddings, labels: dict[str, str], seed: int) -> dict[str, str]:
    """Choose the labels to compare on, in proportion to the classes."""
    rows, data = LabeledSet.select(embeddings, labels)
    chosen = stratified_sample(data.y, MAX_COMPARED, np.random.default_rng([seed, 2]))
    names = [embeddings.names[i] for i in rows[chosen]]
    return {name: labels[name] for name in names}


@one_thread()
def best_side(sides: dict[int, Embeddings], labels: dict[str, str], seed: int) -> int:
    """The side at which nearest neighbors of raw pixels predict best; the smaller one of equals."""

    def accuracy(side: int) -> float:
        data = LabeledSet.select(sides[side], labels)[1]
        return select_settings(data, list_settings("knn"), np.random.default_rng([seed, 3]))[0].accuracy

    return max(sorted(sides), key=accuracy)


def paired_difference(right: np.ndarray, other: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """How much more accurate one is than the other on the same labels, and the standard error of that."""
    difference = right.astype(float) - other.astype(float)
    error = weights.sum() * difference.std(ddof=1) / math.sqrt(effective_count(weights))
    return float(weights @ difference), float(error)


def mcnemar_p_value(only: int, other_only: int) -> float:
    """One-sided p-value of McNemar's exact test on two classifiers.

    Each is right alone `only` and `other_only` times. If both are equally good, this is the probability that the first
    is right alone `only` times or more.
    """
    return float(binom.sf(only - 1, only + other_only, 0.5))


def label_conflicts(pixels: Embeddings, labels: dict[str, str]) -> list[dict[str, str]]:
    """Pairs of labeled images with the same pixels, or nearly so, but different labels."""
    rows = [i for i, name in enumerate(pixels.names) if name in labels]
    every, names = slice(0, len(rows)), [pixels.names[i] for i in rows]
    pairs = [(names[i], names[j]) for i, j in zip(*copy_pairs(_fingerprints(pixels, rows), every, every), strict=True)]
    found = [(a, b) for a, b in pairs if labels[a] != labels[b]]
    return [{"file": a, "label": labels[a], "copy": b, "copy_label": labels[b]} for a, b in found[:MAX_COPIES]]


def _fingerprints(pixels: Embeddings, rows: list[int]) -> np.ndarray:
    return fingerprints(pixels.vectors[rows].reshape(len(rows), 3, LARGEST, LARGEST))
