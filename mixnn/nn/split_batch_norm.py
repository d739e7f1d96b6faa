"""Batch norm whose statistics are taken per view and per strided group of images (SplitBN).

The idea is David Page's (cifar10-fast), through MoCo's CIFAR demo and the MNN authors' code, which splits every
backbone batch norm into 8 groups {n : n mod 8 = g} that share weight and bias. It differs in two ways: several views
may be stacked in one pass and never share statistics, and the groups are a reshape that keeps channels_last memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixnn.functional import at_least_float32


class SplitBatchNorm(nn.BatchNorm2d):
    """Batch norm of (V * n * groups, C, ...), image i of a view in group i mod groups; plain batch norm in eval."""

    running_mean: Tensor
    running_var: Tensor
    momentum: float

    def __init__(self, num_features: int, groups: int = 1, affine: bool = True) -> None:
        super().__init__(num_features, affine=affine)
        self.groups = groups
        self.views = 1  # how many views a training batch stacks; see set_views

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        if (
            self.groups == 1 and x.device.type == "cpu"
        ):  # torch's own kernel: on a CPU 1.4 times as fast as what follows
            return torch.cat([self._plain(view) for view in x.chunk(self.views)])
        shape = x.shape
        x = x.unflatten(0, (self.views, -1, self.groups))  # (V, n, G, C, ...)
        over = (1, *range(4, x.dim()))
        wide = at_least_float32(x)
        # Two sums in one pass; a compiled Welford reduction (var_mean) cost 0.3 ms more of an 8.9 ms step on an H200.
        mean = wide.mean(over, keepdim=True)  # (V, 1, G, C, ...)
        var = ((wide * wide).mean(over, keepdim=True) - mean * mean).clamp(min=0)
        self._track(mean.detach(), var.detach(), x[0, :, 0, 0].numel())
        scale = (var + self.eps).rsqrt()
        shift = -mean * scale
        if self.affine:
            weight, bias = (p.view(-1, *(1,) * (x.dim() - 4)) for p in (self.weight, self.bias))
            scale, shift = scale * weight, shift * weight + bias
        return (x * scale + shift).to(x.dtype).view(shape)

    def _plain(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum, self.eps
        )

    def _track(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Running statistics as if each view had come alone, in order; a view's are the mean over its groups'."""
        keep = 1 - self.momentum
        for running, value in ((self.running_mean, mean), (self.running_var, var * (count / (count - 1)))):
            by_view = value.mean(2).flatten(1)  # (V, C)
            last = sum(keep ** (self.views - 1 - v) * by_view[v] for v in range(self.views)) * self.momentum
            running.mul_(keep**self.views).add_(last)


def set_views(module: nn.Module, views: int) -> None:
    """Tell every SplitBatchNorm below that its training batches stack this many views."""
    for layer in module.modules():
        if isinstance(layer, SplitBatchNorm):
            layer.views = views
