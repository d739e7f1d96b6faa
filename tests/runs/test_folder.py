import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import mixnn
from mixnn import data, files
from mixnn.config import Config, MixnnWarning, UserError
from mixnn.files import code_digest
from mixnn.progress import Reporter
from mixnn.runs.folder import Run, environment

QUIET = Reporter(quiet=True)
CONFIG = Config(
    data="digits", lr=0.1 + 0.2, options={"topk": 3, "lam": "uniform", "symmetric": True, "momentum": 0.996}
)
DAMAGED = (
    b"",
    b"{",
    b'{"knn": ',
    b"\xff\xfe",
    b"[]",
    b"null",
    b"3",
    b"[" * 20_000,
)  # files that should hold a JSON object


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_folder_is_made_with_its_parents(tmp_path: Path):
    run = Run.create(tmp_path / "a" / "b", CONFIG, "mixnn pretrain digits")
    assert contents(run.path).keys() == {"config.yaml", "command.txt"}
    assert (run.path / "command.txt").read_text() == "mixnn pretrain digits\n"


@pytest.mark.parametrize("what", ["a run", "an empty folder", "a file", "a folder of something else"])
def test_what_exists_is_refused_and_left_alone(tmp_path: Path, what: str):
    path = tmp_path / "x"
    if what == "a run":
        Run.create(path, CONFIG, "")
    elif what == "a file":
        path.write_text("precious")
    else:
        path.mkdir()
        if what != "an empty folder":
            (path / "notes.txt").write_text("precious")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"x exists: use another out"):
        Run.create(path, CONFIG, "")
    assert contents(tmp_path) == before


def test_a_refusal_offers_to_resume_only_what_can_be_resumed(tmp_path: Path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("precious")
    with pytest.raises(UserError) as error:
        Run.check_replaceable(tmp_path / "notes", overwrite=False)
    assert "resume" not in str(error.value)
    assert "overwrite" not in str(error.value)
    run = Run.create(tmp_path / "run", CONFIG, "")
    with pytest.raises(UserError, match=r"run exists: use another out, or overwrite=True to replace it$"):
        Run.check_replaceable(tmp_path / "run", overwrite=False)
    run.save_checkpoint(1, {"method.x": torch.zeros(1)}, {"step": 1})
    with pytest.raises(UserError, match=r"use another out, resume='.*run' to continue it, or overwrite=True"):
        Run.check_replaceable(tmp_path / "run", overwrite=False)


def test_overwrite_replaces_a_run_and_leaves_nothing_of_it(tmp_path: Path):
    run = Run.create(tmp_path / "x", CONFIG, "old")
    run.log({"step": 1})
    run.save_checkpoint(1, {}, {"step": 1})
    run.save_results({"knn": 1})
    new = Run.create(tmp_path / "x", replace(CONFIG, epochs=3), "new", overwrite=True)
    assert contents(new.path).keys() == {"config.yaml", "command.txt"}
    assert Run.open(new.path).config.epochs == 3


def test_overwrite_accepts_a_folder_whose_making_was_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original, written = Run.write, []

    def die_at_second(self: Run, name: str, text: str) -> None:
        if written:
            raise KeyboardInterrupt
        original(self, name, text)
        written.append(name)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "write", die_at_second)
        with pytest.raises(KeyboardInterrupt):
            Run.create(tmp_path / "x", CONFIG, "")
    assert not Run.is_run_folder(tmp_path / "x")
    (tmp_path / "x" / ".config.yaml.7.tmp").touch()  # it was being written
    with pytest.raises(UserError, match="or overwrite=True to use it"):
        Run.create(tmp_path / "x", CONFIG, "")
    assert Run.create(tmp_path / "x", CONFIG, "", overwrite=True).config == CONFIG


def test_a_name_that_is_the_beginning_of_a_run_folders_is_completed(tmp_path: Path):
    Run.create(tmp_path / "photos-mnn", CONFIG, "")
    with pytest.raises(UserError, match=r"no run folder called .*photos; did you mean .*photos-mnn\?"):
        Run.open(tmp_path / "photos")
    with pytest.raises(UserError, match=r"no run folder called .*cats$"):
        Run.open(tmp_path / "cats")


def test_overwrite_accepts_an_empty_folder(tmp_path: Path):
    (tmp_path / "x").mkdir()
    assert Run.create(tmp_path / "x", CONFIG, "", overwrite=True).config == CONFIG


@pytest.mark.parametrize(
    "file, text",
    [
        ("notes.txt", "precious"),
        ("config.yaml", "title: my web site\ntheme: dark\n"),  # many programs have a config.yaml
        ("config.yaml", "- a list\n"),
        ("config.yaml", "key: [unclosed\n"),
        ("config.yaml", ""),
        ("config.yaml/inside.txt", "precious"),
    ],
)
def test_overwrite_never_deletes_a_folder_that_is_no_run(tmp_path: Path, file: str, text: str):
    (tmp_path / "x" / file).parent.mkdir(parents=True)
    (tmp_path / "x" / file).write_text(text)
    (tmp_path / "x" / "thesis.tex").write_text("years of work")
    before = contents(tmp_path)
    with pytest.raises(UserError, match="is not a run folder"):
        Run.create(tmp_path / "x", CONFIG, "", overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "file", ["thesis.tmp", ".thesis.tex.7.tmp", "data.tmp/inside.txt", ".config.yaml.7.tmp/inside.txt"]
)
def test_what_only_looks_left_over_is_not_deleted(tmp_path: Path, file: str):
    (tmp_path / "x" / file).parent.mkdir(parents=True)
    (tmp_path / "x" / file).write_text("precious")
    with pytest.raises(UserError, match="is not a run folder"):
        Run.create(tmp_path / "x", CONFIG, "", overwrite=True)
    assert (tmp_path / "x" / file).read_text() == "precious"


def test_overwrite_does_not_delete_a_file(tmp_path: Path):
    (tmp_path / "x").write_text("precious")
    with pytest.raises(UserError, match="is not a run folder"):
        Run.create(tmp_path / "x", CONFIG, "", overwrite=True)
    assert (tmp_path / "x").read_text() == "precious"


def test_a_folder_that_cannot_be_made_is_an_error_with_the_reason(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot make the run folder .*Not a directory"):
        Run.create(tmp_path / "file" / "x", CONFIG, "")


def test_the_configuration_comes_back_equal_and_is_plain_yaml(tmp_path: Path):
    run = Run.create(tmp_path / "x", CONFIG, "")
    assert Run.open(tmp_path / "x") == run
    assert yaml.safe_load((tmp_path / "x" / "config.yaml").read_text()) == asdict(CONFIG)


def test_a_mode_of_earlier_versions_still_opens(tmp_path: Path):
    path = Run.create(tmp_path / "x", replace(CONFIG, mode="eager"), "").path / "config.yaml"
    path.write_text(path.read_text().replace("mode: eager", "mode: captured"))
    assert Run.open(tmp_path / "x").config == replace(CONFIG, mode="recorded")


@pytest.mark.parametrize(
    "text, message",
    [
        ("epoks: 3\n", "did you mean 'epochs'"),
        ("epochs: -3\n", "at least 0"),
        ("epochs: ten\n", "epochs='ten'"),
        ("", "config.yaml cannot be read"),
        ("data: digits\n[1, 2\n", "config.yaml cannot be read: line 3: [^\n]*$"),
        ("just words", "config.yaml cannot be read|unknown setting"),
        ("data: \udcff", "config.yaml cannot be read"),
    ],
)
def test_a_configuration_that_is_broken_is_a_clear_error(tmp_path: Path, text: str, message: str):
    (tmp_path / "config.yaml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=message):
        Run.open(tmp_path)


@pytest.mark.parametrize("name", ["absent", "file", "empty"])
def test_what_is_no_run_folder_cannot_be_opened(tmp_path: Path, name: str):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        UserError, match=f"{name} is not a run folder" if name != "absent" else "no run folder called .*absent"
    ):
        Run.open(tmp_path / name)


@pytest.fixture
def logged(tmp_path: Path) -> Run:
    run = Run.create(tmp_path / "x", CONFIG, "")
    for step in (4, 8, 12):
        run.log({"step": step, "loss": 1 / step})
    return run


def test_metrics_are_one_json_object_a_line(logged: Run):
    lines = (logged.path / "metrics.jsonl").read_text().splitlines()
    assert logged.metrics() == [{"step": s, "loss": 1 / s} for s in (4, 8, 12)]
    assert [json.loads(line) for line in lines] == [
        record | {"crc32": checksum}
        for record, checksum in zip(logged.metrics(), ("834dbfbd", "dbc75276", "73345530"), strict=True)
    ]


@pytest.mark.parametrize(
    "changed", [(b"0.125", b"0.121"), (b'"step": 8', b'"step": 9'), (b"crc32", b"crc3"), (b'"}', b'0"}')]
)
def test_a_line_whose_checksum_does_not_match_is_left_out(logged: Run, changed: tuple[bytes, bytes]):
    path, said = logged.path / "metrics.jsonl", []
    first, second, third = path.read_bytes().splitlines(keepends=True)
    assert second.replace(*changed) != second
    path.write_bytes(first + second.replace(*changed) + third)
    assert [record["step"] for record in logged.metrics(said.append)] == [4, 12]
    assert said == [f"1 line of {path} cannot be read and is left out"]


def test_a_log_of_an_earlier_version_is_read_and_gets_checksums_when_the_run_goes_on(logged: Run):
    path = logged.path / "metrics.jsonl"
    written = path.read_text()
    path.write_text("".join(json.dumps({"step": s, "loss": 1 / s}) + "\n" for s in (4, 8, 12)))
    assert [record["step"] for record in logged.metrics(pytest.fail)] == [4, 8, 12]
    logged.truncate_log(12, pytest.fail)
    assert path.read_text() == written


@pytest.mark.parametrize("step, kept", [(12, [4, 8, 12]), (11, [4, 8]), (8, [4, 8]), (3, []), (100, [4, 8, 12])])
def test_rewinding_drops_what_was_logged_later_and_nothing_else(logged: Run, step: int, kept: list[int]):
    before = (logged.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    logged.truncate_log(step)
    assert (logged.path / "metrics.jsonl").read_text() == "".join(before[: len(kept)])


@pytest.mark.parametrize("half", ['{"step": 16, "lo', "{", '{"step": 16, "loss": 1}', "null", "\x00\x00"])
def test_rewinding_drops_a_line_the_process_died_in(logged: Run, half: str):
    with open(logged.path / "metrics.jsonl", "a") as file:
        file.write(half)
    logged.truncate_log(12)
    logged.log({"step": 16})
    assert [record["step"] for record in logged.metrics()] == [4, 8, 12, 16]


@pytest.mark.parametrize(
    "bad", [b"{", b'{"step": 8, "loss\xff": 1}', b"null", b"[8]", b'{"step": "8"}', b"\x00" * 9, b""]
)
def test_an_unreadable_line_costs_only_itself(logged: Run, bad: bytes):
    path, said = logged.path / "metrics.jsonl", []
    first, _, third, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + bad + b"\n" + third + b"".join(rest))
    assert [record["step"] for record in logged.metrics(said.append)] == [4, 12]
    logged.truncate_log(12, said.append)
    assert said == [f"1 line of {path} cannot be read and is left out"] * 2
    assert path.read_bytes() == first + third
    logged.truncate_log(4, pytest.fail)
    assert path.read_bytes() == first


def test_metrics_can_be_read_while_a_line_is_being_written(logged: Run):
    with open(logged.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 16, "lo')
    assert [record["step"] for record in logged.metrics()] == [4, 8, 12]


def test_a_missing_newest_checkpoint_is_noticed(logged: Run):
    said: list[str] = []
    for step in (8, 12):
        logged.save_checkpoint(step, {"method.w": torch.zeros(2)}, {"step": step})
    assert logged.load_checkpoint(pytest.fail)[1] == {"step": 12}
    (logged.path / "checkpoints" / "step-00000012.safetensors").unlink()
    assert logged.load_checkpoint(said.append)[1] == {"step": 8}
    assert said == [f"{logged.path} was trained to step 12, but its newest checkpoint is of step 8"]
    assert logged.load_training(pytest.fail)[1] == {"step": 8}  # a resumed run says where it starts


def test_rewinding_a_run_without_metrics_is_fine(tmp_path: Path):
    run = Run.create(tmp_path / "x", CONFIG, "")
    run.truncate_log(0)
    assert run.metrics() == []


def test_results_of_one_protocol_leave_those_of_another(tmp_path: Path):
    run = Run.create(tmp_path / "x", CONFIG, "")
    run.save_results({"knn": 1, "config": "old"})
    run.save_results({"linear": 2, "config": "new"})
    assert run.results() == {"knn": 1, "linear": 2, "config": "new"}


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_results_are_set_aside_and_the_new_ones_are_saved(tmp_path: Path, content: bytes):
    run, said = Run.create(tmp_path / "x", CONFIG, ""), []
    (run.path / "results.json").write_bytes(content)
    assert run.results() == {}
    run.save_results({"linear": 2}, said.append)
    assert run.results(pytest.fail) == {"linear": 2}
    assert (run.path / "results.json.damaged").read_bytes() == content
    assert len(said) == 1
    assert "results.json was damaged" in said[0]


@pytest.mark.parametrize("content", DAMAGED)
def test_other_damaged_files_are_named_and_count_as_empty(tmp_path: Path, content: bytes):
    run, said = Run.create(tmp_path / "x", CONFIG, "mixnn ..."), []
    for name in ("environment.json", "judgement.json"):
        (run.path / name).write_bytes(content)
    (run.path / "command.txt").unlink()
    assert run.environment(said.append) == run.judgement(said.append) == {}
    assert run.command(said.append) == ""
    assert run.summary()["command"] == ""
    run.record_given(["epochs"])
    assert [name in text for name, text in zip(("environment", "judgement", "command"), said, strict=True)] == [
        True
    ] * 3


def test_a_run_folder_without_its_command_is_still_one(tmp_path: Path):
    run = Run.create(tmp_path / "x", CONFIG, "")
    (run.path / "command.txt").unlink()
    assert not Run.is_run_folder(run.path), "any program may have a config.yaml"
    run.save_checkpoint(1, {}, {"step": 1})
    assert Run.is_run_folder(run.path)


def test_the_newest_whole_checkpoint_is_loaded_and_damaged_ones_are_named(tmp_path: Path):
    run = Run.create(tmp_path / "x", CONFIG, "")
    run.save_checkpoint(1, {"x": torch.tensor(1)}, {"step": 1})
    newest = run.save_checkpoint(2, {"x": torch.tensor(2)}, {"step": 2})
    said: list[str] = []
    assert run.load_checkpoint(said.append)[1] == {"step": 2}
    assert said == []
    newest.write_bytes(newest.read_bytes()[:-1])
    tensors, state = run.load_checkpoint(said.append)
    assert (tensors["x"].item(), state) == (1, {"step": 1})
    assert len(said) == 1
    assert str(newest) in said[0]


def test_without_a_usable_checkpoint_the_error_says_how_to_start_anew(tmp_path: Path):
    run = Run.create(tmp_path / "x", CONFIG, "")
    with pytest.raises(UserError, match=rf"no usable checkpoint\n.*out='{run.path}', overwrite=True"):
        run.load_checkpoint(pytest.fail)


def test_the_environment_names_versions_device_and_code():
    found = environment(torch.device("cpu"))
    assert found["mixnn"] == mixnn.__version__
    assert found["torch"] == torch.__version__
    assert found["python"].startswith("3.")
    assert found["device"]
    assert found["threads"] == torch.get_num_threads()
    assert found["cuda"] is None
    assert found["git"] is None or len(found["git"].rstrip("+")) >= 12
    json.dumps(found)


def test_the_code_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy = shutil.copytree(files.PACKAGE, tmp_path / "mixnn", ignore=shutil.ignore_patterns("*.pyc"))
    before = code_digest()
    monkeypatch.setattr(files, "PACKAGE", copy)
    assert code_digest() == before
    (copy / "config.py").write_text((copy / "config.py").read_text() + "\n")
    assert code_digest() != before


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    mixnn.data.to_folder(np.zeros((8, 8, 8, 3), np.uint8), "~/photos")
    (tmp_path / "labels.csv").write_text("file,label\n0.png,cat\n")
    run = mixnn.pretrain(
        "~/photos",
        labels="~/labels.csv",
        out="~/run",
        epochs=0,
        batch_size=4,
        options={"support_size": 8},
        verbose=QUIET,
    )
    assert run.path == tmp_path / "run"
    assert Run.open("~/run").path == run.path
    assert mixnn.embed("~/run", "~/photos", "~/x.npz", device="cpu", verbose=QUIET).path == tmp_path / "x.npz"
    assert mixnn.export("~/run", out="~/x.safetensors", verbose=QUIET) == tmp_path / "x.safetensors"
    assert mixnn.load("~/x.safetensors", "cpu").num_features == mixnn.load("~/run", "cpu").num_features
    assert mixnn.report("~/run", out="~/x.html", images=0, verbose=QUIET) == tmp_path / "x.html"
    assert not (tmp_path / "~").exists()


def test_a_data_set_that_is_not_registered_here_is_named(tmp_path, monkeypatch):
    run = Run.create(tmp_path / "run", Config(data="mine"), "mixnn ...")
    with pytest.raises(UserError, match=r"run was trained on mine, which is not a data set"):
        run.check_data()
    with pytest.raises(UserError, match="is gone: use --source FOLDER"):
        run.check_data("use --source FOLDER")
    monkeypatch.setitem(data.DATASETS, "mine", data.DATASETS["digits"])
    run.check_data()


def test_a_folder_of_images_is_pointed_to_the_run_that_it_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    with pytest.raises(UserError, match=r"photos is not a run folder .*: `mixnn.pretrain\(...\)` makes one"):
        Run.open("photos")
    Run.create(Path("runs/photos-imagenet"), Config(data="photos"), "mixnn.embed('photos')")
    with pytest.raises(UserError, match=r"photos is not a run folder .*: use runs/photos-imagenet$"):
        Run.open("photos")


def test_another_number_of_threads_is_recorded_and_told(tmp_path):
    settings = {"limit": 64, "epochs": 1, "backbone": "resnet8", "batch_size": 32, "knn_every": 0, "device": "cpu"}
    settings["warmup_epochs"] = 0
    before = torch.get_num_threads()
    run = mixnn.pretrain("digits", out=tmp_path / "run", **settings)
    run.write_environment(run.environment() | {"threads": before + 1})
    with pytest.warns(MixnnWarning, match=rf"used {before + 1} threads and now uses {before}, so numbers differ"):
        mixnn.pretrain(resume=run, epochs=2)
    assert Run.open(run.path).environment()["threads"] == before
    mixnn.pretrain(resume=run, epochs=3)  # no warning, which would be an error
