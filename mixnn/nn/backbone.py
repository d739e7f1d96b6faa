"""The encoder f by name: a ResNet of our own, or any of timm's models as timm:NAME."""

from __future__ import annotations

import importlib

from torch import Tensor, nn

from mixnn.config import UserError, unknown
from mixnn.nn.resnet import ARCHITECTURES, ResNet
from mixnn.nn.split_batch_norm import split_batch_norms

TIMM = "timm:"


class TimmBackbone(nn.Module):
    """A model of timm's without its classifier; its batch norms become split ones, so that views stay apart."""

    def __init__(self, name: str, bn_groups: int) -> None:
        super().__init__()
        try:
            timm = importlib.import_module("timm")
        except ImportError:
            raise UserError("a backbone of timm's needs timm and torchvision: type pip install timm") from None
        try:
            self.model = timm.create_model(name, pretrained=False, num_classes=0)
        except RuntimeError:
            raise unknown("timm model", name, timm.list_models()[:20]) from None
        self.num_features: int = self.model.num_features
        split_batch_norms(self.model, bn_groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def check_backbone(name: str) -> None:
    if name not in ARCHITECTURES and not name.startswith(TIMM):
        raise unknown("backbone", name, [*ARCHITECTURES, f"{TIMM}NAME"])


Backbone = ResNet | TimmBackbone


def build_backbone(name: str, image_size: int, bn_groups: int) -> Backbone:
    """With `num_features`, from images (B, 3, H, W) to features (B, F)."""
    check_backbone(name)
    if name.startswith(TIMM):
        return TimmBackbone(name.removeprefix(TIMM), bn_groups)
    return ResNet(name, image_size, bn_groups)
