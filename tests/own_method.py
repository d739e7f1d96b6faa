"""Registers the method that docs/methods.md adds, for tests that go over METHODS: pytest -p tests.own_method."""

import importlib.util
import re
import sys
import tempfile
from pathlib import Path

from mixnn.methods import METHODS

TEXT = (Path(__file__).parents[1] / "docs" / "methods.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
NAME = "softmsf"


def register() -> tuple[str, type]:
    """Runs the page's file, whose decorator registers the method; returns its name and class."""
    place = Path(tempfile.mkdtemp()) / f"{NAME}.py"
    place.write_text(CODE)
    spec = importlib.util.spec_from_file_location(NAME, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    METHODS.pop(NAME, None)
    spec.loader.exec_module(module)
    return NAME, METHODS[NAME]


if "pytest" in sys.modules and "tests.own_method" in sys.argv:
    register()
