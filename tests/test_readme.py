"""README.md and docs/results.md tell the truth: commands, files and numbers. `make demo` is run by hand and by CI."""

import ast
import json
import re
import shlex
import statistics
from pathlib import Path
from typing import Any

import pytest

import mixnn
from mixnn.cli import VERBS, parse
from mixnn.paper.plan import plan_row
from mixnn.paper.statistics import CONFIDENCE, t_quantile
from mixnn.paper.tables import TABLES, Row, published
from mixnn.training.recipes import RECIPES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
RUNS_OF_20 = sorted((ROOT / "results" / "epochs20").glob("*-seed0.json"))
COMMANDS = re.findall(r"^(mixnn [^#\n]+)", README, re.MULTILINE)
MAIN = {row.name: row for row in TABLES["main"].rows}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_parses(command: str):
    parse(shlex.split(command)[1:])


def test_there_are_commands_to_check():
    assert len(COMMANDS) == 6


def test_the_table_of_commands_has_them_all():
    table = README.split("## All commands")[1].split("- `mixnn COMMAND")[0]
    assert sorted(re.findall(r"\| `([a-z]+)` \|", table)) == sorted(VERBS)


def test_make_has_the_targets_that_a_stranger_types_first():
    targets = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in targets)


def test_the_map_names_what_exists_and_all_of_it():
    tree = README.split("## Where things are")[1].split("## Cite")[0]
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


def cells(text: str, first: str) -> list[str]:
    """The cells after the one with this text, in the one line of a table that has it."""
    (line,) = (line for line in text.splitlines() if f"| {first} |" in line)
    return [cell.strip() for cell in line.split(f"| {first} |")[1].split("|")]


def read(name: str) -> dict:
    return json.loads((ROOT / "results" / name).read_text())


def measured(row: Row, data: str = "cifar10", seed: int = 0) -> tuple[str, str]:
    """Linear (last epoch) and kNN of the row's committed run; empty if there is none."""
    name = f"{plan_row(row, data, [seed], {})[0].name}.json"
    if not (ROOT / "results" / name).exists():
        return "", ""
    results = read(name)["results"]
    return f"{results['linear']['last']:.2f}", f"{results['knn']['weighted']:.2f}"


def printed(numbers: dict[str, list[float | None]], metric: str) -> str:
    """The paper's or the authors' number on CIFAR-10; empty if there is none."""
    value = numbers.get(metric, [None])[0]
    return "" if value is None else f"{value:.2f}"


def check_row(table: str, row: Row) -> None:
    linear, knn = measured(row)
    paper, fixed = row.paper, row.fixed
    expected = [printed(paper, "linear"), printed(fixed, "linear"), linear]
    expected += [printed(paper, "knn"), printed(fixed, "knn"), knn]
    assert cells(table, row.name)[:6] == expected


@pytest.mark.parametrize("name", MAIN)
def test_accuracies_of_all_methods_are_those_of_the_tables_and_the_committed_runs(name: str):
    check_row(RESULTS.split("## All methods, 200 epochs")[1].split("How to read")[0], MAIN[name])


@pytest.mark.parametrize("name", ["BYOL", "SCE", "UnMix", "MSF", "MNN"])
def test_accuracies_in_the_readme_likewise(name: str):
    table = README.split("## Results")[1].split("## All commands")[0]
    check_row(table, MAIN[name])
    ms_per_step = read("bench-methods-h200.json")["methods"][MAIN[name].method]["ms_per_step"]
    assert cells(table, name)[6] == f"{200 * (50_000 // 256) * ms_per_step / 1000:.0f} s"


def test_the_last_of_the_four_runs_is_the_committed_one_and_they_differ_as_much_as_is_said():
    runs = RESULTS.split("**Noise.**")[1].split("The last run is")[0]
    for metric, last in zip(("linear", "kNN"), measured(MAIN["MNN"]), strict=True):
        *values, difference = cells(runs, metric)[:5]
        assert values[-1] == last
        assert difference == f"{max(map(float, values)) - min(map(float, values)):.2f}"


def test_all_pages_state_the_noise_of_these_runs_and_the_same_rule():
    runs = RESULTS.split("**Noise.**")[1].split("The last run is")[0]
    linear, knn = (statistics.stdev(map(float, cells(runs, metric)[:4])) for metric in ("linear", "kNN"))
    quantile = t_quantile(0.5 + CONFIDENCE / 2, 3)
    needed = [quantile * 2**0.5 * deviation for deviation in (linear, knn)]
    words = {page: " ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/results.md")}
    for text in words.values():
        assert f"deviations of {linear:.2f} points linear and {knn:.2f} kNN" in text
    assert "must differ by {:.2f} points linear or {:.2f} kNN".format(*needed) in words["docs/results.md"]
    assert f"times {quantile:.2f}, because four runs" in words["docs/results.md"]
    for page in (*words, "docs/findings.md"):
        assert "about a point linear or 0.6 points kNN" in " ".join((ROOT / page).read_text().split()).replace("*", "")
    reproduction = (ROOT / "docs/reproduction.md").read_text()
    for metric, about in (("linear", 1.0), ("kNN", 0.6)):
        (in_use,) = re.findall(rf"^\| CIFAR-10 \| {metric} \| [\d.]+ \| ([\d.]+) \|", reproduction, re.MULTILINE)
        assert float(in_use) == pytest.approx(about, abs=0.05)


def test_the_second_seed_of_mnn_is_the_committed_run():
    accuracies = measured(MAIN["MNN"], seed=1)
    for page in ("README.md", "docs/results.md"):
        words = " ".join((ROOT / page).read_text().split())
        assert "{} and {}".format(*accuracies) in words or "{} linear and {} kNN".format(*accuracies) in words


def test_the_results_page_names_the_marks_of_its_table():
    found = {row["name"]: row["marks"] for row in mixnn.reproduce("main", run=False, results=ROOT / "results")["main"]}
    assert all("‡" in marks for marks in found.values())
    assert [name for name, marks in found.items() if "†" in marks] == ["Supervised", "MNN"]
    assert "all numbers have the mark ‡, and those of Supervised and MNN also †." in " ".join(RESULTS.split())


def test_the_readmes_first_screen_has_the_numbers_of_mnn():
    words = " ".join(README.split("<img")[0].split())
    row = MAIN["MNN"]
    for data, form in (
        ("cifar10", "CIFAR-10:** {:.1f}% linear, {:.1f}% kNN (paper: {:.1f}, {:.1f})"),
        ("cifar100", "CIFAR-100: {:.1f} and {:.1f} (paper: {:.1f} and {:.1f})"),
    ):
        paper = [published(row, "paper", metric, data) for metric in ("linear", "knn")]
        assert form.format(*map(float, measured(row, data)), *paper) in words


def test_the_readme_stays_short():
    assert len(README.splitlines()) <= 120


def test_times_are_those_of_the_committed_measurements():
    table = RESULTS.split("`mixnn bench --method all`")[1].split("A pass of ReSSL")[0]
    names = {"moco": "MoCo v2", "unmix": "UnMix", "simclr": "SimCLR", "ressl": "ReSSL", "supervised": "Supervised"}
    for name, row in read("bench-methods-h200.json")["methods"].items():
        method, *batch = name.split(", ")
        passes, ms, ratio, *_ = cells(table, ", ".join([names.get(method, method.upper()), *batch]))
        assert passes == "{} + {}".format(*row["passes"])
        assert ms == f"{row['ms_per_step']:.2f}"
        assert ratio == f"{row['over_expected']:.2f}"
    one = read("bench-h200.json")
    assert (
        f"| {one['ms_per_step']:.2f} | {round(one['images_per_s'], -2):,} images/s; {one['tflops']:.0f} TFLOP/s"
        in RESULTS
    )
    share, ceiling = f"{one['share_of_ceiling']:.0%}", f"{one['matmul_tflops']:.0f}"
    assert f"{share} of the {ceiling} that a large matrix product reaches" in RESULTS


def test_the_page_on_speed_has_the_committed_measurements():
    page = (ROOT / "docs" / "performance.md").read_text()
    peers = read("bench-peers-h200.json")["libraries"]
    base = peers["mixnn-byol"]["loading"]["ms_per_step"]
    for name, found in peers.items():
        ms, ready = found["loading"]["ms_per_step"], f"{found['ready']['ms_per_step']:.1f}"
        last = "the same" if name.startswith("mixnn") else ready
        assert f" | {ms:.1f} | {ms / base:.1f} | {last} |\n" in page, name
    for point in read("bench-growth-h200.json")["points"]:
        speed = f"{point['ms_per_step']:.2f} | {point['images_per_s']:,} | {point['share_of_ceiling']:.0%}"
        search = f"{point['search_ms']:.2f} | {point['search_share']:.1%} | {point['peak_memory_gib']:.1f}"
        assert f" | {speed} | {search} |\n" in page, point["changes"]
    assert f"with Q = 65,536, a step now takes {read('bench-q65536-h200.json')['ms_per_step']:.2f} ms" in page
    small, large = read("bench-h200.json"), read("bench-resnet50-224-h200.json")
    for kind in small["share_by_kernel"] | large["share_by_kernel"]:
        shares = [one["share_by_kernel"].get(kind) for one in (small, large)]
        times = zip(shares, (small["ms_per_step"], large["ms_per_step"]), strict=True)
        cells = ["- | -" if share is None else f"{share * ms:.2f} | {share:.0%}" for share, ms in times]
        assert f"| {kind} | {' | '.join(cells)} |\n" in page
    for one in (small, large):
        assert f"{one['tflops']:.0f} TFLOP/s, {one['share_of_ceiling']:.0%} of the" in page


def test_the_page_on_speed_has_the_committed_runs_of_the_recipes():
    page = (ROOT / "docs" / "performance.md").read_text()
    papers = {"cifar10": "cifar10-mnn-b8e2e2d3-seed0.json", "cifar100": "cifar100-mnn-be94d51e-seed0.json"}
    shown = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
    for data, name in papers.items():
        run = read(name)
        linear, knn = run["results"]["linear"]["last"], run["results"]["knn"]["weighted"]
        seconds = run["metrics"][-1]["seconds"]
        assert f"| {shown[data]} | the paper's | 1 | 200 | {seconds:.1f} | {linear:.2f} | {knn:.2f} |\n" in page
        by_name: dict[str, list[dict[str, Any]]] = {}
        for row in read(f"recipes/{data}-final.json"):
            if row["settings"] == {"recipe": row["name"]}:
                by_name.setdefault(row["name"], []).append(row)
        assert by_name.keys() == ({"fast", "best"} if data == "cifar10" else {"fast"})
        for recipe, rows in by_name.items():
            for row in rows:
                assert [name for name, value in RECIPES[recipe].items() if used(row["config"], name) != value] == []
            mean = {name: statistics.mean(row[name] for row in rows) for name in ("seconds", "linear", "knn")}
            numbers = f"{mean['seconds']:.1f} | {mean['linear']:.2f} | {mean['knn']:.2f}"
            line = f"| {shown[data]} | `{recipe}` | {len(rows)} | {RECIPES[recipe]['epochs']} | {numbers} |\n"
            assert line in page
            if (data, recipe) == ("cifar10", "fast"):
                assert "three seeds: {:.2f}, {:.2f} and {:.2f}".format(*(row["linear"] for row in rows)) in page
                words = (
                    f"{mean['linear']:.1f}% linear and {mean['knn']:.1f}% kNN in {mean['seconds']:.0f} s (mean of three"
                )
                assert f"100 epochs, takes {rows[1]['probe_s']:.1f} to {rows[0]['probe_s']:.1f} s" in page
                assert words in " ".join(README.split())
    before = [row for row in read("recipes/cifar10-final.json") if row["name"] == "muon-large-targets-95"]
    means = [statistics.mean(row[name] for row in before) for name in ("knn", "linear")]
    assert "had {:.1f}% kNN but only {:.1f}% linear".format(*means) in " ".join(page.split())
    step = read("bench-h200.json")["ms_per_step"]
    assert f"At {step:.2f} ms per step, 200 epochs would take {39 * step:.0f} s" in page


def used(config: dict[str, Any], name: str) -> object:
    """A setting, an option of the method or a part of a view that a run had."""
    view, _, part = name.partition(".")
    value = config["augmentation"][view][part] if part else (config | config["options"])[name]
    return tuple(value) if isinstance(value, list) else value


def test_twenty_epochs_are_those_of_the_committed_runs():
    block = RESULTS.split("has 38.25.")[1].split("Methods with negatives")[0].strip().splitlines()
    shown = dict(zip(*([cell.strip() for cell in line.strip("|").split("|")] for line in block[::2]), strict=True))
    names = {"mocov2": "moco"}
    runs = {run["config"]["method"]: run for run in (read(f"epochs20/{p.name}") for p in RUNS_OF_20)}
    assert len(shown) == len(runs) == 12
    for name, text in shown.items():
        key = name.lower().replace(" ", "")
        assert text == f"{runs[names.get(key, key)]['results']['knn']['weighted']:.2f}", name
