"""Batch norm whose statistics are taken per view and per strided group of images (SplitBN), with residual and ReLU.

The idea is David Page's (cifar10-fast), through MoCo's CIFAR demo and the MNN authors' code, which splits every
backbone batch norm into 8 groups {n : n mod 8 = g} that share weight and bias. It differs in two ways: several views
may be stacked in one pass and never share statistics, and the groups are a reshape that keeps channels_last memory.

`SplitBatchNorm` is the layer. Below it are the operators it calls, whose gradient is written out, and their formulas
in plain PyTorch; on CUDA they run the kernels of batch_norm_kernels.py. To a compiler an operator is a single node,
where the formula is forty: compiling a step of ResNet-18 takes half the time or less.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixnn.config import UserError
from mixnn.functional import at_least_float32
from mixnn.nn.convolution import group_sums


class SplitBatchNorm(nn.BatchNorm2d):
    """relu(norm(x) + residual) for x (V * n * groups, C, ...), image i of a view in group i mod groups.

    Residual and ReLU are optional. In eval mode, or once frozen, the norm is plain batch norm with running statistics.

    >>> mixnn.nn.SplitBatchNorm(3, groups=4)(x1).shape
    torch.Size([8, 3, 32, 32])
    """

    running_mean: Tensor
    running_var: Tensor
    group_weights: Tensor
    momentum: float

    def __init__(self, num_features: int, groups: int = 1, affine: bool = True, eps: float = 1e-5) -> None:
        super().__init__(num_features, eps, affine=affine)
        self.groups = groups
        self.views, self.tracked = 1, True  # see set_views
        self.frozen = False  # see freeze_statistics
        self.register_buffer("group_weights", torch.full((groups,), 1 / groups), persistent=False)

    def forward(self, x: Tensor, residual: Tensor | None = None, relu: bool = False, twice: bool = False) -> Any:
        """Normalize x, then add `residual` and apply ReLU if asked. With `twice`, return the output as two tensors.

        The two share memory: one is for the next layer, one for a shortcut. Their gradients then come back one by one,
        and this layer adds them as it reads them. Autograd would write their sum to memory first.
        """
        pair = self._pair(x, residual, relu, twice)
        return pair if twice else pair[0]

    def _pair(self, x: Tensor, residual: Tensor | None, relu: bool, twice: bool) -> tuple[Tensor, Tensor]:
        if self.frozen or not self.training:
            assert self.frozen or self.tracked, "eval mode needs running statistics, and this network keeps none"
            y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
            return (_add_and_relu(y, residual, relu),) * 2
        if len(x) % (self.views * self.groups):
            raise UserError(
                f"{len(x)} images cannot be split into {self.views * self.groups} equal batch-norm groups "
                f"({self.views} views, {self.groups} each): leave out an incomplete last batch (drop_last=True), "
                "or use a batch size that the number of groups divides"
            )
        if x.numel() < 2 * self.views * self.groups * x.shape[1]:
            raise UserError(
                f"{len(x)} images of shape {tuple(x.shape[1:])} give each of {self.views * self.groups} batch-norm "
                f"groups ({self.views} views, {self.groups} each) one value per channel, which has no variance: use a "
                "larger batch or fewer groups"
            )
        if self.groups == 1 and x.device.type == "cpu":
            # torch's own kernel, which on a CPU is 1.4 times as fast as the operator
            y = torch.cat([self._one_group(view) for view in x.chunk(self.views)])
            return (_add_and_relu(y, residual, relu),) * 2
        weight = self.weight if self.affine else torch.ones_like(self.running_mean)
        bias = self.bias if self.affine else torch.zeros_like(self.running_mean)
        sums = None if torch.compiler.is_compiling() else group_sums(x, self.groups)
        x = x.contiguous(memory_format=memory_format(x))
        residual = None if residual is None else residual.contiguous(memory_format=memory_format(x))
        args = x, residual, weight, bias, self.views, self.groups, self.eps, relu, sums
        if twice and not torch.compiler.is_compiling():
            y, y2, stats = _Twice.apply(*args)
        else:  # a compiler adds the gradients; torch 2.11's has errors with outputs that share memory (issue 180642)
            y, stats, _ = batch_norm(*args)
            y2 = y
        self.track(stats.detach(), x.numel() // x.shape[1])
        return y, y2

    def track(self, stats: Tensor, rows: int) -> None:
        """Move the running statistics toward a batch's moments by group, if they are kept.

        As if each view came alone, in order; a view's statistics are the mean over its groups.
        """
        if self.tracked:
            momentum = 1 - (1 - self.momentum) ** self.views
            count = rows // (self.views * self.groups)
            weights, mean, var = self.group_weights, self.running_mean, self.running_var
            update_running_stats(stats, weights, mean, var, momentum, count / (count - 1))

    def _one_group(self, x: Tensor) -> Tensor:
        mean, var = (self.running_mean, self.running_var) if self.tracked else (None, None)
        return F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps)


def _add_and_relu(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    y = y if residual is None else y + residual
    return F.relu(y) if relu else y


def split_batch_norms(module: nn.Module, groups: int, path: str = "") -> None:
    """Replace every BatchNorm1d and BatchNorm2d below by a SplitBatchNorm with its weights and settings.

    Other kinds would let views share statistics, and are refused. timm's batch norm with dropout and activation is
    taken apart.
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
            split.eps, split.momentum = child.eps, 0.1 if child.momentum is None else child.momentum
            split.load_state_dict(child.state_dict(), strict=child.track_running_stats)
            for old in [*child.parameters(), *child.buffers()][:1]:
                split.to(old)  # its device and type
            for new, old in zip(split.parameters(), child.parameters(), strict=True):
                new.requires_grad_(old.requires_grad)
            setattr(module, name, nn.Sequential(split, *after) if after else split)
        else:
            split_batch_norms(child, groups, f"{path}{name}.")


def set_views(module: nn.Module, views: int, tracked: bool = True) -> None:
    """Set how many views a batch stacks, and whether running statistics are kept, for every SplitBatchNorm below.

    Running statistics move view by view, x1's then x2's. The authors run the directions the other way round: there x1
    has 0.53 of the weight instead of 0.47.
    """
    for layer in module.modules():
        if isinstance(layer, SplitBatchNorm):
            layer.views, layer.tracked = views, tracked
            later = torch.arange(views - 1, -1, -1, dtype=torch.float64)  # number of views that follow each view
            weights = ((1 - layer.momentum) ** later).repeat_interleave(layer.groups)
            layer.group_weights = (weights / weights.sum()).to(layer.running_mean)


def freeze_statistics(module: nn.Module) -> None:
    """Keep the running statistics of every SplitBatchNorm below as they are, and normalize with them in training too.

    Weight and bias still learn. For networks that start from good weights: a batch of a few images would replace
    statistics of a million.
    """
    for layer in module.modules():
        if isinstance(layer, SplitBatchNorm):
            layer.frozen = True


# Operators


def _kernels(x: Tensor) -> ModuleType | None:
    """The kernels' module if it can process x, whose second dimension is the channels; else None."""
    if x.is_cuda:
        from mixnn.nn import batch_norm_kernels  # needs triton, which torch installs only with CUDA

        if batch_norm_kernels.supports(x.dtype, x.shape[1]):
            return batch_norm_kernels
    return None


@torch.library.custom_op("mixnn::batch_norm", mutates_args=())
def batch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, views: int, groups: int, eps: float, relu: bool,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """relu((x - mean) / std * weight + bias + residual), and x's moments (2, views * groups, C): mean, variance.

    The third output is empty, or has the output's signs as bits, if the kernels want them for the gradient.

    The kernels take the moments from `sums` if they are given (`Convolution`), or else from two sums in one pass; a
    Welford reduction cost 0.3 ms more of an 8.9 ms step on an H200.
    """
    kernels = _kernels(x)
    if kernels:
        return kernels.forward(x, residual, weight, bias, views, groups, eps, relu, sums)
    return *plain_forward(x, residual, weight, bias, views, groups, eps, relu), x.new_empty(0, dtype=torch.uint8)


@torch.library.custom_op("mixnn::batch_norm_backward", mutates_args=())
def batch_norm_backward(
    dy: Tensor, dy2: Tensor | None, x: Tensor, saved: Tensor | None, stats: Tensor, weight: Tensor, bias: Tensor,
    views: int, groups: int, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, of the residual, and of bias and weight stacked (2, C). The output's gradient is dy + dy2.

    y or its signs are given as `saved`, and the residual's gradient is computed, only if there was a residual.
    """
    kernels, layout = _kernels(x), memory_format(x)
    backward = kernels.backward if kernels else plain_backward
    dy, dy2 = dy.contiguous(memory_format=layout), None if dy2 is None else dy2.contiguous(memory_format=layout)
    return backward(dy, dy2, x, saved, stats, weight, bias, views, groups, eps, relu)


@torch.library.custom_op("mixnn::update_running_stats", mutates_args=("running_mean", "running_var"))
def update_running_stats(
    stats: Tensor, group_weights: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, unbias: float
) -> None:
    """Move running statistics by `momentum` toward the weighted mean of the moments, variances times `unbias`."""
    kernels = _kernels(stats[0])
    update = kernels.update_running_stats if kernels else plain_update_running_stats
    update(stats, group_weights, running_mean, running_var, momentum, unbias)


@batch_norm.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor, _bias: Tensor, views: int, groups: int, _eps: float, relu: bool,
    _sums: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    kernels = _kernels(x)
    signs = kernels.empty_signs(x, residual, relu) if kernels else x.new_empty(0, dtype=torch.uint8)
    return torch.empty_like(x), weight.new_empty((2, views * groups, x.shape[1])), signs


@batch_norm_backward.register_fake
def _(_dy: Tensor, _dy2: Any, x: Tensor, saved: Tensor | None, stats: Tensor, *_: Any) -> tuple[Tensor, ...]:
    d_residual = x.new_empty(0) if saved is None else torch.empty_like(x)
    return torch.empty_like(x), d_residual, stats.new_empty((2, x.shape[1]))


@update_running_stats.register_fake
def _(*_: Any) -> None:
    return None


# Their gradients


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, *ctx.rest, relu, _ = inputs
    y, stats, signs = output
    ctx.relu, ctx.residual = relu, residual is not None
    ctx.set_materialize_grads(False)  # a missing gradient is None, so no zeros need to be written for it
    saved = None if residual is None or not relu else signs if signs.numel() else y
    ctx.save_for_backward(x, saved, stats, weight, bias)


def _gradients(ctx: Any, dy: Tensor | None, dy2: Tensor | None) -> tuple[Tensor | None, ...]:
    x, saved, stats, weight, bias = ctx.saved_tensors
    dy, dy2 = (dy2, None) if dy is None else (dy, dy2)
    assert dy is not None
    if ctx.residual and not ctx.relu:  # the residual's gradient is this one
        dy, dy2 = dy if dy2 is None else dy + dy2, None
    dx, d_residual, (d_bias, d_weight) = batch_norm_backward(
        dy, dy2, x, saved, stats, weight, bias, *ctx.rest, ctx.relu
    )
    of_residual = (d_residual if ctx.relu else dy) if ctx.residual else None
    return dx, of_residual, d_weight, d_bias, None, None, None, None, None


batch_norm.register_autograd(lambda ctx, dy, *_: _gradients(ctx, dy, None), setup_context=_save_for_backward)


class _Twice(torch.autograd.Function):
    """`batch_norm` with its output as two tensors that share memory, which outputs of an operator must not."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        y, stats, signs = batch_norm(*inputs)
        _save_for_backward(ctx, inputs, (y, stats, signs))
        return y, y.view_as(y), stats

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dy2: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dy, dy2)


def memory_format(x: Tensor) -> torch.memory_format:
    """Memory format that the operators expect of every tensor: channels last on CUDA, on a CPU that of x."""
    last = x.dim() == 4 and (x.is_cuda or not x.is_contiguous())
    return torch.channels_last if last else torch.contiguous_format


# The formulas in plain PyTorch; a test compares the kernels with them


def plain_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, views: int, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """`batch_norm` in plain PyTorch."""
    split = _split(x, views, groups)
    over = 1, *range(4, split.dim())
    mean = split.mean(over, keepdim=True)
    centered = split - mean
    var = (centered * centered).mean(over, keepdim=True)
    y = (centered * (var + eps).rsqrt() * _per_channel(weight, split) + _per_channel(bias, split)).view(x.shape)
    y = y if residual is None else y + residual
    return (y.relu() if relu else y).to(x.dtype), torch.stack([m.view(views * groups, -1) for m in (mean, var)])


def plain_backward(
    dy: Tensor, dy2: Tensor | None, x: Tensor, y: Tensor | None, stats: Tensor, weight: Tensor, bias: Tensor,
    views: int, groups: int, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`batch_norm_backward` in plain PyTorch."""
    split = _split(x, views, groups)
    mean, var = (m.view(views, 1, groups, -1, *(1,) * (x.dim() - 2)) for m in stats)
    inverse_std = (var + eps).rsqrt()
    x_hat = (split - mean) * inverse_std
    slope = _split(dy if dy2 is None else dy + dy2, views, groups)
    if relu:
        linear = (
            x_hat * _per_channel(weight, split) + _per_channel(bias, split) if y is None else _split(y, views, groups)
        )
        slope = torch.where(linear > 0, slope, 0)
    over = 1, *range(4, split.dim())
    sums = [slope.sum(over, keepdim=True), (slope * x_hat).sum(over, keepdim=True)]
    count = x.numel() // mean.numel()
    dx = inverse_std * _per_channel(weight, split) * (slope - (sums[0] + x_hat * sums[1]) / count)
    d_residual = x.new_empty(0) if y is None else torch.empty_like(x).copy_(slope.view(x.shape))
    d_parameters = torch.stack([s.view(views * groups, -1).sum(0) for s in sums])
    return torch.empty_like(x).copy_(dx.view(x.shape)), d_residual, d_parameters


def plain_update_running_stats(
    stats: Tensor, group_weights: Tensor, mean: Tensor, var: Tensor, momentum: float, unbias: float
) -> None:
    """`update_running_stats` in plain PyTorch."""
    new_mean, new_var = (stats * group_weights[:, None]).sum(1)
    mean.lerp_(new_mean, momentum)
    var.lerp_(new_var * unbias, momentum)


def _split(x: Tensor, views: int, groups: int) -> Tensor:
    return at_least_float32(x).unflatten(0, (views, -1, groups))  # (V, n, G, C, ...)


def _per_channel(parameter: Tensor, split: Tensor) -> Tensor:
    return parameter.view(-1, *(1,) * (split.dim() - 4))
