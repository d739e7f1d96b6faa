"""MNN: mixed nearest neighbors (Long, Peng, Li, arXiv 2311.00562).

The student's prediction p is drawn to the teacher's embedding z (weight 1) and to z's K nearest neighbors in the
support set, each mixed with z by a random lam (weight 1/K). With K = 0 this is BYOL; unmixed and with weights 1/(K+1)
it is MSF.
Where the paper's text, its Algorithm 1 and the authors' code disagree, an option names the choices and says whose the
default is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mixnn import functional as F
from mixnn.config import option
from mixnn.methods import regression


@dataclass(frozen=True)
class MNNOptions(regression.NeighborOptions):
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


class MNN(regression.Regression):
    """d(p, z) + mean over i of d(p, lam z_i + (1 - lam) z)."""

    Options = MNNOptions
    options: MNNOptions

    def draws(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        scope = batch_size if self.options.lam_scope == "sample" else 1
        return super().draws(batch_size) | {"lam": (self.passes, scope, 1, 1)}

    def loss(self, d: regression.Direction) -> Tensor:
        lam = self.options.lam if isinstance(self.options.lam, float) else d.draws["lam"]
        mixed_BKD = F.mix(d.neighbors_BKD, d.z_BD, lam, self.options.mixer)
        targets_BND = torch.cat([F.unit(d.z_BD)[:, None], mixed_BKD], dim=1)
        return F.weighted_squared_error(d.p_BD, targets_BND, self.weights(d))

    def weights(self, d: regression.Direction) -> Tensor:
        """w_0 of z and w_1..w_K of the neighbors, (N,) or (B, N)."""
        o = self.options
        if o.weights == "wse":
            return F.wse_weights(o.topk, d.p_BD)
        if o.weights == "mse":
            return F.mse_weights(o.topk, d.p_BD)
        if o.weights == "cas":
            return F.cas_weights(d.q_BD.detach() if o.cas_detach else d.q_BD, d.neighbors_BKD, o.cas_temperature)
        return F.split_weights(o.positive_weight, o.neighbor_weight, o.topk, d.p_BD)
