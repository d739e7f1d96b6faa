"""Which code made a number: digests of the source files behind training and behind an evaluation.

A result stores both digests. If one differs from today's, the number may differ too, and `reproduce` says so.

The digests cover the files that can change a number: the equations, augmentation, networks, steps and settings, and all
that turns files into normalized images, makes the first weights and chooses the device. Left out is what only moves
bytes or speaks to the user: downloads and archives (their sums are checked), the cache (its entries too), the log, run
folders, messages and the command line. The defaults of settings are left out as well, because each result stores its
settings.

A digest covers what the code does and not how it is written. Comments, docstrings, formatting, the texts of errors and
options, and what is said to the user are left out, so that rewording them does not make results look outdated. Renaming
a variable or moving a function does: a digest cannot know that the numbers stay the same.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mixnn import methods
from mixnn.files import PACKAGE

# Relative to the package; a folder stands for all its files. The method's own file and its bases' are added.
COMMON = (
    *("functional.py", "functional_kernels.py", "augment.py", "augment_kernels.py", "device.py", "dist.py", "nn"),
    *("runs/weights.py", "data/dataset.py", "data/decode.py", "data/folder.py", "data/image_set.py", "data/images.py"),
    *("data/items.py", "data/labels.py", "data/named.py", "data/shards.py", "data/stored.py"),
    *("data/array_pickle.py", "data/cifar.py", "data/digits.py", "data/stl10.py", "data/tiny_imagenet.py"),
)
TRAINING = (
    *COMMON,
    *("diagnostics.py", "methods/mixture.py", "training/configure.py", "training/folder_settings.py"),
    *(
        "training/judgement.py",
        "training/pretrain.py",
        "training/recipes.py",
        "training/step.py",
        "training/trainer.py",
    ),
    *("training/schedule.py", "training/optimizers.py", "training/prefetch.py", "training/views.py"),
)
EVALUATION = (
    *COMMON,
    *("runs/encoder.py", "evaluation/encoders.py", "evaluation/evaluate.py", "evaluation/protocol.py"),
    *("evaluation/features.py", "evaluation/knn.py", "evaluation/linear.py", "evaluation/neighbors.py"),
)
FOREIGN = ("builtins", "abc", "typing", "torch.nn.modules.module")  # modules of a method's bases that are not ours
REPORTS = ("info", "warn")  # methods of a Reporter


def training_digest(method: str, imports: Sequence[str] = ()) -> str:
    """Twelve hex digits that identify the code that trains a method; empty if a part of it is in no file of Python.

    `imports` are the user's own files and modules, as a run's configuration lists them.
    """
    classes = [cls for cls in methods.find(method).__mro__ if cls.__module__ not in FOREIGN]
    try:
        own = [Path(inspect.getfile(cls)) for cls in classes]
        return digest([*_files(TRAINING), *own, *(file for code in imports for file in _files_of(code))])
    except (OSError, TypeError, SyntaxError, ValueError):  # ValueError: a file that is no text, as of compiled code
        return ""


def _files_of(code: str) -> list[Path]:
    """The files of something that `import_code` takes: a file, a module, or all of a package; OSError for none."""
    if code.endswith(".py"):
        return [Path(code)]
    file = getattr(sys.modules.get(code), "__file__", None)
    if file is None:
        raise FileNotFoundError(code)
    path = Path(file)
    return sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]


def evaluation_digest() -> str:
    """Twelve hex digits that identify the code of the paper's evaluations, kNN and linear probe."""
    return digest(_files(EVALUATION))


def digest(files: Iterable[Path]) -> str:
    """Twelve hex digits that identify what these Python files do."""
    total = hashlib.sha256()
    for path in sorted(set(files)):
        name = path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name
        total.update(f"{name}\0{_digest_of_source(path.read_text(encoding='utf-8'))}\0".encode())
    return total.hexdigest()[:12]


def _files(parts: Iterable[str]) -> list[Path]:
    found = []
    for part in parts:
        path = PACKAGE / part
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return found


@functools.lru_cache(maxsize=256)
def _digest_of_source(source: str) -> str:
    return hashlib.sha256("\n".join(_words(ast.parse(source))).encode()).hexdigest()


def _words(node: object) -> Iterator[str]:
    """A syntax tree as words, the same in every version of Python.

    Empty fields are left out, because newer versions add some.
    """
    if isinstance(node, list):
        for item in node:
            yield from _words(item)
    elif not isinstance(node, ast.AST):
        yield f"{type(node).__name__} {node!r}"
    elif isinstance(node, ast.Raise):
        yield "Raise"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "option":
        yield "option"  # what it is for and where it comes from, the second and third argument, are texts
        yield from _words([*node.args[:1], *node.keywords])
    elif not _is_text(node):
        yield type(node).__name__
        for name, value in ast.iter_fields(node):
            if value not in (None, []) and name not in ("ctx", "kind", "type_comment"):
                yield name
                yield from _words(value)
        yield "end"


def _is_text(node: ast.AST) -> bool:
    """Whether a statement is a docstring, or only tells the user something."""
    if not isinstance(node, ast.Expr):
        return False
    call = node.value
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        return call.func.attr in REPORTS
    return isinstance(call, ast.Constant)
