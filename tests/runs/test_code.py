"""The digest of the code behind a number: what changes it, and what does not."""

import importlib
from pathlib import Path

import pytest

import mixnn
from mixnn import files, methods
from mixnn.progress import Reporter
from mixnn.runs import Run, code

SOURCE = '''"""What it is."""
import math

def scale(x, reporter):
    """Twice x."""  # a comment
    if x < 0:
        raise ValueError("negative")
    reporter.info("scaling")
    return 2 * x

rate: float = option(0.1, "how fast", "the paper", low=0)
'''


def digest(folder: Path, text: str) -> str:
    (folder / "part.py").write_text(text)
    return code.digest([folder / "part.py"])


@pytest.mark.parametrize(
    "old, new",
    [
        ('"""Twice x."""  # a comment', '"""Two times x."""'),
        ('    """Twice x."""  # a comment\n', ""),
        ("What it is", "Something else"),
        ('ValueError("negative")', 'ValueError("x is negative: use another")'),
        ("scaling", "now scaling"),
        ("2 * x", "(2 * x)  # why"),
        ('"how fast", "the paper"', '"the learning rate", "table 1 of the paper"'),
        ('"how fast", "the paper"', '"how fast"'),
        ("(x, reporter)", "(\n    x,\n    reporter,\n)"),
    ],
)
def test_words_and_formatting_do_not_change_the_digest(tmp_path: Path, old: str, new: str):
    assert old in SOURCE
    assert digest(tmp_path, SOURCE.replace(old, new)) == digest(tmp_path, SOURCE)


@pytest.mark.parametrize(
    "old, new",
    [
        ("2 * x", "3 * x"),
        ("2 * x", "2.0 * x"),
        ("x < 0", "x <= 0"),
        ("2 * x", "x * 2"),
        ("math", "cmath"),
        ("0.1", "0.2"),
        ("low=0", "low=1"),
    ],
)
def test_what_the_code_does_changes_the_digest(tmp_path: Path, old: str, new: str):
    assert digest(tmp_path, SOURCE.replace(old, new)) != digest(tmp_path, SOURCE)


def change(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Let one file of the package have another statement."""
    read = Path.read_text

    def changed(self: Path, *args: str, **named: str) -> str:
        text = read(self, *args, **named)
        return f"{text}\nADDED = 1\n" if self == files.PACKAGE / part else text

    monkeypatch.setattr(Path, "read_text", changed)


@pytest.mark.parametrize(
    "part",
    [
        "functional.py", "functional_kernels.py", "augment_kernels.py", "dist.py", "nn/encoder.py",
        "methods/siamese.py", "methods/mixture.py", "methods/mnn.py",
        "training/step.py", "training/trainer.py", "training/schedule.py",
        "training/configure.py", "training/pretrain.py", "training/recipes.py",
        "device.py", "runs/weights.py", "data/image_set.py", "data/cifar.py", "data/decode.py", "data/dataset.py",
    ],
)  # fmt: skip
def test_all_that_trains_a_method_is_in_its_digest(monkeypatch: pytest.MonkeyPatch, part: str):
    before = code.training_digest("mnn"), code.training_digest("byol"), code.evaluation_digest()
    change(monkeypatch, part)
    after = code.training_digest("mnn"), code.training_digest("byol"), code.evaluation_digest()
    assert before[0] != after[0]
    assert (before[1] == after[1]) == (part == "methods/mnn.py"), "another method's file"
    assert (before[2] != after[2]) == (not part.startswith(("methods", "training")))


@pytest.mark.parametrize(
    "part", [f"evaluation/{name}.py" for name in ("knn", "linear", "features", "evaluate", "protocol", "encoders")]
)
def test_the_code_of_an_evaluation_is_in_its_digest_only(monkeypatch: pytest.MonkeyPatch, part: str):
    before = code.evaluation_digest(), code.training_digest("mnn")
    change(monkeypatch, part)
    assert code.evaluation_digest() != before[0]
    assert code.training_digest("mnn") == before[1]


@pytest.mark.parametrize("part", ["cli.py", "progress.py", "data/download.py", "data/cache.py", "paper/figures.py"])
def test_code_that_cannot_change_a_number_is_in_no_digest(monkeypatch: pytest.MonkeyPatch, part: str):
    before = code.evaluation_digest(), code.training_digest("mnn")
    change(monkeypatch, part)
    assert (code.evaluation_digest(), code.training_digest("mnn")) == before


def test_every_file_of_a_digest_exists():
    for part in {*code.TRAINING, *code.EVALUATION}:
        assert (files.PACKAGE / part).exists(), part


def test_methods_have_different_digests():
    assert len({code.training_digest(name) for name in methods.METHODS}) == len(methods.METHODS)


def test_a_method_without_a_file_has_no_digest(monkeypatch: pytest.MonkeyPatch):
    space: dict[str, object] = {"__name__": "__shell__"}
    exec("from mixnn.methods.mnn import MNN\nclass Mine(MNN):\n    'typed into a shell'", space)
    monkeypatch.setitem(methods.METHODS, "mine", space["Mine"])
    assert code.training_digest("mine") == ""
    assert code.training_digest("mnn") != ""


def test_files_that_a_run_imports_are_in_its_digest(tmp_path: Path):
    path = tmp_path / "network.py"
    path.write_text("width = 8")
    before = code.training_digest("mnn", [str(path)])
    assert before != code.training_digest("mnn")
    path.write_text("width = 9")
    assert code.training_digest("mnn", [str(path)]) not in (before, "")
    assert code.training_digest("mnn", [str(tmp_path / "gone.py")]) == ""
    assert code.training_digest("mnn", ["json"]) not in (code.training_digest("mnn"), "")
    assert code.training_digest("mnn", ["numpy._core._multiarray_umath"]) == "", "compiled code"


def test_all_files_of_a_package_that_a_run_imports_are_in_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "a_package_of_ones_own"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "network.py").write_text("width = 8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(package.name)
    before = code.training_digest("mnn", [package.name])
    (package / "network.py").write_text("width = 9")
    assert code.training_digest("mnn", [package.name]) not in (before, "")


def test_a_run_records_its_code_and_that_of_whatever_continues_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = {"limit": 64, "epochs": 1, "backbone": "resnet8", "batch_size": 32, "knn_every": 0}
    run = mixnn.pretrain("digits", out=tmp_path / "run", verbose=Reporter(quiet=True), **settings)
    own = code.training_digest("mnn")
    assert run.environment()["training_code"] == own
    found = mixnn.evaluate(run, protocol="knn", verbose=Reporter(quiet=True))
    assert found["knn"]["code"] == code.evaluation_digest()
    mixnn.pretrain(resume=run, epochs=2, verbose=Reporter(quiet=True))
    assert Run.open(run.path).environment()["training_code"] == own, "the same code"
    change(monkeypatch, "training/step.py")
    other = code.training_digest("mnn")
    warned = []
    monkeypatch.setattr(Reporter, "warn", lambda _, message: warned.append(message))
    mixnn.pretrain(resume=run, epochs=3, verbose=Reporter(quiet=True))
    assert Run.open(run.path).environment()["training_code"] == f"{own}+{other}"
    assert warned == [f"the code that trains {run.path} has changed since; it continues with today's"]
    mixnn.pretrain(resume=run, epochs=4, verbose=Reporter(quiet=True))
    assert len(warned) == 1, "it is no longer new"
