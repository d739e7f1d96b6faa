"""CMSF: constrained mean shift (Navaneet et al., arXiv 2112.04607), as the MNN authors run it.

MSF twice, with the same prediction: toward the nearest neighbors of z, and toward neighbors that are near in an
auxiliary space, whose rows lie in a second support set aligned with the first. The authors' auxiliary space is the
teacher's embedding of a third view (aux_view). The original's is each image's embedding at its previous visit
(prev_epoch); there the nearest K' in that space are kept, and the K nearest to z among them are the neighbors. The
original is asymmetric and pushes first, as MSF's. weights= and mixer= are MNN's, applied to both lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mixnn import functional as F
from mixnn.config import UserError, option, other_default
from mixnn.methods.contract import About, Aux, Batch, Direction, Found
from mixnn.methods.mixture import Mixture, MixtureOptions
from mixnn.methods.siamese import Encoded, take
from mixnn.nn.support_set import Rows


@dataclass(frozen=True)
class CMSFOptions(MixtureOptions):
    """MSF's weights and no mixture unless asked for; the auxiliary space."""

    weights: str = other_default(MixtureOptions, "weights", "mse", "authors' baseline code")
    mixer: str = other_default(MixtureOptions, "mixer", "none", "authors' baseline code")
    auxiliary: str = option(
        "aux_view",
        "auxiliary space: aux_view, a third view (as x2); prev_epoch, the image's last visit",
        "authors' baseline code; the original's is prev_epoch",
        choices=("aux_view", "prev_epoch"),
    )
    constraint: int = option(
        0, "K', kept by the auxiliary space for the K nearest to z; 0: K itself", "original: 5 or 10", low=0
    )

    def check(self) -> None:
        super().check()
        if self.constraint and not self.topk <= self.constraint <= self.support_size:
            raise UserError(
                f"constraint={self.constraint} must lie between topk={self.topk} and support_size={self.support_size}"
            )


class CMSF(Mixture):
    """Half of MSF's loss with z's own neighbors, half with those of the auxiliary space."""

    about = About(2021, "Navaneet et al., arXiv 2112.04607", "MSF, and once more with neighbors of another space")
    Options = CMSFOptions
    options: CMSFOptions
    facts = ("num_images",)
    num_rings = 2  # z, and the auxiliary space row by row beside it
    previous_MD: Tensor

    def __init__(self, backbone: nn.Module, num_images: int, **options: Any) -> None:
        super().__init__(backbone, **options)
        self.remembers = self.options.auxiliary == "prev_epoch"
        shape = (num_images if self.remembers else 0, self.options.dim)
        self.register_buffer("previous_MD", torch.randn(shape))

    @classmethod
    def encoded_views(cls, o: CMSFOptions) -> tuple[tuple[int, ...], tuple[int, ...]]:
        students, teachers = super().encoded_views(o)
        return students, (*teachers, 2) if cls.has_third_view(o) else teachers

    @classmethod
    def has_third_view(cls, o: CMSFOptions) -> bool:
        return o.auxiliary == "aux_view" and cls.has_support(o)

    @property
    def views(self) -> tuple[str, ...]:
        first, second = super().views
        return (first, second, second) if self.has_third_view(self.options) else (first, second)

    def loss(self, d: Direction) -> Tensor:
        lists = [found.z_BKD for found in d.found] or [d.neighbors_BKD]
        losses = [
            F.weighted_squared_error(d.p_BD, self.targets(d, list_BKD), self.weights(d, list_BKD)) for list_BKD in lists
        ]
        return torch.stack(losses).mean()

    def search(self, i: int, z_BD: Tensor, rings: tuple[Rows, ...], seen: Encoded, batch: Batch) -> tuple[Found, ...]:
        first, auxiliary = rings
        index_BC = F.nearest(
            F.cosines(self.auxiliary(seen, batch), auxiliary.z_QD), self.options.constraint or self.topk
        )
        if self.options.constraint:  # of these, the nearest to z
            sim_BC = F.cosines(z_BD, first.z_QD).gather(1, index_BC)
            index_BC = index_BC.gather(1, F.nearest(sim_BC, self.topk))
        return self.neighbors(i, z_BD, first, batch), take(first, index_BC)

    def auxiliary(self, seen: Encoded, batch: Batch) -> Tensor:
        return self.previous_MD[batch.index_B] if self.remembers else seen.z[2]

    def rows_to_push(self, seen: Encoded, batch: Batch) -> tuple[Rows, ...]:
        rows = super().rows_to_push(seen, batch)
        return (rows[0], Rows(self.auxiliary(seen, batch).clone(), *rows[1][1:])) if rows else ()

    def after_step(self, aux: Aux) -> None:
        super().after_step(aux)
        if self.remembers and aux.push:
            self.previous_MD.index_copy_(0, aux.push[0].index_Q, aux.push[0].z_QD)
