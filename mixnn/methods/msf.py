"""MSF: mean shift for self-supervised learning (Koohpayegani et al., arXiv 2105.07269), as the MNN authors run it.

The student's prediction is drawn to the teacher's embedding z and its K nearest neighbors, all with weight 1/(K+1). The
original is asymmetric and pushes first, so that its K counts z itself: K here is the original's topk - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mixnn import functional as F
from mixnn.methods import regression


class MSF(regression.Regression):
    """mean of d(p, z), d(p, z_1), ..., d(p, z_K)."""

    Options = regression.NeighborOptions

    def loss(self, d: regression.Direction) -> Tensor:
        targets_BND = torch.cat([F.unit(d.z_BD)[:, None], F.unit(d.neighbors_BKD)], dim=1)
        return F.weighted_squared_error(d.p_BD, targets_BND, F.mse_weights(self.topk, d.p_BD))
