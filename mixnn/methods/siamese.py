"""The core of every method that compares two views: encode them, look neighbors up, and take the method's loss of each
direction.

Direction a>b: the student saw x_a, the target side x_b. The target side is a moving-average teacher, or the student
itself. Each network encodes all its views in one pass, and everything is looked up before anything is pushed. What is
left to a method is what its paper is about: the loss of one direction.

Shapes: B images of one direction, D embedding, K neighbors, N = K + 1 targets (0 is z), Q support slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixnn import functional as F
from mixnn.config import Checked, UserError, make, method_option, option
from mixnn.device import side_stream, wait_side_stream
from mixnn.methods.contract import REGIMES, About, Aux, Batch, Direction, Found, Seen
from mixnn.nn.encoder import Student, Teacher, mlp
from mixnn.nn.support_set import Rows, SupportSet


@dataclass(frozen=True)
class Common(Checked):
    """Knobs of every method with two views."""

    views: str = option("s/w", "augmentation of x1/x2: s strong, w weak", "paper, sec. 4.3.1", choices=tuple(REGIMES))
    symmetric: bool = option(True, "average directions 1>2 and 2>1; else 1>2 alone", "paper, sec. 4.1")
    loss_scale: float = option(1.0, "multiplies the loss", "a control, not in the paper", low=0)
    dim: int = option(128, "D, length of an embedding", "paper, sec. 4.1", low=2)
    hidden: int = option(2048, "width of the heads' hidden layers", "paper, sec. 4.1", low=2)


@dataclass(frozen=True)
class Momentum(Checked):
    """The knob of every method with a teacher."""

    momentum: float = option(0.99, "m of the teacher; 0.996 on STL-10 and Tiny", "paper, parameters", low=0, high=1)


@dataclass(frozen=True)
class Support(Checked):
    """Knobs of every method with a support set."""

    support_size: int = option(4096, "Q, rows of the support set; 16384 on STL-10 and Tiny", "paper, parameters", low=1)
    leaky_queue: bool = option(
        False,
        "direction 2>1 searches after the push and finds its own image",
        "authors' code behind the published numbers; fixed later",
    )


@dataclass(frozen=True)
class Neighbors(Support):
    """Knobs of every method that takes neighbors from its support set."""

    topk: int = option(5, "K, neighbors of an anchor; 0: none", "paper, parameters", low=0)
    select: str = option(
        "topk",
        "neighbors: topk nearest, random rows, or labels (nearest of the anchor's label)",
        "paper, sec. 4.3.4",
        choices=("topk", "random", "labels"),
    )

    def check(self) -> None:
        if self.topk > self.support_size:
            size = self.support_size
            raise UserError(f"topk={self.topk} exceeds support_size={size}: use {method_option('topk', size)} or less")


class Encoded(NamedTuple):
    """Embeddings of a batch, by the number of the view (0 is x1)."""

    q: dict[int, Tensor]  # student's projection
    p: dict[int, Tensor]  # student's prediction; q itself without a predictor
    z: dict[int, Tensor]  # target side


class Siamese(nn.Module):
    """Holds student, teacher and support sets; a method adds `loss`, and `heads` where its heads are not BYOL's."""

    about: About
    Options: type[Common] = Common
    facts: tuple[str, ...] = ()
    split, recipe = "pretrain", {}  # type: ignore[var-annotated]
    has_teacher = True
    rings: Any  # a list of SupportSet
    num_rings = 1

    def __init__(self, backbone: nn.Module, **options: Any) -> None:
        super().__init__()
        o = self.options = make(self.Options, "option", options)
        self.topk: int = getattr(o, "topk", 0)
        self.pairs = self.directions(o)
        self.student_sees, self.teacher_sees = self.encoded_views(o)
        features: int = backbone.num_features  # type: ignore[assignment]
        self.student = Student(backbone, *self.heads(features), views=len(self.student_sees))
        self.teacher = Teacher(self.student, views=len(self.teacher_sees)) if self.has_teacher else None
        num_rings = self.num_rings if self.has_support(o) else 0
        self.rings = nn.ModuleList(SupportSet(o.support_size, o.dim) for _ in range(num_rings))

    # What a method may say of itself

    def loss(self, d: Direction) -> Tensor:
        """The method's own equation."""
        raise AssertionError(f"{type(self).__name__} does not say what to do with {type(d).__name__}")

    def heads(self, features: int) -> tuple[nn.Module, nn.Module | None]:
        """Projector g and predictor h; here BYOL's."""
        dim, hidden = self.options.dim, self.options.hidden
        return mlp([features, hidden, dim]), mlp([dim, hidden, dim])

    @classmethod
    def directions(cls, o: Any) -> tuple[tuple[int, int], ...]:
        """Pairs (a, b): the student saw view a, the target side view b."""
        return ((0, 1), (1, 0)) if o.symmetric else ((0, 1),)

    @classmethod
    def encoded_views(cls, o: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which views the student encodes, and which the teacher, in the order of the directions."""
        students, targets = zip(*cls.directions(o), strict=True)
        return (students, targets) if cls.has_teacher else ((0, 1), ())

    @property
    def views(self) -> tuple[str, ...]:
        return REGIMES[self.options.views]

    @property
    def support(self) -> SupportSet | None:
        """The support set that neighbors are taken from."""
        return self.rings[0] if self.rings else None

    @classmethod
    def has_support(cls, o: Any) -> bool:
        """Whether there is a support set at all."""
        return isinstance(o, Support) and (not isinstance(o, Neighbors) or o.topk > 0)

    @classmethod
    def uses_labels(cls, o: Any) -> bool:
        return getattr(o, "select", "") == "labels"

    def draws(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        if self.teacher is not None:
            shapes["shuffle"] = (len(self.teacher_sees), batch_size)
        if self.rings and getattr(self.options, "select", "") == "random":
            shapes["random"] = (len(self.pairs), batch_size, self.options.support_size)
        return shapes

    # One step

    def forward(self, batch: Batch) -> tuple[Tensor, Aux]:
        seen = self.encode(batch)
        push = self.rows_to_push(seen, batch)
        directions = [self.direction(i, a, b, seen, push, batch) for i, (a, b) in enumerate(self.pairs)]
        loss = self.options.loss_scale * self.combine([self.loss(d) for d in directions], batch)
        seen_by_log = Seen.of(directions[: 2 if self.options.symmetric else 1])
        return loss, Aux(push, seen_by_log, self.metrics(directions))

    def encode(self, batch: Batch) -> Encoded:
        """Both networks, each over the views it needs in one pass."""
        return self.encode_views(batch.views, batch.draws)

    def encode_views(self, views: tuple[Tensor, ...], draws: dict[str, Tensor]) -> Encoded:
        z, device = None, views[0].device
        if self.teacher is not None:
            with side_stream(device):  # neither network waits for the other
                z = self.teacher(*(views[i] for i in self.teacher_sees), shuffle=draws["shuffle"])
        q, p = (_by_view(self.student_sees, v) for v in self.student(*(views[i] for i in self.student_sees)))
        if z is None:
            return Encoded(q, p, self.own_targets(q))
        wait_side_stream(device)
        return Encoded(q, p, _by_view(self.teacher_sees, z))

    def own_targets(self, q: dict[int, Tensor]) -> dict[int, Tensor]:
        """Without a teacher, the student's projections are the targets."""
        return {i: v.detach() for i, v in q.items()}

    def rows_to_push(self, seen: Encoded, batch: Batch) -> tuple[Rows, ...]:
        """What each support set gets after the step: the targets of x2, as the authors do."""
        return tuple(Rows(seen.z[1].detach().clone(), batch.labels_B, batch.index_B) for _ in self.rings)

    def direction(self, i: int, a: int, b: int, seen: Encoded, push: tuple[Rows, ...], batch: Batch) -> Direction:
        rings = self.snapshots(i, push)
        found = self.search(i, seen.z[b], rings, seen, batch) if rings and self.topk else ()
        support_QD = rings[0].z_QD if rings else seen.z[b][:0]
        return Direction(i, seen.q[a], seen.p[a], seen.z[b], found, support_QD, batch.draws)

    def snapshots(self, i: int, push: tuple[Rows, ...]) -> tuple[Rows, ...]:
        """The support sets as direction i sees them."""
        leaky = getattr(self.options, "leaky_queue", False) and self.pairs[i] == (1, 0)
        return tuple(s.read_pushed(rows) if leaky else s.read() for s, rows in zip(self.rings, push, strict=True))

    def search(self, i: int, z_BD: Tensor, rings: tuple[Rows, ...], seen: Encoded, batch: Batch) -> tuple[Found, ...]:
        """Neighbors of z; a method with more than one list of them says how it finds the others."""
        return (self.neighbors(i, z_BD, rings[0], batch),)

    def neighbors(self, i: int, z_BD: Tensor, rows: Rows, batch: Batch) -> Found:
        o = self.options
        assert isinstance(o, Neighbors)
        if o.select == "random":  # uniform, without replacement
            return take(rows, F.nearest(batch.draws["random"][i], o.topk))
        sim_BQ = F.cosines(z_BD, rows.z_QD)
        if o.select == "topk":
            return take(rows, F.nearest(sim_BQ, o.topk))
        index_BK, exists_BK = F.nearest_of_label(sim_BQ, o.topk, batch.labels_B, rows.labels_Q)
        # Early on there may be fewer than K rows of a label: z stands in for the missing ones.
        neighbors_BKD = torch.where(exists_BK[:, :, None], rows.z_QD[index_BK], z_BD[:, None])
        images_BK = rows.index_Q[index_BK].masked_fill(~exists_BK, -1)
        return Found(index_BK, neighbors_BKD, batch.labels_B[:, None].expand_as(index_BK), images_BK)

    def metrics(self, directions: list[Direction]) -> dict[str, Tensor]:
        """Other scalars to log, by name, without gradient."""
        return {}

    def combine(self, losses: list[Tensor], batch: Batch) -> Tensor:
        """The step's loss from those of its directions."""
        return torch.stack(losses).mean()

    def after_step(self, aux: Aux) -> None:
        if self.teacher is not None:
            self.teacher.update(self.student, self.teacher_momentum)
        for ring, rows in zip(self.rings, aux.push, strict=True):
            ring.push(rows)

    @property
    def teacher_momentum(self) -> float:
        return self.options.momentum


def take(rows: Rows, index_BK: Tensor) -> Found:
    return Found(index_BK, rows.z_QD[index_BK], rows.labels_Q[index_BK], rows.index_Q[index_BK])


def _by_view(numbers: tuple[int, ...], stacked: Tensor) -> dict[int, Tensor]:
    return dict(zip(numbers, stacked.chunk(len(numbers)), strict=True))
