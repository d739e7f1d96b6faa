"""Folders of images: which files are there, which split each belongs to, and all of them as one ImageSet."""

from __future__ import annotations

import hashlib
import os
import re
import statistics
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from mixnn.config import UserError, setting
from mixnn.data.cache import decoded
from mixnn.data.decode import Decoded, FileInfo
from mixnn.data.image_set import UNLABELED, FolderSummary, ImageSet, Triple, channel_stats
from mixnn.data.stored import StoredImages
from mixnn.progress import NAMED, plural

EXTENSIONS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"}
# Pictures in formats that are not supported.
UNSUPPORTED = {".heic", ".heif", ".avif", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2"}
TEST_FOLDERS = ("test", "val")  # the first of these that exists next to train/ holds the test images
DIGITS = re.compile("[0-9]+")
SIGNATURES = re.compile(  # first bytes of an image file -> the ending that its name should have
    rb"(?P<jpg>\xff\xd8\xff)|(?P<png>\x89PNG)|(?P<gif>GIF8)|(?P<webp>RIFF....WEBP)",
    re.DOTALL,  # TIFF: many formats
)
MAX_OPENED = 20  # files with one unknown ending that are opened to see whether they are images
MAX_OPENED_IN_ALL = 200
STATS_SAMPLE = 2048  # images used for mean and std, spread evenly over the training images


@dataclass(frozen=True)
class Listing:
    """The image files of a folder, as names relative to it."""

    folder: Path
    test: str  # name of the test folder; "" if the folder has no train/ and test/ (or val/)
    training: list[str]
    testing: list[str]
    everything: list[str]  # these, and images outside train/ and test/
    skipped: list[tuple[str, str]]  # (name, reason)

    def names(self, split: str) -> list[str]:
        """The names of one split, or of all images; UserError if there are none."""
        if split == "test" and not (self.test or self.testing):
            hint = f"make the folders {self.folder}/train and {self.folder}/test, and train with {setting('labels')}"
            raise UserError(f"{self.folder} has no test images\nto provide some, {hint}")
        names = {"test": self.testing, "all": self.everything}.get(split, self.training)
        if not names:
            place = self.folder / ("" if not self.test or split == "all" else self.test if split == "test" else "train")
            endings = " ".join(sorted(EXTENSIONS))
            raise UserError(f"no images in {place}\ngive a folder with files that end in {endings}")
        return names


def list_splits(folder: Path) -> Listing:
    """All images, or those below train/ and test/ (or val/) if both exist."""
    names, skipped = list_images(folder)
    for test in TEST_FOLDERS:
        if (folder / "train").is_dir() and (folder / test).is_dir():
            training = [name for name in names if name.startswith("train/")]
            testing = [name for name in names if name.startswith(f"{test}/")]
            return Listing(folder, test, training, testing, names, skipped)
    return Listing(folder, "", names, [], names, skipped)


def hold_out(listing: Listing, label_of: Mapping[str, str], share: float) -> Listing:
    """Move a share of the labeled images of every class from training to testing."""
    if listing.test:
        raise UserError(
            f"{listing.folder} has test images of its own, in {listing.test}/: leave out {setting('holdout')}"
        )
    held = held_out_names(label_of, share)
    training = [name for name in listing.training if name not in held]
    return replace(listing, training=training, testing=[name for name in listing.training if name in held])


def held_out_names(label_of: Mapping[str, str], share: float) -> set[str]:
    """A share of the labeled images of every class: at least one, and never all. It depends only on their names."""
    classes: dict[str, list[str]] = {}
    for name in sorted(label_of, key=lambda name: hashlib.sha256(name.encode()).digest()):
        classes.setdefault(label_of[name], []).append(name)
    held: set[str] = set()
    for names in classes.values():
        held |= set(names[: min(len(names) - 1, max(1, round(share * len(names))))])
    if classes and not held:
        raise UserError(f"{setting('holdout')} needs two images of a class: here, each class has one labeled image")
    return held


def list_images(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Names of the image files in natural order, and pictures that cannot be used, with reasons.

    Hidden files and folders are left out.
    """
    names: list[str] = []
    skipped: list[tuple[str, str]] = []
    visited: set[tuple[int, int]] = set()
    others: Counter[str] = Counter()  # files that are no images, by their ending

    def fail(error: OSError) -> None:
        skipped.append((printable(_relative(Path(error.filename), folder)), error.strerror or "cannot be read"))

    for place, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        # links are followed, but no folder is entered twice: neither a loop nor a second link can repeat images
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=natural_key)
        above = _relative(Path(place), folder)
        prefix = "" if above == "." else f"{above}/"  # paths as objects would take a minute for a million files
        for file in files:
            extension = "" if file.startswith(".") else os.path.splitext(file)[1].lower()
            if extension in EXTENSIONS:
                names.append(prefix + file)
            elif extension in UNSUPPORTED:
                skipped.append((printable(prefix + file), f"{extension} is not supported: convert it to JPEG or PNG"))
            elif not file.startswith(".") and others[extension] < MAX_OPENED and others.total() < MAX_OPENED_IN_ALL:
                if kind := _kind_of_image(os.path.join(place, file)):
                    reason = f"an image whose name does not say so: rename it to end in .{kind}"
                    skipped.append((printable(prefix + file), reason))
                else:
                    others[extension] += 1
    skipped += [(printable(name), "its name is not valid Unicode") for name in names if printable(name) != name]
    return sorted((name for name in names if printable(name) == name), key=natural_key), skipped


def _kind_of_image(path: str) -> str:
    """The usual ending of an image, by its first bytes; empty for any other file."""
    try:
        if not os.path.isfile(path):  # a pipe would block
            return ""
        with open(path, "rb") as file:
            found = SIGNATURES.match(file.read(12))
    except OSError:
        return ""
    return found.lastgroup or "" if found else ""


def natural_key(name: str) -> tuple[str, str]:
    """Sort key that puts 2.png before 10.png, and upper and lower case together.

    Each number is preceded by its number of digits, and by a character that is smaller than any in a name.
    """
    return DIGITS.sub(_number_key, name.casefold()), name


def _number_key(found: re.Match[str]) -> str:
    """Key that sorts as the number does; int() refuses more than 4,300 digits."""
    digits = found[0].lstrip("0")
    return f"\0{chr(len(digits))}{digits}"


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def printable(name: str) -> str:
    """The name with undecodable bytes escaped: terminals, CSV and JSON files cannot hold surrogates."""
    return name.encode("utf-8", "backslashreplace").decode()


def load_folder(listing: Listing, split: str, size: int, label_of: Mapping[str, str], on_error: str) -> ImageSet:
    """One split of a folder, decoded to size x size; `names` are relative to the folder.

    `label_of` has the labels of both splits, so that train and test number their classes alike.
    """
    chosen = listing.names(split)
    found = decoded(listing.folder, chosen, size)
    stats = _stats(listing, readable_names(chosen, found), found.images)
    classes = sorted_classes(label_of)
    return make_image_set(chosen, found, stats, label_of, classes, listing.skipped, on_error, str(listing.folder))


def make_image_set(
    chosen: Sequence[str],
    found: Decoded,
    stats: tuple[Triple, Triple],
    label_of: Mapping[str, str],
    classes: list[str],
    skipped: list[tuple[str, str]],
    on_error: str,
    place: str,
) -> ImageSet:
    """The images of `chosen` that could be decoded; UserError if none could, or if `on_error` refuses the others.

    `skipped`: images that are known to be unreadable already. `place`: where they all come from, for messages.
    """
    names = readable_names(chosen, found)
    skipped = skipped + [(n, why) for n, why in zip(chosen, found.infos, strict=True) if isinstance(why, str)]
    if not names or (skipped and on_error == "refuse"):
        raise _unreadable(place, skipped, every=not names)
    number = {label: i for i, label in enumerate(classes)}
    targets = torch.tensor([number[label_of[name]] if name in label_of else UNLABELED for name in names])
    summary = summarize(names, [info for info in found.infos if isinstance(info, FileInfo)], len(skipped))
    images = found.images if isinstance(found.images, StoredImages) else _as_tensor(found.images)
    return ImageSet(images, targets, names, classes, *stats, True, skipped, summary)


def _as_tensor(images: np.ndarray | torch.Tensor) -> torch.Tensor:
    """A tensor without a copy, even of an array that is read-only: nothing writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(images)


def readable_names(chosen: Sequence[str], found: Decoded) -> list[str]:
    return [name for name, info in zip(chosen, found.infos, strict=True) if isinstance(info, FileInfo)]


def sorted_classes(*label_of: Mapping[str, str]) -> list[str]:
    """All labels in natural order, each once."""
    return sorted({label for labels in label_of for label in labels.values()}, key=natural_key)


def _stats(listing: Listing, names: list[str], images: np.ndarray | StoredImages) -> tuple[Triple, Triple]:
    """Mean and std of the training images, which also normalize the test images."""
    found = sample_stats(listing.training, names, images)
    if found is None:  # test images
        training = decoded(listing.folder, listing.training, images.shape[-1])  # cached by the training itself
        found = sample_stats(listing.training, readable_names(listing.training, training), training.images)
    return found or channel_stats(_as_tensor(images[:]))


def sample_stats(
    training: Sequence[str], names: Sequence[str], images: np.ndarray | StoredImages
) -> tuple[Triple, Triple] | None:
    """Mean and std of an even sample of the training images; None if none of it is among the named images."""
    sample = set(training[:: -(-len(training) // STATS_SAMPLE) or 1])
    rows = [i for i, name in enumerate(names) if name in sample]
    return channel_stats(_as_tensor(images[rows])) if rows else None


def _unreadable(place: str, skipped: list[tuple[str, str]], every: bool) -> UserError:
    lines = [f"  {name}: {reason}" for name, reason in skipped[:NAMED]]
    if len(skipped) > NAMED:
        lines.append(f"  and {len(skipped) - NAMED} more")
    if every:
        return UserError("\n".join([f"none of the images in {place} can be read:", *lines]))
    hint = f"repair or remove them, or leave them out with {setting('on_error', 'skip')}"
    return UserError("\n".join([f"{plural(len(skipped), 'file')} in {place} cannot be read:", *lines, hint]))


def summarize(names: Sequence[str], infos: Sequence[FileInfo], num_skipped: int) -> FolderSummary:
    """Sizes, modes and exact duplicates of the files that could be read."""
    sides = [min(f.width, f.height) for f in infos]
    groups: dict[str, list[str]] = {}
    counts = Counter(f.digest for f in infos)
    for name, f in zip(names, infos, strict=True):
        if counts[f.digest] > 1:
            groups.setdefault(f.digest, []).append(name)
    copies = [*groups.values()]
    modes = dict(Counter(f.mode for f in infos).most_common())
    spread = min(sides), round(statistics.median(sides)), max(sides)
    digest = hashlib.sha256("".join(f.digest for f in infos).encode()).hexdigest()[:32]
    return FolderSummary(len(infos), spread, modes, copies, num_skipped, digest)
