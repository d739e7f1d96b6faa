"""Un-Mix: rethinking image mixtures (Shen et al., arXiv 2003.05438), as the MNN authors run it: on BYOL.

Beside the pair x1, x2 there is m, x2 mixed with the batch in reversed order: by one share everywhere, or by pasting a
box, a coin decides. m counts as x2 with the share lam that is x2's, and, reversed, with 1 - lam. m is encoded once;
its reverse is its embeddings reversed. In the authors' code each of its three calls moves the teacher, so that a
step's momentum is m^3 (ema_per_call). The original is built on MoCo (base=moco) and gives mixed images to the student
alone (mixed=student); it mixes x1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mixnn import functional as F
from mixnn.config import option
from mixnn.methods.byol import BYOL
from mixnn.methods.contract import About, Batch, Direction
from mixnn.methods.moco import MoCo, MoCoOptions
from mixnn.methods.siamese import Encoded, Siamese

X1, X2, MIXED, REVERSED = range(4)


@dataclass(frozen=True)
class UnMixOptions(MoCoOptions):
    """The base's, and how mixed images are used; support set and temperature are for base=moco."""

    base: str = option("byol", "the loss of a pair", "authors' baseline code", choices=("byol", "moco"))
    mixed: str = option(
        "both",
        "mixed images go through both networks, or the student alone",
        "authors' baseline code; the original's is student",
        choices=("both", "student"),
    )
    ema_per_call: bool = option(
        False, "momentum m^3, as if three updates a step", "authors' baseline code, for the published numbers: true"
    )


class UnMix(Siamese):
    """Y(x1, x2) + lam Y(x1, m) + (1 - lam) Y(x1, m reversed), Y the base's loss of both directions."""

    about = About(2020, "Shen et al., arXiv 2003.05438", "BYOL, with mixed images as partial positives")
    Options = UnMixOptions
    options: UnMixOptions

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
        return o.base == "moco"

    def heads(self, features: int) -> tuple[nn.Module, nn.Module | None]:
        return (BYOL if self.options.base == "byol" else MoCo).heads(self, features)  # type: ignore[arg-type]

    def draws(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        return super().draws(batch_size) | {"coin": (), "share": (), "centre": (2,)}

    def encode(self, batch: Batch) -> Encoded:
        x2, map_HW = batch.views[X2], self.map(batch)
        mixed = map_HW * x2 + (1 - map_HW) * x2.flip(0)
        seen = self.encode_views((*batch.views, mixed), batch.draws)
        for side in seen:
            if MIXED in side:
                side[REVERSED] = side[MIXED].flip(0)
        return seen

    def map(self, batch: Batch) -> Tensor:
        """x2's share in m, pixel by pixel, (H, W)."""
        draws = batch.draws
        return F.mixing_map(draws["coin"], draws["share"], draws["centre"], *batch.views[X2].shape[-2:])

    def loss(self, d: Direction) -> Tensor:
        return (BYOL if self.options.base == "byol" else MoCo).loss(self, d)  # type: ignore[arg-type]

    def combine(self, losses: list[Tensor], batch: Batch) -> Tensor:
        clean, mixed, flipped = torch.stack(losses).unflatten(0, (3, -1)).mean(1)
        lam = self.map(batch).mean()
        return clean + lam * mixed + (1 - lam) * flipped

    @property
    def teacher_momentum(self) -> float:
        return self.options.momentum ** (3 if self.options.ema_per_call else 1)
