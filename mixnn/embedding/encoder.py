"""A run's encoder, ready to use: uint8 images in, float32 vectors out."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from mixnn.augment import normalize
from mixnn.device import pick_device
from mixnn.runs import Run
from mixnn.runs.encoder import load_backbone


class Encoder(nn.Module):
    """The student's backbone in eval mode, with the normalisation it was trained with.

    encoder(images) takes uint8 (B, 3, H, W), best at `size` x `size`, and gives (B, F); `read(paths)` makes such images
    from files.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: nn.Module, size: int, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.backbone, self.size = backbone, size
        self.num_features: int = backbone.num_features  # type: ignore[assignment]
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.eval().requires_grad_(False)

    def forward(self, images_u8: Tensor) -> Tensor:
        x = (images_u8.float() / 255).contiguous(memory_format=torch.channels_last)
        return self.backbone(normalize(x, self.mean, self.std)).float()

    @property
    def device(self) -> torch.device:
        return self.mean.device


def load(run: str | Path | Run, device: str = "auto") -> Encoder:
    """The encoder of a run, in one line: vectors = mixnn.load("runs/x")(images)."""
    run = run if isinstance(run, Run) else Run.open(run)
    _, state = run.load_checkpoint(lambda _: None)
    backbone, _ = load_backbone(run)
    mean, std = (torch.tensor(state["data"][k]) for k in ("mean", "std"))
    encoder = Encoder(backbone, run.config.image_size, mean, std)
    return encoder.to(pick_device(device), memory_format=torch.channels_last)  # type: ignore[call-overload]
