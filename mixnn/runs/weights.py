"""Backbones and their weights: of a run, or a ResNet trained elsewhere to start from (--init-from)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mixnn.config import Config, UserError, setting
from mixnn.nn.backbone import build_backbone
from mixnn.nn.resnet import ARCHITECTURES, IMAGENET_STEM, ResNet
from mixnn.runs.folder import Run

STUDENT = "method.student.f."  # prefix of the backbone in a checkpoint
LANDMARK = "layer1.0.conv1.weight"  # every ResNet has one tensor of this name; anything before it is a prefix
WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys under which training scripts save the weights
SUPPORTED = (
    f"supported: {', '.join(ARCHITECTURES)} with torchvision's names; "
    f"conv1 is 3x3, or 7x7 for images of {IMAGENET_STEM} pixels and more"
)


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


def read_backbone(path: str | Path, config: Config) -> nn.Module:
    """The configured backbone with the weights of a file."""
    weights, backbone = read_weights(path), make_backbone(config)
    if not isinstance(backbone, ResNet):
        raise UserError(
            f"{setting('init_from')} works only with {', '.join(ARCHITECTURES)}, not with {config.backbone}"
        )
    architecture = next(name for name in ARCHITECTURES if not _mismatches(weights, name))
    if architecture != config.backbone:
        raise UserError(
            f"{path} holds a {architecture}, this run uses a {config.backbone}: use {setting('backbone', architecture)}"
        )
    kernel, needed = weights["conv1.weight"].shape[2], backbone.conv1.weight.shape[2]
    if kernel != needed:
        larger = f"{setting('image_size', IMAGENET_STEM)} or more"
        smaller = f"{setting('image_size', IMAGENET_STEM - 1)} or less"
        raise UserError(
            f"{path} has a {kernel}x{kernel} conv1, but images of {config.image_size} pixels need {needed}x{needed}\n"
            f"use {larger if kernel > needed else smaller}, "
            f"or weights of a {architecture} whose conv1 is {needed}x{needed}"
        )
    load_weights(backbone, weights, str(path))
    return backbone


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The weights of a ResNet with torchvision's names, from a .safetensors file or a torch state dict.

    A prefix of the names (module., backbone.) is removed; tensors without that prefix and fc are dropped. Nothing is
    converted: UserError says why weights do not fit. No code in the file is run.
    """
    content = _read(Path(path))
    for key in WRAPPERS:
        content = content[key] if isinstance(content, dict) and isinstance(content.get(key), dict) else content
    tensors = {str(k): t for k, t in content.items() if isinstance(t, Tensor)} if isinstance(content, dict) else {}
    prefixes = [k.removesuffix(LANDMARK) for k in tensors if k == LANDMARK or k.endswith(f".{LANDMARK}")]
    if not prefixes:
        raise UserError(f"{path} holds no ResNet: it has no tensor named {LANDMARK}\n{SUPPORTED}")
    if len(prefixes) > 1:
        raise UserError(f"{path} holds several ResNets ({', '.join(prefixes)}): save only the one to use")
    weights = {k.removeprefix(prefixes[0]): t for k, t in tensors.items() if k.startswith(prefixes[0])}
    weights = {k: t for k, t in weights.items() if not k.startswith("fc.")}
    fewest = min((_mismatches(weights, name) for name in ARCHITECTURES), key=len)
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
        return _shapes(ResNet(name, IMAGENET_STEM if large_stem else 32, 1).state_dict())


def _mismatches(weights: dict[str, Tensor], name: str) -> list[str]:
    """Reasons why these weights are not those of an architecture, with the stem that they are closer to."""
    given = _shapes(weights)
    needed = _expected_shapes(name, large_stem=given.get("conv1.weight", "").endswith("x7x7"))
    lines = [f"{k} is {given[k]}, not {needed[k]}" for k in needed if k in given and given[k] != needed[k]]
    lines += [f"{k} is missing" for k in needed if k not in given]
    return lines + [f"{k} is not part of a {name}" for k in given if k not in needed]
