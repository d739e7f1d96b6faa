"""reproduce: the paper's data file, the plan, the table, and a small end-to-end run that is broken off and taken up."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mixnn
from mixnn import methods, reproduction
from mixnn.progress import Reporter
from mixnn.reproduction import planning, rendering, tables
from mixnn.reproduction.tables import TABLES, Row, Table
from mixnn.runs.claims import claim
from mixnn.training.setup import configure

QUIET = Reporter(quiet=True)
SMALL = {"epochs": 2, "limit": 128, "knn_every": 0, "batch_size": 32}
HERE = Path(__file__).parents[1]


# The paper's numbers


def test_every_row_names_a_method_and_options_that_exist_and_has_a_number_for_each_data_set():
    for table in TABLES.values():
        assert len({row.name for row in table.rows}) == len(table.rows)
        for row in table.rows:
            methods.resolve_options(row.method, {}, row.set)
            for numbers in (*row.paper.values(), *row.fixed.values()):
                assert len(numbers) == len(tables.DATASETS)
                assert all(n is None or 10 < n < 100 for n in numbers)
            assert set(row.paper) | set(row.fixed) <= set(tables.METRICS)


def test_the_same_run_has_the_same_numbers_in_every_table():
    seen: dict[str, tuple[str, dict]] = {}
    for table in TABLES.values():
        for row in table.rows:
            (run,) = planning.plan_row(row, "cifar10", [0], {})
            for metric, numbers in row.paper.items():
                where, known = seen.setdefault(f"{run.fingerprint} {metric}", (f"{table.name}: {row.name}", numbers))
                differs = [a for a, b in zip(numbers, known, strict=True) if a != b]
                # The paper gives K = 5 and Q = 4096 of STL-10 and Tiny-ImageNet where its default is 16384.
                assert not differs or "support" in (table.name, where.split(":")[0]), (table.name, row.name, where)


@pytest.mark.parametrize(
    "table, row, metric, data, want",
    [
        ("main", "MNN", "linear", "cifar100", 67.56),
        ("main", "MNN", "knn", "tiny-imagenet", 42.28),
        ("main", "SNCLR", "linear", "stl10", 90.93),
        ("neighbors", "MSF K=1", "linear", "cifar10", 91.55),
        ("weights", "CAS", "linear", "cifar100", 63.48),
        ("lambda", "0.7", "linear", "stl10", 91.75),
        ("generality", "CMSF +", "knn", "stl10", 87.59),
        ("selection", "MNN (labels)", "linear", "stl10", None),
        ("controls", "BYOL (s/w)", "linear", "cifar10", None),
        ("main", "MNN", "linear", "digits", None),
    ],
)
def test_numbers_are_the_papers(table, row, metric, data, want):
    (found,) = (r for r in TABLES[table].rows if r.name == row)
    assert tables.number(found, "paper", metric, data) == want


# The plan


def fingerprint(method="mnn", data="cifar10", options=None, **settings):
    config = configure(data, options or {}, {"method": method, **settings})
    return planning.fingerprint(vars(config))


def test_a_fingerprint_changes_with_what_changes_numbers_and_with_nothing_else():
    base = fingerprint()
    assert base == fingerprint(seed=3, device="cpu", knn_every=1, checkpoint_every=3, data_dir="/x", image_size=32)
    assert base == fingerprint(options={"topk": 5})
    others = [
        fingerprint("msf"), fingerprint(data="cifar100"), fingerprint(options={"topk": 1}), fingerprint(epochs=20),
        fingerprint(lr=0.1), fingerprint(batch_size=128), fingerprint(limit=100), fingerprint(image_size=24),
    ]  # fmt: skip
    assert len({base, *others}) == len(others) + 1


def test_a_fingerprint_does_not_change_when_an_option_is_added():
    config = vars(configure("cifar10", {}, {}))
    options = {k: v for k, v in config["options"].items() if k != "cas_detach"}
    older = {k: v for k, v in config.items() if k != "loggers"} | {"options": options}
    assert planning.fingerprint(older) == planning.fingerprint(config)


def test_tables_share_runs_and_seeds_come_round_by_round():
    runs = planning.plan([TABLES["weights"], TABLES["lambda"]], "cifar10", [0, 1], {})
    assert len(runs) == 2 * (6 + 6 - 1)  # MNN is in both
    assert [r.seed for r in runs] == [0] * 11 + [1] * 11
    assert len({r.name for r in runs}) == len(runs)


# The table


def summary(method, options, seed, linear, knn, **settings):
    config = configure("cifar10", options, {"method": method, "seed": seed, **settings})
    results = {"linear": {"last": linear, "best": linear + 1}, "knn": {"weighted": knn, "majority": knn - 1}}
    metrics = [{"epoch": 200, "seconds": 340.0}]
    return {"config": vars(config), "results": results, "metrics": metrics}


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    for seed, linear in ((0, 91.0), (1, 92.0)):
        (folder / f"mnn{seed}.json").write_text(json.dumps(summary("mnn", {}, seed, linear, 89.5)))
    (folder / "msf.json").write_text(json.dumps(summary("msf", {}, 0, 89.25, 87.0)))
    (folder / "other.json").write_text(json.dumps(summary("mnn", {"topk": 1}, 0, 50.0, 50.0)))
    (folder / "bench.json").write_text(json.dumps({"config": {"method": "mnn"}, "ms_per_step": 8.7}))
    return folder


def test_cells_hold_theirs_ours_and_the_difference(results):
    found = mixnn.reproduce("main", seeds=(0, 1), results=results, run=False, form="json", reporter=QUIET)
    rows = {row["name"]: row for row in found["main"]}
    assert rows["MNN"]["linear"] == {
        "paper": 91.47, "fixed": None, "ours": 91.5, "std": pytest.approx(0.5**0.5, abs=1e-4), "n": 2,
        "difference": pytest.approx(0.03),
    }  # fmt: skip
    msf = rows["MSF"]["linear"]
    assert (msf["paper"], msf["fixed"], msf["ours"], msf["n"]) == (89.94, 89.60, 89.25, 1)
    assert msf["std"] is None
    assert msf["difference"] == pytest.approx(-0.35)  # from the authors' fixed code, where that exists
    assert rows["BYOL"]["knn"]["ours"] is None


@pytest.mark.parametrize("form", rendering.FORMATS)
def test_a_table_is_printed_in_each_form(results, form, capsys):
    mixnn.reproduce("main", seeds=(0, 1), results=results, run=False, form=form, reporter=QUIET)
    out = capsys.readouterr().out
    assert all(row.name in out for row in TABLES["main"].rows)
    assert all(number in out for number in ("91.47", "89.6"))
    if form == "json":
        assert json.loads(out)["rows"][-1]["linear"]["ours"] == 91.5
    else:
        assert re.search(r"91\.50 (±|\$\\pm\$) 0\.71", out)
        assert "+0.03" in out
        assert "-0.35" in out
    if form == "latex":
        assert out.count(r"\\") == len(TABLES["main"].rows) + 1
    if form == "markdown":
        assert len({line.count("|") for line in out.splitlines() if line.startswith("|")}) == 1


def test_a_dry_run_shows_what_is_there_what_is_not_and_how_long(results, capsys):
    mixnn.reproduce("main", results=results, dry_run=True, reporter=QUIET)
    out = capsys.readouterr().out
    assert "9 of 11 runs to do, about" in out
    there = [line.split()[0] for line in out.splitlines() if line.rstrip().endswith("there")]
    assert [name.split("-")[1] for name in there] == ["msf", "mnn"]
    assert re.search(r"cifar10-unmix-\w+-seed0 +ema_per_call=True +8 min", out)  # 12 of 8 passes, 340 s
    assert not list(results.parent.glob("runs*"))


def test_wrong_words_are_refused(results):
    for words, says in (
        ({"table": "mian"}, "unknown table 'mian', did you mean 'main'"),
        ({"table": "main", "form": "html"}, "unknown format 'html'"),
        ({"table": "main", "rows": ["MNM"]}, "unknown row 'MNM', did you mean 'MNN'"),
        ({"table": "main", "epoch": 3}, "unknown setting 'epoch', did you mean 'epochs'"),
        ({"table": "main", "data": "cifar11"}, "cifar11"),
    ):
        with pytest.raises(mixnn.UserError, match=re.escape(says)):
            mixnn.reproduce(**words, results=results, reporter=QUIET)
    (results / "broken.json").write_text("{")
    with pytest.raises(mixnn.UserError, match=r"broken\.json is damaged"):
        mixnn.reproduce("main", results=results, run=False, reporter=QUIET)


# From nothing to a table


COMMAND = [
    "reproduce", "main", "--data", "digits", "--row", "MNN", "--row", "SimCLR", "--seeds", "0,1", "--format", "json",
    "--probe-epochs", "2", *(word for k, v in SMALL.items() for word in ("--setting", f"{k}={v}")),
]  # fmt: skip


def command(folder, wait=True):
    words = [sys.executable, "-m", "mixnn", *COMMAND]
    environment = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "PATH": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, cwd=folder, env=environment, **pipes)
    return process.communicate(timeout=300)[0] if wait else process


def test_broken_off_and_taken_up_it_ends_with_the_same_table(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    want = json.loads(command(whole))
    process = command(broken, wait=False)
    deadline = time.monotonic() + 120
    while not list(broken.glob("results/*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # after the first of four runs, somewhere in the second
    process.communicate(timeout=60)
    done = len(list(broken.glob("results/*.json")))
    assert 1 <= done < 4
    first = {path: path.stat().st_mtime_ns for path in broken.glob("results/*.json")}
    assert json.loads(command(broken)) == want
    assert all(path.stat().st_mtime_ns == when for path, when in first.items())  # not run again
    assert len(list(broken.glob("results/*.json"))) == 4
    for row in want["rows"]:
        assert row["linear"]["n"] == row["knn"]["n"] == 2


def test_one_failing_run_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    rows = (Row("broken", "mnn", {"topk": 3}), Row("sound", "byol"))
    monkeypatch.setitem(TABLES, "mine", Table("mine", "two rows", rows))
    real = reproduction.pretrain

    def pretrain(*args, **settings):
        if settings.get("method") == "mnn":
            raise RuntimeError("out of memory\nand more")
        return real(*args, **settings)

    monkeypatch.setattr(reproduction, "pretrain", pretrain)
    where = {"results": tmp_path / "results", "runs": tmp_path / "runs"}
    with pytest.raises(mixnn.UserError, match="1 of 2 runs failed") as error:
        mixnn.reproduce("mine", data="digits", **where, protocol="knn", reporter=QUIET, **SMALL)
    assert "out of memory" in str(error.value)
    assert "and more" not in str(error.value)
    assert len(list((tmp_path / "results").glob("*.json"))) == 1
    assert "sound" in capsys.readouterr().out


def test_a_run_that_another_process_has_claimed_is_left_to_it(tmp_path, monkeypatch):
    monkeypatch.setitem(TABLES, "mine", Table("mine", "two rows", (Row("theirs", "byol"), Row("ours", "simclr"))))
    where = {"results": tmp_path / "results", "runs": tmp_path / "runs"}
    again = {"data": "digits", **where, "protocol": "knn", "reporter": QUIET, **SMALL}
    theirs, ours = planning.plan([TABLES["mine"]], "digits", [0], SMALL)
    with claim(tmp_path / "runs" / ".claims" / theirs.name) as mine:
        assert mine
        mixnn.reproduce("mine", **again)
        assert [path.stem for path in (tmp_path / "results").glob("*.json")] == [ours.name]
        assert not (tmp_path / "runs" / theirs.name).exists()
    mixnn.reproduce("mine", **again)
    assert {path.stem for path in (tmp_path / "results").glob("*.json")} == {ours.name, theirs.name}
