"""What a repository shows first: the pages of the site, getting started, packaging, citation, changelog and workflow.

`make docs` builds the site and fails at any warning, which includes links and anchors. Here is what it cannot see.
"""

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

import mixnn
from docs.hooks import OUTSIDE
from mixnn.cli import main, parse
from mixnn.methods import METHODS
from tests.test_readme import README, ROOT, anchors

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
START = (ROOT / "docs/start.md").read_text()
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
PAGES = sorted([*ROOT.glob("docs/*.md"), *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG"))])
PYTHONS = [one.split(" :: ")[-1] for one in PROJECT["classifiers"] if re.search(r":: \d\.\d+$", one)]


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


# Pages, as they are read on GitHub


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(path: Path):
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for file, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text) if ":" not in link):
        target = path.parent / file if file else path
        assert target.exists(), file
        assert not anchor or anchor in anchors(target.read_text()), anchor


def stray_tags(text: str) -> list[str]:
    """What a browser would take for a tag outside code: `<` before a letter. Tags that pages need are left out."""
    text = re.sub(r"^ *```.*?^ *```$|^ {4}.*?$|`[^`]*`|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"<(?!div |img |https?:)[A-Za-z][^\n]*", text)


def test_stray_tags_are_seen_and_code_is_left_out():
    assert stray_tags("so <p, t_i> is linear and <div markdown> is not") == [
        "<p, t_i> is linear and <div markdown> is not"
    ]
    assert not stray_tags("`<p>` and a < b\n```\n<p>\n```\n\n    <p>\n<!-- begin x -->")


@pytest.mark.parametrize("path", [*PAGES, *(ROOT / name for name in OUTSIDE if name.endswith(".md"))], ids=str)
def test_a_page_has_no_stray_tags(path: Path):
    assert not stray_tags(path.read_text())


def test_docstrings_on_the_page_of_modules_have_no_stray_tags():
    shown = re.findall(r"^::: (mixnn[a-z_.]+[a-z])", (ROOT / "docs/modules.md").read_text(), re.MULTILINE)
    paths = [ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in shown]
    assert ROOT / "mixnn/functional.py" in paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                assert not stray_tags(ast.get_docstring(node) or ""), f"{path}: {getattr(node, 'name', '')}"


def test_the_list_of_all_pages_is_complete():
    listed = (ROOT / "docs/index.md").read_text().split("## All pages")[1]
    pages = {path.name for path in ROOT.glob("docs/*.md")} - {"index.md", "modules.md"}  # GitHub shows no modules
    assert {name for name in pages if f"({name})" in listed} == pages


def test_the_first_page_counts_the_methods():
    words = (ROOT / "docs/index.md").read_text()
    assert len(METHODS) - 1 == 11
    assert "Eleven self-supervised methods" in words


def test_the_first_page_has_the_numbers_of_the_others():
    words = " ".join((ROOT / "docs/index.md").read_text().split())
    folders = " ".join((ROOT / "docs/folders.md").read_text().split())
    count, of, strict = re.findall(
        r"Training improves on the ImageNet encoder on (\d+) of these (\d+) \((\d+) with two", folders
    )[0]
    gain = re.findall(r"in NN and ([\d.]+) with five labels", folders)[0]
    rule = f"Training helped on {count} of {of}, or on {strict} if the change must exceed two standard errors."
    readme = " ".join(README.split())
    assert rule in words
    assert rule in readme
    assert f"With five labels per class, accuracy rose by {gain} points on average" in readme
    faults = re.findall(r"`make chaos`: (\d+) faults", (ROOT / "docs/robustness.md").read_text())[0]
    assert f"[{faults} faults](robustness.md)" in words
    summary = (ROOT / "docs/findings.md").read_text().split("begin summary")[1].split("end summary")[0]
    assert "Most of the paper's claims are [undecided or not run](findings.md)." in words
    counts = dict(re.findall(r"^\| ([a-z ]+) \| (\d+) ", summary, re.MULTILINE))
    assert int(counts["cannot tell"]) + int(counts["not run"]) > sum(map(int, counts.values())) / 2


def test_a_page_has_one_name_in_the_menu_in_the_list_of_all_pages_and_as_its_title():
    menu = (ROOT / "mkdocs.yml").read_text().replace('"', "")
    listed = (ROOT / "docs/index.md").read_text().split("## All pages")[1]
    for path in ROOT.glob("docs/*.md"):
        title = path.read_text().splitlines()[0].removeprefix("# ")
        if path.name != "index.md":
            assert f"- {title}: {path.name}\n" in menu
        if path.name not in ("index.md", "modules.md"):
            assert f"[{title}]({path.name})" in listed


@pytest.mark.parametrize("page", ["index.md", "numbers.md", "scaling.md"])
def test_commands_of_a_page_parse(page: str):
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    commands = [line.partition("#")[0] for block in blocks for line in block.replace("\\\n", "").splitlines()]
    assert commands
    for line in commands:
        parse(shlex.split(re.split("mixnn |slurm.sh ", line, maxsplit=1)[1]))


def test_pictures_are_small_and_shown():
    pictures = [*ROOT.glob("docs/images/*")]
    text = "".join(path.read_text() for path in ROOT.glob("docs/*.md"))
    assert all(f"images/{path.name}" in text for path in pictures)
    assert sum(path.stat().st_size for path in pictures) < 1.5e6


# Getting started


def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """All commands of the tour and its Python, with a demo of one epoch; the other commands parse."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIXNN_CACHE", str(tmp_path / "cache"))
    tour = START.split("## A tour of five minutes")[1].split("## Your own images")[0]
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", tour, re.MULTILINE | re.DOTALL)
    commands = [line for kind, block in blocks if kind == "sh" for line in block.splitlines()]
    assert commands == ["mixnn demo", "mixnn explore runs/demo", "mixnn report runs/demo"]
    for line in commands:
        assert main([*line.split()[1:], *["--epochs", "1"] * (line == "mixnn demo")]) == 0
    names: dict[str, object] = {}
    (python,) = (block for kind, block in blocks if kind == "python")
    exec(python, names)
    assert capsys.readouterr().out.endswith("(1297, 128)\n")
    for path in ("neighbors.png", "explore.html", "report.html"):
        assert (tmp_path / "runs/demo" / path).is_file()


def test_commands_for_your_own_images_parse():
    text = START.split("## Your own images")[1]
    commands = [line for block in re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S) for line in block.splitlines()]
    assert len(commands) == 5
    for line in commands:
        parse(shlex.split(line)[1:])
    for line in re.findall(r"`(mixnn completion \w+) >", text):
        parse(line.split()[1:])


def test_the_table_of_the_demo_is_that_of_the_results_page():
    rows = [line for line in START.splitlines() if line.startswith(("| raw pixels", "| untrained network", "| MNN"))]
    assert len(rows) == 3
    assert all(row in (ROOT / "docs/results.md").read_text() for row in rows)


def test_the_table_of_extras_is_that_of_the_package():
    table = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", START, re.MULTILINE))
    assert list(table) == list(PROJECT["optional-dependencies"])
    for extra, packages in PROJECT["optional-dependencies"].items():
        if extra != "dev":
            assert table[extra].strip().split(", ") == [re.split(r"[\[>]", one)[0] for one in packages]


# Packaging, citation, changelog, workflow


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changelog = re.findall(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert mixnn.__version__ == PROJECT["version"] == citation["version"] == changelog[0]
    assert citation["license"] == PROJECT["license"]
    readme, findings = (ROOT / "README.md").read_text(), (ROOT / "docs/findings.md").read_text()
    assert f'"mixnn {mixnn.__version__}"' in readme
    (entries,) = re.findall(r"```bibtex\n(.*?)```", findings, re.DOTALL)
    assert f"version={{{mixnn.__version__}}}, license={{{PROJECT['license']}}}" in entries
    (paper,) = re.findall(r"```bibtex\n(.*?)```", readme, re.DOTALL)
    assert "".join(entries.split()).startswith("".join(paper.split()))


def test_badges_workflow_and_classifiers_name_the_same_pythons():
    readme = (ROOT / "README.md").read_text()
    assert f"badge/python-{PYTHONS[0]}%20to%20{PYTHONS[-1]}-" in readme
    assert f"badge/license-{PROJECT['license'].replace('-', '--')}-" in readme
    assert "actions/workflows/ci.yml/badge.svg" in readme
    for job in ("test", "wheel"):
        assert WORKFLOW["jobs"][job]["strategy"]["matrix"]["python"] == PYTHONS
    assert PROJECT["requires-python"].startswith(f">={PYTHONS[0]}.")


def test_the_workflow_and_contributing_name_targets_of_make():
    steps = [step.get("run", "") for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    assert [step for step in steps if step] == ["make test", "make wheel"]
    named = re.findall(r"`make (\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert {"test", "wheel", *named} <= makefile_targets()


def test_pre_commit_runs_what_make_test_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    make = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin").replace(" --check", "")
    for hook in hooks:
        assert re.search(rf"^\t{re.escape(hook['entry'].removesuffix(' --fix'))}\b", make, re.MULTILINE), hook["entry"]


def test_templates_are_forms_with_names():
    for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"):
        form = yaml.safe_load(path.read_text())
        assert path.name == "config.yml" or {"name", "description", "body"} <= form.keys()
