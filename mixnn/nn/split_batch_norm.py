"""Batch norm whose statistics are taken per view and per strided group of images (SplitBN).

The idea is David Page's (cifar10-fast), through MoCo's CIFAR demo and the MNN authors' code, which splits every
backbone batch norm into 8 groups {n : n mod 8 = g} that share weight and bias. It differs in two ways: several views
may be stacked in one pass and never share statistics, and the groups are a reshape that keeps channels_last memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixnn.functional import at_least_float32


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of x (V, n, G, C, ...) over n and the pixels, (V, 1, G, C, ...), without gradient.

    Two sums in one pass; a compiled Welford reduction (var_mean) cost 0.3 ms more of an 8.9 ms step on an H200.
    """
    wide, over = at_least_float32(x.detach()), _over(x)
    mean = wide.mean(over, keepdim=True)
    return mean, ((wide * wide).mean(over, keepdim=True) - mean * mean).clamp(min=0)


def _over(x: Tensor) -> tuple[int, ...]:
    return 1, *range(4, x.dim())


class Standardize(torch.autograd.Function):
    """(x - mean) / std * weight + bias, where mean and std are x's own moments.

    The gradient, that through the moments included, is written out: autograd's has twice the operations, and compiling
    them took ten seconds more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, inverse_std: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, mean, inverse_std, weight)
        scale = inverse_std * weight
        return x * scale + (
            bias - mean * scale
        )  # a .to() here may return an alias: zero gradients in torch 2.11 (#180642)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, inverse_std, weight = ctx.saved_tensors
        dy, over = at_least_float32(slopes[0]), _over(x)
        x_hat = (at_least_float32(x) - mean) * inverse_std
        sum_dy, sum_dy_x = dy.sum(over, keepdim=True), (dy * x_hat).sum(over, keepdim=True)
        count = x.numel() // mean.numel()
        dx = inverse_std * weight * (dy - (sum_dy + x_hat * sum_dy_x) / count)
        return dx.to(x.dtype), None, None, sum_dy_x.sum((0, 1, 2)), sum_dy.sum((0, 1, 2))


class SplitBatchNorm(nn.BatchNorm2d):
    """Batch norm of (V * n * groups, C, ...), image i of a view in group i mod groups; plain batch norm in eval."""

    running_mean: Tensor
    running_var: Tensor
    view_shares: Tensor
    momentum: float

    def __init__(self, num_features: int, groups: int = 1, affine: bool = True) -> None:
        super().__init__(num_features, affine=affine)
        self.groups = groups
        self.views, self.tracked = 1, True  # see set_views
        self.register_buffer("view_shares", torch.ones(1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            assert self.tracked, "eval mode reads running statistics, and this network keeps none"
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        if self.groups == 1 and x.device.type == "cpu":
            # torch's own kernel; on a CPU 1.4 times as fast as what follows
            return torch.cat([self._plain(view) for view in x.chunk(self.views)])
        split = x.unflatten(0, (self.views, -1, self.groups))  # (V, n, G, C, ...)
        per_channel = (-1, *(1,) * (split.dim() - 4))
        weight = (self.weight if self.affine else torch.ones_like(self.running_mean)).view(per_channel)
        bias = (self.bias if self.affine else torch.zeros_like(self.running_mean)).view(per_channel)
        mean, var = moments(split)
        self._track(mean, var, x.numel() // mean.numel())
        y = Standardize.apply(split, mean, (var + self.eps).rsqrt(), weight, bias)
        return y.to(x.dtype).view(x.shape)

    def _plain(self, x: Tensor) -> Tensor:
        mean, var = (self.running_mean, self.running_var) if self.tracked else (None, None)
        return F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps)

    def _track(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Running statistics as if each view had come alone, in order; a view's are the mean over its groups'."""
        if not self.tracked:
            return
        share = 1 - (1 - self.momentum) ** self.views
        for running, value in ((self.running_mean, mean), (self.running_var, var * (count / (count - 1)))):
            running.lerp_((value.mean(2).flatten(1) * self.view_shares).sum(0), share)


def set_views(module: nn.Module, views: int, tracked: bool = True) -> None:
    """Tell every SplitBatchNorm below how many views a batch stacks, and whether to keep running statistics."""
    for layer in module.modules():
        if isinstance(layer, SplitBatchNorm):
            layer.views, layer.tracked = views, tracked
            later = torch.arange(
                views - 1, -1, -1, dtype=torch.float64
            )  # how many views come after each: these fade it
            shares = (1 - layer.momentum) ** later
            layer.view_shares = (shares / shares.sum())[:, None].to(layer.running_mean)
