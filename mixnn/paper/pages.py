"""pages: write again what code can write in the pages about the paper, from the files in results/.

    python -m mixnn.paper.pages        (make pages)

It replaces the blocks of PAGES that stand between `<!-- begin NAME -->` and `<!-- end NAME -->`, the pages of tables in
results/, the commits of the results, and figures whose runs have changed.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mixnn.files import write_atomically
from mixnn.paper import claims, speed
from mixnn.paper.claims import (
    NOT_RUN,
    Claim,
    Evidence,
    Verdict,
    difference_text,
    judge_claims,
    markdown_claims,
    not_run,
    number_form,
    row_of,
)
from mixnn.paper.figures import figures
from mixnn.paper.plan import RunKey, Summaries, key_of, load_finished, runs_of
from mixnn.paper.provenance import MEANINGS, find_commits, marks_of, read_commits
from mixnn.paper.render import as_markdown, fill, markdown_table
from mixnn.paper.statistics import CONFIDENCE, t_quantile
from mixnn.paper.tables import DATASET_NAMES, PAPER_DATASETS, PROTOCOLS, TABLES, Row, published
from mixnn.progress import Reporter

_DOCS = ("reproduction", "findings", "reweighting", "numbers", "results", "performance")
PAGES = *(Path("docs") / f"{name}.md" for name in _DOCS), Path("README.md")
RESULTS = Path("results")
BLOCK = re.compile(r"(<!-- begin ([a-z-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
CONTROL = "controls: re-weighting (1.5, 0.5/K), no mixture"
LEAKY = "controls: MNN, leaky queue"
FLOWING = "controls: CAS, mixture, gradient through it"
# The paper's figures and ours: where it is in the paper, what it shows, our figures by name.
FIGURES = (
    ("1", "an image and its neighbors", ("examples",)),
    ("2", "overview of MNN", ()),
    ("3 (a)", "purity by augmentation", ("purity-augmentation",)),
    ("3 (b)", "purity by number of neighbors", ("purity-neighbors",)),
    ("3 (c)", "purity by size of the support set", ("purity-support",)),
    ("3 (d)", "purity by selection", ("purity-selection",)),
    ("4", "attention: inconsistency, entropy, purity", ("attention-datasets", "attention")),
    ("5", "t-SNE", ("tsne",)),
    ("6", "loss and accuracy without mixture", ("loss", "accuracy")),
    ("7", "purity by rank", ("ranks",)),
    ("ours", "all methods over epochs; their purity; the main table", ("methods", "purity-methods", "main")),
    ("ours", "accuracy against the neighbors' share of the loss", ("share",)),
)
MAX_NAMED = 5  # runs in a list; more are only counted
NEEDS_RUN = ("examples", "tsne")  # these are drawn from a run folder, not from results


class Sources(NamedTuple):
    """What the blocks are made of."""

    evidence: Evidence
    verdicts: Sequence[Verdict]
    results: Path


Block = Callable[[Sources], str]


def main(root: Path = Path()) -> None:
    """Write the pages, the commits and the figures of a checkout."""
    results = root / RESULTS
    finished = load_finished(results)
    benchmarks = [json.loads(path.read_text()) for path in speed.bench_files(results)]
    find_commits(results, [*finished.values(), *benchmarks])
    for data in data_sets(finished):
        _draw_figures(results, data)
    for path, text in pages(root).items():
        write_atomically(path, text.encode())


def pages(root: Path) -> dict[Path, str]:
    """The pages of a checkout, by path, as they should be."""
    results, finished = root / RESULTS, load_finished(root / RESULTS)
    commits, seeds = read_commits(results), sorted({seed for _, seed in finished})
    sources = Sources(Evidence(finished), judge_claims(finished), results)
    found = {root / page: with_blocks((root / page).read_text(), sources) for page in PAGES}
    for data in data_sets(finished):
        filled = [fill(table, data, seeds, {}, finished, commits) for table in TABLES.values()]
        found[results / tables_page(data)] = as_markdown(filled) + "\n"
    return found


def tables_page(data: str) -> str:
    """The file in results/ that has the tables of a data set."""
    return "tables.md" if data == "cifar10" else f"tables-{data}.md"


def data_sets(finished: Summaries) -> list[str]:
    """The paper's data sets on which anything was run."""
    present = {summary["config"]["data"] for summary in finished.values()}
    return [data for data in PAPER_DATASETS if data in present]


def with_blocks(page: str, sources: Sources) -> str:
    """A page with its blocks written again."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]](sources)}\n\n{match[3]}", page)


def _draw_figures(results: Path, data: str) -> None:
    """Draw what can be drawn, and replace figures whose captions, which name the runs, have changed."""
    with tempfile.TemporaryDirectory() as folder:
        figures(results=results, out=folder, data=data, verbose=Reporter(quiet=True))
        for caption in Path(folder).glob("*.txt"):
            old = results / caption.name
            if not old.is_file() or old.read_text() != caption.read_text():
                for path in Path(folder).glob(f"{caption.stem}.*"):
                    shutil.copyfile(path, results / path.name)


# Blocks of the page


def number(evidence: Evidence, name: str, data: str, measure: str, form: str = ".2f", scale: float = 1.0) -> str:
    """The mean of a row's runs as text, with deviation and number if there are several; empty if there are none."""
    values = [scale * value for value in evidence.sample(name, data, measure).values.values()]
    if not values:
        return ""
    mean = format(statistics.fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):{form}} (n={len(values)})"


def coverage(sources: Sources) -> str:
    """How many rows of each table have a run of 200 epochs, by data set."""
    present = data_sets(sources.evidence.finished)
    rows = [[t.name, *(_count_runs(t.rows, data, sources.evidence) for data in present)] for t in TABLES.values()]
    return markdown_table(["table", *(DATASET_NAMES[data] for data in present)], rows)


def amount(sources: Sources) -> str:
    """How many rows of the main table, the other tables and our controls have a run of 200 epochs, by data set."""
    groups = {
        "the main table": ["main"],
        "the paper's other tables": [name for name in TABLES if name not in ("main", "controls")],
        "our controls": ["controls"],
    }
    rows = []
    for data in data_sets(sources.evidence.finished):
        of_groups = ([row for name in names for row in TABLES[name].rows] for names in groups.values())
        rows.append([DATASET_NAMES[data], *(_count_runs(group, data, sources.evidence) for group in of_groups)])
    return markdown_table(["data", *groups], rows)


def _count_runs(rows: Sequence[Row], data: str, evidence: Evidence) -> str:
    """Text such as "3 of 9 rows, 1 with several seeds"."""
    runs = [runs_of(row, data, evidence.seeds, {}, evidence.finished) for row in rows]
    several = sum(len(found) > 1 for found in runs)
    return f"{sum(map(bool, runs))} of {len(runs)} rows" + (f", {several} with several seeds" if several else "")


def noise(sources: Sources) -> str:
    """The deviation between runs by data set, and by how much two single runs must differ."""
    evidence = sources.evidence
    rows = []
    for data in data_sets(evidence.finished):
        for protocol in PROTOCOLS:
            spread, source = evidence.spread(data, protocol)
            if spread is None:
                continue
            needed = t_quantile(0.5 + CONFIDENCE / 2, spread.df) * spread.std * 2**0.5
            rows.append([DATASET_NAMES[data], PROTOCOLS[protocol].label, f"{spread.std:.2f}", f"{needed:.2f}", source])
    return markdown_table(["data", "", "deviation", "two single runs must differ by", "source"], rows)


def distances(sources: Sources) -> str:
    """How far our numbers are from the authors', by data set and protocol."""
    evidence = sources.evidence
    rows = []
    for data in data_sets(evidence.finished):
        filled = fill(TABLES["main"], data, evidence.seeds, {}, evidence.finished, {})
        for protocol in PROTOCOLS:
            cells = {row["name"]: row[protocol]["difference"] for row in filled.rows if row[protocol]["fixed"]}
            found = {name: difference for name, difference in cells.items() if difference is not None}
            if not found:
                continue
            far = [f"{name} {d:+.2f}" for name, d in found.items() if abs(d) > 1]
            middle = f"{statistics.median(map(abs, found.values())):.2f}"
            bounds = " to ".join(dict.fromkeys(f"{limit(found.values()):+.2f}" for limit in (min, max)))
            label = PROTOCOLS[protocol].label
            rows.append([DATASET_NAMES[data], label, str(len(found)), bounds, middle, ", ".join(far) or "none"])
    return markdown_table(
        ["data", "", "methods", "ours minus theirs", "median absolute difference", "over a point"], rows
    )


def marked(sources: Sources) -> str:
    """How many of the finished runs have each mark, with their names if these are few."""
    evidence, commits = sources.evidence, read_commits(sources.results)
    runs: dict[RunKey, tuple[str, str]] = {}  # the first row that shows a run, and the run's marks
    for data in data_sets(evidence.finished):
        for row in (row for table in TABLES.values() for row in table.rows):
            for run in runs_of(row, data, evidence.seeds, {}, evidence.finished):
                runs.setdefault(key_of(run), (f"{row.name} on {DATASET_NAMES[data]}", marks_of([run], commits)))
    lines = []
    for mark, meaning in MEANINGS.items():
        names = [name for name, marks in runs.values() if mark in marks]
        amount = f"all {len(runs)}" if len(names) == len(runs) else f"{len(names)} of {len(runs)}"
        few = f" ({', '.join(dict.fromkeys(names))})" if 0 < len(names) <= MAX_NAMED else ""
        lines.append(f"- **{mark}** {meaning}: {amount} results{few}.")
    return "\n".join(lines)


def leads(sources: Sources) -> str:
    """MNN's lead over every other method without labels, the paper's and ours."""
    evidence = sources.evidence
    rows = []
    for data in data_sets(evidence.finished):
        for row in TABLES["main"].rows:
            if row.name in ("MNN", "Supervised"):
                continue
            texts = []
            for protocol in PROTOCOLS:
                paper = [published(r, "paper", protocol, data) for r in (row_of("main: MNN"), row)]
                ours = [evidence.sample(f"main: {name}", data, protocol) for name in ("MNN", row.name)]
                texts.append("" if paper[0] is None or paper[1] is None else f"{paper[0] - paper[1]:+.2f}")
                texts.append(f"{ours[0].mean - ours[1].mean:+.2f}" if all(s.values for s in ours) else "")
            if texts[1] or texts[3]:
                rows.append([DATASET_NAMES[data], row.name, *texts])
    return markdown_table(["data", "MNN's lead over", "linear: paper", "ours", "kNN: paper", "ours"], rows)


def all_methods(sources: Sources) -> str:
    """The main table on CIFAR-10."""
    return _main_table(sources, [row.name for row in TABLES["main"].rows])


def chosen_methods(sources: Sources) -> str:
    """The rows of the main table that the README has, and how long they train."""
    return _main_table(sources, ("BYOL", "SCE", "UnMix", "MSF", "MNN"), with_seconds=True)


def _main_table(sources: Sources, names: Sequence[str], with_seconds: bool = False) -> str:
    rows = []
    for row in (row for row in TABLES["main"].rows if row.name in names):
        cells = [row.name]
        for protocol in PROTOCOLS:
            found = [published(row, column, protocol, "cifar10") for column in ("paper", "fixed")]
            cells += ["" if value is None else f"{value:.2f}" for value in found]
            cells.append(number(sources.evidence, f"main: {row.name}", "cifar10", protocol))
        rows.append([*cells, *([speed.training_seconds(sources.results, row.method)] if with_seconds else [])])
    heads = [text for p in PROTOCOLS.values() for text in (f"{p.label}: paper", "newest", "ours")]
    return markdown_table(["", *heads, *(["training (computed)"] if with_seconds else [])], rows)


def repeated_runs(sources: Sources) -> str:
    """All runs of MNN on CIFAR-10 with seed 0, then the other seeds, and how much they differ."""
    repeats, columns = claims.REPEATS["cifar10"], []
    for protocol in PROTOCOLS:
        stored = dict(sources.evidence.sample(repeats["row"], "cifar10", protocol).values)
        values = [*repeats[protocol], stored.pop(0), *stored.values()]
        columns.append([PROTOCOLS[protocol].label, *(f"{v:.2f}" for v in (*values, statistics.stdev(values)))])
    runs = [f"seed 0, run {i + 1}" for i in range(len(values) - len(stored))] + [f"seed {seed}" for seed in stored]
    head, *rows = zip(["", *runs, "standard deviation"], *columns, strict=True)
    return markdown_table(head, rows)


class Column(NamedTuple):
    """A column of numbers at the last epoch."""

    head: str
    measure: str
    form: str = ".2f"
    scale: float = 1.0


def _table_of_measures(names: Mapping[str, str], *columns: Column) -> Block:
    """A block with numbers of the rows that `names` maps to labels; rows without a run are left out."""

    def block(sources: Sources) -> str:
        rows = []
        for data in data_sets(sources.evidence.finished):
            for name, label in names.items():
                texts = [number(sources.evidence, name, data, c.measure, c.form, c.scale) for c in columns]
                if any(texts):
                    rows.append([DATASET_NAMES[data], label, *texts])
        return markdown_table(["data", "", *(column.head for column in columns)], rows)

    return block


ACCURACIES = Column("linear", "linear"), Column("kNN", "knn")
RANK = Column("effective rank", "rank", ".1f")
PURITY = Column("purity (%)", "purity", ".1f", 100)


def whole_runs(sources: Sources) -> str:
    """The largest differences over training between pairs of runs with the same seed, and between seeds of MNN."""
    evidence = sources.evidence
    pairs = (
        ("MNN and weights (1.5, 0.5 / K), no mixture", "main: MNN", CONTROL),
        ("MNN and weights (1, 1 / K), no mixture: WSE", "main: MNN", "weights: WSE"),
        ("for scale: MNN and CAS with mixture", "main: MNN", "weights: CAS, mixture"),
        ("for scale: WSE and CAS without mixture", "weights: WSE", "weights: CAS"),
    )
    rows = []
    for data in data_sets(evidence.finished):
        for label, *names in pairs:
            logs = [{run["config"]["seed"]: run["metrics"] for run in evidence.runs(name, data)} for name in names]
            if common := sorted(logs[0].keys() & logs[1].keys()):
                rows.append([DATASET_NAMES[data], label, *_farthest(*(log[common[0]] for log in logs))])
        for a, b in itertools.combinations(evidence.runs("main: MNN", data), 2):
            label = f"for scale: MNN with seed {a['config']['seed']} and with seed {b['config']['seed']}"
            rows.append([DATASET_NAMES[data], label, *_farthest(a["metrics"], b["metrics"])])
    return markdown_table(["data", "", "kNN (points)", "purity (points)", "effective rank"], rows)


def _farthest(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> list[str]:
    """The largest differences of kNN over all readings, and of purity and rank after the tenth epoch."""
    found = []
    for column, after, scale, form in (("knn", 0, 1, ".2f"), ("purity", 10, 100, ".1f"), ("rank", 10, 1, ".1f")):
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if column in a and a["epoch"] > after]
        found.append(format(scale * max(abs(a[column] - b[column]) for a, b in pairs), form))
    return found


def _verdict_table(whose: str, row: str = "", list_missing: bool = True) -> Block:
    """A block with the verdicts on the paper's claims or ours, or only on those about this row."""

    def block(sources: Sources) -> str:
        chosen = [claim for claim in claims.CLAIMS[whose] if not row or row in claim.better]
        own = [verdict for verdict in sources.verdicts if verdict.claim in chosen]
        return markdown_claims(own) + (_missing(not_run(own)) if list_missing else "")

    return block


def _missing(labels: Sequence[str]) -> str:
    """The list of claims without a run, to follow a table of the others; empty if there are none."""
    return "\n- ".join(["\n\nNot run on any data set, so we cannot tell:\n", *labels]) if labels else ""


def summary(sources: Sources) -> str:
    """How many of the paper's claims have which verdict, by data set."""
    kinds = [claims.HOLDS, f"probably {claims.HOLDS}", claims.UNDECIDED, f"probably {claims.FAILS}", claims.FAILS]
    kinds.append(NOT_RUN)
    present = data_sets(sources.evidence.finished)
    found = [[v.verdict for c in claims.CLAIMS["paper"] if (v := _verdict_on(c, data, sources))] for data in present]
    rows = [[kind, *(str(verdicts.count(kind)) for verdicts in found)] for kind in kinds]
    rows = [row for row in rows if not row[0].startswith("probably") or set(row[1:]) != {"0"}]
    return markdown_table(["verdict", *(DATASET_NAMES[data] for data in present)], rows)


def _verdict_on(claim: Claim, data: str, sources: Sources) -> Verdict | None:
    """The verdict on a claim; None if there is none. A comparison of two data sets counts for the first."""
    found = (v for v in sources.verdicts if v.claim == claim and v.data.split(" minus ")[0] == data)
    return next(found, None)


def claims_in_short(sources: Sources) -> str:
    """The paper's claims, one per line, with a verdict and the difference, ours and the paper's, by data set."""
    present = data_sets(sources.evidence.finished)
    rows, missing = [], []
    for claim in claims.CLAIMS["paper"]:
        found = [_verdict_on(claim, data, sources) for data in present]
        if all(verdict is None or verdict.verdict == NOT_RUN for verdict in found):
            missing.append(f"{claim.says} ({claim.where})")
        else:
            rows.append([f"{claim.says} ({claim.source})", *map(_in_short, found)])
    table = markdown_table(["claim", *(DATASET_NAMES[data] for data in present)], rows)
    return table + _missing(list(dict.fromkeys(missing)))


def _in_short(verdict: Verdict | None) -> str:
    """A verdict in a cell, such as "**holds:** +1.66 (paper +1.57)"; only a decision is bold."""
    if verdict is None or verdict.interval is None:
        return "" if verdict is None else NOT_RUN
    number = number_form(verdict.claim)
    several, unfinished = len(verdict.claim.comparisons()) > 1, verdict.basis.partition("; ")[2]
    head = f"{verdict.verdict}:" if verdict.verdict == claims.UNDECIDED else f"**{verdict.verdict}:**"
    paper = "" if verdict.paper is None else f" (paper {number(verdict.paper)})"
    parts = [f"{head} {difference_text(verdict)}{paper}", *[verdict.decisive] * several]
    parts += [unfinished] * bool(unfinished)
    parts += ["noise unknown"] * (verdict.interval.low == verdict.interval.high)
    return ", ".join(parts)


def _finding(says: str, form: str, *numbers: tuple[str, Column]) -> Block:
    """A block with a line per data set that has all these numbers, and the verdict on what our claim `says`."""

    def block(sources: Sources) -> str:
        lines = []
        for data in data_sets(sources.evidence.finished):
            texts = [number(sources.evidence, row, data, c.measure, c.form, c.scale) for row, c in numbers]
            judged = [_verdict_on(claim, data, sources) for claim in claims.CLAIMS["ours"] if claim.says == says]
            verdicts = {v.claim.source: v.verdict for v in judged if v}
            if len(set(verdicts.values())) == 1:
                why = _why_undecided([v for v in judged if v])
                verdict = f"Verdict: {next(iter(verdicts.values()))}{why}."
            else:
                each = [f"{v.claim.source}: {v.verdict}{_why_undecided([v])}" for v in judged if v]
                verdict = f"Verdicts: {'; '.join(each)}."
            if all(texts):
                lines.append(f"- {DATASET_NAMES[data]}: {form.format(*texts)} {verdict}")
        return "\n".join(lines)

    return block


def _why_undecided(verdicts: Sequence[Verdict]) -> str:
    """Why these verdicts are "cannot tell": how well the differences are known. Empty if all are decided."""
    known = [
        f"±{(v.interval.high - v.interval.low) / 2:.2f} {PROTOCOLS[v.claim.measure].label}"
        for v in verdicts
        if v.verdict == claims.UNDECIDED and v.interval
    ]
    return f", because the difference is known only to {' and '.join(known)}" if known else ""


def drawn_figures(sources: Sources) -> str:
    """The paper's figures and ours, with links to those that are in results/."""
    rows = []
    for where, shows, names in FIGURES:
        drawn = []
        for name in names:
            found = sorted(path.name for path in sources.results.glob(f"*{name}.png") if _is_figure(path.stem, name))
            drawn += [f"[{file.removesuffix('.png')}](../results/{file})" for file in found]
            if not found:
                drawn.append(f"`{name}`: " + ("needs a run folder" if name in NEEDS_RUN else "runs are missing"))
        rows.append([where, shows, ", ".join(drawn) or "none: a drawing"])
    return markdown_table(["figure", "what it shows", "ours"], rows)


def _is_figure(stem: str, name: str) -> bool:
    """Whether a file, without its ending, is this figure of one data set or of several."""
    data = "|".join(PAPER_DATASETS)
    return re.fullmatch(rf"(?:(?:{data})-)*{re.escape(name)}", stem) is not None


def _of_speed(block: Callable[[Path], str]) -> Block:
    return lambda sources: block(sources.results)


LINEAR, KNN = ACCURACIES
SPREAD = Column("spread", "spread")
FIRST_PURITY = Column("purity, rank 1 (%)", "purity_1", ".1f", 100)
BLOCKS: dict[str, Block] = {
    **{name: _of_speed(block) for name, block in speed.BLOCKS.items()},
    "amount": amount,
    "summary": summary,
    "claims-in-short": claims_in_short,
    "found-mixing": _finding(
        "Weights (1.5, 0.5/K) without a mixture are as good as MNN",
        "MNN has {} linear and {} kNN; these weights without a mixture have {} and {}.",
        *(("main: MNN", LINEAR), ("main: MNN", KNN), (CONTROL, LINEAR), (CONTROL, KNN)),
    ),
    "found-attention": _finding(
        "Attention needs its gradient stopped",
        "linear accuracy is {} with the gradient stopped and {} without; the spread of the embeddings is {} and {}.",
        *((row, column) for column in (LINEAR, SPREAD) for row in ("weights: CAS, mixture", FLOWING)),
    ),
    "found-leak": _finding(
        "MNN's accuracy does not come from the leak",
        "MNN has {} linear and {} kNN; with the leak {} and {}. The percentage of nearest neighbors that have the "
        "image's class is {}; with the leak {}.",
        *(("main: MNN", LINEAR), ("main: MNN", KNN), (LEAKY, LINEAR), (LEAKY, KNN)),
        *(("main: MNN", FIRST_PURITY), (LEAKY, FIRST_PURITY)),
    ),
    "all-methods": all_methods,
    "chosen-methods": chosen_methods,
    "repeated-runs": repeated_runs,
    "figures": drawn_figures,
    "claims": _verdict_table("paper", list_missing=False),  # claims-in-short lists them
    "own-claims": _verdict_table("ours"),
    "reweighting": _verdict_table("ours", CONTROL),
    "coverage": coverage,
    "marked": marked,
    "noise": noise,
    "distances": distances,
    "leads": leads,
    "embeddings": _table_of_measures({f"main: {n}": n for n in ("MNN", "CMSF", "SNCLR", "MSF")}, PURITY, RANK),
    "weights": _table_of_measures(
        {
            "weights: MSE (MSF)": "MSE, no mixture: MSF",
            "weights: MSE, mixture": "MSE, mixture",
            "weights: WSE": "WSE, no mixture",
            "weights: WSE, mixture (MNN)": "WSE, mixture: MNN",
            CONTROL: "weights (1.5, 0.5 / K), no mixture",
        },
        *ACCURACIES,
    ),
    "whole-runs": whole_runs,
    "losses": _table_of_measures(
        {
            "main: MNN": "MNN: WSE, mixture",
            "weights: WSE": "WSE, no mixture",
            CONTROL: "weights (1.5, 0.5 / K), no mixture",
        },
        Column("loss", "loss", ".3f"),
        Column("d(p, z)", "d_positive", ".3f"),
        Column("d(p, z_i)", "d_neighbors", ".3f"),
    ),
    "attention": _table_of_measures(
        {
            "weights: CAS, mixture": "CAS, mixture",
            FLOWING: "CAS, mixture, gradient through it",
            "weights: CAS": "CAS",
            "controls: CAS, gradient through it": "CAS, gradient through it",
            "controls: CAS, gradient through it, leaky queue": "CAS, gradient through it, leaky queue",
        },
        *ACCURACIES,
        *(SPREAD, Column("d(p, z)", "d_positive"), RANK),
    ),
    "leak": _table_of_measures(
        {
            "main: MNN": "MNN",
            LEAKY: "MNN, leaky",
            "main: MSF": "MSF",
            "controls: MSF, leaky queue": "MSF, leaky",
            "neighbors: MSF K=1": "MSF K=1",
            "controls: MSF K=1, leaky queue": "MSF K=1, leaky",
        },
        *ACCURACIES,
        *(Column("own image found (%)", "own_image", ".1f", 100), PURITY, FIRST_PURITY),
    ),
}


if __name__ == "__main__":
    main()
