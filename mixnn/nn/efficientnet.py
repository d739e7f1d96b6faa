"""EfficientNet-Lite0 (Tan and Le, 2019; Lite since 2020): inverted residuals with ReLU6 and without squeeze-excite.

A small network for CPUs whose ImageNet weights are published as a package (mixnn/runs/weights.py reads them). It is the
same for all images of 32 pixels and more. All batch norms are SplitBatchNorm.

Where the stride is 2, TensorFlow pads even sides by one pixel more at the right and bottom than at the left and top.
Here odd sides are padded in the same way, as in the package efficientnet_lite_pytorch, so that no padding depends on
the image.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mixnn.config import UserError, setting
from mixnn.nn.batch_norm import SplitBatchNorm

EPS = 1e-3  # of batch norm, as in TensorFlow
STEM, HEAD = 32, 1280  # channels
CHUNK = 16  # images at a time on a CPU without gradients: larger batches leave the cache and take up to twice as long
MIN_SIZE = 32  # pixels; five halvings leave one
STAGES = (
    # channels, blocks, kernel, stride of the first block, expansion
    (16, 1, 3, 1, 1),
    (24, 2, 3, 2, 6),
    (40, 2, 5, 2, 6),
    (80, 3, 3, 2, 6),
    (112, 3, 5, 1, 6),
    (192, 4, 5, 2, 6),
    (320, 1, 3, 1, 6),
)


class ConvNorm(nn.Module):
    """A convolution, batch norm, and optionally a residual or ReLU6."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, groups: int, depthwise: bool = False
    ) -> None:
        super().__init__()
        self.pad = ((kernel - 2) // 2, (kernel - 1) // 2) * 2 if stride == 2 else None
        padding = 0 if self.pad else kernel // 2
        split = inputs if depthwise else 1
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=split, bias=False)
        self.norm = SplitBatchNorm(outputs, groups, eps=EPS)
        nn.init.normal_(self.conv.weight, std=math.sqrt(2 * split / (outputs * kernel**2)))  # He et al., fan out

    def forward(self, x: Tensor, residual: Tensor | None = None, relu6: bool = False) -> Tensor:
        x = F.pad(x, self.pad) if self.pad else x
        if self.uses_batch:
            y = self.norm(self.conv(x), residual=residual)
            return F.relu6(y) if relu6 else y
        weight, bias = self._folded()
        conv = self.conv
        if relu6 and _has_own_gradient(x):
            return _ConvReLU6.apply(x, weight, bias, conv.stride, conv.padding, conv.groups)
        y = F.conv2d(x, weight, bias, conv.stride, conv.padding, 1, conv.groups)
        y = y if residual is None else y.add_(residual)
        return F.relu6(y, inplace=True) if relu6 else y

    @property
    def uses_batch(self) -> bool:
        """Whether batch norm takes its statistics from the batch."""
        return self.norm.training and not self.norm.frozen

    def _folded(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of a convolution that includes batch norm with fixed statistics: fewer passes over memory."""
        norm = self.norm
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        return self.conv.weight * scale.view(-1, 1, 1, 1), norm.bias - norm.running_mean * scale


def _has_own_gradient(x: Tensor) -> bool:
    """Whether _ConvReLU6 is for x: on a CPU, while gradients are recorded; a compiler or autocast has its own ways."""
    on_cpu = x.device.type == "cpu" and torch.is_grad_enabled()
    return on_cpu and not (torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"))


class _ConvReLU6(torch.autograd.Function):
    """relu6(conv2d(x, weight, bias)), whose gradient takes less time and memory than torch's; measured on a CPU.

    The gradient of ReLU6 can be told from its output, while torch keeps a copy of the input. That of the bias is a sum;
    if oneDNN computes it, the gradient of a 5x5 depthwise weight takes 1.4 times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, stride: Any, padding: Any, groups: int) -> Tensor:
        y = F.conv2d(x, weight, bias, stride, padding, 1, groups).clamp_(0, 6)
        ctx.save_for_backward(x, weight, y)
        ctx.rest = None, [*stride], [*padding], [1, 1], False, [0, 0], groups
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        dy = torch.ops.aten.hardtanh_backward(dy, y, 0, 6)
        needed = [*ctx.needs_input_grad[:2], False]
        dx, d_weight, _ = torch.ops.aten.convolution_backward(dy, x, weight, *ctx.rest, needed)
        d_bias = dy.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return dx, d_weight, d_bias, None, None, None


class InvertedResidual(nn.Module):
    """1x1 to a wider layer, a depthwise convolution there, and 1x1 back, with a shortcut where shapes allow it."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int, groups: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.expand = ConvNorm(inputs, width, 1, 1, groups) if expansion > 1 else None
        self.depthwise = ConvNorm(width, width, kernel, stride, groups, depthwise=True)
        self.project = ConvNorm(width, outputs, 1, 1, groups)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else self.expand(x, relu6=True)
        return self.project(self.depthwise(y, relu6=True), residual=x if self.shortcut else None)


class EfficientNetLite0(nn.Module):
    """Images (B, 3, H, W) to features (B, 1280): the head's 1x1 convolution, averaged over pixels."""

    num_features = HEAD

    def __init__(self, image_size: int, bn_groups: int) -> None:
        super().__init__()
        _check_size(image_size)
        self.stem = ConvNorm(3, STEM, 3, 2, bn_groups)
        self.stages = nn.ModuleList()
        before = STEM
        for channels, count, kernel, stride, expansion in STAGES:
            blocks = [InvertedResidual(before, channels, kernel, stride, expansion, bn_groups)]
            for _ in range(count - 1):
                blocks.append(InvertedResidual(channels, channels, kernel, 1, expansion, bn_groups))
            self.stages.append(nn.Sequential(*blocks))
            before = channels
        self.head = ConvNorm(before, HEAD, 1, 1, bn_groups)

    def forward(self, x: Tensor) -> Tensor:
        _check_size(min(x.shape[2:]))  # a data set may be evaluated at another size than it is trained at
        if x.device.type == "cpu" and not (torch.is_grad_enabled() or self.stem.uses_batch):
            return torch.cat([self._encode(part) for part in x.split(CHUNK)])
        return self._encode(x)

    def _encode(self, x: Tensor) -> Tensor:
        x = self.stem(x, relu6=True)
        for stage in self.stages:
            x = stage(x)
        return self.head(x, relu6=True).mean((2, 3))


def _check_size(pixels: int) -> None:
    if pixels < MIN_SIZE:
        raise UserError(
            f"efficientnet_lite0 needs images of {MIN_SIZE} pixels or more, not {pixels}: "
            f"use {setting('image_size', MIN_SIZE)} or another {setting('backbone')}"
        )


# Names of the published weights, those of the package efficientnet_lite_pytorch

BLOCKS = [f"stages.{i}.{j}" for i, (_, count, *_) in enumerate(STAGES) for j in range(count)]
LAYERS = {
    "_expand_conv": "expand.conv",
    "_bn0": "expand.norm",
    "_depthwise_conv": "depthwise.conv",
    "_bn1": "depthwise.norm",
    "_project_conv": "project.conv",
    "_bn2": "project.norm",
}
PUBLISHED = {"_conv_stem": "stem.conv", "_bn0": "stem.norm", "_conv_head": "head.conv", "_bn1": "head.norm"} | {
    f"_blocks.{i}.{theirs}": f"{block}.{ours}" for i, block in enumerate(BLOCKS) for theirs, ours in LAYERS.items()
}


def rename_published(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights under our names instead of the published ones, without the classifier; unknown names stay."""
    split = {name: name.rpartition(".") for name in weights if not name.startswith("_fc.")}
    return {
        f"{PUBLISHED.get(layer, layer)}{dot}{tensor}": weights[name] for name, (layer, dot, tensor) in split.items()
    }
