"""What a method is: a module that turns the views of a batch into a loss, and whose state only `after_step` writes.

`Method` lists what the trainer relies on, with defaults for what most methods do not need. `siamese.Siamese` is all of
it but the loss, for methods that compare two views.

Shapes are fixed and nothing is read back to the host, so a step can be compiled whole and captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mixnn.config import Checked, make
from mixnn.nn.encoder import Student, Teacher
from mixnn.nn.support_set import Rows, SupportSet

VIEW_PAIRS = {"s/w": ("strong", "weak"), "s/s": ("strong", "strong"), "w/w": ("weak", "weak")}


class About(NamedTuple):
    """Where a method comes from, and its idea in a line."""

    year: int
    paper: str
    idea: str


class Batch(NamedTuple):
    """One step's input."""

    views: tuple[Tensor, ...]
    labels_B: Tensor
    index_B: Tensor  # which images of the data set these are
    draws: dict[str, Tensor]


class NeighborList(NamedTuple):
    """Neighbors of each anchor in the support set, nearest first."""

    index_BK: Tensor
    z_BKD: Tensor  # raw
    labels_BK: Tensor
    images_BK: Tensor  # which images of the data set they are


class Direction(NamedTuple):
    """What a loss may use of direction a>b."""

    number: int  # 0 for 1>2, 1 for 2>1
    q_BD: Tensor
    p_BD: Tensor
    z_BD: Tensor
    neighbor_lists: tuple[NeighborList, ...]  # CMSF has two, most methods one, some none
    support_QD: Tensor  # the support set as this direction searches it, raw; Q = 0 without one
    draws: dict[str, Tensor]

    @property
    def neighbors_BKD(self) -> Tensor:
        return self.neighbor_lists[0].z_BKD if self.neighbor_lists else self.z_BD[:, None][:, :0]


class DirectionRecord(NamedTuple):
    """The A directions of a step (1>2, then 2>1), stacked for the diagnostics; K = 0 without neighbors."""

    q_ABD: Tensor
    p_ABD: Tensor
    z_ABD: Tensor
    index_ABK: Tensor
    neighbors_ABKD: Tensor
    labels_ABK: Tensor
    images_ABK: Tensor

    @staticmethod
    def stack(directions: Sequence[Direction]) -> DirectionRecord:
        """Copies without gradient: a compiled step that returns views of its tensors has crashed torch 2.13."""
        with torch.no_grad():
            rows = [
                (d.q_BD, d.p_BD, d.z_BD, *(d.neighbor_lists[0] if d.neighbor_lists else _no_neighbors(d)))
                for d in directions
            ]
            return DirectionRecord(*(torch.stack(column) for column in zip(*rows, strict=True)))


def _no_neighbors(d: Direction) -> NeighborList:
    none = torch.zeros(len(d.z_BD), 0, dtype=torch.long, device=d.z_BD.device)
    return NeighborList(none, d.neighbors_BKD, none, none)


class Aux(NamedTuple):
    """What forward returns next to the loss, without gradient."""

    push: tuple[Rows, ...]  # new rows of each support set
    record: DirectionRecord | None  # None for a method that does not compare two views
    metrics: dict[str, Tensor]  # other scalars to log


class Method(nn.Module):
    """Base of all methods. `student.f` is the encoder that is evaluated."""

    about: ClassVar[About]
    Options: ClassVar[type[Checked]]
    """Frozen dataclass of `config.option` fields: every setting with its default, meaning and source."""
    facts: ClassVar[tuple[str, ...]] = ()
    """Facts about the data that __init__ needs as arguments: num_classes, num_images."""
    split: ClassVar[str] = "pretrain"
    """Which split of a data set it trains on."""
    recipe: ClassVar[dict[str, Any]] = {}
    """Settings of the run that it prefers, unless the user gives others."""

    options: Any  # an instance of Options
    student: Student
    teacher: Teacher | None
    topk: int  # neighbors of an anchor; 0 if it uses none

    def __init__(self, backbone: nn.Module | None, **options: Any) -> None:
        super().__init__()
        self.options = make(self.Options, "option", options)
        self.topk = getattr(self.options, "topk", 0)
        self.teacher = None

    @classmethod
    def encoded_views(cls, options: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which views the student encodes, and which the teacher: (0, 1), (1,) for example."""
        raise NotImplementedError

    @classmethod
    def uses_labels(cls, options: Any) -> bool:
        """Whether training itself reads labels."""
        return False

    @classmethod
    def has_support(cls, options: Any) -> bool:
        """Whether it keeps a support set."""
        return False

    @property
    def views(self) -> tuple[str, ...]:
        """Which augmentation makes each view: ("strong", "weak") for example."""
        raise NotImplementedError

    @property
    def support(self) -> SupportSet | None:
        """The support set that neighbors are taken from."""
        return None

    def draws(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the uniforms in [0, 1) that one forward consumes."""
        return {}

    def forward(self, batch: Batch) -> tuple[Tensor, Aux]:
        """The loss. Reads state and writes none, except batch norm's running statistics."""
        raise NotImplementedError

    def after_step(self, aux: Aux) -> None:
        """Called after the optimizer: the teacher moves, the support set is pushed."""

    def neighbor_share(self, norm_ratio: float, cosine: float) -> float | None:
        """Share of the neighbors in the loss's weights on unit z and z_i; None if the loss has no such weights.

        norm_ratio is the mean of |z_i| / |z|, cosine the mean of cos(z, z_i), both as measured on a run.
        """
        return None
