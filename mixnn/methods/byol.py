"""BYOL: bootstrap your own latent (Grill et al., arXiv 2006.07733), as the MNN authors run it.

The student's prediction of one view is drawn to the teacher's embedding of the other. Constant momentum, two strong
views, both directions averaged; the original has LARS, a momentum schedule, solarised views, wider heads, and sums
the directions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mixnn import functional as F
from mixnn.config import option
from mixnn.methods import regression
from mixnn.methods.contract import REGIMES


@dataclass(frozen=True)
class BYOLOptions(regression.CommonOptions):
    """The common knobs, with two strong views."""

    views: str = option(
        "s/s", "augmentation of x1/x2: s strong, w weak", "authors' baseline code", choices=tuple(REGIMES)
    )


class BYOL(regression.Regression):
    """mean d(p, z)."""

    Options = BYOLOptions

    def loss(self, d: regression.Direction) -> Tensor:
        targets_BND = F.unit(d.z_BD)[:, None]
        return F.weighted_squared_error(d.p_BD, targets_BND, d.p_BD.new_ones(1))
