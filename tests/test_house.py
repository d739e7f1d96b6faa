"""Rules that no test of a single part can see: imports, host reads in the step, dependencies."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "mixnn"
ORDER = [
    *("config", "files", "registry", "processes", "dist", "device", "progress"),
    *("functional_kernels", "functional", "augment_kernels", "augment", "data", "nn", "methods", "diagnostics"),
    *("runs", "evaluation", "training", "apps", "paper", "cli"),
]
DOORS = ("__init__.py", "__main__.py")  # of the package itself: they lead everywhere
FILES = {str(path.relative_to(ROOT)): ast.parse(path.read_text(), str(path)) for path in sorted(ROOT.rglob("*.py"))}
STEP_FILES = ("dist", "augment", "functional", "diagnostics", "nn/", "methods/", "training/step.py")
STEP_PATH = [file for file in FILES if file.startswith(STEP_FILES)]
CORE = ORDER[: ORDER.index("apps")]
OUTSIDE_CORE = {"mixnn.apps", "mixnn.paper", "matplotlib", "sklearn", "scipy"}
DATA_OF_OTHERS = "data/digits.py"  # scikit-learn holds the digits
HOST_READS = {"item", "cpu", "tolist", "numpy", "cuda", "nonzero", "synchronize"}


def home(file: str) -> str:
    """The name in ORDER that a file belongs to: its folder or, at the top, its own."""
    return Path(file).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    """Dotted names that a file imports anywhere, also inside functions, with their lines; `from a import b` is a.b."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are written out, not relative"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def to_the_right(file: str, tree: ast.AST) -> list[str]:
    """Imports of this file that point at a module to the right of its own."""
    wrong = []
    for name, line in imports(tree):
        parts = name.split(".")
        if parts[0] != "mixnn" or len(parts) == 1 or parts[1] == "__version__":
            continue
        if parts[1] not in ORDER or ORDER.index(parts[1]) > ORDER.index(home(file)):
            wrong.append(f"{file}:{line} imports {name}")
    for node in ast.walk(tree):  # `import mixnn` is for the version: its other names lead everywhere
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mixnn":
            wrong += [f"{file}:{node.lineno} uses mixnn.{node.attr}"] if node.attr != "__version__" else []
    return wrong


def not_for_the_core(file: str, tree: ast.AST) -> list[str]:
    """Imports of this file that belong to apps and paper, if it is one of the core."""
    if home(file) not in CORE:
        return []
    banned = OUTSIDE_CORE - ({"sklearn"} if file == DATA_OF_OTHERS else set())
    found = [(line, name) for name, line in imports(tree) if any(f"{name}.".startswith(f"{b}.") for b in banned)]
    return [f"{file}:{line} imports {name}" for line, name in found]


def host_reads(tree: ast.AST, exempt: tuple[str, ...] = ()) -> list[str]:
    """Calls that make the host wait for the device or speak, outside the functions named."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name in exempt:
            continue
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            called_on_tensor = isinstance(node.func, ast.Attribute) and name in HOST_READS
            if called_on_tensor or (isinstance(node.func, ast.Name) and name in {"print", "int", "float", "nonzero"}):
                found.append(f"line {node.lineno}: {name}()")
        found += host_reads(node, exempt)
    return found


def test_every_module_has_its_place_in_the_order():
    assert {home(file) for file in FILES if file not in DOORS} <= set(ORDER)


def test_imports_point_left():
    assert [each for file, tree in FILES.items() if file not in DOORS for each in to_the_right(file, tree)] == []


def test_the_core_needs_neither_apps_nor_paper_nor_their_libraries():
    assert [each for file, tree in FILES.items() for each in not_for_the_core(file, tree)] == []


def test_nothing_on_the_steps_path_reads_from_the_device_or_prints():
    # Where the host waits for the log, or for a stream of its own; what processes settle on the host; what is only
    # called on the CPU.
    exempt = {
        "training/step.py": ("means", "restore", "_rows_to_read"),
        "dist.py": ("_all_reduce_int",),
        "augment.py": ("_check_range",),
    }
    assert [f"{file}, {each}" for file in STEP_PATH for each in host_reads(FILES[file], exempt.get(file, ()))] == []


def test_torchvision_and_timm_are_not_needed():
    found = [(file, name) for file, tree in FILES.items() for name, _ in imports(tree)]
    assert [each for each in found if each[1].split(".")[0] in ("torchvision", "timm")] == []


def test_the_rules_look_at_files_that_are_there():
    assert all(any(file.startswith(start) for file in FILES) for start in STEP_FILES)
    assert {DATA_OF_OTHERS, "training/step.py", "dist.py"} <= FILES.keys()


@pytest.mark.parametrize("file", [file for file in FILES if "__all__ =" in (ROOT / file).read_text()])
def test_every_name_of_all_exists(file):
    name = ".".join(("mixnn", *Path(file).with_suffix("").parts)).removesuffix(".__init__")
    module = importlib.import_module(name)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize(
    "source, wrong",
    [
        ("from mixnn.methods import METHODS", True),
        ("from mixnn import training", True),
        ("import mixnn.cli", True),
        ("import mixnn\nmixnn.pretrain('x')", True),
        ("def f():\n    from mixnn.runs import Run", True),
        ("from mixnn.unheard_of import x", True),
        ("from mixnn.functional import unit\nfrom mixnn import __version__\nimport mixnn\nmixnn.__version__", False),
        ("from mixnn.nn.resnet import ResNet\nimport torch", False),
    ],
)
def test_the_import_rule_sees_every_form(source, wrong):
    assert bool(to_the_right("nn/encoder.py", ast.parse(source))) == wrong


@pytest.mark.parametrize(
    "file, source, wrong",
    [
        ("evaluation/knn.py", "from mixnn.apps.embed import embed", True),
        ("evaluation/knn.py", "from mixnn import paper", True),
        ("functional.py", "def f():\n    from scipy.stats import t", True),
        ("device.py", "import matplotlib.pyplot as plt", True),
        ("data/cifar.py", "from sklearn.datasets import load_digits", True),
        ("data/digits.py", "from sklearn.datasets import load_digits", False),
        ("data/digits.py", "import scipy", True),
        ("apps/demo.py", "import sklearn, scipy, matplotlib\nfrom mixnn.apps import embed", False),
        ("training/step.py", "import scipyish\nfrom mixnn.nn.resnet import ResNet", False),
    ],
)
def test_the_rule_of_the_core_sees_every_form(file, source, wrong):
    assert bool(not_for_the_core(file, ast.parse(source))) == wrong


@pytest.mark.parametrize(
    "source, wrong",
    [
        ("x = t.item()", True),
        ("def f(t):\n    return [t.cpu().numpy()]", True),
        ("torch.nonzero(t)", True),
        ("print(t)", True),
        ("n = int(t)", True),
        ("class A:\n    def means(self):\n        return self.t.tolist()", False),
        ("stream = torch.cuda.Stream()\ny = x.float().int()", False),
    ],
)
def test_the_host_read_rule_sees_every_form(source, wrong):
    assert bool(host_reads(ast.parse(source), exempt=("means",))) == wrong


def test_no_file_is_a_link():
    folders = ("mixnn", "tests", "benchmarks", "docs", "examples", "results", "notes")
    assert [path for folder in folders for path in (ROOT.parent / folder).rglob("*") if path.is_symlink()] == []
