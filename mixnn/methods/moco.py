"""MoCo v2: momentum contrast (He et al., arXiv 1911.05722; Chen et al., arXiv 2003.04297), as the MNN authors run it.

Each student embedding must pick the teacher's embedding of the same image among this one and the support set, whose
rows are the negatives. The head has two layers and no batch norm, both directions are averaged, and there is one push
per step. The original is asymmetric; its CIFAR demo sums the directions, pushes both views, and has tau 0.1 and a
linear head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from mixnn import functional as F
from mixnn.config import option, other_default
from mixnn.methods.contract import About, Direction
from mixnn.methods.siamese import Common, Momentum, Siamese, Support
from mixnn.nn.encoder import mlp


@dataclass(frozen=True)
class MoCoOptions(Support, Momentum, Common):
    """Two strong views, a teacher, a support set, a temperature."""

    views: str = other_default(Common, "views", "s/s", "authors' baseline code")
    temperature: float = option(0.2, "tau of the softmax", "authors' baseline code", low=1e-3)


class MoCo(Siamese):
    """Cross-entropy of picking z among [z | support set], by cos(q, .) / tau."""

    about = About(2020, "Chen et al., arXiv 2003.04297", "tell z from a queue of earlier images")
    Options = MoCoOptions
    options: MoCoOptions

    def heads(self, features: int) -> tuple[nn.Module, nn.Module | None]:
        return mlp([features, self.options.hidden, self.options.dim], hidden_norm=False), None

    def loss(self, d: Direction) -> Tensor:
        return F.info_nce(F.queue_logits(d.q_BD, d.z_BD, d.support_QD, self.options.temperature))
