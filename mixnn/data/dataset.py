"""Dataset: images that belong together, wherever they come from.

    open_dataset("cifar10")                       a named data set
    open_dataset("./photos", labels="folders")    a folder, with or without labels
    open_dataset("wds:train-{000..146}.tar")      shards: WebDataset's tar files, or hf:FOLDER of Hugging Face
    open_dataset(images_u8, labels=labels)        arrays in memory, or any object that gives images by index

All answer the same questions (splits, labels, sizes, recipe), so the rest of the package never asks which kind it has.
`load` gives one split in memory, for training and evaluation. `images` gives a list of images whose files are decoded
when needed, for everything else.
"""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from mixnn.config import Config, UserError, calling, setting, unknown
from mixnn.data.cache import cached, files_key
from mixnn.data.decode import Decoded
from mixnn.data.folder import (
    Listing,
    held_out_names,
    hold_out,
    list_splits,
    load_folder,
    make_image_set,
    readable_names,
    sample_stats,
    sorted_classes,
)
from mixnn.data.image_set import (
    NORMALIZATIONS,
    Arrays,
    FolderSummary,
    ImageSet,
    Triple,
    channel_stats,
    read_normalization,
)
from mixnn.data.images import ImageArrays, ImageFiles, Images, list_files
from mixnn.data.items import ARRAY_SHAPES, ImageItems, ItemLabels, Items, uint8_images
from mixnn.data.labels import FOLDERS, from_values, label_text, read_labels
from mixnn.data.named import DATASETS
from mixnn.data.shards import absolute_shards, is_shards, open_shards, shard_files
from mixnn.data.spec import DatasetSpec, data_root
from mixnn.files import expand
from mixnn.progress import plural

# All images for self-supervised training; the labeled training images for probes; the held-out test images.
SPLITS = ("pretrain", "train", "test")
FOLDER_SIZE = 64  # side of a folder's images if none is given
ON_ERROR = ("skip", "refuse")
IMAGES, FILES = "images", "files"  # what images in memory and a list of files are called, with DIGITS of their digest
DIGITS = 8
TEST_PARTS = ("test", "validation", "val")  # the first of these in a mapping holds the test images
KINDS = (
    f"give a data set's name, a folder, a list of files, images {ARRAY_SHAPES}, or an object with __len__ and "
    "__getitem__ that gives images"
)


@dataclass
class Dataset(ABC):
    """A data set as one run uses it. Each split is loaded once and kept."""

    limit: int = 0  # use at most this many images per split; 0: all
    mirror: bool = True  # mirrored images may be used as views
    normalization: str = "data"  # which mean and std the images come with: what `read_normalization` takes
    expected_digest: str = field(default="", kw_only=True)  # if set, training images with another one are refused
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

    @property
    def is_stored(self) -> bool:
        """Whether `name` is enough to open the images again; False for arrays and file lists."""
        return True

    @abstractmethod
    def check(self) -> None:
        """UserError, with what to do about it, if the images are missing. Reads none of them."""

    @property
    @abstractmethod
    def has_test(self) -> bool:
        """Whether there is a test split. No image is decoded."""

    @property
    @abstractmethod
    def has_labeled_test(self) -> bool:
        """Whether there is a test split with labels. No image is decoded."""

    @property
    @abstractmethod
    def has_unlabeled(self) -> bool:
        """Whether some pre-training images have no label, so that a method that trains with labels cannot use them."""

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
        """Whether the pre-training images are also the training images of the probes."""

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
            if self.expected_digest and images.summary and split != "test":
                self._check_digest(images.summary)
            images = images if self.mirror else replace(images, mirror=False)
            if (mean_std := read_normalization(self.normalization)) is not None:
                mean, std = mean_std
                images = replace(images, mean=mean, std=std)
            self._loaded[key] = images.limit(self.limit) if self.limit else images
        return self._loaded[key]

    def emptied(self) -> Self:
        """A copy with empty caches. If other images are then read, they are refused."""
        return replace(self, _loaded={})

    def _check_digest(self, summary: FolderSummary) -> None:
        if summary.digest != self.expected_digest:
            raise UserError(
                f"these are not the images that the run was trained on: {plural(summary.num_images, 'image')} with "
                f"digest {summary.digest[:DIGITS]}, not {self.expected_digest[:DIGITS]}\n"
                "give the same images in the same order"
            )

    @abstractmethod
    def _load(self, split: str, size: int) -> ImageSet: ...

    def load_labeled(self, size: int = 0) -> tuple[ImageSet, ImageSet] | None:
        """Training and test images for kNN or a linear probe; None if either has images without labels."""
        if not self.has_labeled_test:
            return None
        train, test = self.load("train", size), self.load("test", size)
        return (train, test) if train.fully_labeled and test.fully_labeled else None


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
    def has_labeled_test(self) -> bool:
        return True

    @property
    def has_unlabeled(self) -> bool:
        return not self.pretrain_is_train

    def num_images(self, split: str) -> int:
        return min(self.spec.splits[split], self.limit or self.spec.splits[split])

    def check(self) -> None:
        self.spec.locate(self.root)

    def _load(self, split: str, size: int) -> ImageSet:  # noqa: ARG002  (its images have one size)
        spec, folder = self.spec, self.spec.locate(self.root)
        images, labels, classes = _read_split(spec, folder, split)
        mean, std = spec.mean, spec.std
        if mean is None or std is None:
            is_training = split == "train" and self.pretrain_is_train
            training = images if is_training else _read_split(spec, folder, "pretrain")[0]
            mean, std = channel_stats(torch.from_numpy(training))
        return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), None, classes, mean, std, spec.mirror)

    def images(self, split: str = "train") -> ImageArrays:
        split = "train" if split == "all" else split
        loaded = self.load(split)
        names = loaded.names or [f"{self.name}/{split}/{i}" for i in range(len(loaded))]
        labels = {n: loaded.classes[y] for n, y in zip(names, loaded.labels.tolist(), strict=True) if y >= 0}
        return ImageArrays(f"{self.name}, {split}", names, labels, arrays=loaded.images[:].numpy(), is_named=True)


def _read_split(spec: DatasetSpec, folder: Path, split: str) -> Arrays:
    """What the reader of a data set returns, as arrays; UserError that names the data set if it is something else."""
    name, found = f"the data set {spec.name}, split {split}", spec.read(folder, split)
    try:
        return _as_arrays(found)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _as_arrays(found: Any) -> Arrays:
    is_triple = isinstance(found, tuple | list) and len(found) == 3
    if not is_triple or not isinstance(found[0], np.ndarray | torch.Tensor):
        parts = found if isinstance(found, tuple | list) and len(found) < 5 else [found]
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise UserError(
            f"its function returns {kinds}\n"
            f"return three things: images {ARRAY_SHAPES} as an array or a tensor, labels (M), and the names of the "
            "classes"
        )
    images, labels, classes = found
    is_ready = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim == 4 and images.shape[1] == 3
    images = images if is_ready else np.array(uint8_images(images))  # a copy: torch wants arrays that can be written
    labels = labels.cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise UserError(
            f"{len(images)} images, and labels {labels.shape} of {labels.dtype}: give one integer per image"
        )
    if len(labels) and not -1 <= labels.min() <= labels.max() < len(classes):
        limits = f"from {labels.min()} to {labels.max()}"
        raise UserError(f"labels {limits}, and {len(classes)} class names: give -1 (unknown) to {len(classes) - 1}")
    return images, labels.astype(np.int64, copy=False), list(classes)


@dataclass
class OwnDataset(Dataset):
    """The user's own images. A split is decoded once per size, also if only its labeled images are used later."""

    on_error: str = "skip"
    _decoded: dict[tuple[str, int], ImageSet] = field(default_factory=dict, repr=False)

    @property
    @abstractmethod
    def is_labeled(self) -> bool:
        """Whether images may have labels."""

    @abstractmethod
    def _decode(self, split: str, size: int) -> ImageSet:
        """All images of "train" or "test"."""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.limit, self.on_error

    @property
    def pretrain_is_train(self) -> bool:
        return not self.is_labeled  # probes leave out images without labels

    def _load(self, split: str, size: int) -> ImageSet:
        images = self._decoded_split("test" if split == "test" else "train", size)
        # Probes use labeled images only. If there are none, all are kept, and the caller refuses them.
        if split == "pretrain" or not self.is_labeled or images.num_labeled in (0, len(images)):
            return images
        return images.subset((images.labels >= 0).nonzero()[:, 0])

    def _decoded_split(self, split: str, size: int) -> ImageSet:
        if (split, size) not in self._decoded:
            self._decoded[split, size] = self._decode(split, size)
        return self._decoded[split, size]

    def emptied(self) -> Self:
        return replace(self, _loaded={}, _decoded={}, expected_digest=self._digest or self.expected_digest)

    def _name_with_digest(self, kind: str) -> str:
        """The kind, and the start of the training images' digest as soon as that is known."""
        digest = self._digest or self.expected_digest
        return f"{kind}-{digest[:DIGITS]}" if digest else kind

    @property
    def _digest(self) -> str:
        """Digest of the training images; "" if they have not been read."""
        summaries = [images.summary for (split, _), images in self._decoded.items() if split == "train"]
        return summaries[0].digest if summaries and summaries[0] else ""


@dataclass
class FolderDataset(OwnDataset):
    """A folder of the user's own images."""

    folder: Path = field(kw_only=True)
    labels: str = ""  # "folders", a CSV file, or "" for none
    holdout: float = 0.0  # share of the labeled images that become test images
    _files: dict[str, ImageFiles] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def title(self) -> str:
        return self.folder.name

    @property
    def key(self) -> tuple[Any, ...]:
        return *super().key, self.labels, self.holdout

    @property
    def is_labeled(self) -> bool:
        return bool(self.labels)

    @property
    def has_test(self) -> bool:
        return bool(self.listing.testing)

    @property
    def has_labeled_test(self) -> bool:
        return self.is_labeled and self.has_test

    @property
    def has_unlabeled(self) -> bool:
        return any(name not in self.label_of for name in self.listing.training)

    @cached_property
    def listing(self) -> Listing:
        listing = self._all_files
        return hold_out(listing, self.label_of, self.holdout) if self.holdout and listing.training else listing

    @cached_property
    def _all_files(self) -> Listing:
        return list_splits(self.folder)

    @cached_property
    def label_of(self) -> dict[str, str]:
        """Name -> label, for the images that have one."""
        return self._read_labels() if self.is_labeled else {}

    def _read_labels(self) -> dict[str, str]:
        listing = self._all_files
        names = listing.training + listing.testing
        paths = {} if self.labels == FOLDERS else {name: self.folder / name for name in names}
        return read_labels(self.labels, names, bool(listing.test), paths)

    def check(self) -> None:
        if not self.folder.is_dir():
            raise UserError(f"there is no folder {self.folder}")

    def _decode(self, split: str, size: int) -> ImageSet:
        return load_folder(self.listing, split, size, self.label_of, self.on_error)

    def images(self, split: str = "all") -> ImageFiles:
        if split not in self._files:
            listing = self._all_files if split == "all" else self.listing  # the labels may be gone
            title, names = self.name if split == "all" else f"{self.name}, {split}", listing.names(split)
            paths, has_splits = [self.folder / name for name in names], bool(listing.test)
            skipped = listing.skipped
            self._files[split] = ImageFiles(title, names, skipped=skipped, has_splits=has_splits, paths=paths)
        return self._files[split]


@dataclass
class FileListDataset(FolderDataset):
    """A list of image files, in the order given. `folder` is one that holds all of them."""

    files: list[str] = field(kw_only=True)  # names relative to the folder
    given_labels: dict[str, str] = field(default_factory=dict)  # name -> label

    @property
    def name(self) -> str:
        return self._name_with_digest(FILES)

    @property
    def title(self) -> str:
        return FILES

    @property
    def is_stored(self) -> bool:
        return False

    @property
    def is_labeled(self) -> bool:
        return bool(self.labels or self.given_labels)

    @cached_property
    def _all_files(self) -> Listing:
        return Listing(self.folder, "", self.files, [], self.files, [])

    def _read_labels(self) -> dict[str, str]:
        return self.given_labels or super()._read_labels()


class Parts(NamedTuple):
    """Training and test images by index."""

    training: ImageArrays | ImageItems
    testing: ImageArrays | ImageItems | None


@dataclass
class IndexedDataset(OwnDataset):
    """Images that are found by index: in memory, in an object of the user's, or in shards."""

    stats: tuple[Triple, Triple] | None = None  # mean and std, if they are known
    may_mirror: bool = True

    @property
    @abstractmethod
    def parts(self) -> Parts: ...

    @property
    def is_labeled(self) -> bool:
        return self.parts.training.has_labels

    @property
    def has_unlabeled(self) -> bool:
        return not self.is_labeled or len(self.parts.training.labels) < len(self.parts.training)

    def _decode(self, split: str, size: int) -> ImageSet:
        images = self.images(split)
        found = self._decode_images(images, size)
        if split == "test":
            train = self._decoded_split("train", size)
            stats = train.mean, train.std
        else:
            sampled = sample_stats(images.names, readable_names(images.names, found), found.images)
            stats = self.stats or sampled or NORMALIZATIONS["torchvision"]  # the last: no image can be read
        training, testing = self.parts
        classes = sorted_classes(training.labels, testing.labels if testing else {})
        made = make_image_set(images.names, found, stats, images.labels, classes, [], self.on_error, "the data")
        return replace(made, mirror=self.may_mirror)

    def _decode_images(self, images: ImageArrays | ImageItems, size: int) -> Decoded:
        return images.decoded(size)

    def images(self, split: str = "all") -> ImageArrays | ImageItems:
        training, testing = self.parts
        if split == "test" and testing is None:
            raise UserError(
                f"the data has no test images: give {{'train': ..., 'test': ...}}, or labels and {setting('holdout')}"
            )
        return testing if split == "test" and testing else training


@dataclass
class MemoryDataset(IndexedDataset):
    """Images in memory, or in an object that gives them by index. A run folder stores only what identifies them."""

    given: Parts = field(kw_only=True)

    @property
    def parts(self) -> Parts:
        return self.given

    @property
    def name(self) -> str:
        return self._name_with_digest(IMAGES)

    @property
    def title(self) -> str:
        return IMAGES

    @property
    def is_stored(self) -> bool:
        return False

    @property
    def has_test(self) -> bool:
        return self.parts.testing is not None

    @property
    def has_labeled_test(self) -> bool:
        return self.parts.testing is not None and self.parts.testing.has_labels

    def num_images(self, split: str) -> int | None:
        images = self.parts.testing if split == "test" else self.parts.training
        return None if images is None else min(len(images), self.limit or len(images))

    def check(self) -> None:
        """UserError unless the images are at hand."""


@dataclass
class ShardDataset(IndexedDataset):
    """Images in shards (see shards.py), decoded into the image cache. The shards are opened on first use."""

    shards: str = field(kw_only=True)  # wds:PATTERN or hf:FOLDER
    holdout: float = 0.0  # share of the images that become test images

    @cached_property
    def parts(self) -> Parts:
        return _hold_out(_as_images(open_shards(self.shards)), self.holdout)

    @property
    def key(self) -> tuple[Any, ...]:
        return *super().key, self.holdout

    @property
    def name(self) -> str:
        return self.shards

    @property
    def title(self) -> str:
        return Path(self.shards).name

    @property
    def has_test(self) -> bool:
        return bool(self.holdout)

    @property
    def has_labeled_test(self) -> bool:
        return bool(self.holdout)  # only labeled images are held out

    def check(self) -> None:
        shard_files(self.shards)

    def _decode_images(self, images: ImageArrays | ImageItems, size: int) -> Decoded:
        assert isinstance(images, ImageItems)
        key = hashlib.sha256(" ".join(images.names).encode()).hexdigest()[:8]  # of a split
        files = [str(path) for path in shard_files(self.shards)]
        key = hashlib.sha256(f"{key} {files_key(Path('/'), files, size)}".encode()).hexdigest()[:32]
        return cached(key, len(images), size, partial(images.decoded_part, size, forget=True))


def shard_dataset(shards: str, **options: Any) -> ShardDataset:
    """The images of shards that are at hand, opened at once so that a mistake is noticed before any work."""
    dataset = ShardDataset(shards=absolute_shards(shards), **options)
    dataset.images()
    return dataset


def memory_dataset(data: Any, labels: Any = None, holdout: float = 0.0, **options: Any) -> MemoryDataset:
    """Images in memory, an ImageSet, an object that gives images by index, or a mapping of these for train and test."""
    testing = None
    if isinstance(data, Mapping):
        splits, data = data, data.get("train")
        if data is None:
            raise UserError(f"the data has the parts {', '.join(map(repr, splits))}: one must be called 'train'")
        test = next((name for name in TEST_PARTS if name in splits), None)
        testing = _as_images(splits[test]) if test else None
        if labels is not None:
            raise UserError("labels of data with several parts must come with the images, as in (image, label)")
    if holdout and testing is not None:
        raise UserError(f"the data has test images of its own: leave out {setting('holdout')}")
    none = "" if labels is None else ", and none of these images has one"
    training = _as_images(data, labels)
    parts = Parts(training, testing) if testing else _hold_out(training, holdout, none)
    if isinstance(data, ImageSet):
        options |= {"stats": (data.mean, data.std), "may_mirror": data.mirror}
    return MemoryDataset(given=parts, **options)


def _hold_out(images: ImageArrays | ImageItems, holdout: float, none: str = "") -> Parts:
    """The images with a share of the labeled ones as test images. `none`: what to add if no image has a label."""
    if not holdout:
        return Parts(images, None)
    held = held_out_names(images.labels, holdout)
    if not held:
        raise UserError(
            f"{setting('holdout')} needs labels{none}: give images that come with labels, or {setting('labels')}, "
            "one per image"
        )
    return Parts(images.named({*images.names} - held), images.named(held))


def _as_images(data: Any, labels: Any = None) -> ImageArrays | ImageItems:
    """Data in memory as a list of images; a name is a number, unless the data has names."""
    if isinstance(data, ImageSet):
        names, arrays = data.names or _numbers(len(data)), data.images[:].cpu().numpy()
        texts = [label_text(label, data.classes) for label in data.labels.tolist()]
        return ImageArrays(IMAGES, names, from_values(texts if labels is None else labels, names), arrays=arrays)
    if isinstance(data, np.ndarray | torch.Tensor):
        arrays = uint8_images(data)
        names = _numbers(len(arrays))
        if not names:
            raise UserError("the data has no images")
        return ImageArrays(IMAGES, names, {} if labels is None else from_values(labels, names), arrays=arrays)
    if isinstance(data, tuple) and len(data) == 2 and np.ndim(data[1]) == 1:
        raise UserError("data is a pair of images and labels: give the images alone, and labels=...")
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        inner = " (its .dataset will do)" if hasattr(data, "dataset") else ""
        raise UserError(f"data is a {type(data).__name__}, which cannot be read by index{inner}\n{KINDS}")
    items = Items(data)
    names = _numbers(len(items))
    known: Mapping[str, str] = ItemLabels(items, names) if labels is None else from_values(labels, names)
    return ImageItems(IMAGES, names, known, items=items)


def _numbers(count: int) -> list[str]:
    return [str(i) for i in range(count)]


def file_list_dataset(paths: Sequence[str | Path], labels: Any = "", **options: Any) -> FileListDataset:
    """The images in these files. `labels`: one per file, or as for a folder."""
    found = [path.absolute() for path in _existing([expand(path) for path in paths])]
    folder = Path(os.path.commonpath([path.parent for path in found]))
    files = [path.relative_to(folder).as_posix() for path in found]
    if len(set(files)) < len(files):
        raise UserError(f"{next(name for name in files if files.count(name) > 1)} is listed twice: list each file once")
    if isinstance(labels, str | Path):
        options["labels"] = _absolute(labels)
    else:
        options["given_labels"] = from_values(labels, files)
    if options.get("holdout") and not (options.get("labels") or options.get("given_labels")):
        none = ", and none of these files has one" if "given_labels" in options else ""
        raise UserError(
            f"{setting('holdout')} needs labels{none}: give one per file, {setting('labels', 'folders')} or a CSV"
        )
    return FileListDataset(folder=folder, files=files, **options)


def is_given(value: Any) -> bool:
    """Whether an argument was given: it is neither None nor an empty text."""
    return value is not None and not (isinstance(value, str | Path) and not str(value))


def open_dataset(
    data: Any,
    data_dir: str | Path = "",
    *,
    labels: Any = "",
    holdout: float = 0.0,
    on_error: str = "skip",
    limit: int = 0,
    mirror: bool = True,
    normalization: str = "data",
) -> Dataset:
    """The data set of this name (in `data_dir`), of this folder, or of images in memory; UserError if it is none.

    Images in memory are an array or tensor, an ImageSet, a list of image files, an object with `__len__` and
    `__getitem__` (a torch Dataset, a Hugging Face Dataset, a list of images), or a mapping of these with the keys train
    and test. `labels`: for a folder "folders" or a CSV file, for images in memory one per image, or a mapping of names
    to labels. `holdout`: share of the labeled images that become test images. `on_error`: skip or refuse images that
    cannot be read. These three are for your own images.

    `limit`: at most this many images per split; 0: all. `mirror`: whether views may be mirrored. `normalization`: mean
    and std of the pixels: data, torchvision (ImageNet's), tensorflow, none, or numbers: 0.5,0.5,0.5/0.2,0.2,0.2.

    >>> data = mixnn.data.open_dataset("photos")
    >>> len(data.images())
    16
    """
    if isinstance(data, Dataset):
        return data
    if on_error not in ON_ERROR:
        raise unknown("on_error", on_error, ON_ERROR)
    read_normalization(normalization)
    if limit < 0:
        raise UserError(f"limit={limit}: limit must be at least 1, or 0 for all images")
    common: dict[str, Any] = {"limit": limit, "mirror": mirror, "normalization": normalization}
    options = common | {"on_error": on_error}
    if isinstance(data, list | tuple) and data and all(isinstance(path, str | Path) for path in data):
        return file_list_dataset(data, labels, holdout=holdout, **options)
    if not isinstance(data, str | Path):
        if is_given(labels) and isinstance(labels, str | Path):
            raise UserError(f"{setting('labels', str(labels))} is for folders of images: give one label per image")
        return memory_dataset(data, labels if is_given(labels) else None, holdout, **options)
    if not isinstance(labels, str | Path):
        raise UserError(f"labels of {data} are 'folders' (subfolders are classes) or a CSV file, not a list")
    if is_shards(str(data)):
        if str(labels):
            raise UserError(f"{setting('labels')} is for folders of images: shards have their own labels")
        return shard_dataset(str(data), holdout=holdout, **options)
    folder = expand(data)
    if str(data) in DATASETS:
        if str(labels) or holdout or on_error != "skip":
            flags = f"{setting('labels')}, {setting('holdout')} and {setting('on_error')}"
            raise UserError(f"{flags} are for folders of images: {data} has its own labels")
        return named_dataset(str(data), data_dir, **common)
    if folder.is_dir():
        if holdout and not str(labels):
            raise UserError(f"{setting('holdout')} needs labels: add {setting('labels', 'folders')} or a CSV file")
        return FolderDataset(folder=folder.absolute(), labels=_absolute(labels), holdout=holdout, **options)
    if folder.exists():
        raise UserError(f"{folder} is a file\ngive the folder that holds the images, or one of: {', '.join(DATASETS)}")
    if folder.name != str(data):  # a path: data set names have no slash
        raise UserError(f"there is no folder {data}\ngive a folder of images, or one of: {', '.join(DATASETS)}")
    raise UserError(f"{unknown('data set or folder', str(data), DATASETS)}, or a folder of images (see: mixnn data)")


def named_dataset(name: str, data_dir: str | Path = "", **options: Any) -> NamedDataset:
    return NamedDataset(spec=DATASETS[name], root=data_root(data_dir), **options)


def configured_dataset(config: Config) -> Dataset:
    """The data set a run was configured with. It may be gone: `check` says so."""
    options: dict[str, Any] = {"limit": config.limit, "mirror": config.mirror == "yes"}
    options["normalization"] = config.normalization
    if config.data in DATASETS:
        return named_dataset(config.data, config.data_dir, **options)
    if is_shards(config.data):
        return ShardDataset(shards=config.data, holdout=config.holdout, on_error=config.on_error, **options)
    options |= {"labels": config.labels, "holdout": config.holdout, "on_error": config.on_error}
    return FolderDataset(folder=Path(config.data), **options)


def open_images(source: Any, data_dir: str | Path = "", split: str = "all") -> Images:
    """The images of a folder, of files, of a named data set, or of data in memory: one split of them, train or test.

    Without a split: all images of a folder, also those in train/ and test/, otherwise the training images.

    >>> mixnn.data.open_images("photos").names[:2]
    ['cat0.png', 'cat1.png']
    """
    if isinstance(source, Images):
        return source
    if isinstance(source, list | tuple) and all(isinstance(path, str | Path) for path in source):
        return _list_files([expand(path) for path in source], split)
    if not isinstance(source, str | Path):
        return open_dataset(source).images(split)
    path = expand(source)
    if str(source) in DATASETS:
        return named_dataset(str(source), data_dir).images(split)
    if is_shards(str(source)):
        return shard_dataset(str(source)).images(split)
    if path.is_file():
        return _list_files([path], split)
    if not path.is_dir():
        raise UserError(
            f"{source} is not a folder, an image file or a data set (`{calling('data')}` lists the data sets)"
        )
    return FolderDataset(folder=path.absolute()).images(split)


def _list_files(paths: list[Path], split: str) -> Images:
    if split == "test":
        raise UserError("a list of files has no test images: give the test images alone, without a split")
    return list_files(_existing(paths))


def _existing(paths: list[Path]) -> list[Path]:
    """The paths; UserError unless all are files."""
    for path in paths:
        if not path.is_file():
            several = ": give one folder, or several image files" if path.is_dir() else ""
            raise UserError(f"{path} is {'a folder' if path.is_dir() else 'not a file'}{several}")
    return paths


def is_in_memory(data: str) -> bool:
    """Whether `config.data` stands for images in memory or a list of files, which must be given again to be used."""
    return re.fullmatch(rf"({IMAGES}|{FILES}|arrays)-[0-9a-f]{{{DIGITS}}}", data) is not None


def _absolute(labels: str | Path) -> str:
    return str(labels) if str(labels) in ("", "folders") else str(expand(labels).absolute())


def load(
    data: Any,
    split: str,
    data_dir: str | Path = "",
    *,
    size: int = 0,
    labels: Any = "",
    holdout: float = 0.0,
    on_error: str = "skip",
    limit: int = 0,
    mirror: bool = True,
    normalization: str = "data",
) -> ImageSet:
    """One split of any data in memory: load("digits", "train"), load("./photos", "pretrain", size=32).

    A split is pretrain, train or test. `size` is the side to decode your own images to; 0: 64 pixels. The other
    parameters are those of `open_dataset`.

    >>> train = mixnn.data.load("digits", "train")
    >>> train.images.shape
    torch.Size([1297, 3, 8, 8])
    """
    if size < 0:
        raise UserError(f"size={size}: size must be at least 1")
    if size and isinstance(data, str | Path) and str(data) in DATASETS:
        raise UserError(f"size is for folders of images: {data} has its own")
    dataset = open_dataset(
        data,
        data_dir,
        labels=labels,
        holdout=holdout,
        on_error=on_error,
        limit=limit,
        mirror=mirror,
        normalization=normalization,
    )
    return dataset.load(split, size)
