"""make chaos: breaks tiny runs in many ways and checks that nothing is lost.

    python -m tests.chaos [--faults N] [--seed S] [--only KIND] [--verbose]

Each fault hits a command that runs in a process of its own. Then the command is repeated, or the run is resumed, and
what it ends with is compared with an undisturbed run: the tensors of the last checkpoint bit for bit, its state, and
the log. There are four outcomes:

    exact     the same as undisturbed, and no epoch was trained again that had been logged
    refused   exit code 2 and a message, and nothing but that
    wrong     anything else: another result, a traceback, a lost interval, temporary files that stay
    hung      a command took longer than its time limit

Processes are forked from this one, which has imported torch, so a fault costs a second or two. Faults in files are
raised by an audit hook, which sees every file operation before it happens.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before torch is imported
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}

import argparse
import contextlib
import errno
import faulthandler
import importlib
import json
import random
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from mixnn import dist
from mixnn.cli import VERBS, main
from mixnn.data import cache
from mixnn.runs import checkpoint
from mixnn.runs.weights import read_tensors
from mixnn.training.trainer import Trainer

NETWORK = "--backbone resnet8 --set support_size=32 --set hidden=16 --set dim=8"
DIGITS = shlex.split(
    "pretrain digits --limit 64 --batch-size 16 --bn-groups 2 --epochs 4 --checkpoint-every 1 --knn-every 2 " + NETWORK
)
PHOTOS = shlex.split(
    "pretrain photos --image-size 16 --batch-size 8 --bn-groups 2 --epochs 4 --checkpoint-every 1 --init-from none "
    + NETWORK
)
STEPS_PER_EPOCH, LIMIT = 4, 120.0  # the second: seconds that any command may take; undisturbed it takes one or two
TIMING = ("seconds", "images_per_s", "crc32")  # and the checksum over them
YEAR = 365 * 86400.0
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod")  # audit events


# Commands in processes of their own


class Done(NamedTuple):
    code: int  # negative: the signal that ended it
    out: str
    err: str


class Hung(Exception):
    """A command took longer than its time limit."""


class Wrong(Exception):
    """What should not happen; the text says what."""


class Process:
    """`mixnn WORDS...` in a forked process; `fault` is called in it before the command."""

    def __init__(self, words: Sequence[object], place: Path, fault: Callable[[], None] | None = None) -> None:
        self.said = Path(tempfile.mkdtemp(prefix="mixnn-chaos-said-"))
        self.words = [str(word) for word in words]
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(place, fault)
        self._descriptor = os.pidfd_open(self.pid)

    def _run(self, place: Path, fault: Callable[[], None] | None) -> None:
        code = 1
        try:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(self.said / name, os.O_WRONLY | os.O_CREAT), number)
            faulthandler.register(signal.SIGUSR1)  # tells where it hangs
            os.chdir(place)
            os.environ["MIXNN_CACHE"] = str(place / "cache")
            sys.argv = ["mixnn", *self.words]
            if fault is not None:
                fault()
            code = main(self.words)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def ended_within(self, seconds: float) -> bool:
        return bool(select.select([self._descriptor], [], [], seconds)[0])

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> Done:
        """The result; checks what holds for every command: no traceback, and a message if it is refused."""
        hung = not self.ended_within(LIMIT)
        if hung:
            self.signal(signal.SIGUSR1)
            self.ended_within(1)
            self.signal(signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._descriptor)
        done = Done(code, *((self.said / name).read_text(errors="replace") for name in ("out", "err")))
        shutil.rmtree(self.said)
        if hung:
            raise Hung(f"mixnn {shlex.join(self.words)}: no end after {LIMIT:.0f} s\n{done.err[-2500:]}")
        if "Traceback" in done.err:
            raise Wrong(f"mixnn {shlex.join(self.words)}: a traceback\n{done.err[-1500:]}")
        if code not in (0, 2, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT):
            raise Wrong(f"mixnn {shlex.join(self.words)}: exit code {code}\n{done.err[-500:]}")
        if code == 2 and not re.search("^mixnn: .{10,}", done.err, re.MULTILINE):
            raise Wrong(f"mixnn {shlex.join(self.words)}: exit code 2 without a message\n{done.err[-500:]}")
        return done


def run(*words: object, place: Path, fault: Callable[[], None] | None = None) -> Done:
    return Process(words, place, fault).wait()


def run_ranks(*words: object, place: Path, faults: Sequence[Callable[[], None] | None] = (None, None)) -> list[Process]:
    """The command on two processes, which talk over the loopback device."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def entering(rank: int) -> Callable[[], None]:
        def enter() -> None:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if (fault := faults[rank]) is not None:
                fault()

        return enter

    return [Process(words, place, entering(rank)) for rank in (0, 1)]


# Faults that a process brings about itself


def watch_files(react: Callable[[int, str, str], None], inside: Path) -> None:
    """Calls react(number, event, path) before each operation that changes a file below a folder."""
    count, sync = 0, os.fsync

    def note(event: str, path: Any) -> None:
        nonlocal count
        if isinstance(path, (str, bytes, os.PathLike)):
            full = os.path.abspath(os.fsdecode(path))
            if full.startswith(f"{inside}/"):
                count += 1
                react(count, event, full)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) or event in CHANGES:
            note(event, args[0])

    def fsync(descriptor: int) -> None:
        note("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    os.fsync = fsync  # type: ignore[assignment]  # it has no audit event
    sys.addaudithook(hook)


def killing(number: int, inside: Path) -> Callable[[], None]:
    """The process is killed before its n-th file operation."""

    def react(count: int, *_: str) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: watch_files(react, inside)


def filling(number: int, inside: Path) -> Callable[[], None]:
    """From the n-th file operation on, the disk is full; files can still be removed."""

    def react(count: int, event: str, path: str) -> None:
        if count >= number and event in ("open", "os.mkdir", "fsync", "os.rename"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    return lambda: watch_files(react, inside)


def limiting(num_bytes: int) -> Callable[[], None]:
    """No file can grow beyond this size: what is longer is torn, and the write fails."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def protecting(folder: Path) -> Callable[[], None]:
    """A folder is read-only. This imitates the system's answers, because root may write everywhere."""

    def react(_: int, event: str, path: str) -> None:
        if event != "fsync":
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)

    def protect() -> None:
        access = os.access

        def is_allowed(path: Any, mode: int, **given: Any) -> bool:
            below = f"{os.path.abspath(path)}/".startswith(f"{folder}/")
            return access(path, mode, **given) and not (below and mode & os.W_OK)

        os.access = is_allowed  # type: ignore[assignment]
        watch_files(react, folder)

    return protect


def jumping(after: float, by: float) -> Callable[[], None]:
    """The clock jumps after some seconds; clocks that only measure durations do not."""

    def jump() -> None:
        now, begun = time.time, time.perf_counter()
        time.time = lambda: now() + by * (time.perf_counter() - begun > after)  # type: ignore[assignment]

    return jump


def slowing(seconds: float) -> Callable[[], None]:
    def slow() -> None:
        original = Trainer._one_step

        def one_step(self: Trainer) -> None:
            time.sleep(seconds)
            original(self)

        Trainer._one_step = one_step  # type: ignore[method-assign]

    return slow


def damage(path: Path, rng: random.Random) -> str:
    """Damages a file in one of several ways; returns in words what was done."""
    data = bytearray(path.read_bytes())
    how = rng.choice(["cut", "bit", "bit", "bit", "empty", "zeros", "noise", "longer", "removed"])
    at = rng.randrange(max(1, len(data)))
    if how == "cut":
        del data[at:]
    elif how == "bit" and data:
        data[at] ^= 1 << rng.randrange(8)
    elif how == "empty":
        data.clear()
    elif how == "zeros":
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    elif how == "noise":
        data[at : at + 64] = rng.randbytes(len(data[at : at + 64]))
    elif how == "longer":
        data += rng.randbytes(100)
    path.chmod(0o644)
    path.unlink()
    if how != "removed":
        path.write_bytes(data)
    return f"{path.name}: {how} at {at}"


# What is compared


def log_of(folder: Path) -> list[dict[str, Any]]:
    """The readable lines of a log, without times."""
    found = []
    path = folder / "metrics.jsonl"
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append({k: v for k, v in json.loads(line).items() if k not in TIMING})
    return found


def final(folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Tensors, as bytes, and state of the newest checkpoint."""
    tensors, state = checkpoint.load(checkpoint.list_checkpoints(folder / "checkpoints")[0])
    state.pop("seconds")
    state["settings"].pop("data")  # each run has its own link to the images
    return {name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}, state


def check_same(folder: Path, reference: Path, log_too: bool = True) -> None:
    (tensors, state), (expected, expected_state) = final(folder), final(reference)
    if tensors != expected:
        wrong = [name for name in expected if tensors.get(name) != expected[name]]
        raise Wrong(f"{len(wrong)} of {len(expected)} tensors differ, such as {wrong[:3]}")
    if state != expected_state:
        wrong = [name for name in expected_state if state.get(name) != expected_state[name]]
        raise Wrong(f"the state differs: {wrong}")
    if log_too and log_of(folder) != log_of(reference):
        raise Wrong(f"the log differs: {log_of(folder)}\ninstead of {log_of(reference)}")
    if left := [path.name for path in folder.rglob(".mixnn-*.tmp")]:
        raise Wrong(f"temporary files are left: {left}")


def check_nothing_lost(before: int, done: Done) -> None:
    """A resumed run starts where its log ended, or later."""
    found = re.search(r"(?:resuming at|finished:) step (\d+)", done.err)
    if before and (not found or int(found[1]) < before):
        raise Wrong(f"step {before} was logged, but: {done.err[-300:]}")


Runner = Callable[..., Done]


def recover(words: Sequence[str], place: Path, reference: Path, runner: Runner = run) -> None:
    """Resumes the run in place/run, or starts it again if it had not saved anything, and compares it."""
    out = place / "run"
    logged = log_of(out)
    before = logged[-1]["step"] if logged else 0
    done = runner("pretrain", "--resume", "run", place=place)
    if done.code == 0:
        check_nothing_lost(before, done)
    elif before:
        raise Wrong(f"step {before} was logged, but the run cannot be resumed: {done.err[-500:]}")
    else:
        done = runner(*words, "--out", "run", place=place)
        if done.code == 2:
            done = runner(*words, "--out", "run", "--overwrite", place=place)
    if done.code:
        raise Wrong(f"no way to go on: {done.err[-500:]}")
    check_same(out, reference)


# The undisturbed runs


class Lab:
    """A folder with undisturbed runs, and with one that was stopped, to be copied and broken."""

    def __init__(self, root: Path) -> None:
        self.root = root
        rng = np.random.default_rng(0)
        for i in range(32):
            folder = root / "images" / "ab"[i % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        self.seconds: dict[str, float] = {}
        self.operations: dict[str, int] = {}
        self.unkilled: list[tuple[str, int]] = []  # file operations at which no run was killed yet
        self.references = {name: self._reference(name, words) for name, words in WORDS.items()}
        self.two_ranks = self._place("two-ranks") / "run"
        self._check([p.wait() for p in run_ranks(*DIGITS, "--out", "run", place=self.two_ranks.parent)])
        self.stopped = {name: self._stopped(name, words) for name, words in WORDS.items()}
        finished = self.references["photos"].parent
        for words in MAKING:
            self._check([run(*words, place=finished)])
        self.outputs = {name: self._output(name, words) for name, (words, _) in COMMANDS.items()}

    def _place(self, name: str) -> Path:
        place = self.root / name
        place.mkdir()
        (place / "photos").symlink_to(self.root / "images")
        return place

    @staticmethod
    def _check(all_done: Sequence[Done], codes: tuple[int, ...] = (0,)) -> None:
        for done in all_done:
            if done.code not in codes:
                raise SystemExit(f"an undisturbed run failed: {done.err}")

    def _counted(self, name: str, words: Sequence[str], place: Path) -> None:
        """Runs a command and counts its file operations and its seconds."""
        counted = self.root / f"{name}.count"

        def react(count: int, *_: str) -> None:
            descriptor = os.open(counted, os.O_WRONLY | os.O_CREAT)  # outside of what is watched
            os.write(descriptor, str(count).encode())
            os.close(descriptor)

        start = time.perf_counter()
        self._check([run(*words, place=place, fault=lambda: watch_files(react, place))])
        self.seconds[name] = time.perf_counter() - start
        self.operations[name] = int(counted.read_text())

    def _reference(self, name: str, words: Sequence[str]) -> Path:
        place = self._place(name)
        self._counted(name, [*words, "--out", "run"], place)
        again = self._place(f"{name}-again")
        self._check([run(*words, "--out", "run", place=again)])
        check_same(again / "run", place / "run")
        return place / "run"

    def _stopped(self, name: str, words: Sequence[str]) -> Path:
        """A run that was stopped in its third epoch: two checkpoints, two lines in its log."""

        def fault() -> None:
            original = Trainer._one_step

            def one_step(self: Trainer) -> None:
                if self.done == 2 * STEPS_PER_EPOCH + 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                original(self)

            Trainer._one_step = one_step  # type: ignore[method-assign]

        place = self._place(f"{name}-stopped")
        self._check([run(*words, "--out", "run", place=place, fault=fault)], (128 + signal.SIGTERM,))
        return place

    def _output(self, name: str, words: Sequence[str]) -> bytes:
        place = self.copy(self.references["photos"].parent, self.root / f"{name}-output")
        self._counted(name, words, place)
        return content(place / COMMANDS[name][1])

    @staticmethod
    def copy(source: Path, target: Path) -> Path:
        return Path(shutil.copytree(source, target, symlinks=True))


WORDS = {"digits": DIGITS, "photos": PHOTOS}
EXPORTS = ("encoder.safetensors", "encoder.onnx", "encoder.pt2")
MAKING = [shlex.split(f"export run --format {name.partition('.')[2]} --out {name}") for name in EXPORTS]
MAKING.append(shlex.split("classify run folders --out classifier"))
COMMANDS = {  # name -> words, the file they write
    "embed": (shlex.split("embed run --out x.npz"), "x.npz"),
    "export": (shlex.split("export run --out x.safetensors"), "x.safetensors"),
    "explore": (shlex.split("explore run --out x.html"), "x.html"),
    "report": (shlex.split("report run --out x.html"), "x.html"),
    "classify": (shlex.split("classify run folders --out x"), "x/predictions.csv"),
}


def content(path: Path) -> bytes:
    """What is in an output file; only the arrays where a header holds the time or the state of the code."""
    if path.suffix == ".safetensors":
        return b"".join(tensor.numpy().tobytes() for _, tensor in sorted(read_tensors(path)[0].items()))
    if path.suffix != ".npz":
        return path.read_bytes()
    with np.load(path) as archive:
        return b"".join(archive[name].tobytes() for name in archive.files if name != "about")


# Kinds of faults. Each function gets the lab, an empty folder to work in, and random numbers; it returns what happened,
# in words, and whether the command was refused in the end. It raises Wrong or Hung.

Result = tuple[str, bool]
KINDS: dict[str, tuple[int, Callable[[Lab, Path, random.Random], Result]]] = {}  # name -> (share of the faults, fault)


def kind(name: str, share: int) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        KINDS[name] = share, function
        return function

    return register


def fresh(lab: Lab, place: Path, name: str) -> tuple[list[str], Path]:
    """Prepares an empty place for a run; returns its command and the undisturbed run."""
    place.mkdir()
    (place / "photos").symlink_to(lab.root / "images")
    return WORDS[name], lab.references[name]


@kind("SIGKILL at a random moment", 50)
def kill_at_random(lab: Lab, place: Path, rng: random.Random) -> Result:
    name = rng.choice([*WORDS])
    words, reference = fresh(lab, place, name)
    times = rng.choice([1, 1, 2])
    for i in range(times):
        resumable = i and (place / "run" / "checkpoints").exists()
        process = Process(["pretrain", "--resume", "run"] if resumable else [*words, "--out", "run"], place)
        if not process.ended_within(rng.uniform(0, 1.2 * lab.seconds[name])):
            process.signal(signal.SIGKILL)
        process.wait()
    recover(words, place, reference)
    return f"{name}, killed {times} times", False


@kind("SIGKILL at each file operation in turn", 145)
def kill_at_operation(lab: Lab, place: Path, rng: random.Random) -> Result:
    if not lab.unkilled:
        lab.unkilled = [(name, number) for name in WORDS for number in range(1, lab.operations[name] + 1)]
        rng.shuffle(lab.unkilled)
    name, number = lab.unkilled.pop()
    words, reference = fresh(lab, place, name)
    run(*words, "--out", "run", place=place, fault=killing(number, place))
    recover(words, place, reference)
    return f"{name}, operation {number} of {lab.operations[name]}", False


@kind("SIGKILL in other commands", 20)
def kill_other(lab: Lab, place: Path, rng: random.Random) -> Result:
    name = rng.choice([*COMMANDS])
    words, file = COMMANDS[name]
    lab.copy(lab.references["photos"].parent, place)
    number = rng.randint(1, lab.operations[name])
    run(*words, place=place, fault=killing(number, place))
    done = run(*words, place=place)
    if done.code == 2:  # it was killed when this file was complete
        if (place / file).exists() and content(place / file) != lab.outputs[name]:
            raise Wrong(f"{name} left another file")
        done = run(*words, "--overwrite", place=place)
    if done.code or content(place / file) != lab.outputs[name]:
        raise Wrong(f"{name} ended with {done.code} and another file: {done.err[-300:]}")
    if left := [str(path.relative_to(place)) for path in place.rglob(".mixnn-*.tmp")]:
        raise Wrong(f"{name}, operation {number}: temporary files are left: {left}")
    return f"{name}, operation {number} of {lab.operations[name]}", False


@kind("SIGTERM or Ctrl-C, with grace", 15)
def terminate(lab: Lab, place: Path, rng: random.Random) -> Result:
    name = rng.choice([*WORDS])
    words, reference = fresh(lab, place, name)
    number = rng.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT])
    process = Process([*words, "--out", "run"], place)
    process.ended_within(rng.uniform(0.3, 1) * lab.seconds[name])
    process.signal(number)
    done = process.wait()
    if "saved at step" in done.err:
        step = int(re.findall(r"saved at step (\d+)", done.err)[0])
        found = final(place / "run")[1]["step"]
        if done.code != 128 + number or found != step:
            raise Wrong(f"it says it saved step {step}, ended with {done.code} and saved {found}")
    recover(words, place, reference)
    return f"{name}, {signal.Signals(number).name}", False


@kind("disk full", 25)
def disk_full(lab: Lab, place: Path, rng: random.Random) -> Result:
    name = rng.choice([*WORDS])
    words, reference = fresh(lab, place, name)
    number = rng.randint(1, lab.operations[name])
    size = int(10 ** rng.uniform(3.5, 5.5))  # messages are shorter
    fault = rng.choice([filling(number, place), filling(number, place), limiting(size)])
    done = run(*words, "--out", "run", place=place, fault=fault)
    if done.code not in (0, 2):
        raise Wrong(f"exit code {done.code}: {done.err[-300:]}")
    if done.code == 0 and checkpoint.list_checkpoints(place / "run" / "checkpoints"):
        check_same(place / "run", reference)
    recover(words, place, reference)
    return f"{name}, from operation {number}, or at {size} bytes", False


@kind("read-only folder", 8)
def read_only(lab: Lab, place: Path, rng: random.Random) -> Result:
    name, what = rng.choice([*WORDS]), rng.choice(["out", "run", "cache"])
    words, reference = fresh(lab, place, name)
    if what == "cache":
        (place / "cache").mkdir()
        done = run(*words, "--out", "run", place=place, fault=protecting(place / "cache"))
        if done.code:
            raise Wrong(f"a cache that is read-only stops the run: {done.err[-300:]}")
        check_same(place / "run", reference)
        return f"{name}, its cache", False
    if what == "run":
        shutil.rmtree(place)
        lab.copy(lab.stopped[name], place)
        done = run("pretrain", "--resume", "run", place=place, fault=protecting(place / "run"))
    else:
        done = run(*words, "--out", "run", place=place, fault=protecting(place))
    if done.code != 2:
        raise Wrong(f"exit code {done.code}: {done.err[-300:]}")
    recover(words, place, reference)
    return f"{name}, {what}", False


@kind("damaged file in a run folder", 50)
def damaged_run(lab: Lab, place: Path, rng: random.Random) -> Result:
    name = rng.choice([*WORDS])
    lab.copy(lab.stopped[name], place)
    files = sorted(path for path in (place / "run").rglob("*") if path.is_file() and path.name != ".lock")
    files += [path for path in files if path.suffix == ".safetensors"]
    what = damage(path := rng.choice(files), rng)
    done = run("pretrain", "--resume", "run", place=place)
    if done.code == 0:
        log_is_complete = path.name != "metrics.jsonl"
        check_same(place / "run", lab.references[name], log_is_complete)
        if not log_is_complete:
            expected = log_of(lab.references[name])
            if any(line not in expected for line in log_of(place / "run")):
                raise Wrong(f"{what}: a damaged line of the log is taken for a good one")
        if log_is_complete or log_of(place / "run") == log_of(lab.references[name]):
            return f"{name}, {what}", False
        if "removed" in what or "cut" in what or "empty" in what or "cannot be read" in done.err:
            return f"{name}, {what}: the log has fewer lines", False
        raise Wrong(f"{what}: the log lost lines without a message")
    return f"{name}, {what}: {done.err.splitlines()[-1]}", True


@kind("damaged file of a finished run, for other commands", 20)
def damaged_finished(lab: Lab, place: Path, rng: random.Random) -> Result:
    lab.copy(lab.references["photos"].parent, place)
    name = rng.choice([*COMMANDS])
    words, file = COMMANDS[name]
    files = sorted(path for path in (place / "run").rglob("*") if path.is_file() and path.name != ".lock")
    path = rng.choice(files)
    what = damage(path, rng)
    done = run(*words, place=place)
    if done.code == 2:
        return f"{name}, {what}: {done.err.splitlines()[-1]}", True
    older = path.suffix == ".safetensors" and re.search("using the one before|newest checkpoint is of step", done.err)
    if name != "report" and not older and content(place / file) != lab.outputs[name]:
        raise Wrong(f"{name} with {what} has another result, and says: {done.err[-300:]}")
    # A report shows what is left, and says on the page what is missing.
    return f"{name}, {what}", False


@kind("damaged image cache", 20)
def damaged_cache(lab: Lab, place: Path, rng: random.Random) -> Result:
    words, reference = fresh(lab, place, "photos")
    lab.copy(lab.references["photos"].parent / "cache", place / "cache")
    path = rng.choice(sorted(path for path in (place / "cache").rglob("*") if path.is_file()))
    what = damage(path, rng)
    done = run(*words, "--out", "run", place=place)
    if done.code:
        raise Wrong(f"{what}: {done.err[-300:]}")
    check_same(place / "run", reference)
    return what, False


@kind("image cache changed during a run", 12)
def changed_cache(lab: Lab, place: Path, rng: random.Random) -> Result:
    words, reference = fresh(lab, place, "photos")
    process = Process([*words, "--out", "run"], place)
    process.ended_within(rng.uniform(0.1, 1) * lab.seconds["photos"])
    what = rng.choice(["deleted", "damaged", "truncated"])
    files = (
        sorted(path for path in (place / "cache").rglob("*") if path.is_file()) if (place / "cache").exists() else []
    )
    with contextlib.suppress(FileNotFoundError):  # it is being made
        if what == "deleted":
            shutil.rmtree(place / "cache", ignore_errors=True)
        elif files and what == "truncated":
            os.truncate(rng.choice(files), 100)
        elif files:
            damage(rng.choice(files), rng)
    done = process.wait()
    if done.code:
        raise Wrong(f"{what}: {done.err[-300:]}")
    check_same(place / "run", reference)
    return what, False


@kind("image cache too large for memory, cut during a run", 8)
def cut_cache(lab: Lab, place: Path, rng: random.Random) -> Result:
    words, reference = fresh(lab, place, "photos")
    lab.copy(lab.references["photos"].parent / "cache", place / "cache")
    slow = slowing(0.05)

    def fault() -> None:
        cache._available_memory = lambda: 0.0
        slow()

    process = Process([*words, "--out", "run"], place, fault)
    wait_for(place / "run" / "config.yaml", process)
    process.ended_within(rng.uniform(0, 0.6))
    (path,) = (place / "cache").glob("*/images.npy")
    os.truncate(path, at := rng.randrange(path.stat().st_size))
    done = process.wait()
    if done.code and "in the image cache can no longer be read" not in done.err:
        raise Wrong(f"cut at {at}: exit code {done.code}: {done.err[-300:]}")
    recover(words, place, reference)
    return f"cut at {at}, exit code {done.code}", False


@kind("damaged export", 20)
def damaged_export(lab: Lab, place: Path, rng: random.Random) -> Result:
    lab.copy(lab.references["photos"].parent, place)
    path = place / rng.choice([*EXPORTS, "encoder.safetensors", "encoder.safetensors.json"])
    what = damage(path, rng)
    if path.suffix in (".onnx", ".pt2"):  # mixnn writes and checks them; other programs run them
        done = run("verify", path.name, place=place)
    else:
        words = [word if word != "none" else "encoder.safetensors" for word in PHOTOS]
        done = run(*words, "--out", "next", place=place)
    if done.code == 2:
        return f"{what}: {done.err.splitlines()[-1]}", True
    if path.suffix != ".json":
        raise Wrong(f"{what}: the damage is not noticed")
    return what, False


@kind("two runs in one folder", 10)
def two_runs(lab: Lab, place: Path, rng: random.Random) -> Result:
    name, resumed = rng.choice([*WORDS]), rng.random() < 0.5
    words, reference = fresh(lab, place, name)
    if resumed:
        shutil.rmtree(place)
        lab.copy(lab.stopped[name], place)
    command = ["pretrain", "--resume", "run"] if resumed else [*words, "--out", "run"]
    first = Process(command, place)
    first.ended_within(rng.uniform(0, 0.8) * lab.seconds[name])
    second = Process(command, place)
    codes = [first.wait().code, second.wait().code]
    if 0 not in codes or not {*codes} <= {0, 2}:
        raise Wrong(f"exit codes {codes}")
    check_same(place / "run", reference)
    return f"{name}, {'resumed' if resumed else 'new'}", False


@kind("run folder removed during training", 5)
def removed_folder(lab: Lab, place: Path, rng: random.Random) -> Result:
    words, reference = fresh(lab, place, "digits")
    process = Process([*words, "--out", "run"], place)
    wait_for(place / "run" / "config.yaml", process)
    process.ended_within(rng.uniform(0, 0.5) * lab.seconds["digits"])
    with contextlib.suppress(FileNotFoundError):
        (place / "run").rename(place / "old")
    done = process.wait()
    if done.code != 2 and not (done.code == 0 and (place / "old").exists()):
        raise Wrong(f"exit code {done.code}")
    if done.code == 0:
        check_same(place / "old", reference)
    recover(words, place, reference)
    return "renamed", False


@kind("clock jumps", 10)
def clock_jumps(lab: Lab, place: Path, rng: random.Random) -> Result:
    name = rng.choice([*WORDS])
    words, reference = fresh(lab, place, name)
    by = rng.choice([-20 * YEAR, -YEAR, -3600.0, 3600.0, YEAR, 20 * YEAR])
    process = Process([*words, "--out", "run"], place, jumping(rng.uniform(0, 1) * lab.seconds[name], by))
    if rng.random() < 0.7 and not process.ended_within(rng.uniform(0.3, 1) * lab.seconds[name]):
        process.signal(signal.SIGKILL)
    process.wait()
    for path in (place / "run").rglob("*"):
        with contextlib.suppress(OSError):
            os.utime(path, (max(0, time.time() + rng.choice([-by, by])),) * 2)
    recover(words, place, reference)
    return f"{name}, by {by / 3600:.0f} hours", False


# Two processes


def wait_for(path: Path, process: Process) -> None:
    """Waits until a file exists or a process has ended."""
    end = time.perf_counter() + LIMIT
    while not path.exists() and not process.ended_within(0.02) and time.perf_counter() < end:
        pass


def wait_all(processes: Sequence[Process]) -> list[Done]:
    """The results of all processes; all are waited for, even if one is wrong."""
    found: list[Done] = []
    problem: Exception | None = None
    for process in processes:
        try:
            found.append(process.wait())
        except (Wrong, Hung) as error:
            problem = problem or error
    if problem:
        raise problem
    return found


def run_both(*words: object, place: Path) -> Done:
    """A command on two processes; the result of the first one."""
    ranks = run_ranks(*words, place=place)
    for one, other in (ranks, ranks[::-1]):
        if one.ended_within(LIMIT / 2) and not other.ended_within(5):
            other.signal(signal.SIGTERM)  # as torchrun does: the other may wait for one that was refused before it came
    first, second = wait_all(ranks)
    if 0 in (first.code, second.code) and first.code != second.code:
        raise Wrong(f"exit codes {first.code} and {second.code}: {first.err[-300:]} {second.err[-300:]}")
    return first


@kind("one of two processes killed", 10)
def killed_rank(lab: Lab, place: Path, rng: random.Random) -> Result:
    words, _ = fresh(lab, place, "digits")
    ranks = run_ranks(*words, "--out", "run", place=place)
    which = rng.randrange(2)
    wait_for(place / "run" / "config.yaml", ranks[0])
    ranks[which].ended_within(rng.uniform(0, 1) * lab.seconds["digits"])
    ranks[which].signal(signal.SIGKILL)
    other = wait_all(ranks)[1 - which]
    if other.code not in (0, 2):
        raise Wrong(f"the other process ended with {other.code}: {other.err[-300:]}")
    recover(words, place, lab.two_ranks, run_both)
    return f"rank {which}", False


@kind("one of two processes killed before it joins", 5)
def absent_rank(lab: Lab, place: Path, rng: random.Random) -> Result:
    words, _ = fresh(lab, place, "digits")
    which = rng.randrange(2)

    def wait_briefly() -> None:
        os.environ["MIXNN_JOIN_TIMEOUT"] = "5s"

    def die() -> None:
        dist.init = lambda _: os.kill(os.getpid(), signal.SIGKILL)

    faults = [die if rank == which else wait_briefly for rank in (0, 1)]
    other = wait_all(run_ranks(*words, "--out", "run", place=place, faults=faults))[1 - which]
    if other.code != 2 or f"process {which} of 2 did not join" not in other.err:
        raise Wrong(f"the other process ended with {other.code}: {other.err[-300:]}")
    recover(words, place, lab.two_ranks, run_both)
    return f"rank {which}", False


@kind("one of two processes stopped", 8)
def stopped_rank(lab: Lab, place: Path, rng: random.Random) -> Result:
    words, _ = fresh(lab, place, "digits")
    ranks = run_ranks(*words, "--out", "run", place=place)
    which = rng.randrange(2)
    wait_for(place / "run" / "config.yaml", ranks[0])
    ranks[which].ended_within(rng.uniform(0, 0.5) * lab.seconds["digits"])
    ranks[which].signal(signal.SIGSTOP)
    time.sleep(rng.uniform(0.5, 3))
    ranks[which].signal(signal.SIGCONT)
    codes = [done.code for done in wait_all(ranks)]
    if codes != [0, 0]:
        raise Wrong(f"exit codes {codes}")
    check_same(place / "run", lab.two_ranks)
    return f"rank {which}", False


@kind("one of two processes slow", 6)
def slow_rank(lab: Lab, place: Path, rng: random.Random) -> Result:
    words, _ = fresh(lab, place, "digits")
    slow = slowing(rng.uniform(0.02, 0.3))
    faults: list[Callable[[], None] | None] = [slow, None]
    rng.shuffle(faults)
    codes = [done.code for done in wait_all(run_ranks(*words, "--out", "run", place=place, faults=faults))]
    if codes != [0, 0]:
        raise Wrong(f"exit codes {codes}")
    check_same(place / "run", lab.two_ranks)
    return "slow", False


@kind("one of two processes with other data", 6)
def other_data(lab: Lab, place: Path, rng: random.Random) -> Result:
    place.mkdir()
    for rank in (0, 1):
        Lab.copy(lab.root / "images", place / str(rank) / "photos")
    path = rng.choice(sorted((place / "1" / "photos").rglob("*.png")))
    what = rng.choice(["other pixels", "one image less", "an unreadable image"])
    if what == "other pixels":
        pixels = np.array(Image.open(path))
        pixels[rng.randrange(16), rng.randrange(16), rng.randrange(3)] ^= 1
        Image.fromarray(pixels).save(path)
    elif what == "one image less":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:40])
    faults = [lambda: os.chdir("0"), lambda: os.chdir("1")]
    words = [*PHOTOS, "--out", place / "run"]
    done = wait_all(run_ranks(*words, place=place, faults=faults))
    if [each.code for each in done] != [2, 2] or (place / "run").exists():
        raise Wrong(f"{what}: exit codes {[each.code for each in done]}")
    return f"{what}: {done[0].err.splitlines()[-1]}", True


# The summary


@kind("eight processes, every method", 1)
def eight_ranks(_lab: Lab, place: Path, _rng: random.Random) -> Result:
    """Nothing is broken here: the steps of every method are compared with those of one process. CI does it for 2, 4."""
    from tests.training import test_dist

    place.mkdir()
    found = test_dist.in_processes(8, place)
    for case in test_dist.CASES:
        alone = test_dist.after_steps(case)
        for how in test_dist.KINDS:
            test_dist.assert_steps(found[0], f"{how}/{case}", alone)
    return f"{len(test_dist.CASES)} methods and variants", False


OUTCOMES = ("exact", "refused", "wrong", "hung")


def schedule(num_faults: int, only: str) -> list[str]:
    """Kinds of faults by their shares; each kind at least once."""
    chosen = {name: share for name, (share, _) in KINDS.items() if only in name}
    total = sum(chosen.values())
    return [name for name, share in chosen.items() for _ in range(max(1, round(num_faults * share / total)))]


def one_fault(lab: Lab, name: str, place: Path, seed: str) -> tuple[str, str]:
    """The outcome of one fault, and what happened in words."""
    try:
        what, is_refused = KINDS[name][1](lab, place, random.Random(seed))
    except Wrong as error:
        return "wrong", str(error)
    except Hung as error:
        return "hung", str(error)
    except Exception:
        return "wrong", traceback.format_exc()
    return ("refused" if is_refused else "exact"), what


def table(counts: dict[str, Counter[str]]) -> list[str]:
    """The counts as a table in Markdown."""
    rows = [[name, str(counts[name].total()), *(str(counts[name][each]) for each in OUTCOMES)] for name in counts]
    total = sum(counts.values(), Counter[str]())
    rows.append(["all", str(total.total()), *(str(total[each]) for each in OUTCOMES)])
    head = ["fault", "faults", "recovered exactly", "refused with a message", "wrong", "hung"]
    return [f"| {' | '.join(row)} |" for row in [head, ["---", *["---:"] * 5], *rows]]


def parse_words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Break tiny runs in many ways.")
    parser.add_argument("--faults", type=int, default=453, help="how many, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose kind contains this text")
    parser.add_argument("--verbose", action="store_true", help="print every fault")
    return parser.parse_args()


def chaos() -> int:
    given = parse_words()
    for where, _ in VERBS.values():
        importlib.import_module(where.partition(":")[0])
    for module in ("sklearn.datasets", "torch._dynamo", "torch.distributed"):
        importlib.import_module(module)
    torch.set_num_threads(1)
    begun = time.perf_counter()
    names = schedule(given.faults, given.only)
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="mixnn-chaos-")))
    try:
        lab = Lab(root)
        print(f"undisturbed runs: {time.perf_counter() - begun:.0f} s; now {len(names)} faults, seed {given.seed}")
        for i, name in enumerate(names):
            place = root / "fault"
            seed = f"{given.seed} {name} {counts[name].total()}"
            outcome, what = one_fault(lab, name, place, seed)
            counts[name][outcome] += 1
            if given.verbose or outcome in ("wrong", "hung"):
                print(f"{i + 1}/{len(names)} {outcome}: {name}: {what} (seed {seed!r})", flush=True)
            shutil.rmtree(place, ignore_errors=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print("\n".join(table(counts)))
    failed = sum(count["wrong"] + count["hung"] for count in counts.values())
    print(f"{len(names)} faults in {(time.perf_counter() - begun) / 60:.0f} minutes: {failed} wrong or hung")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(chaos())
