"""docs/api.md is made from signatures and docstrings, and every example on it runs. Functions print nothing by default.

python -m tests.test_api    writes the page
"""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import os
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mixnn
from mixnn.config import fields_of, parameters
from mixnn.methods import METHODS
from mixnn.paper import bench, measure
from mixnn.progress import NullReporter, Reporter

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
COMMANDS = ["pretrain", "evaluate", "embed", "search", "classify", "explore", "report", "export", "diagnose"]
COMMANDS += ["verify", "demo", "reproduce", "figures", "bench"]
REGISTRIES = {
    "METHODS": ("methods", "mnn", 'mixnn.METHODS["mnn"]'),
    "BACKBONES": ("networks", "resnet18", 'mixnn.BACKBONES["resnet18"](image_size=32, bn_groups=1)'),
    "DATASETS": ("data sets", "cifar10", 'mixnn.DATASETS["cifar10"].num_classes'),
    "VIEWS": ("kinds of views", "strong", 'mixnn.VIEWS["strong"](size=32)'),
    "PROTOCOLS": ("evaluation protocols", "knn", 'mixnn.PROTOCOLS["knn"].numbers'),
    "OPTIMIZERS": ("optimizers", "lars", 'mixnn.OPTIMIZERS["lars"]'),
    "SCHEDULES": ("learning-rate schedules", "linear", 'mixnn.SCHEDULES["linear"]'),
    "LOGGERS": ("loggers", "tensorboard", 'mixnn.LOGGERS["tensorboard"]'),
}
OBJECTS = ["Run", "Config", "View", "UserError", "MixnnWarning"]
PARTS = {
    "methods": ["Method", "option", "other_default"],
    "functional": [],  # all
    "augment": ["augment", "Augment", "TwoViews", "strong", "weak", "normalize"],
    "nn": ["build_backbone", "ResNet", "Student", "Teacher", "SupportSet", "SplitBatchNorm", "mlp"],
    "data": ["load", "open_dataset", "open_images", "get", "to_folder", "ImageSet"],
    "evaluation": ["knn", "linear_probe"],
}
INTRODUCTION = """\
# API

Everything that is public, with an example of each. A test runs the examples, and makes this page from signatures and
docstrings. `help(mixnn.pretrain)` says more.

The examples use these names. `"photos"` is a folder of images, and `"runs/photos"` a run on it.
"""
INTRODUCTIONS = {
    "functions": "Each is a command too. They return objects and print nothing; with `verbose=True` they say on stderr "
    "what they do. Warnings are Python warnings of the category `mixnn.MixnnWarning`. What a user can fix raises "
    "`mixnn.UserError`, a ValueError. The `settings` of `pretrain` are the fields of `mixnn.Config` and the options "
    "of the method.",
    "methods": "A method is a module: `loss = method(x1, x2)`, then `method.after_step()` after the optimizer's step. "
    "[Your own loop](loops.md) explains that. Options may be given as keyword arguments; "
    "[methods.md](methods.md) and `mixnn methods NAME` say what they mean.",
    "functional": "Equations as functions of tensors. The letters behind an underscore are the shape: B images, D "
    "embedding, K neighbors, N targets, Q rows of the support set.",
    "augment": "Random views of batches, on the images' device. [docs/performance.md](performance.md) times them.",
    "nn": "Networks, and the parts that methods are made of.",
    "data": "What `data` may be is listed in [data.md](data.md).",
    "evaluation": "Protocols on features that you have. [evaluation.md](evaluation.md) says what the numbers mean.",
}
SETUP = """\
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import mixnn

backbone = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
x1, x2, x3 = torch.randn(3, 8, 3, 32, 32)  # views of 8 images, normalized
z, neighbors, support = torch.randn(8, 16), torch.randn(8, 3, 16), torch.randn(32, 16)  # (B, D), (B, K, D), (Q, D)
labels, index = torch.arange(8) % 2, torch.arange(8)
train_y, test_y = np.arange(100) % 2, np.arange(20) % 2
train_x, test_x = (np.eye(2)[y] + np.random.default_rng(0).normal(0, 0.1, (len(y), 2)) for y in (train_y, test_y))
"""


# The page


def public_functions(module: ModuleType) -> list[str]:
    found = {name: one for name, one in vars(module).items() if inspect.isfunction(one) and not name.startswith("_")}
    return [name for name, one in found.items() if one.__module__ == module.__name__]


def annotation(hint: Any) -> str:
    """A type in few words: without modules and quotes."""
    text = "None" if hint is type(None) else inspect.formatannotation(hint)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])", "", text.replace("'", ""))


def type_hints(function: Any) -> dict[str, Any]:
    return typing.get_type_hints(function, localns={"ProcessGroup": torch.distributed.ProcessGroup})


def signature(name: str, one: Any) -> str:
    """The call, with types and defaults, in lines of at most 120 characters."""
    function = one.__init__ if inspect.isclass(one) else inspect.unwrap(one)
    if inspect.isclass(one) and not inspect.isfunction(function):
        return name  # an exception
    hints, parts = type_hints(function), []
    for parameter in inspect.signature(one if inspect.isclass(one) else function).parameters.values():
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        default = "" if parameter.default is parameter.empty else f" = {shown_default(parameter.default)}"
        parts.append(f"{stars}{parameter.name}: {annotation(hints.get(parameter.name, Any))}{default}")
    result = "" if inspect.isclass(one) else f" -> {annotation(hints['return'])}"
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= 100:
        return line
    about = fields_of(one) if one is mixnn.Config else parameters(one) if name.count(".") == 1 else {}
    lines = []
    for part in parts:
        meaning = about[key].param.help if (key := part.strip("*").partition(":")[0]) in about else ""
        lines.append(f"    {part},{'  # ' * bool(meaning)}{meaning}\n")
    return f"{name}(\n{''.join(lines)}){result}"


def shown_default(value: Any) -> str:
    if inspect.isfunction(value) or type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        return "..."
    return repr(value)


def first_paragraph(one: Any) -> str:
    return " ".join((inspect.getdoc(one) or "").split("\n\n")[0].split())


def examples(one: Any) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(one) or "")


def entry(name: str, one: Any) -> str:
    lines = []
    for example in examples(one):
        first, *more = example.source.rstrip("\n").split("\n")
        lines += [f">>> {first}", *(f"... {line}" for line in more), *example.want.rstrip("\n").splitlines()]
    code = "\n".join([signature(name, one), "", *lines])
    return f"### `{name}`\n{wrapped(first_paragraph(one))}\n```python\n{code}\n```\n"


def method_call(name: str) -> str:
    """How a method is made and called, with what it needs."""
    cls = METHODS[name]
    options = cls.Options()
    made = ", ".join(["backbone", *(f"{fact}={ {'num_classes': 2, 'num_images': 8}[fact] }" for fact in cls.facts)])
    views = [f"x{i + 1}" for i in range(len(cls(torch.nn.Flatten(), num_features=4, **facts(cls)).views))]
    views += ["labels=labels"] * cls.uses_labels(options) + ["index=index"] * cls.uses_index(options)
    return f"loss = mixnn.methods.{cls.__name__}({made})({', '.join(views)})"


def facts(cls: Any) -> dict[str, int]:
    return dict.fromkeys(cls.facts, 8)


def method_row(name: str) -> str:
    cls = METHODS[name]
    options = ", ".join(f"{field.name}={field.default}" for field in dataclasses.fields(cls.Options))
    return (
        f"### `{cls.__name__}`\n{cls.about.idea[0].upper()}{cls.about.idea[1:]} ({cls.about.paper}).\n"
        f"{wrapped(f'Options: {options}.')}\n```python\n{method_call(name)}\n```\n"
    )


def registry_row(name: str) -> str:
    kind, _, code = REGISTRIES[name]
    return f"| `mixnn.{name}` | {kind} | `{code}` |"


def names_of(part: str) -> list[str]:
    return PARTS[part] or public_functions(getattr(mixnn, part))


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def page() -> str:
    text = [INTRODUCTION]
    text += [f"```python\n{SETUP}```\n", f"## Functions\n{wrapped(INTRODUCTIONS['functions'])}\n"]
    text += [entry(f"mixnn.{name}", getattr(mixnn, name)) for name in [*COMMANDS, "load", *OBJECTS]]
    text += ["## Registries\nThings by name, as mappings. [extending.md](extending.md) says how to add yours.\n"]
    text += ["| registry | of | example |\n|---|---|---|\n" + "\n".join(map(registry_row, REGISTRIES)) + "\n"]
    for part in PARTS:
        text.append(f"## mixnn.{part}\n{wrapped(INTRODUCTIONS[part])}\n")
        text += [entry(f"mixnn.{part}.{name}", getattr(getattr(mixnn, part), name)) for name in names_of(part)]
        text += [method_row(name) for name in METHODS] if part == "methods" else []
    return "\n".join(text)


# Tests


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the examples name: photos of two kinds, a run on them, and the committed results."""
    place, patch = tmp_path_factory.mktemp("api"), pytest.MonkeyPatch()
    patch.setenv("MIXNN_CACHE", str(place / "cache"))
    rng = np.random.default_rng(0)
    (place / "photos").mkdir()
    for kind, level in (("cat", 40), ("dog", 200)):
        for i in range(8):
            pixels = rng.integers(level, level + 50, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / "photos" / f"{kind}{i}.png")
    patch.chdir(place)
    small: dict[str, Any] = {"backbone": "resnet8", "image_size": 32, "batch_size": 8, "bn_groups": 1, "epochs": 1}
    small |= {"warmup_epochs": 0, "init_from": "none", "support_size": 8, "device": "cpu"}
    mixnn.pretrain("photos", out="runs/photos", verbose=NullReporter(), **small)
    os.symlink(ROOT / "results", place / "results")
    patch.setattr(measure, "NUM_IMAGES", 256)
    patch.setattr(measure, "REPEATS", 1)
    patch.setattr(bench, "matmul_tflops", lambda _: 0.1)  # seconds of work that this test does not need
    yield place
    patch.undo()


@pytest.fixture
def names(place: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(place)
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    exec(SETUP, found)
    return found


ENTRIES = {f"mixnn.{name}": getattr(mixnn, name) for name in [*COMMANDS, "load", *OBJECTS]}
ENTRIES |= {f"mixnn.{part}.{name}": getattr(getattr(mixnn, part), name) for part in PARTS for name in names_of(part)}


def test_the_page_is_made_from_the_code():
    assert PAGE.read_text() == page(), "run: python -m tests.test_api"


def test_everything_at_the_top_is_on_the_page():
    assert {*COMMANDS, "load", *OBJECTS, *REGISTRIES, *PARTS} == set(dir(mixnn))
    assert set(mixnn.methods.__all__) >= {cls.__name__ for cls in METHODS.values()}
    assert set(PARTS["evaluation"]) == {name for name in mixnn.evaluation.__all__ if name.islower()}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_has_a_docstring_types_and_an_example_that_runs_and_prints_nothing(name, names, capsys):
    one = ENTRIES[name]
    function = one.__init__ if inspect.isclass(one) else inspect.unwrap(one)
    if inspect.isfunction(function):
        hints = type_hints(function)
        assert {p for p in inspect.signature(function).parameters if p != "self"} <= hints.keys()
    assert first_paragraph(one)
    found = examples(one)
    assert found
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.REPORT_NDIFF)
    report: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "warn", lambda _, text: pytest.fail(text))
        runner.run(doctest.DocTest(found, names, name, None, 0, None), out=report.append, clear_globs=False)
    assert runner.failures == 0, "".join(report)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_called_as_the_page_says(name, names):
    exec(method_call(name), names)
    assert names["loss"].requires_grad


@pytest.mark.parametrize("name", REGISTRIES)
def test_the_example_of_a_registry_runs(name, names):
    _, example, code = REGISTRIES[name]
    assert example in getattr(mixnn, name)
    assert example in code
    eval(code, names)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_signature_has_no_internals_and_ends_silent(name):
    parameters = inspect.signature(getattr(mixnn, name)).parameters
    assert not {"reporter", "command", "started", "clock"} & parameters.keys()
    assert parameters["verbose"].default is False


def test_only_verbose_makes_a_function_speak(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    mixnn.embed("runs/photos")
    assert capsys.readouterr() == ("", "")
    mixnn.embed("runs/photos", verbose=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "16 vectors of 128 numbers" in err


def test_a_warning_is_pythons_and_points_at_the_caller(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    settings = {"limit": 64, "batch_size": 32, "support_size": 32, "hidden": 8, "knn_every": 0}
    with pytest.warns(mixnn.MixnnWarning, match="the learning rate never falls: use warmup_epochs=") as heard:
        mixnn.pretrain("digits", epochs=1, warmup_epochs=2, out="runs/short", **settings)
    assert [warning.filename for warning in heard] == [__file__]
    assert capsys.readouterr() == ("", "")


# Messages

EXEMPT = {  # where a flag in a text is right
    "mixnn/paper/plan.py": "the command of a run, stored in its folder",
    "mixnn/paper/plots/drawing.py": "only on the command line",
    "mixnn/data/spec.py": "only on the command line",
    "mixnn/data/npm.py": "npm's own flags",
    "mixnn/runs/folder.py": "git's own flags",
    "mixnn/paper/provenance.py": "git's own flags",
    "mixnn/apps/report/run_data.py": "reads the stored command",
    "mixnn/apps/report/verdict.py": "on a page",
    "mixnn/apps/explore/explore.py": "on a page",
    "mixnn/apps/search/render.py": "on a page",
}


def flags_in_texts(tree: ast.AST) -> list[str]:
    """Texts with a flag, outside of docstrings and of what describes parameters."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Param", "option"):
            skipped |= {id(one) for one in ast.walk(node)}
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in skipped]
    return [text for text in texts if isinstance(text, str) and re.search(r"(?<![\w-])--[a-z]", text)]


def test_no_message_names_a_flag_unless_a_command_is_carried_out():
    found = {}
    for path in sorted((ROOT / "mixnn").rglob("*.py")):
        if texts := flags_in_texts(ast.parse(path.read_text())):
            found[str(path.relative_to(ROOT))] = texts
    assert {path for path in found if not path.startswith("mixnn/cli/")} == set(EXEMPT), found


def test_the_way_to_evaluate_without_test_images_is_named_in_python(place, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(mixnn.UserError) as error:
        mixnn.evaluate("runs/photos")
    assert "mixnn.classify('runs/photos', 'folders')" in str(error.value)
    assert "mixnn.pretrain(..., holdout=0.2)" in str(error.value)


def test_a_fitted_classifier_labels_files_arrays_and_folders(place, monkeypatch):
    monkeypatch.chdir(place)
    labels = {f"{kind}{i}.png": kind for kind in ("cat", "dog") for i in range(4)}
    fitted = mixnn.classify("runs/photos", labels, out="classifier")
    assert fitted.classes == ("cat", "dog")
    assert fitted.predict("photos/dog7.png") == ["dog"]
    assert fitted.predict(["photos/cat7.png", "photos/dog7.png"]) == ["cat", "dog"]
    array = np.stack([np.asarray(Image.open(f"photos/{name}")) for name in ("dog6.png", "cat6.png", "dog5.png")])
    assert fitted.predict(array) == ["dog", "cat", "dog"]
    assert fitted.predict(torch.from_numpy(array).permute(0, 3, 1, 2)) == ["dog", "cat", "dog"]
    assert fitted.predict("photos") == ["cat"] * 8 + ["dog"] * 8
    assert fitted.predict_proba("photos").sum(1) == pytest.approx(np.ones(16))


if __name__ == "__main__":
    PAGE.write_text(page())
