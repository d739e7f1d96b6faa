"""The claims of the paper, each with a verdict that is computed from the finished runs (claims.yaml).

A claim says that some runs are better than others, or equal up to a margin. Its verdict rests on a 95% interval of the
difference:

    holds           the interval lies on the claimed side (or within the margin)
    does not hold   it lies on the other side (or outside the margin)
    cannot tell     it lies on both, or there is no measure of the noise
    not run         a run is missing

With three common seeds or more, differences are paired by seed. With fewer, the deviation is pooled over all rows on
the data set that have several runs: seeds, and repeats of one command. Without these, another data set's deviation is
used, doubled, and the verdict says "probably". Each interval stands alone: nothing is corrected for the number of
claims.
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
from mixnn.paper.statistics import Interval, Spread, interval, paired_interval, pooled
from mixnn.paper.tables import PAPER_DATASETS, PROTOCOLS, TABLES, Row, published

MIN_PAIRS = 3  # seeds; with two, an interval of Student's t is too wide to say anything
MIN_DF = 3  # degrees of freedom of a deviation; one from fewer runs is not trusted
BORROWED = 2.0  # factor on a deviation from another data set
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
        measure = PROTOCOLS[self.measure].label if self.is_accuracy else self.measure
        return f"{self.says} ({', '.join([measure, *filter(None, [self.where])])})"

    @property
    def source(self) -> str:
        """The protocol, if the claim is about accuracies, and where the claim is made."""
        protocol = PROTOCOLS[self.measure].label if self.is_accuracy else ""
        return ", ".join(filter(None, [protocol, self.where]))


class Sample(NamedTuple):
    """The values of a row's runs by seed."""

    values: dict[int, float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())


@dataclass(frozen=True)
class Verdict:
    """A claim judged on one data set."""

    claim: Claim
    data: str
    verdict: str
    decisive: str = ""  # the comparison that the verdict rests on: "MNN over UnMix"
    interval: Interval | None = None
    basis: str = ""  # number of runs, and where the deviation comes from
    paper: float | None = None  # the same difference in the paper

    def as_dict(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        found["interval"] = self.interval and self.interval._asdict()
        return found


def _read() -> tuple[dict[str, list[Claim]], dict[str, dict[str, Any]]]:
    content = read_yaml(Path(__file__).parent / "claims.yaml")
    claims = {whose: [Claim(**values) for values in content[whose]] for whose in ("paper", "ours")}
    return claims, content["repeats"]


CLAIMS, REPEATS = _read()


def row_of(name: str) -> Row:
    """The row that "table: row" names."""
    table, _, row = name.partition(": ")
    return next(r for r in TABLES[table].rows if r.name == row)


@dataclass
class Evidence:
    """The finished runs with the paper's settings, and what is known of their noise."""

    finished: Summaries
    repeats: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: REPEATS)

    def __post_init__(self) -> None:
        self.seeds = sorted({seed for _, seed in self.finished})
        self.runs = functools.cache(self._runs)
        self.sample = functools.cache(self._sample)
        self.spread = functools.cache(self._spread)
        self._fingerprint = functools.cache(_fingerprint)

    def _runs(self, name: str, data: str) -> list[Summary]:
        """The finished runs of a row, given as "table: row"."""
        return runs_of(row_of(name), data, self.seeds, {}, self.finished)

    def _sample(self, name: str, data: str, measure: str) -> Sample:
        """The values of the finished runs of a row."""
        values = {run["config"]["seed"]: read_measure(run, measure) for run in self.runs(name, data)}
        return Sample({seed: value for seed, value in values.items() if value is not None})

    def _spread(self, data: str, measure: str) -> tuple[Spread | None, str]:
        """The deviation between runs on a data set, and where it comes from; None if nothing is known."""
        own = self._own_spread(data, measure)
        if own[0] is not None:
            return own
        others = [(self._own_spread(other, measure)[0], other) for other in PAPER_DATASETS if other != data]
        known = [(spread, other) for spread, other in others if spread is not None]
        if not known:
            return None, "noise unknown"
        spread, other = max(known)
        return Spread(BORROWED * spread.std, spread.df), f"noise of {other}, doubled"

    def _own_spread(self, data: str, measure: str) -> tuple[Spread | None, str]:
        groups = {}  # of runs with the same settings, which several tables may have
        for name in (f"{table.name}: {row.name}" for table in TABLES.values() for row in table.rows):
            groups[self._fingerprint(name, data)] = [*self.sample(name, data, measure).values.values()]
        if data in self.repeats:
            groups[self._fingerprint(self.repeats[data]["row"], data)] += self.repeats[data].get(measure, ())
        spread = pooled(groups.values())
        return (spread, "noise of all rows with several runs") if spread and spread.df >= MIN_DF else (None, "")


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


def judge_claims(finished: Summaries, claims: Iterable[Claim] | None = None) -> list[Verdict]:
    """Every claim on every data set of the paper on which anything was run; by default the paper's, then ours.

    If nothing was run, every claim is "not run" on the first data set.
    """
    evidence = Evidence(finished)
    present = {summary["config"]["data"] for summary in finished.values()} & set(PAPER_DATASETS) or PAPER_DATASETS[:1]
    verdicts = []
    for claim in claims if claims is not None else [claim for group in CLAIMS.values() for claim in group]:
        if claim.across:
            verdicts.append(judge(claim, claim.across[0], evidence))
        else:
            verdicts += [judge(claim, data, evidence) for data in PAPER_DATASETS if data in present]
    return verdicts


def judge(claim: Claim, data: str, evidence: Evidence) -> Verdict:
    """The verdict on a claim. Of several comparisons the worst decides; if some were not run, the claim cannot hold."""
    judged = [_judge_pair(claim, data, pair, evidence) for pair in claim.comparisons()]
    done = [verdict for verdict in judged if verdict.verdict != NOT_RUN]
    if not done:
        return judged[0]

    def order(verdict: Verdict) -> tuple[int, float]:
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


def _judge_pair(claim: Claim, data: str, pair: tuple[str, str], evidence: Evidence) -> Verdict:
    on = claim.across or (data,)
    samples = [[evidence.sample(name, d, claim.measure) for name in pair if name] for d in on]
    name = " over ".join(part.partition(": ")[2] for part in pair if part)
    where = " minus ".join(on)
    verdict = Verdict(claim, where, NOT_RUN, name, paper=_paper_difference(claim, on, pair))
    if not all(sample.values for group in samples for sample in group):
        return verdict
    leads = [group[0].mean - (group[1].mean if group[1:] else claim.above or 0.0) for group in samples]
    lead = leads[0] - sum(leads[1:])
    counts = " + ".join(str(len(sample.values)) for group in samples for sample in group)
    verdict = dataclasses.replace(verdict, basis=counts, interval=Interval(lead, lead, lead))
    found, source = _interval(lead, samples, on, claim, evidence)
    verdict = dataclasses.replace(verdict, basis=f"{counts}, {source}")
    if found is None:
        return dataclasses.replace(verdict, verdict=UNDECIDED)
    probably = "probably " if source.endswith("doubled") else ""
    decided = _decide(found, claim.equal)
    return dataclasses.replace(
        verdict, interval=found, verdict=decided if decided == UNDECIDED else f"{probably}{decided}"
    )


def _interval(
    lead: float, samples: Sequence[Sequence[Sample]], on: Sequence[str], claim: Claim, evidence: Evidence
) -> tuple[Interval | None, str]:
    """The interval of a lead, and what it rests on; None if the noise is unknown."""
    if len(samples) == 1:
        first, *rest = (sample.values for sample in samples[0])
        common = sorted(set(first).intersection(*rest))
        if len(common) >= MIN_PAIRS:
            others = rest[0] if rest else dict.fromkeys(common, claim.above or 0.0)
            return paired_interval([first[seed] - others[seed] for seed in common]), "paired by seed"
    variance, dfs, sources = 0.0, [], []
    for data, group in zip(on, samples, strict=True):
        spread, source = evidence.spread(data, claim.measure)
        if spread is None:
            return None, source
        variance += spread.std**2 * sum(1 / len(sample.values) for sample in group)
        dfs.append(spread.df)
        sources.append(source)
    return interval(lead, variance, Spread(1.0, min(dfs))), max(sources, key=lambda s: s.endswith("doubled"))


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
    return ("{:+.2f}" if claim.is_accuracy else "{:+.3f}").format


def difference_text(verdict: Verdict) -> str:
    """The difference with its sign or, if the claim says how it reads, in words: "the loss is 0.055 lower"."""
    assert verdict.interval is not None
    text = number_form(verdict.claim)(verdict.interval.mean)
    return verdict.claim.reads.format(text[1:]) if verdict.claim.reads and text.startswith("+") else text


def texts(verdict: Verdict) -> tuple[str, ...]:
    """A verdict as text, in COLUMNS."""
    number = number_form(verdict.claim)
    difference = ""
    if verdict.interval is not None:
        _, low, high = verdict.interval
        difference = difference_text(verdict) + (f" [{number(low)}, {number(high)}]" if low < high else "")
        difference += f": {verdict.decisive}" if len(verdict.claim.comparisons()) > 1 else ""
    paper = "" if verdict.paper is None else number(verdict.paper)
    return verdict.claim.label, verdict.data, difference, paper, verdict.basis, verdict.verdict


def not_run(verdicts: Sequence[Verdict]) -> list[str]:
    """The claims of which no data set has a run."""
    judged = {verdict.claim.label for verdict in verdicts if verdict.verdict != NOT_RUN}
    return [label for label in dict.fromkeys(verdict.claim.label for verdict in verdicts) if label not in judged]


def markdown_claims(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as a Markdown table, without those that were not run."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    last = ""
    for claim, *rest in (texts(verdict) for verdict in verdicts if verdict.verdict != NOT_RUN):
        rows.append((claim if claim != last else "", *rest))
        last = claim
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows)


def print_claims(verdicts: Sequence[Verdict], form: str) -> None:
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
