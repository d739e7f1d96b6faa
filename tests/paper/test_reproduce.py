"""reproduce: the paper's data file, the plan, the table, and a small end-to-end run that is interrupted and resumed."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import matplotlib.pyplot
import pytest
import torch
from PIL import Image

import mixnn
import mixnn.cli
from mixnn import methods
from mixnn.config import Interrupted, option, setting, spelling
from mixnn.files import try_lock
from mixnn.paper import plan as planning
from mixnn.paper import render as rendering
from mixnn.paper import reproduce as reproduction
from mixnn.paper import tables
from mixnn.paper.tables import TABLES, Row, Table
from mixnn.progress import Reporter
from mixnn.registry import import_code
from mixnn.runs import Run
from mixnn.training.configure import configure
from mixnn.training.trainer import Trainer
from tests.command import command

QUIET = Reporter(quiet=True)
SMALL = {"epochs": 2, "limit": 128, "knn_every": 0, "batch_size": 32}
HERE = Path(__file__).parents[2]
RESULTS = HERE / "results"


# The paper's numbers


def test_every_row_names_a_method_and_options_that_exist_and_has_a_number_for_each_data_set():
    for table in TABLES.values():
        assert len({row.name for row in table.rows}) == len(table.rows)
        for row in table.rows:
            methods.resolve_options(row.method, {}, row.options)
            for numbers in (*row.paper.values(), *row.fixed.values()):
                assert len(numbers) == len(tables.PAPER_DATASETS)
                assert all(n is None or 10 < n < 100 for n in numbers)
            assert set(row.paper) | set(row.fixed) <= set(tables.PROTOCOLS)


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
        ("main", "ReSSL", "knn", "cifar10", None),
    ],
)
def test_numbers_are_the_papers(table, row, metric, data, want):
    (found,) = (r for r in TABLES[table].rows if r.name == row)
    assert tables.published(found, "paper", metric, data) == want


def test_a_row_that_the_paper_lacks_is_compared_with_the_authors_own_number():
    (row,) = (r for r in TABLES["main"].rows if r.name == "ReSSL")
    fixed = {m: [tables.published(row, "fixed", m, data) for data in tables.PAPER_DATASETS] for m in tables.PROTOCOLS}
    assert fixed == {"linear": [89.97, 63.82, None, 46.38], "knn": [88.89, 57.48, None, 37.14]}
    epochs20 = HERE / "results" / "epochs20"
    found = mixnn.reproduce("main", rows="ressl", results=epochs20, run=False, epochs=20, verbose=QUIET)
    knn = found["main"][0]["knn"]
    assert (knn["paper"], knn["fixed"], knn["ours"]) == (None, 88.89, 57.52)
    assert knn["difference"] == pytest.approx(57.52 - 88.89)
    assert found["main"][0]["linear"]["ours"] is None


# The page

PAGE = (HERE / "docs" / "reproduction.md").read_text()
(OWN_TABLES,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^(mixnn [^#\n]+)", PAGE, re.MULTILINE) + re.findall(r"`(mixnn [^`\n]+)`", PAGE)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_the_page_is_one(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(OWN_TABLES)
    Path("results").symlink_to(HERE / "results")
    verb, given = mixnn.cli.parse(shlex.split(command)[1:])
    if verb == "reproduce" and given.get("table", "TABLE") != "TABLE":
        reproduction.select_tables(given["table"], given.get("rows", ()), tables.tables_with(given.get("tables", "")))


def test_the_pages_own_table_is_run_and_its_curves_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(OWN_TABLES)
    small = ["--data", "digits", "--protocol", "knn", "--quiet"]
    small += [word for k, v in SMALL.items() for word in ("--setting", f"{k}={v}")]
    words = ["reproduce", "few-neighbors", "--tables", "my.yaml", *small]
    assert mixnn.cli.main(words) == 0
    assert re.search(r"K=1 +\d\d\.\d\d.*\nK=3 +\d\d\.\d\d", capsys.readouterr().out)
    assert mixnn.cli.main(["reproduce", "--tables", "my.yaml"]) == 0
    assert "few-neighbors" in capsys.readouterr().out
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(script, "page", "exec"), {})
    matplotlib.pyplot.close("all")
    with Image.open("purity.png") as picture:
        assert picture.size[0] > 100


@pytest.mark.parametrize(
    "text, says",
    [
        (None, "No such file"),
        ("tables: [1", "line"),
        ("rows: []", "no 'tables'"),
        ("tables: {mine: {rows: []}}", "no 'title'"),
        (
            "tables: {mine: {title: x, rows: [{name: a, methd: mnn}]}}",
            "unknown key in a row 'methd', did you mean 'method'",
        ),
        ("tables: {main: {title: x, rows: []}}", "there is already a table called main"),
        (
            "tables: {mine: {title: x, rows: [{name: a, method: mnn}, {name: a, method: byol}]}}",
            "mine has several rows called a",
        ),
        ("tables: {mine: {title: x, rows: [{name: a, method: mnm}]}}", "unknown method 'mnm', did you mean 'mnn'"),
        ("tables: {mine: {title: x, rows: [{name: a, method: mnn, options: {topkk: 1}}]}}", "did you mean 'topk'"),
    ],
)
def test_a_file_without_tables_is_answered_with_what_is_wrong(tmp_path, text, says):
    if text is not None:
        (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(mixnn.UserError, match=says):
        mixnn.reproduce("mine", tables=tmp_path / "my.yaml", run=False)


def test_links_of_the_page_lead_to_files_and_headings():
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = [link for link in re.findall(r"\]\(([^)]+)\)", PAGE) if not link.startswith("http")]
    assert links
    for file, _, anchor in (link.partition("#") for link in links):
        assert (HERE / "docs" / file).exists()
        assert file or anchor in anchors


def test_the_page_says_how_many_runs_the_tables_are_and_names_rows_that_exist():
    assert len(COMMANDS) > 8
    assert f"are {len(planning.plan(TABLES.values(), 'cifar10', [0], {}))} runs" in PAGE
    rows = {row.name for table in TABLES.values() for row in table.rows}
    named = re.findall(r"control `([^`]+)`", " ".join(PAGE.split()))
    assert len(named) == 2
    assert set(named) <= rows


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
        fingerprint(precision="fp32"), fingerprint(bn_groups=1), fingerprint(weak_flip=0.5),
    ]  # fmt: skip
    assert len({base, *others}) == len(others) + 1


def test_a_fingerprint_does_not_change_when_an_option_is_added():
    config = vars(configure("cifar10", {}, {}))
    options = {k: v for k, v in config["options"].items() if k != "cas_detach"}
    older = {k: v for k, v in config.items() if k != "loggers"} | {"options": options}
    assert planning.fingerprint(older) == planning.fingerprint(config)


def test_the_command_of_a_run_makes_that_run():
    runs = planning.plan(TABLES.values(), "cifar10", [0, 3], {"epochs": 20, "weak_flip": "0.5", "data_dir": "/my sets"})
    for run in runs:
        typed = mixnn.cli.parse(shlex.split(run.command)[1:])[1]
        options = typed.pop("options", {})
        given = {k: v for k, v in typed.items() if k in vars(run.config) and k != "data"}
        assert configure(typed["data"], options, given) == run.config


def test_tables_share_runs_and_seeds_come_round_by_round():
    runs = planning.plan([TABLES["weights"], TABLES["lambda"]], "cifar10", [0, 1], {})
    assert len(runs) == 2 * (6 + 6 - 1)  # MNN is in both
    assert [r.config.seed for r in runs] == [0] * 11 + [1] * 11
    assert len({r.name for r in runs}) == len(runs)


# The table


def summary(method, options, seed, linear, knn, **settings):
    config = configure("cifar10", options, {"method": method, "seed": seed, **settings})
    how = {"checkpoint_step": 39000, "trained_epochs": config.epochs}
    results = {
        "linear": {"last": linear, "best": linear + 1, "protocol": how | {"epochs": 100}},
        "knn": {"weighted": knn, "majority": knn - 1, "protocol": how},
    }
    metrics = [{"epoch": config.epochs, "step": 39000, "seconds": 340.0}]
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


def test_cells_have_the_published_number_ours_and_the_difference(results):
    found = mixnn.reproduce("main", seeds=(0, 1), results=results, run=False, output="json", verbose=QUIET)
    rows = {row["name"]: row for row in found["main"]}
    assert rows["MNN"]["linear"] == {
        "paper": 91.47, "fixed": None, "ours": 91.5, "std": pytest.approx(0.5**0.5, abs=1e-4), "n": 2,
        "asked": 2, "difference": pytest.approx(0.03), "best": 92.5, "leaky": None, "other_order": True,
    }  # fmt: skip
    msf = rows["MSF"]["linear"]
    assert (msf["paper"], msf["fixed"], msf["ours"], msf["n"]) == (89.94, 89.60, 89.25, 1)
    assert msf["std"] is None
    assert msf["difference"] == pytest.approx(-0.35)  # from the authors' fixed code, where that exists
    assert rows["BYOL"]["knn"]["ours"] is None


@pytest.mark.parametrize("form", rendering.FORMATS)
def test_a_table_is_printed_in_each_form(results, form, capsys):
    mixnn.reproduce("main", seeds=(0, 1), results=results, run=False, output=form, verbose=QUIET).show()
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


def test_fewer_runs_than_were_asked_for_are_counted(results, capsys):
    def printed(**words):
        mixnn.reproduce("main", results=results, run=False, verbose=QUIET, **words).show()
        return capsys.readouterr().out

    out = printed(seeds=(0, 1))
    assert re.search(r"MNN .* 91\.50 ± 0\.71 \(n=2\)", out)
    assert re.search(r"MSF .* 89\.25 \(n=1 of 2\)", out)
    assert re.search(r"MNN .* 91\.50 ± 0\.71 \(n=2\)", printed()), "all that are there"
    assert "n=1" not in printed(), "nobody asked for two"
    assert "n=" not in printed(seeds=0)


def test_all_tables_are_one_json_document(results, capsys):
    mixnn.reproduce("all", results=results, run=False, output="json", verbose=QUIET).show()
    assert [table["table"] for table in json.loads(capsys.readouterr().out)] == list(TABLES)


@pytest.mark.parametrize(
    "content, says",
    [
        ({"config": {"options": {}, "method": "mnn"}, "results": {"knn": {}}, "metrics": []}, "KeyError: 'epochs'"),
        ({"config": {"options": {}, "method": "mnn"}, "results": {"knn": {}}}, "KeyError: 'metrics'"),
        ({"config": {"options": 3, "method": "mnn", "epochs": 0}, "results": 3, "metrics": []}, "KeyError: 'data'"),
    ],
)
def test_a_damaged_result_is_named(results, content, says):
    (results / "odd.json").write_text(json.dumps(content))
    with pytest.raises(mixnn.UserError, match=f"odd.json is damaged \\({says}"):
        mixnn.reproduce("main", results=results, run=False, verbose=QUIET)


@pytest.mark.parametrize(
    "content", [3, [], {"config": 3}, {"config": {"options": {}, "method": "new"}, "results": {1: 2}}]
)
def test_files_that_are_not_results_are_ignored(results, content, capsys):
    mixnn.reproduce("main", results=results, run=False, verbose=QUIET).show()
    want = capsys.readouterr().out
    (results / "odd.json").write_text(json.dumps(content))
    mixnn.reproduce("main", results=results, run=False, verbose=QUIET).show()
    assert capsys.readouterr().out == want


@pytest.mark.parametrize("verb", ["reproduce main --no-run", "figures main"])
@pytest.mark.parametrize(
    "word", ["data=digits", "results=x", "verbose=x", "seed=3", "method=msf", "options=x", "topk=2"]
)
def test_a_word_of_the_verbs_own_is_no_setting_of_its_runs(verb, word, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert mixnn.cli.main([*verb.split(), "--setting", word]) == 2
    assert re.match(f"mixnn: {word.partition('=')[0]} .*setting", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_the_time_left_is_not_estimated_from_another_devices_pace(tmp_path, monkeypatch):
    monkeypatch.setitem(TABLES, "mine", Table("mine", "two rows", (Row("one", "byol"), Row("other", "simclr"))))
    said: list[str] = []
    heard = Reporter()
    monkeypatch.setattr(heard, "info", said.append)
    where = {"results": tmp_path / "results", "runs": tmp_path / "runs", "data": "digits", "protocol": "knn"}
    mixnn.reproduce("mine", rows="one", **where, verbose=QUIET, **SMALL)
    (path,) = (tmp_path / "results").glob("*.json")
    made = json.loads(path.read_text())
    for device, estimated in (("a faster one", False), (made["environment"]["device"], True)):
        path.write_text(json.dumps(made | {"environment": made["environment"] | {"device": device}}))
        said.clear()
        mixnn.reproduce("mine", **where, verbose=heard, **SMALL)
        assert (", about " in next(text for text in said if text.startswith("[1/1]"))) == estimated
        next((tmp_path / "results").glob("*simclr*")).unlink()
        shutil.rmtree(next((tmp_path / "runs").glob("*simclr*")))


def test_the_pace_of_another_device_is_named_as_such(results, capsys):
    made = summary("mnn", {}, 7, 91.0, 89.0) | {"environment": {"device": "a faster one"}}
    made["metrics"][0]["seconds"] = 300.0
    (results / "fast.json").write_text(json.dumps(made))
    mixnn.reproduce("main", results=results, dry_run=True, verbose=QUIET).show()
    assert "on a faster one at the pace of the fastest run in" in " ".join(capsys.readouterr().out.split())
    config = configure("cifar10", {}, {"device": "cpu"})
    here = reproduction.device_name(torch.device("cpu"))
    slow = made | {"environment": {"device": here}, "metrics": [made["metrics"][0] | {"seconds": 3400.0}]}
    assert reproduction.seconds_per_cost({1: made}, config) == (pytest.approx(300 / 8 / 200), " on a faster one")
    assert reproduction.seconds_per_cost({1: made, 2: slow}, config) == (pytest.approx(3400 / 8 / 200), "")
    assert reproduction.seconds_per_cost({}, config) == (0.0, "")


def test_empty_columns_are_left_out(results, capsys):
    def header(table):
        mixnn.reproduce(table, results=results, run=False, output="markdown", verbose=QUIET).show()
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "linear: ours" in line)
        return [word.strip() for word in line.strip("|").split("|")][1:]

    whole = ["paper", "authors' fixed code", "ours", "best epoch", "difference"]
    knn = [column for column in whole if column != "best epoch"]  # these runs have no readings
    assert header("main") == [*(f"linear: {column}" for column in whole), *(f"kNN: {column}" for column in knn)]
    assert header("weights") == [*(f"linear: {column}" for column in whole), "kNN: ours"]
    assert header("controls") == ["linear: ours", "linear: best epoch", "kNN: ours"]


def test_notes_on_rows_are_below_the_table_if_they_apply(results, capsys):
    def below(table, form, data="cifar10"):
        mixnn.reproduce(table, data=data, results=results, run=False, output=form, verbose=QUIET).show()
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if ": " in line and not re.search("linear: |not like with like", line)]

    copied = "SimCLR; BYOL: linear copied from ReSSL's paper, kNN the authors' own."
    assert copied in below("main", "terminal")
    assert f"% {copied}" in below("main", "latex")
    mnn = mixnn.reproduce("main", results=results, run=False, output="markdown", verbose=QUIET)
    mnn.show()
    assert copied in capsys.readouterr().out.splitlines()[-1]
    for form in ("terminal", "markdown", "latex"):
        assert not below("main", form, "digits"), "notes on numbers that digits do not have"
        assert any("MNN: weights sum to 2." in line for line in below("controls", form, "digits")), "none has any"
        assert not below("lambda", form)
    asked = "MSF K=1, leaky queue: is K=1 best because of the leak?"
    assert asked in below("controls", "terminal")


def test_a_dry_run_shows_what_is_there_what_is_not_and_how_long(results, capsys):
    mixnn.reproduce("main", results=results, dry_run=True, verbose=QUIET).show()
    out = capsys.readouterr().out
    assert "10 of 12 runs to do, about" in out
    there = [line.split()[0] for line in out.splitlines() if line.rstrip().endswith("there")]
    assert [name.split("-")[1] for name in there] == ["msf", "mnn"]
    assert re.search(r"cifar10-unmix-\w+-seed0 +ema_per_call=True +8 min", out)  # 12 of 8 passes, 340 s
    assert not list(results.parent.glob("runs*"))


def test_wrong_words_are_refused_before_anything_is_made(results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "one.png")
    before = sorted(tmp_path.rglob("*"))
    for words, says in (
        ({"table": "mian"}, "unknown table 'mian', did you mean 'main'"),
        ({"table": "main", "output": "html"}, "unknown format 'html'"),
        ({"table": "main", "rows": ["MNM"]}, "unknown row 'MNM', did you mean 'MNN'"),
        ({"table": "main", "epoch": 3}, "unknown setting 'epoch', did you mean 'epochs'"),
        ({"table": "main", "rows": ["MNN", "MSFF"]}, "unknown row 'MSFF', did you mean 'MSF'"),
        ({"table": "all", "rows": "xyz"}, "unknown row 'xyz'\nvalid: Supervised, SimCLR, "),
        ({"table": "main", "data": "cifar11"}, "unknown data set or folder 'cifar11', did you mean 'cifar10'"),
        ({"table": "main", "data": "cifar11", "dry_run": True}, "unknown data set or folder 'cifar11'"),
        ({"table": "main", "data": "./cifar11"}, "there is no folder ./cifar11"),
        ({"table": "main", "data": "photos"}, "has no labeled test images to evaluate on"),
        ({"table": "main", "protocol": "knnn"}, "unknown protocol 'knnn', did you mean 'knn'"),
        ({"table": "main", "probe_epochs": 0}, "probe_epochs must be at least 1"),
        ({"table": "main", "seeds": (0, 0)}, "seed 0 is given 2 times"),
        ({"table": "main", "seeds": "0-2"}, "seeds takes whole numbers"),
        ({"table": "main", "seeds": ()}, "seeds takes whole numbers"),
        ({"table": "main", "seeds": -1}, "seeds takes whole numbers"),
        (
            {"table": "selection", "data": "stl10", "rows": "MNN (labels)"},
            "nothing to run, because training needs labels",
        ),
    ):
        with pytest.raises(mixnn.UserError, match=re.escape(says)):
            mixnn.reproduce(**words, results=results, runs=tmp_path / "runs", verbose=QUIET)
    assert sorted(tmp_path.rglob("*")) == before
    (results / "broken.json").write_text("{")
    with pytest.raises(mixnn.UserError, match=r"broken\.json is damaged"):
        mixnn.reproduce("main", results=results, run=False, verbose=QUIET)


def test_without_the_data_the_table_is_printed_and_the_way_to_get_them_told_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert mixnn.cli.main(["reproduce", "main", "--setting", f"data_dir={tmp_path}"]) == 2
    out, err = capsys.readouterr()
    refused, hint = err.splitlines()
    assert refused.startswith("mixnn: 12 runs missing, and cifar10 is not on disk")
    assert [line.split("  ")[0] for line in out.splitlines()[2:14]] == [row.name for row in TABLES["main"].rows]
    assert hint.endswith(f"mixnn data get cifar10 --data-dir {tmp_path}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["main", "--no-run"], ["main", "--dry-run"], ["--claims"]])
def test_without_the_papers_runs_one_line_says_where_they_are(tmp_path, monkeypatch, capsys, words):
    def said(checkout):
        monkeypatch.setattr(reproduction, "PACKAGE", checkout / "mixnn")
        assert mixnn.cli.main(["reproduce", *words]) == 0
        (line,) = capsys.readouterr().err.splitlines()
        return line

    monkeypatch.chdir(tmp_path)
    assert f"there is no folder {tmp_path}/results; use --results {HERE}/results" in said(HERE)
    installed = said(tmp_path / "site-packages")
    assert installed.endswith("results/ of mixnn's repository: run this in a checkout of it, or use --results FOLDER")
    made = {**summary("mnn", {}, 0, 99.0, 99.0), "config": vars(configure("digits", {}, {"method": "mnn", **SMALL}))}
    made["metrics"][-1]["epoch"] = SMALL["epochs"]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "digits.json").write_text(json.dumps(made))
    assert said(HERE).startswith(f"mixnn: {tmp_path}/results has no finished runs to show; use --results {HERE}")
    assert mixnn.cli.main(["reproduce", *words, "--results", str(HERE / "results"), "--quiet"]) == 0
    assert capsys.readouterr().err == "", "no advice; --quiet leaves out what only informs"


def test_a_table_that_is_not_the_papers_gets_no_advice_about_its_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "main", "--data", "digits", "--no-run"]
    assert mixnn.cli.main(words) == 0
    out, err = capsys.readouterr()
    assert err.endswith(f"there is no folder {tmp_path}/results; use --results FOLDER for another\n")
    assert "The paper has no numbers on digits." in out
    (tmp_path / "results").mkdir()
    assert mixnn.cli.main(words) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "named, told",
    [
        (("warmup_epochs", 0), "--setting warmup_epochs=0"),
        (("bn_groups",), "--setting bn_groups=..."),
        (("mode", "eager"), "--setting mode=eager"),
        (("results", "FOLDER"), "--results FOLDER"),
        (("rows",), "--row"),
    ],
)
def test_messages_name_settings_as_reproduce_takes_them(named, told):
    with spelling(mixnn.cli.command("reproduce").spell):
        assert setting(*named) == told


def test_advice_about_a_runs_settings_can_be_typed(tmp_path, capsys):
    small = [word for pair in {**SMALL, "epochs": 1}.items() for word in ("--setting", "{}={}".format(*pair))]
    where = ["--results", str(tmp_path), "--runs", str(tmp_path / "runs"), "--protocol", "knn", "--quiet"]
    words = ["reproduce", "main", "--data", "digits", "--row", "BYOL", *where, *small]
    assert mixnn.cli.main(words) == 0
    (advice,) = re.findall(r"use (--setting warmup_epochs=\d)", capsys.readouterr().err)
    assert mixnn.cli.main([*words, *advice.split()]) == 0
    assert capsys.readouterr().err == ""
    assert mixnn.cli.main([*words, "--setting", "batch_size=9", "--setting", "bn_groups=2"]) == 2
    assert "use --setting batch_size=8 or another --setting bn_groups=..." in capsys.readouterr().err


def test_one_row_and_one_seed_may_stand_alone(results):
    found = mixnn.reproduce("main", rows="mnn", seeds=1, results=results, run=False, output="json", verbose=QUIET)
    (row,) = found["main"]
    assert (row["name"], row["linear"]["ours"]) == ("MNN", 92.0)


def test_rows_that_need_labels_are_left_out_where_training_images_have_none(results, capsys):
    mixnn.reproduce("selection", data="stl10", results=results, dry_run=True, verbose=QUIET).show()
    out, err = capsys.readouterr()
    assert "select=random" in out
    assert "select=labels" not in out
    assert "supervised" in out  # has labeled images of its own
    assert "left out, because training needs labels that stl10's images lack: MNN (labels)" in err
    mixnn.reproduce("selection", data="cifar10", results=results, dry_run=True, verbose=QUIET).show()
    assert "select=labels" in capsys.readouterr().out


@pytest.mark.parametrize("form", rendering.FORMATS)
def test_the_title_says_in_what_our_runs_differ_from_the_recipe(tmp_path, form, capsys):
    def title(**settings):
        mixnn.reproduce("main", results=tmp_path, run=False, output=form, verbose=QUIET, **settings).show()
        return capsys.readouterr().out

    assert "(ours with epochs=20 instead of 200)" in title(epochs="20")
    assert "(ours with epochs of the probe=1 instead of 100; limit=64)" in title(probe_epochs=1, limit=64)
    assert "ours with" not in title(epochs=200, device="cpu", knn_every=5)


# What counts as there


def plan_of(folder, capsys, **wanted):
    """State and name of each run in the plan of MNN."""
    where = {"results": folder, "runs": folder / "runs"}
    mixnn.reproduce("main", rows="MNN", **where, dry_run=True, verbose=QUIET, **wanted).show()
    return capsys.readouterr().out


def test_an_unfinished_run_is_not_there(tmp_path, capsys):
    made = summary("mnn", {}, 0, 91.0, 89.0)
    made["metrics"][-1]["epoch"] = 41
    (tmp_path / "mnn.json").write_text(json.dumps(made))
    found = mixnn.reproduce("main", rows="MNN", results=tmp_path, run=False, output="json", verbose=QUIET)
    assert found["main"][0]["knn"]["ours"] is None
    capsys.readouterr()
    assert "1 of 1 run to do" in plan_of(tmp_path, capsys)


def test_a_run_of_no_epochs_is_there(tmp_path, capsys):
    made = summary("mnn", {}, 0, 40.0, 38.3, epochs=0) | {"metrics": []}
    for result in made["results"].values():
        result["protocol"]["checkpoint_step"] = 0
    (tmp_path / "mnn.json").write_text(json.dumps(made))
    assert "0 of 1 run to do" in plan_of(tmp_path, capsys, epochs=0)


def test_a_number_of_an_earlier_step_or_another_probe_is_not_ours(tmp_path, capsys):
    made = summary("mnn", {}, 0, 91.0, 89.0)
    made["results"]["linear"]["protocol"]["epochs"] = 1
    made["results"]["knn"]["protocol"]["checkpoint_step"] = 83  # evaluated before it went on
    (tmp_path / "mnn.json").write_text(json.dumps(made))

    def ours(**wanted):
        found = mixnn.reproduce("main", rows="MNN", results=tmp_path, run=False, output="json", verbose=QUIET, **wanted)
        capsys.readouterr()
        return [found["main"][0][metric]["ours"] for metric in tables.PROTOCOLS]

    assert ours() == [None, None]
    assert ours(probe_epochs=1) == [91.0, None]
    assert "0 of 1 run to do" in plan_of(tmp_path, capsys, probe_epochs=1, protocol="linear")
    assert "again: there is neither knn nor linear nor its run folder" in " ".join(plan_of(tmp_path, capsys).split())


def test_the_committed_results_are_there(capsys):
    def printed(*words):
        assert mixnn.cli.main(["reproduce", "main", "--no-run", *words]) == 0
        out = capsys.readouterr().out
        rows: dict[str, list[str]] = {}
        for line in out.splitlines()[1:]:
            rows.setdefault(line.split("  ")[0], []).extend(re.findall(r"[+-]?[0-9]+\.[0-9]{2}", line))
        return rows

    rows = printed("--results", str(RESULTS), "--seeds", "0")
    assert rows["MNN"] == ["91.47", "91.50", "91.59", "+0.03", "89.81", "89.90", "89.96", "+0.09"]
    assert rows["Supervised"] == ["94.22", "94.16", "94.31", "-0.06", "94.57", "94.59"]
    rows = printed("--results", str(RESULTS / "epochs20"), "--setting", "epochs=20")
    assert rows["MNN"] == ["91.47", "89.81", "57.26", "57.29", "-32.55"]


# From nothing to a table


COMMAND = [
    "reproduce", "main", "--data", "digits", "--row", "MNN", "--row", "SimCLR", "--seeds", "0,1", "--format", "json",
    "--probe-epochs", "2", *(word for k, v in SMALL.items() for word in ("--setting", f"{k}={v}")),
]  # fmt: skip


def stop_in_the_second_run() -> None:
    """Sends SIGTERM in the middle of the second run that the process trains."""
    original, begun = Trainer._one_step, []

    def one_step(self: Trainer) -> None:
        begun.extend([self] * (self.done == 0))
        if len(begun) == 2 and self.done == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self)

    Trainer._one_step = one_step


def test_broken_off_and_taken_up_it_ends_with_the_same_table(tmp_path, monkeypatch):
    def results(folder):
        return {path: path.stat().st_mtime_ns for path in (tmp_path / folder).glob("results/*.json")}

    def reproduce(folder, **fault):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        return command(*COMMAND, **fault)

    want = json.loads(reproduce("whole").out)
    assert reproduce("broken", fault=stop_in_the_second_run).code == 128 + signal.SIGTERM
    first = results("broken")
    assert len(first) == 1
    assert json.loads(reproduce("broken").out) == want
    assert first.items() <= results("broken").items(), "what was there is not run again"
    assert len(results("broken")) == 4
    for row in want["rows"]:
        assert row["linear"]["n"] == row["knn"]["n"] == 2


def test_one_failing_run_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    rows = (Row("broken", "mnn", {"topk": 3}), Row("sound", "byol"))
    monkeypatch.setitem(TABLES, "mine", Table("mine", "two rows", rows))
    real = reproduction.start_pretrain

    def pretrain(*args, **given):
        if given["settings"].get("method") == "mnn":
            raise RuntimeError("out of memory\nand more")
        return real(*args, **given)

    monkeypatch.setattr(reproduction, "start_pretrain", pretrain)
    where = {"results": tmp_path / "results", "runs": tmp_path / "runs"}
    with pytest.raises(mixnn.UserError, match="1 of 2 runs failed") as error:
        mixnn.reproduce("mine", data="digits", **where, protocol="knn", verbose=QUIET, **SMALL)
    assert "out of memory" in str(error.value)
    assert "and more" not in str(error.value)
    assert len(list((tmp_path / "results").glob("*.json"))) == 1
    err = capsys.readouterr().err
    (file,) = (tmp_path / "runs").glob("*-mnn-*.error.txt")
    assert f"{file} has the traceback" in err
    assert "in pretrain\n" in file.read_text()
    assert "RuntimeError: out of memory\nand more" in file.read_text()
    monkeypatch.setattr(reproduction, "start_pretrain", real)
    mixnn.reproduce("mine", data="digits", **where, protocol="knn", verbose=QUIET, **SMALL)
    assert not file.exists()


def test_a_users_mistake_leaves_no_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TABLES, "mine", Table("mine", "one row", (Row("broken", "mnn", {"support_size": 16}),)))
    where = {"results": tmp_path / "results", "runs": tmp_path / "runs"}
    with pytest.raises(mixnn.UserError, match="support_size=16 is smaller than batch_size=32"):
        mixnn.reproduce("mine", data="digits", **where, verbose=QUIET, **SMALL)
    assert "traceback" not in capsys.readouterr().err
    assert not list((tmp_path / "runs").glob("*.error.txt"))


@pytest.fixture
def diary(monkeypatch):
    """What was trained and evaluated, with the settings that say where."""
    calls: list[tuple[str, dict]] = []
    for name in ("start_pretrain", "evaluate"):
        real = getattr(reproduction, name)

        def noted(*args, name=name, real=real, **settings):
            calls.append((name, settings | settings.get("settings", {})))
            return real(*args, **settings)

        monkeypatch.setattr(reproduction, name, noted)
    return calls


def test_a_missing_number_is_measured_without_training_again(tmp_path, monkeypatch, capsys, diary):
    monkeypatch.setitem(TABLES, "mine", Table("mine", "one row", (Row("row", "byol"),)))
    again = {"data": "digits", "results": tmp_path / "results", "runs": tmp_path / "runs", "verbose": QUIET, **SMALL}
    again |= {"epochs": 1, "output": "json"}
    mixnn.reproduce("mine", **again, protocol="linear", probe_epochs=1)
    assert [name for name, _ in diary] == ["start_pretrain", "evaluate"]
    capsys.readouterr()
    mixnn.reproduce("mine", **again, dry_run=True).show()
    assert "to evaluate: knn and linear" in (out := capsys.readouterr().out)
    assert "0 of 1 run to do; 1 to evaluate" in out
    diary.clear()
    (row,) = mixnn.reproduce("mine", **again)["mine"]
    assert [(name, made["protocol"]) for name, made in diary] == [("evaluate", "knn"), ("evaluate", "linear")]
    assert row["knn"]["n"] == row["linear"]["n"] == 1
    diary.clear()
    mixnn.reproduce("mine", **again, probe_epochs=1)  # kNN is there, and a shorter probe replaces no longer one
    assert [(name, made["protocol"]) for name, made in diary] == [("evaluate", "linear")]
    assert mixnn.reproduce("mine", **again)["mine"] == [row]
    assert len(diary) == 1


def test_the_plan_counts_what_is_left_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TABLES, "mine", Table("mine", "two rows", (Row("one", "byol"), Row("other", "mnn"))))
    again = {"data": "digits", "results": tmp_path / "results", "runs": tmp_path / "runs", "verbose": QUIET, **SMALL}
    again |= {"epochs": 4, "protocol": "knn"}
    mixnn.reproduce("mine", **again, rows="one")
    one_step = Trainer._one_step

    def stopping(self: Trainer) -> None:
        if self.done == 8:  # two epochs of four
            os.kill(os.getpid(), signal.SIGTERM)
        one_step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_one_step", stopping)
        with pytest.raises(Interrupted):
            mixnn.reproduce("mine", **again)
    capsys.readouterr()
    mixnn.reproduce("mine", **again, dry_run=True).show()
    assert re.search(r"mnn-\w+-seed0 .* s, from epoch 2 on", capsys.readouterr().out)
    runner = reproduction.Runner(again["results"], again["runs"], ("knn",), 100, QUIET)
    settings = {k: v for k, v in again.items() if k in SMALL}
    one, other = (run.on_this_device() for run in planning.plan([TABLES["mine"]], "digits", [0], settings))
    assert (runner.epochs_left(one), runner.epochs_left(other)) == (0, 1.75)
    mixnn.reproduce("mine", **again)
    assert runner.epochs_left(other) == 0
    shutil.rmtree(runner.run_folder(other))
    assert runner.epochs_left(other) == 4


def test_a_missing_number_of_a_run_that_is_gone_takes_a_new_run_which_has_all_numbers(
    tmp_path, monkeypatch, capsys, diary
):
    monkeypatch.setitem(TABLES, "mine", Table("mine", "one row", (Row("row", "byol"),)))
    again = {"data": "digits", "results": tmp_path / "results", "runs": tmp_path / "runs", "verbose": QUIET, **SMALL}
    again |= {"epochs": 1, "output": "json", "probe_epochs": 1}
    mixnn.reproduce("mine", **again, protocol="knn")
    shutil.rmtree(tmp_path / "runs")
    diary.clear()
    capsys.readouterr()
    mixnn.reproduce("mine", **again, protocol="linear", dry_run=True).show()
    assert "again: there is neither linear nor its run folder" in " ".join(capsys.readouterr().out.split())
    (row,) = mixnn.reproduce("mine", **again, protocol="linear")["mine"]
    assert [name for name, _ in diary] == ["start_pretrain", "evaluate", "evaluate"]
    assert row["knn"]["n"] == row["linear"]["n"] == 1


def test_device_and_data_folder_reach_training_resuming_and_evaluation(tmp_path, monkeypatch, diary):
    monkeypatch.setitem(TABLES, "mine", Table("mine", "one row", (Row("row", "byol"),)))
    again = {"data": "digits", "results": tmp_path / "results", "runs": tmp_path / "runs", "verbose": QUIET, **SMALL}
    where = {"device": "cpu", "data_dir": str(tmp_path)}
    mixnn.reproduce("mine", **again, **where, protocol="knn")
    (path,) = (tmp_path / "results").glob("*.json")
    path.unlink()
    run = Run.open(tmp_path / "runs" / path.stem)
    tensors, state = run.load_checkpoint(pytest.fail)
    shutil.rmtree(run.path / "checkpoints")
    run.save_checkpoint(4, tensors, state | {"step": 4})  # as if it had stopped after the first of two epochs
    mixnn.reproduce("mine", **again, **where, protocol="knn")
    assert [name for name, _ in diary] == ["start_pretrain", "evaluate", "start_pretrain", "evaluate"]
    assert "resume" in diary[2][1]
    assert all(settings.items() >= where.items() for _, settings in diary)
    assert path.exists()


def test_a_folder_of_images_is_known_by_its_whole_path(tmp_path, monkeypatch, diary):
    monkeypatch.setitem(TABLES, "mine", Table("mine", "one row", (Row("row", "byol"),)))
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        for i in range(8):
            file = tmp_path / "photos" / split / "ab"[i % 2] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (200 * (i % 2), 20 * i, 0)).save(file)
    again = {"data": "photos", "labels": "folders", "epochs": 1, "protocol": "knn", "verbose": QUIET, "output": "json"}
    (row,) = mixnn.reproduce("mine", **again)["mine"]
    assert row["knn"]["n"] == 1
    assert row["knn"]["paper"] is None
    diary.clear()
    assert mixnn.reproduce("mine", **again) == {"mine": [row]}
    assert diary == []


def test_a_run_that_another_process_has_locked_is_left_to_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TABLES, "mine", Table("mine", "two rows", (Row("theirs", "byol"), Row("ours", "simclr"))))
    where = {"results": tmp_path / "results", "runs": tmp_path / "runs"}
    again = {"data": "digits", **where, "protocol": "knn", "verbose": QUIET, **SMALL}
    theirs, ours = (run.on_this_device() for run in planning.plan([TABLES["mine"]], "digits", [0], SMALL))
    with try_lock(tmp_path / "runs" / ".locks" / theirs.name) as mine:
        assert mine
        mixnn.reproduce("mine", **again)
        assert f"another process is running {theirs.name}: run this again later" in capsys.readouterr().err
        assert [path.stem for path in (tmp_path / "results").glob("*.json")] == [ours.name]
        assert not (tmp_path / "runs" / theirs.name).exists()
    mixnn.reproduce("mine", **again)
    assert "another process" not in capsys.readouterr().err
    assert {path.stem for path in (tmp_path / "results").glob("*.json")} == {ours.name, theirs.name}


def test_a_result_whose_default_has_changed_is_not_replaced(tmp_path, monkeypatch):
    """Names of results leave defaults out, so that the run with a new default has the old one's name."""

    def register(default):
        @dataclasses.dataclass(frozen=True)
        class Options(methods.MNN.Options):
            sharpness: float = option(default, "how sharp", "mine")

        monkeypatch.setitem(methods.METHODS, "sharp", type("Sharp", (methods.MNN,), {"Options": Options}))

    monkeypatch.setitem(TABLES, "mine", Table("mine", "one row", (Row("sharp", "sharp"),)))
    words = {"data": "digits", "results": tmp_path / "results", "runs": tmp_path / "runs", "protocol": "knn"}
    register(0.1)
    mixnn.reproduce("mine", **words, verbose=QUIET, **SMALL)
    (path,) = (tmp_path / "results").glob("*.json")
    before = path.read_text()
    register(5.0)
    for stale in (False, True):
        with pytest.raises(mixnn.UserError, match=r"sharpness=0\.1 \(now 5\.0\), because a default of sharp"):
            mixnn.reproduce("mine", **words, stale=stale, verbose=QUIET, **SMALL)
    assert path.read_text() == before


def test_the_command_of_a_run_imports_the_code_it_needs(tmp_path):
    file = tmp_path / "reproduce_import_me.py"
    file.write_text(
        "import mixnn\n@mixnn.methods.METHODS.register('imported')\nclass Mine(mixnn.methods.BYOL):\n    pass\n"
    )
    try:
        import_code(file)
        (run,) = planning.plan_row(Row("mine", "imported"), "digits", [0], SMALL)
    finally:
        del methods.METHODS["imported"]
    assert run.command.endswith(f" --import {file}")
