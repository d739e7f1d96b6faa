"""The first layers of a ResNet, convolution, batch norm and ReLU: one function when they train in bf16 on CUDA.

With small images and three channels, it takes less time to compute the convolution several times than to store it
(stem_kernels.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mixnn.nn import convolution
from mixnn.nn.batch_norm import SplitBatchNorm
from mixnn.nn.convolution import Convolution, runs_in_bf16


def stem(conv: nn.Module, norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """relu(norm(conv(x))) as two tensors that share memory (`SplitBatchNorm`)."""
    if not (isinstance(conv, Convolution) and isinstance(norm, SplitBatchNorm) and has_kernels(conv, norm, x)):
        pair: tuple[Tensor, Tensor] = norm(conv(x), relu=True, twice=True)
        return pair
    y, y2, stats = _Stem.apply(x, conv.weight, norm.weight, norm.bias, norm.views, norm.groups, norm.eps)
    norm.track(stats, y.numel() // y.shape[1])
    return y, y2


def has_kernels(conv: Convolution, norm: SplitBatchNorm, x: Tensor) -> bool:
    """Whether there are kernels for these layers and this input."""
    if not convolution.kernels_allowed or not is_plain(conv, Convolution) or not is_plain(norm, SplitBatchNorm):
        return False
    shape = conv.in_channels, *conv.kernel_size, *conv.stride, *conv.padding
    if shape != (3, 3, 3, 1, 1, 1, 1) or conv.out_channels not in (32, 64, 128):
        return False
    if not norm.affine or norm.frozen or not norm.training:
        return False
    if not x.is_cuda or x.requires_grad or not x.is_floating_point():  # the gradient of x has no kernel
        return False
    if x.dim() != 4 or x.shape[1] != conv.in_channels or len(x) % (norm.views * norm.groups):
        return False  # the layers say what is wrong
    return runs_in_bf16(x, conv.weight) and not torch.compiler.is_compiling()


def is_plain(layer: nn.Module, kind: type) -> bool:
    """Whether calling the layer does what `kind` does and nothing else: it is no subclass and has no hooks."""
    hooks = layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks
    return type(layer) is kind and not any(hooks)


class _Stem(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, norm_weight: Tensor, norm_bias: Tensor, views: int, groups: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        from mixnn.nn import stem_kernels  # needs triton, which torch installs only with CUDA

        y, stats, *rest = stem_kernels.forward(x, weight, norm_weight, norm_bias, views, groups, eps)
        ctx.save_for_backward(y, *rest, weight, norm_weight, norm_bias, stats)
        ctx.layout = views, groups, eps
        ctx.set_materialize_grads(False)  # a missing gradient is None, so no zeros need to be written for it
        ctx.mark_non_differentiable(stats)
        return y, y.view_as(y), stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dy2: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        from mixnn.nn import stem_kernels

        dy, dy2 = (dy2, None) if dy is None else (dy, dy2)
        if dy is None:
            return (None,) * 7
        d_weight, (d_bias, d_norm) = stem_kernels.backward(dy, dy2, *ctx.saved_tensors, *ctx.layout)
        return None, d_weight, d_norm, d_bias, None, None, None
