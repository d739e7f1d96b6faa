"""ResNets for small images: 3x3 stem, no fully connected layer, torchvision's parameter names.

ResNet-18 as the MNN authors build it (stem 3x3 with stride 1; the max-pool stays for images of 64 pixels and more), and
ResNet-8, a sibling of three narrow stages for CPUs and tiny images. Batch norm is SplitBatchNorm throughout.
"""

from __future__ import annotations

from torch import Tensor, nn

from mixnn.nn.split_batch_norm import SplitBatchNorm

ARCHITECTURES = {  # widths of the stages, blocks in each
    "resnet18": ((64, 128, 256, 512), 2),
    "resnet8": ((32, 64, 128), 1),
}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = SplitBatchNorm(channels, groups)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = SplitBatchNorm(channels, groups)
        self.downsample = None
        if stride != 1 or in_channels != channels:
            shortcut = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, SplitBatchNorm(channels, groups))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x), relu=True)
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.bn2(self.conv2(y), residual=shortcut, relu=True)


class ResNet(nn.Module):
    """Images (B, 3, H, W) to features (B, F)."""

    def __init__(self, name: str, image_size: int, bn_groups: int) -> None:
        super().__init__()
        widths, blocks = ARCHITECTURES[name]
        self.conv1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.bn1 = SplitBatchNorm(widths[0], bn_groups)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if image_size >= 64 else nn.Identity()
        self.stages = []
        in_channels = widths[0]
        for i, channels in enumerate(widths):
            stage = nn.Sequential(
                *(
                    BasicBlock(in_channels if b == 0 else channels, channels, 2 if b == 0 and i > 0 else 1, bn_groups)
                    for b in range(blocks)
                )
            )
            self.add_module(f"layer{i + 1}", stage)
            self.stages.append(f"layer{i + 1}")
            in_channels = channels
        self.num_features = in_channels
        self._init()

    def _init(self) -> None:
        for name, layer in self.named_modules():
            # The authors replace the stem after initialising, so it keeps the framework's default.
            if isinstance(layer, nn.Conv2d) and name != "conv1":
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x), relu=True))
        for stage in self.stages:
            x = getattr(self, stage)(x)
        return x.mean((2, 3))
