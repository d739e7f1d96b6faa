"""Targets that are z and its neighbors, mixed and weighted: what MNN adds, and what CMSF and SNCLR can do too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mixnn import functional as F
from mixnn.config import option
from mixnn.methods.contract import Direction
from mixnn.methods.siamese import Common, Momentum, Neighbors, Siamese


@dataclass(frozen=True)
class MixtureOptions(Neighbors, Momentum, Common):
    """How targets are weighted and mixed."""

    weights: str = option(
        "wse",
        "of z and of a neighbor: wse 1 and 1/K, mse 1/(K+1) each, cas 1 and attention, explicit",
        "paper, eq. 3",
        choices=("wse", "mse", "cas", "explicit"),
    )
    positive_weight: float = option(
        1.5, "weight of z, for weights=explicit", "what mixing amounts to on average", low=0
    )
    neighbor_weight: float = option(0.5, "weight of all K neighbors together, for weights=explicit", "likewise", low=0)
    cas_temperature: float = option(1.0, "of the attention, for weights=cas", "authors' SNCLR code", low=1e-3)
    cas_detach: bool = option(False, "stop the gradient through the attention", "authors' SNCLR code lets it flow")
    mixer: str = option(
        "raw_renorm",
        "raw_renorm mixes raw vectors, then makes them unit; unit mixes unit vectors; unit_renorm does both; none",
        "paper, Algorithm 1, and the code behind its numbers; the text reads as unit",
        choices=("raw_renorm", "unit", "unit_renorm", "none"),
    )
    lam: float | str = option(
        "uniform",
        "share of the neighbor in a mixture: drawn, or a number",
        "paper, eq. 4",
        choices=("uniform",),
        low=0,
        high=1,
    )
    lam_scope: str = option(
        "direction", "one draw for a direction, or for a sample", "authors' code", choices=("direction", "sample")
    )


class Mixture(Siamese):
    """A method whose targets are z and neighbors, mixed and weighted as its options say."""

    options: MixtureOptions

    def draws(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        shapes = super().draws(batch_size)
        if self.options.mixer != "none" and self.options.lam == "uniform":
            scope = batch_size if self.options.lam_scope == "sample" else 1
            shapes["lam"] = (len(self.pairs), scope, 1, 1)
        return shapes

    def targets(self, d: Direction, neighbors_BKD: Tensor) -> Tensor:
        """z and the mixtures of z with its neighbors, (B, N, D)."""
        mixed_BKD = F.mix(neighbors_BKD, d.z_BD, self.lam(d), self.options.mixer)
        return torch.cat([F.unit(d.z_BD)[:, None], mixed_BKD], dim=1)

    def lam(self, d: Direction) -> Tensor | float:
        """Share of the neighbor in a mixture; 1 where nothing is mixed."""
        if self.options.mixer == "none":
            return 1.0
        return self.options.lam if isinstance(self.options.lam, float) else d.draws["lam"][d.number]

    def weights(self, d: Direction, neighbors_BKD: Tensor) -> Tensor:
        """w_0 of z and w_1..w_K of the neighbors, (N,) or (B, N)."""
        o = self.options
        if o.weights == "wse":
            return F.wse_weights(o.topk, d.p_BD)
        if o.weights == "mse":
            return F.mse_weights(o.topk, d.p_BD)
        if o.weights == "cas":
            return F.cas_weights(d.q_BD.detach() if o.cas_detach else d.q_BD, neighbors_BKD, o.cas_temperature)
        return F.split_weights(o.positive_weight, o.neighbor_weight, o.topk, d.p_BD)
