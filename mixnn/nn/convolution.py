"""Convolutions of ResNets: torch's, but faster when they train in bf16 on CUDA.

Backward, nothing waits for the gradients of the weights but the optimizer. So they are computed on a second stream,
where they run in parallel with the batch norm of the layer before: one is bound by operations, the other by memory.
The first convolution has kernels of its own (stem_kernels.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mixnn.device import side_stream
from mixnn.nn.precision import is_cast


class Convolution(nn.Conv2d):
    """A convolution without bias or groups."""

    def __init__(self, in_channels: int, channels: int, side: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__(in_channels, channels, side, stride, padding, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda or torch.compiler.is_compiling():
            return super().forward(x)
        if self.is_small_stem() and _runs_in_bf16(x, self.weight) and not x.requires_grad:  # which has no kernel
            return _Stem.apply(x, self.weight)
        if is_cast(self.weight):
            return _Convolution.apply(x, self.weight, self.stride, self.padding)
        return super().forward(x)

    def is_small_stem(self) -> bool:
        """Whether there are kernels for it: the first layer of a network for small images."""
        shape = self.in_channels, *self.kernel_size, *self.stride, *self.padding
        return shape == (3, 3, 3, 1, 1, 1, 1) and self.out_channels in (16, 32, 64, 128)


def _runs_in_bf16(x: Tensor, weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and (x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cuda"))


class _Convolution(torch.autograd.Function):
    """CastAll (precision.py), through which the gradient of the weights goes next, waits for the second stream.

    So a network must not use a layer twice in a pass: autograd would add its gradients before that.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]) -> Tensor:
        x = x.to(weight.dtype)
        ctx.save_for_backward(x, weight)
        ctx.rest = None, [*stride], [*padding], [1, 1], False, [0, 0], 1
        return torch.ops.aten.convolution(x, weight, *ctx.rest)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        backward, dx, d_weight = torch.ops.aten.convolution_backward, None, None
        if ctx.needs_input_grad[0]:
            dx = backward(dy, x, weight, *ctx.rest, [True, False, False])[0]
        if ctx.needs_input_grad[1]:
            with side_stream(dy.device):
                d_weight = backward(dy, x, weight, *ctx.rest, [False, True, False])[1]
                for tensor in (dy, x):  # their memory must not be used again before that
                    tensor.record_stream(torch.cuda.current_stream(dy.device))
        return dx, d_weight, None, None


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
