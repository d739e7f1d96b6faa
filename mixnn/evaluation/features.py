"""Features of a frozen backbone, for images in memory; and features from elsewhere, with their labels."""

from __future__ import annotations

import numbers
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mixnn import dist
from mixnn.augment import View, augment
from mixnn.config import UserError
from mixnn.data.image_set import ImageSet
from mixnn.runs.encoder import image_features

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CHUNK = 2000  # images at a time: enough to fill a GPU, and it divides the sizes of the usual data sets


@torch.no_grad()
def features(
    backbone: nn.Module,
    images: ImageSet,
    order: Tensor | None = None,
    view: View | None = None,
    generator: torch.Generator | None = None,
    bf16: bool | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Features of the images, or of one random view of each: float32 (M, F) on the backbone's device.

    `order` selects images by position; default: all. The generator may be on any device. Batch norm is in eval mode;
    bf16 is used on CUDA unless switched off. Chunks are smaller for images larger than 64 pixels, so that memory stays
    bounded. The processes of a group take turns with the chunks, and all of them get all features.
    """
    training = [(module, module.training) for module in backbone.modules()]
    device = next(chain(backbone.parameters(), backbone.buffers()), images.images).device
    mean, std = torch.tensor(images.mean, device=device), torch.tensor(images.std, device=device)
    order = (torch.arange(len(images)) if order is None else order).to(images.images.device)
    chunk = max(1, CHUNK * 64**2 // max(64**2, images.size[0] * images.size[1]))
    backbone.eval()
    parts = []
    try:
        for number, index in enumerate(order.split(chunk)):
            u = None if view is None else _draws(len(index), view, device, generator)
            if group is not None and number % group.size() != group.rank():
                continue
            x = images.images[index].to(device)
            if view is not None:
                x = augment(x, view, u)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" if bf16 is None else bf16):
                parts.append(image_features(backbone, x, mean, std))
    finally:  # a trainer that runs out of memory here continues training
        for module, was_training in training:  # parts of a network may be frozen, in eval mode, while it trains
            module.training = was_training
    return torch.cat(parts) if group is None else dist.gather_chunks(parts, len(order), chunk, device, group)


def check_finite(features: Tensor) -> Tensor:
    """The same features; UserError if they have NaN or inf, which would still get an accuracy."""
    if not features.isfinite().all():
        raise UserError(
            "the encoder gives features that are NaN or inf: its training has diverged, or it cannot take these images"
        )
    return features


def _draws(num: int, view: View, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Uniforms for a view of each image, on the device."""
    source = device if generator is None else generator.device
    return torch.rand(num, view.num_draws, device=source, generator=generator).to(device)


class LabeledFeatures(NamedTuple):
    """Features (M, F) on one device with the class number of each row."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    num_classes: int


def labeled_features(train_features: Any, train_labels: Any, test_features: Any, test_labels: Any) -> LabeledFeatures:
    """Arrays or tensors as float32 tensors where the training features are; labels, numbers or text, as 0, 1, 2, ..."""
    train = _matrix(train_features, "train_features")
    test = _matrix(test_features, "test_features").to(train.device)
    if train.shape[1] != test.shape[1]:
        raise UserError(f"train_features have {train.shape[1]} columns, test_features {test.shape[1]}: use one encoder")
    labels = [
        _vector(train_labels, len(train), "train_labels", "train_features"),
        _vector(test_labels, len(test), "test_labels", "test_features"),
    ]
    kinds = {_kind(label) for part in labels for label in part.tolist()}
    if None in kinds or len(kinds) > 1:
        raise UserError("labels must be all numbers or all text, and none may be missing")
    classes, indices = np.unique(np.concatenate(labels), return_inverse=True)
    if len(classes) < 2:
        raise UserError(f"all labels are {classes[0]}: there must be two classes at least")
    train_numbers, test_numbers = torch.from_numpy(indices.reshape(-1)).to(train.device).split([len(train), len(test)])
    return LabeledFeatures(train, train_numbers, test, test_numbers, len(classes))


def _kind(label: Any) -> type | None:
    """Whether a label is a number or text; None for anything else, and for NaN, which pandas has for missing labels."""
    kinds = (numbers.Number, str, bytes)
    return next((kind for kind in kinds if isinstance(label, kind) and label == label), None)


def _matrix(features: Any, name: str) -> Tensor:
    tensor = torch.as_tensor(features).detach().float()
    if tensor.dim() != 2 or not tensor.numel():
        raise UserError(f"{name} must have the shape (images, features), not {tuple(tensor.shape)}")
    if not tensor.isfinite().all():
        raise UserError(f"{name} contain NaN or inf")
    return tensor


def _vector(labels: Any, count: int, name: str, features: str) -> np.ndarray:
    array = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    if array.shape != (count,):
        raise UserError(f"{name} must have one label for each of the {count} rows of {features}, not {array.shape}")
    return array
