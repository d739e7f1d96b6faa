"""Damaged or hostile names, numbers and files: a clear message and exit code 2, in bounded memory, no traceback."""

import bz2
import io
import lzma
import os
import pickle
import resource
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import mixnn
from mixnn import files
from mixnn.apps import embeddings as store
from mixnn.cli import main
from mixnn.config import Config, UserError
from mixnn.data import archive, decode
from mixnn.data.array_pickle import Refused, load_arrays
from mixnn.data.folder import natural_key
from mixnn.data.tiny_imagenet import read as read_tiny
from mixnn.progress import Reporter
from mixnn.runs import Run
from tests.command import FORKS

QUIET = Reporter(quiet=True)
MEGABYTE = 2**20


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for i in range(8):
        (place / "ab"[i % 2]).mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(place / "ab"[i % 2] / f"{i}.png")
    return place


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory) -> Path:
    settings = {"epochs": 1, "batch_size": 4, "bn_groups": 1, "image_size": 16, "backbone": "resnet8"}
    settings |= {"options": {"hidden": 8, "dim": 8, "support_size": 8}, "init_from": "none"}
    return mixnn.pretrain(photos, out=tmp_path_factory.mktemp("runs") / "run", verbose=QUIET, **settings).path


def refused(capsys, *words: object) -> str:
    """The message of a command that is refused; an exception would fail the test."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") <= 3
    return said


def _work_within(megabytes: int, answer, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + megabytes * MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        answer.send(work(*args))
    except (UserError, Refused) as error:
        answer.send(f"{type(error).__name__}: {error}")
    except BaseException as error:  # such as MemoryError
        answer.send(f"failed: {type(error).__name__}: {error}")


def within(megabytes: int, work: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, or its error as text, in a process with this much memory in addition to its start."""
    mine, theirs = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_work_within, args=(megabytes, theirs, work, args))
    process.start()
    theirs.close()
    found = mine.recv()
    process.join()
    return found


# --- names ---


@pytest.mark.parametrize(
    "words",
    [
        ("embed", "~nouser/run"),
        ("embed", "{run}", "~nouser/photos"),
        ("embed", "{run}", "--out", "~nouser/x.npz"),
        ("pretrain", "~nouser/photos"),
        ("pretrain", "digits", "--out", "~nouser/run"),
        ("pretrain", "digits", "--data-dir", "~nouser/data"),
        ("pretrain", "{photos}", "--labels", "~nouser/labels.csv"),
        ("pretrain", "digits", "--init-from", "~nouser/weights.pt"),
        ("pretrain", "--resume", "~nouser/run"),
        ("evaluate", "~nouser/run"),
        ("evaluate", "{run}", "--save", "~nouser/x.json"),
        ("explore", "{run}", "--out", "~nouser/x.html"),
        ("classify", "{run}", "folders", "--out", "~nouser/x"),
        ("classify", "{run}", "~nouser/labels.csv"),
        ("classify", "{run}", "folders", "--apply", "~nouser/x"),
        ("export", "{run}", "--out", "~nouser/x.safetensors"),
        ("report", "{run}", "--out", "~nouser/x.html"),
        ("report", "~nouser/run"),
        ("search", "{run}", "~nouser/x.png"),
        ("data", "--data-dir", "~nouser/data"),
        ("reproduce", "--tables", "~nouser/x.yaml"),
        ("figures", "--results", "~nouser/x"),
        ("methods", "--import", "~nouser/x.py"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", ["~nouser", "n" * 300, "not-utf8-\udcff"], ids=["user", "long", "bytes"])
def test_a_path_that_cannot_exist_is_refused(run: Path, photos: Path, tmp_path, monkeypatch, capsys, words, name):
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, *(word.replace("~nouser", name).format(run=run, photos=photos) for word in words))
    reason = {"~nouser": "there is no user nouser", "n" * 300: "name is too long"}.get(name, "is not valid UTF-8")
    assert reason in said
    assert list(tmp_path.iterdir()) == []


def test_a_name_as_long_as_the_file_system_allows_works(run: Path, tmp_path: Path):
    long = tmp_path / f"{'ü' * 125}.npz"  # 254 bytes
    assert main(["embed", str(run), "--out", str(long), "--quiet"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [long.name]


def test_a_card_whose_name_would_be_too_long_is_refused_before_the_work(run: Path, tmp_path: Path, capsys):
    assert "name is too long" in refused(capsys, "export", run, "--out", tmp_path / f"{'n' * 241}.safetensors")
    assert list(tmp_path.iterdir()) == []


# --- numbers ---


def test_numbers_of_5000_digits_in_labels_and_names_are_text_like_any_other(run: Path, tmp_path, capsys):
    many = "9" * 5000
    table = tmp_path / "labels.csv"
    table.write_text(f"file,label\na/0.png,{many}\na/2.png,{many}\nb/1.png,8\nb/3.png,8\n")
    assert main(["classify", str(run), str(table), "--out", str(tmp_path / "out"), "--json"]) == 0
    capsys.readouterr()
    assert sorted([many, "10", "9", "010", "2", "a"], key=natural_key) == ["2", "9", "010", "10", many, "a"]


@pytest.mark.parametrize("digits", [400, 4000, 5000])  # a float ends at 308, int() at 4,300
@pytest.mark.parametrize("words", [("reproduce", "main", "--seeds"), ("pretrain", "digits", "--seed")])
def test_a_seed_of_thousands_of_digits_is_refused(capsys, words, tmp_path, monkeypatch, digits: int):
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, *words, "9" * digits)
    assert "number" in said or "at most" in said
    assert len(said) < 1000


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400, "inf", "9" * 400])
def test_a_setting_takes_no_infinite_number(value: object):
    for name in ("weight_decay", "lr", "crop_area"):
        with pytest.raises(UserError, match=f"{name} takes a finite number"):
            Config("digits", "mnn", **{name: value})


@pytest.mark.parametrize("value", [2**63, 10**400, "9" * 400])
def test_a_setting_takes_no_number_that_a_tensor_cannot_hold(value: object):
    with pytest.raises(UserError, match="epochs takes a number of at most 18 digits"):
        Config("digits", "mnn", epochs=value)


# --- data sets ---


def tiny(folder: Path) -> Path:
    """Tiny-ImageNet with two classes of one training and one test image."""
    for i, wnid in enumerate(("n01", "n02")):
        for place, name in ((f"train/{wnid}/images", f"{wnid}_0.JPEG"), ("val/images", f"val_{i}.JPEG")):
            (folder / place).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (64, 64), (90 * i, 7, 9)).save(folder / place / name)
    (folder / "wnids.txt").write_text("n01\nn02\n")
    (folder / "words.txt").write_text("n01\tcat, kitten\nn02\tdog\n")
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\nval_1.JPEG\tn02\t0\n")
    return folder


@pytest.mark.parametrize(
    "file, content",
    [
        ("wnids.txt", b"n01\nn\xff2\n"),
        ("val/val_annotations.txt", b"val_\xff.JPEG\tn01\nval_1.JPEG\tn02\n"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn01\nval_\0.JPEG\tn02\n"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn01\n../../../x.JPEG\tn02\n"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn01\n" + b"v" * 300 + b"\tn02\n"),
        ("wnids.txt", b"n01\n" + b"n" * 300 + b"\n"),
        ("wnids.txt", b"n01\nn02\n../x\n"),
        ("wnids.txt", b"n01\nn01\n"),
        ("wnids.txt", b""),
    ],
)
def test_damaged_text_files_of_tiny_imagenet_are_named(tmp_path: Path, file: str, content: bytes):
    folder = tiny(tmp_path / "tiny-imagenet-200")
    (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=r"is damaged[\s\S]*remove .*tiny-imagenet-200"):
        _ = [read_tiny(folder, split, 1, 1) for split in ("train", "test")]


def test_an_odd_byte_among_the_words_of_tiny_imagenet_costs_no_more_than_a_name(tmp_path: Path):
    folder = tiny(tmp_path / "tiny-imagenet-200")
    (folder / "words.txt").write_bytes(b"n01\tc\xe1t\nn02\tdog\n")
    images, labels, names = read_tiny(folder, "test", 1, 1)
    assert (len(images), list(labels), names) == (2, [0, 1], ["c\ufffdt", "dog"])


def ask_for_memory(data: bytes) -> str:
    load_arrays(data)
    return "read"


# LONG_BINPUT makes room for as many objects as it says; BYTEARRAY8 reserves what it announces.
LONG_BINPUT, BYTEARRAY8 = b"}r" + struct.pack("<I", 2**29 - 1) + b".", b"\x80\x05\x96" + struct.pack("<Q", 2**33) + b"."


@pytest.mark.parametrize("data", [LONG_BINPUT, BYTEARRAY8, b"}p999999999\n."], ids=["memo", "bytearray", "text"])
def test_a_pickle_of_eight_bytes_cannot_reserve_gigabytes(data: bytes):
    found = within(256, ask_for_memory, data)
    assert found.startswith("Refused: ")
    assert "MemoryError" not in found


def repeated(count: int) -> bytes:
    """A pickle that encodes one text of a megabyte again and again."""
    text = b"X" + struct.pack("<I", MEGABYTE) + b"x" * MEGABYTE + b"q\x00"
    once = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    return b"\x80\x02}(U\x01k(" + text + once * count + b"lu."


def test_nor_can_one_that_repeats_what_it_holds():
    assert within(256, ask_for_memory, repeated(1000)) == "Refused: more text than the file's size"


def in_memo(depth: int) -> bytes:
    """Tuples in each other, each of which is also the argument of a call."""
    call = b"cnumpy.core.multiarray\n_reconstruct\n"
    return b"".join(call + b"h\x00\x85q\x00R0" for _ in range(depth)) + b"h\x00K\x01s."


@pytest.mark.parametrize(
    "data", [b")" + b"\x85" * 10**6 + b"K\x01s.", b")q\x000" + in_memo(10**5)], ids=["row", "memo"]
)
def test_tuples_in_each_other_do_not_crash_python(data: bytes):
    assert within(1024, ask_for_memory, b"\x80\x02}" + data).startswith("Refused: ")


def test_pickles_with_many_objects_are_still_read():
    names = [f"{i}.png".encode() for i in range(3000)]
    labels = [i % 10 for i in range(3000)]
    for protocol in (0, 1, 2, 3, 4, 5):
        found = load_arrays(pickle.dumps({"names": names, "labels": labels}, protocol))
        assert (found[b"names"], found[b"labels"]) == (names, labels)


# --- config.yaml and other YAML ---

# A list of ten values, ten times this list, and so on: a hundred million values in all.
BOMB = "options:\n  a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"  a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 8)
)


def open_run(path: Path) -> str:
    return str(asdict(Run.open(path).config))


@pytest.mark.parametrize(
    "lines",
    [
        "options: [1]\n",
        "options: x\n",
        "options: {1: 2}\n",
        "data: " + "[" * 5000 + "]" * 5000,
        "options: " + "{a: " * 5000 + "1" + "}" * 5000,
        BOMB,
        "data: \xff\0",
        "seed: " + "9" * 5000,
        "options: {a: &x [*x]}\n",
        "[1, 2]",
        "",
        "? [a]\n: 1",
        "lr: !!python/object/apply:os.system [id]",
    ],
    ids=lambda lines: repr(lines[:20]),
)
def test_a_hostile_configuration_is_refused(tmp_path: Path, capsys, lines: str):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(lines)
    (tmp_path / "run" / "command.txt").write_text("mixnn\n")
    assert within(256, open_run, tmp_path / "run").startswith("UserError: ")
    assert "mixnn: " in refused(capsys, "embed", tmp_path / "run")


def test_a_control_character_in_a_configuration_is_named_in_one_line(tmp_path: Path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("data: \0")
    assert refused(capsys, "embed", tmp_path / "run").count("\n") == 1


def test_anchors_are_read_where_they_stay_small(tmp_path: Path):
    (tmp_path / "x.yaml").write_text("a: &a [1, 2]\nb: *a\nc: {<<: {d: 3}, e: *a}\n")
    assert files.read_yaml(tmp_path / "x.yaml") == {"a": [1, 2], "b": [1, 2], "c": {"d": 3, "e": [1, 2]}}


def test_so_are_the_tables_of_the_paper():
    path = Path(mixnn.__file__).parent / "paper" / "tables.yaml"
    assert files.read_yaml(path) == yaml.safe_load(path.read_text())


def test_a_file_of_tables_may_not_grow_either(tmp_path: Path, capsys):
    (tmp_path / "mine.yaml").write_text(BOMB)
    assert "is not a file of tables" in refused(capsys, "reproduce", "--tables", tmp_path / "mine.yaml")
    (tmp_path / "mine.yaml").write_text("a: " + "[" * 5000 + "]" * 5000)
    assert "is not a file of tables" in refused(capsys, "reproduce", "--tables", tmp_path / "mine.yaml")


# --- cached vectors ---


def test_damaged_cached_vectors_are_computed_again(run: Path, capsys):
    for file in (run / "embeddings").glob("*.npz"):  # of tests before
        file.unlink()
    assert main(["embed", str(run), "--out", str(run / "a.npz"), "--quiet"]) == 0
    (cached,) = (run / "embeddings").glob("*.npz")
    expected = store.read(run / "a.npz").vectors
    content = cached.read_bytes()
    start = content.index(b"\x93NUMPY")
    for damage in (
        content[: start + 10] + b"(" * 80 + content[start + 90 :],  # the header is a Python literal
        content[: start + 6] + b"\x09" + content[start + 7 :],
        content[: len(content) // 2],
        b"",
    ):
        cached.write_bytes(damage)
        assert main(["embed", str(run), "--out", str(run / "a.npz"), "--overwrite", "--quiet"]) == 0
        assert "computed again" in capsys.readouterr().err
        np.testing.assert_allclose(store.read(run / "a.npz").vectors, expected, rtol=1e-5, atol=1e-5)


def test_every_damaged_header_of_a_file_of_vectors_is_an_error(tmp_path: Path):
    about = {"run": "x"}
    store.write(tmp_path / "a.npz", [(["a", "b"], np.ones((2, 3), np.float32), [])], 3, about)
    content = (tmp_path / "a.npz").read_bytes()
    start, rng = content.index(b"\x93NUMPY"), np.random.default_rng(0)
    for position in range(start, start + 128):
        damaged = bytearray(content)
        damaged[position] = rng.integers(256)
        (tmp_path / "b.npz").write_bytes(damaged)
        for mapped in (False, True):
            try:
                found = store.read(tmp_path / "b.npz", mapped)
            except UserError:
                continue
            assert found.names == ["a", "b"]


# --- archives ---


def with_files(path: Path, mode: str, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, mode) as made:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    return path


def unpack(path: Path) -> str:
    root = path.parent / "root"
    root.mkdir(exist_ok=True)
    return str(archive.extract(path, root, "set"))


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zip", "zip-bz2", "zip-xz"])
def test_a_flipped_byte_anywhere_in_an_archive_is_never_a_traceback(tmp_path: Path, kind: str):
    path, rng = tmp_path / "a", np.random.default_rng(0)
    content = rng.integers(0, 256, 300, dtype=np.uint8).tobytes()
    if kind.startswith("zip"):
        how = {"zip": zipfile.ZIP_DEFLATED, "zip-bz2": zipfile.ZIP_BZIP2, "zip-xz": zipfile.ZIP_LZMA}[kind]
        with zipfile.ZipFile(path, "w", how) as made:
            made.writestr("set/a", content)
    else:
        with_files(path, f"w:{kind}", ("set/a", content))
    good = path.read_bytes()
    for position in rng.choice(len(good), 60, replace=False):
        damaged = bytearray(good)
        damaged[position] ^= rng.integers(1, 256)
        path.write_bytes(damaged)
        try:
            unpack(path)
        except UserError as error:
            assert "\n" in str(error)  # noqa: PT017


def test_an_encrypted_archive_is_refused(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as made:
        made.writestr("set/a", b"secret")
    content = bytearray((tmp_path / "a.zip").read_bytes())
    for header, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(header) + flags] |= 1
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be unpacked: .*encrypted"):
        unpack(tmp_path / "a.zip")


@pytest.mark.parametrize("name", ["n" * 300, "a\udcffb", "a/" * 3000 + "b"])
def test_names_that_no_file_can_have_are_refused(tmp_path: Path, name: str):
    with pytest.raises(UserError):
        unpack(with_files(tmp_path / "a.tar.gz", "w:gz", ("set/good", b"1"), (f"set/{name}", b"1"), ("set", b"1")))


def zeros(path: Path, megabytes: int) -> Path:
    """A zip with files of zeros, all of which share one compressed block."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made, made.open("set/a", "w") as file:
        for _ in range(megabytes):
            file.write(bytes(MEGABYTE))
    return path


def zeros_in_tar(path: Path, megabytes: int) -> Path:
    info = tarfile.TarInfo("set/a")
    info.size = megabytes * MEGABYTE
    with tarfile.open(path, "w:gz", compresslevel=1) as made, open("/dev/zero", "rb") as source:
        made.addfile(info, source)
    return path


@pytest.mark.parametrize("make", [zeros, zeros_in_tar])
def test_an_archive_that_grows_a_hundredfold_is_refused(tmp_path: Path, make):
    with pytest.raises(UserError, match="would grow"):
        unpack(make(tmp_path / "a", 128))
    assert list((tmp_path / "root").iterdir()) == []


def test_a_header_of_a_tar_file_that_grows_is_not_read(tmp_path: Path):
    info = tarfile.TarInfo("set/a")
    info.type, info.size = tarfile.XHDTYPE, 400 * MEGABYTE
    with tarfile.open(tmp_path / "a", "w:gz", compresslevel=1) as made, open("/dev/zero", "rb") as source:
        made.addfile(info, source)
    assert within(200, unpack, tmp_path / "a").startswith("UserError: ")


# --- images ---


def decode_one(path: Path) -> Any:
    return decode.decode_all([path], 32)[1].get(0, "read")


def test_a_sparse_file_is_not_read_whole(tmp_path: Path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for name, start in (("a.jpg", b""), ("b.png", (tmp_path / "a.png").read_bytes())):
        with open(tmp_path / name, "wb") as file:
            file.write(start)
            file.truncate(3 * 2**30)
        found = within(256, decode_one, tmp_path / name)
        assert "too large: 3.2 GB" in found


def test_a_large_file_is_read_in_parts(tmp_path: Path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with open(tmp_path / "a.png", "r+b") as file:
        file.truncate(600 * MEGABYTE)
    assert within(256, decode_one, tmp_path / "a.png") == "read"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "I;16", "RGB", "CMYK"])
def test_a_large_image_takes_at_most_nine_bytes_per_pixel(tmp_path: Path, mode: str):
    side = 4096  # 16 megapixels
    image = Image.frombytes(
        mode, (side, side), bytes(side * side * {"RGBA": 4, "CMYK": 4, "RGB": 3, "P": 1}.get(mode, 2))
    )
    if mode == "P":
        image.putpalette(bytes(768))
        image.info["transparency"] = 0
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    image.save(path, **({} if mode == "CMYK" else {"compress_level": 1}))
    assert within(9 * side * side // MEGABYTE + 40, decode_one, path) == "read"


def test_all_threads_together_hold_no_more_pixels_than_one_image_may_have(tmp_path: Path, monkeypatch):
    paths = [tmp_path / f"{i}.png" for i in range(12)]
    for path in paths:
        Image.new("RGB", (40, 40)).save(path)
    held, most, convert = [], [], decode.to_rgb

    def to_rgb(image):
        held.append(image.width * image.height)
        most.append(sum(held))
        time.sleep(0.01)  # so that the others would come
        found = convert(image)
        held.pop()
        return found

    monkeypatch.setattr(decode, "to_rgb", to_rgb)
    monkeypatch.setattr(decode, "MAX_PIXELS", 4000)
    monkeypatch.setattr(decode.os, "cpu_count", lambda: 8)
    assert decode.decode_all(paths, 8)[1] == {}
    assert len(most) == 12
    assert max(most) <= 4000


def test_a_file_that_would_start_another_program_is_not_opened(tmp_path: Path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    os.rename(tmp_path / "a.eps", tmp_path / "a.jpg")
    assert "EPS" in decode_one(tmp_path / "a.jpg")


@pytest.mark.parametrize(
    "damage", [bz2.compress(b"x"), lzma.compress(b"x"), b"\x1f\x8b\x08\0"], ids=["bz2", "xz", "gz"]
)
def test_a_compressed_file_that_is_no_archive_is_an_error(tmp_path: Path, damage: bytes):
    (tmp_path / "a").write_bytes(damage)
    with pytest.raises(UserError, match="cannot be unpacked"):
        unpack(tmp_path / "a")
