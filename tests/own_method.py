"""Registers the method that docs/methods.md adds, for tests that go over METHODS: pytest -p tests.own_method."""

import importlib.util
import re
import sys
import tempfile
from pathlib import Path

from mixnn.methods import METHODS

CODE, LINE = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs" / "methods.md").read_text(), re.DOTALL
)[:2]


def register() -> tuple[str, type]:
    """The page's file as a module of its own, and the entry its line makes."""
    place = Path(tempfile.mkdtemp()) / "softmsf.py"
    place.write_text(CODE)
    spec = importlib.util.spec_from_file_location("mixnn.methods.softmsf", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    ((name, cls),) = re.findall(r'"(\w+)": (\w+),', LINE)
    return name, getattr(module, cls)


if "pytest" in sys.modules and "tests.own_method" in sys.argv:
    METHODS.__setitem__(*register())
