"""Student and teacher: backbone f, projector g and, for the student, predictor h.

Several views go through in one pass, stacked along the batch; batch norm keeps their statistics apart. Networks may
compute in bf16, but they return fp32: normalization, search and losses are never in less.

As they are made, networks run under the caller's autocast and communicate with nobody. The trainer changes that with
`set_compute_dtype` and `dist.set_data_parallel`.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mixnn.config import UserError
from mixnn.device import keep_alive
from mixnn.dist import BUCKET_BYTES, GatherBatch, PartialBatch, check_features, scatter_batch
from mixnn.functional import at_least_float32
from mixnn.nn.batch_norm import SplitBatchNorm, set_views, split_batch_norms
from mixnn.nn.precision import WeightStream, is_cast, run_parts

IMAGE_SIZES = (32, 224, 64, 96, 128, 256)  # which `feature_length` tries; some networks accept one size only


def mlp(sizes: list[int], out_norm: str = "none", hidden_norm: bool = True) -> nn.Sequential:
    """Linear layers with ReLU between; no bias before a batch norm. out_norm is none, affine or plain.

    >>> head = mixnn.nn.mlp([32, 64, 16])
    """
    layers: list[nn.Module] = []
    last = len(sizes) - 2
    for i, (a, b) in enumerate(pairwise(sizes)):
        norm = hidden_norm if i < last else out_norm != "none"
        layers.append(Linear(a, b, bias=not norm))
        if norm:
            layers.append(SplitBatchNorm(b, affine=i < last or out_norm == "affine"))
        if i < last:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Linear(nn.Linear):
    """torch's, but in bf16 on CUDA it computes the gradients of weight and bias on the side stream."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda or torch.compiler.is_compiling() or not is_cast(self.weight):
            return super().forward(x)
        y: Tensor = _Linear.apply(x, self.weight, self.bias)
        return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x.to(weight.dtype)
        ctx.save_for_backward(x, weight)
        ctx.stream = WeightStream(weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        d_weight = d_bias = None
        keep_alive(dy)  # autograd may add to it in place: in `x + mlp(x)` it is also a part of the gradient of x
        with ctx.stream(dy.device, dy, x):
            rows = dy.reshape(-1, dy.shape[-1])
            if ctx.needs_input_grad[1]:
                d_weight = rows.T @ x.reshape(-1, x.shape[-1])
            if ctx.needs_input_grad[2]:
                d_bias = rows.sum(0)
        return dx, d_weight, d_bias


@torch.no_grad()
def feature_length(backbone: nn.Module) -> int:
    """Length F of a backbone's features: its attribute `num_features` or else what a copy of it returns."""
    attribute = getattr(backbone, "num_features", None)
    if isinstance(attribute, int):
        return attribute
    network = deepcopy(backbone).eval()
    weights = next(network.parameters(), torch.zeros(()))
    for size in IMAGE_SIZES:
        try:
            features = network(torch.zeros(2, 3, size, size).to(weights))
        except (RuntimeError, ValueError, AssertionError):  # not its size
            continue
        return check_features(features, rows=2).shape[1]
    raise UserError(
        "the backbone refuses images with three channels of all usual sizes: pass the length of its features as "
        "num_features="
    )


class Student(nn.Module):
    """f, g, h with gradient: views -> q = g(f(x)) and p = h(q); p is q if there is no h.

    Replaces every batch norm in f, g and h, in place, by SplitBatchNorm, so that views never share statistics.

    >>> student = mixnn.nn.Student(backbone, mixnn.nn.mlp([32, 64, 16]), None, views=2)
    >>> q, p = student(x1, x2)
    >>> q.shape
    torch.Size([16, 16])
    """

    def __init__(self, f: nn.Module, g: nn.Module, h: nn.Module | None, views: int) -> None:
        super().__init__()
        self.f, self.g, self.h = f, g, h
        self.gather_batch = GatherBatch(views)
        self.compute_dtype: torch.dtype | None = None
        split_batch_norms(self, groups=1)  # of a network that is not ours
        set_views(self, views)
        self.train()  # pretrained networks often come in eval mode

    def forward(self, *views: Tensor | PartialBatch) -> tuple[Tensor, Tensor]:
        parts = [self.f, self.gather_batch, self.g, *([] if self.h is None else [self.h])]
        group = self.gather_batch.group
        x = torch.cat([scatter_batch(view, group) for view in views])
        outs = run_parts(parts, x, self.compute_dtype, sys.maxsize if group is None else BUCKET_BYTES // 2)
        return at_least_float32(outs[2]), at_least_float32(outs[-1])


class Teacher(nn.Module):
    """A moving average of the student's f and g: no gradient, train mode, the batch shuffled before and restored after.

    The shuffle (MoCo's) keeps an image's two views from sharing batch-norm groups. Its draws are uniforms, one row
    per view. It stays in train mode when the student leaves it, since it keeps no running statistics.

    >>> student = mixnn.nn.Student(backbone, mixnn.nn.mlp([32, 64, 16]), None, views=1)
    >>> teacher = mixnn.nn.Teacher(student, views=1)
    >>> teacher(x2, shuffle=torch.rand(1, 8)).shape
    torch.Size([8, 16])
    >>> teacher.update(student, momentum=0.99)
    """

    def __init__(self, student: Student, views: int) -> None:
        super().__init__()
        self.f, self.g = deepcopy(student.f), deepcopy(student.g)
        self.gather_batch = GatherBatch(views)
        self.compute_dtype: torch.dtype | None = None
        self.requires_grad_(False)
        set_views(self, views, tracked=False)  # it never runs in eval mode, so nothing would read them

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        return super().train(True)

    @torch.no_grad()
    def forward(self, *views: Tensor | PartialBatch, shuffle: Tensor) -> Tensor:
        order = shuffle_order(shuffle)
        group = self.gather_batch.group
        x = torch.cat([view[scatter_batch(o, group)] for view, o in zip(views, order, strict=True)])
        z = at_least_float32(run_parts([self.f, self.gather_batch, self.g], x, self.compute_dtype)[-1])
        shuffled = z.unflatten(0, order.shape)
        return torch.empty_like(shuffled).scatter_(1, order[:, :, None].expand_as(shuffled), shuffled).flatten(0, 1)

    @torch.no_grad()
    def update(self, student: Student, momentum: float | Tensor) -> None:
        """Move parameters by 1 - momentum toward the student's; the teacher keeps no batch-norm statistics."""
        teachers: list[Tensor] = [*self.f.parameters(), *self.g.parameters()]
        students: list[Tensor] = [*student.f.parameters(), *student.g.parameters()]
        if isinstance(momentum, Tensor):  # lerp would read it back
            moves = torch._foreach_sub(students, teachers)
            torch._foreach_mul_(moves, 1 - momentum)
            torch._foreach_add_(teachers, moves)
        else:
            torch._foreach_lerp_(teachers, students, 1 - momentum)


def shuffle_order(shuffle_VB: Tensor) -> Tensor:
    """The order (V, B) in which a teacher encodes the images of each view, from its uniforms."""
    return shuffle_VB.argsort(dim=1)


def set_compute_dtype(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Set the type in which every student and teacher below computes, fp32 or bf16; None: the caller's autocast."""
    for part in module.modules():
        if isinstance(part, Student | Teacher):
            part.compute_dtype = dtype
