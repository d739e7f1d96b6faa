"""The encoder of a run, ready to use; and ResNet weights from elsewhere, to begin with."""

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

STUDENT = "method.student.f."  # where the backbone that is evaluated lies among a checkpoint's tensors
MARK = "layer1.0.conv1.weight"  # a name that every ResNet has once; what stands before it is a prefix
NESTS = ("state_dict", "model_state_dict", "model")  # under which training scripts keep weights beside other things
FITTING = (
    f"{', '.join(ARCHITECTURES)} in torchvision's names; conv1 3x3, or 7x7 for images from {IMAGENET_STEM} pixels on"
)


def make_backbone(config: Config) -> nn.Module:
    return build_backbone(config.backbone, config.image_size, config.bn_groups)


def untrained(config: Config) -> nn.Module:
    """The network as training found it, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return make_backbone(config).eval()


def load_backbone(run: Run, warn: Callable[[str], None] = lambda _: None) -> tuple[nn.Module, int]:
    """The student's backbone in eval mode, and the step it was saved at."""
    tensors, state = run.load_checkpoint(warn)
    return student_backbone(run, tensors), state["step"]


def student_backbone(run: Run, tensors: dict[str, Tensor]) -> nn.Module:
    """The student's backbone in eval mode, from a checkpoint's tensors."""
    backbone = make_backbone(run.config)
    weights = {name.removeprefix(STUDENT): t for name, t in tensors.items() if name.startswith(STUDENT)}
    load_weights(backbone, weights, str(run.path))
    return backbone.eval()


def load_weights(module: nn.Module, weights: dict[str, torch.Tensor], source: str) -> None:
    """All of a module's weights; UserError naming what does not fit."""
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise UserError(f"the weights of {source} do not fit this network: {reason}") from None


def read_backbone(path: str | Path, config: Config) -> nn.Module:
    """The backbone that a configuration asks for, with the weights of a file."""
    weights, backbone = read_weights(path), make_backbone(config)
    if not isinstance(backbone, ResNet):
        leave = f"leave out {setting('init_from')}"
        raise UserError(f"{path} is for a ResNet of ours, and {config.backbone} is none: {leave}")
    theirs = next(name for name in ARCHITECTURES if not _misfits(weights, name))
    if theirs != config.backbone:
        raise UserError(f"{path} holds a {theirs}, this run has a {config.backbone}: use {setting('backbone', theirs)}")
    stem, side = weights["conv1.weight"].shape[2], backbone.conv1.weight.shape[2]
    if stem != side:
        size = config.image_size
        larger = f"{setting('image_size', IMAGENET_STEM)} or more"
        fits = larger if stem > side else f"{setting('image_size', IMAGENET_STEM - 1)} or less"
        raise UserError(
            f"{path} has a stem of {stem}x{stem} pixels, and for images of {size} it is {side}x{side} here: "
            f"nothing is converted\nwhat fits: {fits}, or weights of a {theirs} whose conv1 is {side}x{side}"
        )
    load_weights(backbone, weights, str(path))
    return backbone


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """A ResNet's weights in torchvision's names, from .safetensors or a torch state dict; no code in the file is run.

    Names may have a prefix (module., backbone.), which goes, as do fc and what lies beside the prefix. Nothing is
    converted: weights that fit none of the networks here are refused, and the message says why.
    """
    found = _read(Path(path))
    for nest in NESTS:
        found = found[nest] if isinstance(found, dict) and isinstance(found.get(nest), dict) else found
    tensors = {str(k): t for k, t in found.items() if isinstance(t, Tensor)} if isinstance(found, dict) else {}
    prefixes = [k.removesuffix(MARK) for k in tensors if k == MARK or k.endswith(f".{MARK}")]
    if not prefixes:
        raise UserError(f"{path} holds no ResNet: nothing in it is named {MARK}\nwhat fits: {FITTING}")
    if len(prefixes) > 1:
        raise UserError(f"{path} holds several ResNets ({', '.join(prefixes)}): save the one that is meant alone")
    weights = {k.removeprefix(prefixes[0]): t for k, t in tensors.items() if k.startswith(prefixes[0])}
    weights = {k: t for k, t in weights.items() if not k.startswith("fc.")}
    nearest = min((_misfits(weights, name) for name in ARCHITECTURES), key=len)
    if nearest:
        more = f"; and {len(nearest) - 3} more" if len(nearest) > 3 else ""
        raise UserError(f"{path} does not fit: {'; '.join(nearest[:3])}{more}\nwhat fits: {FITTING}")
    return weights


def _read(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"{path} is neither a run folder nor a file of weights")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the age of a file; it is read, or the reason follows
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a reader fed with garbage can raise nearly anything
        raise UserError(
            f"{path} cannot be read: it is damaged, or holds objects beside tensors, whose code is never run here\n"
            "save the weights alone, with torch.save(network.state_dict(), FILE) or as .safetensors"
        ) from None


def _shapes(weights: dict[str, Tensor]) -> dict[str, str]:
    """64x3x3x3 by name; batch norm's counters are left out, which old files lack and nothing here reads."""
    named = {k: t for k, t in weights.items() if not k.endswith(".num_batches_tracked")}
    return {k: "x".join(map(str, t.shape)) for k, t in named.items()}


@functools.cache
def _layout(name: str, large_stem: bool) -> dict[str, str]:
    with torch.device("meta"):  # shapes alone
        return _shapes(ResNet(name, IMAGENET_STEM if large_stem else 32, 1).state_dict())


def _misfits(weights: dict[str, Tensor], name: str) -> list[str]:
    """What keeps these weights from being those of an architecture, with whichever stem is nearer; a line each."""
    given = _shapes(weights)
    needed = _layout(name, large_stem=given.get("conv1.weight", "").endswith("x7x7"))
    lines = [f"{k} is {given[k]}, not {needed[k]}" for k in needed if k in given and given[k] != needed[k]]
    lines += [f"{k} is missing" for k in needed if k not in given]
    return lines + [f"{k} belongs to no {name}" for k in given if k not in needed]
