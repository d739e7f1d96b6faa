"""The card of an exported encoder: what it is, how its images must look, how it was trained and how well it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mixnn import methods
from mixnn.config import Config, setting
from mixnn.data import DATASETS
from mixnn.nn.resnet import ARCHITECTURES, Bottleneck, ResNet
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.encoder import CARD_VERSION
from mixnn.runs.folder import environment
from mixnn.runs.images import has_test_split
from mixnn.runs.weights import make_backbone

# Named one by one, for a card is published: no folder of the user's machine may slip in with a new setting.
SETTINGS = (
    *("batch_size", "lr", "warmup_epochs", "sgd_momentum", "weight_decay", "bn_groups", "crop_area", "weak_flip"),
    *("mirror", "precision", "seed"),
)
PROGRAM = {
    "takes": "images: uint8 RGB, (batch, 3, height, width), any batch; best at the size below",
    "gives": "features: float32 (batch, features)",
    "normalisation": "inside: scale, mean and std below are applied already",
}
WEIGHTS = {
    "names": "torchvision's ResNet, without fc",
    "takes": "float32 RGB, (batch, 3, height, width), scaled and normalised as below",
    "gives": "after the mean over pixels: float32 (batch, features)",
}


def make_card(run: Run, state: dict[str, Any], form: str, licence: str, reporter: Reporter) -> dict[str, Any]:
    """All that someone needs who has the file and neither the run nor this package."""
    c, step = run.config, state["step"]
    environment_file = run.path / "environment.json"
    trained_with = json.loads(environment_file.read_text()) if environment_file.exists() else {}
    here = environment(torch.device("cpu"))
    steps_per_epoch = state["data"]["images"] // c.batch_size
    return {
        "card_version": CARD_VERSION,
        "file": {"form": form, **(WEIGHTS if form == "safetensors" else PROGRAM)},
        "architecture": _architecture(c),
        "preprocessing": _preprocessing(c, state["data"]),
        "method": {"name": c.method, "options": c.options, "paper": methods.find(c.method).about.paper},
        "training": {
            "data": c.data if c.data in DATASETS else Path(c.data).name,
            "images": state["data"]["images"],
            "epochs": round(step / steps_per_epoch, 2),
            "epochs_planned": c.epochs,
            "steps": step,
            **{name: getattr(c, name) for name in SETTINGS},
        },
        "metrics": _metrics(run, step, reporter),
        "versions": {
            "trained_with": {k: v for k, v in trained_with.items() if k != "startup_s"},
            "exported_with": {k: here[k] for k in ("mixnn", "git", "python", "torch")},
        },
        "licence": licence or None,
    }


def _architecture(c: Config) -> dict[str, Any]:
    with torch.device("meta"):  # to count, not to hold
        backbone = make_backbone(c)
    if not isinstance(backbone, ResNet):
        return {"name": c.backbone, "features": backbone.num_features}
    block, widths, depths = ARCHITECTURES[c.backbone]
    stem, pooled = backbone.conv1, isinstance(backbone.maxpool, torch.nn.MaxPool2d)
    return {
        "name": c.backbone,
        "block": "bottleneck: 1x1, 3x3, 1x1" if block is Bottleneck else "basic: 3x3, 3x3",
        "blocks": list(depths),
        "widths": list(widths),
        "stem": {
            "kernel": stem.kernel_size[0],
            "stride": stem.stride[0],
            "padding": stem.padding[0],
            "max_pool": {"kernel": 3, "stride": 2, "padding": 1} if pooled else None,
        },
        "features": backbone.num_features,
        "parameters": sum(p.numel() for p in backbone.parameters()),
    }


def _preprocessing(c: Config, data: dict[str, Any]) -> dict[str, Any]:
    looks = {
        "size": c.image_size,
        "crop": "upright by EXIF, transparent parts white, then the largest square at the centre",
        "resize": "to size x size, bilinear with antialiasing (Pillow's ImageOps.fit with BILINEAR)",
        "channels": "RGB",
        "scale": 1 / 255,
        "mean": list(data["mean"]),
        "std": list(data["std"]),
        "formula": "(x * scale - mean) / std, by channel",
    }
    # A named set is measured on its images as they are, and STL-10's are larger than its training crops.
    return looks | ({"size_when_measured": DATASETS[c.data].size} if c.data in DATASETS else {})


def _metrics(run: Run, step: int, reporter: Reporter) -> dict[str, Any]:
    """The results of exactly these weights, each with its protocol."""
    kept = {}
    for name, found in run.results().items():
        of = found.get("protocol", {}).get("checkpoint_step") if isinstance(found, dict) else None
        if of == step:
            kept[name] = found
        elif of is not None:
            reporter.warn(f"{name} was measured at step {of}, these are weights of step {step}: the card leaves it out")
    if not kept:
        way = f"run {run.typed('evaluate')}, then this again with {setting('overwrite', True)}"
        none = "there are no labelled test images to measure it by"
        reporter.info(f"the card states no accuracy: {way if has_test_split(run.config) else none}")
    return kept
