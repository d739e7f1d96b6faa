"""Layout: where things are in the image, for folders whose images are aligned.

Scans, X-rays, digits or objects in front of a plain ground show the same things at the same places, and there raw
pixels say much that an encoder, which averages over places, has lost. Photographs are not aligned, and there pixels do
harm. Which is the case shows in the mean image: of aligned images it has a shape, of others it is flat.

`alignment` is the share of the variance over places that the mean image has. Measured (notes/log.md): 0.47 to 0.64 on
digits, hand signs, fruit, X-rays and brain scans, and 0.01 to 0.30 on thirteen other folders.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 16  # pixels; 768 numbers
WEIGHT = 0.25  # length of the layout's part of a vector, whose other part has length 1
MIN_ALIGNMENT = 0.4
SAMPLE = 400  # images


def shrink(images_BCHW: Tensor) -> Tensor:
    """Colors in 0..1 at SIDE x SIDE pixels, of uint8 images or of floats in 0..1."""
    scale = 255 if images_BCHW.dtype == torch.uint8 else 1
    return F.adaptive_avg_pool2d(images_BCHW.float() / scale, SIDE)


def alignment(small_MCSS: Tensor) -> float:
    """Share of the variance over places that the mean image has, from 0 (none is aligned) to 1 (all are equal)."""
    gray = small_MCSS.double().mean(1).flatten(1)
    shape = gray - gray.mean(1, keepdim=True)  # brightness as a whole does not count
    return float(shape.mean(0).square().mean() / shape.square().mean().clamp(min=1e-12))


def mean_layout(images_MCHW: Tensor) -> Tensor | None:
    """The mean image, (3, SIDE, SIDE), if the images are aligned."""
    small = shrink(images_MCHW)
    return small.mean(0) if alignment(small) >= MIN_ALIGNMENT else None


def add_layout(features_BF: Tensor, images_BCHW: Tensor, mean_CSS: Tensor) -> Tensor:
    """Features of length 1, followed by the difference from the mean image, of length WEIGHT."""
    layout = (shrink(images_BCHW) - mean_CSS).flatten(1)
    return torch.cat([F.normalize(features_BF), WEIGHT * F.normalize(layout)], dim=1)
