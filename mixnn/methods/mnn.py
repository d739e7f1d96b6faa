"""MNN: mixed nearest neighbors (Long, Peng, Li, arXiv 2311.00562).

The student's prediction p is drawn to the teacher's embedding z (weight 1) and to z's K nearest neighbors in the
support set, each mixed with z by a random lam (weight 1/K). With K = 0 this is BYOL; unmixed and with weights 1/(K+1)
it is MSF.
Where the paper's text, its Algorithm 1 and the authors' code disagree, an option lists the choices and says where its
default comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mixnn import functional as F
from mixnn.config import option
from mixnn.methods.contract import About, Direction
from mixnn.methods.mixture import Mixture, MixtureOptions


@dataclass(frozen=True)
class MNNOptions(MixtureOptions):
    """Targets, and how many views the student compares with each."""

    student_views: int = option(
        1, "views like x1 that the student compares with the target of x2", "not in the paper: 1", low=1, high=16
    )


class MNN(Mixture):
    """Squared distance of the prediction p from z, plus its mean squared distance from the mixed neighbors.

    d(p, z) + mean over i of d(p, lam z_i + (1 - lam) z)
    """

    about = About(2023, "Long, Peng, Li, arXiv 2311.00562", "predict z and its neighbors, each mixed with z")
    Options = MNNOptions
    options: MNNOptions

    @classmethod
    def directions(cls, o: MNNOptions) -> tuple[tuple[int, int], ...]:
        """Those of x1 and x2, then x3>2, x4>2, ... of further views."""
        return (*super().directions(o), *((i, 1) for i in range(2, o.student_views + 1)))

    @property
    def views(self) -> tuple[str, ...]:
        return (*super().views, *super().views[:1] * (self.options.student_views - 1))

    def loss(self, d: Direction) -> Tensor:
        targets_BND, w_BN = self.targets(d, d.neighbors_BKD), self.weights(d, d.neighbors_BKD)
        return F.weighted_squared_error(d.p_BD, targets_BND, w_BN)
