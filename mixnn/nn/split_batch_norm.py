"""Batch norm whose statistics are taken per view and per strided group of images (SplitBN), with residual and ReLU.

The idea is David Page's (cifar10-fast), through MoCo's CIFAR demo and the MNN authors' code, which splits every
backbone batch norm into 8 groups {n : n mod 8 = g} that share weight and bias. It differs in two ways: several views
may be stacked in one pass and never share statistics, and the groups are a reshape that keeps channels_last memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixnn.config import UserError
from mixnn.nn.batch_norm import batch_norm, memory_format, track


class SplitBatchNorm(nn.BatchNorm2d):
    """relu(norm(x) + residual) for x (V * n * groups, C, ...), image i of a view in group i mod groups.

    Residual and ReLU are optional; in eval mode the norm is plain batch norm.
    """

    running_mean: Tensor
    running_var: Tensor
    group_shares: Tensor
    momentum: float

    def __init__(self, num_features: int, groups: int = 1, affine: bool = True) -> None:
        super().__init__(num_features, affine=affine)
        self.groups = groups
        self.views, self.tracked = 1, True  # see set_views
        self.register_buffer("group_shares", torch.full((groups,), 1 / groups), persistent=False)

    def forward(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        if not self.training:
            assert self.tracked, "eval mode reads running statistics, and this network keeps none"
            y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
            return _finish(y, residual, relu)
        if self.groups == 1 and x.device.type == "cpu":
            # torch's own kernel; on a CPU 1.4 times as fast as what follows
            return _finish(torch.cat([self._plain(view) for view in x.chunk(self.views)]), residual, relu)
        weight = self.weight if self.affine else torch.ones_like(self.running_mean)
        bias = self.bias if self.affine else torch.zeros_like(self.running_mean)
        x = x.contiguous(memory_format=memory_format(x))
        residual = None if residual is None else residual.contiguous(memory_format=memory_format(x))
        y, stats = batch_norm(x, residual, weight, bias, self.views, self.groups, self.eps, relu)
        if self.tracked:  # as if each view had come alone, in order; a view's statistics are the mean over its groups'
            share = 1 - (1 - self.momentum) ** self.views
            count = x.numel() // (self.views * self.groups * x.shape[1])
            shares = self.group_shares
            track(stats.detach(), shares, self.running_mean, self.running_var, share, count / (count - 1))
        return y

    def _plain(self, x: Tensor) -> Tensor:
        mean, var = (self.running_mean, self.running_var) if self.tracked else (None, None)
        return F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps)


def _finish(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    y = y if residual is None else y + residual
    return F.relu(y) if relu else y


def split_batch_norms(module: nn.Module, groups: int, path: str = "") -> None:
    """Replace every plain batch norm below by a split one with its weights and settings.

    Others would let views share statistics, and are refused; timm's batch norm with dropout and activation is taken
    apart.
    """
    for name, child in module.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and not isinstance(child, SplitBatchNorm):
            after = [child.get_submodule(part) for part in ("drop", "act") if part in dict(child.named_children())]
            if type(child) not in (nn.BatchNorm1d, nn.BatchNorm2d) and len(after) < 2:
                raise UserError(
                    f"{path}{name} is a {type(child).__name__}, in which the views of a batch would share statistics: "
                    "make it a BatchNorm2d, which is split by view"
                )
            split = SplitBatchNorm(child.num_features, groups, child.affine)
            split.eps, split.momentum = child.eps, child.momentum or 0.1
            split.load_state_dict(child.state_dict(), strict=child.track_running_stats)
            setattr(module, name, nn.Sequential(split, *after) if after else split)
        else:
            split_batch_norms(child, groups, f"{path}{name}.")


def set_views(module: nn.Module, views: int, tracked: bool = True) -> None:
    """Tell every SplitBatchNorm below how many views a batch stacks, and whether to keep running statistics.

    These move view by view, x1's then x2's. The authors run the directions the other way round: x1 then has 0.53 of the
    weight instead of 0.47.
    """
    for layer in module.modules():
        if isinstance(layer, SplitBatchNorm):
            layer.views, layer.tracked = views, tracked
            later = torch.arange(views - 1, -1, -1, dtype=torch.float64)  # views that come after each: these fade it
            shares = ((1 - layer.momentum) ** later).repeat_interleave(layer.groups)
            layer.group_shares = (shares / shares.sum()).to(layer.running_mean)
