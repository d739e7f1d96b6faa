"""A full or read-only disk, a removed folder or a second process costs neither a number nor work for nothing."""

import json
import os
import re
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mixnn
from mixnn.apps import embed as embedding
from mixnn.apps import embeddings as store
from mixnn.cli import main
from mixnn.config import NotSaved, UserError
from mixnn.files import lock_output, lock_run, write_atomically
from mixnn.progress import Reporter
from mixnn.runs import Run
from tests.command import FORKS, command

QUIET = Reporter(quiet=True)
TINY = {"batch_size": 4, "bn_groups": 1, "image_size": 16, "backbone": "resnet8", "init_from": "none", "knn_every": 0}
OPTIONS = {"hidden": 8, "dim": 8, "support_size": 8}


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    place, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for i in range(16):
        folder = place / ("train", "test")[i % 4 == 3] / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    for name in ("train", "test"):  # both classes in both
        Image.new("RGB", (16, 16)).save(place / name / "b" / "x.png")
        (place / name / "a").mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), "white").save(place / name / "a" / "y.png")
    return place


@pytest.fixture(scope="module")
def made(photos: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    return mixnn.pretrain(photos, out=out, labels="folders", epochs=1, options=OPTIONS, verbose=QUIET, **TINY).path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def full_disk(limit: int = 2000) -> None:
    """Files that grow beyond the limit fail to be written, as on a full disk; messages are shorter."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def read_only(folder: Path) -> None:
    """The system's answer about a read-only folder; the tests may run as root, who can write everywhere."""
    access, opened = os.access, os.open

    def refuse(path, *args, **kwargs):
        if Path(os.fsdecode(path)).parent == folder and args and args[0] & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    os.access = lambda path, mode: Path(path) != folder and access(path, mode)
    os.open = refuse
    Path.write_bytes = lambda path, _: refuse(path, os.O_WRONLY)


def test_evaluate_prints_its_numbers_although_the_disk_is_full(run: Path):
    done = command("evaluate", run, "--protocol", "knn", fault=full_disk, args=[500])
    assert done.code == 2, done.err
    assert re.match(r"kNN +\d+\.\d\d", done.out)
    assert re.match("mixnn: cannot write .*: File too large", done.err.splitlines()[-1])
    assert "Traceback" not in done.err


def fail_to_save(*_: object) -> None:
    raise UserError("cannot write: the disk is full")


def test_so_it_does_as_json(run: Path, monkeypatch, capsys):
    monkeypatch.setattr(Run, "save_results", fail_to_save)
    assert main(["evaluate", str(run), "--protocol", "knn", "--json"]) == 2
    said = capsys.readouterr()
    assert 0 <= json.loads(said.out)["knn"]["weighted"] <= 100
    assert said.err.endswith("mixnn: cannot write: the disk is full\n")


def test_and_for_a_run_folder_that_is_read_only(run: Path):
    done = command("evaluate", run, "--protocol", "knn", fault=read_only, args=[run])
    assert done.code == 2, done.err
    assert re.match(r"kNN +\d+\.\d\d", done.out)
    assert "will be printed, but cannot be saved" in done.err.splitlines()[0]
    assert "Traceback" not in done.err


def test_in_python_the_error_holds_the_numbers(run: Path, monkeypatch):
    monkeypatch.setattr(Run, "save_results", fail_to_save)
    with pytest.raises(NotSaved, match="the disk is full") as caught:
        mixnn.evaluate(run, protocol="knn", verbose=QUIET)
    assert 0 <= caught.value.result["knn"]["weighted"] <= 100


def no_work(*_: object, **__: object) -> None:
    raise AssertionError("work before the check")


def full_disk_without_work(limit: int = 2000) -> None:
    Run.load_checkpoint = no_work
    full_disk(limit)


@pytest.mark.parametrize(
    "words",
    ["explore {}", "classify {} --suggest 2", "classify {} folders", "report {}", "export {}", "embed {}",
     "search {} --outliers --format html", "evaluate {} --save {}/x.json", "embed {} --out {}/x.csv"],
)  # fmt: skip
def test_a_full_disk_is_noticed_before_any_work(run: Path, words: str):
    before = sorted(path.name for path in run.iterdir())
    done = command(*words.replace("{}", str(run)).split(), fault=full_disk_without_work)
    assert done.code == 2, done.err
    assert re.fullmatch(r"mixnn: cannot write .*: File too large in .*\n", done.err)
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_folder_of_images_is_not_encoded_if_no_run_folder_can_be_made(photos: Path, tmp_path: Path, monkeypatch):
    from mixnn.runs import start

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mixnn.files.why_not_writable", lambda _: "the disk is full")
    monkeypatch.setattr(start, "initial_backbone", no_work)
    with pytest.raises(UserError, match="the disk is full"):
        mixnn.embed(photos, verbose=QUIET)


# --- a run folder that disappears ---


@pytest.mark.parametrize("what", ["removed", "moved", "replaced"])
def test_a_run_folder_that_is_gone_is_noticed_at_the_next_write(photos: Path, tmp_path: Path, monkeypatch, what: str):
    run, save = tmp_path / "run", Run.save_checkpoint

    def remove(self, *args, **kwargs):
        run.rename(tmp_path / "elsewhere")
        if what == "removed":
            shutil.rmtree(tmp_path / "elsewhere")
        if what == "replaced":
            run.mkdir()
        return save(self, *args, **kwargs)

    monkeypatch.setattr(Run, "save_checkpoint", remove)
    with pytest.raises(UserError, match=r"run was removed, moved or replaced during training[\s\S]*start"):
        mixnn.pretrain(photos, out=run, epochs=2, options=OPTIONS, verbose=QUIET, **TINY)
    assert not run.exists() or list(run.iterdir()) == []


def test_nothing_is_logged_into_another_folder(tmp_path: Path, made: Path):
    shutil.copytree(made, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    with lock_run(run.path):
        run.log({"step": 9})
        shutil.rmtree(run.path)
        shutil.copytree(made, run.path)
        with pytest.raises(UserError, match="removed, moved or replaced"):
            run.log({"step": 10})
    write_atomically(run.path / "notes.txt", b"free again")


# --- two processes, one file ---


def embed_slowly(run: Path, out: Path, started) -> None:
    def wait(*_: object, **__: object) -> None:
        started.set()
        signal.pause()

    embedding.load_or_encode = wait
    mixnn.embed(run, out=out, verbose=QUIET)


def test_a_second_embed_into_the_same_file_is_refused_until_the_first_is_killed(run: Path, tmp_path: Path, capsys):
    (tmp_path / "out").mkdir()
    out, started = tmp_path / "out" / "x.npz", FORKS.Event()
    other = FORKS.Process(target=embed_slowly, args=(run, out, started), daemon=True)
    other.start()
    assert started.wait(600)
    assert main(["embed", str(run), "--out", str(out), "--quiet"]) == 2
    assert "another process is writing" in capsys.readouterr().err
    assert main(["embed", str(run), "--out", str(tmp_path / "y.npz"), "--quiet"]) == 0
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    assert main(["embed", str(run), "--out", str(out), "--quiet"]) == 0
    assert len(store.read(out)) == 20
    assert [path.name for path in out.parent.iterdir()] == ["x.npz"]


def test_a_file_that_appeared_while_another_process_held_it_is_not_replaced(tmp_path: Path):
    (tmp_path / "x.npz").write_text("mine")
    with pytest.raises(UserError, match="exists"), lock_output(tmp_path / "x.npz", overwrite=False):
        pytest.fail("it is not free")
    with lock_output(tmp_path / "x.npz", overwrite=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]
