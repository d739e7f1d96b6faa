"""A run that was killed, stopped or damaged goes on as if nothing had been: the same bits at the end, the same log."""

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import mixnn
from mixnn import cli, methods
from mixnn.config import Config
from mixnn.data import cache, configured_dataset
from mixnn.data.stored import StoredImages
from mixnn.device import seeded_generators
from mixnn.files import lock_run
from mixnn.methods.contract import Direction
from mixnn.progress import Reporter
from mixnn.runs import Run, checkpoint
from mixnn.training.interrupt import interrupts
from mixnn.training.trainer import Trainer
from tests.command import Done, command

NETWORK = shlex.split("--set support_size=64 --set hidden=32 --set dim=16")
DIGITS = (
    shlex.split("pretrain digits --limit 64 --batch-size 16 --epochs 5 --checkpoint-every 1 --knn-every 2") + NETWORK
)
STEPS_PER_EPOCH, STEPS = 4, 20
TINY = shlex.split("--backbone resnet8 --image-size 8 --bn-groups 1 --batch-size 8 --epochs 3") + NETWORK
TIMING = ("seconds", "images_per_s", "crc32")  # and the checksum over them


def train(out: Path, *words: object, **fault: Any) -> Done:
    return command(*DIGITS, "--out", out, *words, **fault)


def resume(run: Path) -> Done:
    return command("pretrain", "--resume", run)


def last(run: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return checkpoint.load(checkpoint.list_checkpoints(run / "checkpoints")[0])


def log(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMING} for line in lines]


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}


def assert_same_run(run: Path, other: Path) -> None:
    (tensors, state), (expected, expected_state) = last(run), last(other)
    assert state.pop("seconds") > 0
    assert expected_state.pop("seconds") > 0
    assert state == expected_state
    assert [name for name, t in bits(tensors).items() if t != bits(expected)[name]] == []
    assert tensors.keys() == expected.keys()
    assert log(run) == log(other)


def temporaries(run: Path) -> list[Path]:
    return [path for path in run.rglob("*") if path.name.endswith(".tmp")]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    done = train(out)
    assert done.code == 0, done.err
    assert done.out == f"{out}\n"
    assert last(out)[1]["step"] == STEPS
    assert [record["epoch"] for record in log(out)] == [1, 2, 3, 4, 5]
    return out


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def signal_in_step(step: int, number: int) -> None:
    """The process gets a signal in the middle of its STEPth step."""
    original = Trainer._one_step

    def one_step(self: Trainer) -> None:
        if self.done == step - 1:
            send(number)
        original(self)

    Trainer._one_step = one_step  # type: ignore[method-assign]


def kill_after_logging(step: int) -> None:
    original = Run.log

    def and_die(self: Run, record: dict[str, Any]) -> None:
        original(self, record)
        if record["step"] == step:
            send(signal.SIGKILL)

    Run.log = and_die  # type: ignore[method-assign]


def kill_in_line(step: int) -> None:
    """The process dies with half a line of metrics.jsonl on the disk."""
    original = Run.log

    def half_and_die(self: Run, record: dict[str, Any]) -> None:
        if record["step"] == step:
            with open(self.path / "metrics.jsonl", "a") as file:
                file.write(json.dumps(record)[:20])
                file.flush()
                send(signal.SIGKILL)
        original(self, record)

    Run.log = half_and_die  # type: ignore[method-assign]


def kill_in_reading(step: int) -> None:
    """The process dies in the kNN reading of an epoch, as one does that takes too much memory."""
    original = Trainer._knn

    def die(self: Trainer) -> dict[str, float]:
        if self.done == step:
            send(signal.SIGKILL)
        return original(self)

    Trainer._knn = die  # type: ignore[method-assign]


def kill_while_saving(step: int) -> None:
    """The process dies when the checkpoint is written, but has not got its name yet."""
    original = os.replace

    def die(source: Path, target: Path) -> None:
        if f"{step:08d}" in str(target):
            send(signal.SIGKILL)
        original(source, target)

    os.replace = die  # type: ignore[assignment]


KILLS: dict[
    str, tuple[Callable[..., None], list[int], int]
] = {  # what happens, and the step of the checkpoint it leaves
    "right after the first checkpoint": (signal_in_step, [5, signal.SIGKILL], 4),
    "in the middle of an epoch": (signal_in_step, [11, signal.SIGKILL], 8),
    "right after an epoch was logged": (kill_after_logging, [12], 12),
    "in a line of the log": (kill_in_line, [12], 12),
    "in the kNN reading of an epoch": (kill_in_reading, [8], 8),
    "in the last kNN reading": (kill_in_reading, [20], 20),
    "while a checkpoint is written": (kill_while_saving, [16], 12),
    "in the last step": (signal_in_step, [20, signal.SIGKILL], 16),
    "while the last checkpoint is written": (kill_while_saving, [20], 16),
}


@pytest.mark.parametrize("when", KILLS)
def test_a_killed_run_ends_with_the_bits_of_an_unbroken_one(unbroken: Path, tmp_path: Path, when: str):
    fault, args, saved = KILLS[when]
    run = tmp_path / "run"
    assert train(run, fault=fault, args=args).code == -signal.SIGKILL
    assert last(run)[1]["step"] == saved
    done = resume(run)
    assert done.code == 0, done.err
    assert done.out == f"{run}\n"
    assert f"step {saved} of {STEPS}" in done.err
    assert_same_run(run, unbroken)


def test_a_run_may_be_killed_again_and_again(unbroken: Path, tmp_path: Path):
    run = tmp_path / "run"
    assert train(run, fault=signal_in_step, args=[6, signal.SIGKILL]).code == -signal.SIGKILL
    for step in (7, 14):
        done = command("pretrain", "--resume", run, fault=signal_in_step, args=[step, signal.SIGTERM])
        assert done.code == 128 + signal.SIGTERM
    assert resume(run).code == 0
    assert_same_run(run, unbroken)


def test_a_temporary_file_that_a_kill_left_is_gone_at_the_end(tmp_path: Path):
    run = tmp_path / "run"
    assert train(run, fault=kill_while_saving, args=[16]).code == -signal.SIGKILL
    assert len(temporaries(run)) == 1, "the kill came while a file was written"
    assert resume(run).code == 0
    assert temporaries(run) == []


def test_a_run_killed_before_its_first_checkpoint_says_how_to_start_anew(tmp_path: Path):
    run = tmp_path / "run"
    assert train(run, fault=signal_in_step, args=[3, signal.SIGKILL]).code == -signal.SIGKILL
    for done in (resume(run), command("evaluate", run)):
        assert done.code == 2
        assert "no usable checkpoint" in done.err
        assert f"--out {run} --overwrite" in done.err
        assert "Traceback" not in done.err
    assert train(run, "--overwrite").code == 0


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_in_the_middle_of_an_epoch_and_the_run_goes_on_with_the_same_bits(
    unbroken: Path, tmp_path: Path, number: int, code: int
):
    run = tmp_path / "run"
    done = train(run, fault=signal_in_step, args=[7, number])
    assert done.code == code
    assert f"mixnn pretrain --resume {run}" in done.err
    assert "saved at step 7" in done.err
    assert "Traceback" not in done.err
    assert last(run)[1]["step"] == 7
    assert 7 % STEPS_PER_EPOCH
    assert [record["epoch"] for record in log(run)] == [1]
    assert resume(run).code == 0
    assert_same_run(run, unbroken)  # the log's means over the broken epoch included


def test_ctrl_c_before_the_first_step_says_that_nothing_was_saved(tmp_path: Path, monkeypatch, capsys):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("mixnn.training.pretrain"), "Trainer", stop)
    assert cli.main(["pretrain", "digits", "--out", str(tmp_path / "run")]) == 130
    assert "mixnn: stopped before the first step, so nothing was saved\n" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_signal_in_the_last_step_of_an_epoch_changes_nothing_either(unbroken: Path, tmp_path: Path):
    run = tmp_path / "run"
    assert train(run, fault=signal_in_step, args=[8, signal.SIGTERM]).code == 143
    assert resume(run).code == 0
    assert_same_run(run, unbroken)


def test_a_signal_in_the_very_last_step_finds_a_finished_run(unbroken: Path, tmp_path: Path):
    run = tmp_path / "run"
    done = train(run, fault=signal_in_step, args=[20, signal.SIGTERM])
    assert done.code == 0
    assert "continue with" not in done.err
    assert_same_run(run, unbroken)


def start(run: Path) -> subprocess.Popen[str]:
    """A run in a process of its own that has finished an epoch, and would not end by itself while the test lasts."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(mixnn.__file__).parents[1])}
    words = [*DIGITS, "--epochs", "100000", "--checkpoint-every", "100000", "--knn-every", "0", "--out", str(run)]
    process = subprocess.Popen(
        [sys.executable, "-m", "mixnn", *words],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    metrics, end = run / "metrics.jsonl", time.monotonic() + 600
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "no epoch in ten minutes"
        time.sleep(0.05)
    return process


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_another_process_trains_is_left_to_it_until_that_is_killed(tmp_path: Path):
    run = tmp_path / "run"
    process = start(run)
    try:
        for done in (resume(run), train(run, "--overwrite")):
            assert done.code == 2
            assert done.err == f"mixnn: another process is training {run}: wait for it to end, or stop it first\n"
        epochs = [record["epoch"] for record in Run.open(run).metrics()]
        assert epochs == list(range(1, len(epochs) + 1)), "its log is whole"
    finally:
        process.kill()
        process.communicate()
    assert train(run, "--overwrite").code == 0
    assert [record["epoch"] for record in log(run)] == [1, 2, 3, 4, 5]


def test_a_finished_run_that_another_process_holds_is_not_touched(unbroken: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    before = files(run)
    with lock_run(run):
        assert resume(run).code == 2
    assert files(run) == before
    assert resume(run).code == 0


def test_the_command_itself_exits_with_143_when_another_process_terminates_it(tmp_path: Path):
    run = tmp_path / "run"
    process = start(run)
    process.terminate()
    out, err = process.communicate(timeout=600)
    assert process.returncode == 143, err
    assert out == ""
    assert re.fullmatch(
        r"mixnn: stopped and saved at step \d+: continue with `mixnn pretrain --resume .*`", err.splitlines()[-1]
    )
    assert f"step {last(run)[1]['step']}:" in err


def test_a_second_signal_acts_as_usual_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with interrupts() as flag:
        assert flag.signal == 0
        send(signal.SIGINT)
        assert flag.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_resuming_a_finished_run_changes_nothing_and_says_that_it_is_finished(unbroken: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    before = files(run)
    done = resume(run)
    assert (done.code, done.out) == (0, f"{run}\n")
    assert "finished" in done.err.replace(str(run), "")
    assert files(run) == before


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_gives_the_same_bits(
    unbroken: Path, tmp_path: Path, damage: str
):
    run = tmp_path / "run"
    assert train(run, fault=signal_in_step, args=[14, signal.SIGKILL]).code == -signal.SIGKILL
    newest, before = checkpoint.list_checkpoints(run / "checkpoints")
    data = newest.read_bytes()
    newest.write_bytes({"truncated": data[:-7], "flipped": data[:-1] + bytes([data[-1] ^ 64]), "empty": b""}[damage])
    done = resume(run)
    assert done.code == 0, done.err
    assert f"{newest} is damaged" in done.err
    assert f"step {int(before.stem.removeprefix('step-'))} of" in done.err
    assert_same_run(run, unbroken)


def test_no_fall_back_is_promised_where_there_is_none(unbroken: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    for path in checkpoint.list_checkpoints(run / "checkpoints"):
        path.write_bytes(b"")
    done = resume(run)
    assert done.code == 2
    assert done.err.count("is damaged") == 2
    assert done.err.count("using the one before") <= 1
    assert "no usable checkpoint" in done.err


def finite(tensors: dict[str, Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors.values() if t.is_floating_point())


ONE_STEP_EPOCHS = ["--batch-size", 64, "--warmup-epochs", 2]  # the first has lr 0, the second the full one


def test_a_loss_that_is_not_finite_stops_the_run_and_the_last_checkpoint_is_good(tmp_path: Path):
    run = tmp_path / "run"
    done = train(run, *ONE_STEP_EPOCHS, "--lr", "1e20")
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "loss is nan at step 3" in done.err
    assert "--lr" in done.err
    tensors, state = last(run)
    assert f"the last good checkpoint is step {state['step']}" in done.err
    assert finite(tensors)
    assert [record["step"] for record in log(run)] == [1, 2], "what is not finite is not logged"


def test_weights_that_are_not_finite_are_not_saved_even_where_the_loss_still_was(tmp_path: Path):
    """The loss of the step that ruins the weights is computed before it does."""
    run = tmp_path / "run"
    done = train(run, *ONE_STEP_EPOCHS, "--lr", "1e37", "--weight-decay", "1e9")
    assert done.code == 2
    assert "Traceback" not in done.err
    tensors, state = last(run)
    assert finite(tensors)
    assert state["step"] == 1
    assert "the last good checkpoint is step 1" in done.err


def test_a_run_that_diverges_before_its_first_checkpoint_says_that_nothing_was_saved(tmp_path: Path):
    done = train(tmp_path / "run", "--lr", "1e30", "--checkpoint-every", 6)
    assert done.code == 2
    assert "nothing was saved" in done.err


def backbone(run: Path, part: str) -> dict[str, bytes]:
    prefix = f"method.{part}.f."
    return bits({name.removeprefix(prefix): t for name, t in last(run)[0].items() if name.startswith(prefix)})


def test_init_from_starts_student_and_teacher_with_the_other_runs_encoder(unbroken: Path, tmp_path: Path):
    run, fresh = tmp_path / "run", tmp_path / "fresh"
    assert train(run, "--epochs", 0, "--init-from", unbroken, "--set", "dim=8").code == 0
    assert train(fresh, "--epochs", 0, "--set", "dim=8").code == 0
    encoder = backbone(unbroken, "student")
    assert len(encoder) > 10
    assert backbone(run, "student") == encoder
    assert backbone(run, "teacher") == encoder
    assert backbone(fresh, "student") != encoder
    heads = [name for name in last(run)[0] if name.startswith("method.student.g.")]
    assert all(bits(last(run)[0])[name] == bits(last(fresh)[0])[name] for name in heads), "the rest is new"


def test_init_from_refuses_an_encoder_that_does_not_fit_and_writes_nothing(unbroken: Path, tmp_path: Path):
    done = train(tmp_path / "run", "--init-from", unbroken, "--backbone", "resnet18")
    assert done.code == 2
    assert "Traceback" not in done.err
    assert str(unbroken) in done.err
    assert "resnet8" in done.err, "what it is, so that the user can type it"
    assert len(done.err) < 500, "two lines, not a list of all weights"
    assert list(tmp_path.iterdir()) == []


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(unbroken: Path, tmp_path: Path):
    again, other = tmp_path / "again", tmp_path / "other"
    assert train(again).code == 0
    assert_same_run(again, unbroken)
    assert train(other, "--seed", 1).code == 0
    assert all(a["loss"] != b["loss"] for a, b in zip(log(other), log(unbroken), strict=True))


@pytest.mark.parametrize(
    "old, new, says", [("topk: 5", "topq: 5", "did you mean 'topk'"), ("dim: 16", "dim: 8", "dim was 16 and is 8")]
)
def test_a_configuration_edited_by_hand_that_does_not_fit_is_a_clear_error(
    unbroken: Path, tmp_path: Path, old: str, new: str, says: str
):
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    text = (run / "config.yaml").read_text()
    assert text.count(old) == 1
    (run / "config.yaml").write_text(text.replace(old, new))
    done = resume(run)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert says in done.err


def edit_config(run: Path, name: str, value: str) -> None:
    text, count = re.subn(rf"(?m)^{name}: .*$", f"{name}: {value}", (run / "config.yaml").read_text())
    assert count == 1
    (run / "config.yaml").write_text(text)


@pytest.mark.parametrize(
    "name, value",
    [("lr", "0.123"), ("seed", "7"), ("weight_decay", "0.1"), ("crop_area", "0.9"), ("image_size", "9"),
     ("epochs", "8"), ("encode_size", "16"), ("time_budget", "9s"), ("data", "cifar10")],
)  # fmt: skip
def test_a_setting_edited_in_config_yaml_is_refused_by_name(unbroken: Path, tmp_path: Path, name: str, value: str):
    run = shutil.copytree(unbroken, tmp_path / "run")
    old = getattr(Run.open(run).config, name)
    edit_config(run, name, value)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(mixnn.UserError, match=rf"config.yaml was changed: {name} was {old} and is {value} now"):
        mixnn.pretrain(resume=run, verbose=Reporter(quiet=True), data_dir=str(tmp_path))
    assert {path: path.read_bytes() for path in before} == before


def test_settings_that_do_not_change_what_is_learned_may_be_edited(unbroken: Path, tmp_path: Path):
    run = shutil.copytree(unbroken, tmp_path / "run")
    for name, value in (("knn_every", "1"), ("checkpoint_every", "2"), ("resident", "'yes'"), ("device", "cpu")):
        edit_config(run, name, value)
    mixnn.pretrain(resume=run, verbose=Reporter(quiet=True))


def test_a_checkpoint_without_settings_is_resumed_as_before(unbroken: Path, tmp_path: Path):
    run = shutil.copytree(unbroken, tmp_path / "run")
    tensors, state = last(run)
    del state["settings"]
    checkpoint.save(run / "checkpoints", state["step"], tensors, state)
    edit_config(run, "weight_decay", "0.1")
    mixnn.pretrain(resume=run, verbose=Reporter(quiet=True))


def test_a_run_killed_after_it_was_made_longer_goes_on(unbroken: Path, tmp_path: Path):
    run = shutil.copytree(unbroken, tmp_path / "run")
    longer = command("pretrain", "--resume", run, "--epochs", 6, fault=signal_in_step, args=[STEPS + 1, signal.SIGKILL])
    assert longer.code == -signal.SIGKILL
    assert last(run)[1]["settings"]["epochs"] == 5, "saved before"
    done = resume(run)
    assert done.code == 0, done.err
    assert last(run)[1]["settings"]["epochs"] == 6


def trainer(method: str = "mnn", seed: int = 0) -> Trainer:
    options = methods.resolve_options(method, {"support_size": 64, "hidden": 32, "dim": 16}, {})
    network: dict[str, Any] = {"backbone": "resnet8", "bn_groups": 1, "image_size": 8, "options": options}
    settings: dict[str, Any] = {"epochs": 3, "batch_size": 16, "warmup_epochs": 0, "limit": 64, "knn_every": 0}
    config = Config("digits", method, seed=seed, **settings, **network)
    return Trainer(config, configured_dataset(config).load("pretrain", config.image_size), Reporter(quiet=True))


@pytest.mark.parametrize("part", ["method.student.f.conv1.weight", "method.student.h.0.weight", "generator"])
def test_the_seed_decides_the_weights_and_the_draws(part: str):
    first, again, other = (bits(trainer(seed=seed).state()[0])[part] for seed in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.parametrize("method", methods.METHODS)
def test_every_method_goes_on_with_the_same_bits_from_a_saved_state(tmp_path: Path, method: str):
    straight, broken = trainer(method), trainer(method)
    for _ in range(8):
        straight._one_step()
    for _ in range(6):
        broken._one_step()
    saved = checkpoint.load(checkpoint.save(tmp_path, 6, *broken.state()))
    resumed = trainer(method, seed=1)  # all that seed 1 made must be replaced
    resumed.load(*saved)
    for _ in range(2):
        resumed._one_step()
    assert bits(resumed.state()[0]) == bits(straight.state()[0])
    assert resumed.step.means() == straight.step.means()


class Noisy(nn.Module):
    """A network with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class NoisyLoss(mixnn.methods.MSF):
    """MSF, with a loss that draws random numbers itself."""

    def loss(self, d: Direction) -> Tensor:
        return super().loss(d) * torch.rand(())


NOISY: dict[str, Any] = {"backbone": "noisy", "method": "noisy", "epochs": 3, "verbose": Reporter(quiet=True)}
NOISY |= {"limit": 64, "batch_size": 16, "warmup_epochs": 0, "checkpoint_every": 1, "knn_every": 1, "device": "cpu"}
NOISY |= {"support_size": 32, "hidden": 8, "dim": 8}


def test_what_networks_and_losses_draw_is_repeated_and_leaves_the_callers_numbers_alone(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(mixnn.METHODS, "noisy", NoisyLoss)
    monkeypatch.setitem(mixnn.BACKBONES, "noisy", Noisy)
    torch.manual_seed(7)
    expected = torch.rand(5)
    torch.manual_seed(7)
    drawn = [torch.rand(1)]
    for name, seed in (("whole", 0), ("again", 0), ("broken", 0), ("other", 1)):
        mixnn.pretrain("digits", out=tmp_path / name, seed=seed, **NOISY)
        drawn.append(torch.rand(1))
    whole, again, broken, other = (bits(last(tmp_path / name)[0]) for name in ("whole", "again", "broken", "other"))
    assert whole == again == broken != other
    checkpoint.list_checkpoints(tmp_path / "broken" / "checkpoints")[0].unlink()
    assert last(tmp_path / "broken")[1]["step"] == 8
    mixnn.pretrain(resume=tmp_path / "broken", verbose=Reporter(quiet=True))
    measured = [mixnn.diagnose(tmp_path / "whole", batches=2, verbose=Reporter(quiet=True)) for _ in range(2)]
    assert measured[0] == measured[1], "diagnose repeats them too"
    assert torch.equal(torch.cat(drawn), expected)
    assert_same_run(tmp_path / "broken", tmp_path / "whole")
    found = mixnn.verify(tmp_path / "whole")
    assert [check["status"] for check in found["checks"] if check["name"] == "replay"] == ["ok"]


def test_each_step_and_each_process_draws_other_numbers():
    cpu = torch.device("cpu")
    drawn = []
    for numbers in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2**63 - 1, 10**9, 7)):
        with seeded_generators(cpu, *numbers):
            drawn.append(torch.rand(()).item())
        with seeded_generators(cpu, *numbers):
            assert torch.rand(()).item() == drawn[-1]
    assert len(set(drawn)) == 5


def test_damaged_records_do_not_stop_a_run_and_lose_nothing_else(unbroken: Path, tmp_path: Path):
    run = shutil.copytree(unbroken, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"loss", b"lo\xffs")
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    (run / "environment.json").write_text("{")
    (run / "command.txt").unlink()
    done = command("pretrain", "--resume", run, "--epochs", 6)
    assert done.code == 0, done.err
    assert [record["epoch"] for record in log(run)] == [1, 3, 4, 5, 6]
    assert f"1 line of {run / 'metrics.jsonl'} cannot be read and is left out" in done.err
    (run / "results.json").write_bytes(b'{"knn": \xff')
    done = command("evaluate", run, "--protocol", "knn", "--save", tmp_path / "summary.json")
    assert done.code == 0, done.err
    assert "results.json was damaged" in done.err
    assert "command.txt" in done.err
    assert json.loads((tmp_path / "summary.json").read_text())["results"]["knn"]
    assert (run / "results.json.damaged").read_bytes() == b'{"knn": \xff'


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path):
    images, run = tmp_path / "images", tmp_path / "run"
    images.mkdir()
    for i in range(16):
        Image.new("RGB", (8, 8), (16 * i, 255 - 16 * i, 7 * i)).save(images / f"{i}.png")
    done = command("pretrain", images, *TINY, "--out", run, fault=signal_in_step, args=[3, signal.SIGTERM])
    assert done.code == 143, done.err
    (images / "3.png").unlink()
    done = resume(run)
    assert done.code == 2
    assert "15 images" in done.err
    assert "16 then" in done.err
    assert last(run)[1]["step"] == 3


def test_a_relative_folder_of_images_is_found_again_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "images").mkdir()
    for i in range(8):
        Image.new("RGB", (8, 8), (32 * i, 0, 0)).save(tmp_path / "images" / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    done = command("pretrain", "images", *TINY, "--out", "run", fault=signal_in_step, args=[2, signal.SIGTERM])
    assert done.code == 143, done.err
    monkeypatch.chdir(tmp_path.parent)
    done = resume(tmp_path / "run")
    assert done.code == 0, done.err


def use_stored_images(folder: Path, cut_in: int = 0) -> None:
    """Images are too many for memory. In the STEPth step, the file that holds them is cut."""
    os.environ["MIXNN_CACHE"] = str(folder)
    cache._available_memory = lambda: 0.0
    original = Trainer._one_step

    def one_step(self: Trainer) -> None:
        assert isinstance(self.images.images, StoredImages)
        if self.done == cut_in - 1:
            (path,) = folder.glob("*/images.npy")
            os.truncate(path, 100)
        original(self)

    Trainer._one_step = one_step  # type: ignore[method-assign]


def test_images_too_many_for_memory_give_the_same_bits_and_a_cut_file_is_a_clear_error(tmp_path: Path):
    images, rng = tmp_path / "images", np.random.default_rng(0)
    images.mkdir()
    for i in range(32):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(images / f"{i}.png")
    words = ["pretrain", images, *TINY, "--init-from", "none", "--checkpoint-every", "1", "--out"]
    assert command(*words, tmp_path / "memory").code == 0
    done = command(*words, tmp_path / "stored", fault=use_stored_images, args=[tmp_path / "cache"])
    assert done.code == 0, done.err
    assert_same_run(tmp_path / "stored", tmp_path / "memory")
    done = command(*words, tmp_path / "cut", fault=use_stored_images, args=[tmp_path / "cache", 6])
    assert done.code == 2, done.err
    assert "images.npy in the image cache can no longer be read (it became shorter)" in done.err
    assert "continue a training run with --resume" in done.err
    assert last(tmp_path / "cut")[1]["step"] == 4
    done = command("pretrain", "--resume", tmp_path / "cut", fault=use_stored_images, args=[tmp_path / "cache"])
    assert done.code == 0, done.err
    assert "in the image cache is damaged" in done.err
    assert_same_run(tmp_path / "cut", tmp_path / "memory")
