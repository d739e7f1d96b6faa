"""Student and teacher: backbone f, projector g and, for the student, predictor h.

Several views go through in one pass, stacked along the batch; batch norm keeps their statistics apart. Networks may
compute in bf16 (`compute_dtype`), but they return fp32: normalization, search and losses are never in less.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import Tensor, nn

from mixnn.dist import GatherBatch, scatter_batch
from mixnn.functional import at_least_float32
from mixnn.nn.batch_norm import SplitBatchNorm, set_views, split_batch_norms
from mixnn.nn.precision import run_parts


def mlp(sizes: list[int], out_norm: str = "none", hidden_norm: bool = True) -> nn.Sequential:
    """Linear layers with ReLU between; no bias before a batch norm. out_norm is none, affine or plain."""
    layers: list[nn.Module] = []
    last = len(sizes) - 2
    for i, (a, b) in enumerate(pairwise(sizes)):
        norm = hidden_norm if i < last else out_norm != "none"
        layers.append(nn.Linear(a, b, bias=not norm))
        if norm:
            layers.append(SplitBatchNorm(b, affine=i < last or out_norm == "affine"))
        if i < last:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Student(nn.Module):
    """f, g, h with gradient: views -> q = g(f(x)) and p = h(q); p is q if there is no h."""

    def __init__(self, f: nn.Module, g: nn.Module, h: nn.Module | None, views: int) -> None:
        super().__init__()
        self.f, self.g, self.h = f, g, h
        self.gather_batch = GatherBatch(views)
        self.compute_dtype = torch.float32
        split_batch_norms(self, groups=1)  # of a network that is not ours
        set_views(self, views)

    def forward(self, *views: Tensor) -> tuple[Tensor, Tensor]:
        parts = [self.f, self.gather_batch, self.g, *([] if self.h is None else [self.h])]
        outs = run_parts(parts, torch.cat([scatter_batch(view) for view in views]), self.compute_dtype)
        return at_least_float32(outs[2]), at_least_float32(outs[-1])


class Teacher(nn.Module):
    """A moving average of the student's f and g: no gradient, train mode, the batch shuffled before and restored after.

    The shuffle (MoCo's) keeps an image's two views from sharing batch-norm groups. Its draws are uniforms, one row
    per view.
    """

    def __init__(self, student: Student, views: int) -> None:
        super().__init__()
        self.f, self.g = copy.deepcopy(student.f), copy.deepcopy(student.g)
        self.gather_batch = GatherBatch(views)
        self.compute_dtype = torch.float32
        self.requires_grad_(False)
        set_views(self, views, tracked=False)  # it never runs in eval mode, so nothing would read them

    @torch.no_grad()
    def forward(self, *views: Tensor, shuffle: Tensor) -> Tensor:
        order = shuffle.argsort(dim=1)  # (V, B)
        x = torch.cat([view[scatter_batch(o)] for view, o in zip(views, order, strict=True)])
        z = at_least_float32(run_parts([self.f, self.gather_batch, self.g], x, self.compute_dtype)[-1])
        shuffled = z.unflatten(0, order.shape)
        return torch.empty_like(shuffled).scatter_(1, order[:, :, None].expand_as(shuffled), shuffled).flatten(0, 1)

    @torch.no_grad()
    def update(self, student: Student, momentum: float) -> None:
        """Move parameters by 1 - momentum toward the student's; the teacher keeps no batch-norm statistics."""
        teachers: list[Tensor] = [*self.f.parameters(), *self.g.parameters()]
        students: list[Tensor] = [*student.f.parameters(), *student.g.parameters()]
        torch._foreach_lerp_(teachers, students, 1 - momentum)


def set_compute_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Set the type in which every student and teacher below computes."""
    for part in module.modules():
        if isinstance(part, Student | Teacher):
            part.compute_dtype = dtype
