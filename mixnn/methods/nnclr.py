"""NNCLR: nearest-neighbor contrastive learning (Dwibedi et al., arXiv 2104.14548), as the MNN authors run it.

SimCLR with a predictor, where the other view is replaced by its nearest neighbors in a support set of the student's
own earlier embeddings. There is no teacher. The authors run K = 1, compare both ways (each prediction picks among all
neighbors, each neighbor among all predictions), and push x2. The original has only the second way (sides=keys), tau
0.1 and embeddings of 256 numbers, and pushes x1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from mixnn import functional as F
from mixnn.config import UserError, option, other_default
from mixnn.methods.contract import About, Direction
from mixnn.methods.siamese import Common, Neighbors, Siamese
from mixnn.nn.encoder import mlp


@dataclass(frozen=True)
class NNCLROptions(Neighbors, Common):
    """Two strong views, neighbors, a temperature."""

    views: str = other_default(Common, "views", "s/s", "authors' baseline code")
    topk: int = other_default(Neighbors, "topk", 1, "authors' baseline code; 5 did better but is not in the paper")
    temperature: float = option(0.2, "tau of the softmax", "authors' baseline code", low=1e-3)
    sides: str = option(
        "both",
        "both: predictions pick among neighbors, and neighbors among predictions; keys: only the latter",
        "authors' baseline code; the original's is keys",
        choices=("both", "keys"),
    )

    def check(self) -> None:
        super().check()
        if self.topk == 0:
            raise UserError("topk=0 leaves NNCLR without positives: use topk=1 or more, or the method simclr")


class NNCLR(Siamese):
    """Cross-entropy of pairing predictions with neighbors of the other view, by cosine / tau."""

    about = About(2021, "Dwibedi et al., arXiv 2104.14548", "SimCLR, with the other view's neighbor for the other view")
    Options = NNCLROptions
    options: NNCLROptions

    def heads(self, features: int) -> tuple[nn.Module, nn.Module | None]:
        dim, hidden = self.options.dim, self.options.hidden
        return mlp([features, hidden, hidden, dim], out_norm="affine"), mlp([dim, hidden, dim])

    def loss(self, d: Direction) -> Tensor:
        among_neighbors, among_predictions = F.neighbor_contrast(d.p_BD, d.neighbors_BKD, self.options.temperature)
        return among_predictions if self.options.sides == "keys" else (among_neighbors + among_predictions) / 2
