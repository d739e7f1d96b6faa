"""What a method is: an nn.Module with the views of a batch in, a loss out, and state that only `after_step` writes.

    class Method(nn.Module):
        about                                  year, paper, idea
        Options                                frozen dataclass of `config.option` fields: each knob, meaning, source
        facts -> ("num_classes",)              what it must be told about the data: num_classes, num_images
        split, recipe                          which images train it, and settings it wants unless the user has others
        __init__(backbone, **facts, **options) parts are held; self.student.f is the encoder that is evaluated
        views -> ("strong", "weak")            which augmentation makes x1, x2, ...
        encoded_views(options) -> (0, 1), (1,) which views student and teacher encode
        uses_labels(options) -> bool           whether training itself reads labels
        has_support(options) -> bool           whether there is a support set
        draws(batch_size) -> {name: shape}     the uniforms in [0, 1) that one forward consumes
        forward(batch) -> (loss, aux)          reads state, writes none (batch norm's running statistics excepted)
        after_step(aux)                        after the optimizer: the teacher moves, the support set is pushed

Shapes are fixed and nothing is read back to the host, so a step can be compiled whole and captured in a CUDA graph.
`siamese.Siamese` is all of this but the loss, for methods that compare two views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mixnn.nn.support_set import Rows

REGIMES = {"s/w": ("strong", "weak"), "s/s": ("strong", "strong"), "w/w": ("weak", "weak")}


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


class Found(NamedTuple):
    """Neighbors in the support set, nearest first."""

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
    found: tuple[Found, ...]  # a list of neighbors; CMSF has two, most methods one, some none
    support_QD: Tensor  # the support set as this direction sees it, raw; Q = 0 without one
    draws: dict[str, Tensor]

    @property
    def neighbors_BKD(self) -> Tensor:
        return self.found[0].z_BKD if self.found else self.z_BD[:, None][:, :0]


class Seen(NamedTuple):
    """What the A directions (1>2, then 2>1) of a step embedded and found, for diagnostics; K = 0 without neighbors."""

    q_ABD: Tensor
    p_ABD: Tensor
    z_ABD: Tensor
    index_ABK: Tensor
    neighbors_ABKD: Tensor
    labels_ABK: Tensor
    images_ABK: Tensor

    @staticmethod
    def of(directions: Sequence[Direction]) -> Seen:
        """Copies without gradient: a compiled step that hands out views of its tensors has crashed torch 2.13."""
        with torch.no_grad():
            own = [(d.q_BD, d.p_BD, d.z_BD, *(d.found[0] if d.found else _nothing(d))) for d in directions]
            return Seen(*(torch.stack(column) for column in zip(*own, strict=True)))


def _nothing(d: Direction) -> Found:
    none = torch.zeros(len(d.z_BD), 0, dtype=torch.long, device=d.z_BD.device)
    return Found(none, d.neighbors_BKD, none, none)


class Aux(NamedTuple):
    """What forward hands on, without gradient."""

    push: tuple[Rows, ...]  # for each support set
    seen: Seen | None  # None where there are no two views
    metrics: dict[str, Tensor]  # other scalars to log
