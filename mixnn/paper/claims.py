"""The claims of the paper, each with a verdict that is computed from the finished runs (claims.yaml).

A claim says that some runs are better than others, or equal up to a margin. Its verdict rests on a 95% interval of the
difference:

    holds           the interval lies on the claimed side (or within the margin)
    does not hold   it lies on the other side (or outside the margin)
    cannot tell     it lies on both, or there is no measure of the noise
    not run         a run is missing

With four common seeds or more, differences are paired by seed. With fewer, the deviation is pooled over all rows on
the data set that have several runs: seeds, and runs without a file ("unstored" in claims.yaml). A deviation with less
than MIN_DF degrees of freedom decides nothing. Without a better one, another data set's deviation is used, doubled, and
the verdict says "probably". Each interval stands alone: nothing is corrected for the number of claims.

Which runs count in a mean is a choice, because some runs have no file. So if a row has such runs, a difference that is
not paired is judged twice: without them, and with them. A verdict that the choice changes becomes "cannot tell".

The time of a step is measured, not trained for. Its interval is the range that the repeated measurements allow.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from mixnn.files import read_yaml
from mixnn.paper.plan import Summaries, Summary, accuracy, last_record, plan_row, runs_of
from mixnn.paper.render import markdown_table
from mixnn.paper.statistics import Interval, PooledStd, interval, paired_interval, pooled
from mixnn.paper.tables import DATASET_NAMES, PAPER_DATASETS, PROTOCOLS, TABLES, Row, published

MIN_DF = 3  # degrees of freedom of a deviation, paired or pooled; one from fewer runs is not trusted
BORROWED = 2.0  # factor on a deviation from another data set
STEP_TIME = "ms_per_step"  # a measure that a benchmark has, not a run
HOLDS, FAILS, UNDECIDED, NOT_RUN = "holds", "does not hold", "cannot tell", "not run"
COLUMNS = ("claim", "data", "difference [95% interval]", "paper", "runs", "verdict")


@dataclass(frozen=True)
class Claim:
    """One claim; claims.yaml says what the fields mean."""

    says: str
    measure: str
    where: str = ""  # in the paper; empty for a claim of ours
    better: tuple[str, ...] = ()
    worse: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    above: float | None = None
    reads: str = ""
    equal: float = 0.0
    at_most: float = 0.0
    across: tuple[str, ...] = ()

    def comparisons(self) -> list[tuple[str, str]]:
        """Pairs of rows, the one claimed to be better first; the second is empty if it is a number."""
        if self.above is not None:
            return [(row, "") for row in self.better]
        return [*((a, b) for a in self.better for b in self.worse), *pairwise(self.chain), *self.pairs]

    @property
    def is_accuracy(self) -> bool:
        return self.measure in PROTOCOLS

    @property
    def label(self) -> str:
        """The claim, its measure and where it is made."""
        measure = PROTOCOLS[self.measure].label if self.is_accuracy else self.measure.replace("_per_", " per ")
        return f"{self.says} ({', '.join([measure, *filter(None, [self.where])])})"

    @property
    def source(self) -> str:
        """The protocol, if the claim is about accuracies, and where the claim is made."""
        protocol = PROTOCOLS[self.measure].label if self.is_accuracy else ""
        return ", ".join(filter(None, [protocol, self.where]))


class Sample(NamedTuple):
    """The values of a row's runs: those in results/ by seed, and those without a file."""

    values: dict[int, float]
    unstored: tuple[float, ...] = ()

    def all(self) -> list[float]:
        return [*self.values.values(), *self.unstored]


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim judged on one data set."""

    claim: Claim
    data: str
    verdict: str
    decisive: str = ""  # the comparison that the verdict rests on: "MNN over UnMix"
    interval: Interval | None = None
    basis: str = ""  # number of runs, and where the deviation comes from
    paper: float | None = None  # the same difference in the paper
    # The interval with runs without a file in the means too, if that changes the verdict.
    with_unstored: Interval | None = None

    def as_dict(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        for name in ("interval", "with_unstored"):
            value = getattr(self, name)
            found[name] = value and value._asdict()
        return found


Unstored = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]  # data set -> row -> runs without a file


def _read() -> tuple[dict[str, list[Claim]], Unstored]:
    content = read_yaml(Path(__file__).parent / "claims.yaml")
    claims = {whose: [Claim(**values) for values in content[whose]] for whose in ("paper", "ours")}
    return claims, content["unstored"]


CLAIMS, UNSTORED = _read()


def row_of(name: str) -> Row:
    """The row that "table: row" names."""
    table, _, row = name.partition(": ")
    return next(r for r in TABLES[table].rows if r.name == row)


@dataclass
class Evidence:
    """The finished runs with the paper's settings, and what is known of their noise."""

    finished: Summaries
    unstored: Unstored = field(default_factory=lambda: UNSTORED)
    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # what `bench` measured, by method

    def __post_init__(self) -> None:
        self.seeds = sorted({seed for _, seed in self.finished})
        self.runs = functools.cache(self._runs)
        self.sample = functools.cache(self._sample)
        self.noise = functools.cache(self._noise)
        self._fingerprint = functools.cache(_fingerprint)

    def _runs(self, name: str, data: str) -> list[Summary]:
        """The finished runs of a row, given as "table: row"."""
        return runs_of(row_of(name), data, self.seeds, {}, self.finished)

    def _sample(self, name: str, data: str, measure: str) -> Sample:
        """The values of the runs of a row."""
        values = {run["config"]["seed"]: read_measure(run, measure) for run in self.runs(name, data)}
        known = {seed: value for seed, value in values.items() if value is not None}
        return Sample(known, tuple(run[measure] for run in self.unstored_runs(name, data) if measure in run))

    def unstored_runs(self, name: str, data: str) -> list[Mapping[str, Any]]:
        """The runs of a row that have no file; several tables may have the same row."""
        of_data, wanted = self.unstored.get(data, {}), self._fingerprint(name, data)
        return [run for other, runs in of_data.items() if self._fingerprint(other, data) == wanted for run in runs]

    def _noise(self, data: str, measure: str) -> tuple[PooledStd | None, str]:
        """The deviation between runs on a data set, and where it comes from; None if nothing is known."""
        own, source = self.measured_noise(data, measure)
        if own and own.df >= MIN_DF:
            return own, source
        others = [(self.measured_noise(other, measure)[0], other) for other in PAPER_DATASETS if other != data]
        known = [(deviation, other) for deviation, other in others if deviation and deviation.df >= MIN_DF]
        if not known:
            return None, "noise unknown"
        deviation, other = max(known)
        return PooledStd(BORROWED * deviation.std, deviation.df), f"noise of {other}, doubled"

    def measured_noise(self, data: str, measure: str) -> tuple[PooledStd | None, str]:
        """The deviation between runs of the same settings on a data set, and of which runs; None if there are none."""
        groups: dict[str, tuple[str, list[float]]] = {}  # of runs with the same settings, which several tables may have
        for name in (f"{table.name}: {row.name}" for table in TABLES.values() for row in table.rows):
            groups.setdefault(self._fingerprint(name, data), (name, self.sample(name, data, measure).all()))
        several = [(name, values) for name, values in groups.values() if len(values) > 1]
        about = f"{len(several)} rows with several runs"
        if len(several) == 1:
            about = f"{len(several[0][1])} runs of {several[0][0].partition(': ')[2]}"
        return pooled(values for _, values in several), f"noise of {about}"


def _fingerprint(name: str, data: str) -> str:
    return plan_row(row_of(name), data, [0], {})[0].fingerprint


def read_measure(run: Summary, measure: str) -> float | None:
    """An accuracy, or what the log has at the last epoch; None if the run has no such number."""
    if measure in PROTOCOLS:
        return accuracy(run, measure)
    record, columns = last_record(run), measure.split(" - ")
    if any(record.get(column) is None for column in columns):
        return None
    return record[columns[0]] - sum(record[column] for column in columns[1:])


# Verdicts


def judge_claims(
    finished: Summaries, claims: Iterable[Claim] | None = None, steps: Mapping[str, Mapping[str, Any]] | None = None
) -> list[ClaimVerdict]:
    """Every claim on every data set of the paper on which anything was run; by default the paper's, then ours.

    If nothing was run, every claim is "not run" on the first data set. `steps` is what `read_steps` found.
    """
    evidence = Evidence(finished, steps=steps or {})
    present = {summary["config"]["data"] for summary in finished.values()} & set(PAPER_DATASETS) or PAPER_DATASETS[:1]
    verdicts = []
    for claim in claims if claims is not None else [claim for group in CLAIMS.values() for claim in group]:
        if claim.across or claim.measure == STEP_TIME:  # a step of MNN takes equally long on all data sets of a size
            verdicts.append(judge(claim, (claim.across or PAPER_DATASETS)[0], evidence))
        else:
            verdicts += [judge(claim, data, evidence) for data in PAPER_DATASETS if data in present]
    return verdicts


def read_steps(results: Path) -> dict[str, dict[str, Any]]:
    """The measured steps of all methods by name; empty if the folder has no such file."""
    try:
        found: dict[str, dict[str, Any]] = json.loads((results / "bench-methods-h200.json").read_text())["methods"]
        return {name: step for name, step in found.items() if {"ms_per_step", "ms_spread"} <= step.keys()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def judge(claim: Claim, data: str, evidence: Evidence) -> ClaimVerdict:
    """The verdict on a claim. Of several comparisons the worst decides; if some were not run, the claim cannot hold."""
    judged = [_judge_pair(claim, data, pair, evidence) for pair in claim.comparisons()]
    done = [verdict for verdict in judged if verdict.verdict != NOT_RUN]
    if not done:
        return max(judged, key=lambda verdict: bool(verdict.basis))

    def order(verdict: ClaimVerdict) -> tuple[int, float]:
        kind = verdict.verdict.removeprefix("probably ")
        return (FAILS, UNDECIDED, HOLDS).index(kind), verdict.interval.low if verdict.interval else 0.0

    worst = min(done, key=order)
    if len(done) == len(judged) or worst.verdict.endswith(FAILS):
        return worst
    return dataclasses.replace(
        worst,
        verdict=UNDECIDED,
        basis=f"{worst.basis}; only {len(done)} of {len(judged)} comparisons {'was' if len(done) == 1 else 'were'} run",
    )


def _judge_pair(claim: Claim, data: str, pair: tuple[str, str], evidence: Evidence) -> ClaimVerdict:
    on = claim.across or (data,)
    name = " over ".join(part.partition(": ")[2] for part in pair if part)
    verdict = ClaimVerdict(claim, " minus ".join(on), NOT_RUN, name, paper=_paper_difference(claim, on, pair))
    if claim.measure == STEP_TIME:
        return _judge_steps(verdict, [row_of(row).method for row in pair], evidence)
    samples = [[evidence.sample(name, d, claim.measure) for name in pair if name] for d in on]
    missing = [sample for group in samples for sample in group if not sample.values]
    if missing:
        lost = [f"{value:.2f}" for sample in missing for value in sample.unstored]
        about = f"a run on {DATASET_NAMES[data]} had {' and '.join(lost)}, but its file was lost"
        return dataclasses.replace(verdict, basis=about * all(sample.unstored for sample in missing))
    if len(samples) == 1:
        first, *rest = (sample.values for sample in samples[0])
        common = sorted(set(first).intersection(*rest))
        if len(common) > MIN_DF:
            others = rest[0] if rest else dict.fromkeys(common, claim.above or 0.0)
            found = paired_interval([first[seed] - others[seed] for seed in common])
            return _decided(verdict, found, f"{len(common)} {'pairs' if rest else 'runs'} of the same seeds")
    stored = [[Sample(sample.values) for sample in group] for group in samples]
    judged, everything = (_judge_samples(verdict, chosen, on, evidence) for chosen in (stored, samples))
    if judged.verdict == everything.verdict:
        return judged
    return dataclasses.replace(judged, verdict=UNDECIDED, with_unstored=everything.interval)


def _judge_steps(verdict: ClaimVerdict, names: Sequence[str], evidence: Evidence) -> ClaimVerdict:
    """The verdict on the time of a step: the first method's minus the second's, and what their ranges allow."""
    if not all(name in evidence.steps for name in names):
        return verdict
    ours, theirs = (evidence.steps[name] for name in names)
    low, high = (ours["ms_spread"][i] - theirs["ms_spread"][1 - i] for i in (0, 1))
    limit = verdict.claim.at_most * theirs["ms_per_step"]
    return dataclasses.replace(
        verdict,
        verdict=HOLDS if high <= limit else FAILS if low > limit else UNDECIDED,
        interval=Interval(ours["ms_per_step"] - theirs["ms_per_step"], low, high),
        basis="range of five measurements",
    )


def _judge_samples(
    verdict: ClaimVerdict, samples: Sequence[Sequence[Sample]], on: Sequence[str], evidence: Evidence
) -> ClaimVerdict:
    """The verdict with the pooled deviation, from all runs in these samples."""
    claim = verdict.claim
    means = [[statistics.fmean(sample.all()) for sample in group] for group in samples]
    leads = [group[0] - (group[1] if group[1:] else claim.above or 0.0) for group in means]
    lead = leads[0] - sum(leads[1:])
    variance, dfs, sources = 0.0, [], []
    for data, group in zip(on, samples, strict=True):
        deviation, source = evidence.noise(data, claim.measure)
        if deviation is None:
            basis = f"{_counts(samples)}, {source}"
            return dataclasses.replace(verdict, verdict=UNDECIDED, basis=basis, interval=Interval(lead, lead, lead))
        variance += deviation.std**2 * sum(1 / len(sample.all()) for sample in group)
        dfs.append(deviation.df)
        sources.append(source)
    source = max(sources, key=lambda s: s.endswith("doubled"))
    return _decided(verdict, interval(lead, variance, PooledStd(1.0, min(dfs))), f"{_counts(samples)}, {source}")


def _counts(samples: Sequence[Sequence[Sample]]) -> str:
    return " + ".join(str(len(sample.all())) for group in samples for sample in group)


def _decided(verdict: ClaimVerdict, found: Interval, basis: str) -> ClaimVerdict:
    """The verdict with its interval; one that rests on a doubled deviation is only probable."""
    decided = _decide(found, verdict.claim.equal)
    probably = "probably " if basis.endswith("doubled") and decided != UNDECIDED else ""
    return dataclasses.replace(verdict, interval=found, basis=basis, verdict=f"{probably}{decided}")


def _decide(found: Interval, margin: float) -> str:
    """The verdict on "more than 0" or, with a margin, on "within the margin"."""
    if margin:
        holds = found.low > -margin and found.high < margin
        fails = found.low > margin or found.high < -margin
    else:
        holds, fails = found.low > 0, found.high < 0
    return HOLDS if holds else FAILS if fails else UNDECIDED


def _paper_difference(claim: Claim, on: Sequence[str], pair: tuple[str, str]) -> float | None:
    """The same difference between the paper's own numbers; None if it does not give them."""
    if not claim.is_accuracy or not all(pair):
        return None
    leads = []
    for data in on:
        numbers = [published(row_of(name), "paper", claim.measure, data) for name in pair]
        if numbers[0] is None or numbers[1] is None:
            return None
        leads.append(numbers[0] - numbers[1])
    return round(leads[0] - sum(leads[1:]), 4)


# Printing


def number_form(claim: Claim) -> Callable[[float], str]:
    """How a difference of the claim's measure is written: points of accuracy with two decimals, others with three."""
    if claim.measure == STEP_TIME:
        return "{:+.2f} ms".format
    return ("{:+.2f}" if claim.is_accuracy else "{:+.3f}").format


def difference_text(verdict: ClaimVerdict) -> str:
    """The difference with its sign or, if the claim says how it reads, in words: "the loss is 0.055 lower"."""
    assert verdict.interval is not None
    text = number_form(verdict.claim)(verdict.interval.mean)
    return verdict.claim.reads.format(text[1:]) if verdict.claim.reads and text.startswith("+") else text


def interval_text(verdict: ClaimVerdict, found: Interval) -> str:
    """The bounds of an interval, as in "[+0.36, +1.92]"."""
    number = number_form(verdict.claim)
    return f"[{number(found.low)}, {number(found.high)}]"


def texts(verdict: ClaimVerdict) -> tuple[str, ...]:
    """A verdict as text, in COLUMNS."""
    number = number_form(verdict.claim)
    difference = ""
    if verdict.interval is not None:
        bounds = interval_text(verdict, verdict.interval)
        difference = difference_text(verdict) + f" {bounds}" * (verdict.interval.low < verdict.interval.high)
        difference += f": {verdict.decisive}" if len(verdict.claim.comparisons()) > 1 else ""
    paper = "" if verdict.paper is None else number(verdict.paper)
    basis = verdict.basis
    if verdict.with_unstored:
        other = verdict.with_unstored
        basis += f"; with runs that have no file {number(other.mean)} {interval_text(verdict, other)}"
    return verdict.claim.label, verdict.data, difference, paper, basis, verdict.verdict


def not_run(verdicts: Sequence[ClaimVerdict]) -> list[str]:
    """The claims of which no data set has a run."""
    judged = {verdict.claim.label for verdict in verdicts if verdict.verdict != NOT_RUN}
    missing = [verdict for verdict in verdicts if verdict.claim.label not in judged]
    lost = {verdict.claim.label: verdict.basis for verdict in missing if verdict.basis}
    labels = dict.fromkeys(verdict.claim.label for verdict in missing)
    return [f"{label}; {lost[label]}" if label in lost else label for label in labels]


def markdown_claims(verdicts: Sequence[ClaimVerdict]) -> str:
    """The verdicts as a Markdown table, without those that were not run."""
    rows: list[tuple[str, ...]] = []
    last = ""
    for claim, *rest in (texts(verdict) for verdict in verdicts if verdict.verdict != NOT_RUN):
        rows.append((claim if claim != last else "", *rest))
        last = claim
    return markdown_table(COLUMNS, rows)


def print_claims(verdicts: Sequence[ClaimVerdict], form: str) -> None:
    """Print verdicts as lines, or in Markdown or JSON."""
    if form == "json":
        print(json.dumps([verdict.as_dict() for verdict in verdicts], indent=1))
        return
    if form == "markdown":
        print(markdown_claims(verdicts))
    else:
        last = ""
        for claim, data, difference, paper, runs, verdict in map(texts, verdicts):
            if verdict != NOT_RUN:
                about = f"{difference}, paper {paper}" if paper else difference
                print(*[claim] * (claim != last), f"  {data}: {verdict}. {about} ({runs})", sep="\n")
                last = claim
    if missing := not_run(verdicts):
        blank = [""] if any(verdict.verdict != NOT_RUN for verdict in verdicts) else []
        print("\n".join([*blank, "Not run on any data set:", *(f"- {label}" for label in missing)]))
