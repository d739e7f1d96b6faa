"""Backbones f: the ResNets, EfficientNet-Lite0, any timm model as timm:NAME, and networks of your own.

A network of your own is a module from images (B, 3, H, W) to features (B, F), or a function that makes one. In Python
it can be handed in as it is. Everywhere else it has a name: one that `BACKBONES.register` gave it, or MODULE:FUNCTION.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mixnn.config import UserError, setting, unknown
from mixnn.dist import check_features
from mixnn.nn.batch_norm import split_batch_norms
from mixnn.nn.efficientnet import EfficientNetLite0
from mixnn.nn.resnet import ARCHITECTURES, ResNet
from mixnn.registry import Registry, UnknownName, import_code, imported, origin_of

TIMM = "timm:"
OBJECT = "object:"  # in a config, the name of a network that was handed in as an object
BUILT_IN = (*ARCHITECTURES, "efficientnet_lite0")
Network = nn.Module | Callable[..., nn.Module]


class TimmBackbone(nn.Module):
    """A timm model without its classifier."""

    def __init__(self, name: str, image_size: int, pretrained: bool = False) -> None:
        super().__init__()
        timm = _import_timm()
        try:
            self.model = _timm_model(timm, name, image_size, pretrained)
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


def _import_timm() -> Any:
    try:
        return importlib.import_module("timm")
    except Exception:  # torchvision, which it needs, raises RuntimeError if it was built for another torch
        raise UserError("timm backbones need timm and torchvision: run `pip install timm`") from None


def timm_inputs(name: str) -> dict[str, Any]:
    """What timm says of the images that its weights of a model were made for: input_size, mean, std. May be empty."""
    timm, name = _import_timm(), name.removeprefix(TIMM)
    try:
        about = timm.get_pretrained_cfg(name)
        if about is None:  # a model of a hub, which brings its own
            about = timm.create_model(name, pretrained=False, num_classes=0).pretrained_cfg
    except (RuntimeError, OSError):  # there is no such model, or no network: making the model says so
        return {}
    return about if isinstance(about, dict) else vars(about)


def _timm_model(timm: Any, name: str, image_size: int, pretrained: bool) -> Any:
    """The model for images of this size. Vision transformers have to know it; some can then take other sizes too."""
    for sizes in ({"img_size": image_size, "dynamic_img_size": True}, {"img_size": image_size}):
        try:
            return timm.create_model(name, pretrained=pretrained, num_classes=0, **sizes)
        except TypeError:  # the model has no such argument
            continue
    return timm.create_model(name, pretrained=pretrained, num_classes=0)


BACKBONES: Registry[Callable[..., nn.Module]] = Registry(
    "backbone",
    "backbones",
    {**{name: partial(ResNet, name) for name in ARCHITECTURES}, "efficientnet_lite0": EfficientNetLite0},
)
"""Registry: name -> factory, a class or function that returns a module from images (B, 3, H, W) to features (B, F).

It is called with those of image_size and bn_groups that it has as parameters.
"""


def name_backbone(backbone: Any) -> tuple[str, Network | None]:
    """The name that a run stores for a backbone that the user gave, and the network if no name can give it.

    For MODULE:FUNCTION the module is imported: the user asks for it here. A function or class of a module is known
    under such a name from here on.
    """
    if isinstance(backbone, nn.Module):
        return f"{OBJECT}{type(backbone).__name__}", backbone
    if callable(backbone):
        place = getattr(backbone, "__qualname__", type(backbone).__name__)
        module = getattr(backbone, "__module__", "__main__")
        if module == "__main__" or getattr(sys.modules.get(module), place, None) is not backbone:  # cannot be imported
            return f"{OBJECT}{place}", backbone
        factory: Any = backbone
        BACKBONES.add(f"{module}:{place}", factory, origin_of(module, getattr(sys.modules[module], "__file__", None)))
        return f"{module}:{place}", None
    if not isinstance(backbone, str | Path):
        got = type(backbone).__name__
        raise UserError(f"backbone takes a name, a torch.nn.Module or a function that makes one, not a {got}")
    name = str(backbone)
    code, colon, function = name.rpartition(":")
    if name in BACKBONES or not colon or name.startswith((TIMM, OBJECT)):
        return name, None
    name = f"{import_code(code).__name__}:{function}"
    find_backbone(name)
    return name, None


def find_backbone(name: str) -> Callable[..., nn.Module]:
    """The factory of a name. MODULE:FUNCTION is found if the user imported the module with `import_code`."""
    if name in BACKBONES:
        return BACKBONES[name]
    code, _, function = name.rpartition(":")
    if (found := imported(code)) is None:
        raise UnknownName(str(unknown("backbone", name, [*BACKBONES, f"{TIMM}NAME", "MODULE:FUNCTION"])))
    factory = getattr(found[0], function, None)
    if not callable(factory):
        raise UserError(f"{found[1]} has no function or class {function}, which the backbone {name} needs")
    return factory


def backbone_origin(name: str) -> str:
    """What to import for a backbone; "" if it is built in, or cannot be imported."""
    found = imported(name.rpartition(":")[0])
    return BACKBONES.origin(name) or (found[1] if found else "")


def check_backbone(name: str) -> None:
    if not name.startswith((TIMM, OBJECT)):
        find_backbone(name)


def build_backbone(
    name: str, image_size: int, bn_groups: int, pretrained: bool = False, network: Network | None = None
) -> Any:
    """A module with `num_features`, from images (B, 3, H, W) to features (B, F), with split batch norms.

    `pretrained`: with the weights that timm publishes, for its models only. `network`: the module, which is copied, or
    the function that makes one, if the name alone does not give it.

    >>> mixnn.nn.build_backbone("resnet18", image_size=32, bn_groups=1).num_features
    512
    """
    if isinstance(network, nn.Module):
        backbone = deepcopy(network).to("cpu")
    elif network is None and name.startswith(TIMM):
        backbone = TimmBackbone(name.removeprefix(TIMM), image_size, pretrained)
    elif network is None and name.startswith(OBJECT) and name not in BACKBONES:
        raise UserError(
            f"the backbone is a {name.removeprefix(OBJECT)} that was handed in; only its weights are stored\n"
            "pass it again, in Python, as in mixnn.load(run, backbone=network)"
        )
    else:
        backbone = _call(network or find_backbone(name), name, {"image_size": image_size, "bn_groups": bn_groups})
    if name not in BUILT_IN or network is not None:
        num_features = check_network(backbone, name, image_size)
        if getattr(backbone, "num_features", None) != num_features:
            setattr(backbone, "num_features", num_features)  # noqa: B010 (mypy knows a module's tensors only)
    split_batch_norms(backbone, bn_groups)
    return backbone


def _call(factory: Callable[..., Any], name: str, known: dict[str, int]) -> nn.Module:
    """Call a factory with those of the known arguments that it has."""
    parameters = inspect.signature(factory).parameters
    for parameter in parameters.values():
        is_needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if is_needed and parameter.name not in known:
            raise UserError(
                f"the backbone {name} needs an argument {parameter.name}: give it a default; "
                f"mixnn passes only {' and '.join(known)}"
            )
    module = factory(**{key: value for key, value in known.items() if key in parameters})
    if not isinstance(module, nn.Module):
        raise UserError(f"the backbone {name} must be a torch.nn.Module, not a {type(module).__name__}")
    return module


def check_network(network: nn.Module, name: str, image_size: int) -> int:
    """Length F of the features that a network returns for images of this size; UserError if it does not return any."""
    copy = deepcopy(network).eval()
    weights = next(copy.parameters(), torch.zeros(()))
    try:
        with torch.no_grad():
            features = copy(torch.zeros(2, 3, image_size, image_size).to(weights))
    except Exception as error:  # whatever somebody's network raises
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"the backbone {name} fails on images of {image_size} pixels: {type(error).__name__}: {reason}\n"
            f"use another {setting('image_size')}, or change the network"
        ) from error
    return check_features(features, rows=2, backbone=f"backbone {name}").shape[1]
