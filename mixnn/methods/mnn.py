"""MNN: mixed nearest neighbors (Long, Peng, Li, arXiv 2311.00562).

The student's prediction p is drawn to the teacher's embedding z (weight 1) and to z's K nearest neighbors in the
support set, each mixed with z by a random lam (weight 1/K). With K = 0 this is BYOL; unmixed and with weights 1/(K+1)
it is MSF.
Where the paper's text, its Algorithm 1 and the authors' code disagree, an option lists the choices and says where its
default comes from.
"""

from __future__ import annotations

from torch import Tensor

from mixnn import functional as F
from mixnn.methods.contract import About, Direction
from mixnn.methods.mixture import Mixture, MixtureOptions


class MNN(Mixture):
    """d(p, z) + mean over i of d(p, lam z_i + (1 - lam) z)."""

    about = About(2023, "Long, Peng, Li, arXiv 2311.00562", "predict z and its neighbors, each mixed with z")
    Options = MixtureOptions

    def loss(self, d: Direction) -> Tensor:
        targets_BND, w_BN = self.targets(d, d.neighbors_BKD), self.weights(d, d.neighbors_BKD)
        return F.weighted_squared_error(d.p_BD, targets_BND, w_BN)
