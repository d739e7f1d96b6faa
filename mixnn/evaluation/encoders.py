"""What can be evaluated: a run, an exported file, weights trained elsewhere, and any network or function.

S is the side of the images, F the number of features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from mixnn.config import Config, UserError
from mixnn.data.image_set import Normalization, read_normalization, triple
from mixnn.device import pick_device
from mixnn.files import expand
from mixnn.nn.backbone import TIMM, timm_inputs
from mixnn.nn.folding import folded
from mixnn.nn.resnet import IMAGENET_STEM
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.encoder import Encoder, load, load_encoder
from mixnn.runs.weights import STARTS, TORCHVISION, initial_backbone, is_export, start_defaults

PUBLISHED_SIZE = 224  # pixels for published weights that do not say


@dataclass(frozen=True)
class Candidate:
    """An encoder to evaluate, and the images that it expects."""

    name: str
    function: Callable[[Tensor], Any]  # normalized images (B, 3, S, S) -> features (B, F)
    device: torch.device
    size: int = 0  # 0: that of the data set
    normalization: Normalization | None = None  # None: that of the data set


class Frozen(nn.Module):
    """Any function from images to features as a backbone: images are resized first, the result is checked.

    The function gets float tensors (B, 3, size, size) in contiguous memory, so that `x.view` works; a network with
    channels_last weights gets channels_last images, and one in half precision gets its own type.
    """

    def __init__(self, candidate: Candidate, size: int) -> None:
        super().__init__()
        function = candidate.function  # a module becomes a part of this one
        self.function, self.size = folded(function) if isinstance(function, nn.Module) else function, size
        self.register_buffer("location", torch.empty(0, device=candidate.device), persistent=False)
        weight = next((p for p in self.parameters() if p.is_floating_point()), None)
        self.dtype = torch.float32 if weight is None else weight.dtype
        four = [p for p in self.parameters() if p.dim() == 4 and p.shape[1] > 1]
        last = bool(four) and four[0].is_contiguous(memory_format=torch.channels_last)
        self.memory_format = torch.channels_last if last else torch.contiguous_format

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2:] != (self.size, self.size):
            x = interpolate(x, (self.size, self.size), mode="bilinear", antialias=True)
        features = self.function(x.to(self.dtype, memory_format=self.memory_format))
        return check_features(features, len(x)).to(x.device)


def check_features(features: Any, count: int) -> Tensor:
    """The features as a tensor (B, F); UserError if they are anything else. Trailing sides of 1 are dropped."""
    if not isinstance(features, Tensor):
        try:
            features = torch.as_tensor(features)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                f"the encoder returned a {type(features).__name__} instead of features (B, F)\n"
                "pick the tensor yourself: evaluate(lambda x: network(x).pooler_output, ...)"
            ) from None
    if features.dim() > 2 and features.shape[2:].numel() == 1:
        features = features.flatten(1)
    if features.dim() != 2 or len(features) != count:
        shape = tuple(features.shape)
        mean = f"\naverage over the others: evaluate(lambda x: network(x).mean({tuple(range(2, len(shape)))}), ...)"
        several = mean if len(shape) > 2 else ""
        raise UserError(f"the encoder returned {shape} for {count} images instead of features (B, F){several}")
    return features


def find_run(encoder: Any) -> Run | None:
    """The run that is meant; None if it is another kind of encoder."""
    if isinstance(encoder, Run):
        return encoder
    if not isinstance(encoder, str | Path):
        return None
    name, path = str(encoder), expand(encoder)
    if name.startswith((TIMM, TORCHVISION)) or path.is_file():
        return None
    if name in STARTS and not (path / "config.yaml").is_file():  # any other folder may have that name
        return None
    if not path.exists():
        names = ", ".join((*STARTS, f"{TIMM}NAME", f"{TORCHVISION}NAME"))
        raise UserError(f"there is no run folder or file {encoder}\nnames: {names}")
    return Run.open(path)


def open_candidate(encoder: Any, device: str, own_size: int, reporter: Reporter, image_size: int = 0) -> Candidate:
    """What `evaluate` was given, ready to encode. A caller's module is neither moved nor changed.

    `own_size` is that of the images, for networks whose weights do not say which they were trained on. `image_size` is
    what the caller asks for, if anything.
    """
    run = find_run(encoder)
    if run is not None:
        return _of_encoder(str(run.path), load_encoder(run, device, reporter))
    if isinstance(encoder, str | Path):
        return _of_name(str(encoder), device, own_size, image_size)
    if isinstance(encoder, Encoder):
        return _of_encoder(encoder.origin, _on(encoder, device)[0])
    if isinstance(encoder, nn.Module):
        return Candidate(type(encoder).__name__, *_on(encoder, device))
    if callable(encoder):
        return Candidate(getattr(encoder, "__name__", type(encoder).__name__), encoder, pick_device(device))
    raise UserError(
        f"cannot evaluate a {type(encoder).__name__}: give a run, a file of weights, a network (nn.Module), or a "
        "function from images (B, 3, H, W) to features (B, F)"
    )


def _on(module: Any, device: str) -> tuple[Any, torch.device]:
    """The module and its device, or a copy of it on another device if one is asked for."""
    own = next((t.device for t in chain(module.parameters(), module.buffers())), None)
    where = own if own is not None and device == "auto" else pick_device(device)
    return (module if own in (None, where) else copy.deepcopy(module).to(where)), where


def _of_encoder(name: str, encoder: Encoder) -> Candidate:
    mean, std = (triple(t.tolist()) for t in (encoder.mean, encoder.std))
    return Candidate(name, encoder.backbone, encoder.device, encoder.size, (mean, std))


def _of_name(name: str, device: str, own_size: int, image_size: int) -> Candidate:
    """One of STARTS, timm:NAME, torchvision:NAME, an exported file, or a file of weights."""
    path = expand(name)
    if name in STARTS or is_export(path):
        return _of_encoder(name, load(name if name in STARTS else path, device))
    defaults = start_defaults(name)
    # A ResNet with a small first layer was trained on small images, and its file does not say how small.
    is_small = defaults.get("image_size", PUBLISHED_SIZE) < IMAGENET_STEM
    size = 0 if is_small else PUBLISHED_SIZE
    network_size = min(image_size or own_size, IMAGENET_STEM - 1) if is_small else PUBLISHED_SIZE
    if name.startswith(TIMM):
        size = (timm_inputs(name).get("input_size") or (PUBLISHED_SIZE,))[-1]
        network_size = image_size or size  # a vision transformer is made for one size
    backbone = initial_backbone(Config(init_from=name, bn_groups=1, **defaults | {"image_size": network_size}))
    where = pick_device(device)
    backbone.to(where, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Candidate(name, backbone, where, size, read_normalization(defaults["normalization"]))
