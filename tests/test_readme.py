"""README speaks the truth about commands and files; `make demo` and the suite itself are run by hand and by CI."""

import json
import re
import shlex
from pathlib import Path

import pytest

from mixnn.cli import parse
from mixnn.paper.plan import plan_row
from mixnn.paper.tables import TABLES, Row

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
RUNS_OF_20 = sorted((ROOT / "results" / "epochs20").glob("*-seed0.json"))
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


# Its numbers are those of results/


def cells(text: str, first: str) -> list[str]:
    """The cells after the one that begins so, in the one line of a table that has it."""
    (line,) = (line for line in text.splitlines() if re.search(rf"\| {first}(, `.*`)? \|", line))
    return [cell.strip() for cell in line.split(f"| {first}")[1].split("|")[1:]]


def read(name: str) -> dict:
    return json.loads((ROOT / "results" / name).read_text())


@pytest.mark.parametrize("row", TABLES["main"].rows, ids=lambda row: row.name)
def test_accuracies_are_those_of_the_committed_runs(row: Row):
    run = read(f"{plan_row(row, 'cifar10', [0], {})[0].name}.json")
    table = TEXT.split("## Results")[1].split("The paper's numbers")[0]
    _, _, linear, _, _, knn, *_ = cells(table, row.name)
    assert linear == f"{run['results']['linear']['last']:.2f}"
    assert knn == f"{run['results']['knn']['weighted']:.2f}"


def test_times_are_those_of_the_committed_measurements():
    table = TEXT.split("`mixnn bench --method all`")[1].split("ReSSL and the supervised")[0]
    names = {"moco": "MoCo v2", "unmix": "UnMix", "simclr": "SimCLR", "ressl": "ReSSL", "supervised": "Supervised"}
    for name, row in read("bench-methods-h200.json")["methods"].items():
        method, *batch = name.split(", ")
        passes, ms, ratio, *_ = cells(table, ", ".join([names.get(method, method.upper()), *batch]))
        assert passes == "{} + {}".format(*row["passes"])
        assert ms == f"{row['ms_per_step']:.2f}"
        assert ratio == f"{row['over_expected']:.2f}"
    one = read("bench-h200.json")
    assert (
        f"| {one['ms_per_step']:.2f} | {round(one['images_per_s'], -2):,} images/s, {one['tflops']:.0f} TFLOP/s" in TEXT
    )
    assert f"{one['share_of_ceiling']:.0%} of a matrix product's {one['matmul_tflops']:.0f}" in TEXT
    loop = one["plain_loop"]["ms_per_step"]
    assert f"| {loop:.1f} | {loop / one['ms_per_step']:.1f} times as long |" in TEXT


def test_twenty_epochs_are_those_of_the_committed_runs():
    block = TEXT.split("has 38.25):")[1].split("`results/epochs20`")[0].strip().splitlines()
    shown = dict(zip(*([cell.strip() for cell in line.strip("|").split("|")] for line in block[::2]), strict=True))
    names = {"mocov2": "moco"}
    runs = {run["config"]["method"]: run for run in (read(f"epochs20/{p.name}") for p in RUNS_OF_20)}
    assert len(shown) == len(runs) == 12
    for name, text in shown.items():
        key = name.lower().replace(" ", "")
        assert text == f"{runs[names.get(key, key)]['results']['knn']['weighted']:.2f}", name
