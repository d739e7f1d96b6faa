"""Backbones f by name: the ResNets, EfficientNet-Lite0, any timm model as timm:NAME, and what you add to BACKBONES."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from mixnn.config import UserError, setting, unknown
from mixnn.nn.batch_norm import split_batch_norms
from mixnn.nn.efficientnet import EfficientNetLite0
from mixnn.nn.resnet import ARCHITECTURES, ResNet

TIMM = "timm:"


class TimmBackbone(nn.Module):
    """A timm model without its classifier."""

    def __init__(self, name: str, pretrained: bool = False) -> None:
        super().__init__()
        try:
            timm = importlib.import_module("timm")
        except Exception:  # torchvision, which it needs, raises RuntimeError if it was built for another torch
            raise UserError("timm backbones need timm and torchvision: run `pip install timm`") from None
        try:
            self.model = timm.create_model(name, pretrained=pretrained, num_classes=0)
        except RuntimeError as error:
            if name.partition(".")[0] in timm.list_models():  # what follows the dot names the weights
                raise UserError(f"cannot make timm's {name}: {error}") from None
            raise unknown("timm model", name, timm.list_models()[:20]) from None
        except OSError as error:  # of the download
            raise UserError(
                f"cannot download timm's weights of {name}: {error}\n"
                f"use {setting('init_from', 'imagenet')}, which needs no download, or a file of weights"
            ) from None
        self.num_features: int = self.model.num_features

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


BACKBONES: dict[str, Callable[[int, int], Any]] = {
    **{name: partial(ResNet, name) for name in ARCHITECTURES},
    "efficientnet_lite0": EfficientNetLite0,
}
"""Registry: name -> factory(image_size, bn_groups).

The factory returns a module from images (B, 3, H, W) to features (B, F) with F as its attribute `num_features`. Add
your own network here.
"""


def check_backbone(name: str) -> None:
    if name not in BACKBONES and not name.startswith(TIMM):
        raise unknown("backbone", name, [*BACKBONES, f"{TIMM}NAME"])


def build_backbone(name: str, image_size: int, bn_groups: int, pretrained: bool = False) -> Any:
    """A module with `num_features`, from images (B, 3, H, W) to features (B, F), with split batch norms.

    `pretrained`: with the weights that timm publishes, for its models only.
    """
    check_backbone(name)
    if name.startswith(TIMM):
        backbone = TimmBackbone(name.removeprefix(TIMM), pretrained)
    else:
        backbone = BACKBONES[name](image_size, bn_groups)
    if not isinstance(getattr(backbone, "num_features", None), int):
        raise UserError(f"backbone {name} has no attribute num_features, the length of its features")
    split_batch_norms(backbone, bn_groups)
    return backbone
