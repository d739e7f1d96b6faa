"""Networks replaced by matrices, as the golden vectors were made: student x P, predictor x P H, teacher x T."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mixnn import methods
from mixnn.methods.contract import Batch
from mixnn.nn.support_set import Rows

NUM_IMAGES = 100


class Stub(nn.Module):
    num_features = 4


class LinearStudent(nn.Module):
    def __init__(self, P: Tensor, H: Tensor | None) -> None:
        super().__init__()
        self.P = nn.Parameter(P)
        self.H = None if H is None else nn.Parameter(H)

    def forward(self, *views: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.cat(views).flatten(1) @ self.P
        return q, q if self.H is None else q @ self.H


class LinearTeacher(nn.Module):
    def __init__(self, T: Tensor) -> None:
        super().__init__()
        self.register_buffer("T", T)

    def forward(self, *views: Tensor, shuffle: Tensor) -> Tensor:
        assert len(shuffle) == len(views)
        return (torch.cat(views).flatten(1) @ self.T).detach()

    def update(self, student: nn.Module, momentum: float) -> None:
        """The golden vectors keep the teacher as it is."""


def linear_method(
    name: str, P: Tensor, H: Tensor | None, T: Tensor | None, rings: tuple[Rows, ...] = (), position: int = 0, **options
):
    facts = {"num_images": NUM_IMAGES, "num_classes": 3}
    method = methods.build(name, Stub(), {"dim": P.shape[1], "hidden": 4} | options, **facts).to(P.dtype)
    assert (method.student.h is None) == (H is None)
    assert (method.teacher is None) == (T is None)
    assert len(method.rings) == len(rings)
    method.student, method.teacher = LinearStudent(P, H), None if T is None else LinearTeacher(T)
    for ring, rows in zip(method.rings, rings, strict=True):
        ring.z_QD, ring.labels_Q, ring.index_Q = (column.clone() for column in rows)
        ring.position.fill_(position)
    return method


def batch(views: tuple[Tensor, ...], labels: Tensor, method: nn.Module, **draws: Tensor) -> Batch:
    """A batch with the given draws; the others do not matter to matrices, but their shapes are the method's."""
    drawn = {name: torch.rand(shape) for name, shape in method.draws(len(labels)).items()} | draws
    return Batch(views, labels, torch.arange(len(labels)), drawn)
