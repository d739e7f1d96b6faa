"""Un-Mix: rethinking image mixtures (Shen et al., arXiv 2003.05438), as the MNN authors run it: on BYOL.

In addition to the pair x1, x2 there is m: x2 mixed with the same batch in reversed order, by mixup or by CutMix; a coin
decides. lam is the share of x2 in m. m replaces x2 with weight lam, and m in reversed order replaces it with weight
1 - lam. m is encoded once, and its embeddings in reversed order serve as the reverse. The authors' code calls the
method three times per step and moves the teacher in each call, so a step has the momentum cubed (ema_per_call). The
original is built on MoCo (base=moco), gives mixed images to the student only (mixed=student), and mixes x1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor, nn

from mixnn import functional as F
from mixnn.config import option
from mixnn.dist import PartialBatch
from mixnn.methods.byol import BYOL
from mixnn.methods.contract import About, Batch, Direction
from mixnn.methods.moco import MoCo, MoCoOptions
from mixnn.methods.siamese import ByView, Siamese, Support

BASES: dict[str, type[Siamese]] = {"byol": BYOL, "moco": MoCo}
X1, X2, MIXED, REVERSED = range(4)


@dataclass(frozen=True)
class UnMixOptions(MoCoOptions):
    """Options of the base, and how mixed images are used; support set and temperature are for base=moco."""

    base: str = option("byol", "method it is built on", "authors' baseline code", choices=tuple(BASES))
    mixed: str = option(
        "both",
        "mixed images go through both networks, or through the student only",
        "authors' baseline code; the original's is student",
        choices=("both", "student"),
    )
    ema_per_call: bool = option(
        False, "momentum cubed: three updates per step", "authors' baseline code, for the published numbers: true"
    )


class UnMix(Siamese):
    """Y(x1, x2) + lam Y(x1, m) + (1 - lam) Y(x1, m reversed), Y the base's loss of both directions."""

    about = About(2020, "Shen et al., arXiv 2003.05438", "BYOL, with mixed images as partial positives")
    Options = UnMixOptions
    options: UnMixOptions
    base: Siamese

    @classmethod
    def directions(cls, o: UnMixOptions) -> tuple[tuple[int, int], ...]:
        if o.mixed == "both":
            pairs = ((X1, X2), (X2, X1), (X1, MIXED), (MIXED, X1), (X1, REVERSED), (REVERSED, X1))
        else:
            pairs = ((X1, X2), (X2, X1), (MIXED, X2), (MIXED, X1), (REVERSED, X2), (REVERSED, X1))
        return pairs if o.symmetric else pairs[::2]

    @classmethod
    def encoded_views(cls, o: UnMixOptions) -> tuple[tuple[int, ...], tuple[int, ...]]:
        students, targets = (sorted(set(side) - {REVERSED}) for side in zip(*cls.directions(o), strict=True))
        return tuple(students), tuple(targets)

    @classmethod
    def has_support(cls, o: UnMixOptions) -> bool:
        return issubclass(BASES[o.base].Options, Support)

    def build(self, backbone: nn.Module, num_features: int) -> None:
        base = BASES[self.options.base]
        self.base = base(None, **{f.name: getattr(self.options, f.name) for f in fields(base.Options)})
        super().build(backbone, num_features)

    def heads(self, features: int) -> tuple[nn.Module, nn.Module | None]:
        return self.base.heads(features)

    def draws(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        return super().draws(batch_size) | {"coin": (), "share": (), "centre": (2,)}

    def image_rows(self, draws: Mapping[str, Tensor], own: Tensor) -> Tensor:
        rows = super().image_rows(draws, own)
        return torch.cat([rows, draws["shuffle"].shape[1] - 1 - rows])

    def all_views(self, batch: Batch) -> tuple[Tensor | PartialBatch, ...]:
        x2, map_HW = batch.views[X2], self.mixing_map(batch)
        mixed: Tensor | PartialBatch
        if isinstance(x2, Tensor):
            mixed = map_HW * x2 + (1 - map_HW) * x2.flip(0)
        else:
            mixed = PartialBatch(partial(_mixed_rows, x2, map_HW), x2.shape, x2.device)
        return *batch.views, mixed

    def by_view(self, numbers: tuple[int, ...], stacked: Tensor) -> ByView:
        embeddings = super().by_view(numbers, stacked)
        if MIXED in embeddings:
            embeddings[REVERSED] = embeddings[MIXED].flip(0)
        return embeddings

    def mixing_map(self, batch: Batch) -> Tensor:
        """x2's share in m, pixel by pixel, (H, W)."""
        draws = batch.draws
        return F.mixing_map(draws["coin"], draws["share"], draws["centre"], *batch.views[X2].shape[-2:])

    def loss(self, d: Direction) -> Tensor:
        return self.base.loss(d)

    def combine(self, losses: list[Tensor], batch: Batch) -> Tensor:
        clean, mixed, flipped = torch.stack(losses).unflatten(0, (3, -1)).mean(1)
        lam = self.mixing_map(batch).mean()
        return clean + lam * mixed + (1 - lam) * flipped

    @property
    def teacher_momentum(self) -> float:
        return self.options.momentum ** (3 if self.options.ema_per_call else 1)


def _mixed_rows(x2: PartialBatch, map_HW: Tensor, rows: Tensor) -> Tensor:
    """Rows of m: each of x2 mixed with its counterpart in the reversed batch."""
    return map_HW * x2[rows] + (1 - map_HW) * x2[len(x2) - 1 - rows]
