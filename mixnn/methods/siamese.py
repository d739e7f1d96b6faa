"""The core of every method that compares two views: encode them, search for neighbors, take the loss of each direction.

Direction a>b: the student encodes x_a, the target side x_b. The target side is a moving-average teacher, or the student
itself. Each network encodes all its views in one pass, and every search happens before anything is pushed. A method
adds what its paper is about: the loss of one direction.

Shapes: B images of one direction, D embedding, K neighbors, N = K + 1 targets (0 is z), Q support slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mixnn import functional as F
from mixnn.config import Checked, UserError, method_option, option
from mixnn.device import full_precision, side_stream, wait_side_stream
from mixnn.dist import PartialBatch
from mixnn.methods.contract import (
    VIEW_PAIRS,
    Aux,
    Batch,
    Direction,
    DirectionRecord,
    Method,
    NeighborList,
    no_neighbors,
)
from mixnn.nn.encoder import Student, Teacher, mlp
from mixnn.nn.support_set import SupportRows, SupportSet


@dataclass(frozen=True)
class Common(Checked):
    """Options of every method with two views."""

    views: str = option(
        "s/w", "augmentation of x1/x2: s strong, w weak", "paper, sec. 4.3.1", choices=tuple(VIEW_PAIRS)
    )
    symmetric: bool = option(True, "average directions 1>2 and 2>1; false: 1>2 only", "paper, sec. 4.1")
    loss_scale: float = option(1.0, "multiplies the loss", "a control, not in the paper", low=0)
    dim: int = option(128, "D, length of an embedding", "paper, sec. 4.1", low=2)
    hidden: int = option(2048, "width of the heads' hidden layers", "paper, sec. 4.1", low=2)


@dataclass(frozen=True)
class Momentum(Checked):
    """Options of every method with a teacher."""

    momentum: float = option(0.99, "m of the teacher; 0.996 on STL-10 and Tiny", "paper, parameters", low=0, high=1)
    momentum_end: float = option(
        0.0, "m at the end of the run, reached by a cosine; 0: m is constant", "BYOL: 1; paper: constant", low=0, high=1
    )


@dataclass(frozen=True)
class Support(Checked):
    """Options of every method with a support set."""

    support_size: int = option(4096, "Q, rows of the support set; 16384 on STL-10 and Tiny", "paper, parameters", low=1)
    leaky_queue: bool = option(
        False,
        "direction 2>1 searches after the push and finds its own image",
        "authors' code behind the published numbers; fixed later",
    )


@dataclass(frozen=True)
class Neighbors(Support):
    """Options of every method that takes neighbors from its support set."""

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


ByView = dict[int, Tensor]  # embeddings by the number of the view (0 is x1)


class Targets(NamedTuple):
    """Target embeddings, rows to push, and each direction's neighbors: all that needs no gradient."""

    z: ByView
    push: tuple[SupportRows, ...]  # new rows of each support set
    neighbor_lists: list[tuple[NeighborList, ...]]
    supports_QD: list[Tensor]  # the support sets as each direction searches them


class Siamese(Method):
    """Student, teacher and support sets; a method adds `loss`, and `heads` unless its heads are BYOL's.

    There is a teacher if Options derives from Momentum.

    Without a backbone it has neither networks nor support sets, only `heads` and `loss`, for a method that is built on
    it (see unmix.py).
    """

    Options: ClassVar[type[Common]] = Common
    num_rings: ClassVar[int] = 1
    teacher_rate: Tensor  # see begin_step
    rings: Any  # nn.ModuleList of SupportSet (ring buffers); checkpoints hold them under this name

    def build(self, backbone: nn.Module, num_features: int) -> None:
        """Make networks and support sets."""
        o = self.options
        self.pairs = self.directions(o)
        self.student_views, self.teacher_views = self.encoded_views(o)
        self.student = Student(backbone, *self._checked_heads(num_features), views=len(self.student_views))
        has_teacher = isinstance(o, Momentum)
        self.teacher = Teacher(self.student, views=len(self.teacher_views)) if has_teacher else None
        if self.momentum_end:  # a tensor, so that a captured step sees its changes; not a part of checkpoints
            self.register_buffer("teacher_rate", torch.ones(()), persistent=False)
        num_rings = self.num_rings if self.has_support(o) else 0
        self.rings = nn.ModuleList(SupportSet(o.support_size, o.dim) for _ in range(num_rings))

    def _checked_heads(self, num_features: int) -> tuple[nn.Module, nn.Module | None]:
        found: Any = self.heads(num_features)
        parts = found if isinstance(found, tuple | list) else ()
        if len(parts) == 2 and isinstance(parts[0], nn.Module) and isinstance(parts[1], nn.Module | None):
            return parts[0], parts[1]
        what = ", ".join(type(part).__name__ for part in parts) or type(found).__name__
        raise UserError(
            f"heads() of {type(self).__name__} must return two modules, projector and predictor, and returns {what}\n"
            "write `return projector, None` if there is no predictor"
        )

    def _checked_loss(self, d: Direction) -> Tensor:
        loss: Any = self.loss(d)
        if not isinstance(loss, Tensor):
            why = "does it end with `return`?" if loss is None else "leave out .item() or float()"
            got = type(loss).__name__
            raise UserError(f"loss() of {type(self).__name__} must return a tensor, and returns a {got}: {why}")
        return loss

    # What a method may override

    def loss(self, d: Direction) -> Tensor:
        """The method's own equation."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def heads(self, features: int) -> tuple[nn.Module, nn.Module | None]:
        """Projector g and predictor h; here BYOL's."""
        dim, hidden = self.options.dim, self.options.hidden
        return mlp([features, hidden, dim]), mlp([dim, hidden, dim])

    @classmethod
    def directions(cls, o: Any) -> tuple[tuple[int, int], ...]:
        """Pairs (a, b): the student encodes view a, the target side view b."""
        return ((0, 1), (1, 0)) if o.symmetric else ((0, 1),)

    @classmethod
    def encoded_views(cls, o: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        students, targets = zip(*cls.directions(o), strict=True)
        return (students, tuple(dict.fromkeys(targets))) if isinstance(o, Momentum) else ((0, 1), ())

    @property
    def views(self) -> tuple[str, ...]:
        return VIEW_PAIRS[self.options.views]

    @property
    def support(self) -> SupportSet | None:
        return self.rings[0] if self.rings else None

    @classmethod
    def has_support(cls, o: Any) -> bool:
        return isinstance(o, Support) and (not isinstance(o, Neighbors) or o.topk > 0)

    @classmethod
    def uses_labels(cls, o: Any) -> bool:
        return getattr(o, "select", "") == "labels"

    def draws(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        if self.teacher is not None:
            shapes["shuffle"] = (len(self.teacher_views), batch_size)
        if self.rings and getattr(self.options, "select", "") == "random":
            shapes["random"] = (len(self.pairs), batch_size, self.options.support_size)
        return shapes

    # One step

    def forward_batch(self, batch: Batch) -> tuple[Tensor, Aux]:
        views, device = self.all_views(batch), batch.views[0].device
        if self.teacher is not None:
            with side_stream(device):  # neither network waits for the other, and a search needs the teacher alone
                targets = self.find_targets(self.encode_teacher(views, batch.draws), batch)
        q, p = self.encode_student(views)
        if self.teacher is None:
            targets = self.find_targets(self.student_targets(q), batch)
        wait_side_stream(device)
        with full_precision(device):  # only networks run under the caller's autocast
            directions = [
                Direction(i, q[a], p[a], targets.z[b], targets.neighbor_lists[i], targets.supports_QD[i], batch.draws)
                for i, (a, b) in enumerate(self.pairs)
            ]
            loss = self.combine([self._checked_loss(d) for d in directions], batch)
            loss = loss if self.options.loss_scale == 1 else self.options.loss_scale * loss
            record = DirectionRecord.stack(directions[: 2 if self.options.symmetric else 1])
            return loss, Aux(targets.push, record, self.metrics(directions))

    def all_views(self, batch: Batch) -> tuple[Tensor | PartialBatch, ...]:
        """Views by number: the batch's own, and those that a method makes of them."""
        return batch.views

    def encode_student(self, views: tuple[Tensor | PartialBatch, ...]) -> tuple[ByView, ByView]:
        """The student's projections q and predictions p; they are the same without a predictor."""
        q, p = self.student(*(views[i] for i in self.student_views))
        return self.by_view(self.student_views, q), self.by_view(self.student_views, p)

    def encode_teacher(self, views: tuple[Tensor | PartialBatch, ...], draws: dict[str, Tensor]) -> ByView:
        """The teacher's embeddings z."""
        assert self.teacher is not None
        z = self.teacher(*(views[i] for i in self.teacher_views), shuffle=draws["shuffle"])
        return self.by_view(self.teacher_views, z)

    def student_targets(self, q: ByView) -> ByView:
        """Targets of a method without a teacher: the student's projections, without gradient."""
        return {i: v.detach() for i, v in q.items()}

    def by_view(self, numbers: tuple[int, ...], stacked: Tensor) -> ByView:
        """Embeddings of these views from one stack of them."""
        return dict(zip(numbers, stacked.chunk(len(numbers)), strict=True))

    def find_targets(self, z: ByView, batch: Batch) -> Targets:
        """Embeddings, new rows of the support sets, and the neighbors of each direction."""
        lists: list[tuple[NeighborList, ...]] = []
        supports_QD = []
        with full_precision(batch.views[0].device):
            push = self.rows_to_push(z, batch)
            for i, (_, b) in enumerate(self.pairs):
                supports = self.searched_rows(i, push)
                if supports and self.topk:
                    lists.append(self.search(i, z[b], supports, z, batch))
                else:  # topk=0, or a method without neighbors
                    lists.append((no_neighbors(z[b]),) if isinstance(self.options, Neighbors) else ())
                supports_QD.append(supports[0].z_QD if supports else z[b][:0])
        return Targets(z, push, lists, supports_QD)

    def rows_to_push(self, z: ByView, batch: Batch) -> tuple[SupportRows, ...]:
        """New rows of each support set after the step: the targets of x2, as the authors do."""
        return tuple(SupportRows(z[1].detach().clone(), batch.labels_B, batch.index_B) for _ in self.rings)

    def searched_rows(self, i: int, push: tuple[SupportRows, ...]) -> tuple[SupportRows, ...]:
        """Contents of the support sets as direction i searches them."""
        leaky = getattr(self.options, "leaky_queue", False) and self.pairs[i] == (1, 0)
        return tuple(s.preview_push(rows) if leaky else s.read() for s, rows in zip(self.rings, push, strict=True))

    def search(
        self, i: int, z_BD: Tensor, supports: tuple[SupportRows, ...], z: ByView, batch: Batch
    ) -> tuple[NeighborList, ...]:
        """Neighbors of z_BD; z has the embeddings of all views. Methods with several lists of neighbors override it."""
        return (self.neighbors(i, z_BD, supports[0], batch),)

    def neighbors(self, i: int, z_BD: Tensor, rows: SupportRows, batch: Batch) -> NeighborList:
        o = self.options
        assert isinstance(o, Neighbors)
        if o.select == "random":  # uniform, without replacement
            return take_rows(rows, F.nearest(batch.draws["random"][i], o.topk))
        if o.select == "topk":
            return take_rows(rows, F.nearest_rows(z_BD, rows.z_QD, o.topk))
        sim_BQ = F.cosines(z_BD, rows.z_QD)
        index_BK, exists_BK = F.nearest_of_label(sim_BQ, o.topk, batch.labels_B, rows.labels_Q)
        # Early on there may be fewer than K rows of a label: z stands in for the missing ones.
        neighbors_BKD = torch.where(exists_BK[:, :, None], rows.z_QD[index_BK], z_BD[:, None])
        images_BK = rows.index_Q[index_BK].masked_fill(~exists_BK, -1)
        return NeighborList(index_BK, neighbors_BKD, batch.labels_B[:, None].expand_as(index_BK), images_BK)

    def metrics(self, directions: list[Direction]) -> dict[str, Tensor]:
        """Other scalars to log, by name, without gradient."""
        return {}

    def combine(self, losses: list[Tensor], batch: Batch) -> Tensor:
        """The step's loss from the losses of its directions."""
        return torch.stack(losses).mean()

    @property
    def momentum_end(self) -> float:
        """Momentum at the end of a run; 0 if it is constant."""
        return self.options.momentum_end if isinstance(self.options, Momentum) and self.teacher is not None else 0.0

    def begin_step(self, progress: float) -> None:
        """Update the teacher's momentum schedule: set the factor on 1 - m."""
        if self.momentum_end and self.options.momentum < 1:
            last = (1 - self.momentum_end) / (1 - self.options.momentum)
            self.teacher_rate.fill_(last + (1 - last) * 0.5 * (1 + math.cos(math.pi * progress)))

    def update_state(self, aux: Aux) -> None:
        device = next(self.student.parameters()).device
        with side_stream(device):  # pushing is many small kernels; they run beside the moving average
            for ring, rows in zip(self.rings, aux.push, strict=True):
                ring.push(rows)
        if self.teacher is not None:
            m: float | Tensor = self.teacher_momentum
            self.teacher.update(self.student, 1 - (1 - m) * self.teacher_rate if self.momentum_end else m)
        wait_side_stream(device)

    @property
    def teacher_momentum(self) -> float:
        return self.options.momentum


def take_rows(rows: SupportRows, index_BK: Tensor) -> NeighborList:
    """The rows with these numbers."""
    return NeighborList(index_BK, rows.z_QD[index_BK], rows.labels_Q[index_BK], rows.index_Q[index_BK])
