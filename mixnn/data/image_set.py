"""ImageSet: images and labels as tensors. The uint8 images stay on one device, or in a file if they are too many for
memory; augmentation happens elsewhere.

M images, 3 channels, H x W pixels.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mixnn.config import UserError, setting, unknown
from mixnn.data.stored import StoredImages
from mixnn.progress import plural

Triple = tuple[float, float, float]
Normalization = tuple[Triple, Triple]  # mean and std of each channel, on the 0..1 scale
Arrays = tuple[np.ndarray, np.ndarray, list[str]]  # what a reader returns: images [M,3,H,W], labels [M], class names

UNLABELED = -1
LEVELS = 256  # values of a uint8
MIN_PAIRS = 4  # labeled anchors with a labeled neighbor that a batch needs on average to measure purity
NORMALIZATIONS: dict[str, Normalization] = {
    "tensorflow": ((127 / 255,) * 3, (128 / 255,) * 3),  # (x - 127) / 128 for x in 0..255
    "torchvision": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # of ImageNet's training images
    "none": ((0.0,) * 3, (1.0,) * 3),  # pixels from 0 to 1
}
"""What published weights were trained with. Another name, "data", is the mean and std of the images themselves."""
MODES = {  # what Pillow's modes mean to a reader
    "RGB": "color",
    "L": "gray",
    "1": "black and white",
    "P": "with a palette",
    "RGBA": "color with transparency",
    "LA": "gray with transparency",
}
MIN_STD = 1 / 255  # images of one single color must not lead to a division by zero


def read_normalization(given: Any) -> Normalization | None:
    """Mean and std for one of NORMALIZATIONS, for six numbers (0.5,0.5,0.5/0.2,0.2,0.2) or a pair; None for "data"."""
    if isinstance(given, str) and "/" not in given:
        known = {"data": None, **NORMALIZATIONS}
        if given not in known:
            raise UserError(f"{unknown('normalization', given, known)}, or MEAN/STD, as in 0.5,0.5,0.5/0.2,0.2,0.2")
        return known[given]
    try:
        pair = [part.split(",") for part in given.split("/")] if isinstance(given, str) else given
        mean, std = (triple(values) for values in pair)
    except (TypeError, ValueError):
        mean, std = (math.nan,) * 3, (0.0,) * 3
    if min(std) <= 0 or not all(map(math.isfinite, mean + std)):
        raise UserError(f"{setting('normalization', given)}: give mean and std, three numbers each, every std above 0")
    return mean, std


def triple(values: Any) -> Triple:
    """Three numbers; ValueError or TypeError if they are not."""
    first, second, third = values
    return float(first), float(second), float(third)


def normalization_text(mean_std: Any) -> str:
    """The text that `read_normalization` reads as this pair: a name if there is one, otherwise six numbers."""
    found = read_normalization(mean_std)
    assert found is not None

    def is_equal(other: Normalization) -> bool:
        pairs = zip(found[0] + found[1], other[0] + other[1], strict=True)
        return all(math.isclose(a, b, abs_tol=1e-6) for a, b in pairs)

    numbers = "/".join(",".join(f"{value:.6g}" for value in part) for part in found)
    return next((name for name, other in NORMALIZATIONS.items() if is_equal(other)), numbers)


@dataclass(frozen=True)
class FolderSummary:
    """The readable images of a folder, or of images in memory, in a few numbers."""

    num_images: int
    sides: tuple[int, int, int]  # shorter side: smallest, median, largest
    modes: dict[str, int]
    duplicates: list[list[str]]  # names of files with the same bytes
    num_skipped: int
    digest: str  # of all files' bytes, or of all pixels of images in memory

    def lines(self) -> list[str]:
        """A sentence or two for the user."""
        low, median, high = self.sides
        modes = ", ".join(f"{count:,} {MODES.get(mode, mode)}" for mode, count in self.modes.items())
        sides = f"shorter side {low}" if low == high else f"shorter side {low} to {high}, median {median}"
        lines = [f"{plural(self.num_images, 'image')}, {sides} pixels; {modes}"]
        if self.num_skipped:
            lines.append(f"{plural(self.num_skipped, 'unreadable file')} left out")
        if self.duplicates:
            extra = sum(len(group) - 1 for group in self.duplicates)
            example = " = ".join(self.duplicates[0][:2])
            lines.append(
                f"{plural(extra, 'file')} with the same content as another ({example}); kept, and counted twice"
            )
        return lines


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with what is known about them; named data sets have no `names`, `skipped` and `summary`.

    >>> test = mixnn.data.load("digits", "test")
    >>> len(test), test.num_classes
    (500, 10)
    """

    images: Tensor | StoredImages  # uint8 [M,3,H,W]; images[:] is a tensor in any case
    labels: Tensor  # int64 [M], -1 = unlabeled
    names: list[str] | None
    classes: list[str]
    mean: Triple  # per channel, on the 0..1 scale
    std: Triple
    mirror: bool  # is a mirrored image still a valid image? False for digits
    skipped: list[tuple[str, str]] = field(default_factory=list)  # (name, reason) of every file that could not be read
    summary: FolderSummary | None = None  # of a folder's files

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
    def num_labeled(self) -> int:
        return int((self.labels >= 0).sum())

    @property
    def fully_labeled(self) -> bool:
        """Whether every image has a label, and there are at least two classes."""
        return self.num_classes > 1 and self.num_labeled == len(self)

    def can_measure_purity(self, batch_size: int) -> bool:
        """Whether enough images have labels to measure purity: a batch without a labeled pair would count as impure."""
        share = self.num_labeled / len(self)
        return share == 1 or share**2 * batch_size >= MIN_PAIRS

    def fits(self, device: torch.device) -> bool:
        """Whether the images can stay on the device, with half of its free memory left for the networks."""
        if device.type != "cuda":
            return isinstance(self.images, Tensor)
        return self.images.nbytes < torch.cuda.mem_get_info(device)[0] / 2

    def to_if_fits(self, device: torch.device) -> ImageSet:
        """The images on the device, or where they are if they do not fit there."""
        return self.to(device) if self.fits(device) else self

    def identity(self) -> dict[str, Any]:
        """What a checkpoint stores, so that a resumed run can tell whether it has the same images and labels."""
        found: dict[str, Any] = {"images": len(self), "mean": list(self.mean), "std": list(self.std)}
        found["labels"] = hashlib.sha256(self.labels.cpu().numpy().tobytes()).hexdigest()[:32]
        return found | ({"files": self.summary.digest, "sides": list(self.summary.sides)} if self.summary else {})

    def digest(self) -> str:
        """Identify the images by their files, or by their pixels if they do not come from files."""
        if self.summary:
            return self.summary.digest
        return f"{zlib.crc32(self.images[:].cpu().contiguous().numpy().data):08x}"

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
