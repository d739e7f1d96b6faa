"""ReSSL: relational self-supervised learning (Zheng et al., arXiv 2107.09282), as the MNN authors run it.

The student's similarities to the support set must agree with the teacher's sharper ones; neither includes the
positive. That is SCE with eta = 0 and without its column 0. One direction: strong student, weak teacher. The original
has a wider head, a queue of 131,072 unit rows and momentum 0.999.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mixnn import functional as F
from mixnn.config import option, other_default
from mixnn.methods.contract import About, Direction
from mixnn.methods.moco import MoCo, MoCoOptions
from mixnn.methods.siamese import Common


@dataclass(frozen=True)
class ReSSLOptions(MoCoOptions):
    """MoCo's, asymmetric, with a second temperature."""

    views: str = other_default(Common, "views", "s/w", "authors' baseline code and original")
    symmetric: bool = other_default(Common, "symmetric", False, "authors' baseline code and original")
    temperature: float = other_default(MoCoOptions, "temperature", 0.1, "authors' baseline code and original")
    teacher_temperature: float = option(0.04, "tau of the teacher's softmax", "the same", low=1e-3)


class ReSSL(MoCo):
    """Cross-entropy of cos(q, S) / tau against softmax(cos(z, S) / tau_t)."""

    about = About(2021, "Zheng et al., arXiv 2107.09282", "agree with the teacher on similarities to the queue")
    Options = ReSSLOptions
    options: ReSSLOptions

    def loss(self, d: Direction) -> Tensor:
        target_BQ = (F.cosines(d.z_BD, d.support_QD) / self.options.teacher_temperature).softmax(dim=1)
        return F.soft_cross_entropy(F.cosines(d.q_BD, d.support_QD) / self.options.temperature, target_BQ)
