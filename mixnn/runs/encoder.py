"""The encoder of a run, ready to use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mixnn.config import Config, UserError
from mixnn.nn.resnet import ResNet
from mixnn.runs.folder import Run

STUDENT = "method.student.f."  # where the backbone that is evaluated lies among a checkpoint's tensors


def make_backbone(config: Config) -> ResNet:
    return ResNet(config.backbone, config.image_size, config.bn_groups)


def load_backbone(run: Run, warn: Callable[[str], None] = lambda _: None) -> tuple[ResNet, int]:
    """The student's backbone in eval mode, and the step it was saved at."""
    tensors, state = run.load_checkpoint(warn)
    backbone = make_backbone(run.config)
    weights = {name.removeprefix(STUDENT): t for name, t in tensors.items() if name.startswith(STUDENT)}
    load_weights(backbone, weights, str(run.path))
    return backbone.eval(), state["step"]


def load_weights(module: nn.Module, weights: dict[str, torch.Tensor], source: str) -> None:
    """All of a module's weights; UserError naming what does not fit."""
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise UserError(f"the weights of {source} do not fit this network: {reason}") from None
