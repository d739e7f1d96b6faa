"""Features of a frozen backbone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mixnn.augment import View, augment, normalize
from mixnn.data.image_set import ImageSet

CHUNK = 2000  # images at a time: fills a GPU, and divides the sizes of the usual sets


@torch.no_grad()
def features(
    backbone: nn.Module,
    images: ImageSet,
    order: Tensor | None = None,
    view: View | None = None,
    generator: torch.Generator | None = None,
    bf16: bool | None = None,
) -> Tensor:
    """(M, F) float32 of the images as they are, or of one random view of each; `order` says which, and in what order.

    On the backbone's device, wherever the images lie. Eval-mode batch norm; bf16 on CUDA unless told otherwise. Images
    larger than 64 pixels go in smaller chunks, so that memory stays bounded.
    """
    training, device = backbone.training, next(backbone.parameters(), images.images).device
    mean, std = torch.tensor(images.mean, device=device), torch.tensor(images.std, device=device)
    order = (torch.arange(len(images)) if order is None else order).to(images.images.device)
    chunk = max(1, CHUNK * 64**2 // max(64**2, images.size[0] * images.size[1]))
    backbone.eval()
    parts = []
    try:
        for index in order.split(chunk):
            u8 = images.images[index].to(device)
            if view is None:
                x = (u8.float() / 255).contiguous(memory_format=torch.channels_last)
            else:
                x = augment(u8, torch.rand(len(u8), view.num_draws, device=device, generator=generator), view)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" if bf16 is None else bf16):
                parts.append(backbone(normalize(x, mean, std)).float())
    finally:  # a trainer that runs out of memory here goes on
        backbone.train(training)
    return torch.cat(parts)
