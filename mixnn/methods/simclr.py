"""SimCLR: a simple framework for contrastive learning (Chen et al., arXiv 2002.05709), as the MNN authors run it.

Each embedding must pick its own image among the other view's embeddings of the whole batch. There is no teacher, and
the gradient flows through both sides. The authors compare across views only, in both directions; the original also uses
the same view's other images as negatives (negatives=all), 2B - 2 per anchor instead of B - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from mixnn import functional as F
from mixnn.config import option, other_default
from mixnn.methods.contract import About, Direction
from mixnn.methods.siamese import Common, Siamese
from mixnn.nn.encoder import mlp


@dataclass(frozen=True)
class SimCLROptions(Common):
    """Two strong views, a temperature."""

    views: str = other_default(Common, "views", "s/s", "authors' baseline code")
    temperature: float = option(0.2, "tau of the softmax", "authors' baseline code", low=1e-3)
    negatives: str = option(
        "cross",
        "cross: the other view's images; all: the same view's too (NT-Xent)",
        "authors' baseline code; the original's is all",
        choices=("cross", "all"),
    )


class SimCLR(Siamese):
    """Cross-entropy of picking z_n among all z, by cos(q_n, z) / tau."""

    about = About(2020, "Chen et al., arXiv 2002.05709", "tell an image's other view from those of other images")
    Options = SimCLROptions
    options: SimCLROptions

    def heads(self, features: int) -> tuple[nn.Module, nn.Module | None]:
        return mlp([features, self.options.hidden, self.options.dim], out_norm="affine"), None

    def student_targets(self, q: dict[int, Tensor]) -> dict[int, Tensor]:
        return q

    def loss(self, d: Direction) -> Tensor:
        same_view = d.q_BD if self.options.negatives == "all" else None
        return F.batch_contrast(d.q_BD, d.z_BD, same_view, self.options.temperature)
