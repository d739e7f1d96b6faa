"""The images a configuration speaks of."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mixnn import data
from mixnn.config import Config, UserError, setting
from mixnn.data import ImageSet
from mixnn.data.listing import list_splits
from mixnn.data.source import Source, open_source
from mixnn.runs.folder import Run

PAIRS = 4  # of labelled images and labelled neighbors that a batch must have on average for purity to be told


def load_split(config: Config, split: str) -> ImageSet:
    """One split of the configured data set or folder, limited as configured."""
    root = _root(config)
    if config.data in data.DATASETS:
        images = data.load(config.data, split, root)
    else:
        size = {"size": config.image_size} if config.image_size else {}
        images = data.load(config.data, split, root, labels=config.labels or None, on_error=config.on_error, **size)
    if split != "pretrain" and config.data not in data.DATASETS and config.labels:
        labelled = (images.labels >= 0).nonzero()[:, 0]
        images = images.subset(labelled) if len(labelled) else images
    images = replace(images, mirror=images.mirror and config.mirror == "yes")
    return images.limit(config.limit) if config.limit else images


def check_on_disk(config: Config) -> None:
    """UserError that says how to get the configured data set where it is not on disk; no image is read."""
    if config.data in data.DATASETS:
        data.locate(data.DATASETS[config.data], _root(config))


def _root(config: Config) -> Path:
    return Path(config.data_dir).expanduser() if config.data_dir else data.default_root()


def check_there(run: Run, how: str = "") -> None:
    """UserError if the folder that a run was trained on is gone; `how` says what to type."""
    folder = run.config.data
    if not how and folder not in data.DATASETS and not Path(folder).is_absolute():  # folders are known by whole paths
        raise UserError(f"{folder}, which {run.path} was trained on, is no data set here: mixnn.data.DATASETS lacks it")
    if folder not in data.DATASETS and not Path(folder).expanduser().is_dir():
        how = how or f"put it back, or type `ln -s FOLDER {shlex.quote(folder)}` with its new place as FOLDER"
        raise UserError(f"{folder}, which {run.path} was trained on, is gone: {how}")


def source_for(
    run: Run,
    given: str | Path | Sequence[str | Path] = "",
    data_dir: str = "",
    split: str = "train",
    how: str = "",
) -> Source:
    """What was given, or else the data that the run was trained on; `how` to give it, should these be gone."""
    if isinstance(given, str | Path) and not str(given):
        check_there(run, how or f"use {setting('source', 'FOLDER')}")
        given = run.config.data
    elif not given:
        raise UserError("no files were given: the list of them is empty")
    return open_source(given, data_dir or run.config.data_dir, split)


def fits(images: ImageSet, device: torch.device) -> bool:
    """Whether the images can live on the device; half of its free memory is left to the networks."""
    if device.type != "cuda":
        return True
    return images.images.nbytes < torch.cuda.mem_get_info(device)[0] / 2


def placed(images: ImageSet, device: torch.device) -> ImageSet:
    """The images on the device, or where they are if they do not fit there."""
    return images.to(device) if fits(images, device) else images


def has_test_split(config: Config) -> bool:
    """Whether there are labelled test images to be had; a folder says so before any of it is decoded."""
    if config.data in data.DATASETS:
        return True
    return bool(config.labels) and bool(list_splits(Path(config.data)).testing)


def training_size(config: Config, images: ImageSet) -> int:
    """Side of the training crops: what was asked for, the data set's own, or a folder's images as they were read."""
    if config.image_size:
        return config.image_size
    return data.DATASETS[config.data].train_size if config.data in data.DATASETS else images.size[0]


def tells_purity(images: ImageSet, batch_size: int) -> bool:
    """Whether enough is labelled for purity: a batch without a pair to judge would count as impure."""
    share = images.num_labelled / len(images)
    return share == 1 or share**2 * batch_size >= PAIRS


def is_labelled(images: ImageSet) -> bool:
    return images.num_classes > 1 and images.num_labelled == len(images)
