"""Copies of networks for frozen features, with batch norm folded into the convolutions.

In eval mode batch norm multiplies each channel by a number and adds another. Both can be a part of the convolution in
front of it, which saves a pass over the activations, and on CUDA in half precision those for residual and ReLU too.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixnn.nn.batch_norm import SplitBatchNorm
from mixnn.nn.efficientnet import ConvNorm, EfficientNetLite0
from mixnn.nn.resnet import ResNet

HALF = (torch.bfloat16, torch.float16)


class FoldedConv(nn.Conv2d):
    """act(conv(x) + bias + residual), for inference. Called like the SplitBatchNorm or ConvNorm that it replaces."""

    uses_batch = False
    bias: Tensor

    def __init__(self, conv: nn.Conv2d, norm: SplitBatchNorm, pad: tuple[int, ...] | None = None) -> None:
        super().__init__(
            conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups  # type: ignore[arg-type]
        )  # fmt: skip
        self.pad = pad
        scale = (norm.running_var.double() + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight.double()
        bias = -norm.running_mean.double() * scale
        bias = bias if norm.bias is None else bias + norm.bias.double()
        weight = conv.weight.double() * scale.view(-1, 1, 1, 1)  # multiplied in float64, so that it is rounded once
        self.weight = nn.Parameter(weight.to(conv.weight).detach(), requires_grad=False)
        self.bias = nn.Parameter(bias.to(conv.weight).detach(), requires_grad=False)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, relu: bool = False, relu6: bool = False, twice: bool = False
    ) -> Any:
        y = self._forward(x, residual, relu, relu6)
        return (y, y) if twice else y

    def _forward(self, x: Tensor, residual: Tensor | None, relu: bool, relu6: bool) -> Tensor:
        x = F.pad(x, self.pad) if self.pad else x
        if relu and x.is_cuda and self.groups == 1 and (dtype := _compute_dtype(x)) in HALF:
            return self._fused(x, residual, dtype)
        y = super().forward(x)
        y = y if residual is None else y.add_(residual)
        if relu6:
            return F.relu6(y, inplace=True)
        return F.relu(y, inplace=True) if relu else y

    def _fused(self, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        """cuDNN's convolution with bias, residual and ReLU in one kernel. Autocast does not know it."""
        x, weight, bias = x.to(dtype), self.weight.to(dtype), self.bias.to(dtype)
        how = bias, self.stride, self.padding, self.dilation, self.groups
        if residual is None:
            return torch.cudnn_convolution_relu(x, weight, *how)  # type: ignore[arg-type]
        return torch.cudnn_convolution_add_relu(x, weight, residual.to(dtype), 1.0, *how)  # type: ignore[arg-type]


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The type in which a convolution of x is computed."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


@torch.no_grad()
def folded(network: nn.Module) -> nn.Module:
    """A copy of a ResNet or EfficientNet-Lite0 with the same features in eval mode; other networks are returned as is.

    The copy has no batch norm and no gradient, and does not follow later changes of the network.
    """
    if type(network) not in (ResNet, EfficientNetLite0):  # elsewhere, convolutions may have uses that nobody knows
        return network
    copy = deepcopy(network).eval().requires_grad_(False)
    for module in list(copy.modules()):
        children = list(module.named_children())
        for (conv_name, conv), (name, norm) in pairwise(children):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, SplitBatchNorm) and not isinstance(module, ConvNorm):
                setattr(module, conv_name, nn.Identity())
                setattr(module, name, FoldedConv(conv, norm))
        for name, child in children:
            if isinstance(child, ConvNorm):
                setattr(module, name, FoldedConv(child.conv, child.norm, child.pad))
    return copy
