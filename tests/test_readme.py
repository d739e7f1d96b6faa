"""README.md and docs/results.md tell the truth: commands, files and numbers. `make demo` is run by hand and by CI."""

import ast
import json
import re
import shlex
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import mixnn
from mixnn.apps.demo import K, false_neighbors
from mixnn.cli import VERBS, parse
from mixnn.data import load
from mixnn.functional import unit
from mixnn.paper.claims import Evidence
from mixnn.paper.plan import load_finished
from mixnn.paper.tables import TABLES, published
from mixnn.training.recipes import RECIPES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
RUNS_OF_20 = sorted((ROOT / "results" / "epochs20").glob("*-seed0.json"))
COMMANDS = re.findall(r"^(mixnn [^#\n]+)", README, re.MULTILINE)
MAIN = {row.name: row for row in TABLES["main"].rows}
METRICS = "linear", "knn"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_parses(command: str):
    parse(shlex.split(command)[1:])


def test_there_are_commands_to_check():
    assert len(COMMANDS) == 8


def test_the_table_of_commands_has_them_all():
    table = README.split("## All commands")[1].split("- `mixnn COMMAND")[0]
    assert sorted(re.findall(r"\| `([a-z]+)` \|", table)) == sorted(VERBS)


def test_make_has_the_targets_that_a_stranger_types_first():
    targets = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in targets)


def test_the_map_names_what_exists_and_all_of_it():
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    tree = contributing.split("## Where things are")[1].split("## What a change needs")[0]
    first_column = re.findall(r"^  (\S+(?:, \S+)*)  ", tree, re.MULTILINE)
    named = {name for cell in first_column for name in cell.split(", ")}
    present = {
        path.name + "/" * path.is_dir() for path in (ROOT / "mixnn").iterdir() if path.suffix == ".py" or path.is_dir()
    }
    assert present - {"__init__.py", "__main__.py", "__pycache__/"} == named
    assert all((ROOT / name).exists() for name in re.findall(r"^([a-z_./]+)  ", tree, re.MULTILINE))


def test_the_python_example_parses_and_its_names_exist():
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    ast.parse(block)
    names = re.findall(r"mixnn\.([a-z]+)\(", block)
    assert len(names) >= 5
    assert all(callable(getattr(mixnn, name)) for name in names)


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_links_lead_to_files_and_headings(page: str):
    path = ROOT / page
    text = path.read_text()
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    links = [link for link in links if not link.startswith(("http", "../../actions/"))]
    assert links
    for file, _, anchor in (link.partition("#") for link in links):
        target = path.parent / file if file else path
        assert target.exists(), file
        assert not anchor or anchor in anchors(target.read_text()), anchor


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Numbers are those of results/


def read(name: str) -> dict:
    return json.loads((ROOT / "results" / name).read_text())


def test_all_pages_have_the_same_rule_for_the_noise():
    for metric, about in (("linear", 1.0), ("kNN", 0.6)):
        (in_use,) = re.findall(rf"^\| CIFAR-10 \| {metric} \| [\d.]+ \| ([\d.]+) \|", RESULTS, re.MULTILINE)
        assert float(in_use) == pytest.approx(about, abs=0.05)
    for page in ("README.md", "docs/results.md", "docs/findings.md"):
        words = " ".join((ROOT / page).read_text().split()).replace("*", "").lower()
        assert "about 1.0 point in linear accuracy or 0.6 in knn" in words


def test_the_first_screens_have_the_numbers_of_mnn():
    words = " ".join(README.split())
    row, evidence = MAIN["MNN"], Evidence(load_finished(ROOT / "results"))
    ours = {
        data: [statistics.mean(evidence.sample("main: MNN", data, m).values.values()) for m in METRICS]
        for data in ("cifar10", "cifar100")
    }
    assert len(evidence.sample("main: MNN", "cifar10", "linear").values) == 3  # "means of three seeds"
    for data, form in (
        ("cifar10", "CIFAR-10:** {:.1f}% with a linear classifier and {:.1f}% by kNN (paper: {:.1f}, {:.1f})"),
        ("cifar100", "CIFAR-100: {:.1f} and {:.1f} (paper: {:.1f} and {:.1f})"),
    ):
        paper = [published(row, "paper", metric, data) for metric in METRICS]
        assert form.format(*ours[data], *paper) in words
    index = " ".join((ROOT / "docs" / "index.md").read_text().split())
    assert "MNN has {:.1f}% linear and {:.1f}% kNN accuracy".format(*ours["cifar10"]) in index


def test_the_picture_of_the_demo_is_compared_with_raw_pixels():
    train, test = (load("digits", split) for split in ("train", "test"))
    pixels = (unit(images.images[:].flatten(1).float()) for images in (train, test))
    wrong = 100 * false_neighbors(*pixels, train, test, K)[1].float().mean().item()
    assert f"{wrong:.1f}% with raw pixels" in " ".join((ROOT / "docs" / "start.md").read_text().split())


def test_how_fast_it_is_on_the_first_screens():
    """Under five minutes for 200 epochs, how many times as fast as others, and the recipe fast."""
    for text in (README, (ROOT / "docs" / "index.md").read_text()):
        assert "under five minutes on one H200" in " ".join(text.split())
    seconds = [read(f"cifar10-mnn-b8e2e2d3-seed{seed}.json")["metrics"][-1]["seconds"] for seed in (0, 1, 2)]
    assert 240 < max(seconds) < 300
    libraries = read("bench-peers-h200.json")["libraries"]
    base = libraries["mixnn-byol"]["loading"]["ms_per_step"]
    ratios = [libraries[name]["loading"]["ms_per_step"] / base for name in ("lightly", "solo-learn")]
    index = " ".join((ROOT / "docs" / "index.md").read_text().split())
    assert f"BYOL is {min(ratios):.1f} to {max(ratios):.1f} times as fast as in lightly and solo-learn" in index
    fast = [row for row in read("recipes/cifar10-final.json") if row["settings"] == {"recipe": "fast"}]
    means = [statistics.mean(row[name] for row in fast) for name in ("linear", "knn", "seconds")]
    assert "{:.1f}% linear and {:.1f}% kNN in {:.0f} s".format(*means) in " ".join(README.split())


def test_the_readme_stays_short():
    assert len(README.splitlines()) <= 140


@pytest.mark.parametrize("data, expected", [("cifar10", {"fast": 3, "best": 1}), ("cifar100", {"fast": 1})])
def test_runs_of_the_recipes_have_their_settings(data: str, expected: dict[str, int]):
    runs = [row for row in read(f"recipes/{data}-final.json") if row["settings"] == {"recipe": row["name"]}]
    assert Counter(row["name"] for row in runs) == expected
    for row in runs:
        assert [name for name, value in RECIPES[row["name"]].items() if used(row["config"], name) != value] == []


def test_what_the_page_on_speed_says_about_the_recipes_is_true():
    page, rows = " ".join((ROOT / "docs" / "performance.md").read_text().split()), read("recipes/cifar10-final.json")
    fast = [row for row in rows if row["settings"] == {"recipe": "fast"}]
    assert "three seeds: {:.2f}, {:.2f} and {:.2f}".format(*(row["linear"] for row in fast)) in page
    form = "{seconds:.1f} s, with {linear:.2f}% linear and {knn:.2f}% kNN"
    assert form.format(**read("recipes/cifar10-repeat.json")[0]) in page
    assert "before: {seconds:.1f} s, {linear:.2f}% and {knn:.2f}%".format(**fast[0]) in page


def used(config: dict[str, Any], name: str) -> object:
    """A setting, an option of the method or a part of a view that a run had."""
    view, _, part = name.partition(".")
    value = config["augmentation"][view][part] if part else (config | config["options"])[name]
    return tuple(value) if isinstance(value, list) else value


def test_twenty_epochs_are_those_of_the_committed_runs():
    block = RESULTS.split("<!-- begin twenty-epochs -->")[1].strip().splitlines()[:3]
    shown = dict(zip(*([cell.strip() for cell in line.strip("|").split("|")] for line in block[::2]), strict=True))
    names = {"mocov2": "moco"}
    runs = {run["config"]["method"]: run for run in (read(f"epochs20/{p.name}") for p in RUNS_OF_20)}
    assert len(shown) == len(runs) == 12
    for name, text in shown.items():
        key = name.lower().replace(" ", "")
        assert text == f"{runs[names.get(key, key)]['results']['knn']['weighted']:.2f}", name
