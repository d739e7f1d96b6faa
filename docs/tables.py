"""Write the tables of the README and the pages again, from the files in results/.

    python -m docs.tables        (make pages)

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from docs import speed_tables
from mixnn.files import write_atomically
from mixnn.paper import claims
from mixnn.paper.claims import (
    NOT_RUN,
    Claim,
    ClaimVerdict,
    Evidence,
    difference_text,
    interval_text,
    judge_claims,
    markdown_claims,
    not_run,
    number_form,
    read_steps,
    row_of,
)
from mixnn.paper.figures import figures
from mixnn.paper.plan import Summaries, Summary, accuracy, key_of, load_finished, runs_of
from mixnn.paper.provenance import (
    MEANINGS,
    MIXED,
    NO_DIGEST,
    UNCOMMITTED,
    commit_of,
    find_commits,
    marks_of,
    read_commits,
)
from mixnn.paper.render import OPEN, as_markdown, fill, markdown_table, mean_text, replace_blocks
from mixnn.paper.statistics import half_width
from mixnn.paper.tables import DATASET_NAMES, PAPER_DATASETS, PROTOCOLS, TABLES, Row, published, tables_with
from mixnn.progress import Reporter, plural
from mixnn.training.recipes import RECIPES

_DOCS = ("reproduction", "findings", "reweighting", "numbers", "results", "performance")
PAGES = *(Path("docs") / f"{name}.md" for name in _DOCS), Path("README.md")
RESULTS = Path("results")
MNN = "main: MNN"
CONTROL = "controls: re-weighting (1.5, 0.5/K), no mixture"
LEAKY = "controls: MNN, leaky queue"
FLOWING = "controls: CAS, mixture, gradient through it"
BYOL_LIKE_MNN = "controls: BYOL (s/w), times 2"  # MNN without neighbors
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
MARKS_PAGE = "numbers.md#marks-in-the-tables"
MAX_NAMED = 5  # runs in a list; more are only counted
NEEDS_RUN = ("examples", "tsne")  # these are drawn from a run folder, not from results


class Sources(NamedTuple):
    """What the blocks are made of."""

    evidence: Evidence
    verdicts: Sequence[ClaimVerdict]
    results: Path


Block = Callable[[Sources], str]


def sources_of(finished: Summaries, results: Path) -> Sources:
    """The sources of blocks: these runs, what was judged from them, and the folder of the other files."""
    return Sources(Evidence(finished), judge_claims(finished, steps=read_steps(results)), results)


def main(root: Path = Path()) -> None:
    """Write the pages, the commits and the figures of a checkout."""
    results = root / RESULTS
    finished = load_finished(results)
    benchmarks = [json.loads(path.read_text()) for path in speed_tables.bench_files(results)]
    find_commits(results, [*finished.values(), *benchmarks])
    for data in data_sets(finished):
        _draw_figures(results, data)
    for path, text in pages(root).items():
        write_atomically(path, text.encode())


def pages(root: Path) -> dict[Path, str]:
    """The pages of a checkout, by path, as they should be."""
    results, finished = root / RESULTS, load_finished(root / RESULTS)
    commits, seeds = read_commits(results), sorted({seed for _, seed in finished})
    sources = sources_of(finished, results)
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
    return replace_blocks(page, lambda name: BLOCKS[name](sources))


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
    return mean_text([scale * value for value in evidence.sample(name, data, measure).values.values()], form)


def marks_note(shown: Mapping[str, Sequence[Summary]], results: Path) -> str:
    """A paragraph that says which marks these runs have, to follow their table; empty if they have none."""
    commits = read_commits(results)
    marks, seen = {}, set()
    for label, runs in shown.items():
        keys = tuple(map(key_of, runs))
        if runs and keys not in seen:  # tables share runs
            marks[label] = marks_of(runs, commits)
            seen.add(keys)
    parts = []
    for mark in MEANINGS:
        having, others = ([label for label, found in marks.items() if (mark in found) == has] for has in (True, False))
        if having:
            few = len(having) <= len(others) or len(having) <= MAX_NAMED
            parts.append(f"{mark} {', '.join(having)}" if few and others else _all_but(mark, others))
    return f"\n\nMarks ([meaning]({MARKS_PAGE})): {'; '.join(parts)}." if parts else ""


def _all_but(mark: str, others: Sequence[str]) -> str:
    return f"{mark} all but {', '.join(others)}" if others else f"{mark} all"


def _note_on(names: Mapping[str, str], sources: Sources, on: Sequence[str] | None = None) -> str:
    """The note on the marks of rows on these data sets, by default all; `names` maps "table: row" to labels."""
    evidence, shown = sources.evidence, {}
    for data in data_sets(evidence.finished) if on is None else on:
        for name, label in names.items():
            shown[f"{label} on {DATASET_NAMES[data]}"] = evidence.runs(name, data)
    return marks_note(shown, sources.results)


def _plain_names(names: Iterable[str]) -> dict[str, str]:
    """The rows by "table: row", each labeled by its own name."""
    return {name: name.partition(": ")[2] for name in names}


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
            deviation, source = evidence.noise(data, protocol)
            if deviation is None:
                continue
            needed = half_width(deviation, 2)  # of 1/1 + 1/1
            label = PROTOCOLS[protocol].label
            rows.append([DATASET_NAMES[data], label, f"{deviation.std:.2f}", f"{needed:.2f}", source])
    table = markdown_table(["data", "", "deviation", "two single runs must differ by", "source"], rows)
    return "\n\n".join(
        [table, *(filter(None, (_measured_noise(data, evidence) for data in data_sets(evidence.finished))))]
    )


def _measured_noise(data: str, evidence: Evidence) -> str:
    """What was measured of the noise on a data set where that is too little to decide; empty elsewhere."""
    found = {p.label: evidence.measured_noise(data, name) for name, p in PROTOCOLS.items()}
    few = {label: (std, source) for label, (std, source) in found.items() if std and std.df < claims.MIN_DF}
    if not few:
        return ""
    numbers, assumed = [], []
    for label, (std, _) in few.items():
        numbers.append(f"{std.std:.2f} {label}")
        deviation = evidence.noise(data, next(name for name, p in PROTOCOLS.items() if p.label == label))[0]
        assumed.append(f"{deviation.std:.2f}" if deviation else "unknown")
    source, freedom = next((source.removeprefix("noise of "), std.df) for std, source in few.values())
    return (
        f"On {DATASET_NAMES[data]}, {source} have a measured deviation of {' and '.join(numbers)} "
        f"(assumed: {' and '.join(assumed)}). Its {plural(freedom, 'degree')} of freedom are too few to decide."
    )


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
    heads = ["data", "", "methods", "ours minus theirs", "median absolute difference", "over a point"]
    shown = _plain_names(f"main: {row.name}" for row in TABLES["main"].rows if row.fixed)
    return markdown_table(heads, rows) + _note_on(shown, sources)


def open_rows(sources: Sources) -> str:
    """The rows of the main table that are more than a point from the authors' number, without an explanation."""
    evidence, lines = sources.evidence, []
    for data in data_sets(evidence.finished):
        for row in fill(TABLES["main"], data, evidence.seeds, {}, evidence.finished, {}).rows:
            for protocol in PROTOCOLS:
                difference = row[protocol]["difference"]
                if difference is None or abs(difference) <= OPEN or row["explained"]:
                    continue
                deviation, source = evidence.noise(data, protocol)
                within = "the noise is not known"
                if deviation:
                    width = half_width(deviation, 1 + 1 / row[protocol]["n"])
                    where = "within" if abs(difference) < width else "outside"
                    assumed = "assumed " * source.endswith("doubled")
                    within = f"this is {where} the {assumed}noise of two single runs (±{width:.2f})"
                name = f"{row['name']} on {DATASET_NAMES[data]}"
                label = PROTOCOLS[protocol].label
                lines.append(
                    f"- **Open:** {name} is {difference:+.2f} points {label} from the authors' number; {within}."
                )
    return "\n".join(lines) or "No row is open."


def marked(sources: Sources) -> str:
    """What the marks mean, and how many results of each folder in results/ have them."""
    results, commits = sources.results, read_commits(sources.results)
    rows = []
    for folder in ("", "epochs20", "miniature"):
        finished = load_finished(results / folder)
        runs = [(run["config"], marks_of([run], commits)) for run in finished.values()]
        rows.append(_count_marks(f"results/{folder}", [(_name_of(config), marks) for config, marks in runs]))
    for folder in ("recipes", "folders"):
        made = [run for path in sorted((results / folder).glob("*.json")) for run in _rows_of(path)]
        rows.append(_count_marks(f"results/{folder}", [("", _marks_of_row(run, commits)) for run in made]))
    heads = ["folder", "results", UNCOMMITTED, NO_DIGEST]
    table = markdown_table(heads, rows, "lr")
    means = _mixed_means(sources)
    several = f" In the tables of 200 epochs: {', '.join(means)}." if means else ""
    meanings = [f"- **{mark}** {meaning}.{several * (mark == MIXED)}" for mark, meaning in MEANINGS.items()]
    return "\n".join([*meanings, "", table])


def _name_of(config: Mapping[str, Any]) -> str:
    return f"{config['method']} on {DATASET_NAMES.get(config['data'], config['data'])}"


def _rows_of(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    rows: list[dict[str, Any]] = content["rows"] if isinstance(content, dict) else content
    return [row for row in rows if "error" not in row]


def _marks_of_row(run: Mapping[str, Any], commits: Mapping[str, str]) -> str:
    """The marks of a result of recipes or of folders, which may name its commit itself."""
    environment = run.get("environment") or {}
    known = run.get("commit") or commit_of(environment, commits)
    return UNCOMMITTED * (not known) + NO_DIGEST * (not environment.get("training_code"))


def _count_marks(folder: str, runs: Sequence[tuple[str, str]]) -> list[str]:
    """A row of the table of marks: how many results have each mark, with their names if these are few."""
    texts = []
    for mark in (UNCOMMITTED, NO_DIGEST):
        names = [name for name, marks in runs if mark in marks]
        few = f" ({', '.join(names)})" if 0 < len(names) <= 2 and all(names) else ""
        texts.append(f"{len(names)}{few}")
    return [f"`{folder}`", str(len(runs)), *texts]


def _mixed_means(sources: Sources) -> list[str]:
    """The rows whose means are over runs of different code, each once."""
    evidence, commits = sources.evidence, read_commits(sources.results)
    found: dict[tuple[str, int], str] = {}
    for data in data_sets(evidence.finished):
        for table in TABLES.values():
            for row in table.rows:
                runs = evidence.runs(f"{table.name}: {row.name}", data)
                if runs and MIXED in marks_of(runs, commits):
                    found.setdefault(key_of(runs[0]), f"{row.name} on {DATASET_NAMES[data]}")
    return list(found.values())


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
                means = [statistics.fmean(s.values.values()) for s in ours if s.values]
                texts.append(f"{means[0] - means[1]:+.2f}" if len(means) == 2 else "")
            if texts[1] or texts[3]:
                rows.append([DATASET_NAMES[data], row.name, *texts])
    table = markdown_table(["data", "MNN's lead over", "linear: paper", "ours", "kNN: paper", "ours"], rows)
    shown = [f"main: {row.name}" for row in TABLES["main"].rows if row.name != "Supervised"]
    return table + _note_on(_plain_names(shown), sources)


def all_methods(sources: Sources) -> str:
    """The main table on CIFAR-10."""
    return _main_table(sources, [row.name for row in TABLES["main"].rows])


def chosen_methods(sources: Sources) -> str:
    """The rows of the main table that the README has, with their marks."""
    return _main_table(sources, ("BYOL", "SCE", "UnMix", "MSF", "MNN"), is_readme=True)


def _main_table(sources: Sources, names: Sequence[str], is_readme: bool = False) -> str:
    rows, commits = [], read_commits(sources.results)
    shown = {name: sources.evidence.runs(f"main: {name}", "cifar10") for name in names}
    for row in (row for row in TABLES["main"].rows if row.name in names):
        runs = shown[row.name]
        cells, mark = [row.name], f" {marks_of(runs, commits)}" if is_readme and runs else ""
        for protocol in PROTOCOLS:
            found = [published(row, column, protocol, "cifar10") for column in ("paper", "fixed")]
            cells += ["" if value is None else f"{value:.2f}" for value in found]
            cells.append(number(sources.evidence, f"main: {row.name}", "cifar10", protocol) + mark.rstrip())
        rows.append(cells)
    heads = [text for p in PROTOCOLS.values() for text in (f"{p.label}: paper", "newest", "ours")]
    table = markdown_table(["", *heads], rows)
    return table if is_readme else table + marks_note(shown, sources.results)


def repeated_runs(sources: Sources) -> str:
    """All runs of MNN on CIFAR-10 with seed 0, then the other seeds, and how much they differ."""
    evidence, commits = sources.evidence, read_commits(sources.results)
    runs = [["seed 0, no file", run["about"], *(run[p] for p in PROTOCOLS)] for run in claims.UNSTORED["cifar10"][MNN]]
    for run in evidence.runs(MNN, "cifar10"):
        code = f"commit `{commit_of(run.get('environment', {}), commits)}`"
        runs.append([f"seed {run['config']['seed']}", code, *(claims.read_measure(run, p) for p in PROTOCOLS)])
    rows = [[*run[:2], *(f"{value:.2f}" for value in run[2:])] for run in runs]
    columns = zip(*(run[2:] for run in runs), strict=True)
    rows.append(["standard deviation", "", *(f"{statistics.stdev(values):.2f}" for values in columns)])
    table = markdown_table(["", "code", *(p.label for p in PROTOCOLS.values())], rows)
    return "\n\n".join([table, _means_of_repeats(evidence), _other_unstored(evidence)])


def _means_of_repeats(evidence: Evidence) -> str:
    """The means of MNN on CIFAR-10 with the runs that have a file, with those that have none, and with all."""
    samples = [evidence.sample(MNN, "cifar10", protocol) for protocol in PROTOCOLS]
    groups = {
        "the runs in `results/`": [list(sample.values.values()) for sample in samples],
        "the runs without a file": [list(sample.unstored) for sample in samples],
        "all": [sample.all() for sample in samples],
    }
    means = (f"{about} {' / '.join(f'{statistics.fmean(v):.2f}' for v in values)}" for about, values in groups.items())
    return f"Means, {' / '.join(p.label for p in PROTOCOLS.values())}: {', '.join(means)}."


def _other_unstored(evidence: Evidence) -> str:
    """The runs of other rows without a file, next to those of the same row that have one."""
    lines = []
    for data, rows in evidence.unstored.items():
        for name, unstored in rows.items():
            if name == MNN:
                continue
            stored = [
                " / ".join(f"{claims.read_measure(run, p):.2f}" for p in PROTOCOLS) for run in evidence.runs(name, data)
            ]
            lost = [" / ".join(f"{run[p]:.2f}" for p in PROTOCOLS) for run in unstored]
            has = f", {', '.join(stored)} in `results/`" if stored else "; it was not repeated"
            lines.append(
                f"- {name.partition(': ')[2]} on {DATASET_NAMES[data]}: {', '.join(lost)} without a file{has}."
            )
    return "\n".join(["Other runs without a file, as they were printed at the end of a run:\n", *lines])


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
        return markdown_table(["data", "", *(column.head for column in columns)], rows) + _note_on(names, sources)

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
    table = markdown_table(["data", "", "kNN (points)", "purity (points)", "effective rank"], rows)
    return table + _note_on(_plain_names(name for _, *names in pairs for name in names), sources)


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
        table = markdown_claims(own) + _note_on(_rows_behind(own), sources)
        return table + (_missing(not_run(own)) if list_missing else "")

    return block


def _rows_behind(verdicts: Iterable[ClaimVerdict]) -> dict[str, str]:
    """The rows that these verdicts compare."""
    pairs = [pair for verdict in verdicts for pair in verdict.claim.comparisons()]
    return _plain_names(dict.fromkeys(name for pair in pairs for name in pair if name))


def _missing(labels: Sequence[str]) -> str:
    """The list of claims without a run, to follow a table of the others; empty if there are none."""
    return "\n- ".join(["\n\nNot run on any data set, so we cannot tell:\n", *labels]) if labels else ""


def summary(sources: Sources) -> str:
    """How many of the paper's claims have which verdict, by data set."""
    present = data_sets(sources.evidence.finished)
    found = [[v.verdict for c in claims.CLAIMS["paper"] if (v := _verdict_on(c, data, sources))] for data in present]
    rows = [[kind, *(str(verdicts.count(kind)) for verdicts in found)] for kind in (*_KINDS, NOT_RUN)]
    rows = [row for row in rows if not row[0].startswith("probably") or set(row[1:]) != {"0"}]
    return markdown_table(["verdict", *(DATASET_NAMES[data] for data in present)], rows)


def _verdict_on(claim: Claim, data: str, sources: Sources) -> ClaimVerdict | None:
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
    note = _note_on(_rows_behind(v for v in sources.verdicts if v.claim in claims.CLAIMS["paper"]), sources)
    return table + note + _missing(list(dict.fromkeys(missing)))


def _in_short(verdict: ClaimVerdict | None) -> str:
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


def in_short(sources: Sources) -> str:
    """The counts of the summary as a sentence per data set."""
    sentences = []
    for data in data_sets(sources.evidence.finished):
        found = [v.verdict for c in claims.CLAIMS["paper"] if (v := _verdict_on(c, data, sources))]
        count = {kind: found.count(kind) for kind in dict.fromkeys(found)}
        held = [f"{count[kind]} {kind.replace('holds', 'hold')}" for kind in _KINDS[:2] if count.get(kind)]
        refuted = sum(count.get(kind, 0) for kind in _KINDS[3:])
        found_out = (
            f"{' and '.join(held) or 'none holds'}, {refuted or 'none'} {'were' if refuted > 1 else 'was'} refuted"
        )
        rest = f"{count.get(claims.UNDECIDED, 0)} are undecided, and {count.get(NOT_RUN, 0)} were not run"
        sentences.append(f"On {DATASET_NAMES[data]}, of {len(found)} claims of the paper {found_out}, {rest}.")
    return "\n".join(sentences)


_KINDS = (
    *(claims.HOLDS, f"probably {claims.HOLDS}", claims.UNDECIDED),
    *(f"probably {claims.FAILS}", claims.FAILS),
)


def parts_of_mnn(sources: Sources) -> str:
    """What each of MNN's two changes to MSF adds, with intervals."""
    pairs = (
        ("the mixture, to WSE", MNN, "weights: WSE"),
        ("WSE, to the mixture", MNN, "weights: MSE, mixture"),
        ("the mixture, to MSF", "weights: MSE, mixture", "main: MSF"),
        ("WSE, to MSF", "weights: WSE", "main: MSF"),
    )
    rows = []
    for data in data_sets(sources.evidence.finished):
        for label, more, less in pairs:
            found = [_judged(Claim(label, p, better=(more,), worse=(less,)), data, sources) for p in PROTOCOLS]
            if any(found):
                rows.append([DATASET_NAMES[data], label, *found])
    return markdown_table(["data", "what is added", *(f"{p.label} [95% interval]" for p in PROTOCOLS.values())], rows)


def _judged(claim: Claim, data: str, sources: Sources) -> str:
    verdict = claims.judge(claim, data, sources.evidence)
    if verdict.interval is None:
        return ""
    return f"{difference_text(verdict)} {interval_text(verdict, verdict.interval)}, {verdict.verdict}"


def _finding(says: str, form: str, *numbers: tuple[str, Column]) -> Block:
    """A block with a line per data set that has all these numbers, and the verdict on what our claim `says`."""

    def block(sources: Sources) -> str:
        lines = {}
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
                lines[data] = f"- {DATASET_NAMES[data]}: {form.format(*texts)} {verdict}"
        return "\n".join(lines.values()) + _note_on(_plain_names(row for row, _ in numbers), sources, list(lines))

    return block


def _why_undecided(verdicts: Sequence[ClaimVerdict]) -> str:
    """Why these verdicts are "cannot tell"; empty if all are decided."""
    undecided = [v for v in verdicts if v.verdict == claims.UNDECIDED and v.interval]
    known = [
        f"±{(v.interval.high - v.interval.low) / 2:.2f} {PROTOCOLS[v.claim.measure].label}"
        for v in undecided
        if v.interval and v.interval.low < v.interval.high and not v.with_unstored
    ]
    reasons = [f"the difference is known only to {' and '.join(known)}"] if known else []
    reasons += ["the noise is unknown"] * any(v.interval and v.interval.low == v.interval.high for v in undecided)
    for verdict in undecided:
        if verdict.interval and verdict.with_unstored:
            without, others = (
                f"{number_form(verdict.claim)(found.mean)} {interval_text(verdict, found)}"
                for found in (verdict.interval, verdict.with_unstored)
            )
            label = PROTOCOLS[verdict.claim.measure].label
            reasons.append(f"{label} depends on which runs count: {without} with those in results/, {others} with all")
    return f", because {'; '.join(reasons)}" if reasons else ""


def views_and_neighbors(sources: Sources) -> str:
    """BYOL with its own views and with MNN's, and MNN, on data sets on which BYOL with MNN's views was run."""
    names = {
        "BYOL, two strong views": "main: BYOL",
        "BYOL, MNN's views": "controls: BYOL (s/w)",
        "BYOL, MNN's views and scale of the loss": BYOL_LIKE_MNN,
        "MNN": MNN,
    }
    evidence, rows, shown = sources.evidence, [], []
    for data in data_sets(evidence.finished):
        if not evidence.runs("controls: BYOL (s/w)", data):
            continue
        shown.append(data)
        for label, name in names.items():
            cells = [DATASET_NAMES[data], label]
            for protocol in PROTOCOLS:
                authors = published(row_of(name), "fixed", protocol, data)
                cells += ["" if authors is None else f"{authors:.2f}", number(evidence, name, data, protocol)]
            rows.append(cells)
    heads = [text for p in PROTOCOLS.values() for text in (f"{p.label}: authors' newest", "ours")]
    return markdown_table(["data", "", *heads], rows) + _note_on(_plain_names(names.values()), sources, shown)


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


def twenty_epochs(sources: Sources) -> str:
    """kNN of every method after 20 epochs."""
    finished = load_finished(sources.results / "epochs20")
    runs = {row.name: runs_of(row, "cifar10", [0], {"epochs": 20}, finished) for row in TABLES["main"].rows}
    found = {name: accuracy(own[0], "knn") or 0.0 for name, own in runs.items() if own}
    names = sorted(found, key=lambda name: (name == "Supervised", -found[name]))
    untrained = json.loads((sources.results / "epochs20" / "untrained.json").read_text())["results"]["knn"]["weighted"]
    curve = {
        line["epoch"]: line["knn"] for line in sources.evidence.runs(MNN, "cifar10")[0]["metrics"] if "knn" in line
    }
    table = markdown_table(names, [[f"{found[name]:.2f}" for name in names]]) + marks_note(runs, sources.results)
    return (
        f"{table}\n\nAn untrained network has {untrained:.2f}. In its 200-epoch run, MNN has {curve[20]:.1f} after 20 "
        f"epochs and {curve[200]:.1f} at the end (seed 0)."
    )


MINIATURE = {"limit": 10000, "image_size": 8, "backbone": "resnet8", "batch_size": 64, "lr": 0.24, "epochs": 120}


def miniature(sources: Sources) -> str:
    """The small runs with attention, on a CPU."""
    folder, rows, shown = sources.results / "miniature", [], {}
    finished = load_finished(folder)
    for row in tables_with(folder / "tables.yaml")["attention"].rows:
        shown[row.name] = runs_of(row, "cifar10", [0], MINIATURE, finished)
        (run,) = shown[row.name]
        end, (most, epoch) = run["metrics"][-1], max((line["spread"], line["epoch"]) for line in run["metrics"])
        numbers = [f"{most:.2f} ({epoch})", *(f"{end[name]:.2f}" for name in ("spread", "d_positive"))]
        rows.append([row.name, *numbers, f"{end['rank']:.1f}", f"{accuracy(run, 'knn') or 0.0:.1f}"])
    heads = ["miniature, seed 0", "largest spread (epoch)", "at the end", "d(p, z)", "effective rank", "kNN"]
    return markdown_table(heads, rows) + marks_note(shown, sources.results)


def recipes(sources: Sources) -> str:
    """The recipes next to the paper's settings, with the marks of their runs."""
    shown: dict[str, Sequence[Summary]] = {}
    for path in sorted((sources.results / "recipes").glob("*-final.json")):
        data = path.name.removesuffix("-final.json")
        shown[f"the paper's on {DATASET_NAMES[data]}"] = sources.evidence.runs(MNN, data)
        for name in RECIPES:
            own = [run for run in _rows_of(path) if run["settings"] == {"recipe": name}]
            shown[f"`{name}` on {DATASET_NAMES[data]}"] = [{**run, "results": {}} for run in own]
    return speed_tables.recipes(sources.results) + marks_note(shown, sources.results)


def _of_speed(block: Callable[[Path], str]) -> Block:
    return lambda sources: block(sources.results)


LINEAR, KNN = ACCURACIES
SPREAD = Column("spread", "spread")
FIRST_PURITY = Column("purity, rank 1 (%)", "purity_1", ".1f", 100)
BLOCKS: dict[str, Block] = {
    **{name: _of_speed(block) for name, block in speed_tables.BLOCKS.items()},
    "amount": amount,
    "summary": summary,
    "in-short": in_short,
    "parts-of-mnn": parts_of_mnn,
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
    "found-neighbors": _finding(
        "Neighbors help, with MNN's views and scale",
        "MNN has {} linear and {} kNN; BYOL with its views and scale of the loss has {} and {}.",
        *((MNN, LINEAR), (MNN, KNN), (BYOL_LIKE_MNN, LINEAR), (BYOL_LIKE_MNN, KNN)),
    ),
    "views": views_and_neighbors,
    "all-methods": all_methods,
    "chosen-methods": chosen_methods,
    "repeated-runs": repeated_runs,
    "twenty-epochs": twenty_epochs,
    "speed-recipes": recipes,
    "miniature": miniature,
    "figures": drawn_figures,
    "claims": _verdict_table("paper", list_missing=False),  # claims-in-short lists them
    "own-claims": _verdict_table("ours"),
    "reweighting": _verdict_table("ours", CONTROL),
    "coverage": coverage,
    "marked": marked,
    "noise": noise,
    "distances": distances,
    "open-rows": open_rows,
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
