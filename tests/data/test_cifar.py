import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mixnn.config import UserError
from mixnn.data import DATASETS
from mixnn.data.cifar import CIFAR10, CIFAR100, PIXELS, Cifar, read

SMALL10 = replace(CIFAR10, files={"train": {f"data_batch_{i}": 4 for i in range(1, 6)}, "test": {"test_batch": 3}})
SMALL100 = replace(CIFAR100, files={"train": {"train": 6}, "test": {"test": 3}})


def write(root: Path, spec: Cifar, layout: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """All files of a set in one layout, with random contents; returns the images and labels of each split."""
    rng = np.random.default_rng(0)
    folder = root / (spec.binary if layout == "binary" else spec.python)
    folder.mkdir()
    written: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for split, files in spec.files.items():
        images = rng.integers(0, 256, (sum(files.values()), PIXELS), np.uint8)
        labels = rng.integers(0, spec.num_classes, len(images))
        written[split], start = (images, labels), 0
        for stem, count in files.items():
            write_file(folder, spec, layout, stem, images[start : start + count], labels[start : start + count])
            start += count
    return written


def write_file(folder: Path, spec: Cifar, layout: str, stem: str, images: np.ndarray, labels: np.ndarray) -> None:
    if layout == "binary":
        coarse = np.full((len(labels), spec.label_bytes - 1), 99)
        records = np.concatenate([coarse, labels[:, None], images], axis=1).astype(np.uint8)
        (folder / f"{stem}.bin").write_bytes(records.tobytes())
    else:
        batch = {"data": images, spec.label_key.decode(): labels.tolist(), "filenames": ["x.png"] * len(labels)}
        (folder / stem).write_bytes(pickle.dumps(batch, protocol=2))


@pytest.mark.parametrize("layout", ["binary", "python"])
@pytest.mark.parametrize("spec", [SMALL10, SMALL100], ids=["10", "100"])
def test_both_layouts_give_the_images_and_fine_labels_in_file_order(tmp_path: Path, spec: Cifar, layout: str):
    written = write(tmp_path, spec, layout)
    folder = tmp_path / (spec.binary if layout == "binary" else spec.python)
    for split, part in [("pretrain", "train"), ("train", "train"), ("test", "test")]:
        images, labels, classes = read(spec, folder, split)
        np.testing.assert_array_equal(images, written[part][0].reshape(-1, 3, 32, 32))
        np.testing.assert_array_equal(labels, written[part][1])
        assert len(classes) == spec.num_classes


def test_class_names_are_read_from_the_file_next_to_the_images(tmp_path: Path):
    names = [f"class{i}" for i in range(10)]
    write(tmp_path, SMALL10, "binary")
    write(tmp_path, SMALL10, "python")
    (tmp_path / SMALL10.binary / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
    (tmp_path / SMALL10.python / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, protocol=2))
    assert read(SMALL10, tmp_path / SMALL10.binary, "test")[2] == names
    assert read(SMALL10, tmp_path / SMALL10.python, "test")[2] == names


@pytest.mark.parametrize("names", [None, 3, [b"\xff"] * 10, "abc"])
def test_damaged_class_names_cost_no_more_than_the_names(tmp_path: Path, names: object):
    write(tmp_path, SMALL10, "python")
    (tmp_path / SMALL10.python / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, protocol=2))
    classes = read(SMALL10, tmp_path / SMALL10.python, "test")[2]
    assert classes in ([str(i) for i in range(10)], ["\ufffd"] * 10)


@pytest.mark.parametrize("label", [10, -1, 10**30])
def test_labels_outside_the_classes_are_refused(tmp_path: Path, label: int):
    write(tmp_path, SMALL10, "python")
    batch = {"data": np.zeros((3, PIXELS), np.uint8), "labels": [1, label, 2]}
    (tmp_path / SMALL10.python / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(UserError, match=r"labels outside 0\.\.9"):
        read(SMALL10, tmp_path / SMALL10.python, "test")


def test_a_malicious_batch_is_refused_by_name_and_not_executed(tmp_path: Path):
    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'created'}",)

    write(tmp_path, SMALL10, "python")
    path = tmp_path / SMALL10.python / "data_batch_2"
    path.write_bytes(pickle.dumps({"data": Attack(), "labels": [0]}, protocol=2))
    with pytest.raises(UserError, match=r"data_batch_2 was refused: it contains .*system"):
        read(SMALL10, tmp_path / SMALL10.python, "train")
    assert not (tmp_path / "created").exists()


def test_a_batch_with_too_few_images_or_labels_is_damaged(tmp_path: Path):
    write(tmp_path, SMALL10, "python")
    folder = tmp_path / SMALL10.python
    for images, labels in [(3, 4), (4, 3)]:
        batch = {"data": np.zeros((images, PIXELS), np.uint8), "labels": [0] * labels}
        (folder / "data_batch_5").write_bytes(pickle.dumps(batch, protocol=2))
        with pytest.raises(UserError, match=r"data_batch_5 is damaged: expected 4(.|\n)*mixnn\.data\.get\('cifar10'"):
            read(SMALL10, folder, "train")


@pytest.mark.parametrize("layout", ["binary", "python"])
def test_a_label_outside_the_classes_is_damage(tmp_path: Path, layout: str):
    write(tmp_path, SMALL10, layout)
    folder = tmp_path / (SMALL10.binary if layout == "binary" else SMALL10.python)
    write_file(folder, SMALL10, layout, "test_batch", np.zeros((3, PIXELS), np.uint8), np.array([1, 10, 1]))
    with pytest.raises(UserError, match=r"labels outside 0..9"):
        read(SMALL10, folder, "test")


def test_the_official_files_have_the_official_sizes():
    sizes = {**DATASETS["cifar10"].layouts[0], **DATASETS["cifar100"].layouts[0]}
    assert sizes["cifar-10-batches-bin/data_batch_5.bin"] == sizes["cifar-10-batches-bin/test_batch.bin"] == 30_730_000
    assert sizes["cifar-100-binary/train.bin"] == 153_700_000
    assert sizes["cifar-100-binary/test.bin"] == 30_740_000
