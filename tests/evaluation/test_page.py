"""docs/evaluation.md and docs/performance.md match the code: their Python runs, their commands parse."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mixnn.cli import parse
from mixnn.data.image_set import NORMALIZATIONS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / name).read_text() for name in ("evaluation.md", "performance.md")}
BLOCKS = [
    (name, kind, block)
    for name, text in PAGES.items()
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
]
COMMANDS = [line for _, kind, block in BLOCKS if not kind for line in block.splitlines() if line.startswith("mixnn ")]


@pytest.mark.parametrize("name", PAGES)
def test_the_python_of_a_page_runs(name: str, tmp_path: Path):
    code = "\n".join(block for page, kind, block in BLOCKS if page == name and kind == "python")
    assert code
    environment = os.environ | {"PYTHONPATH": str(DOCS.parent)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_one(command: str):
    name, given = parse(shlex.split(command)[1:])
    assert name == "evaluate"
    assert "encoder" in given


def test_the_page_names_every_normalization_and_there_are_commands():
    assert len(COMMANDS) >= 5
    assert all(f"`{name}`" in PAGES["evaluation.md"] for name in (*NORMALIZATIONS, "data", "none"))
