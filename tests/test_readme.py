"""README speaks the truth about commands and files; `make demo` and the suite itself are run by hand and by CI."""

import re
import shlex
from pathlib import Path

import pytest

from mixnn.cli import parse

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^(mixnn [^#\n]+)", TEXT, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_one(command: str):
    parse(shlex.split(command)[1:])


def test_there_are_commands_to_check():
    assert len(COMMANDS) > 5


def test_the_map_names_what_exists_and_all_of_it():
    tree = TEXT.split("## Map")[1]
    named = set(re.findall(r"^  ([a-z_]+(?:\.py|/))", tree, re.MULTILINE))
    assert all((ROOT / "mixnn" / name).exists() for name in named)
    present = {
        path.name + "/" * path.is_dir() for path in (ROOT / "mixnn").iterdir() if path.suffix == ".py" or path.is_dir()
    }
    small = {"__init__.py", "__main__.py", "__pycache__/", "device.py", "progress.py", "baseline.py"}
    assert present - small == named


def test_the_python_names_of_the_text_exist():
    import mixnn

    for name in re.findall(r"`mixnn\.([a-z_.]+)", TEXT):
        place = mixnn
        for part in name.split("."):
            place = getattr(place, part)
