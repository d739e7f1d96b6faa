"""Targets made of z and its neighbors, mixed and weighted: MNN's contribution, which CMSF and SNCLR can use too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        "weight of z and of each neighbor: wse 1 and 1/K, mse 1/(K+1) each, cas 1 and attention, explicit",
        "paper, eq. 3",
        choices=("wse", "mse", "cas", "explicit"),
    )
    positive_weight: float = option(
        1.5, "weight of z, for weights=explicit", "the weight it has on average with mixing", low=0
    )
    neighbor_weight: float = option(
        0.5, "weight of all K neighbors together, for weights=explicit", "the weight they have with mixing", low=0
    )
    cas_temperature: float = option(
        1.0, "temperature of the attention, for weights=cas", "authors' SNCLR code", low=1e-3
    )
    cas_detach: bool = option(
        False,
        "stop the gradient through the attention; without negatives, embeddings may collapse if it flows",
        "authors' SNCLR code lets it flow",
    )
    mixer: str = option(
        "raw_renorm",
        "raw_renorm mixes raw vectors, then normalizes; unit mixes unit vectors; unit_renorm does both; none",
        "paper, Algorithm 1, and the code behind its numbers; the text reads as unit",
        choices=F.MIXERS,
    )
    lam: float | str = option(
        "uniform",
        "share of the neighbor in a mixture: drawn uniformly, or a number",
        "paper, eq. 4",
        choices=("uniform",),
        low=0,
        high=1,
    )
    lam_scope: str = option(
        "direction", "one draw per direction, or per sample", "authors' code", choices=("direction", "sample")
    )


def share_and_scale(
    options: Mapping[str, Any], norm_ratio: float = 1.0, cosine: float | None = None
) -> tuple[float, float]:
    """rho, the neighbors' share of the weights on unit z and z_i in the gradient, and s, the sum of these weights.

    Mixing moves 1 - lam of the neighbors' weight to z. Random lam is averaged over. By default vectors count as unit
    and mixtures as not normalized again; given |z_i| / |z| and cos(z, z_i), as logged, raw lengths and the division by
    a mixture's own length are included.
    """
    topk, scale, mixer = options.get("topk", 0), options["loss_scale"], options.get("mixer", "none")
    weights = {
        "mse": (1 / (topk + 1), topk / (topk + 1)),
        "explicit": (options.get("positive_weight", 1.0), options.get("neighbor_weight", 0.0)),
    }
    positive, neighbors = weights.get(options.get("weights", "mse"), (1.0, 1.0))
    neighbors = neighbors if topk else 0.0
    lam = 1.0 if mixer == "none" else options["lam"]
    lams = [(i + 0.5) / 1000 for i in range(1000)] if lam == "uniform" else [lam]
    length = norm_ratio if mixer == "raw_renorm" else 1.0
    on_z = on_neighbors = 0.0
    for lam in lams:
        norm = 1.0
        if mixer.endswith("renorm") and cosine is not None:
            sine = math.sqrt(max(0.0, 1 - cosine**2))  # a mean of rounded cosines may be a little above 1
            norm = math.hypot(1 - lam + lam * length * cosine, lam * length * sine)
        on_z += (positive + neighbors * (1 - lam) / norm) / len(lams)
        on_neighbors += neighbors * lam * length / norm / len(lams)
    return on_neighbors / (on_z + on_neighbors), scale * (on_z + on_neighbors)


class Mixture(Siamese):
    """A method whose targets are z and its neighbors, mixed and weighted by its options."""

    options: MixtureOptions

    def draws(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        shapes = super().draws(batch_size)
        if self.options.mixer != "none" and self.options.lam == "uniform":
            scope = batch_size if self.options.lam_scope == "sample" else 1
            shapes["lam"] = (len(self.pairs), scope, 1, 1)
        return shapes

    def targets(self, d: Direction, neighbors_BKD: Tensor) -> Tensor:
        """z and the mixtures of z with its neighbors, (B, N, D)."""
        return F.mixed_targets(neighbors_BKD, d.z_BD, self.lam(d), self.options.mixer)

    def lam(self, d: Direction) -> Tensor | float:
        """Share of the neighbor in a mixture; 1 where nothing is mixed."""
        if self.options.mixer == "none":
            return 1.0
        return self.options.lam if isinstance(self.options.lam, float) else d.draws["lam"][d.number]

    def weights(self, d: Direction, neighbors_BKD: Tensor) -> Tensor:
        """Weights of z and of its K neighbors, (N,) or (B, N)."""
        o = self.options
        if o.weights == "wse":
            return F.wse_weights(o.topk, d.p_BD)
        if o.weights == "mse":
            return F.mse_weights(o.topk, d.p_BD)
        if o.weights == "cas":
            return F.cas_weights(d.q_BD.detach() if o.cas_detach else d.q_BD, neighbors_BKD, o.cas_temperature)
        return F.split_weights(o.positive_weight, o.neighbor_weight, o.topk, d.p_BD)

    def neighbor_share(self, norm_ratio: float, cosine: float) -> float | None:
        return share_and_scale(vars(self.options), norm_ratio, cosine)[0]
