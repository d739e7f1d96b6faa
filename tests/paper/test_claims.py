"""Verdicts on claims: the statistics, what decides, and that every claim names rows that exist."""

import json
import math

import numpy as np
import pytest

import mixnn
import mixnn.cli
from mixnn.paper import claims, plan, statistics
from mixnn.paper.claims import CLAIMS, Claim, Evidence, judge, judge_claims, row_of
from mixnn.paper.statistics import PooledStd, half_width, interval, paired_interval, pooled
from mixnn.paper.tables import PAPER_DATASETS, PROTOCOLS
from mixnn.progress import Reporter
from tests.paper.test_reproduce import RESULTS

EVERY = [claim for group in CLAIMS.values() for claim in group]


def quantile(df):
    """The 0.975-quantile of Student's t."""
    return half_width(PooledStd(1.0, df), 1.0)


# Statistics


@pytest.mark.parametrize("df, quantile", [(1, 12.7062), (2, 4.3027), (3, 3.1824), (10, 2.2281), (30, 2.0423)])
def test_an_interval_has_the_quantile_of_students_t(df, quantile):
    assert half_width(PooledStd(2.0, df), 0.25) == pytest.approx(2 * 0.5 * quantile, abs=1e-4)


def test_a_paired_interval_is_that_of_the_differences():
    found = paired_interval([1.0, 2.0, 3.0])
    half = 4.3027 * 1 / math.sqrt(3)
    assert found == pytest.approx((2, 2 - half, 2 + half), abs=1e-3)


def test_the_pooled_deviation_weighs_groups_by_their_degrees_of_freedom():
    assert pooled([[1.0, 3.0], [5.0], [0.0, 0.0, 0.0]]) == PooledStd(math.sqrt(2 / 3), 3)
    assert pooled([[1.0], []]) is None


def test_intervals_hold_the_truth_in_95_percent_of_cases():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(2000):
        a, b = rng.normal(0.5, 1, 3), rng.normal(0, 1, 2)
        spread = pooled([list(a), list(b)])
        found = interval(a.mean() - b.mean(), 1 / 3 + 1 / 2, spread)
        inside += found.low < 0.5 < found.high
    assert 0.93 < inside / 2000 < 0.97


# Verdicts


def runs(values, data="cifar10", measure="linear"):
    """Finished runs: "table: row" -> values by seed 0, 1, ..."""
    finished = {}
    for name, several in values.items():
        for seed, value in enumerate(several):
            (run,) = plan.plan_row(row_of(name), data, [seed], {})
            results = {measure: {PROTOCOLS[measure].headline: value}} if measure in PROTOCOLS else {}
            log = [{"epoch": 200, "step": 39000} | ({} if results else {measure: value})]
            finished[run.key] = {"config": vars(run.config), "results": results, "metrics": log}
    return finished


MNN, MSF, BYOL = "main: MNN", "main: MSF", "main: BYOL"
LEAD = Claim("MNN leads", "linear", better=(MNN,), worse=(MSF,))
EQUAL = Claim("alike", "linear", better=(MNN,), worse=(MSF,), equal=0.5)


def verdict(claim, values, data="cifar10", unstored=None):
    return judge(claim, data, Evidence(runs(values, data, claim.measure), unstored or {}))


def without_file(*values, name=MNN, data="cifar10"):
    """Runs of a row that are not in results/."""
    return {data: {name: [{"linear": value} for value in values]}}


@pytest.mark.parametrize(
    "claim, mnn, msf, want",
    [
        (LEAD, [91.0, 91.2, 91.1, 91.1], [90.0, 90.1, 90.2, 90.1], "holds"),
        (LEAD, [90.0, 90.1, 90.2, 90.1], [91.0, 91.2, 91.1, 91.1], "does not hold"),
        (LEAD, [91.0, 90.0, 91.1, 90.0], [90.0, 90.1, 90.2, 90.1], "cannot tell"),
        (EQUAL, [91.0, 91.2, 91.1, 91.1], [91.05, 91.15, 91.1, 91.1], "holds"),
        (EQUAL, [91.0, 91.2, 91.1, 91.1], [90.0, 90.15, 90.1, 90.1], "does not hold"),
        (EQUAL, [91.0, 91.2, 91.1, 91.1], [90.0, 91.15, 92.1, 91.1], "cannot tell"),
        (EQUAL, [91.0, 91.2, 91.1, 91.1], [90.4, 90.75, 90.55, 90.6], "cannot tell"),  # it crosses the margin
    ],
)
def test_four_seeds_are_paired(claim, mnn, msf, want):
    found = verdict(claim, {MNN: mnn, MSF: msf})
    assert (found.verdict, found.basis) == (want, "4 pairs of the same seeds")
    assert found.interval == paired_interval([a - b for a, b in zip(mnn, msf, strict=True)])


def test_a_deviation_decides_only_with_three_degrees_of_freedom_paired_or_pooled():
    """Three pairs have two; as pooled runs they have four."""
    mnn, msf = [91.0, 91.2, 91.1], [90.0, 90.2, 90.1]  # paired, the differences do not vary at all
    assert verdict(LEAD, {MNN: mnn, MSF: msf}).basis == "3 + 3, noise of 2 rows with several runs"
    assert verdict(LEAD, {MNN: mnn[:2], MSF: msf[:2]}).verdict == "cannot tell"


def test_a_verdict_that_depends_on_runs_without_a_file_is_not_settled():
    values = {MNN: [91.0, 91.1], MSF: [90.9]}
    noise = {"cifar10": {BYOL: [{"linear": value} for value in (89.4, 89.6, 89.5, 89.4, 89.6, 89.5)]}}
    near = verdict(EQUAL, values, unstored=noise)
    assert (near.verdict, near.with_unstored) == ("holds", None)
    more = noise["cifar10"] | {MNN: [{"linear": value} for value in (91.3, 91.2, 91.3)]}
    far = verdict(EQUAL, values, unstored={"cifar10": more})
    assert far.interval.mean == pytest.approx(0.15)
    assert far.verdict == "cannot tell"
    assert far.with_unstored.mean == pytest.approx(np.mean([91.0, 91.1, 91.3, 91.2, 91.3]) - 90.9)
    assert "; with runs that have no file +0.28 [" in claims.texts(far)[4]
    assert far.as_dict()["with_unstored"]["mean"] == far.with_unstored.mean
    clear = verdict(LEAD, {MNN: [91.0, 91.1], MSF: [88.9]}, unstored={"cifar10": more})
    assert (clear.verdict, clear.with_unstored) == ("holds", None)


def test_a_lost_run_is_named_and_decides_nothing():
    found = verdict(LEAD, {MNN: [91.0]}, unstored=without_file(89.0, name=MSF))
    assert (found.verdict, found.basis) == ("not run", "a run on CIFAR-10 had 89.00, but its file was lost")
    assert claims.not_run([found]) == [f"{LEAD.label}; {found.basis}"]


def test_the_time_of_a_step_is_judged_by_the_range_of_its_measurements():
    claim = Claim("at most 5% slower", "ms_per_step", better=(MNN,), worse=(MSF,), at_most=0.05)
    steps = {"msf": {"ms_per_step": 6.0, "ms_spread": [5.9, 6.1]}}
    assert judge(claim, "cifar10", Evidence({}, steps=steps)).verdict == "not run"
    for mine, want in ((4.0, "holds"), (6.1, "holds"), (6.2, "cannot tell"), (7.0, "does not hold")):
        steps["mnn"] = {"ms_per_step": mine, "ms_spread": [mine - 0.05, mine + 0.05]}
        found = judge(claim, "cifar10", Evidence({}, steps=steps))
        assert found.verdict == want
        assert found.interval == pytest.approx((mine - 6, mine - 0.05 - 6.1, mine + 0.05 - 5.9))


def test_a_run_that_is_missing_is_no_evidence():
    found = verdict(LEAD, {MNN: [91.0]})
    assert (found.verdict, found.interval, found.paper) == ("not run", None, pytest.approx(1.53))


def test_single_runs_need_a_measure_of_noise():
    values = {MNN: [91.3], MSF: [90.1]}
    alone = verdict(LEAD, values)
    assert (alone.verdict, alone.basis) == ("cannot tell", "1 + 1, noise unknown")
    assert alone.interval.low == alone.interval.high == pytest.approx(1.2)
    repeated = verdict(LEAD, values, unstored=without_file(91.0, 91.1, 91.2))
    assert (repeated.verdict, repeated.basis) == ("holds", "1 + 1, noise of 4 runs of MNN")
    half = quantile(3) * np.std([91.0, 91.1, 91.2, 91.3], ddof=1) * math.sqrt(2)
    assert repeated.interval.high - repeated.interval.mean == pytest.approx(half)
    noisy = verdict(LEAD, values, unstored=without_file(91.0, 92.1, 90.2))
    assert noisy.verdict == "cannot tell"


def test_seeds_of_other_rows_and_repeats_tell_the_noise_together():
    values = {MNN: [91.3], MSF: [90.1], BYOL: [89.5, 89.7]}
    found = verdict(LEAD, values, unstored=without_file(91.0, 91.1))
    variance = (2 * np.var([91.3, 91.0, 91.1], ddof=1) + np.var(values[BYOL], ddof=1)) / 3
    half = quantile(3) * math.sqrt(2 * variance)
    assert found.interval.high - found.interval.mean == pytest.approx(half)


def test_the_deviation_of_a_few_runs_decides_nothing():
    few = verdict(LEAD, {MNN: [91.3], MSF: [90.1], BYOL: [89.5, 89.6, 89.55]})
    assert (few.verdict, few.basis) == ("cannot tell", "1 + 1, noise unknown")
    enough = verdict(LEAD, {MNN: [91.3], MSF: [90.1], BYOL: [89.5, 89.6, 89.55, 89.5]})
    assert enough.verdict == "holds"


def test_noise_of_another_data_set_is_doubled_and_only_makes_probable():
    values = [91.0, 91.1, 91.2, 91.0]
    unstored = without_file(*values)
    found = verdict(LEAD, {MNN: [67.6], MSF: [58.6]}, "cifar100", unstored)
    assert (found.verdict, found.basis) == ("probably holds", "1 + 1, noise of cifar10, doubled")
    half = 2 * quantile(3) * np.std(values, ddof=1) * math.sqrt(2)
    assert found.interval.high - 9 == pytest.approx(half)
    assert verdict(LEAD, {MNN: [67.6], MSF: [67.4]}, "cifar100", unstored).verdict == "cannot tell"
    assert verdict(LEAD, {MNN: [58.6], MSF: [67.4]}, "cifar100", unstored).verdict == "probably does not hold"


def test_the_worst_of_several_comparisons_decides():
    claim = Claim("first", "linear", better=(MNN,), worse=(MSF, BYOL))
    good, close, better = [90.0, 90.1, 90.2, 90.1], [91.0, 91.5, 90.9, 91.1], [92.0, 92.3, 92.1, 92.1]
    mnn = [91.0, 91.2, 91.1, 91.1]
    assert verdict(claim, {MNN: mnn, MSF: good, BYOL: good}).verdict == "holds"
    undecided = verdict(claim, {MNN: mnn, MSF: good, BYOL: close})
    assert (undecided.verdict, undecided.decisive) == ("cannot tell", "MNN over BYOL")
    assert verdict(claim, {MNN: mnn, MSF: close, BYOL: better}).verdict == "does not hold"
    partly = verdict(claim, {MNN: mnn, MSF: good})
    basis = "4 pairs of the same seeds; only 1 of 2 comparisons was run"
    assert (partly.verdict, partly.basis) == ("cannot tell", basis)
    assert verdict(claim, {MNN: mnn, MSF: better}).verdict == "does not hold", "one is enough"


def test_a_chain_compares_neighbors_and_a_column_of_the_log_can_be_compared():
    chain = ("neighbors: MNN K=1", "neighbors: MNN K=5", "neighbors: MNN K=10")
    claim = Claim("less pure", "purity", chain=chain)
    assert claim.comparisons() == [chain[:2], chain[1:]]
    falling = {name: [p, p + 0.01, p - 0.01, p] for name, p in zip(chain, (0.9, 0.8, 0.7), strict=True)}
    assert verdict(claim, falling).verdict == "holds"
    assert verdict(claim, falling | {chain[2]: [0.85, 0.86, 0.84, 0.85]}).verdict == "does not hold"


def test_a_number_can_be_exceeded_and_two_columns_be_subtracted():
    claim = Claim("high", "cas_entropy", better=("weights: CAS",), above=1.4485)
    assert verdict(claim, {"weights: CAS": [1.60, 1.61, 1.605, 1.60]}).verdict == "holds"
    assert verdict(claim, {"weights: CAS": [1.30, 1.31, 1.305, 1.30]}).verdict == "does not hold"
    run = {"config": {}, "results": {}, "metrics": [{"epoch": 1, "a": 0.5, "b": 0.2}]}
    assert claims.read_measure(run, "a - b") == pytest.approx(0.3)
    assert claims.read_measure(run, "a - c") is None


def test_a_lead_can_be_larger_on_one_data_set_than_on_another(monkeypatch):
    monkeypatch.setattr("mixnn.paper.claims.UNSTORED", {})
    claim = Claim("more classes", "linear", better=(MNN,), worse=(MSF,), across=("cifar100", "cifar10"))
    finished = runs({MNN: [91.0, 91.1, 91.2], MSF: [90.0, 90.1, 90.2]})
    finished |= runs({MNN: [67.0, 67.1, 67.2], MSF: [60.0, 60.1, 60.2]}, "cifar100")
    (found,) = judge_claims(finished, [claim])
    assert (found.verdict, found.data) == ("holds", "cifar100 minus cifar10")
    assert found.interval.mean == pytest.approx(6.0)
    half = quantile(4) * 0.1 * math.sqrt(4 / 3)
    assert found.interval.high - 6 == pytest.approx(half)
    assert found.paper == pytest.approx(7.62 - 1.53)


# The claims themselves


@pytest.mark.parametrize("claim", EVERY, ids=lambda claim: claim.label)
def test_every_claim_names_rows_that_exist_and_can_be_judged_if_all_was_run(claim):
    rng = np.random.default_rng(0)
    names = {name for pair in claim.comparisons() for name in pair if name}
    assert names
    assert bool(claim.where) == (claim in CLAIMS["paper"])
    finished = {}
    for data in claim.across or ("cifar10",):
        for name in names:
            for seed in range(3):
                (run,) = plan.plan_row(row_of(name), data, [seed], {})
                value = float(rng.uniform(50, 60))
                columns = dict.fromkeys(claim.measure.split(" - "), value)
                results = {claim.measure: {PROTOCOLS[claim.measure].headline: value}} if claim.is_accuracy else {}
                log = [{"epoch": 200, "step": 1, **columns}]
                finished[run.key] = {"config": vars(run.config), "results": results, "metrics": log}
    steps = {name: {"ms_per_step": 6.0, "ms_spread": [5.9, 6.1]} for name in ("mnn", "msf")}
    (found,) = [
        v for v in judge_claims(finished, [claim], steps) if v.data.startswith((claim.across or ("cifar10",))[0])
    ]
    assert found.verdict != "not run"
    assert not set(claim.across) - set(PAPER_DATASETS)


def test_no_claim_is_there_twice():
    labels = [claim.label for claim in EVERY]
    assert len(labels) == len(set(labels))
    assert len(CLAIMS["paper"]) >= 20


def test_the_papers_own_numbers_agree_with_what_it_says_about_msf():
    """1.53, 7.62, 3.56 and 8.02 points; kNN 1.57, 9.64, 2.56 and 6.99."""
    for measure, want in (("linear", [1.53, 7.62, 3.56, 8.02]), ("knn", [1.57, 9.64, 2.56, 6.99])):
        claim = next(c for c in CLAIMS["paper"] if c.worse == [MSF] and c.measure == measure)
        found = [verdict(claim, {}, data).paper for data in PAPER_DATASETS]
        assert found == pytest.approx(want)


@pytest.mark.parametrize("form", ["terminal", "markdown", "json"])
def test_the_command_prints_each_claim_with_its_verdict(form, capsys):
    assert mixnn.cli.main(["reproduce", "--claims", "--results", str(RESULTS), "--format", form]) == 0
    out = capsys.readouterr().out
    assert all(claim.says in out for claim in EVERY)
    if form == "json":
        found = json.loads(out)
        assert {row["verdict"].removeprefix("probably ") for row in found} <= {
            "holds",
            "does not hold",
            "cannot tell",
            "not run",
        }
        (gradient,) = (r for r in found if "gradient stopped" in r["claim"]["says"] and r["data"] == "cifar10")
        assert gradient["verdict"] == "holds"
        assert gradient["interval"]["low"] > 3


def test_without_runs_every_claim_is_listed_as_not_run(tmp_path, capsys):
    assert mixnn.cli.main(["reproduce", "--claims", "--results", str(tmp_path)]) == 0
    heading, *listed = capsys.readouterr().out.splitlines()
    assert heading == "Not run on any data set:"
    assert listed == [f"- {claim.label}" for claim in EVERY]


def test_a_difference_is_printed_in_the_claims_own_words():
    claim = Claim("lowers the loss", "loss", better=(MSF,), worse=(MNN,), reads="the loss is {} lower")
    assert claims.texts(verdict(claim, {MNN: [0.5], MSF: [0.6]}))[2] == "the loss is 0.100 lower"
    assert claims.texts(verdict(claim, {MNN: [0.6], MSF: [0.5]}))[2] == "-0.100", "not as claimed"


def test_claims_take_no_table_and_no_settings():
    for words in ({"table": "main"}, {"epochs": 20}):
        with pytest.raises(mixnn.UserError, match="takes all finished runs"):
            mixnn.reproduce(**words, claims=True, results=RESULTS, verbose=Reporter(quiet=True))


@pytest.mark.parametrize(
    "name, value",
    [
        *(("order", "leaky"), ("data", "cifar100"), ("seeds", 0), ("rows", "MNN"), ("stale", True), ("dry_run", True)),
        *(("protocol", "knn"), ("tables", RESULTS / "miniature" / "tables.yaml"), ("output", "latex")),
    ],
)
def test_claims_refuse_what_they_would_ignore(name, value):
    with pytest.raises(mixnn.UserError, match=name) as caught:
        mixnn.reproduce(claims=True, results=RESULTS, verbose=Reporter(quiet=True), **{name: value})
    assert "leave out" in str(caught.value) or "LaTeX" in str(caught.value)


def test_the_confidence_is_the_one_that_the_page_states():
    assert statistics.CONFIDENCE == 0.95
