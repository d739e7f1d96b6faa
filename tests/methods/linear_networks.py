"""Networks replaced by matrices, as the golden vectors were made: student x P, predictor x P H, teacher x T."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mixnn.methods import METHODS
from mixnn.methods.contract import Batch
from mixnn.nn.support_set import Rows


class Stub(nn.Module):
    num_features = 4


class LinearStudent(nn.Module):
    def __init__(self, P: Tensor, H: Tensor) -> None:
        super().__init__()
        self.P, self.H = nn.Parameter(P), nn.Parameter(H)

    def forward(self, *views: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.cat(views).flatten(1) @ self.P
        return q, q @ self.H


class LinearTeacher(nn.Module):
    def __init__(self, T: Tensor) -> None:
        super().__init__()
        self.register_buffer("T", T)

    def forward(self, *views: Tensor, shuffle: Tensor) -> Tensor:
        assert len(shuffle) == len(views)
        return (torch.cat(views).flatten(1) @ self.T).detach()

    def update(self, student: nn.Module, momentum: float) -> None:
        """The golden vectors keep the teacher as it is."""


def linear_method(name: str, P: Tensor, H: Tensor, T: Tensor, ring: Rows | None = None, position: int = 0, **options):
    method = METHODS[name](Stub(), dim=P.shape[1], hidden=4, **options).to(P.dtype)
    method.student, method.teacher = LinearStudent(P, H), LinearTeacher(T)
    if ring is not None:
        method.support.z_QD, method.support.labels_Q, method.support.index_Q = (column.clone() for column in ring)
        method.support.position.fill_(position)
    return method


def batch(x1: Tensor, x2: Tensor, labels: Tensor, **draws: Tensor) -> Batch:
    draws.setdefault("shuffle", torch.rand(2, len(x1)))
    return Batch((x1, x2), labels, torch.arange(len(x1)), draws)
