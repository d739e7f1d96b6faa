"""CMSF: constrained mean shift (Navaneet et al., arXiv 2112.04607), as the MNN authors run it.

The loss is MSF's, taken twice with the same prediction: with the nearest neighbors of z, and with neighbors that are
near in an auxiliary space, whose rows are in a second support set aligned with the first. The authors' auxiliary space
is the teacher's embedding of a third view (aux_view). The original's is each image's embedding in the previous epoch
(prev_epoch): the K' nearest rows in that space are kept, and the K of them nearest to z are the neighbors. Like MSF's,
the original is asymmetric and pushes before it searches. weights= and mixer= are MNN's, applied to both lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mixnn import functional as F
from mixnn.config import UserError, option, other_default
from mixnn.methods.contract import About, Aux, Batch, Direction, NeighborList
from mixnn.methods.mixture import Mixture, MixtureOptions
from mixnn.methods.siamese import ByView, take_rows
from mixnn.nn.support_set import SupportRows


@dataclass(frozen=True)
class CMSFOptions(MixtureOptions):
    """MSF's weights and no mixture by default, and the auxiliary space."""

    weights: str = other_default(MixtureOptions, "weights", "mse", "authors' baseline code")
    mixer: str = other_default(MixtureOptions, "mixer", "none", "authors' baseline code")
    auxiliary: str = option(
        "aux_view",
        "auxiliary space: aux_view, a third view (as x2); prev_epoch, the image's embedding in the previous epoch",
        "authors' baseline code; the original's is prev_epoch",
        choices=("aux_view", "prev_epoch"),
    )
    constraint: int = option(
        0,
        "K', neighbors kept in the auxiliary space, of which the K nearest to z are used; 0: K' = K",
        "original: 5 or 10",
        low=0,
    )

    def check(self) -> None:
        super().check()
        if self.constraint and not self.topk <= self.constraint <= self.support_size:
            raise UserError(
                f"constraint={self.constraint} must lie between topk={self.topk} and support_size={self.support_size}"
            )


class CMSF(Mixture):
    """Mean of two MSF losses: with z's nearest neighbors, and with those of the auxiliary space."""

    about = About(2021, "Navaneet et al., arXiv 2112.04607", "MSF, and once more with neighbors from another space")
    Options = CMSFOptions
    options: CMSFOptions
    facts = ("num_images",)
    num_rings = 2  # z, and the same images' embeddings in the auxiliary space
    previous_MD: Tensor

    def __init__(self, backbone: nn.Module | None, num_images: int = 0, **options: Any) -> None:
        self.num_images = num_images  # of the data set, for auxiliary=prev_epoch
        super().__init__(backbone, **options)

    def build(self, backbone: nn.Module, num_features: int) -> None:
        super().build(backbone, num_features)
        self.has_memory = self.options.auxiliary == "prev_epoch"
        if self.has_memory and not self.num_images:
            raise UserError(
                "auxiliary=prev_epoch remembers every image of the data set: pass their number, num_images="
            )
        shape = (self.num_images if self.has_memory else 0, self.options.dim)
        self.register_buffer("previous_MD", torch.randn(shape))

    @classmethod
    def encoded_views(cls, o: CMSFOptions) -> tuple[tuple[int, ...], tuple[int, ...]]:
        students, teachers = super().encoded_views(o)
        return students, (*teachers, 2) if cls.has_third_view(o) else teachers

    @classmethod
    def uses_index(cls, o: CMSFOptions) -> bool:
        return o.auxiliary == "prev_epoch"

    @classmethod
    def has_third_view(cls, o: CMSFOptions) -> bool:
        return o.auxiliary == "aux_view" and cls.has_support(o)

    @property
    def views(self) -> tuple[str, ...]:
        first, second = super().views
        return (first, second, second) if self.has_third_view(self.options) else (first, second)

    def loss(self, d: Direction) -> Tensor:
        losses = [
            F.weighted_squared_error(d.p_BD, self.targets(d, found.z_BKD), self.weights(d, found.z_BKD))
            for found in d.neighbor_lists
        ]
        return torch.stack(losses).mean()

    def search(
        self, i: int, z_BD: Tensor, supports: tuple[SupportRows, ...], z: ByView, batch: Batch
    ) -> tuple[NeighborList, ...]:
        first, second = supports
        num = self.options.constraint or self.topk
        index_BC = F.nearest_rows(self.auxiliary(z, batch), second.z_QD, num)
        if self.options.constraint:  # keep those nearest to z
            sim_BC = F.cosines(z_BD, first.z_QD).gather(1, index_BC)
            index_BC = index_BC.gather(1, F.nearest(sim_BC, self.topk))
        return self.neighbors(i, z_BD, first, batch), take_rows(first, index_BC)

    def auxiliary(self, z: ByView, batch: Batch) -> Tensor:
        """The batch's embeddings in the auxiliary space, (B, D)."""
        return self.previous_MD[batch.index_B] if self.has_memory else z[2]

    def rows_to_push(self, z: ByView, batch: Batch) -> tuple[SupportRows, ...]:
        rows = super().rows_to_push(z, batch)
        return (rows[0], SupportRows(self.auxiliary(z, batch).clone(), *rows[1][1:])) if rows else ()

    def update_state(self, aux: Aux) -> None:
        super().update_state(aux)
        if self.has_memory and aux.push:
            self.previous_MD.index_copy_(0, aux.push[0].index_Q, aux.push[0].z_QD)
