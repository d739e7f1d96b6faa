"""The pages about the paper and the tables in results/ are what code makes of the files in results/."""

import dataclasses
import json
import re
import shutil
import statistics
from pathlib import Path

import pytest
import torch

import mixnn.cli
from docs import speed_tables as speed
from docs import tables as pages
from mixnn import functional as F
from mixnn.methods.mixture import share_and_scale
from mixnn.paper import claims
from mixnn.paper.claims import Evidence, judge_claims
from mixnn.paper.plan import accuracy, load_finished, plan_row, runs_of
from mixnn.paper.provenance import commit_of, read_commits
from mixnn.paper.statistics import half_width, pooled
from mixnn.paper.tables import PAPER_DATASETS, TABLES, published

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
DATA = ("cifar10", "cifar100")


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


def test_the_pages_have_every_block_and_no_page_has_one_twice():
    texts = [(ROOT / path).read_text() for path in pages.PAGES]
    for mark in ("begin", "end"):
        found = [re.findall(rf"<!-- {mark} (.*?) -->", text) for text in texts]
        assert all(len(names) == len(set(names)) for names in found)
        assert {name for names in found for name in names} == set(pages.BLOCKS)


def test_writing_a_page_twice_changes_nothing(finished):
    sources = pages.sources_of(finished, RESULTS)
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
    for path in [*RESULTS.glob("cifar10-*-seed0.json"), *RESULTS.glob("*-h200.json")]:
        shutil.copy(path, results)
    for folder in ("recipes", "epochs20", "miniature", "folders"):
        shutil.copytree(RESULTS / folder, results / folder)
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
    assert "2 + 1, noise of 6 runs of MNN" in page
    assert text in (results / "tables.md").read_text()
    assert "n = 2 (seeds 0, 5)" in (results / "cifar10-methods.txt").read_text()
    assert (results / "commits.json").exists()
    before = {path: path.stat().st_mtime_ns for path in results.glob("*.png")}
    pages.main(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in results.glob("*.png")} == before, "nothing new to draw"


# The blocks, against the files


def block(name, finished):
    return pages.BLOCKS[name](pages.sources_of(finished, RESULTS))


def words_of(page):
    return " ".join((ROOT / "docs" / f"{page}.md").read_text().split())


def committed(table, name, data="cifar10"):
    """The run of 200 epochs behind a row, with seed 0."""
    (row,) = (row for row in TABLES[table].rows if row.name == name)
    return json.loads((RESULTS / f"{plan_row(row, data, [0], {})[0].name}.json").read_text())


def known_to(protocol):
    """Half of the 95% interval of the difference of two runs on CIFAR-10, by the repeated runs of seed 0."""
    values = [run[protocol] for run in claims.UNSTORED["cifar10"]["main: MNN"]]
    return half_width(pooled([[*values, accuracy(committed("main", "MNN"), protocol)]]), 2)


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


def test_the_summary_counts_every_claim_of_the_paper_once_per_data_set(finished):
    rows = [line.strip("|").split("|") for line in block("summary", finished).splitlines()[2:]]
    _, *counts = zip(*rows, strict=True)
    paper = claims.CLAIMS["paper"]
    for column, data in zip(counts, pages.data_sets(finished), strict=True):
        only_on = [(c.across or PAPER_DATASETS)[0] if c.across or c.measure == claims.STEP_TIME else "" for c in paper]
        assert sum(map(int, column)) == sum(only in ("", data) for only in only_on)
    assert {claim.across[0] for claim in paper if claim.across} <= set(PAPER_DATASETS)


# The findings


@pytest.fixture(scope="module")
def few_runs(first_seed):
    """Seed 0 on CIFAR-10, and five rows on CIFAR-100; later results do not change what these say."""
    rows = ("main: MNN", "main: MSF", "weights: WSE", "weights: MSE, mixture", pages.CONTROL)
    kept = [run for row in rows for run in runs_of(claims.row_of(row), "cifar100", [0], {}, first_seed)]
    return {key: run for key, run in first_seed.items() if run["config"]["data"] == "cifar10" or run in kept}


def test_the_findings_have_each_claim_of_the_paper_once(few_runs):
    table, _, missing = block("claims-in-short", few_runs).partition("Not run on any data set")
    rows = re.findall(r"^\| (.*?) \(([^()]*)\) \|", table, re.MULTILINE)
    listed = re.findall(r"^- (.*) \((.*?)\)$", missing, re.MULTILINE)
    for claim in claims.CLAIMS["paper"]:
        assert ((claim.says, claim.source) in rows) != ((claim.says, claim.where) in listed), claim.says
    assert len(rows) == len(set(rows))
    assert len(listed) == len(set(listed))


def test_a_claim_in_short_has_our_difference_and_the_papers(few_runs):
    mnn, msf = (committed("main", name)["results"]["knn"]["weighted"] for name in ("MNN", "MSF"))
    text = block("claims-in-short", few_runs)
    assert f"| MNN is more accurate than MSF (kNN, sec. 4.2) | **holds:** {mnn - msf:+.2f} (paper +1.57) |" in text
    unmix = [committed("main", name)["results"]["linear"]["last"] for name in ("MNN", "UnMix")]
    assert f"| cannot tell: {unmix[0] - unmix[1]:+.2f} (paper +1.10), MNN over UnMix |" in text, "the smallest lead"
    assert "MNN over MSF, only 1 of 9 comparisons was run |" in text
    loss = [committed("weights", name)["metrics"][-1]["loss"] for name in ("WSE", "WSE, mixture (MNN)")]
    assert f"| cannot tell: the loss is {loss[0] - loss[1]:.3f} lower, noise unknown |" in text
    others = claims.CLAIMS["paper"][2].worse
    methods = [row.name for row in TABLES["main"].rows if row.name not in ("MNN", "Supervised")]
    assert sorted(f"main: {name}" for name in methods if name != "ReSSL") == sorted(others)
    assert (
        "compares MNN with nine methods. ReSSL, our tenth, is a row of our main table but not of the paper's."
        in words_of("findings")
    )


def test_a_claim_without_a_run_on_one_data_set_says_so(few_runs):
    (row,) = (line for line in block("claims-in-short", few_runs).splitlines() if "(CAS) improves MSF" in line)
    assert row.endswith("| not run |")


def test_what_was_found_has_the_numbers_of_the_runs(few_runs):
    def accuracies(table, name, data="cifar10"):
        results = committed(table, name, data)["results"]
        return f"{results['linear']['last']:.2f}", f"{results['knn']['weighted']:.2f}"

    for data in DATA:
        mnn, control = accuracies("main", "MNN", data), accuracies(*pages.CONTROL.split(": "), data)
        words = "MNN has {} linear and {} kNN; these weights without a mixture have {} and {}.".format(*mnn, *control)
        factor = 2 if data == "cifar100" else 1  # the noise of CIFAR-10, doubled
        known = f"±{factor * known_to('linear'):.2f} linear and ±{factor * known_to('knn'):.2f} kNN"
        verdict = f"Verdict: cannot tell, because the difference is known only to {known}."
        assert f"- {pages.DATASET_NAMES[data]}: {words} {verdict}\n" in block("found-mixing", few_runs) + "\n"
    stopped, flowing = (committed(*name.split(": ")) for name in ("weights: CAS, mixture", pages.FLOWING))
    ends = [f"{run['metrics'][-1]['spread']:.2f}" for run in (stopped, flowing)]
    words = "is {} with the gradient stopped and {} without; the spread of the embeddings is {} and {}. Verdict: holds."
    linear = [f"{run['results']['linear']['last']:.2f}" for run in (stopped, flowing)]
    assert words.format(*linear, *ends) in block("found-attention", few_runs)
    pure = [100 * committed(*name.split(": "))["metrics"][-1]["purity_1"] for name in ("main: MNN", pages.LEAKY)]
    text = block("found-leak", few_runs)
    assert "with the leak {} and {}.".format(*accuracies(*pages.LEAKY.split(": "))) in text
    assert "that have the image's class is {:.1f}; with the leak {:.1f}.".format(*pure) in text


def test_verdicts_that_differ_by_protocol_are_both_named(few_runs):
    verdicts = judge_claims(few_runs)
    i = next(i for i, v in enumerate(verdicts) if v.claim.says.startswith("MNN's accuracy") and v.data == "cifar10")
    verdicts[i] = dataclasses.replace(verdicts[i], verdict="holds")
    text = pages.BLOCKS["found-leak"](pages.Sources(Evidence(few_runs), verdicts, RESULTS))
    known = f"because the difference is known only to ±{known_to('knn'):.2f} kNN."
    assert f"Verdicts: linear: holds; kNN: cannot tell, {known}\n\nMarks" in text


def test_a_finding_is_silent_about_a_data_set_without_its_runs(few_runs):
    assert "CIFAR-100" not in block("found-leak", few_runs)


MORE_ACCURATE = "MNN is more accurate than MSF"


def test_what_the_findings_say_without_numbers_is_true(few_runs, finished):
    page = " ".join((ROOT / "docs" / "findings.md").read_text().split())
    assert "MNN's neighbors are purer than those of MSF, CMSF and SNCLR (one run each)." in page
    purities = [committed("main", name)["metrics"][-1]["purity"] for name in ("MNN", "CMSF", "SNCLR", "MSF")]
    assert max(purities) == purities[0]
    assert "follows MNN all the way" in page
    logs = [committed(*name.split(": "), "cifar100")["metrics"] for name in ("main: MNN", pages.CONTROL)]
    assert max(abs(a["knn"] - b["knn"]) for a, b in zip(*logs, strict=True) if "knn" in a) < 1
    assert "Most are within a few tenths of a point" in page
    middles = re.findall(r"^\| CIFAR-10 .* (\d\.\d\d) \| [^|]* \|$", block("distances", few_runs), re.MULTILINE)
    assert len(middles) == 2
    assert max(map(float, middles)) < 0.5
    leads = {(v.data, v.claim.measure): v for v in judge_claims(finished) if v.claim.says == MORE_ACCURATE}
    assert "On CIFAR-100 it is far ahead." in page
    assert all(leads["cifar100", measure].interval.low > 3 for measure in ("linear", "knn"))
    linear, knn = (leads["cifar10", measure] for measure in ("linear", "knn"))
    assert (linear.verdict, knn.verdict) == ("holds", "holds")
    assert f"On CIFAR-10 it leads by {knn.interval.mean:.2f} points of kNN accuracy and by" in page
    assert f"{linear.interval.mean:.2f} of linear accuracy, which is enough to tell from noise" in page


# The reproduction


def test_weights_and_lengths_on_the_page_are_those_of_the_runs():
    page = words_of("reproduction")
    note = words_of("reweighting")
    run = committed("main", "MNN")
    end, options = run["metrics"][-1], run["config"]["options"]
    share, scale = share_and_scale(options, end["norm_ratio"], end["cos_neighbors"])
    assert f"neighbors are {end['norm_ratio']:.3f} times as long as z, and their cosine to z is" in note
    assert f"is {end['cos_neighbors']:.3f}. So neighbors have a share of {share:.2f} instead of 0.25" in note
    assert f"the weights are about {(1 - share) * scale:.2f} and {share * scale:.2f}/K." in note
    mixed, wse = (share_and_scale(committed("weights", n)["config"]["options"])[0] for n in ("MSE, mixture", "WSE"))
    assert f"more of the weight ({1 - mixed:.0%}) than WSE without mixture ({1 - wse:.0%})" in page
    assert f"similar shares ({mixed:.0%} and {wse:.0%})".replace("%", "", 1) in page


def test_published_numbers_on_the_page_are_those_of_the_tables():
    page = " ".join((ROOT / "docs" / "reproduction.md").read_text().split())
    rows = [claims.row_of(f"main: {name}") for name in ("SimCLR", "BYOL")]
    fixed, paper = ([published(row, kind, "linear", "cifar10") for row in rows] for kind in ("fixed", "paper"))
    gains = [round(a - b, 1) for a, b in zip(fixed, paper, strict=True)]
    assert (
        "are {} and {} points higher on CIFAR-10 ({} and {} instead of {} and {})".format(*gains, *fixed, *paper)
        in page
    )
    wse, mse = (claims.row_of(f"weights: {name}") for name in ("WSE", "MSE, mixture"))
    ahead = [
        round(published(wse, "paper", "linear", d) - published(mse, "paper", "linear", d), 1) for d in PAPER_DATASETS
    ]
    assert "is ahead by {} points on CIFAR-10 and {}, {} and {} on CIFAR-100, STL-10 and Tiny-".format(*ahead) in page
    runs = {plan_row(row, "cifar10", [0], {})[0].fingerprint for table in TABLES.values() for row in table.rows}
    rows = sum(len(table.rows) for table in TABLES.values())
    assert f"All tables on CIFAR-10 have {rows} rows and are {len(runs)} runs, because" in page
    leaks = committed("controls", "MNN, leaky queue")["metrics"][-1]["own_image"]
    stays = committed("main", "MNN")["metrics"][-1]["own_image"]
    assert "there, about 90% of the images found themselves." in page
    assert 0.85 < 2 * leaks - stays < 0.95


def test_the_spread_falls_when_the_page_says():
    assert "between epochs 45 and 80" in (ROOT / "docs" / "reproduction.md").read_text()
    for name in ("CAS, gradient through it", "CAS, mixture, gradient through it"):
        spread = {line["epoch"]: line["spread"] for line in committed("controls", name)["metrics"]}
        assert spread[45] > 0.9
        assert spread[80] < 0.6


def test_the_miniature_on_the_page_is_that_of_the_committed_runs(finished):
    run = json.loads((RESULTS / "miniature" / "cifar10-mnn-ba695052-seed0.json").read_text())
    end, (most, epoch) = run["metrics"][-1], max((line["spread"], line["epoch"]) for line in run["metrics"])
    numbers = f"{most:.2f} ({epoch}) | {end['spread']:.2f} | {end['d_positive']:.2f} | {end['rank']:.1f}"
    text = block("miniature", finished)
    assert f"| {numbers} | {run['results']['knn']['weighted']:.1f} |" in text
    assert text.endswith("‡ all.")
    settings = re.findall(r"--setting (\w+)=(\S+)", (ROOT / "docs" / "reproduction.md").read_text())
    assert {(name, str(value)) for name, value in pages.MINIATURE.items()} <= set(settings)


def test_the_number_that_is_followed_is_that_of_the_run():
    linear = committed("main", "MNN", "cifar100")["results"]["linear"]["last"]
    assert f"MNN's {linear:.2f}% linear accuracy on CIFAR-100" in words_of("numbers")


def test_marked_results_of_all_folders_are_counted_and_named_if_they_are_few(first_seed, finished):
    lines = block("marked", first_seed).splitlines()
    rows = {cells[0]: cells[1:] for cells in ([c.strip() for c in line.strip("|").split("|")] for line in lines)}
    old = [run for run in finished.values() if "training_code" not in run["environment"]]
    assert rows["`results/`"] == [str(len(finished)), "1 (supervised on CIFAR-10)", str(len(old))]
    assert set(rows) >= {f"`results/{name}`" for name in ("", "epochs20", "miniature", "recipes", "folders")}
    assert rows["`results/epochs20`"] == ["13", "13", "13"]
    assert "In the tables of 200 epochs: MNN on CIFAR-10." in block("marked", finished)
    assert "In the tables" not in block("marked", first_seed), "one seed is no mean"


def test_the_marks_of_a_table_are_named_below_it(finished, first_seed):
    assert block("all-methods", finished).endswith("† Supervised; ‡ all but MNN; § MNN.")
    assert block("all-methods", first_seed).endswith("† Supervised; ‡ all but MNN.")
    assert block("chosen-methods", finished).count(" ‡ |") == 8
    assert "(numbers.md#marks-in-the-tables)" in block("twenty-epochs", finished)
    for name in ("weights", "attention", "leak", "leads", "claims", "own-claims", "claims-in-short", "found-mixing"):
        assert "\n\nMarks ([meaning]" in block(name, finished), name


def test_a_row_that_is_far_from_the_authors_number_is_open(finished, first_seed):
    difference = accuracy(committed("main", "MSF", "cifar100"), "linear") - 59.84
    text, (width, _) = block("open-rows", finished), known_on_cifar100()
    assert text.startswith(f"- **Open:** MSF on CIFAR-100 is {difference:+.2f} points linear from the authors' number")
    assert text.endswith(f"within the noise of two single runs (±{width:.2f}).")
    assert text in (ROOT / "docs" / "results.md").read_text()
    findings = words_of("findings")
    assert f"Its linear accuracy is {-difference:.2f} points below the authors' number." in findings
    assert f"Two single runs can differ by {width:.2f} there" in findings
    cifar10 = {key: run for key, run in first_seed.items() if run["config"]["data"] == "cifar10"}
    assert block("open-rows", cifar10) == "No row is open."


# CIFAR-100: MNN with the leak, MSF with weights that sum to 2, BYOL with MNN's views and scale
PAIRS = {
    "linear": [(67.68, 68.44), (60.71, 60.40), (67.10, 66.49)],
    "knn": [(62.19, 62.02), (53.02, 53.47), (60.67, 60.73)],
}


def known_on_cifar100():
    return [half_width(pooled(pairs), 2) for pairs in PAIRS.values()]


def test_mixing_is_settled_by_no_comparison(finished):
    """The verdict for kNN on CIFAR-10 depends on which runs of MNN count."""
    says = "Weights (1.5, 0.5/K) without a mixture are as good as MNN"
    found = {(v.data, v.claim.measure): v for v in judge_claims(finished) if v.claim.says == says}
    assert {verdict.verdict for verdict in found.values()} == {"cannot tell"}
    flips = found["cifar10", "knn"]
    assert max(map(abs, flips.interval[1:])) < 0.5 < max(map(abs, flips.with_unstored[1:]))
    assert (
        "kNN depends on which runs count: -0.03 [-0.49, +0.43] with those in results/, +0.09 [-0.34, +0.52] with"
        in (block("found-mixing", finished))
    )
    assert "none of four comparisons is settled" in words_of("reweighting")
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "ended within half a point of MNN, but the noise is larger than that." in readme


def test_a_run_whose_file_was_lost_is_named(few_runs):
    line = "- Neighbors help, with MNN's views and scale (linear); a run on CIFAR-100 had 67.10, but its file was lost"
    assert line in block("own-claims", few_runs).splitlines()


def test_the_noise_of_cifar100_is_that_of_three_pairs(finished):
    for (protocol, pairs), width in zip(PAIRS.items(), known_on_cifar100(), strict=True):
        label, noise = {"linear": "linear", "knn": "kNN"}[protocol], pooled(pairs)
        row = f"| CIFAR-100 | {label} | {noise.std:.2f} | {width:.2f} | noise of 3 rows with several runs |"
        assert row in block("noise", finished)
    assert noise.df == 3
    assert "Three degrees of freedom make t 3.18." in words_of("results")


def test_noise_of_too_few_runs_is_stated_but_decides_nothing(finished):
    byol = "cifar100-byol-8fb8657c-seed0"
    others = {
        key: run for key, run in finished.items() if f"{key[0]}-seed{key[1]}" != byol.removeprefix("cifar100-byol-")
    }
    assert len(others) == len(finished) - 1
    linear, knn = (pooled(pairs[:2]).std for pairs in PAIRS.values())
    text = block("noise", others)
    assert f"a measured deviation of {linear:.2f} linear and {knn:.2f} kNN (assumed: 0.55 and 0.33)" in text
    assert "| CIFAR-100 | linear | 0.55 | 1.91 | noise of cifar10, doubled |" in text


def test_what_the_findings_say_of_views_and_neighbors_is_true(finished):
    def linear(name):
        return accuracy(committed(*name.split(": "), "cifar100"), "linear")

    page, views = words_of("findings"), "controls: BYOL (s/w)"
    authors = published(claims.row_of("main: BYOL"), "fixed", "linear", "cifar100")
    assert "the views add more than three points of linear accuracy, and" in page
    assert f"is {linear('main: MNN') - authors:.1f} points below" in page
    assert 3 < linear(views) - authors < 4
    assert "and the neighbors about one more" in page
    for name in (views, pages.BYOL_LIKE_MNN):
        assert linear("main: MNN") - linear(name) == pytest.approx(1, abs=0.2)
    assert "MSF, with five sixths, is eight points below BYOL with the same views" in page
    assert linear(views) - linear("main: MSF") == pytest.approx(8, abs=0.5)
    assert f"| CIFAR-100 | BYOL, MNN's views |  | {linear(views):.2f} |" in block("views", finished)
    assert f"| CIFAR-100 | BYOL, two strong views | {authors:.2f} |  |" in block("views", finished)
    leaky, fixed = (committed(t, n, "cifar100") for t, n in (("controls", "MSF, leaky queue"), ("main", "MSF")))
    paper = [published(claims.row_of("main: MSF"), "paper", p, "cifar100") for p in ("linear", "knn")]
    words = (
        "MSF with the leak is closer to the paper's numbers on CIFAR-100, {} linear and {} kNN, which had the leak too"
    )
    assert words.format(*paper) in words_of("reproduction")
    for protocol, number in zip(("linear", "knn"), paper, strict=True):
        assert abs(accuracy(leaky, protocol) - number) < abs(accuracy(fixed, protocol) - number)


def test_what_the_first_screen_says_about_folders_is_measured():
    rows = json.loads((RESULTS / "folders" / "h200.json").read_text())["rows"]

    def gain(folder):
        own = [run["features"] for run in rows if run["folder"] == folder and run["budget"] == "600 steps"]
        means = (statistics.fmean(run[which]["labels_5"]["value"] for run in own) for which in ("trained", "start"))
        trained, start = means
        return trained - start

    words = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"{gain('w_smiles'):.0f} on smiles and {gain('w_coins'):.0f} on coins, less than one on cats and dogs." in words
    )
    assert 0 < gain("w_catsdogs") < 1
    assert f"On traffic lights it fell by {-gain('w_trafficlights'):.1f}, which is within the noise" in words


# The note


def test_the_notes_identity_and_weights_are_right():
    note = words_of("reweighting")
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
    for c, words in ((0.8, "1.52 and 0.52/K for $c_i = 0.8$"), (0.0, "1.62 and 0.62/K for $c_i = 0$")):
        length = (1 - 2 * lam * (1 - lam) * (1 - c)).sqrt()
        assert f"{1 + ((1 - lam) / length).mean():.2f} and {(lam / length).mean():.2f}/K" in words
        assert words in note
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.8, 0.6])  # unit vectors of cosine 0.8
    torch.testing.assert_close((0.3 * a + 0.7 * b).norm(), torch.tensor((1 - 2 * 0.3 * 0.7 * 0.2) ** 0.5))
    approximate = (1 + (1 - lam) ** 2).mean(), (lam**2).mean()
    assert "{:.2f} and {:.2f}/K".format(*approximate) in note


def test_the_notes_weights_have_the_gradient_of_every_mixer():
    """Exactly, if they are those of the vectors at hand."""
    generator = torch.Generator().manual_seed(0)
    p, z, neighbors = (
        torch.randn(shape, dtype=torch.double, generator=generator) for shape in ((1, 8), (1, 8), (3, 8))
    )
    lengths = (neighbors.norm(dim=1) / z.norm()).tolist()
    cosines = F.cosines(z, neighbors)[0].tolist()
    for mixer in ("unit", "unit_renorm", "raw_renorm"):
        lam, k = 0.3, len(neighbors)
        shares = [lam * r / (lam * r + 1 - lam) if mixer == "raw_renorm" else lam for r in lengths]
        norms = [(1 - 2 * s * (1 - s) * (1 - c)) ** 0.5 for s, c in zip(shares, cosines, strict=True)]
        norms = [1.0] * k if mixer == "unit" else norms
        own = 1 + sum((1 - s) / n for s, n in zip(shares, norms, strict=True)) / k
        weights = torch.tensor([own, *(s / (k * n) for s, n in zip(shares, norms, strict=True))], dtype=torch.double)
        mixed, plain = p.clone().requires_grad_(), p.clone().requires_grad_()
        targets = torch.cat([F.unit(z)[:, None], F.mix(neighbors[None], z, lam, mixer)], dim=1)
        F.weighted_squared_error(mixed, targets, F.wse_weights(k, p)).backward()
        F.weighted_squared_error(plain, F.unit(torch.cat([z, neighbors]))[None], weights).backward()
        torch.testing.assert_close(mixed.grad, plain.grad)


def test_the_notes_measurements_are_every_ten_epochs():
    assert "over all measurements (every ten epochs)" in words_of("reweighting")
    for data in DATA:
        epochs = [line["epoch"] for line in committed("main", "MNN", data)["metrics"] if "knn" in line]
        assert epochs == list(range(10, 201, 10))


def test_the_notes_shares_are_those_of_the_options():
    def share(table, name):
        (row,) = (row for row in TABLES[table].rows if row.name == name)
        return share_and_scale(plan_row(row, "cifar10", [0], {})[0].config.options)

    rows = re.findall(r"\| (\d/\d) \| (\d) \|$", (ROOT / "docs/reweighting.md").read_text(), re.MULTILINE)
    assert rows == [("1/4", "2"), ("1/4", "2"), ("1/2", "2"), ("5/6", "1")]
    assert share("main", "MNN") == pytest.approx((1 / 4, 2))
    assert share("weights", "WSE") == pytest.approx((1 / 2, 2))
    assert share("main", "MSF") == pytest.approx((5 / 6, 1))
    assert share("controls", "re-weighting (1.5, 0.5/K), no mixture") == pytest.approx((1 / 4, 2))


# Speed


def test_all_measurements_of_a_step_are_of_one_committed_state_of_the_code():
    environments = [json.loads(path.read_text())["environment"] for path in speed.bench_files(RESULTS)]
    assert len(environments) >= 8
    assert len({made_with["code"] for made_with in environments}) == 1
    assert commit_of(environments[0], read_commits(RESULTS))


def test_the_tables_of_speed_have_the_measurements():
    def read(name):
        return json.loads((RESULTS / f"bench-{name}-h200.json").read_text())

    one, peers, points = read("mnn"), read("peers")["libraries"], read("growth")["points"]
    assert f"| {one['ms_per_step']:.2f} |" in speed.step(RESULTS)
    share = one["share_by_kernel"]["batch norm"]
    assert f"| batch norm | {share * one['ms_per_step']:.2f} | {share:.0%} |" in speed.kernels(RESULTS)
    theirs, ours = (peers[name]["loading"]["ms_per_step"] for name in ("lightly", "mixnn-byol"))
    assert f"| lightly, BYOL | {theirs:.1f} | {theirs / ours:.1f} |" in speed.peers(RESULTS)
    (large,) = (point for point in points if point["changes"] == {"support_size": 65_536})
    assert f"| Q 65,536 | {large['ms_per_step']:.2f} |" in speed.growth(RESULTS)
    assert large["search_share"] < 0.05, "the page says so"
    assert "| UnMix | 3 + 3 | {ms_per_step:.2f} |".format(**read("methods")["methods"]["unmix"]) in speed.methods(
        RESULTS
    )
    row = next(r for r in read("convolutions")["rows"] if (r["side"], r["what"]) == (32, "gradient of x"))
    assert f"| gradient of x | {row['cudnn_us']:.1f} | {row['mixnn_us']:.1f} |" in speed.convolutions(RESULTS)


def test_the_table_of_recipes_has_the_means_of_all_seeds():
    fast = [r for r in json.loads((RESULTS / "recipes" / "cifar10-final.json").read_text()) if r["name"] == "fast"]
    seconds, linear, knn = (statistics.fmean(run[column] for run in fast) for column in ("seconds", "linear", "knn"))
    spread = statistics.stdev(run["linear"] for run in fast)
    row = f"| CIFAR-10 | `fast` | {len(fast)} | 200 | {seconds:.1f} | {linear:.2f} ± {spread:.2f} | {knn:.2f} ± "
    assert row in speed.recipes(RESULTS)
    papers = [committed("main", "MNN")["results"]["linear"]["last"], 91.39, 90.93]  # seeds 0, 1, 2
    assert f"| CIFAR-10 | the paper's | 3 | 200 | 259.4 | {statistics.fmean(papers):.2f} ±" in speed.recipes(RESULTS)


def test_repeated_runs_come_before_the_other_seeds(finished):
    table, means, others = block("repeated-runs", finished).split("\n\n", 2)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows][3:] == ["seed 0, no file", "seed 0", "seed 1", "seed 2", "standard deviation"]
    assert "whole step compiled, bf16 features" in rows[1][1]
    *linear, deviation = (float(row[2]) for row in rows)
    assert linear == [91.55, 90.93, 91.57, 91.28, 91.50, 91.39, 90.93]
    assert deviation == pytest.approx(statistics.stdev(linear), abs=0.005)
    assert f"the runs without a file {statistics.fmean(linear[:4]):.2f} / 89.57" in means
    assert "- BYOL (s/w), times 2 on CIFAR-100: 67.10 / 60.67 without a file, 66.49 / 60.73 in `results/`." in others
    alone = {key: run for key, run in finished.items() if run["config"]["data"] == "cifar10"}
    assert "67.10 / 60.67 without a file; it was not repeated." in block("repeated-runs", alone)


def test_runs_without_a_file_are_in_the_log():
    log = " ".join((ROOT / "notes" / "log.md").read_text().split())
    for rows in claims.UNSTORED.values():
        for run in (run for runs in rows.values() for run in runs):
            pattern = rf"{run['linear']:.2f}(?: \([\d.]+\) \|| /) {run['knn']}"
            assert re.search(pattern, log), run


def test_the_recipes_are_compared_with_an_interval():
    rows = [line.strip("| ").split(" | ") for line in speed.recipes(RESULTS).splitlines()]
    fast = {row[0]: row[7:] for row in rows if row[1:2] == ["`fast`"]}
    deviation = pooled([[run["knn"] for run in claims.UNSTORED["cifar10"]["main: MNN"]] + [89.90, 89.83, 89.61]])
    half = half_width(deviation, 2 / 3)
    assert fast["CIFAR-10"][1] == f"-0.28 [{-0.28 - half:+.2f}, {-0.28 + half:+.2f}]", "cannot tell"
    assert fast["CIFAR-10"][0].startswith("+0.74 [+0.")
    half = known_on_cifar100()[1]
    assert fast["CIFAR-100"][1] == f"-1.52 [{-1.52 - half:+.2f}, {-1.52 + half:+.2f}]", "lower"


def test_the_probes_times_are_those_of_the_newest_runs():
    assert "took 12.4 to 18.8 s (median 12.9) in the newest runs" in speed.probe_seconds(RESULTS)


def test_the_counts_of_verdicts_are_those_of_the_table(finished):
    first, second = block("in-short", finished).splitlines()
    counts = dict(re.findall(r"^\| ([a-z ]+) \| (\d+) ", block("summary", finished), re.MULTILINE))
    total = sum(map(int, counts.values()))
    assert first == (
        f"On CIFAR-10, of {total} claims of the paper {counts['holds']} hold, none was refuted, "
        f"{counts['cannot tell']} are undecided, and {counts['not run']} were not run."
    )
    assert "4 hold, none was refuted" in second


def test_what_mnns_parts_add_has_the_words_of_the_page(finished):
    rows = [line.strip("| ").split(" | ") for line in block("parts-of-mnn", finished).splitlines()[2:]]
    found = {(data, what): (linear.partition("], ")[2], knn.partition("], ")[2]) for data, what, linear, knn in rows}
    assert found["CIFAR-100", "the mixture, to WSE"] == ("cannot tell", "holds")
    assert found["CIFAR-100", "WSE, to the mixture"] == ("holds", "holds")
    assert {v for what in ("the mixture, to WSE", "WSE, to the mixture") for v in found["CIFAR-10", what]} == {
        "cannot tell"
    }
    assert {v for what in ("the mixture, to MSF", "WSE, to MSF") for v in found["CIFAR-10", what]} == {"holds"}
    mse, wse = (committed("weights", name, "cifar100") for name in ("MSE, mixture", "WSE"))
    deficits = [accuracy(wse, protocol) - accuracy(mse, protocol) for protocol in ("linear", "knn")]
    linear, knn = known_on_cifar100()
    assert 0 < deficits[0] < linear, "within the noise"
    assert deficits[1] > knn, "by more than the noise"
