"""The core that BYOL, MSF and MNN share: a student predicts what a moving-average teacher makes of the other view and
of its neighbors.

It encodes both directions in one pass, looks neighbors up before anything is pushed, and leaves to the method the one
thing in which the three papers differ: the loss of one direction, as a function of p, z and the neighbors.

Shapes: B images of one direction, D embedding, K neighbors, N = K + 1 targets (0 is z), Q support slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixnn import functional as F
from mixnn.config import Checked, UserError, make, option
from mixnn.methods.contract import REGIMES, Aux, Batch
from mixnn.nn.encoder import Student, Teacher, mlp
from mixnn.nn.support_set import Rows, SupportSet


@dataclass(frozen=True)
class CommonOptions(Checked):
    """Knobs of every method with a teacher and a predictor."""

    views: str = option("s/w", "augmentation of x1/x2: s strong, w weak", "paper, sec. 4.3.1", choices=tuple(REGIMES))
    momentum: float = option(0.99, "m of the teacher; 0.996 on STL-10 and Tiny", "paper, parameters", low=0, high=1)
    symmetric: bool = option(True, "average directions 1>2 and 2>1; else 1>2 alone", "paper, sec. 4.1")
    loss_scale: float = option(1.0, "multiplies the loss", "a control, not in the paper", low=0)
    dim: int = option(128, "D, length of an embedding", "paper, sec. 4.1", low=2)
    hidden: int = option(2048, "width of the heads' hidden layer", "paper, sec. 4.1", low=2)


@dataclass(frozen=True)
class NeighborOptions(CommonOptions):
    """Knobs of every method with a support set."""

    topk: int = option(5, "K, neighbors of an anchor; 0: none", "paper, parameters", low=0)
    support_size: int = option(4096, "Q, rows of the support set; 16384 on STL-10 and Tiny", "paper, parameters", low=1)
    select: str = option(
        "topk",
        "neighbors: topk nearest, random rows, or labels (nearest of the anchor's label)",
        "paper, sec. 4.3.4",
        choices=("topk", "random", "labels"),
    )
    leaky_queue: bool = option(
        False,
        "direction 2>1 searches after the push and finds its own image",
        "authors' code behind the published numbers; fixed in June 2024",
    )

    def check(self) -> None:
        if self.topk > self.support_size:
            size = self.support_size
            raise UserError(f"topk={self.topk} exceeds support_size={size}: type --set topk={size} or less")


class Direction(NamedTuple):
    """What one direction a>b has: the student saw x_a, the teacher x_b."""

    q_BD: Tensor  # student projection
    p_BD: Tensor  # student prediction
    z_BD: Tensor  # teacher embedding, no gradient
    neighbors_BKD: Tensor  # of z in the support set, raw, nearest first; K may be 0
    draws: dict[str, Tensor]


class Regression(nn.Module):
    """Holds student, teacher and support set; a method adds `loss`."""

    Options: type[CommonOptions] = CommonOptions

    def __init__(self, backbone: nn.Module, **options: Any) -> None:
        super().__init__()
        o = self.options = make(self.Options, "option", options)
        self.topk: int = getattr(o, "topk", 0)
        self.passes = 2 if o.symmetric else 1
        features: int = backbone.num_features  # type: ignore[assignment]
        self.student = Student(
            backbone, g=mlp([features, o.hidden, o.dim]), h=mlp([o.dim, o.hidden, o.dim]), views=self.passes
        )
        self.teacher = Teacher(self.student, views=self.passes)
        self.support = SupportSet(o.support_size, o.dim) if isinstance(o, NeighborOptions) and o.topk else None

    @property
    def views(self) -> tuple[str, ...]:
        return REGIMES[self.options.views]

    @property
    def uses_labels(self) -> bool:
        return getattr(self.options, "select", "") == "labels"

    def draws(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"shuffle": (self.passes, batch_size)}
        if self.support is not None and getattr(self.options, "select", "") == "random":
            shapes["random"] = (self.passes, batch_size, len(self.support.z_QD))
        return shapes

    def loss(self, d: Direction) -> Tensor:
        """The method's own equation."""
        raise AssertionError(f"{type(self).__name__} does not say what to do with {type(d).__name__}")

    def forward(self, batch: Batch) -> tuple[Tensor, Aux]:
        x1, x2 = batch.views
        shuffle = batch.draws["shuffle"]
        q, p = self.student(*(x1, x2)[: self.passes])
        z = self.teacher(*(x2, x1)[: self.passes], shuffle=shuffle)
        q_d, p_d, z_d = (v.chunk(self.passes) for v in (q, p, z))  # by direction: 1>2, then 2>1
        push = Rows(z_d[0], batch.labels_B, batch.index_B)  # the teacher's z of x2, as the authors do
        found = [self.neighbors(z_BD, push, batch, i) for i, z_BD in enumerate(z_d)]
        losses = []
        for i, (_, neighbors_BKD, _) in enumerate(found):
            draws = {name: draw[i] for name, draw in batch.draws.items()}
            losses.append(self.loss(Direction(q_d[i], p_d[i], z_d[i], neighbors_BKD, draws)))
        loss = self.options.loss_scale * torch.stack(losses).mean()
        with torch.no_grad():
            metrics = {"d_positive": (2 - 2 * (F.unit(p) * F.unit(z)).sum(1)).mean(), "spread": F.spread(z)}
            if self.support is not None:
                metrics["purity"] = torch.stack([F.purity(labels, batch.labels_B) for _, _, labels in found]).mean()
        return loss, Aux(push, tuple(index for index, _, _ in found), metrics)

    def neighbors(self, z_BD: Tensor, push: Rows, batch: Batch, direction: int) -> tuple[Tensor, Tensor, Tensor]:
        """Support rows (B, K) of one direction's anchors, their raw embeddings (B, K, D) and their labels (B, K)."""
        if self.support is None:
            return batch.index_B[:, None][:, :0], z_BD[:, None][:, :0], batch.labels_B[:, None][:, :0]
        o = self.options
        assert isinstance(o, NeighborOptions)
        rows = self.support.read_pushed(push) if o.leaky_queue and direction == 1 else self.support.read()
        if o.select == "random":  # uniform, without replacement
            index_BK = F.nearest(batch.draws["random"][direction], o.topk)
            return index_BK, rows.z_QD[index_BK], rows.labels_Q[index_BK]
        sim_BQ = F.cosines(z_BD, rows.z_QD)
        if o.select == "topk":
            index_BK = F.nearest(sim_BQ, o.topk)
            return index_BK, rows.z_QD[index_BK], rows.labels_Q[index_BK]
        index_BK, exists_BK = F.nearest_of_label(sim_BQ, o.topk, batch.labels_B, rows.labels_Q)
        # Early on there may be fewer than K rows of a label: z stands in for the missing ones.
        neighbors_BKD = torch.where(exists_BK[:, :, None], rows.z_QD[index_BK], z_BD[:, None])
        return index_BK, neighbors_BKD, batch.labels_B[:, None].expand_as(index_BK)

    def after_step(self, aux: Aux) -> None:
        self.teacher.update(self.student, self.options.momentum)
        if self.support is not None:
            self.support.push(aux.push)
