"""A run on two or four processes is the run on one: the same losses, weights, statistics and support sets."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mixnn import cli, dist, methods
from mixnn.augment import View, strong, weak
from mixnn.config import Config, UserError
from mixnn.data import ImageSet, to_folder
from mixnn.data.dataset import NamedDataset
from mixnn.evaluation import features
from mixnn.nn.batch_norm import SplitBatchNorm
from mixnn.nn.encoder import set_compute_dtype
from mixnn.nn.resnet import ResNet
from mixnn.runs import Run, encoder
from mixnn.training.judgement import Judge
from mixnn.training.optimizers import make_optimizer, sgd
from mixnn.training.step import Step
from mixnn.training.trainer import Trainer
from tests.clock import Clock, use_clock
from tests.command import FORKS, Done, command
from tests.command import _run as start
from tests.methods.test_contract import CASES as ALL_CASES
from tests.methods.test_contract import NUM_IMAGES, SMALL, known
from tests.training.test_resume import last, log, signal_in_step

B, GROUPS = 16, 8  # of groups, each of up to eight processes needs one
RATES = (0.0, 0.5, 1.0)  # of the backbone in each step: the heads learn alone first
CONFIG = Config(heads_first=0.4, weight_decay=1e-3)
SIZES = (2, 4)
KINDS = ("whole", "partial", "streamed")
KINDS_OF = {2: KINDS, 4: ("partial",)}  # number of processes -> kinds; four make fewer rows each, and nothing else
VARIANTS = ("default", "asymmetric", "negatives=all", "prev_epoch", "mixed=student", "select=random", "lam of a sample")
CASES = {case: ALL_CASES[case] for case in ALL_CASES if case.endswith(VARIANTS)}  # those that treat a batch otherwise
DIGITS = shlex.split(
    "pretrain digits --limit 64 --batch-size 16 --bn-groups 4 --epochs 3 --warmup-epochs 1 --knn-every 1 "
    "--checkpoint-every 1 --lr 0.02 --set support_size=32 --set hidden=32 --set dim=16"
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def enter(rank: int, size: int, port: int) -> None:
    """What torchrun tells a process. It does not wait for others as long as usual: these run on the same machine."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.HEARTBEAT_INTERVAL, dist.HEARTBEAT_TIMEOUT, cli.WAIT_FOR_FIRST = 0.2, 2.0, 0.0


# Steps, in float64


class Backbone(nn.Module):
    num_features = 16

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 16, 3, bias=False), SplitBatchNorm(16, GROUPS // dist.size())

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).relu().mean((2, 3))


def images_on(device: str) -> ImageSet:
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (NUM_IMAGES, 3, 8, 8), dtype=torch.uint8, generator=rng)
    return ImageSet(pixels, torch.arange(NUM_IMAGES) % 3, None, list("abc"), (0.5,) * 3, (0.25,) * 3, True).to(device)


def after_steps(case: str, kind: str = "whole", device: str = "cpu") -> dict[str, Tensor]:
    """What a few steps logged, and all that the method holds then. Mean and std in float64 make the views float64.

    Kinds differ in what a process makes: whole views, the rows it needs (partial), or these of images that are read one
    step ahead (streamed).
    """
    name, options = CASES[case]
    torch.manual_seed(0)
    options = known(name, SMALL) | options
    method = methods.build(name, Backbone(), options, num_classes=3, num_images=NUM_IMAGES)
    method.to(device, torch.float64)
    dist.set_data_parallel(method, dist.run_group())
    optimizer = make_optimizer(method.named_parameters(), CONFIG)
    views = [View(8, area=(1.0, 1.0), ratio=(1.0, 1.0), flip=flip) for flip in (0.5, 0.9, 0.3)[: len(method.views)]]
    images, is_streamed = images_on("cpu" if kind == "streamed" else device), kind == "streamed"
    step = Step(method, images, views, B, optimizer, resident=not is_streamed, group=dist.run_group())
    step.mean, step.std = step.mean.double(), step.std.double()
    step.is_partial = kind != "whole" and dist.size() > 1
    rng = torch.Generator(device).manual_seed(1)
    batches = [torch.randperm(NUM_IMAGES, generator=torch.Generator().manual_seed(i))[:B] for i in range(len(RATES))]
    for index, next_index, rate in zip(batches, [*batches[1:], None], RATES, strict=True):
        step(index.to(images.images.device), 0.05, rng, next_index, rate)
    dist.average_statistics(method, dist.run_group())
    return {k: v.cpu().clone() for k, v in ({"logged": step.sums} | method.state_dict()).items()}


def all_cases(rank: int, size: int, port: int, folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    enter(rank, size, port)
    dist.init(torch.device("cpu"))  # gloo carries CUDA's tensors too, and lets processes share a device
    assert (dist.rank(), dist.size()) == (rank, size)
    held = {
        f"{kind}/{case}/{name}": t
        for kind in KINDS_OF.get(size, KINDS)
        for case in CASES
        for name, t in after_steps(case, kind, device).items()
    }
    save_file(held, folder / f"{size}-{rank}.safetensors")
    dist.shutdown()


def in_processes(size: int, folder: Path, device: str = "cpu") -> list[dict[str, Tensor]]:
    """What each of so many processes ends with."""
    port = free_port()
    processes = [FORKS.Process(target=all_cases, args=(rank, size, port, folder, device)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * size
    return [load_file(folder / f"{size}-{rank}.safetensors") for rank in range(size)]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("together")
    return {size: in_processes(size, folder) for size in SIZES}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_two_and_four_processes_step_as_one(case: str, kind: str, together: dict[int, list[dict[str, Tensor]]]):
    alone = after_steps(case)
    for size in SIZES:
        if kind in KINDS_OF[size]:
            assert_steps(together[size][0], f"{kind}/{case}", alone)


def assert_steps(found: dict[str, Tensor], case: str, alone: dict[str, Tensor]) -> None:
    assert alone["logged"].isfinite().all()
    for name, want in alone.items():
        close = 1e-6 if "running" in name else 1e-9  # the shares of groups in running statistics are float32
        torch.testing.assert_close(found[f"{case}/{name}"], want, rtol=close, atol=close / 10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_two_processes_on_a_gpu_step_as_one(tmp_path: Path):
    found = in_processes(2, tmp_path, "cuda")[0]
    for case in CASES:
        for kind in KINDS:
            assert_steps(found, f"{kind}/{case}", after_steps(case, device="cuda"))


def nccl_steps(mode: str, dtype: torch.dtype, folder: Path) -> None:
    """Steps of MNN on a GPU, without a process group and with one NCCL process; always with the same convolutions."""
    torch.backends.cudnn.deterministic = True
    torch_dist.init_process_group("cpu:gloo,cuda:nccl", store=torch_dist.HashStore(), rank=0, world_size=1)
    for name, group in (("without", None), ("with", torch_dist.group.WORLD)):
        torch.manual_seed(0)
        method = methods.build("mnn", ResNet("resnet18", 8, GROUPS), SMALL)
        method.to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
        set_compute_dtype(method, dtype)
        dist.set_data_parallel(method, group)
        optimizer = make_optimizer(method.named_parameters(), CONFIG)
        with patch("mixnn.training.step.has_grouped_convolutions", return_value=True):  # cuDNN tries no others
            step = Step(method, images_on("cuda"), [strong(8), weak(8)], B, optimizer, mode, group=group)
        rng, losses = torch.Generator("cuda").manual_seed(1), []
        for i, rate in enumerate((0.0, 0.0, *RATES[1:], 1.0, 1.0)):
            step.reset()
            step(torch.arange(i, i + B, device="cuda") % NUM_IMAGES, 0.02, rng, backbone=rate)
            losses.append(step.means()["loss"])
        save_file({"losses": torch.tensor(losses)}, folder / f"{name}.safetensors")
        del step, method, optimizer
    dist.shutdown()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["eager", "recorded"])
def test_a_step_with_nccl_is_the_step_without(mode: str, dtype: torch.dtype, tmp_path: Path):
    process = FORKS.Process(target=nccl_steps, args=(mode, dtype, tmp_path))
    process.start()
    process.join(300)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0
    without, found = (load_file(tmp_path / f"{name}.safetensors") for name in ("without", "with"))
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found["losses"], without["losses"], rtol=close, atol=close)
    assert found["losses"].isfinite().all()


@pytest.mark.parametrize("size", SIZES)
def test_all_processes_hold_the_same_bits(size: int, together: dict[int, list[dict[str, Tensor]]]):
    first, *others = together[size]
    for other in others:
        assert [name for name, t in first.items() if not torch.equal(t, other[name])] == []


# Runs, through the command


def run_together(*words: object, fault: Callable[..., None] = enter, size: int = 2, port: int = 0) -> list[Done]:
    """The command in several processes; the fault is told their rank, number and port."""
    port = port or free_port()
    with ThreadPoolExecutor(size) as pool:
        started = [pool.submit(command, *words, fault=fault, args=(rank, size, port)) for rank in range(size)]
        return [each.result() for each in started]


def assert_close(run: Path, other: Path, close: float = 1e-3) -> None:
    """The same log and state but for rounding.

    Four processes round differently: other kernels run for batches of four images. One activation that falls on the
    other side of a ReLU's zero changes a gradient by up to a percent here. The steps above compare in float64.
    """
    for record, want in zip(log(run), log(other), strict=True):
        assert record.keys() == want.keys()
        for name in ("epoch", "step", "loss", "d_positive", "d_neighbors", "spread", "norm_ratio"):
            assert record[name] == pytest.approx(want[name], rel=close), name
        assert abs(record.get("knn", 0) - want.get("knn", 0)) <= 200 / 64  # of 64 images two may lie on the fence
    tensors, expected = last(run)[0], last(other)[0]
    assert torch.equal(tensors["order"], expected["order"])
    assert torch.equal(tensors["generator"], expected["generator"])
    for name, want in expected.items():
        if name.endswith(("weight", "running_mean", "running_var", "z_QD")):
            assert (tensors[name] - want).norm() <= close * want.norm(), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    assert command(*DIGITS, "--out", out).code == 0
    return out


@pytest.mark.parametrize(("size", "resident"), [(2, "yes"), (4, "no")])
def test_a_run_on_several_processes_is_the_run_on_one(tmp_path: Path, alone: Path, size: int, resident: str):
    out = tmp_path / "run"
    first, *others = run_together(*DIGITS, "--out", out, "--resident", resident, size=size)
    assert (first.code, first.out) == (0, f"{out}\n"), first.err
    assert all(other == (0, "", "") for other in others)  # one speaks for all
    assert first.err.count("ready after") == 1
    assert f'"processes": {size}' in (out / "environment.json").read_text()
    assert_close(out, alone, 1e-3 if size == 2 else 3e-2)


def judge_as(retrieval: float) -> None:
    """Encoders find this share of views, so that the heads learn alone for 40% of the run at 0.75, and for 20% at 0."""
    measure = Judge.measure
    Judge.measure = lambda *args: measure(*args) | {"view_retrieval": retrieval}  # type: ignore[method-assign]


def enter_and_judge_otherwise(rank: int, size: int, port: int) -> None:
    """As if the processes' encoders were rounded differently."""
    enter(rank, size, port)
    judge_as(0.0 if rank else 0.75)


def test_the_heads_of_a_folders_run_learn_alone_on_two_processes_as_on_one(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3), dtype=np.uint8)
    torch.manual_seed(0)
    start = ResNet("resnet8", 8, 1).state_dict()
    save_file(start, tmp_path / "start.safetensors")
    words = ["pretrain", to_folder(pixels, tmp_path / "photos"), "--init-from", tmp_path / "start.safetensors"]
    words += shlex.split("--image-size 8 --encode-size 8 --batch-size 8 --bn-groups 2 --epochs 4 --heads-first auto")
    words += shlex.split("--lr 0.02 --set support_size=16 --set hidden=16 --set dim=8")
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert command(*words, "--out", alone, fault=judge_as, args=(0.75,)).code == 0
    done = run_together(*words, "--out", together, fault=enter_and_judge_otherwise)
    assert [each.code for each in done] == [0, 0], done[0].err
    assert_close(together, alone)
    points = [Run.open(run).judgement()["points"] for run in (alone, together)]
    assert [[point["step"] for point in each] for each in points] == [[6, 8], [6, 8]]  # of 8 steps, 4 without backbone
    assert not torch.equal(last(alone)[0]["method.student.f.conv1.weight"], start["conv1.weight"])


def enter_and_stop(rank: int, size: int, port: int) -> None:
    """The second process is sent SIGTERM in its sixth step."""
    enter(rank, size, port)
    if rank:
        signal_in_step(6, signal.SIGTERM)


def test_a_signal_to_one_stops_both_and_one_process_can_go_on(tmp_path: Path, alone: Path):
    out = tmp_path / "run"
    done = run_together(*DIGITS, "--out", out, fault=enter_and_stop)
    assert [each.code for each in done] == [128 + signal.SIGTERM] * 2
    assert "stopped and saved at step 6" in done[0].err
    assert done[1].err == ""
    assert last(out)[1]["step"] == 6
    assert command("pretrain", "--resume", out).code == 0
    assert_close(out, alone)


def test_two_processes_go_on_where_one_was_stopped(tmp_path: Path, alone: Path):
    out = tmp_path / "run"
    assert command(*DIGITS, "--out", out, fault=signal_in_step, args=(7, signal.SIGTERM)).code == 128 + signal.SIGTERM
    assert [each.code for each in run_together("pretrain", "--resume", out)] == [0, 0]
    assert_close(out, alone)


def enter_at_another_time(rank: int, size: int, port: int) -> None:
    """The second process has no time left from the start, by its own clock."""
    enter(rank, size, port)
    use_clock(pytest.MonkeyPatch(), Clock(), lambda _: 1.0 if rank == 0 else 1000.0)


def test_the_main_process_decides_for_all_when_the_time_is_up(tmp_path: Path):
    words = shlex.split("pretrain digits --limit 64 --batch-size 16 --bn-groups 4 --knn-every 0 --time-budget 1m")
    out = tmp_path / "run"
    words += shlex.split("--backbone resnet8 --set support_size=32 --set hidden=16 --set dim=8")
    done = run_together(*words, "--out", out, fault=enter_at_another_time)
    assert [each.code for each in done] == [0, 0], done[0].err + done[1].err
    state = last(out)[1]
    assert 40 < state["step"] <= 60
    assert state["time"]["over"]
    assert Run.open(out).config.epochs == state["step"] // 4


def enter_without_disk(rank: int, size: int, port: int) -> None:
    enter(rank, size, port)
    if rank == 0:
        Run.save_checkpoint = full  # type: ignore[method-assign, assignment]


def full(*_: Any) -> None:
    raise UserError("the disk is full")


def enter_and_fail(rank: int, size: int, port: int) -> None:
    """The second process cannot make its first step."""
    enter(rank, size, port)
    if rank:
        Trainer._one_step = full  # type: ignore[method-assign]


def enter_and_stop_moving(rank: int, size: int, port: int) -> None:
    """The second process is stopped in its sixth step, but keeps its connections."""
    enter(rank, size, port)
    os.environ["MIXNN_PEER_TIMEOUT"] = "2s"
    dist.GRACE = 1.0
    if rank:
        signal_in_step(6, signal.SIGSTOP)


def test_the_reason_of_any_process_is_what_all_say(tmp_path: Path):
    done = run_together(*DIGITS, "--out", tmp_path / "run", fault=enter_and_fail)
    assert [each.code for each in done] == [2, 2]
    assert done[0].err.endswith("mixnn: process 1 of 2 has ended: the disk is full\n")
    assert done[1].err == "mixnn: the disk is full\n"


def test_a_process_that_hangs_ends_the_other(tmp_path: Path):
    port, words = free_port(), [*DIGITS, "--out", str(tmp_path / "run")]
    second = FORKS.Process(target=start, args=(words, enter_and_stop_moving, (1, 2, port), tmp_path, os.getcwd()))
    second.start()
    first = command(*words, fault=enter_and_stop_moving, args=(0, 2, port))
    second.kill()
    second.join()
    assert first.code == 2
    assert first.err.endswith(
        "mixnn: no heartbeat from process 1 of 2: it was probably killed, or its machine was lost\n"
    )


def test_what_one_process_cannot_do_ends_all_without_a_traceback(tmp_path: Path):
    done = run_together(*DIGITS, "--out", tmp_path / "run", fault=enter_without_disk)
    assert [each.code for each in done] == [2, 2]
    assert "mixnn: the disk is full" in done[0].err
    assert done[1].err == "mixnn: process 0 of 2 has ended: the disk is full\n"


# Other commands


def test_an_evaluation_on_several_processes_is_the_one_on_one(tmp_path: Path, alone: Path):
    shutil.copytree(alone, tmp_path / "run")
    words = ["evaluate", tmp_path / "run", "--epochs", 2, "--json"]
    expected = json.loads(command(*words, fault=small_chunks).out)
    first, *others = run_together(*words, fault=enter_with_small_chunks, size=3)
    assert first.code == 0, first.err
    found = json.loads(first.out)
    assert all(other == (0, "", "") for other in others)
    assert found["knn"]["weighted"] == expected["knn"]["weighted"]
    assert found["knn"]["majority"] == expected["knn"]["majority"]
    assert found["linear"]["curve"] == expected["linear"]["curve"]


def small_chunks() -> None:
    """Five chunks, so that one of three processes has fewer."""
    features.CHUNK = 13


def enter_with_small_chunks(rank: int, size: int, port: int) -> None:
    enter(rank, size, port)
    small_chunks()


def test_vectors_from_several_processes_are_those_from_one(tmp_path: Path, alone: Path):
    shutil.copytree(alone, tmp_path / "run")
    alone_file, file = tmp_path / "alone.npz", tmp_path / "together.npz"
    assert command("embed", tmp_path / "run", "--out", alone_file, fault=small_batches).code == 0
    shutil.rmtree(tmp_path / "run" / "embeddings")
    done = run_together("embed", tmp_path / "run", "--out", file, fault=enter_with_small_batches)
    assert [each.code for each in done] == [0, 0], done[0].err
    assert (done[1].out, done[1].err) == ("", "")
    with np.load(alone_file) as one, np.load(file) as both:
        assert one["file"].tolist() == both["file"].tolist()
        assert np.array_equal(one["vectors"], both["vectors"])
    again = run_together("embed", tmp_path / "run", "--out", tmp_path / "cached.npz")  # nothing is left to encode
    assert [each.code for each in again] == [0, 0], again[0].err


def make_file(rank: int, size: int, port: int, path: Path) -> None:
    enter(rank, size, port)
    dist.init(torch.device("cpu"))
    with dist.main_process_first():
        if rank:
            assert path.read_text() == "made"
        else:
            path.write_text("made")
    dist.shutdown()


def test_what_the_main_process_makes_first_is_there_for_the_others(tmp_path: Path):
    port = free_port()
    processes = [FORKS.Process(target=make_file, args=(rank, 3, port, tmp_path / "file")) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3


def small_batches() -> None:
    encoder.BATCH = 100


def enter_with_small_batches(rank: int, size: int, port: int) -> None:
    enter(rank, size, port)
    small_batches()


# torchrun

FAILS = """
from mixnn.config import UserError
from mixnn.training.trainer import Trainer

def one_step(self):
    raise UserError("the coffee is cold")

Trainer._one_step = one_step
"""


def enter_and_die(rank: int, size: int, port: int) -> None:
    """The second process is killed in its sixth step. Torchrun serves the rendezvous, and goes on to do so."""
    enter(rank, size, port)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    if rank:
        signal_in_step(6, signal.SIGKILL)


def enter_again(rank: int, size: int, port: int) -> None:
    enter(rank, size, port)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}


def test_what_torchrun_starts_again_goes_on(tmp_path: Path, alone: Path):
    """As torchrun does it; `make chaos` uses torchrun itself, which takes longer."""
    out, port = tmp_path / "run", free_port()
    store = torch_dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    died = run_together(*DIGITS, "--out", out, fault=enter_and_die, port=port)
    assert [each.code for each in died] == [2, -signal.SIGKILL]
    done = run_together(*DIGITS, "--out", out, fault=enter_again, port=port)
    del store
    assert [each.code for each in done] == [0, 0], done[0].err
    assert "resuming at step 4 of 12" in done[0].err  # the last checkpoint before the sixth step
    assert_close(out, alone)


def test_torchrun_reports_the_reason(tmp_path: Path):
    code = tmp_path / "fails.py"
    code.write_text(FAILS)
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["--monitor-interval=0.2", "-m", "mixnn", "--import", code, *DIGITS, "--out", tmp_path / "run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*agent, *map(str, words)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 1
    assert "mixnn: the coffee is cold" in done.stderr
    root_cause = done.stderr[done.stderr.index("Root Cause") :]
    assert "the coffee is cold" in root_cause


def restarted(number: str) -> None:
    os.environ["SLURM_RESTART_COUNT"] = number


def test_a_command_that_slurm_starts_again_continues_its_own_run_only(tmp_path: Path, alone: Path):
    out = tmp_path / "run"
    words = [*DIGITS, "--out", out]
    assert command(*words, fault=signal_in_step, args=(7, signal.SIGTERM)).code == 128 + signal.SIGTERM
    other = command(*words, "--seed", 1, fault=restarted, args=("1",))
    assert (other.code, "exists: use another --out" in other.err) == (2, True)
    assert "exists: use another --out" in command(*words, fault=restarted, args=("0",)).err
    assert command(*words, fault=restarted, args=("1",)).code == 0
    assert_close(out, alone)


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path, alone: Path):
    out = tmp_path / "run"
    assert command(*DIGITS, "--out", out, fault=signal_in_step, args=(1, signal.SIGKILL)).code == -signal.SIGKILL
    assert command(*DIGITS, "--out", out, fault=restarted, args=("2",)).code == 0
    assert_close(out, alone)


def test_a_command_that_is_started_again_must_name_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    done = command(*DIGITS, fault=restarted, args=("1",))
    assert (done.code, "use --out FOLDER" in done.err) == (2, True)


# Processes that do not come


def join(rank: int, size: int, port: int, limit: str, together: Any, says: Any) -> None:
    enter(rank, size, port)
    os.environ["MIXNN_JOIN_TIMEOUT"] = limit
    together.wait(60)
    try:
        dist.init(torch.device("cpu"))
    except UserError as error:
        says.send((rank, str(error)))


@pytest.mark.parametrize(
    ("here", "missing", "limit"),
    [((0, 2), "process 1", "3s"), ((0,), "processes 1, 2", "0.5s"), ((1,), "process 0", "0.5s")],
)
def test_processes_that_do_not_come_are_named_after_a_limit(here: tuple[int, ...], missing: str, limit: str):
    port, together, (heard, says) = free_port(), FORKS.Barrier(len(here)), FORKS.Pipe(duplex=False)
    processes = [FORKS.Process(target=join, args=(rank, 3, port, limit, together, says)) for rank in here]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * len(here)
    found = dict(heard.recv() for _ in here)
    assert found.keys() == {*here}
    # the others may find that the first one, which holds the list of those who came, has given up a moment earlier
    first = found.pop(min(here))
    assert first.startswith(f"{missing} of 3 did not join this run within {limit}")
    assert "set MIXNN_JOIN_TIMEOUT" in first
    assert all(f"did not join this run within {limit}" in text for text in found.values())


def test_a_limit_that_is_not_a_duration_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MIXNN_JOIN_TIMEOUT", "soon")
    with pytest.raises(UserError, match="MIXNN_JOIN_TIMEOUT=soon is not a duration: write it as 90s, 6m or 1h30m"):
        dist.init(torch.device("cpu"))


def enter_and_die_before_reading(rank: int, size: int, port: int) -> None:
    """The second process is killed while it reads its images; both have joined by then."""
    enter(rank, size, port)
    if rank:
        NamedDataset._load = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]


def test_a_process_killed_while_it_reads_images_ends_the_other(tmp_path: Path):
    first, second = run_together(*DIGITS, "--out", tmp_path / "run", fault=enter_and_die_before_reading)
    assert second.code == -signal.SIGKILL
    assert first.code == 2
    assert first.err == "mixnn: no heartbeat from process 1 of 2: it was probably killed, or its machine was lost\n"
    assert not (tmp_path / "run").exists()


# Mistakes


def enter_elsewhere(rank: int, size: int, port: int) -> None:
    """Each process has a folder of its own."""
    enter(rank, size, port)
    os.chdir(str(rank))


@pytest.mark.parametrize("count", [16, 17], ids=["other pictures", "one picture more"])
def test_processes_with_different_images_all_stop_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
):
    for rank, num in enumerate((16, count)):
        pixels = np.random.default_rng(rank).integers(0, 256, (num, 8, 8, 3), dtype=np.uint8)
        to_folder(pixels, tmp_path / str(rank) / "photos")
    monkeypatch.chdir(tmp_path)
    words = "pretrain photos --backbone resnet8 --image-size 8 --bn-groups 2 --batch-size 8 --epochs 2 --init-from none"
    done = run_together(*words.split(), "--out", tmp_path / "run", fault=enter_elsewhere)
    assert [each.code for each in done] == [2, 2]
    said = "the processes of this run have different images: process 0 has 16 images with digest"
    assert all(said in each.err and f"process 1 has {count} images" in each.err for each in done)
    assert all("Traceback" not in each.err for each in done)
    assert not (tmp_path / "run").exists()


def enter_with_other_pixels(rank: int, size: int, port: int) -> None:
    enter(rank, size, port)
    if rank:
        original = NamedDataset._load

        def damaged(self: NamedDataset, split: str, size: int) -> ImageSet:
            images = original(self, split, size)
            images.images[:, 0, 4, 4] ^= 1
            return images

        NamedDataset._load = damaged  # type: ignore[method-assign]


def test_other_pixels_of_a_named_data_set_are_noticed(tmp_path: Path):
    done = run_together(*DIGITS, "--out", tmp_path / "run", fault=enter_with_other_pixels)
    assert [each.code for each in done] == [2, 2]
    assert "the processes of this run have different images" in done[0].err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["pretrain", "digits", "--bn-groups", "3", "--batch-size", "48"], "start 1 or 3 of them"),
        (
            ["pretrain", "digits", "--bn-groups", "2", "--mode", "compiled"],
            "mode=compiled works with one process only: use another",
        ),
        (["methods"], "only pretrain, evaluate, embed run on several processes: run mixnn methods without torchrun"),
    ],
)
def test_what_cannot_be_shared_is_refused_once(words: list[str], says: str):
    done = command(*words, fault=enter, args=(0, 2, 1))
    assert done.code == 2
    assert says in done.err
    assert len(done.err.splitlines()) == 1


def half_told(size: str) -> None:
    os.environ["WORLD_SIZE"] = size
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


@pytest.mark.parametrize(("size", "says"), [("2", "the process group cannot be joined"), ("two", "not a number of")])
def test_a_number_of_processes_without_the_rest_is_refused(size: str, says: str, tmp_path: Path):
    done = command(*DIGITS, "--out", tmp_path / "run", fault=half_told, args=(size,))
    assert done.code == 2
    assert says in done.err
    assert "unset" in done.err
    assert not (tmp_path / "run").exists()


# What is sent


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    """A process group of one, in which everything is sent as in a larger one."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    yield torch_dist.group.WORLD
    torch_dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Tensor]]:
    """What all processes together put into each message, in the order of the messages."""
    messages: list[tuple[str, Tensor]] = []
    gather, reduce = dist._all_gather, torch_dist.all_reduce
    monkeypatch.setattr(
        dist, "_all_gather", lambda out, x, **kw: messages.append(("gather", out)) or gather(out, x, **kw)
    )
    monkeypatch.setattr(torch_dist, "all_reduce", lambda x, **kw: messages.append(("sum", x)) or reduce(x, **kw))
    return messages


@pytest.mark.parametrize("name", methods.METHODS)
def test_a_step_sends_features_and_gradients_and_no_images(
    name: str, one_process: ProcessGroup, sent: list[tuple[str, Tensor]]
):
    method = methods.build(name, Backbone(), known(name, SMALL), num_classes=3, num_images=NUM_IMAGES)
    dist.set_data_parallel(method, one_process)
    parameters = [p for p in method.parameters() if p.requires_grad]
    optimizer = sgd([{"params": parameters, "weight_decay": 0.0}], 0.9)
    step = Step(method, images_on("cpu"), [weak(8) for _ in method.views], B, optimizer, group=one_process)
    step.is_partial = True
    step(torch.arange(B), 0.05, torch.Generator().manual_seed(0))
    students, teachers = method.encoded_views(method.options)
    features = [(len(views) * B, Backbone.num_features) for views in (teachers, students) if views]
    assert [tuple(x.shape) for kind, x in sent if kind == "gather"] == features
    assert [kind for kind, _ in sent] == ["gather"] * len(features) + ["sum"] * 2  # heads, then backbone
    assert sum(x.numel() for kind, x in sent if kind == "sum") == sum(p.numel() for p in parameters)


def test_gradients_are_sent_in_one_order_whichever_is_ready_first(
    one_process: ProcessGroup, sent: list[tuple[str, Tensor]]
):
    f, g = nn.Linear(4, 4), nn.Linear(4, 2)
    network, x = nn.Sequential(f, g), torch.randn(3, 4)
    gradient_sum = dist.GradientSum(network, f, one_process, bucket_bytes=16 * 4)
    expected = torch.autograd.grad(network(x).sum(), [*network.parameters()])
    for first, second in ((f, g), (g, f)):
        sent.clear()
        for layer in (first, second):
            for p, gradient in zip(network.parameters(), expected, strict=True):
                if any(p is q for q in layer.parameters()):
                    (p * gradient).sum().backward()
        assert len(sent) == 3  # all of them before the end
        gradient_sum.finish()
        assert [x.numel() for _, x in sent] == [2 + 8, 4, 16]  # biases first; a bucket holds 16 numbers
        for p, gradient in zip(network.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, gradient)
            p.grad = None


def test_a_parameter_without_gradient_stays_without(one_process: ProcessGroup):
    f, g = nn.Linear(4, 4), nn.Linear(4, 2)
    gradient_sum = dist.GradientSum(nn.Sequential(f, g), f, one_process)
    for _ in range(2):
        g.bias.sum().backward()
        gradient_sum.finish()
        assert g.bias.grad is not None
        assert torch.equal(g.bias.grad, torch.ones(2))
        assert [p.grad for p in (*f.parameters(), g.weight)] == [None] * 3
        g.bias.grad = None


@pytest.mark.parametrize("frozen", [0, 1])
def test_gradients_of_what_is_frozen_are_not_sent(
    frozen: int, one_process: ProcessGroup, sent: list[tuple[str, Tensor]]
):
    network, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(3, 4)
    gradient_sum, sizes = dist.GradientSum(network, network[0], one_process), [20, 10]
    for learns in (True, False, True):
        sent.clear()
        network[frozen].requires_grad_(learns)
        network(x).sum().backward()
        expected = [sizes[i] for i in (1, 0) if learns or i != frozen]
        assert [x.numel() for _, x in sent] == expected  # all of them before the end
        gradient_sum.finish()
        assert len(sent) == len(expected)
        assert [p.grad is not None for p in network[frozen].parameters()] == [learns] * 2
        assert all(p.grad is not None for p in network[1 - frozen].parameters())
        network.zero_grad()


def test_gradients_keep_the_memory_order_of_their_parameters(one_process: ProcessGroup):
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    gradient_sum = dist.GradientSum(conv, conv, one_process)
    conv(torch.randn(2, 3, 8, 8)).square().sum().backward()
    before = conv.weight.grad.clone()
    gradient_sum.finish()
    assert torch.equal(conv.weight.grad, before)
    assert conv.weight.grad.stride() == conv.weight.stride()


def test_functions_and_methods_of_tensors_take_a_partial_batch():
    x = torch.randn(6, 3, 2, 2)
    part: Any = dist.PartialBatch(lambda rows: x[rows], x.shape, x.device)
    assert torch.equal(part[torch.tensor([4, 1])], x[[4, 1]])
    assert torch.equal(part.flip(0), x.flip(0))
    assert torch.equal(x * part, x * x)
    assert torch.equal(torch.cat([part, part]), torch.cat([x, x]))
    assert (part.shape, len(part), part.dtype) == (x.shape, 6, x.dtype)


def test_alone_nothing_is_dealt_or_gathered():
    x: Any = torch.randn(4, 3)
    assert dist.scatter_batch(x, dist.run_group()) is x
    assert dist.gather_batch(x, dist.run_group()) is x
    assert dist.all_max(3) == 3
    assert dist.broadcast("a") == "a"


def test_functions_of_torch_do_not_hold_the_process_group():
    """Those of torch.distributed.nn would keep it until exit, and its threads may then abort the process."""
    code = f"""
import torch, mixnn.dist
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
functions = [f for f in vars(torch.distributed.nn.functional).values() if hasattr(f, "__defaults__")]
defaults = [value for f in functions for value in f.__defaults__ or ()]
torch.distributed.destroy_process_group()
assert defaults and not any(isinstance(value, torch.distributed.ProcessGroup) for value in defaults)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
