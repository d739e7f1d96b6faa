"""SCE: similarity contrastive estimation (Denize et al., arXiv 2111.14585), as the MNN authors run it.

MoCo with a soft target: the positive gets eta, and the teacher's own similarities spread 1 - eta over the support
set. With eta = 1 it is MoCo. The positive's own column has logit 0 in the teacher's softmax, as in
both codes; the paper's formula leaves it out. Embeddings have 256 dimensions, a class default that the authors' code
keeps. The original is asymmetric and splits batch norm in the teacher only.
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
class SCEOptions(MoCoOptions):
    """MoCo's, with a second temperature and the positive's share."""

    views: str = other_default(Common, "views", "s/w", "authors' baseline code")
    dim: int = other_default(Common, "dim", 256, "authors' baseline code, by its default")
    temperature: float = other_default(MoCoOptions, "temperature", 0.1, "authors' baseline code and original")
    teacher_temperature: float = option(0.05, "tau of the teacher's softmax", "the same", low=1e-3)
    eta: float = option(0.5, "share of the positive in the target", "the same", low=0, high=1)


class SCE(MoCo):
    """Cross-entropy of cos(q, [z | S]) / tau against eta e_0 + (1 - eta) softmax([0 | cos(z, S)] / tau_t)."""

    about = About(2021, "Denize et al., arXiv 2111.14585", "MoCo, with the teacher's similarities in the target")
    Options = SCEOptions
    options: SCEOptions

    def loss(self, d: Direction) -> Tensor:
        o = self.options
        target_BM = F.sce_target(d.z_BD, d.support_QD, o.teacher_temperature, o.eta)
        return F.soft_cross_entropy(F.queue_logits(d.q_BD, d.z_BD, d.support_QD, o.temperature), target_BM)
