"""ResNets with torchvision's parameter names, no fully connected layer, and a stem that fits the image.

ResNet-18 as the MNN authors build it (3x3 stem with stride 1; a max-pool for images of 64 pixels and more), its larger
siblings, and ResNet-8, three narrow stages for CPUs and tiny images. From 128 pixels on the stem is ImageNet's (7x7
with stride 2 and max-pool), so that weights trained there fit. All batch norms are SplitBatchNorm.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from mixnn.nn.batch_norm import SplitBatchNorm
from mixnn.nn.convolution import Convolution
from mixnn.nn.stem import stem

IMAGENET_STEM = 128  # pixels from which on the stem is ImageNet's
Twice = tuple[Tensor, Tensor]  # the same map for a block's convolutions and for its shortcut: see SplitBatchNorm


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = Convolution(in_channels, width, 3, stride, 1, groups)
        self.bn1 = SplitBatchNorm(width, groups)
        self.conv2 = Convolution(width, width, 3, 1, 1, groups)
        self.bn2 = SplitBatchNorm(width, groups)
        self.downsample = _shortcut(in_channels, width, stride, groups)

    def forward(self, inputs: Twice) -> Twice:
        x, shortcut = inputs
        y = self.bn1(self.conv1(x), relu=True)
        shortcut = shortcut if self.downsample is None else self.downsample(shortcut)
        return self.bn2(self.conv2(y), residual=shortcut, relu=True, twice=True)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 and a shortcut; the stride is the 3x3's, as in torchvision."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = Convolution(in_channels, width, 1)
        self.bn1 = SplitBatchNorm(width, groups)
        self.conv2 = Convolution(width, width, 3, stride, 1, groups)
        self.bn2 = SplitBatchNorm(width, groups)
        self.conv3 = Convolution(width, 4 * width, 1)
        self.bn3 = SplitBatchNorm(4 * width, groups)
        self.downsample = _shortcut(in_channels, 4 * width, stride, groups)

    def forward(self, inputs: Twice) -> Twice:
        x, shortcut = inputs
        y = self.bn1(self.conv1(x), relu=True)
        y = self.bn2(self.conv2(y), relu=True)
        shortcut = shortcut if self.downsample is None else self.downsample(shortcut)
        return self.bn3(self.conv3(y), residual=shortcut, relu=True, twice=True)


def _shortcut(in_channels: int, channels: int, stride: int, groups: int) -> nn.Sequential | None:
    if stride == 1 and in_channels == channels:
        return None
    return nn.Sequential(Convolution(in_channels, channels, 1, stride), SplitBatchNorm(channels, groups))


ARCHITECTURES: dict[str, tuple[type[BasicBlock | Bottleneck], tuple[int, ...], tuple[int, ...]]] = {
    # block, widths of the stages, blocks per stage
    "resnet18": (BasicBlock, (64, 128, 256, 512), (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (64, 128, 256, 512), (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (64, 128, 256, 512), (3, 4, 6, 3)),
    "resnet8": (BasicBlock, (32, 64, 128), (1, 1, 1)),
}


class ResNet(nn.Module):
    """Images (B, 3, H, W) to features (B, F).

    >>> mixnn.nn.ResNet("resnet8", image_size=32, bn_groups=1)(x1).shape
    torch.Size([8, 128])
    """

    def __init__(self, name: str, image_size: int, bn_groups: int) -> None:
        super().__init__()
        block, widths, depths = ARCHITECTURES[name]
        large = image_size >= IMAGENET_STEM
        self.conv1 = Convolution(3, widths[0], *((7, 2, 3) if large else (3, 1, 1)))
        self.bn1 = SplitBatchNorm(widths[0], bn_groups)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if image_size >= 64 else nn.Identity()
        self.stages = [f"layer{i + 1}" for i in range(len(widths))]
        channels = [widths[0], *(width * block.expansion for width in widths)]
        for i, (before, after) in enumerate(pairwise(channels)):
            strides = [2 if i > 0 else 1] + [1] * (depths[i] - 1)
            inputs = [before] + [after] * (depths[i] - 1)
            blocks = [block(c, widths[i], stride, bn_groups) for c, stride in zip(inputs, strides, strict=True)]
            self.add_module(self.stages[i], nn.Sequential(*blocks))
        self.num_features = channels[-1]
        self._init()

    def _init(self) -> None:
        for name, layer in self.named_modules():
            # The authors replace the stem after initialization, so it keeps the framework's default.
            if isinstance(layer, nn.Conv2d) and name != "conv1":
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x, shortcut = stem(self.conv1, self.bn1, x)
        if not isinstance(self.maxpool, nn.Identity):
            x = shortcut = self.maxpool(x)
        for stage in self.stages:
            x, shortcut = getattr(self, stage)((x, shortcut))
        return x.mean((2, 3))
