"""Split batch norm, residual and ReLU in plain PyTorch: what the kernels for CUDA must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from mixnn.functional import at_least_float32


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, views: int, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """As batch_norm.batch_norm."""
    split = _split(x, views, groups)
    over = 1, *range(4, split.dim())
    mean = split.mean(over, keepdim=True)
    centred = split - mean
    var = (centred * centred).mean(over, keepdim=True)
    y = (centred * (var + eps).rsqrt() * _per_channel(weight, split) + _per_channel(bias, split)).view(x.shape)
    y = y if residual is None else y + residual
    return (y.relu() if relu else y).to(x.dtype), torch.stack([m.view(views * groups, -1) for m in (mean, var)])


def backward(
    dy: Tensor, x: Tensor, y: Tensor | None, stats: Tensor, weight: Tensor, bias: Tensor,
    views: int, groups: int, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As batch_norm.batch_norm_backward."""
    split = _split(x, views, groups)
    mean, var = (m.view(views, 1, groups, -1, *(1,) * (x.dim() - 2)) for m in stats)
    inverse_std = (var + eps).rsqrt()
    x_hat = (split - mean) * inverse_std
    slope = _split(dy, views, groups)
    if relu:
        linear = (
            x_hat * _per_channel(weight, split) + _per_channel(bias, split) if y is None else _split(y, views, groups)
        )
        slope = torch.where(linear > 0, slope, 0)
    over = 1, *range(4, split.dim())
    sums = [slope.sum(over, keepdim=True), (slope * x_hat).sum(over, keepdim=True)]
    count = x.numel() // mean.numel()
    dx = inverse_std * _per_channel(weight, split) * (slope - (sums[0] + x_hat * sums[1]) / count)
    to_residual = x.new_empty(0) if y is None else torch.empty_like(x).copy_(slope.view(x.shape))
    both = torch.stack([s.view(views * groups, -1).sum(0) for s in sums])
    return torch.empty_like(x).copy_(dx.view(x.shape)), to_residual, both


def track(stats: Tensor, shares: Tensor, mean: Tensor, var: Tensor, share: float, unbias: float) -> None:
    """As batch_norm.track."""
    new_mean, new_var = (stats * shares[:, None]).sum(1)
    mean.lerp_(new_mean, share)
    var.lerp_(new_var * unbias, share)


def _split(x: Tensor, views: int, groups: int) -> Tensor:
    return at_least_float32(x).unflatten(0, (views, -1, groups))  # (V, n, G, C, ...)


def _per_channel(parameter: Tensor, split: Tensor) -> Tensor:
    return parameter.view(-1, *(1,) * (split.dim() - 4))
