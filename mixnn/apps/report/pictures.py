"""What an encoder makes of images: a t-SNE map of some, their nearest training images, and all their thumbnails.

Runs on the same data show the same images, so that maps and neighbors can be compared.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mixnn.apps.projection import tsne
from mixnn.config import UserError
from mixnn.data import Dataset, ImageSet
from mixnn.evaluation.features import features
from mixnn.evaluation.neighbors import nearest
from mixnn.functional import unit
from mixnn.runs import Run, checkpoint
from mixnn.runs.weights import load_backbone

SEED = 0
BANK = {"cpu": 5_000, "cuda": 200_000}  # training images searched: a ResNet-18 on a CPU encodes some 100 a second
NEIGHBORS = 8  # of a query, in the grid
NEAR = 5  # of an image among those on the map
DRAWN, HARD = 10, 4  # rows of the grid
THUMBNAIL = 48  # pixels, at most
MIN_MAPPED = 5


@dataclass(frozen=True)
class Shown:
    """The images of one data set that are shown, and the training images their neighbors are looked for in."""

    split: str  # test, or training where there are no test images
    total: int  # images in that split
    queries: ImageSet
    bank: ImageSet
    bank_total: int
    own_B: Tensor | None  # where each query itself is in the bank; None where the two are apart

    @property
    def num_images(self) -> int:
        """Each counted once."""
        return len(self.bank) + (len(self.queries) if self.own_B is None else 0)

    @property
    def labels(self) -> bool:
        return bool((self.queries.labels >= 0).any())


@dataclass(frozen=True)
class Look:
    """One run's view of what is shown."""

    step: int
    xy: np.ndarray | None  # (B, 2); None where there is nothing to map
    near_BN: Tensor  # nearest on the map
    near_cos_BN: Tensor
    index_BK: Tensor  # nearest in the bank
    cos_BK: Tensor
    false_BK: Tensor  # another label; never where one of the two has none
    judged_BK: Tensor  # both have labels


def load_shown(dataset: Dataset, size: int, num_images: int, device: torch.device) -> Shown:
    """A fixed random choice of test images, or of training images where there are no others."""
    train, limit = dataset.load("train", size), BANK[device.type]
    if dataset.has_test_images:
        test = dataset.load("test", size)
        queries, bank = test.limit(num_images, SEED), train.limit(limit, SEED)
        return Shown("test", len(test), queries, bank, len(train), None)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(SEED))
    at, among = order[:num_images].sort().values, order[: max(limit, num_images)].sort().values
    own = torch.searchsorted(among, at)
    return Shown("training", len(train), train.subset(at), train.subset(among), len(train), own)


def load_encoder(run: Run, warn: Callable[[str], None]) -> tuple[nn.Module, int]:
    """The run's last whole checkpoint and its step; UserError that says why there is none."""
    if not checkpoint.list_checkpoints(run.path / "checkpoints"):
        raise UserError("the run has no checkpoint")
    damaged: list[str] = []
    try:
        found = load_backbone(run, damaged.append)
    except UserError as error:
        raise UserError("; ".join(damaged) or str(error)) from None
    for text in damaged:
        warn(f"{text}.")
    return found


def look(backbone: nn.Module, step: int, shown: Shown, device: torch.device) -> Look:
    """What the encoder of a step makes of the images."""
    backbone.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    q, bank = (unit(features(backbone, images, bf16=False)) for images in (shown.queries, shown.bank))
    if not (q.isfinite().all() and bank.isfinite().all()):
        raise UserError("the encoder's features are not finite")
    near_cos, near = (t.cpu() for t in nearest(q, q, NEAR, torch.arange(len(q))))
    cos, index = (t.cpu() for t in nearest(q, bank, NEIGHBORS, shown.own_B))
    theirs, labels = shown.bank.labels[index], shown.queries.labels[:, None]
    judged = (theirs >= 0) & (labels >= 0)
    return Look(step, mapped(q.cpu().numpy()), near, near_cos, index, cos, judged & (theirs != labels), judged)


def mapped(q: np.ndarray) -> np.ndarray | None:
    """Coordinates in [0, 1], (B, 2); None for too few images, or if all are alike."""
    return None if len(q) < MIN_MAPPED or q.std(0).max() < 1e-6 else _fitted(tsne(q, SEED))


def aligned(xy: np.ndarray, to: np.ndarray) -> np.ndarray:
    """The map turned and mirrored, which means nothing in t-SNE, to lie as nearly as can be like another."""
    a, b = xy - xy.mean(0), to - to.mean(0)
    u, _, v = np.linalg.svd(a.T @ b)
    return _fitted(a @ u @ v)


def _fitted(xy: np.ndarray) -> np.ndarray:
    """Into the unit square, angles kept."""
    low, high = xy.min(0), xy.max(0)
    return (xy - (low + high) / 2) / (high - low).max() + 0.5


def rows(shown: Shown, looks: list[Look]) -> list[tuple[int, str]]:
    """Which queries the grid shows, and why: drawn at random (each class once where that fits), or served worst."""
    order = torch.randperm(len(shown.queries), generator=torch.Generator().manual_seed(SEED)).tolist()
    labels = shown.queries.labels.tolist()
    classes = sorted({label for label in labels if label >= 0})
    firsts = [next(i for i in order if labels[i] == label) for label in classes] if len(classes) <= DRAWN else []
    drawn = (firsts + [i for i in order if i not in firsts])[:DRAWN]
    wrong = torch.stack([look.false_BK.sum(1) for look in looks]).sum(0)
    ranked = [i for i in wrong.argsort(descending=True, stable=True).tolist() if wrong[i] > 0 and i not in drawn]
    return [(i, "Drawn at random") for i in drawn] + [(i, "Served worst") for i in ranked[:HARD]]


def gallery(shown: Shown, looks: list[Look]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the page needs of a data set, and of each run's look at it. Tiles are the queries, then bank images."""
    chosen = rows(shown, looks)
    used = sorted({b for look in looks for i, _ in chosen for b in look.index_BK[i].tolist()})
    tile_of = {b: len(shown.queries) + n for n, b in enumerate(used)}
    theirs = shown.bank.subset(torch.tensor(used, dtype=torch.long))
    sprite, side, columns = make_sprite(torch.cat([shown.queries.images, theirs.images]))
    names = None if shown.queries.names is None else [*shown.queries.names, *(theirs.names or [])]
    about = {
        "sprite": sprite,
        "side": side,
        "columns": columns,
        "count": len(shown.queries),
        "split": shown.split,
        "total": shown.total,
        "bank": len(shown.bank),
        "bankTotal": shown.bank_total,
        "labels": [*shown.queries.labels.tolist(), *theirs.labels.tolist()],
        "classes": shown.queries.classes if shown.labels else [],
        "names": names,
        "rows": [{"query": i, "why": why} for i, why in chosen],
    }
    first = next((look.xy for look in looks if look.xy is not None), None)
    return about, [_seen(look, chosen, tile_of, first) for look in looks]


def _seen(
    look: Look, chosen: list[tuple[int, str]], tile_of: dict[int, int], first: np.ndarray | None
) -> dict[str, Any]:
    xy = look.xy if look.xy is None or look.xy is first or first is None else aligned(look.xy, first)
    grid = [
        [
            {"tile": tile_of[b], "cos": round(cos, 3), "false": bool(false)}
            for b, cos, false in zip(
                look.index_BK[i].tolist(), look.cos_BK[i].tolist(), look.false_BK[i].tolist(), strict=True
            )
        ]
        for i, _ in chosen
    ]
    judged = int(look.judged_BK.sum())
    return {
        "step": look.step,
        "xy": None if xy is None else np.rint(1000 * xy).astype(int).tolist(),
        "near": look.near_BN.tolist(),
        "nearCos": [[round(cos, 3) for cos in row] for row in look.near_cos_BN.tolist()],
        "grid": grid,
        "falseShare": int(look.false_BK.sum()) / judged if judged else None,
    }


def make_sprite(images: Tensor) -> tuple[str, int, int]:
    """All thumbnails in one PNG, as a data URI, with their side and the number a line. uint8 [M,3,H,W]."""
    side = min(images.shape[2], THUMBNAIL)
    columns = math.ceil(math.sqrt(len(images)))
    sheet = Image.new("RGB", (columns * side, math.ceil(len(images) / columns) * side))
    for n, pixels in enumerate(images.permute(0, 2, 3, 1).numpy()):
        tile = Image.fromarray(pixels)
        tile = tile if tile.size == (side, side) else tile.resize((side, side), Image.Resampling.BOX)
        sheet.paste(tile, (n % columns * side, n // columns * side))
    file = io.BytesIO()
    sheet.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode(), side, columns
