"""Layout: raw pixels as extra features, for folders whose images are aligned.

Images are aligned if they show the same things at the same places, as scans, X-rays, digits and objects in front of a
plain background do. Their raw pixels say much that an encoder loses when it averages over places. Photographs are not
aligned, and there raw pixels do harm.

The mean image tells the two kinds apart: for aligned images it shows a shape, otherwise it is flat. `alignment` is the
share of the variance over places that the mean image keeps. It was 0.47 to 0.64 on digits, hand signs, fruit, X-rays
and brain scans, and 0.01 to 0.30 on thirteen other folders (notes/log.md).

The layout's length in a vector is a share of the features' spread. Training can make features more alike, and a layout
of fixed length would then outweigh them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 16  # pixels; 768 numbers
WEIGHT = 0.8  # length of the layout's part of a vector, as a share of the features' spread
MIN_ALIGNMENT = 0.4
SAMPLE = 400  # images
PREFIX = "layout."  # of the tensors in a checkpoint or an exported file


def shrink(images_BCHW: Tensor) -> Tensor:
    """Colors in 0..1 at SIDE x SIDE pixels, of uint8 images or of floats in 0..1."""
    scale = 255 if images_BCHW.dtype == torch.uint8 else 1
    return F.adaptive_avg_pool2d(images_BCHW.float() / scale, SIDE)


def alignment(small_MCSS: Tensor) -> float:
    """Share of the variance over places that the mean image has, from 0 (none is aligned) to 1 (all are equal).

    The mean of M images that have nothing in common still has a share of 1 / M, which is taken off.
    """
    gray, count = small_MCSS.double().mean(1).flatten(1), len(small_MCSS)
    shape = gray - gray.mean(1, keepdim=True)  # brightness as a whole does not count
    share = float(shape.mean(0).square().mean() / shape.square().mean().clamp(min=1e-12))
    return (count * share - 1) / (count - 1) if count > 1 else 0.0


def mean_layout(images_MCHW: Tensor) -> Tensor | None:
    """The mean image, (3, SIDE, SIDE), if the images are aligned."""
    small = shrink(images_MCHW)
    return small.mean(0) if alignment(small) >= MIN_ALIGNMENT else None


def spread(features_BF: Tensor) -> float:
    """Root mean square distance of unit features from their mean: 0 if all are equal, at most 1."""
    return float((1 - F.normalize(features_BF.double()).mean(0).square().sum()).clamp(min=0).sqrt())


class Layout(nn.Module):
    """Vectors from features and images: unit features, followed by the image's difference from the mean image.

    The second part has the length WEIGHT * `spread`, with the spread of the encoder's features.
    """

    mean: Tensor
    weight: Tensor

    def __init__(self, mean_CSS: Tensor, spread: float) -> None:
        super().__init__()
        self.register_buffer("mean", mean_CSS)
        self.register_buffer("weight", torch.tensor(WEIGHT * spread, device=mean_CSS.device))

    def forward(self, features_BF: Tensor, images_BCHW: Tensor) -> Tensor:
        layout = (shrink(images_BCHW) - self.mean).flatten(1)
        return torch.cat([F.normalize(features_BF), self.weight * F.normalize(layout)], dim=1)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint or an exported file stores, by name."""
        return {PREFIX + name: tensor for name, tensor in self.state_dict().items()}


def read_layout(tensors: dict[str, Tensor]) -> Layout | None:
    """The layout in a checkpoint or an exported file; None if its images are not aligned."""
    if PREFIX + "mean" not in tensors:
        return None
    layout = Layout(tensors[PREFIX + "mean"], 0.0)
    layout.weight = tensors[PREFIX + "weight"]
    return layout
