"""A run without training: a folder of images and the ImageNet encoder, so that every command works at once."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mixnn.config import Config, UserError, calling
from mixnn.data import Images, open_images
from mixnn.data.image_set import NORMALIZATIONS
from mixnn.data.images import ImageBatch
from mixnn.data.shards import is_shards
from mixnn.files import check_folder_creatable, expand
from mixnn.progress import Reporter, plural, reporter_for
from mixnn.runs.encoder import Encoder
from mixnn.runs.folder import Run, did_you_mean, environment
from mixnn.runs.layout import SAMPLE, SIDE, Layout, mean_layout, spread
from mixnn.runs.weights import KEPT, STARTS, initial_backbone, start_defaults

DEFAULT_START = "imagenet"
ENCODE_SIZE = 224  # pixels, as in the weights' own training; small images gain most from being enlarged (notes/log.md)
SPREAD_SAMPLE = 100  # images


def open_run(run: str | Path | Run, reporter: Reporter | None = None) -> Run:
    """Open a run; a folder of images stands for a run of the ImageNet encoder without training."""
    if isinstance(run, Run):
        return run
    if is_shards(str(run)):
        train = calling("pretrain", str(run))
        raise UserError(f"{run} are shards, which have no encoder yet: train one with `{train}` and give its run")
    path = expand(run)
    if path.is_file():
        raise UserError(f"{path} is a file: give a run folder, or a folder of images")
    if not path.exists():
        raise UserError(f"there is no run folder or folder of images called {path}{did_you_mean(path, Path.is_dir)}")
    if path.is_dir() and not (path / "config.yaml").is_file():
        return create_untrained_run(path, reporter or reporter_for(False))
    found = Run.open(path)
    logged = [record.get("epoch", 0) for record in found.metrics()][-1:] or [0]
    if reporter and found.has_checkpoint and logged[0] < found.config.epochs:
        reporter.warn(f"{found.path} is unfinished; `{found.how_to_resume}` continues it")
    return found


def create_untrained_run(folder: Path, reporter: Reporter) -> Run:
    """The run of a folder's images with the ImageNet encoder, made on first use: runs/FOLDER-imagenet."""
    data, stem = str(folder.absolute()), f"{folder.resolve().name}-{DEFAULT_START}"
    for path in sorted(Path("runs").glob(f"{glob.escape(stem)}*")):
        if (run := Run.find(path)) and _is_start_of(run, folder):
            reporter.info(f"{run.path}: the {DEFAULT_START} encoder, not trained on these images")
            return run
    images = open_images(folder)
    check_folder_creatable(Path("runs") / stem)
    config = untrained_config(data, images)
    backbone = initial_backbone(config)  # this and the next before the folder is made: a failure leaves none
    layout = _layout(images, backbone, config)
    run = Run.create(Run.reserve_numbered(Path("runs") / stem), config, f"mixnn.embed({data!r})", overwrite=True)
    mean, std = NORMALIZATIONS[config.normalization]
    state: dict[str, Any] = {"step": 0, "seconds": 0.0, "names": [], "count": 0, "device": "cpu"}
    state |= {"data": {"images": len(images), "mean": mean, "std": std}, "batch": config.batch_size}
    tensors = {KEPT + name: tensor for name, tensor in backbone.state_dict().items()}
    run.save_checkpoint(0, tensors | (layout.tensors() if layout else {}), state)
    run.write("environment.json", json.dumps(environment(torch.device("cpu")), indent=1) + "\n")
    size = f"{plural(len(images), 'image')} at {config.image_size} pixels"
    aligned = "" if layout is None else "; they are aligned, so vectors also hold their layout"
    reporter.info(f"{run.path}: {size}, with the {DEFAULT_START} encoder as it comes{aligned}")
    return run


def _layout(images: Images, backbone: nn.Module, config: Config) -> Layout | None:
    """The layout of the images, from a sample; None if they are not aligned."""
    small = [torch.from_numpy(np.ascontiguousarray(batch.u8)) for batch in _sample(images, SAMPLE, 2 * SIDE)]
    mean = mean_layout(torch.cat(small)) if sum(map(len, small)) > 1 else None
    if mean is None:
        return None
    channel_mean, channel_std = map(torch.tensor, NORMALIZATIONS[config.normalization])
    encoder = Encoder(backbone, config.image_size, channel_mean, channel_std)
    vectors = torch.cat([encoder(batch.u8) for batch in _sample(images, SPREAD_SAMPLE, encoder.size)])
    return Layout(mean, spread(vectors))


def _sample(images: Images, count: int, size: int) -> Iterator[ImageBatch]:
    """Batches of at most `count` images, evenly spaced."""
    return images.named(set(images.names[:: -(-len(images) // count)])).batches(count, size)


def untrained_config(data: str, images: Images) -> Config:
    """The configuration of a run of no epochs."""
    batch = max(2, min(64, len(images)))
    defaults = start_defaults(DEFAULT_START) | {"init_from": DEFAULT_START, "image_size": ENCODE_SIZE}
    return replace(Config(), data=data, epochs=0, knn_every=0, bn_groups=1, batch_size=batch, **defaults)


def _is_start_of(run: Run, folder: Path) -> bool:
    """Whether a run holds the encoder as it comes for this folder, which a link may lead to."""
    config = run.config
    is_untrained = config.epochs == 0 and config.init_from in STARTS
    is_complete = run.has_checkpoint  # the process that made it was not stopped
    return is_complete and is_untrained and Path(config.data).resolve() == folder.resolve()
