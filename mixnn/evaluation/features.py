"""Features of a frozen backbone, for images in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mixnn.augment import View, augment
from mixnn.data.image_set import ImageSet
from mixnn.runs.encoder import image_features

CHUNK = 2000  # images at a time: enough to fill a GPU, and it divides the sizes of the usual data sets


@torch.no_grad()
def features(
    backbone: nn.Module,
    images: ImageSet,
    order: Tensor | None = None,
    view: View | None = None,
    generator: torch.Generator | None = None,
    bf16: bool | None = None,
) -> Tensor:
    """Features of the images, or of one random view of each: float32 (M, F) on the backbone's device.

    `order` selects images by position; default: all. Batch norm is in eval mode; bf16 is used on CUDA unless switched
    off. Chunks are smaller for images larger than 64 pixels, so that memory stays bounded.
    """
    training, device = backbone.training, next(backbone.parameters(), images.images).device
    mean, std = torch.tensor(images.mean, device=device), torch.tensor(images.std, device=device)
    order = (torch.arange(len(images)) if order is None else order).to(images.images.device)
    chunk = max(1, CHUNK * 64**2 // max(64**2, images.size[0] * images.size[1]))
    backbone.eval()
    parts = []
    try:
        for index in order.split(chunk):
            x = images.images[index].to(device)
            if view is not None:
                x = augment(x, view, generator=generator)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" if bf16 is None else bf16):
                parts.append(image_features(backbone, x, mean, std))
    finally:  # a trainer that runs out of memory here continues training
        backbone.train(training)
    return torch.cat(parts)
