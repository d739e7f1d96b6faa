"""BYOL: bootstrap your own latent (Grill et al., arXiv 2006.07733), as the MNN authors run it.

The student's prediction of one view is drawn to the teacher's embedding of the other. The momentum is constant, both
views are strong, and both directions are averaged. The original has LARS, a momentum schedule, solarized views and
wider heads, and sums the directions (loss_scale=2 does that).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mixnn import functional as F
from mixnn.config import other_default
from mixnn.methods.contract import About, Direction
from mixnn.methods.siamese import Common, Momentum, Siamese


@dataclass(frozen=True)
class BYOLOptions(Momentum, Common):
    """Two strong views, a teacher."""

    views: str = other_default(Common, "views", "s/s", "authors' baseline code")


class BYOL(Siamese):
    """Mean squared distance of the prediction p from the teacher's z: mean of d(p, z)."""

    about = About(2020, "Grill et al., arXiv 2006.07733", "predict the teacher's embedding of the other view")
    Options = BYOLOptions

    def loss(self, d: Direction) -> Tensor:
        return F.weighted_squared_error(d.p_BD, F.unit(d.z_BD)[:, None], d.p_BD.new_ones(1))
