"""make fuzz: hostile input for everything that reads. A clear error or a right result, and nothing else.

    python -m tests.fuzz [--cases N] [--seed S] [--only TARGET]

A target is a function of one generated value and an empty folder. It fails with any exception other than UserError, if
a case takes longer than TIME_LIMIT or grows the process by more than MEMORY_LIMIT, if anything outside the folder is
written, or if another program is started. tests/test_fuzz.py runs the same targets, with few cases each.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import html.parser
import importlib
import io
import json
import math
import os
import pickle
import resource
import shutil
import signal
import socket
import sys
import tarfile
import tempfile
import threading
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import torch
import yaml
from hypothesis import strategies as st
from PIL import Image

from mixnn.apps import embeddings, webpage
from mixnn.apps.classify import page as classify_page
from mixnn.apps.explore.page import MapData, render
from mixnn.apps.explore.server import Server
from mixnn.apps.report import report, run_data
from mixnn.apps.search import render as search_page
from mixnn.cli import VERBS, command
from mixnn.config import Config, UserError, bind, parse_duration, spelling
from mixnn.data import archive, cifar, decode, folder, labels, open_dataset, open_images, stl10, tiny_imagenet
from mixnn.data.array_pickle import Refused, load_arrays
from mixnn.files import expand
from mixnn.nn.backbone import BUILT_IN, build_backbone
from mixnn.progress import escape_controls
from mixnn.runs import Run, checkpoint
from mixnn.runs.encoder import read_export
from mixnn.runs.weights import CARD, CARD_VERSION, read_weights, tensor_file
from mixnn.training.configure import configure
from tests.test_bad_input import tiny

TIME_LIMIT = 20.0  # seconds per case
MEMORY_LIMIT = 2**30  # bytes that a target may add to the largest size of the process
PROGRAMS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn")  # audit events
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate")

Target = Callable[[Any, Path], None]
TARGETS: dict[str, tuple[Callable[[], st.SearchStrategy[Any]], Target]] = {}


def target(name: str, strategy: Callable[[], st.SearchStrategy[Any]]) -> Callable[[Target], Target]:
    def register(function: Target) -> Target:
        TARGETS[name] = strategy, function
        return function

    return register


_refused: list[int] = []  # grows with every UserError


class Outside(Exception):
    """A case did what no input may cause."""


# Input

NASTY = [
    *(
        "",
        " ",
        "0",
        "-1",
        "1e999",
        "nan",
        "inf",
        "9" * 400,
        "9" * 5000,
        "-",
        "--",
        "=",
        "a=b",
        "~",
        "~nobody",
        "/",
        ".",
        "..",
    ),
    *(
        "../x",
        "/etc/passwd",
        "a/b",
        "\0",
        "\n",
        "\r\n",
        "\u2028",
        "\x1b[2J",
        "\ufeff",
        "\udcff",
        "é",
        "ü" * 200,
        "\U0001f600",
    ),
    *(
        "</script>",
        "<!--",
        "<script>",
        "]]>",
        "&lt;",
        "'\"",
        "{{data}}",
        "\u202egnp.exe",
        "n" * 300,
        "%s%n",
        "$(id)",
        "NUL",
    ),
    *(
        "true",
        "null",
        "none",
        "auto",
        "yes",
        "1h",
        "0x10",
        "1_000",
        "٣",
        "½",
        "[1]",
        "{}",
        "*",
        "**/*",
        "\\",
        "\\u0000",
    ),
]


def texts() -> st.SearchStrategy[str]:
    """Text that breaks things: known examples, any characters, lone surrogates too."""
    pieces = st.one_of(st.sampled_from(NASTY), st.text(st.characters(), max_size=12))
    return st.one_of(pieces, st.lists(pieces, min_size=2, max_size=3).map("".join))


def mutations(same_size: bool = False) -> st.SearchStrategy[list[tuple[str, float, bytes]]]:
    """What `mutate` does to bytes: how, where (as a share of the length) and with what."""
    hows = ["flip", "put"] if same_size else ["flip", "put", "cut", "insert", "drop", "double", "replace"]
    one = st.tuples(st.sampled_from(hows), st.floats(0, 1), st.binary(min_size=1, max_size=16))
    return st.lists(one, max_size=5)


def mutate(data: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    out = bytearray(data)
    for how, where, what in changes:
        at = min(int(where * len(out)), max(0, len(out) - 1))
        if how == "flip" and out:
            out[at] ^= 1 << what[0] % 8
        elif how == "put":
            out[at : at + len(what)] = what[: len(out) - at]
        elif how == "cut":
            del out[at:]
        elif how == "insert":
            out[at:at] = what
        elif how == "drop":
            del out[at : at + 8 * len(what)]
        elif how == "double" and len(out) < 10**6:
            out[at:at] = out[at : at + 200]
        elif how == "replace":
            out = bytearray(what)
    return bytes(out)


def values() -> st.SearchStrategy[Any]:
    """What JSON or YAML can hold."""
    leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts().map(_encodable))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    )


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


@contextlib.contextmanager
def accepting_errors() -> Iterator[None]:
    """A UserError is a right answer, if its message can be printed in a few lines."""
    try:
        yield
    except UserError as error:
        _refused.append(1)
        lines = str(error).split("\n")
        for line in map(escape_controls, lines):
            line.encode()
        if not str(error).strip() or len(lines) > 12 or len(str(error)) > 20_000:
            raise Outside(f"a message of {len(lines)} lines: {str(error)[:300]!r}") from error


# The command line


def _command_words() -> st.SearchStrategy[tuple[str, list[str]]]:
    def words_of(name: str) -> st.SearchStrategy[tuple[str, list[str]]]:
        flags = st.sampled_from([*command(name).flags(), "--help-me", "-x", "--"])
        glued = st.tuples(flags, texts()).map("=".join)
        pairs = st.tuples(st.sampled_from([*asdict(Config("digits", "mnn")), "topk", "strong.blur"]), texts()).map(
            "=".join
        )
        return st.tuples(st.just(name), st.lists(st.one_of(flags, texts(), glued, pairs), max_size=6))

    return st.sampled_from([*VERBS]).flatmap(words_of)


@target("options", _command_words)
def check_options(given: tuple[str, list[str]], _: Path) -> None:
    name, words = given
    verb = command(name)
    if {"-h", "--help"} & {*words}:
        return
    with accepting_errors(), spelling(verb.spell):
        found = verb.parse(words)
        found.pop("json", None), found.pop("quiet", None), found.pop("import", None)
        known = {key: value for key, value in found.items() if key in verb.known}
        with contextlib.suppress(TypeError):  # an argument is missing
            bind(verb.function, **known)


def _settings() -> st.SearchStrategy[dict[str, Any]]:
    """Settings of a run: most values have the right type, some are anything."""
    numbers = st.one_of(st.integers(-2, 1000), st.integers(), st.just(10**400), st.floats(0, 2), st.floats())
    words = st.sampled_from(
        ["auto", "yes", "no", "none", "cpu", "eager", "fp32", "bf16", "sgd", "lars", "adamw", "folders"]
    )

    def one(default: Any) -> st.SearchStrategy[Any]:
        likely: st.SearchStrategy[Any] = numbers if isinstance(default, int | float) else words
        return st.one_of(st.just(default), likely, likely.map(str), texts(), values())

    pairs = [st.tuples(st.just(name), one(default)) for name, default in asdict(Config("digits", "mnn")).items()]
    return st.lists(st.one_of(pairs), min_size=1, max_size=3).map(dict)


@target("settings", _settings)
def check_settings(given: dict[str, Any], _: Path) -> None:
    given = {name: value for name, value in given.items() if name not in ("data", "options")}
    with accepting_errors():
        config = configure(open_dataset("digits"), {}, given)
        json.dumps(asdict(config), allow_nan=False)
        for name in given.keys() & {"lr", "epochs", "batch_size", "seed"}:
            assert math.isfinite(getattr(config, name))


def _durations() -> st.SearchStrategy[str]:
    numbers = st.one_of(
        st.integers(-1, 10**6).map(str), st.floats().map(str), st.sampled_from(["1.5", ".5", "1e3", "٣"])
    )
    parts = st.tuples(numbers, st.sampled_from(["s", "m", "h", " min", " hours", "", "d", "H"])).map("".join)
    return st.one_of(st.lists(parts, min_size=1, max_size=3).map("".join), texts())


@target("durations", _durations)
def check_durations(text: str, _: Path) -> None:
    with accepting_errors():
        assert 0 < parse_duration(text) < math.inf


@target("file names", texts)
def check_names(text: str, place: Path) -> None:
    with accepting_errors():
        found = expand(text)
        found.exists()
    with accepting_errors():
        Run.open(text if text else "x")
    with contextlib.suppress(OSError, ValueError):  # no file can have this name
        (place / f"{text[:80].replace('/', '_')}.png").write_bytes(b"")
        (place / "a.png").write_bytes(_image("PNG"))
    with accepting_errors():
        listing = folder.list_splits(place)
        for name in listing.everything:
            name.encode()
        images = open_images(place)
        labels.from_folders([f"x/{name}" for name in images.names], 0)
        assert sorted(images.names) == sorted(listing.everything)


# Files of a run


@functools.cache
def _run_files() -> dict[str, bytes]:
    """The files of a run folder with a tiny checkpoint."""
    place = Path(tempfile.mkdtemp(prefix="mixnn-fuzz-run-"))
    try:
        run = Run.create(place / "run", Config("digits", "mnn", epochs=2), "mixnn pretrain digits")
        run.write_environment({"torch": torch.__version__, "given": []})
        for step in (4, 8):
            run.log({"epoch": step // 4, "step": step, "loss": 1 / step})
            run.save_checkpoint(step, {"method.w": torch.arange(12.0), "order": torch.arange(4)}, {"step": step})
        run.save_results({"knn": {"weighted": 90.0, "top1": 88.0}})
        run.write_judgement({"start": {"spread": 0.5}, "points": [{"step": 4, "progress": 0.5, "problems": []}]})
        return {str(path.relative_to(run.path)): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    finally:
        shutil.rmtree(place)


def _damaged_file() -> st.SearchStrategy[tuple[str, Any]]:
    return st.tuples(st.sampled_from([*_run_files()]), st.one_of(mutations(), values()))


@target("files of a run", _damaged_file)
def check_run(given: tuple[str, Any], place: Path) -> None:
    name, change = given
    for file, data in _run_files().items():
        (place / file).parent.mkdir(exist_ok=True)
        (place / file).write_bytes(data)
    is_change = isinstance(change, list) and all(isinstance(each, tuple) for each in change)
    data = mutate(_run_files()[name], change) if is_change else json.dumps(change).encode()
    (place / name).write_bytes(data)
    said: list[str] = []
    with accepting_errors():
        run = Run.open(place)
        summary = run.summary(said.append)
        json.dumps(summary, default=str)
        run.judgement(said.append)
        run.was_config_edited()
        run.truncate_log(8, said.append)
        run.save_results({"linear": 1}, said.append)
        tensors, state = run.load_checkpoint(said.append)
        assert tensors["method.w"].tolist() == [*map(float, range(12))]
        assert state["step"] in (4, 8)
        run_data.read(place)


def _config_texts() -> st.SearchStrategy[bytes]:
    known = asdict(Config("digits", "mnn"))
    changed = _settings().map(lambda new: yaml.dump(known | new, sort_keys=False).encode(errors="replace"))
    text = yaml.safe_dump(known, sort_keys=False).encode()
    return st.one_of(
        changed,
        changed,
        values().map(lambda v: yaml.safe_dump(v).encode()),
        mutations().map(lambda c: mutate(text, c)),
        st.binary(),
    )


@target("config.yaml", _config_texts)
def check_config(data: bytes, place: Path) -> None:
    (place / "config.yaml").write_bytes(data)
    (place / "command.txt").write_text("mixnn pretrain digits\n")
    with accepting_errors():
        config = Run.open(place).config
        json.dumps(asdict(config), allow_nan=False)


@target("checkpoints", mutations)
def check_checkpoint(changes: Any, place: Path) -> None:
    original = next(data for name, data in _run_files().items() if name.endswith("8.safetensors"))
    data = mutate(original, changes)
    (place / "x.safetensors").write_bytes(data)
    try:
        tensors, state = checkpoint.load(place / "x.safetensors")
    except checkpoint.Damaged:
        assert data != original
        return
    assert tensors["method.w"].tolist() == [*map(float, range(12))]
    assert state == {"step": 8}


@functools.cache
def _weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(build_backbone("resnet8", 8, 1).state_dict())


@functools.cache
def _export() -> bytes:
    card = {"card_version": CARD_VERSION, "architecture": {"name": "resnet8"}}
    card |= {"preprocessing": {"size": 8, "mean": [0.5] * 3, "std": [0.5] * 3}}
    return tensor_file(_weights(), {CARD: json.dumps(card)})


@functools.cache
def _state_dict() -> bytes:
    names = ("conv1.weight", "layer1.0.conv1.weight", "bn1.running_mean")
    file = io.BytesIO()
    torch.save({"state_dict": {f"module.{name}": torch.zeros(8, 3, 3, 3) for name in names}, "epoch": 3}, file)
    return file.getvalue()


@target("exports", mutations)
def check_export(changes: Any, place: Path) -> None:
    data = mutate(_export(), changes)
    (place / "x.safetensors").write_bytes(data)
    with accepting_errors():
        read_export(place / "x.safetensors")
        assert data == _export(), "a damaged export is used"
    with accepting_errors():
        read_weights(place / "x.safetensors")


def _cards() -> st.SearchStrategy[Any]:
    sizes = st.one_of(st.integers(1, 64), st.integers(1, 64), st.integers(), st.floats(), values())
    triples = st.lists(st.one_of(st.floats(0.1, 1), st.floats(0.1, 1), st.floats()), min_size=3, max_size=3)
    inputs = st.fixed_dictionaries({"size": sizes, "mean": st.one_of(triples, values()), "std": triples})
    names = st.one_of(st.just("resnet8"), st.just("resnet8"), st.sampled_from([*BUILT_IN, "os:system"]), values())
    network = st.fixed_dictionaries({"name": names}, optional={"image_size": sizes})
    version = st.one_of(st.just(CARD_VERSION), st.just(CARD_VERSION), values())
    parts = {"preprocessing": inputs, "architecture": network, "card_version": version}
    return st.one_of(st.fixed_dictionaries(parts), st.fixed_dictionaries(parts), values())


@target("cards of exports", _cards)
def check_card(card: Any, place: Path) -> None:
    (place / "x.safetensors").write_bytes(tensor_file(_weights(), {CARD: json.dumps(card)}))
    with accepting_errors():
        encoder = read_export(place / "x.safetensors")
        assert encoder(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)).shape[0] == 1


@target("weights from torch.save", mutations)
def check_weights(changes: Any, place: Path) -> None:
    data = mutate(_state_dict(), changes)
    (place / "x.pt").write_bytes(data)
    with accepting_errors():
        read_weights(place / "x.pt")


@functools.cache
def _embeddings() -> dict[str, bytes]:
    place = Path(tempfile.mkdtemp(prefix="mixnn-fuzz-"))
    try:
        found = {}
        for suffix in (".npz", ".csv", ".parquet"):
            batch = ["a.png", "b.png"], np.ones((2, 4), np.float32), [("c.png", "truncated")]
            embeddings.write(place / f"x{suffix}", [batch], 4, {"run": "r", "checkpoint": 1, "source": "s"})
            found[suffix] = (place / f"x{suffix}").read_bytes()
        return found
    finally:
        shutil.rmtree(place)


@target("embeddings", lambda: st.tuples(st.sampled_from([".npz"]), mutations()))
def check_embeddings(given: tuple[str, Any], place: Path) -> None:
    suffix, changes = given
    path = place / f"x{suffix}"
    path.write_bytes(mutate(_embeddings()[suffix], changes))
    for mapped in (False, True):
        with accepting_errors():
            found = embeddings.read(path, mapped=mapped)
            assert len(found.names) == len(found.vectors)


# Data


def _tables() -> st.SearchStrategy[bytes]:
    cells = st.one_of(st.sampled_from(["a/0.png", "a/1.png", "b/2.png", "file", "label", "cat", "dog"]), texts())
    good = st.tuples(st.sampled_from(["a/0.png", "a/1.png", "b/2.png", "0.png", "./a/1.png"]), cells).map(list)
    rows = st.one_of(
        st.lists(good, min_size=1, max_size=5).map(lambda found: [["file", "label"], *found]),
        st.lists(st.one_of(good, st.lists(cells, max_size=4)), max_size=6),
    )
    delimiters = st.sampled_from([",", ";", "\t", ", "])

    def encoded(parts: tuple[list[list[str]], str, str]) -> bytes:
        lines, delimiter, encoding = parts
        return "\n".join(delimiter.join(line) for line in lines).encode(encoding, errors="surrogatepass")

    codecs = st.sampled_from(["utf-8", "utf-8-sig", "utf-16"])
    valid = b'file,label\na/0.png,cat\na/1.png,dog\n"b/2.png",cat\n'
    return st.one_of(
        st.tuples(rows, delimiters, codecs).map(encoded), mutations().map(lambda c: mutate(valid, c)), st.binary()
    )


@target("labels", _tables)
def check_labels(data: bytes, place: Path) -> None:
    names = ["a/0.png", "a/1.png", "b/2.png"]
    (place / "labels.csv").write_bytes(data)
    with accepting_errors():
        found = labels.read_labels(place / "labels.csv", names)
        assert found
        assert found.keys() <= {*names}
        assert all(isinstance(label, str) and label for label in found.values())


@functools.cache
def _image(kind: str) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


KINDS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000")


@target("images", lambda: st.tuples(st.sampled_from(KINDS), mutations()))
def check_images(given: tuple[str, Any], place: Path) -> None:
    kind, changes = given
    (place / "x.png").write_bytes(mutate(_image(kind), changes))
    out = np.zeros((1, 3, 8, 8), np.uint8)
    [info] = decode.decode_into(out, [place / "x.png"])
    assert isinstance(info, decode.FileInfo) or (isinstance(info, str) and info)
    assert not isinstance(info, str) or len(info) < 1000


PICKLES = [
    pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2], b"names": [b"x", "y"]}, protocol)
    for protocol in (0, 1, 2, 3, 4)
]


@target("pickles of CIFAR", lambda: st.tuples(st.sampled_from(PICKLES), mutations()))
def check_pickle(given: tuple[bytes, Any], _: Path) -> None:
    try:
        found = load_arrays(mutate(*given))
    except Refused:
        return
    assert isinstance(found, dict)


def _cifar_parts() -> st.SearchStrategy[Any]:
    pixels = st.just(np.zeros((2, cifar.PIXELS), np.uint8))
    data = st.one_of(pixels, pixels, pixels, st.just(np.zeros((2, 3))), st.integers())
    numbers = st.lists(st.one_of(st.integers(0, 9), st.integers()), min_size=2, max_size=2)
    found = st.one_of(numbers, numbers, st.lists(st.one_of(st.integers(), st.text()), max_size=3), st.text())
    ten = st.lists(st.one_of(st.binary(), st.text(), st.integers()), min_size=10, max_size=10)
    names = st.one_of(ten, st.lists(st.binary()), st.integers(), st.none(), st.text(), st.floats())
    return st.tuples(data, found, names, st.binary(max_size=80))


@target("files of CIFAR", _cifar_parts)
def check_cifar(given: Any, place: Path) -> None:
    data, found, names, text = given
    spec = replace(cifar.CIFAR10, files={"train": {"data_batch_1": 2}, "test": {"test_batch": 2}})
    python, binary = place / spec.python, place / spec.binary
    python.mkdir(), binary.mkdir()
    (python / "test_batch").write_bytes(pickle.dumps({b"data": data, b"labels": found}, 2))
    (python / "batches.meta").write_bytes(pickle.dumps({b"label_names": names}, 2))
    (binary / "test_batch.bin").write_bytes((text + bytes(2 * 3073))[: 2 * 3073])
    (binary / spec.names_binary).write_bytes(text)
    for each in (python, binary):
        with accepting_errors():
            images, numbers, classes = cifar.read(spec, each, "test")
            assert images.shape == (2, 3, 32, 32)
            assert len(numbers) == 2
            assert len(classes) == 10
            assert all(isinstance(name, str) for name in classes)


@target(
    "files of STL-10",
    lambda: st.lists(st.one_of(st.integers(1, 10), st.integers(0, 255)), min_size=2, max_size=2).map(bytes),
)
def check_stl10(data: bytes, place: Path) -> None:
    (place / "test_X.bin").write_bytes(bytes(2 * stl10.PIXELS))
    (place / "test_y.bin").write_bytes(data)
    with accepting_errors():
        images, found, _ = stl10.read(place, "test")
        assert len(images) == len(found) == 2
        assert {*found.tolist()} <= {*range(10)}


def _tiny_texts() -> st.SearchStrategy[tuple[str, bytes]]:
    files = {"wnids.txt": b"n01\nn02\n", "words.txt": b"n01\tcat, kitten\nn02\tdog\n"}
    files["val/val_annotations.txt"] = b"val_0.JPEG\tn01\t0\nval_1.JPEG\tn02\t0\n"
    one = st.sampled_from([*files])
    return one.flatmap(
        lambda name: st.tuples(
            st.just(name),
            st.one_of(
                mutations().map(lambda c: mutate(files[name], c)),
                st.binary(),
                texts().map(lambda t: t.encode(errors="surrogatepass")),
            ),
        )
    )


@target("files of Tiny-ImageNet", _tiny_texts)
def check_tiny(given: tuple[str, bytes], place: Path) -> None:
    name, data = given
    where = tiny(place / "tiny-imagenet-200")
    (where / name).write_bytes(data)
    for split in ("train", "test"):
        with accepting_errors():
            images, found, classes = tiny_imagenet.read(where, split, 1, 1)
            assert len(images) == len(found) == len(classes)


def _archives() -> st.SearchStrategy[Any]:
    names = st.one_of(
        st.sampled_from(
            ["data/a", "data/../a", "../x", "/tmp/mixnn-outside", "data", "data/b/", "data/a/b", "./data/c"]
        ),
        texts(),
    )
    kinds = st.sampled_from([*["file"] * 8, "folder", "symlink", "hardlink", "fifo", "device"])
    good = st.tuples(
        st.sampled_from(["data/a", "data/b/c", "data/ü", "data/d e"]), st.just("file"), st.binary(max_size=20)
    )
    bad = st.tuples(names, kinds, st.binary(max_size=20))
    members = st.one_of(
        st.lists(good, min_size=1, max_size=3), st.lists(st.one_of(good, good, bad), min_size=1, max_size=4)
    )
    return st.tuples(
        st.sampled_from(["tar", "tar.gz", "tar.bz2", "tar.xz", "zip"]), members, st.one_of(st.just([]), mutations())
    )


def _tar(kind: str, members: list[tuple[str, str, bytes]]) -> bytes:
    file = io.BytesIO()
    types = {"folder": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE}
    types |= {"fifo": tarfile.FIFOTYPE, "device": tarfile.CHRTYPE}
    with tarfile.open(fileobj=file, mode=f"w:{kind.partition('.')[2]}") as tar:  # type: ignore[call-overload]
        for name, what, data in members:
            member = tarfile.TarInfo(name)
            member.type, member.size = types.get(what, tarfile.REGTYPE), len(data) if what == "file" else 0
            member.linkname = "../../x" if what.endswith("link") else ""
            tar.addfile(member, io.BytesIO(data) if what == "file" else None)
    return file.getvalue()


def _zip(members: list[tuple[str, str, bytes]]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        for name, what, data in members:
            member = zipfile.ZipInfo(name or "x")
            member.external_attr = {"symlink": 0o120777, "fifo": 0o010644, "device": 0o020644}.get(what, 0o100644) << 16
            with contextlib.suppress(UnicodeEncodeError):
                out.writestr(member, data)
    return file.getvalue()


@target("archives", _archives)
def check_archive(given: Any, place: Path) -> None:
    kind, members, changes = given
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about two members of the same name
            data = _zip(members) if kind == "zip" else _tar(kind, members)
    except (ValueError, UnicodeError):  # no archive can hold such a name
        return
    (place / f"x.{kind}").write_bytes(mutate(data, changes))
    (place / "root").mkdir()
    with accepting_errors():
        archive.extract(place / f"x.{kind}", place / "root", "data")
    assert {path.name for path in place.iterdir()} == {f"x.{kind}", "root"}
    assert {path.name for path in (place / "root").iterdir()} <= {"data"}
    for path in (place / "root").rglob("*"):
        assert not path.is_symlink()
        assert path.is_file() or path.is_dir()


# Pages


class _Page(html.parser.HTMLParser):
    """The tags of a page with their attributes' names, and what is in its script elements."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.in_script = False
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.in_script = tag == "script"
        if self.in_script:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.tags.append((f"/{tag}", ()))
        self.in_script = False

    def handle_data(self, data: str) -> None:
        if self.in_script:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data

    def handle_comment(self, data: str) -> None:
        self.tags.append((f"comment {data[:20]}", ()))


def check_page(page: bytes, harmless: bytes) -> list[Any]:
    """What a page holds as JSON; its tags must be those of the same page about harmless names."""
    found = _Page(page)
    if found.tags != _Page(harmless).tags:
        raise Outside("a text became part of the page")
    return [json.loads(text) for about, text in found.scripts if about.get("type") == "application/json"]


def _names_and_labels() -> st.SearchStrategy[tuple[list[str], list[str], str]]:
    return st.tuples(st.lists(texts(), min_size=3, max_size=3), st.lists(texts(), min_size=2, max_size=2), texts())


@target("page of explore", _names_and_labels)
def check_explore(given: tuple[list[str], list[str], str], _: Path) -> None:
    def page(names: list[str], classes: list[str], title: str) -> bytes:
        points, near = np.zeros((3, 2), np.float32), np.array([[1], [2], [0]])
        data = MapData(names, points, near, np.zeros((3, 1)), np.array([0, 1, -1]), classes, np.zeros(3, int))
        data.title, data.notes, data.skipped = title, [title], [(names[0], title)]
        return render(data)

    meta, names = check_page(page(*given), page(["a", "b", "c"], ["x", "y"], "t"))[:2]
    assert names == given[0]
    assert meta["classes"] == given[1]
    assert meta["skipped"] == [[given[0][0], given[2]]]


@target("page of report", values)
def check_report(value: Any, _: Path) -> None:
    try:
        page = report.render({"runs": value})
    except ValueError:
        assert "NaN" in json.dumps(value) or "Infinity" in json.dumps(value)  # the report replaces them by null
        return
    assert check_page(page, report.render({"runs": None})) == [{"runs": value}]


class _Pictures:
    """Images that cannot be read."""

    def __init__(self, names: list[str], title: str) -> None:
        self.names, self.title, self.short_title = names, title, title
        self.position = {name: i for i, name in enumerate(names)}


@target("pages of search and classify", _names_and_labels)
def check_tiles(given: tuple[list[str], list[str], str], _: Path) -> None:
    def pages(names: list[str], classes: list[str], title: str) -> tuple[bytes, bytes]:
        pictures: Any = _Pictures(names, title)
        near = [{"rank": i + 1, "file": name, "similarity": 0.5} for i, name in enumerate(names)]
        row = {"query": title, "nearest": near}
        result = {
            "kind": "nearest",
            "run": title,
            "skipped": [],
            "queries": [row],
            "images": 3,
            "topk": 3,
            "centered": True,
        }
        found = search_page.page(result, pictures, [pictures]).encode(errors="backslashreplace")
        label_of = dict(zip(names, classes, strict=False))
        return found, classify_page.render(pictures, names, label_of, "labels.csv", title)

    if len({*given[0]}) < 3:
        return
    for page, harmless in zip(pages(*given), pages(["a", "b", "c"], ["x", "y"], "t"), strict=True):
        for data in check_page(page, harmless):
            assert data["names"] == given[0]


@target("JSON in pages", lambda: st.one_of(values(), texts()))
def check_json(value: Any, _: Path) -> None:
    try:
        text = webpage.as_json(value)
    except ValueError:
        return  # NaN or inf
    assert not {*"<>&"} & {*text}
    assert json.loads(text) == value


def _requests() -> st.SearchStrategy[bytes]:
    paths = st.one_of(
        st.sampled_from(["/", "/thumb/0", "/image/0", "/thumb/9", "/../etc/passwd", "/thumb/-1", "*"]), texts()
    )
    lines = st.tuples(
        st.sampled_from(["GET", "POST", "HEAD", "get", ""]), paths, st.sampled_from(["HTTP/1.1", "HTTP/9", ""])
    )
    whole = lines.map(
        lambda parts: (" ".join(parts) + "\r\nHost: 127.0.0.1:PORT\r\nConnection: close\r\n\r\n").encode(
            errors="replace"
        )
    )
    return st.one_of(whole, st.tuples(whole, mutations()).map(lambda both: mutate(*both)), st.binary())


@functools.cache
def _server() -> Server:
    thumbnails: Any = SimpleNamespace(square=lambda *_: (b"x", "image/png"), images=None)
    server = Server(b"the page", type("Three", (SimpleNamespace,), {"__len__": lambda _: 3})(**vars(thumbnails)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@target("requests to the server", _requests)
def check_server(request: bytes, _: Path) -> None:
    server = _server()
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request.replace(b"PORT", str(server.server_port).encode()))
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(4096):
                answer += part
    body = answer.partition(b"\r\n\r\n")[2]
    if answer.startswith(b"HTTP/1.1 200"):
        assert body.startswith((b"the page", b"x"))
    assert b"root:" not in answer
    assert b"Traceback" not in answer


# How targets are run

_watched: list[Path] = []  # the folder that may be written to, while a case runs


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watched or threading.current_thread() is not threading.main_thread():
        return
    if event in PROGRAMS:
        raise Outside(f"{event} {args[:2]}")
    writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if (writes or event in CHANGES) and isinstance(args[0], (str, bytes, os.PathLike)):
        path = os.path.abspath(os.fsdecode(args[0]))
        is_relative = not os.path.isabs(os.fsdecode(args[0]))  # shutil.rmtree names files relative to a descriptor
        if not path.startswith((str(_watched[0]), "/dev/")) and not is_relative and "__pycache__" not in path:
            raise Outside(f"{event} {path}")


@functools.cache
def _install() -> None:
    importlib.import_module("torch._dynamo")  # it makes a folder for its cache
    for prepare in (_run_files, _export, _state_dict, _embeddings):
        prepare()
    sys.addaudithook(_audit)


def _expire(_number: int, _frame: FrameType | None) -> None:
    raise Outside(f"no end after {TIME_LIMIT:.0f} s")


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_target(name: str, cases: int, seed: int | None = None) -> int:
    """Runs a target; returns the number of cases. Without a seed the cases are always the same."""
    _install()
    strategy, function = TARGETS[name]
    count = 0

    def one(given: Any) -> None:
        nonlocal count
        count += 1
        place = Path(os.path.realpath(tempfile.mkdtemp(prefix="mixnn-fuzz-")))
        before = signal.signal(signal.SIGALRM, _expire)
        cache = os.environ.get("MIXNN_CACHE")
        os.environ["MIXNN_CACHE"] = str(place / "cache")
        signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT)
        _watched.append(place)
        try:
            function(given, place)
        finally:
            _watched.clear()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            os.environ.pop("MIXNN_CACHE") if cache is None else os.environ.update(MIXNN_CACHE=cache)
            shutil.rmtree(place, ignore_errors=True)

    settings = hypothesis.settings(
        max_examples=cases, deadline=None, database=None, derandomize=seed is None,
        suppress_health_check=[*hypothesis.HealthCheck],
    )  # fmt: skip
    test = settings(hypothesis.given(strategy())(one))
    before = _peak()
    (test if seed is None else hypothesis.seed(seed)(test))()
    if _peak() - before > MEMORY_LIMIT:
        raise Outside(f"the process grew by {(_peak() - before) / 2**20:.0f} MiB")
    return count


def fuzz() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Hostile input for everything that reads."
    )
    parser.add_argument("--cases", type=int, default=52_000, help="how many, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets whose name contains this text")
    given = parser.parse_args()
    torch.set_num_threads(1)
    _install()
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2 * MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))  # so that a failure does not take the machine's memory
    names = [name for name in TARGETS if given.only in name]
    rows, failed, total, begun = [], [], 0, time.perf_counter()
    for name in names:
        start = time.perf_counter()
        try:
            _refused.clear()
            cases, outcome = run_target(name, max(1, given.cases // len(names)), given.seed), "0"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            cases, outcome = 0, "1 or more"
            failed.append(name)
            print(f"--- {name}, seed {given.seed}\n{''.join(traceback.format_exception(error))[-6000:]}", flush=True)
        total += cases
        row = [name, str(cases or "stopped"), str(len(_refused)), outcome, f"{time.perf_counter() - start:.0f}"]
        rows.append(f"| {' | '.join(row)} |")
        print(rows[-1], flush=True)
    print(
        "\n".join(
            ["", "| target | cases | clear errors | failures | seconds |", "| --- | ---: | ---: | ---: | ---: |", *rows]
        )
    )
    print(
        f"{total:,} cases, seed {given.seed}, {time.perf_counter() - begun:.0f} s; "
        f"failed: {', '.join(failed) or 'none'}"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(fuzz())
