"""ImageSet: a data set as tensors. The uint8 images live on one device for good; augmentation happens elsewhere.

M images, 3 channels, H x W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mixnn.data.scan import Scan

Triple = tuple[float, float, float]
Arrays = tuple[np.ndarray, np.ndarray, list[str]]  # what a reader returns: images [M,3,H,W], labels [M], class names

UNLABELLED = -1
LEVELS = 256  # values of a uint8
MIN_STD = 1 / 255  # images of one single color must not lead to a division by zero


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with what is known about them; `names` and `skipped` are filled for image folders only."""

    images: Tensor  # uint8 [M,3,H,W]
    labels: Tensor  # int64 [M], -1 = unlabelled
    names: list[str] | None
    classes: list[str]
    mean: Triple  # per channel, on the 0..1 scale
    std: Triple
    mirror: bool  # is a mirrored image still a valid image? False for digits
    skipped: list[tuple[str, str]] = field(default_factory=list)  # (name, reason) of every file that could not be read
    scan: Scan | None = None  # of a folder's files

    def __post_init__(self) -> None:
        assert self.images.dtype == torch.uint8, self.images.dtype
        assert self.images.ndim == 4, self.images.shape
        assert self.images.shape[1] == 3, self.images.shape
        assert self.labels.dtype == torch.int64, self.labels.dtype
        assert self.labels.shape == self.images.shape[:1], (self.labels.shape, self.images.shape)
        assert self.labels.device == self.images.device, (self.labels.device, self.images.device)
        assert self.names is None or len(self.names) == len(self), (len(self.names), len(self))
        assert min(self.std) > 0, self.std

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.images.shape[2], self.images.shape[3]

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def num_labelled(self) -> int:
        return int((self.labels >= 0).sum())

    def identity(self) -> dict[str, Any]:
        """What a checkpoint keeps of them, to know them again."""
        files = {"files": self.scan.digest} if self.scan else {}
        return {"images": len(self), "mean": list(self.mean), "std": list(self.std)} | files

    def to(self, device: torch.device | str) -> ImageSet:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def subset(self, index: Tensor) -> ImageSet:
        """The images at these positions, in this order."""
        index = index.to(self.images.device)
        names = None if self.names is None else [self.names[i] for i in index.tolist()]
        return replace(self, images=self.images[index], labels=self.labels[index], names=names)

    def limit(self, n: int, seed: int = 0) -> ImageSet:
        """At most n images, drawn at random (a folder is sorted by class) and kept in their order."""
        if n >= len(self):
            return self
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.subset(order[:n].sort().values)


def channel_stats(images: Tensor) -> tuple[Triple, Triple]:
    """Mean and standard deviation of each channel on the 0..1 scale; from histograms, which need no float copy."""
    level = torch.arange(LEVELS, dtype=torch.float64) / (LEVELS - 1)
    mean, std = [], []
    for channel in range(3):
        share = torch.bincount(images[:, channel].flatten(), minlength=LEVELS).cpu().double()
        share /= share.sum()
        mean.append(float(share @ level))
        std.append(max(float(share @ (level - mean[-1]).square()) ** 0.5, MIN_STD))
    return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])
