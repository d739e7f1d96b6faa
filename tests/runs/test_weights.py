"""Weights trained elsewhere: those that fit are read from any wrapper, the others are refused with the reason."""

import contextlib
import functools
import os
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from mixnn.config import Config, UserError
from mixnn.nn.resnet import ResNet
from mixnn.runs.weights import STARTS, read_backbone, read_weights
from tests.nn.test_resnet import torchvision_resnet18_shapes


@functools.cache
def resnet18(stem=3):
    """As torchvision and timm lay it out, fc included."""
    g = torch.Generator().manual_seed(0)
    shapes = torchvision_resnet18_shapes() | {"conv1.weight": (64, 3, stem, stem)}
    shapes |= {"fc.weight": (1000, 512), "fc.bias": (1000,)}
    return {k: torch.rand(s, generator=g) if s else torch.tensor(7) for k, s in shapes.items()}


def prefixed(prefix, weights):
    return {prefix + k: t for k, t in weights.items()}


def without(weights, *endings):
    return {k: t for k, t in weights.items() if not k.endswith(endings)}


WRAPPED = {
    "plain": lambda w: w,
    "data parallel": lambda w: prefixed("module.", w),
    "a method's": lambda w: prefixed("module.backbone.", w) | {"module.projector.0.weight": torch.zeros(8, 512)},
    "a training script's": lambda w: {"epoch": 3, "state_dict": prefixed("backbone.", w), "args": ["--lr", 0.1]},
    "without counters, as in old files": lambda w: without(w, "num_batches_tracked"),
}


@pytest.mark.parametrize(
    "wrap, ending", [*((each, "pth") for each in WRAPPED), ("plain", "safetensors"), ("a method's", "safetensors")]
)
def test_a_resnet18_with_a_small_stem_is_read(tmp_path, wrap, ending):
    given, path = WRAPPED[wrap](resnet18()), tmp_path / f"weights.{ending}"
    (save_file if ending == "safetensors" else torch.save)(given, path)
    found = read_weights(path)
    assert not [name for name in found if name.startswith("fc")]
    backbone = read_backbone(path, Config(image_size=32))
    for name, t in without(resnet18(), "num_batches_tracked", "fc.weight", "fc.bias").items():
        assert torch.equal(found[name], t), name
        assert torch.equal(backbone.state_dict()[name], t), name


SMALL = ResNet("resnet8", 8, 1).state_dict()
ODD = {
    "a layer less": (
        lambda: without(resnet18(), "layer4.1.conv1.weight"),
        r"does not fit: layer4.1.conv1.weight is missing\nsupported: resnet18, ",
    ),
    "a layer more": (
        lambda: resnet18() | {"layer4.1.se.weight": torch.zeros(2)},
        "se.weight is not part of resnet18",
    ),
    "gray images": (lambda: SMALL | {"conv1.weight": torch.zeros(32, 1, 3, 3)}, "is 32x1x3x3, not 32x3x3x3"),
    "a stem of no kind": (lambda: resnet18(stem=5), "conv1.weight is 64x3x5x5, not 64x3x3x3"),
    "a stem of three": (
        lambda: {
            k.replace("conv1.weight", "conv1.0.weight") if k == "conv1.weight" else k: t for k, t in SMALL.items()
        },
        "conv1.weight is missing; conv1.0.weight is not part of resnet8",
    ),
    "no ResNet": (lambda: {"patch_embed.weight": torch.zeros(2)}, "holds no network that mixnn knows"),
    "no dict": (lambda: [torch.zeros(2)], "holds no network that mixnn knows"),
    "two networks": (
        lambda: prefixed("student.", SMALL) | prefixed("teacher.", SMALL),
        r"several networks \(student., teacher.\)",
    ),
}


@pytest.mark.parametrize("make, message", ODD.values(), ids=ODD)
def test_what_does_not_fit_is_refused_with_the_reason(tmp_path, make, message):
    torch.save(make(), tmp_path / "weights.pth")
    with pytest.raises(UserError, match=message):
        read_weights(tmp_path / "weights.pth")


def test_another_architecture_than_the_runs_is_refused_with_what_to_use(tmp_path):
    torch.save(SMALL, tmp_path / "weights.pth")
    read_backbone(tmp_path / "weights.pth", Config(backbone="resnet8", image_size=8))
    with pytest.raises(UserError, match="holds the weights of resnet8, this run uses resnet18: use backbone='resnet8'"):
        read_backbone(tmp_path / "weights.pth", Config(image_size=32))


@pytest.mark.parametrize(
    "stem, size, message",
    [
        (3, 32, ""),
        (3, 64, ""),
        (7, 128, ""),
        (7, 32, r"a 7x7 conv1, but images of 32 pixels need 3x3\nuse image_size=128 or more, or .* is 3x3"),
        (3, 224, r"a 3x3 conv1, but images of 224 pixels need 7x7\nuse image_size=127 or less, or .* is 7x7"),
    ],
)
def test_a_stem_must_fit_the_image_size_and_is_never_converted(tmp_path, stem, size, message):
    torch.save(resnet18(stem), tmp_path / "weights.pth")
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        found = read_backbone(tmp_path / "weights.pth", Config(image_size=size))
        assert torch.equal(found.conv1.weight, resnet18(stem)["conv1.weight"])


def lite0(**changes):
    published = torch.load(STARTS["imagenet"].path(), weights_only=True)
    return {k: t for k, t in (published | changes).items() if t is not None}


LITE0 = Config(backbone="efficientnet_lite0", image_size=64)


def test_the_start_named_imagenet_is_read_from_its_package_without_importing_it(tmp_path):
    sys.modules.pop(STARTS["imagenet"].package, None)
    backbone = read_backbone("imagenet", LITE0)
    assert STARTS["imagenet"].package not in sys.modules
    torch.save({"state_dict": prefixed("module.", backbone.state_dict())}, tmp_path / "ours.pth")
    torch.save(prefixed("encoder.", lite0()), tmp_path / "published.pth")
    for name in ("ours.pth", "published.pth"):
        found = read_backbone(tmp_path / name, LITE0).state_dict()
        assert all(torch.equal(t, found[k]) for k, t in backbone.state_dict().items())
    with pytest.raises(UserError, match="imagenet holds the weights of efficientnet_lite0, this run uses resnet18"):
        read_backbone("imagenet", Config(image_size=64))


def test_a_start_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(STARTS, "imagenet", replace(STARTS["imagenet"], package="no_such_package"))
    with pytest.raises(UserError, match="run pip install no_such_package"):
        read_backbone("imagenet", LITE0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"_blocks.16._bn0.weight": torch.zeros(2)}, "_blocks.16._bn0.weight is not part of efficientnet_lite0"),
        ({"_blocks.3._se_reduce.weight": torch.zeros(2)}, "_blocks.3._se_reduce.weight is not part of"),
        ({"_conv_head.weight": None}, "head.conv.weight is missing"),
        ({"_conv_stem.weight": torch.zeros(40, 3, 3, 3)}, "stem.conv.weight is 40x3x3x3, not 32x3x3x3"),
    ],
)
def test_other_efficientnets_are_refused_with_the_reason(tmp_path, changes, message):
    torch.save(lite0(**changes), tmp_path / "weights.pth")
    with pytest.raises(UserError, match=message):
        read_weights(tmp_path / "weights.pth")


class Trap:
    """Runs code if it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_code_in_a_file_is_never_run(tmp_path):
    for weights in (resnet18(), lite0()):
        torch.save(weights | {"hook": Trap(tmp_path / "sprung")}, tmp_path / "weights.pth")
        with pytest.raises(UserError, match="objects other than tensors, which mixnn never unpickles"):
            read_weights(tmp_path / "weights.pth")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name, data", [("a.pth", b""), ("b.pt", b"garbage"), ("c.safetensors", b"garbage")])
def test_a_damaged_file_is_refused(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match="cannot read"):
        read_weights(tmp_path / name)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="neither a run folder nor a file"):
        read_weights(tmp_path / "none.pth")
