"""Judgement without labels: whether an encoder gets better or worse, and what it learns instead of content.

All numbers come from a fixed sample of the training images and two fixed random views of each. Which of them predict
accuracy was measured on folders with labels (notes/log.md). The best one is view retrieval: the share of images whose
other view is the nearest of all images. Where it fell below 0.7 of its value at the start, accuracy had fallen as well,
with few exceptions; where training helped, it stayed above.

View retrieval also says how much training can gain. A start that tells nearly all images apart gains little and can
lose; a start that cannot do so gains much. So the encoder that is kept is an average of starting and trained weights:
the worse the start, the larger the share of the trained weights. The views depend on view retrieval too (`views_for`).
If the start's features vary mostly in one direction, little of the training is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mixnn import functional as F
from mixnn.augment import View
from mixnn.config import Config, method_option, setting
from mixnn.data import ImageSet
from mixnn.diagnostics import effective_rank
from mixnn.evaluation.features import features
from mixnn.evaluation.neighbors import nearest
from mixnn.progress import plural
from mixnn.training.folder_settings import CROP_AREA, Choice

SAMPLE = 256  # images, and views that one is looked for among: a view is harder to find among more
NEIGHBORS = 10
VIEW_SIZE, AREA, JITTER = 128, (0.3, 1.0), 0.8  # of the views
MIN_RETRIEVAL = 0.7  # of the start's
MIN_RANK, MIN_RANK_KEPT = 5.0, 1 / 3  # effective dimensions, and their share of the start's
MAX_FIRST, MAX_COLOR = 0.4, 0.5  # share of the first direction, and of color in it
MIN_KNOWN = 0.7  # share of views found from which on a start counts as knowing the images
KNOWN_CROP_AREA = 0.6  # smallest crops of images that the start knows
MAX_LEAD, LEADING_SHARE = 3.0, 0.25  # of the first direction over the second, and the most to keep of training above it
FEW_IMAGES = 64  # the directions of fewer images say nothing
LEAST_HEADS_FIRST, MOST_HEADS_FIRST = 0.2, 0.4
ENOUGH_STEPS, MOST_STEPS = 600, 5000  # for images that the start knows perfectly, and for those it does not know
CHECK_AT = (0.25, 0.45, 0.75, 1.0)  # when to judge, as shares of the run: twice before half of it

NUMBERS = {
    "view_retrieval": "share of images whose other view is the most similar one among all images of a sample",
    "kept_neighbors": f"share of an image's {NEIGHBORS} nearest neighbors that it already had at the start",
    "feature_rank": "effective rank of the features: exp(entropy of their covariance's eigenvalues)",
    "first_share": "share of the features' variance in its largest direction",
    "first_color": "share of that direction that the image's mean red, green and blue explain",
    "color_share": "share of the features' whole variance that the image's mean red, green and blue explain",
}

Numbers = dict[str, float]


@dataclass
class Judge:
    """Measurements of an encoder on a sample of images, compared with the encoder it started from."""

    images: ImageSet
    from_weights: bool  # the start has weights worth keeping; otherwise they are random
    start: Numbers = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)  # what was found so far
    last: float = 0.0  # progress of the run at the last check
    seconds: float = 0.0  # that measuring the start took
    _neighbors: Tensor | None = None

    def begin(self, backbone: nn.Module) -> None:
        """Measure the encoder that training starts from."""
        count = min(len(self.images), SAMPLE)
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(0))
        self.order = order[:count].sort().values
        self.start = self.measure(backbone)

    @torch.no_grad()
    def measure(self, backbone: nn.Module) -> Numbers:
        """Measure NUMBERS, `first_lead`, and the spread of the features, which the layout needs (runs/layout.py)."""
        size = min(VIEW_SIZE, *self.images.size)
        whole = View(size, area=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0)
        view = View(size, area=AREA, flip=0.5 * self.images.mirror, jitter=JITTER)
        generator = torch.Generator().manual_seed(0)  # the same views every time, on any device
        count = len(self.order)
        copies = -(-(SAMPLE - 1) // max(1, count - 1))  # with fewer images, each has several second views
        x, one, *others = (  # NaN and inf, of a run that diverges, count as 0
            features(backbone, self.images, self.order, v, generator, bf16=False).nan_to_num(0, 0, 0)
            for v in (whole, view, *[view] * copies)
        )
        x = x.double()
        own = torch.arange(count, device=x.device)
        candidates = torch.cat(others)[: max(count, SAMPLE)]
        found = nearest(_centered_unit(one), _centered_unit(candidates), copies)[1]
        counts = (found < count) | (found % count != own[:, None])  # an image's further views are not looked for
        found = found.gather(1, counts.int().argmax(1, keepdim=True))[:, 0]
        unit = _centered_unit(x).float()
        neighbors = nearest(unit, unit, min(NEIGHBORS, len(x) - 1), own)[1]
        if self._neighbors is None:
            self._neighbors = neighbors
        kept = (neighbors[:, :, None] == self._neighbors[:, None, :]).any(2).double().mean()
        colors = self.images.images[self.order.to(self.images.images.device)].float().mean((2, 3)).to(x.device).double()
        numbers = {"view_retrieval": (found == own).double().mean(), "kept_neighbors": kept} | _variance(x, colors)
        return {name: round(float(value), 4) for name, value in numbers.items()}

    def due(self, progress: float) -> bool:
        """Whether another of CHECK_AT has been reached since the last check."""
        return any(self.last < point <= progress for point in CHECK_AT)

    def check(self, backbone: nn.Module, progress: float, step: int) -> list[str]:
        """Measure the encoder; return what is wrong with it, in sentences."""
        numbers = self.measure(backbone)
        found = problems(self.start, numbers, self.from_weights)
        self.points.append({"step": step, "progress": round(progress, 3), "problems": list(found), **numbers})
        self.last = progress
        return list(found.values())

    def summary(self) -> str:
        """Describe the last check and the start in a sentence."""
        count, now = len(self.images), self.points[-1]["view_retrieval"]
        among = f"{SAMPLE} images" if count >= SAMPLE else f"{SAMPLE} crops of {plural(count, 'image')}"
        return (
            f"judged without labels: it finds an image's other view among {among} in {now:.0%} of cases, before "
            f"training in {self.start['view_retrieval']:.0%}"
        )

    @property
    def is_worse(self) -> bool:
        """Whether the last check found the encoder worse than a start that is worth keeping."""
        return self.from_weights and bool(self.points) and bool({"worse", "collapse"} & {*self.points[-1]["problems"]})


def judge_start(
    start: nn.Module, images: ImageSet, from_weights: bool, device: torch.device, clock: Callable[[], float]
) -> Judge:
    """Move a start to the device and measure it; return the judge."""
    start.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    features(start, images, torch.arange(min(16, len(images))), bf16=False)  # the first use of a network is slower
    began, judge = clock(), Judge(images, from_weights)
    judge.begin(start)
    judge.seconds = clock() - began
    return judge


def problems(start: Numbers, now: Numbers, from_weights: bool) -> dict[str, str]:
    """Find what is wrong with an encoder: name -> a sentence."""
    found = {}
    retrieval, before = now["view_retrieval"], start["view_retrieval"]
    if from_weights and retrieval < MIN_RETRIEVAL * before:
        found["worse"] = (
            f"the encoder is getting worse than its start: it finds an image's other view among all images in "
            f"{retrieval:.0%} of cases, the start in {before:.0%}"
        )
    if now["first_share"] > MAX_FIRST and now["first_color"] > MAX_COLOR:
        found["color"] = (
            f"the encoder is learning color and brightness, not content: {now['first_share']:.0%} of the features' "
            f"variance is one direction, and the images' mean color explains {now['first_color']:.0%} of it"
        )
    if now["feature_rank"] < MIN_RANK and now["feature_rank"] < MIN_RANK_KEPT * start["feature_rank"]:
        found["collapse"] = (
            f"a partial collapse: the features have {now['feature_rank']:.1f} effective dimensions, "
            f"{start['feature_rank']:.1f} at the start"
        )
    return found


def trained_share(config: Config, start: Numbers) -> float:
    """Share of the trained weights in the encoder that is kept: twice the share of views the start does not find."""
    if isinstance(config.trained_share, float):
        return config.trained_share
    share = min(1.0, 2 * (1 - start["view_retrieval"]))
    return round(min(share, LEADING_SHARE) if has_dominant_direction(start) else share, 4)


def has_dominant_direction(start: Numbers) -> bool:
    return start["first_lead"] >= MAX_LEAD


def dominance_message(start: Numbers) -> str:
    """Explain why little of the training is kept if one direction dominates the features.

    Two folders of this kind were measured, with one seed each, NN and 5 labels: faces with and without masks went from
    96.5 and 99.0 to 96.9 and 97.1, solar cells of two types from 80.0 and 68.0 to 78.2 and 69.1. Training makes the
    directions more equal.
    """
    return (
        f"the start seems to see two kinds of images: one direction of its features has {start['first_lead']:.1f} "
        f"times the variance of any other. Training lost accuracy on such images, so at most {LEADING_SHARE:.0%} of "
        f"it is kept; {setting('trained_share', 1)} keeps all"
    )


def views_for(start: Numbers) -> list[Choice]:
    """Choose the views, and the smallest crops, for training from a start.

    Color changes and large crops protect a good start. With MNN and 5 labels per class, chess pieces lost 3.5 points
    without either, lost 0.7 with color changes, and gained 0.5 with both. If the start does not know the images, colors
    and details may be what tells them apart: stained blood cells gained 13 points with the usual crops and no color
    changes, but only 3 with color changes, and only 3 with large crops.
    """
    found = f"the start finds an image's other view in {start['view_retrieval']:.1%} of cases"
    if start["view_retrieval"] >= MIN_KNOWN:
        why = f"{found}, so it knows such images, and color changes and blur protect what it knows"
        protects = f"large crops protect what the start knows; {setting('crop_area', CROP_AREA)} allows smaller ones"
        return [
            Choice("views", "s/w", f"{why}; {method_option('views', 'w/w')} leaves them out"),
            Choice("crop_area", KNOWN_CROP_AREA, protects),
        ]
    why = f"{found}, so colors stay: they may be what tells these images apart"
    details = "small crops, because details may be what tells these images apart"
    return [
        Choice("views", "w/w", f"{why}; {method_option('views', 's/w')} changes them"),
        Choice("crop_area", CROP_AREA, details),
    ]


def heads_first(config: Config, share: float | None) -> float:
    """Share of the run in which the heads learn alone, by the share of the trained weights that will be kept.

    Heads start from random weights, and their first gradients would spoil a good backbone. The better it is, the longer
    they learn alone. If one direction dominates the features, they also learn alone for long. `share` is None for a run
    that is not averaged with its start.
    """
    if isinstance(config.heads_first, float):
        return config.heads_first
    return 0.0 if share is None else min(MOST_HEADS_FIRST, LEAST_HEADS_FIRST + 0.4 * (1 - share))


def max_useful_steps(share: float) -> int:
    """Most steps worth training. More did not help, and lost accuracy on images that the start knows.

    `share` is that of the trained weights. It is small if the start knows the images well (docs/folders.md, "Training
    for longer"), or if little of the training is to be kept for another reason.
    """
    return min(MOST_STEPS, round(ENOUGH_STEPS / (1 - share))) if share < 1 else MOST_STEPS


class WeightAverage:
    """Average of the weights a run started from and those of its student (Wortsman et al., 2022, WiSE-FT)."""

    def __init__(self, start: nn.Module, share: float) -> None:
        self.start, self.share = {name: t.clone() for name, t in start.state_dict().items()}, share
        self._encoder = copy.deepcopy(start).eval()

    def weights(self, student: nn.Module) -> dict[str, Tensor]:
        """Start + share * (student - start)."""
        return {
            name: self.start[name].lerp(t, self.share) if t.is_floating_point() else t.clone()
            for name, t in student.state_dict().items()
        }

    def encoder(self, student: nn.Module) -> nn.Module:
        """A network with these weights; the next call changes them."""
        self._encoder.load_state_dict(self.weights(student))
        return self._encoder


def _variance(x_MF: Tensor, colors_M3: Tensor) -> dict[str, Tensor]:
    """Measure how the variance of unit features is distributed, and how much of it color explains."""
    unit = F.unit(x_MF)
    centered = unit - unit.mean(0)
    total = centered.square().sum().clamp(min=1e-30)
    values, vectors = torch.linalg.eigh(centered @ centered.T)  # M is usually smaller than F
    shares = values.clamp(min=0) / total
    color = torch.linalg.qr(colors_M3 - colors_M3.mean(0) + 1e-12 * torch.eye(*colors_M3.shape).to(x_MF)).Q
    return {
        "spread": (total / len(x_MF)).sqrt(),
        "feature_rank": effective_rank(values),
        "first_share": shares[-1],
        "first_lead": shares[-1] / shares[-2].clamp(min=1e-3) if len(shares) >= FEW_IMAGES else shares.new_zeros(()),
        "first_color": (color.T @ vectors[:, -1]).square().sum(),
        "color_share": (color.T @ centered).square().sum() / total,
    }


def _centered_unit(x_MF: Tensor) -> Tensor:
    centered = x_MF - x_MF.mean(0)
    return centered / centered.norm(dim=1, keepdim=True).clamp(min=1e-12)
