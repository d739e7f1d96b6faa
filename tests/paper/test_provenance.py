"""Where results come from: commits, marks, and what is run again because the code has changed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mixnn
import mixnn.cli
from mixnn import files
from mixnn.evaluation.knn import KNN
from mixnn.evaluation.linear import LINEAR
from mixnn.evaluation.protocol import Subject
from mixnn.paper import plan as planning
from mixnn.paper import provenance, render
from mixnn.paper import reproduce as reproduction
from mixnn.paper.tables import TABLES, Row, Table, in_leaky_order
from mixnn.progress import Reporter
from mixnn.runs import code
from mixnn.runs.folder import Run
from mixnn.training.configure import configure
from tests.paper.test_reproduce import RESULTS, SMALL, summary

QUIET = Reporter(quiet=True)
CURRENT = {"cuda": "13.0", "git": "0123456789ab", "code": "c0de", "training_code": code.training_digest("mnn")}


def write(folder: Path, name: str, made: dict, **environment: str | None) -> None:
    folder.mkdir(exist_ok=True)
    results = {k: {"code": code.evaluation_digest(), **v} for k, v in made["results"].items()}
    made = made | {"environment": {**CURRENT, **environment}, "results": results}
    (folder / f"{name}.json").write_text(json.dumps(made))


def row_of(table: str, name: str) -> Row:
    return next(row for row in TABLES[table].rows if row.name == name)


def cells(folder: Path, table: str = "main", **wanted) -> dict[str, dict]:
    found = mixnn.reproduce(table, results=folder, run=False, verbose=QUIET, **wanted)
    return {row["name"]: row for row in found[table]}


# Marks


@pytest.mark.parametrize(
    "environment, commits, marks",
    [
        ({}, {}, ""),
        ({"git": "0123456789ab+"}, {}, "†"),
        ({"git": None}, {}, "†"),
        ({"git": None}, {"c0de": "0123456789ab"}, ""),
        ({"git": "0123456789ab+"}, {"c0de": "0123456789ab"}, ""),  # new results in the tree, but a commit's code
        ({"training_code": ""}, {}, "‡"),
        ({"git": "0123456789ab+", "code": None, "training_code": ""}, {"c0de": "0123456789ab"}, "†‡"),
    ],
)
def test_a_number_is_marked_if_its_code_is_no_commit_or_unknown(tmp_path, capsys, environment, commits, marks):
    write(tmp_path, "mnn", summary("mnn", {}, 0, 91.0, 89.0), **environment)
    (tmp_path / provenance.COMMITS).write_text(json.dumps(commits))
    assert cells(tmp_path)["MNN"]["marks"] == marks
    assert mixnn.cli.main(["reproduce", "main", "--no-run", "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"91.00 {marks}".strip() in out
    for mark, meaning in provenance.MEANINGS.items():
        assert (f"{mark} {meaning}." in out) == (mark in marks)


def test_one_marked_run_marks_the_mean(tmp_path):
    write(tmp_path, "mnn0", summary("mnn", {}, 0, 91.0, 89.0))
    write(tmp_path, "mnn1", summary("mnn", {}, 1, 92.0, 89.0), git="0123456789ab+")
    assert cells(tmp_path)["MNN"]["marks"] == "†"
    assert cells(tmp_path, seeds=0)["MNN"]["marks"] == ""


def test_the_evaluation_counts_too(tmp_path):
    made = summary("mnn", {}, 0, 91.0, 89.0)
    for evaluated_with, marks in (({"git": "0123456789ab"}, ""), ({"git": "0123456789ab+"}, "†"), ({"git": None}, "†")):
        made["results"]["evaluated_with"] = evaluated_with
        write(tmp_path, "mnn", made)
        assert cells(tmp_path)["MNN"]["marks"] == marks
    made["results"]["knn"]["code"] = ""
    made["results"].pop("evaluated_with")
    write(tmp_path, "mnn", made)
    assert cells(tmp_path)["MNN"]["marks"] == "‡"


def test_every_committed_result_has_a_mark_or_a_commit_and_a_digest():
    commits, finished = provenance.read_commits(RESULTS), planning.load_finished(RESULTS)
    assert len(finished) >= 25
    unmarked = [run for run in finished.values() if not provenance.marks_of([run], commits)]
    assert all(run["environment"]["training_code"] for run in unmarked)
    unknown = {run["config"]["method"] for run in finished.values() if "code" not in run["environment"]}
    assert unknown == {"supervised"}, "the first run, from an uncommitted tree"


def test_the_commit_of_a_result_is_found_by_its_code(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], capture_output=True, check=True
        ).stdout.decode()

    package = tmp_path / "mixnn"
    (package / "nn").mkdir(parents=True)
    monkeypatch.setattr(provenance, "PACKAGE", package)
    monkeypatch.setattr(files, "PACKAGE", package)
    git("init", "-q")
    codes = []
    for text in ("x = 1\n", "x = 2\n", "x = 3\n"):
        (package / "nn" / "a.py").write_text(text)
        (package / "tables.yaml").write_text("rows: []\n")
        codes.append(files.code_digest())
        if text != "x = 3\n":
            git("add", "-A")
            git("commit", "-qm", "a change")
    results = tmp_path / "results"
    results.mkdir()
    runs = [{"environment": {"code": each}} for each in codes]
    found = provenance.find_commits(results, runs)
    assert found.keys() == set(codes[:2]), "the third was never committed"
    assert found[codes[1]] == git("rev-parse", "--short=12", "HEAD").strip()
    assert found[codes[0]] == git("rev-parse", "--short=12", "HEAD~").strip()
    assert provenance.read_commits(results) == found
    assert provenance.commit_of({"code": codes[2], "git": "0123456789ab+"}, found) == ""


# Code that has changed


def test_runs_of_changed_code_are_named_and_those_of_todays_code_are_not(tmp_path, capsys):
    write(tmp_path, "mnn", summary("mnn", {}, 0, 91.0, 89.0))
    write(tmp_path, "msf", summary("msf", {}, 0, 89.0, 88.0), training_code="0lder")
    write(tmp_path, "byol", summary("byol", {}, 0, 89.0, 88.0), training_code="")
    assert mixnn.cli.main(["reproduce", "main", "--no-run", "--results", str(tmp_path)]) == 0
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("the code behind these runs has changed since: cifar10-msf-")
    assert "mnn" not in note
    assert note.endswith("--stale runs them again")


def test_a_stale_run_is_named_as_its_file_is(tmp_path):
    write(tmp_path, "mnn", summary("mnn", {}, 0, 91.0, 89.0), cuda=None, training_code="0lder")
    (planned,) = planning.plan_row(Row("MNN", "mnn"), "cifar10", [0], {})
    (name,) = provenance.stale_runs([planned], planning.load_finished(tmp_path))
    assert name == planned.in_precision("fp32").name != planned.name


def test_the_plan_with_stale_has_what_todays_code_did_not_make(tmp_path, capsys):
    made = summary("mnn", {}, 0, 91.0, 89.0)

    def to_do(**environment: str) -> str:
        write(tmp_path, "mnn", made, cuda=None, **environment)
        words = {"rows": "MNN", "results": tmp_path, "runs": tmp_path / "runs", "dry_run": True, "verbose": QUIET}
        mixnn.reproduce("main", **words, stale=True).show()
        stale = capsys.readouterr().out
        mixnn.reproduce("main", **words).show()
        assert "0 of 1 run to do" in capsys.readouterr().out
        return " ".join(stale.split())

    assert "0 of 1 run to do" in to_do()
    assert "again: stale 1 of 1 run to do" in to_do(training_code="0lder")
    assert "1 of 1 run to do" in to_do(training_code="")
    made["results"]["linear"]["code"] = "0lder"
    assert "1 of 1 run to do" in to_do(), "its run folder is gone, so an evaluation needs training"


def test_stale_runs_are_made_again_once(tmp_path, monkeypatch):
    monkeypatch.setitem(TABLES, "mine", Table("mine", "one row", (Row("row", "byol"),)))
    made: list[str] = []
    for name in ("start_pretrain", "evaluate"):
        real = getattr(reproduction, name)
        monkeypatch.setattr(
            reproduction, name, lambda *a, real=real, name=name, **k: (made.append(name), real(*a, **k))[1]
        )
    again = {"data": "digits", "results": tmp_path / "results", "runs": tmp_path / "runs", "verbose": QUIET, **SMALL}
    again |= {"epochs": 1, "protocol": "knn", "stale": True}
    mixnn.reproduce("mine", **again)
    assert made == ["start_pretrain", "evaluate"]
    mixnn.reproduce("mine", **again)
    assert made == ["start_pretrain", "evaluate"], "nothing is stale"
    (path,) = (tmp_path / "results").glob("*.json")
    (folder,) = (Run.open(run) for run in (tmp_path / "runs").glob("digits-*"))

    made.clear()  # the evaluation has changed: the run folder is evaluated again
    changed = json.loads(path.read_text())
    changed["results"]["knn"]["code"] = "0lder"
    path.write_text(json.dumps(changed))
    results = json.loads((folder.path / "results.json").read_text())
    results["knn"]["code"] = "0lder"
    (folder.path / "results.json").write_text(json.dumps(results))
    mixnn.reproduce("mine", **again)
    assert made == ["evaluate"]
    assert json.loads(path.read_text())["results"]["knn"]["code"] == code.evaluation_digest()

    made.clear()  # training has changed: the run folder is trained from the start
    folder.write_environment(folder.environment() | {"training_code": "0lder"})
    changed["environment"]["training_code"] = "0lder"
    path.write_text(json.dumps(changed))
    mixnn.reproduce("mine", **{**again, "stale": False})
    assert made == []
    mixnn.reproduce("mine", **again)
    assert made == ["start_pretrain", "evaluate"]
    assert json.loads(path.read_text())["environment"]["training_code"] == code.training_digest("byol")


def test_stale_runs_are_not_replaced_on_a_device_of_the_other_precision(tmp_path):
    """A run in fp32 would not take the place of one in bf16, and the table would go on showing the old one."""
    write(tmp_path, "mnn", summary("mnn", {}, 0, 91.0, 89.0), training_code="0lder")
    words = {"rows": "MNN", "results": tmp_path, "runs": tmp_path / "runs", "verbose": QUIET, "device": "cpu"}
    for more in ({}, {"dry_run": True}):
        with pytest.raises(mixnn.UserError, match="1 stale run in bf16, but this device trains in fp32: use a CUDA"):
            mixnn.reproduce("main", **words, **more, stale=True)
    assert mixnn.reproduce("main", **words, run=False, stale=True)["main"][0]["linear"]["ours"] == 91.0
    write(tmp_path, "mnn", summary("mnn", {}, 0, 91.0, 89.0))
    mixnn.reproduce("main", **words, stale=True)  # nothing is stale, nothing is run


def test_stale_covers_all_seeds_that_the_table_shows(tmp_path, capsys):
    for seed in (0, 1, 5):
        write(tmp_path, f"mnn{seed}", summary("mnn", {}, seed, 91.0, 89.0), cuda=None, training_code="0lder")
    write(tmp_path, "msf", summary("msf", {}, 0, 90.0, 88.0), cuda=None, training_code="0lder")
    words = {"rows": ["MNN", "MSF"], "results": tmp_path, "runs": tmp_path / "runs", "verbose": QUIET}
    mixnn.reproduce("main", **words, dry_run=True, stale=True).show()
    shown = capsys.readouterr().out
    assert "4 of 4 runs to do" in shown
    assert all(f"-seed{seed} " in shown for seed in (0, 1, 5))
    mixnn.reproduce("main", **words, dry_run=True, stale=True, seeds=0).show()
    assert "2 of 2 runs to do" in capsys.readouterr().out, "the seeds that were asked for"
    assert mixnn.cli.main(["reproduce", "main", "--no-run", "--row", "MNN", "--results", str(tmp_path)]) == 0
    assert "-seed5; --stale runs them again" in capsys.readouterr().err


def test_a_mean_over_runs_of_different_code_is_marked(tmp_path, capsys):
    write(tmp_path, "mnn0", summary("mnn", {}, 0, 91.0, 89.0))
    write(tmp_path, "mnn1", summary("mnn", {}, 1, 92.0, 89.0))
    assert cells(tmp_path)["MNN"]["marks"] == ""
    write(tmp_path, "mnn1", summary("mnn", {}, 1, 92.0, 89.0), training_code="0lder")
    assert cells(tmp_path)["MNN"]["marks"] == "§"
    assert mixnn.cli.main(["reproduce", "main", "--no-run", "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "91.50 ± 0.71 (n=2) §" in out
    assert f"§ {provenance.MEANINGS['§']}." in out
    one_evaluated_later = summary("mnn", {}, 1, 92.0, 89.0)
    one_evaluated_later["results"]["knn"]["code"] = "0lder"
    write(tmp_path, "mnn1", one_evaluated_later)
    assert cells(tmp_path)["MNN"]["marks"] == "§"


# Like with like


def test_a_fixed_order_run_is_not_compared_with_a_leaky_number_without_a_mark(tmp_path, capsys):
    for method, options in (("mnn", {}), ("msf", {}), ("byol", {}), ("ressl", {}), ("mnn", {"topk": 1})):
        write(tmp_path, f"{method}{len(options)}", summary(method, options, 0, 90.0, 88.0))
    found = cells(tmp_path)
    assert found["MNN"]["linear"]["other_order"], "the authors never gave a number in the fixed order"
    assert not any(found[name]["linear"]["other_order"] for name in ("MSF", "BYOL", "ReSSL"))
    assert cells(tmp_path, "neighbors")["MNN K=1"]["linear"]["other_order"]
    capsys.readouterr()
    mixnn.reproduce("neighbors", results=tmp_path, run=False, verbose=QUIET).show()
    out = capsys.readouterr().out
    assert "-1.41*" in out
    assert "* not like with like" in out


def test_a_table_in_the_leaky_order_is_compared_with_leaky_numbers(tmp_path, capsys):
    for method in ("mnn", "msf", "sce"):
        write(tmp_path, method, summary(method, {"leaky_queue": True}, 0, 90.0, 88.0))
    write(tmp_path, "byol", summary("byol", {}, 0, 89.0, 88.0))
    found = cells(tmp_path, order="leaky")
    compared = {name: found[name]["linear"]["difference"] for name in ("MNN", "MSF", "SCE", "BYOL")}
    assert compared == {
        "MNN": pytest.approx(90 - 91.47),
        "MSF": pytest.approx(90 - 89.94),
        "SCE": pytest.approx(90 - 89.71),  # the authors' own run; the paper copied another's
        "BYOL": pytest.approx(89 - 89.54),  # nothing leaks: their only run
    }
    assert not any(row[p]["other_order"] or row[p]["fixed"] for row in found.values() for p in ("linear", "knn"))
    assert cells(tmp_path)["MNN"]["linear"]["ours"] is None, "the fixed order was not run"
    capsys.readouterr()
    assert mixnn.cli.main(["reproduce", "main", "--order", "leaky", "--no-run", "--results", str(tmp_path)]) == 0
    assert "leaky order, cifar10" in capsys.readouterr().out


def test_the_leaky_order_is_set_where_something_can_leak_and_no_row_is_there_twice():
    for table in map(in_leaky_order, TABLES.values()):
        for row in table.rows:
            leaks = row.method in ("mnn", "msf", "cmsf", "snclr", "nnclr", "moco", "sce")
            assert row.order == ("leaky" if leaks else ""), row.name
            configure("cifar10", row.options, {"method": row.method})
        names = [run.name for row in table.rows for run in planning.plan_row(row, "cifar10", [0], {})]
        assert len(set(names)) == len(names)


def test_the_best_epoch_is_next_to_the_last_and_never_below_it(tmp_path):
    made = summary("mnn", {}, 0, 91.0, 89.0)
    made["results"]["knn"]["best_reading"] = 88.9  # less precise, during training
    write(tmp_path, "mnn", made)
    row = cells(tmp_path)["MNN"]
    assert (row["linear"]["ours"], row["linear"]["best"]) == (91.0, 92.0)
    assert (row["knn"]["ours"], row["knn"]["best"]) == (89.0, 89.0)
    assert row["linear"]["difference"] == pytest.approx(91 - 91.47), "of the last"


def test_rows_over_a_point_away_are_open_unless_explained(tmp_path, monkeypatch, capsys):
    write(tmp_path, "msf", summary("msf", {}, 0, 88.0, 87.5))

    def printed(**wanted) -> str:
        mixnn.reproduce("main", results=tmp_path, run=False, verbose=QUIET, **wanted).show()
        return capsys.readouterr().out

    assert "Open, more than a point away: MSF (linear -1.60)." in printed()
    write(tmp_path, "short", summary("msf", {}, 0, 50.0, 50.0, epochs=20))
    assert "Open" not in printed(epochs=20), "another recipe"
    explained = Row(**vars(row_of("main", "MSF")) | {"explained": {"cifar10": "it is a test"}})
    monkeypatch.setitem(TABLES, "main", Table("main", "x", (explained,)))
    assert "MSF (linear -1.60) is more than a point away: it is a test." in printed()


# Precision


def test_a_run_in_bf16_on_cuda_and_one_in_fp32_on_a_cpu_are_different_runs():
    config = vars(configure("cifar10", {}, {}))
    on_cuda, on_cpu = ({"config": config, "environment": {"cuda": cuda}} for cuda in ("13.0", None))
    asked = {"config": {**config, "precision": "fp32"}, "environment": {"cuda": "13.0"}}
    assert [planning.precision_of(run) for run in (on_cuda, on_cpu, asked)] == ["bf16", "fp32", "fp32"]
    assert planning.key_of(on_cuda) == ("b8e2e2d3", 0), "the committed run's name"
    assert planning.key_of(on_cuda) != planning.key_of(on_cpu) == planning.key_of(asked)
    (run,) = planning.plan_row(row_of("main", "MNN"), "cifar10", [0], {"device": "cpu"})
    assert run.on_this_device().key == planning.key_of(on_cpu)


def test_a_row_shows_runs_of_one_precision_only(tmp_path, capsys):
    write(tmp_path, "cuda", summary("mnn", {}, 0, 91.0, 89.0))
    write(tmp_path, "cpu0", summary("mnn", {}, 0, 80.0, 80.0), cuda=None)
    assert cells(tmp_path)["MNN"]["linear"]["ours"] == 91.0
    assert cells(tmp_path, precision="fp32")["MNN"]["linear"]["ours"] == 80.0
    write(tmp_path, "cpu1", summary("mnn", {}, 1, 82.0, 80.0), cuda=None)
    row = cells(tmp_path)["MNN"]
    assert (row["linear"]["ours"], row["linear"]["n"], row["precision"]) == (81.0, 2, "fp32"), "most runs"
    write(tmp_path, "msf", summary("msf", {}, 0, 90.0, 89.0))
    capsys.readouterr()
    mixnn.reproduce("main", results=tmp_path, run=False, verbose=QUIET).show()
    assert "In fp32, the others in bf16: MNN." in capsys.readouterr().out


@pytest.mark.parametrize(
    "precision, device, of_linear, of_knn",
    [
        ("auto", "cuda", "bf16 forward, fp32 features", "fp32, TF32 convolutions"),
        ("fp32", "cuda", "fp32, TF32 convolutions", "fp32, TF32 convolutions"),
        ("bf16", "cuda", "bf16 forward, fp32 features", "bf16 forward, fp32 features"),
        ("auto", "cpu", "fp32", "fp32"),
        ("fp32", "cpu", "fp32", "fp32"),
    ],
)
def test_the_precision_of_an_evaluation_is_used_and_recorded(monkeypatch, precision, device, of_linear, of_knn):
    train, test = (mixnn.data.load("digits", split).limit(64) for split in ("train", "test"))
    asked: list[bool | None] = []

    def features(_backbone, images, *_, **named):
        asked.append(named["bf16"])
        return torch.rand(len(images), 4)

    for protocol in (KNN, LINEAR):
        monkeypatch.setattr(sys.modules[protocol.run.__module__], "features", features)
    subject = Subject(torch.nn.Flatten(), train, test, 8, [], 1, 0, QUIET, torch.device(device), precision)
    assert LINEAR.run(subject)[1]["precision"] == of_linear
    assert set(asked) == {None if precision == "auto" else precision == "bf16"}
    asked.clear()
    assert KNN.run(subject)[1]["precision"] == of_knn
    assert set(asked) == {precision == "bf16"}


def test_bf16_is_refused_without_cuda():
    with pytest.raises(mixnn.UserError, match="precision=bf16 needs CUDA"):
        mixnn.evaluate(torch.nn.Flatten(), "digits", protocol="knn", device="cpu", precision="bf16")
    found = mixnn.evaluate(torch.nn.Flatten(), "digits", protocol="knn", device="cpu", precision="fp32", limit=64)
    assert found["knn"]["protocol"]["precision"] == "fp32"


def test_marks_can_be_printed_in_latex():
    assert "†‡§".translate(render.LATEX_ESCAPES) == r"$\dagger$$\ddagger$\S{}"
