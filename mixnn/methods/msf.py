"""MSF: mean shift for self-supervised learning (Koohpayegani et al., arXiv 2105.07269), as the MNN authors run it.

The student's prediction is drawn to the teacher's embedding z and its K nearest neighbors, all with weight 1/(K+1). The
original is asymmetric and pushes before it searches, so its topk counts z itself: K here is the original's topk - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mixnn import functional as F
from mixnn.methods.contract import About, Direction
from mixnn.methods.siamese import Common, Momentum, Neighbors, Siamese


@dataclass(frozen=True)
class MSFOptions(Neighbors, Momentum, Common):
    """Two views, a teacher, neighbors."""


class MSF(Siamese):
    """Mean squared distance of prediction p from z and its neighbors: mean of d(p, z), d(p, z_1), ..., d(p, z_K)."""

    about = About(2021, "Koohpayegani et al., arXiv 2105.07269", "predict z and its neighbors with equal weights")
    Options = MSFOptions

    def loss(self, d: Direction) -> Tensor:
        targets_BND = F.mixed_targets(d.neighbors_BKD, d.z_BD, 1.0, "none")
        return F.weighted_squared_error(d.p_BD, targets_BND, F.mse_weights(self.topk, d.p_BD))

    def neighbor_share(self, norm_ratio: float, cosine: float) -> float | None:
        return self.topk / (self.topk + 1)
