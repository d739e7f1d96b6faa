"""A folder of the user's own images, of any size and format, with or without labels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mixnn.config import UserError, setting, unknown
from mixnn.data.cache import decoded
from mixnn.data.decode import Facts, decode_all
from mixnn.data.image_set import UNLABELLED, ImageSet, Triple, channel_stats
from mixnn.data.labels import from_csv, from_folders
from mixnn.data.listing import Listing, list_splits, natural_key
from mixnn.data.scan import scan
from mixnn.progress import NAMED, plural

ON_ERROR = ("skip", "refuse")
SIZE = 64
STATS_SAMPLE = 2048  # images that mean and std are taken from, spread evenly over the training images


def read_folder(
    folder: Path,
    split: str,
    *,
    size: int = SIZE,
    labels: str | Path | None = None,  # None, "folders" or a CSV file
    on_error: str = "skip",
    mirror: bool = True,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> ImageSet:
    """The images below a folder as size x size; `names`, and the names in a CSV, are relative to the folder."""
    if on_error not in ON_ERROR:
        raise unknown("on_error", on_error, ON_ERROR)
    if size < 1:
        raise UserError(f"size is {size}, but must be at least 1")
    listing = list_splits(folder)
    chosen = listing.names(split)
    label_of = given_labels(listing, labels)
    images, found = decoded(folder, chosen, size, progress)
    facts = {name: fact for name, fact in zip(chosen, found, strict=True) if isinstance(fact, Facts)}
    names = list(facts)
    skipped = listing.skipped + [(n, why) for n, why in zip(chosen, found, strict=True) if isinstance(why, str)]
    if not names or (skipped and on_error == "refuse"):
        raise unreadable(folder, skipped, every=not names)
    classes = sorted(set(label_of.values()), key=natural_key)
    targets = numbered(names, label_of, classes)
    mean, std = stats(listing, names, images)
    about = scan(names, list(facts.values()), len(skipped))
    return ImageSet(as_tensor(images), targets, names, classes, mean, std, mirror, skipped, about)


def as_tensor(images: np.ndarray) -> torch.Tensor:
    """Without a copy, also of a mapped file: its pages are read when they are used, and nothing here writes to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(images)


def given_labels(listing: Listing, labels: str | Path | None) -> dict[str, str]:
    """Name -> label, over both splits: so train and test number their classes alike."""
    names = listing.training + listing.testing
    if labels is None:
        return {}
    if labels == "folders":
        return from_folders(names, depth=1 if listing.test else 0)
    return from_csv(Path(labels).expanduser(), names)


def numbered(names: list[str], label_of: dict[str, str], classes: list[str]) -> torch.Tensor:
    rank = {label: i for i, label in enumerate(classes)}
    return torch.tensor([rank[label_of[name]] if name in label_of else UNLABELLED for name in names])


def stats(listing: Listing, names: list[str], images: np.ndarray) -> tuple[Triple, Triple]:
    """Mean and std of the training images, so that the test images are normalised like them."""
    step = -(-len(listing.training) // STATS_SAMPLE) or 1
    sample = set(listing.training[::step])
    at = [i for i, name in enumerate(names) if name in sample]
    if at:
        return channel_stats(torch.from_numpy(images[at]))
    fresh, reasons = decode_all([listing.folder / name for name in sorted(sample)], images.shape[-1])
    fresh = np.delete(fresh, list(reasons), axis=0)
    return channel_stats(torch.from_numpy(fresh if len(fresh) else np.array(images)))


def unreadable(folder: Path, skipped: list[tuple[str, str]], every: bool) -> UserError:
    lines = [f"  {name}: {reason}" for name, reason in skipped[:NAMED]]
    if len(skipped) > NAMED:
        lines.append(f"  and {len(skipped) - NAMED} more")
    if every:
        return UserError("\n".join([f"none of the images in {folder} can be read:", *lines]))
    hint = f"repair or remove them, or leave them out with {setting('on_error', 'skip')}"
    return UserError("\n".join([f"{plural(len(skipped), 'file')} in {folder} cannot be read:", *lines, hint]))
