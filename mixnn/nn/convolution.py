"""Convolutions of ResNets: torch's, but faster when they train in bf16 on CUDA.

Only the optimizer needs the gradients of the weights. So they are computed on the side stream, in parallel with the
batch norm of the layer before: convolutions are limited by compute, batch norm by memory bandwidth. Those of the first
stage have kernels of their own (convolution_kernels.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mixnn.nn.precision import WeightStream, is_cast

Padding = tuple[int, ...] | str  # as torch types it; here it is never a string


class Convolution(nn.Conv2d):
    """A convolution without bias or groups.

    If a batch norm with `bn_groups` groups follows, the output may carry sums that save the batch norm a pass over it
    (`group_sums`): sums of the outputs and of their squares, (2, parts, channels). Part i has images of group
    i % bn_groups, as many as every other part, and parts follow the order of the images.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0,
        bn_groups: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias=False)
        self.bn_groups = bn_groups

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda or torch.compiler.is_compiling():
            return super().forward(x)
        groups = self.bn_groups if self.training else 0
        if is_cast(self.weight):
            y, sums = _Convolution.apply(x, self.weight, self.stride, self.padding, groups)
        elif torch.is_grad_enabled() or not runs_in_bf16(x, self.weight) or x.dim() != 4:
            return super().forward(x)
        else:
            y, sums = _forward(x.to(self.weight.dtype), self.weight, self.stride, self.padding, groups)
        if sums is not None:
            y.group_sums = groups, sums, _version(y)
        return y


def group_sums(x: Tensor, groups: int) -> Tensor | None:
    """The sums that a convolution attached to x, if they belong to these groups and x was not changed since."""
    found, sums, version = getattr(x, "group_sums", (0, None, 0))
    return sums if found == groups and version == _version(x) else None


def _version(x: Tensor) -> int:
    """How often x was changed in place; tensors made in inference mode do not count."""
    return -1 if x.is_inference() else x._version


@contextmanager
def without_kernels() -> Iterator[None]:
    """Use torch's operators for all convolutions in the block; profilers and counters of FLOPs know them."""
    with patch(f"{__name__}.kernels_allowed", False):
        yield


kernels_allowed = True  # see without_kernels


def runs_in_bf16(x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution of x with these weights is computed in bf16."""
    return weight.dtype == torch.bfloat16 and (x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cuda"))


def _kernels(x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: Padding) -> ModuleType | None:
    """The kernels' module if it can process x faster than cuDNN; else None."""
    if not kernels_allowed or (*stride, *padding) != (1, 1, 1, 1):
        return None
    kernels = _gluon_kernels()
    return kernels if kernels and kernels.supports(x, weight) else None


@functools.cache
def _gluon_kernels() -> ModuleType | None:
    try:
        from mixnn.nn import convolution_kernels  # needs a Triton with Gluon
    except ImportError:
        return None
    return convolution_kernels


def _forward(
    x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: Padding, bn_groups: int
) -> tuple[Tensor, Tensor | None]:
    kernels = _kernels(x, weight, stride, padding)
    if kernels:
        return kernels.forward(x, weight, bn_groups)
    return torch.ops.aten.convolution(x, weight, None, [*stride], [*padding], [1, 1], False, [0, 0], 1), None


class _Convolution(torch.autograd.Function):
    """A convolution that computes the gradient of its weights on the side stream, and sums for a batch norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: Padding, bn_groups: int
    ) -> tuple[Tensor, Tensor | None]:
        x = x.to(weight.dtype)
        ctx.save_for_backward(x, weight)
        ctx.rest = None, [*stride], [*padding], [1, 1], False, [0, 0], 1
        ctx.stream = WeightStream(weight)
        ctx.set_materialize_grads(False)  # the sums have no gradient, and no zeros need to be written for it
        ctx.kernels = _kernels(x, weight, stride, padding)
        y, sums = _forward(x, weight, stride, padding, bn_groups)
        if sums is not None:
            ctx.mark_non_differentiable(sums)
        return y, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors
        backward, dx, d_weight = torch.ops.aten.convolution_backward, None, None
        if ctx.needs_input_grad[0]:
            if ctx.kernels:
                dx = ctx.kernels.input_gradient(dy, weight)
            else:
                dx = backward(dy, x, weight, *ctx.rest, [True, False, False])[0]
        if ctx.needs_input_grad[1]:
            with ctx.stream(dy.device, dy, x):
                if ctx.kernels:
                    d_weight = ctx.kernels.weight_gradient(x, dy, weight)
                else:
                    d_weight = backward(dy, x, weight, *ctx.rest, [False, True, False])[1]
        return dx, d_weight, None, None, None
