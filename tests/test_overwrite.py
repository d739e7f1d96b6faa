"""No file of the user's is ever removed or replaced, whatever --overwrite and --out say."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

import mixnn
from mixnn.apps import demo
from mixnn.cli import main
from mixnn.config import UserError
from mixnn.progress import Reporter

QUIET = Reporter(quiet=True)
TINY = ["--epochs", "1", "--limit", "64", "--batch-size", "16", "--knn-every", "0", "--quiet"]
# Things that people put into a run folder, also where mixnn keeps files of its own.
USERS = ("mine/cat.png", "mine/deep/dog.png", "notes.txt", "checkpoints/best.safetensors", "checkpoints/readme.txt",
         "classifier/suggestions.csv", "embeddings/vectors.npz", "encoder.safetensors", "figures/a.png",
         "report.html", "explore.html", "nearest.html", "embeddings.npz")  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the user's files in it."""
    path = tmp_path / "run"
    assert main(["pretrain", "digits", "--out", str(path), *TINY]) == 0
    for i, name in enumerate(USERS):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".png"):
            Image.new("RGB", (12, 12), (i, 9 * i, 7)).save(path / name)
        else:
            (path / name).write_text(f"mine {i}")
    return path


def contents(folder: Path, names: tuple[str, ...] = USERS) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


def every_file(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_overwriting_a_run_leaves_the_users_files(run: Path):
    before, old = contents(run), (run / "config.yaml").read_bytes()
    assert main(["pretrain", "digits", "--seed", "3", "--out", str(run), "--overwrite", *TINY]) == 0
    assert contents(run) == before
    assert (run / "config.yaml").read_bytes() != old
    mixnn.load(run)


def test_images_inside_the_run_folder_are_refused_and_nothing_changes(run: Path, capsys):
    before = every_file(run)
    assert main(["pretrain", str(run / "mine"), "--out", str(run), "--overwrite", *TINY]) == 2
    assert "lies inside the run folder" in capsys.readouterr().err
    assert every_file(run) == before


def test_so_are_labels_inside_it_and_a_run_folder_reached_by_a_link(run: Path, tmp_path: Path):
    photos = tmp_path / "photos"
    shutil.copytree(run / "mine", photos)
    labels = run / "labels.csv"
    labels.write_text("cat.png,cat\n")
    before = every_file(run)
    (tmp_path / "link").symlink_to(run)
    for data, given, out in ((photos, labels, run), (tmp_path / "link" / "mine", "", run), (run / "mine", "", "link")):
        with pytest.raises(UserError, match="lies inside the run folder"):
            mixnn.pretrain(data, labels=str(given), out=tmp_path / out, overwrite=True, epochs=1, verbose=QUIET)
    assert every_file(run) == before


def test_a_new_demo_leaves_them_too(run: Path, monkeypatch):
    (run / "command.txt").write_text(demo.COMMAND + "\n")  # as if an earlier demo had made it
    monkeypatch.setattr(demo, "NUM_DRAWS", 1)
    before = contents(run)
    mixnn.demo(out=run, epochs=1, verbose=QUIET)
    assert contents(run) == before


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "results.json", "checkpoints/x.safetensors", "checkpoints/report.html"]
)
def test_no_output_replaces_or_joins_the_files_of_a_run(run: Path, name: str, capsys):
    before = every_file(run)
    for words in ("report RUN --images 0 --out", "evaluate RUN --save", "export RUN --out", "embed RUN --out"):
        command = [str(run) if word == "RUN" else word for word in words.split()]
        assert main([*command, str(run / name), "--overwrite", "--quiet"]) == 2
        refused = capsys.readouterr().err
        assert "run folder" in refused or "end in .safetensors" in refused or "unknown format" in refused
    assert every_file(run) == before


def test_pretrain_asks_whether_it_can_write_before_it_reads_an_image(tmp_path, monkeypatch):
    def read(*_):
        pytest.fail("images were read")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mixnn.training.pretrain._configure", read)
    Path("taken").write_text("")
    Path("runs").write_text("")
    for out, place in (("taken/run", "taken"), ("", "runs")):
        with pytest.raises(UserError, match=f"{place} is a file"):
            mixnn.pretrain("digits", out=out)
