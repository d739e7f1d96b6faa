"""Shards give what a folder with the same images gives: pixels, labels, runs."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mixnn
from mixnn.config import UserError
from mixnn.data import cache, open_dataset, open_images, to_folder
from mixnn.data.shards import expand_ranges
from mixnn.progress import Reporter

LABELS = [("dog", "cat")[i % 2] for i in range(20)]
WORDS = {"epochs": 1, "batch_size": 8, "bn_groups": 2, "backbone": "resnet8", "init_from": "none", "warmup_epochs": 0}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIXNN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


def write_tars(folder: Path, pixels: np.ndarray, per_file: int = 8) -> str:
    """Shards as WebDataset writes them: the files of a sample follow each other."""
    for number, start in enumerate(range(0, len(pixels), per_file)):
        with tarfile.open(folder / f"train-{number:03}.tar", "w") as archive:
            for i in range(start, min(start + per_file, len(pixels))):
                parts = {"cls": LABELS[i].encode(), "json": json.dumps({"i": i}).encode(), "png": png(pixels[i])}
                for ending, content in parts.items():
                    member = tarfile.TarInfo(f"./part/{i:05}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return f"wds:{folder}/train-{{000..{number:03}}}.tar"


def test_ranges_stand_for_names():
    assert [*expand_ranges("a-{08..10}.tar")] == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert [*expand_ranges("{1..2}/{0..1}")] == ["1/0", "1/1", "2/0", "2/1"]


def test_tar_shards_hold_what_was_written(tmp_path: Path, pixels: np.ndarray):
    dataset = open_dataset(write_tars(tmp_path, pixels))
    for _ in range(2):  # decoded, then from the cache
        images = dataset.load("pretrain", 8)
        assert np.array_equal(images.images[:].numpy(), pixels.transpose(0, 3, 1, 2))
        assert [images.classes[y] for y in images.labels.tolist()] == LABELS
        dataset = open_dataset(dataset.name)
    listed = open_images(dataset.name)
    assert len(listed) == 20
    assert np.array_equal(np.asarray(listed.open(13)), pixels[13])


def test_images_of_shards_are_decoded_a_chunk_at_a_time(
    tmp_path: Path, pixels: np.ndarray, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cache, "CHUNK", 6)
    monkeypatch.setattr(cache, "MEMORY_SHARE", 0.0)
    images = open_dataset(write_tars(tmp_path, pixels)).load("pretrain", 8)
    assert type(images.images).__name__ == "StoredImages"
    assert np.array_equal(images.images[:].numpy(), pixels.transpose(0, 3, 1, 2))


def test_a_run_on_shards_is_the_run_on_images_in_memory(tmp_path: Path, pixels: np.ndarray):
    shards = write_tars(tmp_path, pixels)
    run = mixnn.pretrain(shards, out=tmp_path / "run", **WORDS)
    other = mixnn.pretrain(pixels, out=tmp_path / "other", **WORDS)
    assert run.metrics()[-1]["loss"] == pytest.approx(other.metrics()[-1]["loss"], rel=1e-5)
    again = mixnn.pretrain(resume=tmp_path / "run", epochs=2)
    assert again.config.data == shards
    assert mixnn.embed(again, out=tmp_path / "vectors.npz").vectors.shape[0] == 20


def test_some_images_of_shards_can_be_held_out(tmp_path: Path, pixels: np.ndarray):
    dataset = open_dataset(write_tars(tmp_path, pixels), holdout=0.2)
    train, test = dataset.load("train", 8), dataset.load("test", 8)
    assert (len(train), len(test)) == (16, 4)
    everything = torch.cat([train.images[:], test.images[:]]).flatten(1)
    assert len(everything.unique(dim=0)) == 20


def test_embed_holds_out_the_same_images_of_shards_as_training(tmp_path: Path, pixels: np.ndarray):
    run = mixnn.pretrain(write_tars(tmp_path, pixels), holdout=0.2, out=tmp_path / "run", **WORDS)
    train, test = (mixnn.embed(run.path, split=split).names for split in ("train", "test"))
    assert (len(train), len(test)) == (16, 4)
    assert test == run.dataset().load("test", 8).names
    assert len(mixnn.embed(run.path)) == 20


def test_a_run_whose_shards_are_gone_is_still_reported_and_exported(tmp_path: Path, pixels: np.ndarray):
    run = mixnn.pretrain(write_tars(tmp_path, pixels), holdout=0.2, out=tmp_path / "run", **WORDS)
    for file in tmp_path.glob("*.tar"):
        file.unlink()
    page = mixnn.report(run, verbose=Reporter(quiet=True))
    assert "No map and no neighbors" in page.read_text()
    assert mixnn.load(mixnn.export(run)).num_features == mixnn.load(run).num_features
    with pytest.raises(UserError, match=r"train-000.tar is missing"):
        mixnn.embed(run)


def test_an_image_that_cannot_be_read_is_left_out(tmp_path: Path, pixels: np.ndarray):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in {"1.png": png(pixels[0]), "2.png": b"no picture", "3.png": png(pixels[1])}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    images = open_dataset(f"wds:{tmp_path}/a.tar").load("pretrain", 8)
    assert (len(images), [name for name, _ in images.skipped]) == (2, ["1"])


@pytest.mark.parametrize(
    ("name", "says"),
    [("wds:nothing-{0..2}.tar", "nothing-0.tar is missing"), ("hf:nowhere", "there are no .arrow or .parquet files")],
)
def test_shards_that_are_missing_are_named(name: str, says: str):
    with pytest.raises(UserError, match=says):
        open_dataset(name)


def test_a_compressed_tar_file_is_refused(tmp_path: Path):
    (tmp_path / "a.tar").write_bytes(b"\x1f\x8b" + bytes(600))
    with pytest.raises(UserError, match="not compressed"):
        open_dataset(f"wds:{tmp_path}/a.tar")


def test_what_webdataset_writes_is_read(tmp_path: Path, pixels: np.ndarray):
    webdataset = pytest.importorskip("webdataset")
    with webdataset.ShardWriter(f"{tmp_path}/own-%03d.tar", maxcount=8, verbose=False) as writer:
        for i, image in enumerate(pixels):
            writer.write({"__key__": f"sample{i:04}", "png": Image.fromarray(image), "cls": LABELS[i]})
    images = open_dataset(f"wds:{tmp_path}/own-{{000..002}}.tar").load("pretrain", 8)
    assert np.array_equal(images.images[:].numpy(), pixels.transpose(0, 3, 1, 2))
    assert [images.classes[y] for y in images.labels.tolist()] == LABELS


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_what_hugging_face_writes_is_read(tmp_path: Path, pixels: np.ndarray, kind: str):
    datasets = pytest.importorskip("datasets")
    to_folder(pixels, tmp_path / "files")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [{"bytes": png(image), "path": None} for image in pixels], "label": LABELS}
    made = datasets.Dataset.from_dict(rows, features=features)
    if kind == "saved":
        made.save_to_disk(tmp_path / "shards", num_shards=3)
    else:
        (tmp_path / "shards").mkdir()
        for i in range(3):
            made.shard(3, i, contiguous=True).to_parquet(tmp_path / "shards" / f"{i}.parquet")
    images = open_dataset(f"hf:{tmp_path}/shards").load("pretrain", 8)
    assert np.array_equal(images.images[:].numpy(), pixels.transpose(0, 3, 1, 2))
    assert [images.classes[y] for y in images.labels.tolist()] == LABELS
