"""Dataset: images that belong together, wherever they come from.

    open_dataset("cifar10")                       a named data set
    open_dataset("./photos", labels="folders")    a folder, with or without labels
    open_dataset(images_u8, labels=labels)        arrays in memory

All answer the same questions (splits, labels, sizes, recipe), so the rest of the package never asks which kind it has.
`load` gives one split in memory, for training and evaluation. `images` gives a list of images whose files are decoded
when needed, for everything else.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mixnn.config import Config, UserError, setting, unknown
from mixnn.data.folder import Listing, hold_out, list_splits, load_folder, natural_key
from mixnn.data.image_set import NORMALIZATIONS, ImageSet, channel_stats
from mixnn.data.images import ImageArrays, ImageFiles, Images, list_files, resized
from mixnn.data.labels import read_labels
from mixnn.data.named import DATASETS
from mixnn.data.spec import DatasetSpec, default_root

# All images for self-supervised training; the labelled training images for probes; the held-out test images.
SPLITS = ("pretrain", "train", "test")
FOLDER_SIZE = 64  # side of a folder's images if none is given
ON_ERROR = ("skip", "refuse")
ARRAYS = "arrays"


@dataclass
class Dataset(ABC):
    """A data set as one run uses it. Each split is loaded once and kept."""

    limit: int = 0  # use at most this many images per split; 0: all
    mirror: bool = True  # mirrored images may be used as views
    normalization: str = "data"  # which mean and std the images come with: their own, or one of NORMALIZATIONS
    _loaded: dict[tuple[str, int, str], ImageSet] = field(default_factory=dict, repr=False)

    # Settings made for this data set; None: choose them from the images.
    recipe: Mapping[str, Any] | None = field(default=None, init=False)
    train_size: int = field(default=0, init=False)  # side of the training crops; 0: choose it from the images
    stored_size: int = field(default=0, init=False)  # side of the stored images; 0: they differ
    description: str = field(default="", init=False)  # a few words about a named data set; "" for a folder

    @property
    @abstractmethod
    def name(self) -> str:
        """What identifies the data set in a config: its name, or the folder's absolute path."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Short name for people, without a path."""

    @abstractmethod
    def check(self) -> None:
        """UserError, with what to do about it, if the images are missing. Reads none of them."""

    @property
    @abstractmethod
    def has_test(self) -> bool:
        """There is a test split. Decodes nothing."""

    @property
    @abstractmethod
    def has_labelled_test(self) -> bool:
        """There is a test split with labels. Decodes nothing."""

    @property
    @abstractmethod
    def has_unlabelled(self) -> bool:
        """Some pre-training images have no label, so a method that trains with labels cannot use it."""

    @abstractmethod
    def images(self, split: str = "all") -> Images:
        """The images of one split, or of all files in a folder, as a list that is decoded when needed."""

    @property
    @abstractmethod
    def key(self) -> tuple[Any, ...]:
        """Data sets with equal keys have the same images and labels."""

    @property
    @abstractmethod
    def pretrain_is_train(self) -> bool:
        """The pre-training images are also the training images of the probes."""

    def num_images(self, split: str) -> int | None:  # noqa: ARG002
        """Number of images of a split, at most `limit`; None if only listing the files would tell."""
        return None

    def load(self, split: str, size: int = 0) -> ImageSet:
        """One split in memory. `size` is the side to decode a folder's images to; named data sets have their own."""
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        split = "train" if split == "pretrain" and self.pretrain_is_train else split
        size = 0 if self.stored_size else size or FOLDER_SIZE
        key = split, size, self.normalization
        if key not in self._loaded:
            images = self._load(split, size)
            images = images if self.mirror else replace(images, mirror=False)
            if self.normalization != "data":
                mean, std = NORMALIZATIONS[self.normalization]
                images = replace(images, mean=mean, std=std)
            self._loaded[key] = images.limit(self.limit) if self.limit else images
        return self._loaded[key]

    @abstractmethod
    def _load(self, split: str, size: int) -> ImageSet: ...

    def load_labelled(self, size: int = 0) -> tuple[ImageSet, ImageSet] | None:
        """Training and test images for kNN or a linear probe; None if either has images without labels."""
        if not self.has_labelled_test:
            return None
        train, test = self.load("train", size), self.load("test", size)
        return (train, test) if train.fully_labelled and test.fully_labelled else None


@dataclass
class NamedDataset(Dataset):
    """One of DATASETS, read from a folder of data sets."""

    spec: DatasetSpec = field(kw_only=True)
    root: Path = field(kw_only=True)

    def __post_init__(self) -> None:
        self.recipe, self.train_size, self.stored_size = self.spec.recipe, self.spec.train_size, self.spec.size
        self.description = self.spec.title

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def title(self) -> str:
        return self.spec.name

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.limit

    @property
    def pretrain_is_train(self) -> bool:
        return self.spec.splits["pretrain"] == self.spec.splits["train"]

    @property
    def has_test(self) -> bool:
        return True

    @property
    def has_labelled_test(self) -> bool:
        return True

    @property
    def has_unlabelled(self) -> bool:
        return not self.pretrain_is_train

    def num_images(self, split: str) -> int:
        return min(self.spec.splits[split], self.limit or self.spec.splits[split])

    def check(self) -> None:
        self.spec.locate(self.root)

    def _load(self, split: str, size: int) -> ImageSet:  # noqa: ARG002  (its images have one size)
        spec, folder = self.spec, self.spec.locate(self.root)
        images, labels, classes = spec.read(folder, split)
        mean, std = spec.mean, spec.std
        if mean is None or std is None:
            training = images if split == "train" and self.pretrain_is_train else spec.read(folder, "pretrain")[0]
            mean, std = channel_stats(torch.from_numpy(training))
        return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), None, classes, mean, std, spec.mirror)

    def images(self, split: str = "train") -> ImageArrays:
        split = "train" if split == "all" else split
        loaded = self.load(split)
        names = loaded.names or [f"{self.name}/{split}/{i}" for i in range(len(loaded))]
        labels = {n: loaded.classes[y] for n, y in zip(names, loaded.labels.tolist(), strict=True) if y >= 0}
        return ImageArrays(f"{self.name}, {split}", names, labels, arrays=loaded.images.numpy())


@dataclass
class FolderDataset(Dataset):
    """A folder of the user's own images."""

    folder: Path = field(kw_only=True)
    labels: str = ""  # "folders", a CSV file, or "" for none
    holdout: float = 0.0  # share of the labelled images that become test images
    on_error: str = "skip"
    _files: dict[str, ImageFiles] = field(default_factory=dict, repr=False)
    _decoded: dict[tuple[str, int], ImageSet] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def title(self) -> str:
        return self.folder.name

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.limit, self.labels, self.holdout, self.on_error

    @property
    def pretrain_is_train(self) -> bool:
        return not self.labels  # probes leave out images without labels

    @property
    def has_test(self) -> bool:
        return bool(self.listing.testing)

    @property
    def has_labelled_test(self) -> bool:
        return bool(self.labels) and self.has_test

    @property
    def has_unlabelled(self) -> bool:
        return False

    @cached_property
    def listing(self) -> Listing:
        listing = list_splits(self.folder)
        if not (self.holdout and listing.training):
            return listing
        return hold_out(listing, read_labels(self.labels, listing.training), self.holdout)

    def check(self) -> None:
        if not self.folder.is_dir():
            raise UserError(f"there is no folder {self.folder}")

    def _load(self, split: str, size: int) -> ImageSet:
        kind = "test" if split == "test" else "train"
        if (kind, size) not in self._decoded:
            self._decoded[kind, size] = load_folder(self.listing, kind, size, self.labels, self.on_error, mirror=True)
        images = self._decoded[kind, size]
        # Probes use labelled images only. If there are none, all are kept, and the caller refuses them.
        if split == "pretrain" or not self.labels or images.num_labelled in (0, len(images)):
            return images
        return images.subset((images.labels >= 0).nonzero()[:, 0])

    def images(self, split: str = "all") -> ImageFiles:
        if split not in self._files:
            listing = self.listing
            names = listing.names(split)
            paths, has_splits = [self.folder / name for name in names], bool(listing.test)
            skipped = listing.skipped
            self._files[split] = ImageFiles(self.name, names, skipped=skipped, has_splits=has_splits, paths=paths)
        return self._files[split]


@dataclass
class ArrayDataset(Dataset):
    """Images in memory, all for training. They are not stored, so a run on them cannot be resumed or evaluated."""

    arrays: np.ndarray = field(kw_only=True)  # uint8 [M,3,H,W]
    classes: list[str] = field(default_factory=list)
    numbers: np.ndarray = field(kw_only=True)  # int64 [M], the class of each image; -1 without a label

    @property
    def name(self) -> str:
        return f"{ARRAYS}-{hashlib.sha256(self.arrays.tobytes()).hexdigest()[:8]}"

    @property
    def title(self) -> str:
        return ARRAYS

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.limit

    @property
    def pretrain_is_train(self) -> bool:
        return True

    @property
    def has_test(self) -> bool:
        return False

    @property
    def has_labelled_test(self) -> bool:
        return False

    @property
    def has_unlabelled(self) -> bool:
        return bool((self.numbers < 0).any())

    def num_images(self, split: str) -> int | None:
        return None if split == "test" else len(self.arrays)

    def check(self) -> None:
        """They are in memory."""

    def _load(self, split: str, size: int) -> ImageSet:
        if split == "test":
            raise UserError("arrays have no test images")
        images = torch.from_numpy(resized(self.arrays, size))
        mean, std = channel_stats(images)
        return ImageSet(images, torch.from_numpy(self.numbers), None, self.classes, mean, std, mirror=True)

    def images(self, split: str = "all") -> ImageArrays:
        if split == "test":
            raise UserError("arrays have no test images")
        names = [f"{self.name}/{i}" for i in range(len(self.arrays))]
        labels = {name: self.classes[y] for name, y in zip(names, self.numbers.tolist(), strict=True) if y >= 0}
        return ImageArrays(self.title, names, labels, arrays=self.arrays)


def array_dataset(images: Any, labels: Any = None, **options: Any) -> ArrayDataset:
    """Images (M, H, W, 3), (M, 3, H, W) or gray (M, H, W), uint8, with a label each or none; square images only."""
    try:
        array = np.asarray(images)
    except ValueError:  # images of different sizes, or something else altogether
        array = np.empty(0)
    if array.ndim == 3:
        array = np.repeat(array[:, None], 3, axis=1)
    elif array.ndim == 4 and array.shape[1] != 3 and array.shape[3] == 3:
        array = array.transpose(0, 3, 1, 2)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[1] != 3 or array.shape[2] != array.shape[3]:
        raise UserError(
            "data must be a data set's name, a folder, or square uint8 images: (M, H, W, 3), (M, 3, H, W) or (M, H, W)"
        )
    given = [None] * len(array) if labels is None else list(labels)
    if len(given) != len(array):
        raise UserError(f"{len(array)} images and {len(given)} labels: give a label for each image")
    classes = sorted({str(label) for label in given if label is not None}, key=natural_key)
    numbers = np.array([-1 if label is None else classes.index(str(label)) for label in given], np.int64)
    return ArrayDataset(arrays=np.ascontiguousarray(array), classes=classes, numbers=numbers, **options)


def open_dataset(
    data: Any,
    root: str | Path = "",
    *,
    labels: Any = "",
    holdout: float = 0.0,
    on_error: str = "skip",
    **options: Any,
) -> Dataset:
    """The data set of this name (below `root`), this folder, or these arrays; UserError if it is none of them."""
    if on_error not in ON_ERROR:
        raise unknown("on_error", on_error, ON_ERROR)
    if not isinstance(data, str | Path):
        if holdout:
            raise UserError(f"{setting('holdout')} is for folders of images")
        return array_dataset(data, None if isinstance(labels, str) else labels, **options)
    folder = Path(data).expanduser()
    if str(data) in DATASETS:
        if str(labels) or holdout or on_error != "skip":
            flags = f"{setting('labels')}, {setting('holdout')} and {setting('on_error')}"
            raise UserError(f"{flags} are for folders of images: {data} has its own labels")
        return named_dataset(str(data), root, **options)
    if folder.is_dir():
        if holdout and not str(labels):
            raise UserError(f"{setting('holdout')} needs labels: add {setting('labels', 'folders')} or a CSV file")
        options |= {"labels": _absolute(labels), "holdout": holdout, "on_error": on_error}
        return FolderDataset(folder=folder.absolute(), **options)
    if folder.exists():
        raise UserError(f"{folder} is a file\ngive the folder that holds the images, or one of: {', '.join(DATASETS)}")
    if folder.name != str(data):  # a path: data set names have no slash
        raise UserError(f"there is no folder {data}\ngive a folder of images, or one of: {', '.join(DATASETS)}")
    raise UserError(f"{unknown('data set or folder', str(data), DATASETS)}, or a folder of images (see: mixnn data)")


def named_dataset(name: str, root: str | Path = "", **options: Any) -> NamedDataset:
    place = Path(root).expanduser() if str(root) else default_root()
    return NamedDataset(spec=DATASETS[name], root=place, **options)


def configured_dataset(config: Config) -> Dataset:
    """The data set a run was configured with. It may be gone: `check` says so."""
    options: dict[str, Any] = {"limit": config.limit, "mirror": config.mirror == "yes"}
    options["normalization"] = config.normalization
    if config.data in DATASETS:
        return named_dataset(config.data, config.data_dir, **options)
    options |= {"labels": config.labels, "holdout": config.holdout, "on_error": config.on_error}
    return FolderDataset(folder=Path(config.data), **options)


def open_images(source: str | Path | Sequence[str | Path], data_dir: str | Path = "", split: str = "train") -> Images:
    """The images of a folder (all of them), of single files, or of one split of a named data set."""
    if not isinstance(source, str | Path):
        return _files([Path(path).expanduser() for path in source])
    path = Path(source).expanduser()
    if str(source) in DATASETS:
        return named_dataset(str(source), data_dir).images(split)
    if path.is_file():
        return _files([path])
    if not path.is_dir():
        raise UserError(f"{source} is not a folder, an image file or a data set (`mixnn data` lists the data sets)")
    return FolderDataset(folder=path.absolute()).images()


def _files(paths: list[Path]) -> ImageFiles:
    for path in paths:
        if not path.is_file():
            several = ": give one folder, or several image files" if path.is_dir() else ""
            raise UserError(f"{path} is {'a folder' if path.is_dir() else 'not a file'}{several}")
    return list_files(paths)


def _absolute(labels: str | Path) -> str:
    return str(labels) if str(labels) in ("", "folders") else str(Path(labels).expanduser().absolute())


def load(data: str | Path, split: str, root: Path | None = None, *, size: int = 0, **options: Any) -> ImageSet:
    """One split of a data set or folder in memory: load("digits", "train"), load("./photos", "pretrain", size=32)."""
    if size < 0:
        raise UserError(f"size={size}: size must be at least 1")
    if size and str(data) in DATASETS:
        raise UserError(f"size is for folders of images: {data} has its own")
    return open_dataset(data, root or "", **options).load(split, size)
