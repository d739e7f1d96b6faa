"""SNCLR: soft neighbors are positive supporters (Ge et al., arXiv 2303.17142), as the MNN authors run it.

Among the z of the whole batch and all their neighbors, each prediction must pick its own z, with weight 1, and its own
neighbors, with the weights of an attention: a softmax of their cosines with the student's projection. The gradient
flows through it. With K = 0 it is SimCLR with teacher keys. The original multiplies by 2 tau, sums the directions, and
runs K = 30 with a ViT. weights= and mixer= are MNN's; with them, the MNN paper also changes the views to s/w.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mixnn import functional as F
from mixnn.config import option, other_default
from mixnn.methods.contract import About, Direction
from mixnn.methods.mixture import Mixture, MixtureOptions
from mixnn.methods.siamese import Common
from mixnn.nn.encoder import mlp


@dataclass(frozen=True)
class SNCLROptions(MixtureOptions):
    """Two strong views, neighbors with attention, a temperature."""

    views: str = other_default(Common, "views", "s/s", "authors' baseline code")
    weights: str = other_default(MixtureOptions, "weights", "cas", "authors' baseline code and original")
    mixer: str = other_default(MixtureOptions, "mixer", "none", "authors' baseline code and original")
    temperature: float = option(0.2, "tau of the softmax", "authors' baseline code", low=1e-3)
    threshold: bool = option(False, "drop neighbors whose weight is at most 1/K", "in both codes, used by neither")


class SNCLR(Mixture):
    """Cross-entropy of cos(p, keys) / tau against 1 for z and the attention for each neighbor."""

    about = About(2023, "Ge et al., arXiv 2303.17142", "contrast with neighbors as positives, by attention")
    Options = SNCLROptions
    options: SNCLROptions

    def heads(self, features: int) -> tuple[nn.Module, nn.Module | None]:
        dim, hidden = self.options.dim, self.options.hidden
        return mlp([features, hidden, hidden, dim], out_norm="plain"), mlp([dim, hidden, dim], out_norm="plain")

    def loss(self, d: Direction) -> Tensor:
        w_BN = self.weights(d, d.neighbors_BKD)
        if self.options.threshold:
            w_BN = torch.cat([w_BN[..., :1], w_BN[..., 1:] * (w_BN[..., 1:] > 1 / max(1, self.topk))], dim=-1)
        return F.set_contrast(d.p_BD, self.targets(d, d.neighbors_BKD), w_BN, self.options.temperature)
