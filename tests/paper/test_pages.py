"""docs/reproduction.md and the tables in results/ are what code makes of the files in results/."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import mixnn.cli
from mixnn.methods.mixture import share_and_scale
from mixnn.paper import claims, pages
from mixnn.paper.claims import Evidence, judge_claims
from mixnn.paper.plan import load_finished, plan_row
from mixnn.paper.tables import PAPER_DATASETS, TABLES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def finished():
    return load_finished(RESULTS)


@pytest.fixture(scope="module")
def written():
    return pages.pages(ROOT)


def test_the_committed_pages_are_what_make_pages_writes(written):
    stale = [path.relative_to(ROOT) for path, text in written.items() if path.read_text() != text]
    assert not stale, "run `make pages`"


def test_every_data_set_with_results_has_its_page_of_tables_as_the_command_prints_it(finished, written, capsys):
    tables = {path.name for path in written if path.parent == RESULTS}
    assert tables == {path.name for path in RESULTS.glob("tables*.md")}
    for data in pages.data_sets(finished):
        words = ["reproduce", "all", "--data", data, "--no-run", "--format", "markdown", "--results", str(RESULTS)]
        assert mixnn.cli.main(words) == 0
        assert capsys.readouterr().out == written[RESULTS / pages.tables_page(data)]


def test_the_pages_have_every_block_once():
    page = "".join((ROOT / path).read_text() for path in pages.PAGES)
    assert sorted(re.findall(r"<!-- begin (.*?) -->", page)) == sorted(pages.BLOCKS)
    assert sorted(re.findall(r"<!-- end (.*?) -->", page)) == sorted(pages.BLOCKS)


def test_writing_a_page_twice_changes_nothing(finished):
    sources = pages.Sources(Evidence(finished), judge_claims(finished), RESULTS)
    page = "a\n<!-- begin coverage -->\nold\n<!-- end coverage -->\nb <!-- begin noise -->\n<!-- end noise -->\n"
    once = pages.with_blocks(page, sources)
    assert "old" not in once
    assert once.startswith("a\n<!-- begin coverage -->\n\n| table |")
    assert pages.with_blocks(once, sources) == once


def test_a_new_result_reaches_the_page_by_one_command(tmp_path):
    """A second seed of MNN: the page then has its mean, deviation and number."""
    (tmp_path / "docs").mkdir()
    for path in pages.PAGES:
        shutil.copy(ROOT / path, tmp_path / path)
    results = tmp_path / "results"
    results.mkdir()
    for path in RESULTS.glob("cifar10-*-seed0.json"):
        shutil.copy(path, results)
    (row,) = (row for row in TABLES["main"].rows if row.name == "MNN")
    first, second = plan_row(row, "cifar10", [0, 5], {})
    made = json.loads((RESULTS / f"{first.name}.json").read_text())
    linear = made["results"]["linear"]["last"]
    made["config"]["seed"] = 5
    made["results"]["linear"]["last"] = linear + 0.2
    (results / f"{second.name}.json").write_text(json.dumps(made))
    pages.main(tmp_path)
    page = (tmp_path / pages.PAGES[0]).read_text()
    text = f"{linear + 0.1:.2f} ± 0.14 (n=2)"
    assert f"| CIFAR-10 | WSE, mixture: MNN | {text} |" in page
    assert "2 + 1, noise of all rows with several seeds" in page
    assert text in (results / "tables.md").read_text()
    assert "n = 2 (seeds 0, 5)" in (results / "cifar10-methods.txt").read_text()
    assert (results / "commits.json").exists()
    before = {path: path.stat().st_mtime_ns for path in results.glob("*.png")}
    pages.main(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in results.glob("*.png")} == before, "nothing new to draw"


# The blocks, against the files


def block(name, finished):
    return pages.BLOCKS[name](pages.Sources(Evidence(finished), judge_claims(finished), RESULTS))


def committed(table, name, data="cifar10"):
    """The run of 200 epochs behind a row, with seed 0."""
    (row,) = (row for row in TABLES[table].rows if row.name == name)
    return json.loads((RESULTS / f"{plan_row(row, data, [0], {})[0].name}.json").read_text())


@pytest.fixture(scope="module")
def first_seed(finished):
    return {key: run for key, run in finished.items() if key[1] == 0}


def test_leads_are_those_of_the_paper_and_of_the_runs(first_seed):
    mnn, byol = (committed("main", name)["results"] for name in ("MNN", "BYOL"))
    linear = mnn["linear"]["last"] - byol["linear"]["last"]
    knn = mnn["knn"]["weighted"] - byol["knn"]["weighted"]
    assert f"| CIFAR-10 | BYOL | +5.65 | {linear:+.2f} | +2.27 | {knn:+.2f} |" in block("leads", first_seed)


def test_attention_and_leak_have_the_runs_last_epochs(first_seed):
    run = committed("controls", "CAS, gradient through it")
    end = run["metrics"][-1]
    accuracies = f"{run['results']['linear']['last']:.2f} | {run['results']['knn']['weighted']:.2f}"
    numbers = f"{end['spread']:.2f} | {end['d_positive']:.2f} | {end['rank']:.1f}"
    assert f"| CAS, gradient through it | {accuracies} | {numbers} |" in block("attention", first_seed)
    end = committed("controls", "MNN, leaky queue")["metrics"][-1]
    numbers = f"{100 * end['own_image']:.1f} | {100 * end['purity']:.1f} | {100 * end['purity_1']:.1f}"
    assert f"| {numbers} |" in block("leak", first_seed)


def test_whole_runs_have_the_largest_differences(first_seed):
    mnn, wse = (committed("weights", name)["metrics"] for name in ("WSE, mixture (MNN)", "WSE"))
    pairs = list(zip(mnn, wse, strict=True))
    knn = max(abs(a["knn"] - b["knn"]) for a, b in pairs if "knn" in a)
    purity = max(abs(a["purity"] - b["purity"]) for a, b in pairs[10:])
    rank = max(abs(a["rank"] - b["rank"]) for a, b in pairs[10:])
    label = "| CIFAR-10 | MNN and weights (1, 1 / K), no mixture: WSE |"
    assert f"{label} {knn:.2f} | {100 * purity:.1f} | {rank:.1f} |" in block("whole-runs", first_seed)


def test_distances_are_to_the_authors_own_numbers(first_seed):
    text = block("distances", first_seed)
    (row,) = (line for line in text.splitlines() if line.startswith("| CIFAR-10 | linear |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2] == "10", "neither MNN nor Supervised has one"
    ours = committed("main", "UnMix")["results"]["linear"]["last"]
    assert cells[3].endswith(f"to {ours - 90.37:+.2f}"), "UnMix is the farthest above"


def test_coverage_counts_rows_and_seeds(first_seed):
    text = block("coverage", first_seed)
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:]] == list(TABLES)
    assert "| main | 12 of 12 rows |" in text


def test_figures_that_are_there_are_linked_and_others_are_said_to_be_missing(tmp_path, first_seed):
    for name in ("cifar10-loss", "cifar10-purity-methods", "cifar10-cifar100-tsne", "notes-loss", "attention-datasets"):
        (tmp_path / f"{name}.png").touch()
    text = pages.BLOCKS["figures"](pages.Sources(Evidence(first_seed), [], tmp_path))
    links = re.findall(r"\[(.*?)\]\(\.\./results/(.*?)\.png\)", text)
    assert sorted(a for a, _ in links) == sorted(
        ["cifar10-loss", "cifar10-purity-methods", "cifar10-cifar100-tsne", "attention-datasets"]
    )
    assert all(a == b for a, b in links)
    assert "`methods`: runs are missing" in text
    assert "`examples`: needs a run folder" in text


def test_every_figure_that_can_be_drawn_is_in_the_list():
    from mixnn.paper.figures import FIGURES

    assert sorted(name for *_, names in pages.FIGURES for name in names) == sorted(FIGURES)


def test_the_summary_counts_every_claim_once_per_data_set(finished):
    rows = [line.strip("|").split("|") for line in block("summary", finished).splitlines()[2:]]
    across = {claim.across[0] for group in claims.CLAIMS.values() for claim in group if claim.across}
    total = sum(len(group) for group in claims.CLAIMS.values())
    for row, data in zip(rows, pages.data_sets(finished), strict=True):
        elsewhere = sum(bool(c.across) and c.across[0] != data for group in claims.CLAIMS.values() for c in group)
        assert sum(map(int, row[1:])) == total - elsewhere
    assert across <= set(PAPER_DATASETS)


def test_the_repeated_runs_are_those_of_the_results_page():
    page = (ROOT / "docs" / "results.md").read_text()
    for label, measure in (("linear", "linear"), ("kNN", "knn")):
        values = " | ".join(f"{value:.2f}" for value in claims.REPEATS["cifar10"][measure])
        assert f"| {label} | {values} |" in page


def test_the_miniature_on_the_page_is_that_of_the_committed_runs():
    from mixnn.paper.tables import tables_with

    page, folder = (ROOT / pages.PAGES[0]).read_text(), RESULTS / "miniature"
    small = {"limit": 10000, "image_size": 8, "backbone": "resnet8", "batch_size": 64, "lr": 0.24, "epochs": 120}
    runs = load_finished(folder)
    for row in tables_with(folder / "tables.yaml")["attention"].rows:
        (planned,) = plan_row(row, "cifar10", [0], small)
        run = runs[planned.in_precision("fp32").key]
        end, (most, epoch) = run["metrics"][-1], max((line["spread"], line["epoch"]) for line in run["metrics"])
        numbers = f"{most:.2f} ({epoch}) | {end['spread']:.2f} | {end['d_positive']:.2f} | {end['rank']:.1f}"
        assert f"| {row.name} | {numbers} | {run['results']['knn']['weighted']:.1f} |" in page


# The note


def test_the_notes_identity_and_weights_are_right():
    note = (ROOT / "docs" / "reweighting.md").read_text()
    generator = torch.Generator().manual_seed(0)
    p, z, z1 = torch.nn.functional.normalize(torch.randn(3, 8, dtype=torch.double, generator=generator), dim=1)
    lam = torch.linspace(0, 1, 10001, dtype=torch.double)
    mixed = lam[:, None] * z1 + (1 - lam)[:, None] * z
    ours = 2 - 2 * p @ z + 2 - 2 * mixed @ p
    weights = (2 - lam) * (p - z).square().sum() + lam * (p - z1).square().sum()
    torch.testing.assert_close(ours, weights)
    distance = (p - mixed).square().sum(1)
    rest = lam * (p - z1).square().sum() + (1 - lam) * (p - z).square().sum()
    torch.testing.assert_close(distance, rest - lam * (1 - lam) * (z1 - z).square().sum())
    for c, words in ((0.8, "1.52 and 0.52/K for\n  c = 0.8"), (0.0, "1.62 and 0.62/K for c = 0")):
        length = (1 - 2 * lam * (1 - lam) * (1 - c)).sqrt()
        assert f"{1 + ((1 - lam) / length).mean():.2f} and {(lam / length).mean():.2f}/K" in words
        assert words in note
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.8, 0.6])  # unit vectors of cosine 0.8
    torch.testing.assert_close((0.3 * a + 0.7 * b).norm(), torch.tensor((1 - 2 * 0.3 * 0.7 * 0.2) ** 0.5))
    approximate = (1 + (1 - lam) ** 2).mean(), (lam**2).mean()
    assert "{:.2f} and {:.2f}/K".format(*approximate) in note


def test_the_notes_shares_are_those_of_the_options():
    def share(table, name):
        (row,) = (row for row in TABLES[table].rows if row.name == name)
        return share_and_scale(plan_row(row, "cifar10", [0], {})[0].config.options)

    assert share("main", "MNN") == pytest.approx((1 / 4, 2))
    assert share("weights", "WSE") == pytest.approx((1 / 2, 2))
    assert share("main", "MSF") == pytest.approx((5 / 6, 1))
    assert share("controls", "re-weighting (1.5, 0.5/K), no mixture") == pytest.approx((1 / 4, 2))


def test_links_of_the_note_lead_to_files_and_headings():
    note = (ROOT / "docs" / "reweighting.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", note)
    assert links
    for file, _, anchor in (link.partition("#") for link in links):
        headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / file).read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
