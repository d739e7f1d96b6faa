"""embed and load: vectors are those of the network, each under its file's name, in every file format."""

import csv
import json
import os
import shutil
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import mixnn
from mixnn.apps import embed as embedding
from mixnn.apps import embeddings as store
from mixnn.apps.embed import load_or_encode
from mixnn.cli import command, main
from mixnn.data import open_images
from mixnn.data.decode import decode
from mixnn.data.images import to_image
from mixnn.evaluation.features import features
from mixnn.progress import Reporter
from mixnn.runs import Run, encoder
from mixnn.runs.encoder import enlarged
from mixnn.runs.weights import STUDENT, load_backbone

QUIET = Reporter(quiet=True)
SIZE = 16
ODD = ["a b.png", "ü/ñ.png", "<img src=x onerror=alert(1)>.png", "z,\"q'.png"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name in [*(f"{i}.png" for i in range(20)), *ODD]:
        path = place / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (SIZE, SIZE + 4, 3), dtype=np.uint8)).save(path)
    (place / "5.png").write_bytes(b"")
    (place / "broken.jpg").write_bytes(b"nothing")
    return place


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    os.environ["MIXNN_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    settings = {"epochs": 1, "batch_size": 8, "image_size": SIZE, "options": {"hidden": 8, "dim": 8, "support_size": 8}}
    return mixnn.pretrain(folder, out=tmp_path_factory.mktemp("runs") / "run", verbose=QUIET, **settings)


@pytest.fixture(scope="module")
def expected(run, folder):
    """Name -> vector, one image at a time."""
    encoder = mixnn.load(run, device="cpu")
    names = [n for n in open_images(folder).names if n not in ("5.png", "broken.jpg")]
    with torch.no_grad():
        return {n: encoder(torch.tensor(decode(folder / n, SIZE))[None])[0].numpy() for n in names}


def same(names, vectors, expected):
    assert list(names) == list(expected)
    np.testing.assert_allclose(vectors, np.stack(list(expected.values())), atol=1e-5)
    assert vectors.dtype == np.float32


def test_the_encoder_is_the_students_backbone_with_its_normalization(run):
    encoder = mixnn.load(run.path, device="cpu")
    images = mixnn.data.load(run.config.data, "train", size=SIZE)
    backbone, _ = load_backbone(run)
    with torch.no_grad():
        torch.testing.assert_close(encoder(images.images), features(backbone, images), rtol=1e-5, atol=1e-5)
    assert not encoder.training
    assert not any(p.requires_grad for p in encoder.parameters())


@pytest.mark.parametrize("batch", [1, 7, 256])
def test_npz(run, folder, expected, tmp_path, batch, monkeypatch):
    monkeypatch.setattr(encoder, "BATCH", batch)
    path = mixnn.embed(run, folder, tmp_path / "x.npz", device="cpu", verbose=QUIET).path
    with np.load(path, allow_pickle=False) as archive:
        assert archive.files == ["vectors", "file", "skipped", "about"]
        assert all(isinstance(archive[key], np.ndarray) for key in archive.files)
        same(archive["file"].tolist(), archive["vectors"], expected)
        assert json.loads(archive["about"].item())["image_size"] == SIZE
    back = store.read(path)
    same(back.names, back.vectors, expected)
    assert dict(back.skipped) == {"5.png": "empty file", "broken.jpg": "not an image that Pillow can read"}
    assert back.about["run"] == "run"
    np.testing.assert_allclose(np.linalg.norm(back.unit(), axis=1), 1, atol=1e-6)


def test_nothing_is_written_without_a_path_and_the_command_writes_into_the_run_folder(
    run, folder, expected, tmp_path, capsys
):
    copy = Run.open(shutil.copytree(run.path, tmp_path / "copy"))
    found = mixnn.embed(copy, folder, device="cpu", verbose=QUIET)
    same(found.names, found.vectors, expected)
    assert found.path is None
    assert not (copy.path / "embeddings.npz").exists()
    assert main(["embed", str(copy.path), str(folder), "--device", "cpu", "--quiet"]) == 0
    assert capsys.readouterr().out == f"{copy.path / 'embeddings.npz'}\n"
    same(store.read(copy.path / "embeddings.npz").names, found.vectors, expected)


@pytest.mark.parametrize("name", ["x.npz", "x.csv", ""])
def test_many_vectors_stay_on_the_disk_and_are_the_same(run, folder, expected, tmp_path, monkeypatch, name):
    monkeypatch.setattr(embedding, "MAX_CACHED", 3)
    monkeypatch.setattr(embedding, "WRITE_BATCH", 5)
    copy = Run.open(shutil.copytree(run.path, tmp_path / "copy"))
    shutil.rmtree(copy.path / "embeddings", ignore_errors=True)
    out = tmp_path / name if name else ""
    found = mixnn.embed(copy, folder, out, device="cpu", verbose=QUIET)
    assert isinstance(found.vectors, np.memmap)
    same(found.names, found.vectors, expected)
    assert not (copy.path / "embeddings").exists()
    if name == "x.csv":
        with open(out, newline="", encoding="utf-8") as file:
            assert [row[0] for row in csv.reader(file)][1:] == found.names


def test_files_of_earlier_versions_are_read(tmp_path):
    """They called the names `names` and held their metadata as about.json."""
    path, about = tmp_path / "old.npz", {"run": "run", "checkpoint": "step-00000001.safetensors"}
    vectors = np.arange(4, dtype=np.float32).reshape(2, 2)
    np.savez(path, vectors=vectors, names=np.array(["a.png", "b.png"]), skipped=np.array(["c.png\tempty file"]))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("about.json", json.dumps(about))
    found = store.read(path)
    assert (found.names, found.skipped, found.about) == (["a.png", "b.png"], [("c.png", "empty file")], about)
    assert np.array_equal(found.vectors, vectors)


def test_a_full_disk_is_named_and_leaves_nothing(run, folder, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(mixnn.UserError, match=r"cannot write .*x.npz: No space left on device"):
        mixnn.embed(run, folder, tmp_path / "x.npz", device="cpu", verbose=QUIET)
    assert not [*tmp_path.iterdir()]


def test_the_help_explains_the_columns():
    text = " ".join(command("embed").parser.format_help().split())
    assert "columns file, f0, f1, ...: the numbers of the vector" in text
    assert "columns file, embedding" in text


def test_csv(run, folder, expected, tmp_path):
    path = mixnn.embed(run, folder, tmp_path / "x.csv", device="cpu", verbose=QUIET).path
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows[0][:2] == ["file", "f0"]
    same([row[0] for row in rows[1:]], np.array([row[1:] for row in rows[1:]], np.float32), expected)


def test_parquet(run, folder, expected, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = mixnn.embed(run, folder, tmp_path / "x.parquet", device="cpu", verbose=QUIET).path
    table = parquet.read_table(path).to_pydict()
    same(table["file"], np.array(table["embedding"], np.float32), expected)


def test_unreadable_files_are_named(run, folder, tmp_path, capfd):
    mixnn.embed(run, folder, tmp_path / "x.npz", device="cpu", verbose=Reporter())
    said = capfd.readouterr().err
    assert "skipped 5.png: empty file" in said
    assert "23 vectors" in said
    assert "; 2 files could not be read" in said


def test_a_link_that_leads_nowhere_is_skipped_and_no_name_steers_the_terminal(run, folder, tmp_path, capfd):
    images = tmp_path / "images"
    images.mkdir()
    shutil.copy(next(folder.rglob("*.png")), images / "a.png")
    (images / "nowhere\x1b[31m.png").symlink_to("gone.png")
    (images / "round.png").symlink_to("round.png")
    (images / "loop").symlink_to(".")
    found = load_or_encode(run, images, reporter=Reporter())
    assert found.names == ["a.png"]
    assert dict(found.skipped) == dict.fromkeys(["nowhere\x1b[31m.png", "round.png"], "a link that leads nowhere")
    said = capfd.readouterr().err
    assert "skipped nowhere\\x1b[31m.png: a link that leads nowhere" in said
    assert "\x1b[31m" not in said


def test_single_files_and_data_sets_are_sources_too(run, folder, expected):
    one = mixnn.embed(run, folder / "3.png", device="cpu", verbose=QUIET)
    np.testing.assert_allclose(one.vectors[0], expected["3.png"], atol=1e-5)
    digits = mixnn.embed(run, "digits", split="test", device="cpu", verbose=QUIET)
    assert len(digits) == 500
    assert digits.names[7] == "digits/test/7"


def test_an_image_of_a_data_set_and_a_file_with_its_pixels_have_the_same_vector(run, tmp_path):
    """Digits have 8 x 8 pixels and this encoder 16 x 16: both kinds of images are resized in the same way."""
    digits = open_images("digits")
    for i in range(3):
        to_image(digits.arrays[i]).save(tmp_path / f"{i}.png")
    known, files = (load_or_encode(run, source, device="cpu", reporter=QUIET) for source in ("digits", tmp_path))
    np.testing.assert_allclose(files.vectors, known.vectors[:3], atol=1e-5)


def test_vectors_are_cached_until_images_or_checkpoint_change(run, folder, expected, tmp_path, monkeypatch):
    first = load_or_encode(run, folder, device="cpu", reporter=QUIET)
    same(first.names, first.vectors, expected)
    with monkeypatch.context() as patch:
        patch.setattr(embedding, "load_encoder", lambda *_: pytest.fail("encoded again"))
        again = load_or_encode(run, folder, device="cpu", reporter=QUIET)
        written = np.load(mixnn.embed(run, folder, tmp_path / "cached.npz", device="cpu", verbose=QUIET).path)
    assert np.array_equal(again.vectors, first.vectors)
    assert again.skipped == first.skipped
    same(written["file"].tolist(), written["vectors"], expected)
    Image.new("RGB", (SIZE, SIZE), "white").save(folder / "19.png")
    changed = load_or_encode(run, folder, device="cpu", reporter=QUIET)
    at = first.names.index("19.png")
    assert not np.allclose(changed.vectors[at], first.vectors[at])


def test_the_cache_has_one_file_per_source_and_drops_earlier_checkpoints(run, folder, tmp_path):
    copy = Run.open(shutil.copytree(run.path, tmp_path / "copy"))
    shutil.rmtree(copy.path / "embeddings", ignore_errors=True)
    images = shutil.copytree(folder, tmp_path / "images")
    one, two = images / "3.png", images / "4.png"

    def kept(*sources):
        for source in sources:
            load_or_encode(copy, source, device="cpu", reporter=QUIET)
        return {path.name for path in (copy.path / "embeddings").iterdir()}

    first = kept(one, two)
    assert len(first) == 2
    assert kept(one, two) == first
    Image.new("RGB", (SIZE, SIZE), "white").save(one)
    second = kept(one)
    assert len(second) == 2
    assert len(first & second) == 1, "the file of the other source"
    tensors, state = copy.load_checkpoint(pytest.fail)
    copy.save_checkpoint(state["step"] + 1, tensors, state | {"step": state["step"] + 1})
    (copy.path / "embeddings" / "mine.npz").touch()
    third = kept(two)
    assert len(third) == 2
    assert not third & second
    assert "mine.npz" in third, "files of others stay"


def test_a_run_folder_that_cannot_be_written_works_without_a_cache(run, folder, tmp_path):
    copy = Run.open(shutil.copytree(run.path, tmp_path / "copy"))
    shutil.rmtree(copy.path / "embeddings", ignore_errors=True)
    (copy.path / "embeddings").touch()  # no folder can be made there, whoever the user is
    found = load_or_encode(copy, folder, device="cpu", reporter=QUIET)
    assert len(found) == len(load_or_encode(run, folder, device="cpu", reporter=QUIET))
    assert (copy.path / "embeddings").is_file()


def test_a_rewritten_checkpoint_of_the_same_name_invalidates_the_cache(run, folder, tmp_path):
    copy = Run.open(shutil.copytree(run.path, tmp_path / "copy"))
    first = load_or_encode(copy, folder, device="cpu", reporter=QUIET)
    tensors, state = copy.load_checkpoint(pytest.fail)
    bias = next(name for name in tensors if name.startswith(STUDENT) and name.endswith("bn1.bias"))
    before = copy.save_checkpoint(state["step"], tensors | {bias: tensors[bias] + 1}, state)
    assert [path.name for path in before.parent.iterdir()] == [before.name]
    again = load_or_encode(copy, folder, device="cpu", reporter=QUIET)
    assert not np.allclose(again.vectors, first.vectors)


def test_the_limit_of_a_run_does_not_limit_embedding(run, expected, tmp_path):
    copy = Run.open(shutil.copytree(run.path, tmp_path / "copy"))
    limited = Run(copy.path, replace(copy.config, limit=8))
    assert load_or_encode(limited, device="cpu", reporter=QUIET).names == list(expected)


@pytest.mark.parametrize(
    "source, out, says",
    [
        ("nowhere", "x.npz", "is not a folder, an image file or a data set"),
        ("", "x.txt", "unknown format '.txt'"),
        ("", "nowhere/x.npz", "is not a folder"),
        ("empty", "x.npz", "no images in"),
        ("bad", "x.npz", "none of the images in"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(run, tmp_path, source, out, says, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.png").write_bytes(b"x")
    with pytest.raises(mixnn.UserError, match=says):
        mixnn.embed(run, source, out, device="cpu", verbose=QUIET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "empty"]


def test_a_file_without_embeddings_is_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"PK nonsense")
    with pytest.raises(mixnn.UserError, match="cannot read embeddings from"):
        store.read(tmp_path / "x.npz")


def test_parquet_without_pyarrow_says_what_to_install(run, folder, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(mixnn.UserError, match="pip install pyarrow"):
        mixnn.embed(run, folder, tmp_path / "x.parquet", device="cpu", verbose=QUIET)


@pytest.mark.parametrize(
    "images", [torch.rand(2, 3, 8, 8), torch.zeros(3, 8, 8, dtype=torch.uint8)], ids=["float", "one"]
)
def test_an_encoder_refuses_what_would_give_wrong_vectors(run, images):
    with pytest.raises(mixnn.UserError, match=r"takes a uint8 tensor \(images, 3, height, width\)"):
        mixnn.load(run)(images)


def test_an_encoder_takes_files_in_one_call_and_numpy_arrays_too(run, folder, expected):
    encoder, names = mixnn.load(run, "cpu"), [*expected][:3]
    found = encoder.files([str(folder / name) for name in names])
    same(names, found, {name: expected[name] for name in names})
    same(names[:1], encoder.files(folder / names[0]), {names[0]: expected[names[0]]})
    arrays = np.stack([decode(folder / name, encoder.size) for name in names])
    np.testing.assert_allclose(encoder(arrays).numpy(), found, atol=1e-5)
    assert encoder.files([]).shape == (0, encoder.num_features)


def test_an_encoder_enlarges_small_images_as_it_does_small_files(run, tmp_path):
    encoder, gradient = mixnn.load(run, "cpu"), np.arange(0, 250, 10, dtype=np.uint8).reshape(5, 5, 1).repeat(3, 2)
    Image.fromarray(gradient).save(tmp_path / "small.png")
    small, file = torch.from_numpy(gradient.transpose(2, 0, 1)[None]), decode(tmp_path / "small.png", SIZE)
    large = enlarged(small, SIZE)
    assert int((large[0].int() - torch.tensor(file).int()).abs().max()) <= 1, "rounded otherwise"
    assert torch.equal(encoder(small), encoder(large))
    assert enlarged(large, SIZE) is large
    wide = enlarged(torch.zeros(2, 3, 4, 9, dtype=torch.uint8), SIZE)
    assert wide.shape == (2, 3, SIZE, 36), "nothing of a wide image is cut off"


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used_and_named_too(run, folder, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(run.path, other)
    shutil.rmtree(other / "embeddings", ignore_errors=True)
    (good,) = (other / "checkpoints").glob("*.safetensors")
    bad = good.with_name("step-99999999.safetensors")
    data = bytearray(good.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    damaged = pytest.warns(mixnn.MixnnWarning, match=f"{bad.name} is damaged")
    with damaged, pytest.warns(mixnn.MixnnWarning, match="skipped 5.png: empty file; skipped "):
        found = load_or_encode(Run.open(other), folder, device="cpu")
    assert found.about["checkpoint"] == good.name
    shutil.rmtree(other / "embeddings")
    damaged = pytest.warns(mixnn.MixnnWarning, match=f"{bad.name} is damaged")
    with damaged, pytest.warns(mixnn.MixnnWarning, match="skipped"):
        mixnn.embed(other, folder, tmp_path / "x.npz", device="cpu")
    assert store.read(tmp_path / "x.npz").about["checkpoint"] == good.name
    with pytest.warns(mixnn.MixnnWarning, match=f"{bad.name} is damaged") as heard:
        mixnn.load(other)
    assert [warning.filename for warning in heard] == [__file__], "a warning points at the line of the caller"


def test_an_empty_list_is_not_all_images(run, tmp_path):
    with pytest.raises(mixnn.UserError, match="the list of files is empty"):
        mixnn.embed(run, [], tmp_path / "x.npz", device="cpu", verbose=QUIET)
    assert not (tmp_path / "x.npz").exists()


def test_a_file_replaced_by_one_of_the_same_date_and_size_invalidates_the_cache(run, tmp_path):
    def paint(color):
        Image.new("RGB", (SIZE, SIZE), color).save(tmp_path / "0.bmp")
        os.utime(tmp_path / "0.bmp", ns=(0, 0))
        return load_or_encode(run, tmp_path, device="cpu", reporter=QUIET).vectors

    black, white = paint("black"), paint("white")
    assert not np.array_equal(black, white)
    assert np.array_equal(black, paint("black"))


def test_a_tab_in_the_name_of_a_file_that_cannot_be_read_stays_there(run, tmp_path):
    (tmp_path / "a\tb.png").write_bytes(b"")
    Image.new("RGB", (SIZE, SIZE)).save(tmp_path / "c.png")
    ((name, why),) = load_or_encode(run, tmp_path, device="cpu", reporter=QUIET).skipped
    assert name == "a\tb.png"
    assert why == "empty file"


def test_an_encoder_names_unreadable_files_and_says_how_to_pass_files(run, folder):
    encoder = mixnn.load(run, "cpu")
    with pytest.raises(mixnn.UserError, match=r"broken.jpg: not an image that Pillow can read"):
        encoder.files([folder / "3.png", folder / "broken.jpg"])
    with pytest.raises(mixnn.UserError, match=r"not a list: for image files, use encoder.files\(paths\)"):
        encoder(["3.png"])
