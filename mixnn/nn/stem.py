"""The first convolution of a network for small images: torch's, and on CUDA in bf16 the kernels of stem_kernels.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class StemConv(nn.Conv2d):
    """A 3x3 convolution of three channels with stride 1 and no bias.

    >>> mixnn.nn.StemConv(64)(x1).shape
    torch.Size([8, 64, 32, 32])
    """

    def __init__(self, channels: int) -> None:
        super().__init__(3, channels, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return _Stem.apply(x, self.weight) if _has_kernels(x, self.weight) else super().forward(x)


def _has_kernels(x: Tensor, weight: Tensor) -> bool:
    """Only the gradient of the weights has a kernel. A compiler could not look into it."""
    return (
        x.is_cuda
        and weight.dtype == torch.bfloat16
        and (x.dtype == weight.dtype or torch.is_autocast_enabled("cuda"))
        and x.dim() == 4
        and not x.requires_grad
        and len(weight) in (16, 32, 64, 128)
        and not torch.compiler.is_compiling()
    )


class _Stem(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        from mixnn.nn import stem_kernels  # needs triton, which torch installs only with CUDA

        ctx.save_for_backward(x, weight)
        return stem_kernels.forward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        from mixnn.nn import stem_kernels

        x, weight = ctx.saved_tensors
        return None, stem_kernels.weight_gradient(x, dy, weight)
