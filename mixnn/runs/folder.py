"""Run: the folder of one run.

    config.yaml        the complete configuration
    command.txt        what was typed
    environment.json   versions, device, state of the code
    metrics.jsonl      one line per epoch
    judgement.json     label-free numbers of the encoder, for a folder of images
    checkpoints/       the last two
    results.json       evaluations, each with its protocol
    diverged.txt       if training ended with NaN or inf
    .lock              held by the process that trains it

Other commands keep files of their own there: embeddings/ (a cache), classifier/, and those in files.OUTPUTS.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import platform
import re
import shlex
import subprocess
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

import mixnn
from mixnn.config import (
    Config,
    UserError,
    calling,
    in_python,
    on_command_line,
    saved_config,
    setting,
    short_path,
    spelling,
)
from mixnn.data import DATASETS, Dataset, Images, configured_dataset, open_dataset, open_images
from mixnn.data.dataset import is_given, is_in_memory
from mixnn.data.shards import is_shards, shard_files
from mixnn.files import (
    LOCK,
    OUTPUTS,
    PACKAGE,
    RUN_FILES,
    TEMPORARY,
    check_not_removed,
    code_digest,
    expand,
    is_written_by_mixnn,
    read_yaml,
    write_atomically,
    yaml_error,
)
from mixnn.nn.backbone import Network
from mixnn.processes import is_main_process
from mixnn.progress import plural
from mixnn.registry import UnknownName, how_to_import
from mixnn.runs import checkpoint

JUDGEMENT = "judgement.json"
DAMAGED_RESULTS = "results.json.damaged"
CHECKSUM = b', "crc32": "'  # what is before the checksum of a line in metrics.jsonl
DIVERGED = "diverged.txt"  # why training ended, if loss or weights became NaN or inf
# --overwrite removes only these, which pretrain and evaluate wrote, and the outputs of other commands in files.OUTPUTS.
OWN_FILES = (
    *(name for name in RUN_FILES if name != LOCK),
    DAMAGED_RESULTS,
    *("checkpoints/step-*.safetensors", "checkpoints/.step-*.tmp", ".*.[0-9]*.tmp"),  # the last two: earlier versions
    "tensorboard/events.out.tfevents.*",
)


class FolderExists(UserError):
    """The folder exists and may not be overwritten."""


class Diverged(UserError):
    """Loss or weights became NaN or inf."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder that exists. `data`: the images it was trained on, if they are in memory and were handed in.

    >>> run = mixnn.Run.open("runs/photos")
    >>> run.config.method, len(run.metrics())
    ('mnn', 1)
    """

    path: Path
    config: Config
    data: Dataset | None = dataclasses.field(default=None, repr=False, compare=False)
    network: Network | None = dataclasses.field(default=None, compare=False)  # of a user, who handed it in

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self.config.method} on {self.config.data})"

    @property
    def how_to_resume(self) -> str:
        """The call that continues training, for messages. What the folder does not store must be given again."""
        if on_command_line() and not is_in_memory(self.config.data):
            return calling("pretrain", resume=self.path)
        images = f"{self.config.data.partition('-')[0]}, " if is_in_memory(self.config.data) else ""
        network = ", backbone=network" if self.network is not None else ""
        return f"mixnn.pretrain({images}resume={short_path(self.path)!r}{network})"

    def command_line(self, words: str) -> str:
        """A command about this run, quoted for a shell: mixnn evaluate 'runs/my cats'."""
        return f"mixnn {words} {shlex.quote(short_path(self.path))}"

    @staticmethod
    def check_replaceable(path: Path, overwrite: bool) -> None:
        """UserError if the path exists, unless it is a run folder and may be overwritten."""
        if not path.exists():
            return
        run, is_begun = Run.find(path), _is_begun(path)
        if not overwrite:
            resume, overwriting = setting("resume", path), setting("overwrite", True)
            continuing = f", {resume} to continue it" if run and run.can_resume else ""
            ways = f"{continuing}, or {overwriting} to replace it" if run else ""
            ways = f", or {overwriting} to use it" if is_begun else ways
            raise FolderExists(f"{path} exists: use another {setting('out')}{ways}")
        if not (run or is_begun):
            raise UserError(f"{path} is not a run folder, so it is not overwritten: use another {setting('out')}")

    @staticmethod
    def is_run_folder(path: Path) -> bool:
        """Whether the path is a run folder, not just any folder with a config.yaml."""
        return Run.find(path) is not None

    @staticmethod
    def find(path: Path) -> Run | None:
        """The run of a folder; None if the path is not a run folder."""
        try:
            run = Run.open(path)
        except UserError:
            return None
        return run if run.made_by_mixnn else None

    @property
    def made_by_mixnn(self) -> bool:
        """Whether the folder has more of a run than a config.yaml, which any program may write."""
        return (self.path / "command.txt").is_file() or self.has_checkpoint

    @staticmethod
    def reserve(path: Path, overwrite: bool = False) -> Path:
        """Make the folder. If several processes try at once, one succeeds and the others get FolderExists."""
        Run.check_replaceable(path, overwrite)
        try:
            path.resolve().mkdir(parents=True, exist_ok=overwrite)
        except FileExistsError:
            raise FolderExists(f"{path} exists: use another {setting('out')}") from None
        except OSError as error:
            raise UserError(f"cannot make the run folder {path}: {error.strerror}") from None
        return path

    @staticmethod
    def reserve_numbered(path: Path) -> Path:
        """Make the folder, with -2, -3, ... added if it exists."""
        number = 1
        while True:
            place = path if number == 1 else path.with_name(f"{path.name}-{number}")
            with suppress(FolderExists):
                if not place.exists():
                    return Run.reserve(place)
            number += 1

    @staticmethod
    def create(path: Path, config: Config, command: str, overwrite: bool = False) -> Run:
        """Start a run in a folder. Of an old run there, only what mixnn wrote is removed; a classifier stays."""
        Run.reserve(path, overwrite)
        outputs = [old for pattern in OUTPUTS for old in path.glob(pattern) if is_written_by_mixnn(old)]
        try:
            for old in [*outputs, *(old for pattern in OWN_FILES for old in path.glob(pattern))]:
                old.unlink()
        except OSError as error:
            raise UserError(f"cannot make the run folder {path}: {error.strerror}") from None
        run = Run(path, config)
        run.write("command.txt", command + "\n")
        run._write_config(config)  # last: now it is one
        return run

    @staticmethod
    def open(path: str | Path, backbone: Network | None = None) -> Run:
        """The run of a folder. `backbone`: the network it was trained with, if that was handed to pretrain."""
        path = expand(path)
        if not path.exists():
            hint = did_you_mean(path, lambda other: (other / "config.yaml").is_file())
            raise UserError(f"there is no run folder called {path}{hint}")
        if not (path / "config.yaml").is_file():
            made = Run.find(Path("runs") / f"{path.resolve().name}-imagenet")  # by a command that takes images
            is_its = made is not None and Path(made.config.data).resolve() == path.resolve()
            advice = f"use {made.path}" if made and is_its else f"`{calling('pretrain')}` makes one"
            raise UserError(f"{path} is not a run folder (it has no config.yaml): {advice}")
        try:
            values = read_yaml(path / "config.yaml")
            with spelling(in_python):  # the mistake is in the file
                return Run(path, saved_config(values), network=backbone)
        except UserError:
            raise
        except (OSError, ValueError, yaml.YAMLError, TypeError, AttributeError) as error:
            raise UserError(f"{path / 'config.yaml'} cannot be read: {yaml_error(error)}") from None

    @contextmanager
    def explain_unknown_names(self) -> Iterator[None]:
        """Turn an unknown name into an error that says what to import. It is never imported unasked."""
        try:
            yield
        except UnknownName as error:
            if not self.config.imports:
                raise
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"{self.path} was trained with code from {', '.join(self.config.imports)}: {reason}\n"
                "mixnn runs no code because a run folder names it; if you trust this code, "
                f"{how_to_import(self.config.imports)}"
            ) from None

    def moved(self, source: Any, labels: Any = "") -> Run:
        """This run, reading its images from `source`; unchanged if that is empty.

        `source` is the folder where the images are now or, if they were in memory, the same images; images with another
        digest are refused when they are read. `labels`: one for each image in memory.
        """
        data = self.config.data
        if is_given(labels) and not (is_given(source) and is_in_memory(data)):
            raise UserError(
                f"{self.path} was trained on images in memory: give the same images together with their labels"
                if is_in_memory(data)
                else f"{self.path} was trained on {data} and takes its labels from there: leave out {setting('labels')}"
            )
        if not is_given(source):
            return self
        if data in DATASETS:
            name = f"the data set {data}"
            raise UserError(f"{self.path} was trained on {name}: {setting('data_dir')} says where that is kept")
        if is_in_memory(data):
            c, digest = self.config, self.load_checkpoint(lambda _: None)[1]["data"].get("files", "")
            options: dict[str, Any] = {
                "labels": labels if is_given(labels) else c.labels,
                "holdout": c.holdout,
                "on_error": c.on_error,
            }
            dataset = open_dataset(source, limit=c.limit, mirror=c.mirror == "yes", **options).emptied()
            dataset = dataclasses.replace(dataset, normalization=c.normalization, expected_digest=digest)
            return dataclasses.replace(self, data=dataset)
        if not isinstance(source, str | Path):
            raise UserError(f"{self.path} was trained on the folder {data}: give the folder where its images are now")
        folder = expand(source).absolute()
        if not folder.is_dir():
            raise UserError(f"there is no folder {source}")
        return dataclasses.replace(self, config=dataclasses.replace(self.config, data=str(folder)))

    def update_config(self, **changes: Any) -> Run:
        """Change settings in config.yaml; return the run with them."""
        self._write_config(dataclasses.replace(Run.open(self.path).config, **changes))
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **changes))

    def record_given(self, names: Iterable[str]) -> None:
        """Add settings to those that environment.json lists as the user's own."""
        about = self.environment()
        if "given" in about:
            self.write_environment(about | {"given": sorted({*about["given"], *names})})

    def add_training_code(self, digest: str) -> bool:
        """Record the code that continues this run; a run that two versions trained has both digests.

        Returns whether it is not the code that trained the run so far.
        """
        about = self.environment()
        known = about.get("training_code", "")
        is_new = bool(known and digest) and digest != known.rpartition("+")[2]
        if is_new:
            self.write_environment(about | {"training_code": f"{known}+{digest}"})
        return is_new

    def change_threads(self) -> int:
        """Record the number of torch's threads from now on; returns the number until now, or 0 if it is the same."""
        about, now = self.environment(), torch.get_num_threads()
        before = about.get("threads", now)
        if before == now or not isinstance(before, int):
            return 0
        self.write_environment(about | {"threads": now})
        return before

    def environment(self, warn: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
        """environment.json; empty if there is none, or if it is damaged."""
        return self._read_json("environment.json", warn)

    def _read_json(self, name: str, warn: Callable[[str], None]) -> dict[str, Any]:
        """A JSON file of the run. It counts as empty if it does not exist or is damaged; `warn` says the latter."""
        try:
            content = json.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            warn(f"{self.path / name} cannot be read and is not used: {error}")
            return {}
        if not isinstance(content, dict):
            warn(f"{self.path / name} does not have the expected format and is not used")
            return {}
        return content

    def write_environment(self, about: dict[str, Any]) -> None:
        self.write("environment.json", json.dumps(about, indent=1) + "\n")

    def _write_config(self, config: Config) -> None:
        text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
        self.write("config.yaml", text + _signature(text))

    def was_config_edited(self) -> bool:
        """Whether config.yaml is not as mixnn wrote it; also True for files of earlier versions."""
        text = (self.path / "config.yaml").read_text()
        return not text.endswith(_signature(text.rpartition("# ")[0]))

    def dataset(self, data_dir: str | Path = "") -> Dataset:
        """The data the run was trained on. It may be gone: `check_data` says so."""
        if self.data is not None:
            return self.data
        return configured_dataset(dataclasses.replace(self.config, data_dir=str(data_dir) or self.config.data_dir))

    def check_data(self, hint: str = "") -> None:
        """UserError if the images the run was trained on are gone or must be given again; `hint` says what to do."""
        data = self.config.data
        if self.data is not None or data in DATASETS or expand(data).is_dir():
            return
        if is_shards(data):
            shard_files(data)
            return
        if is_in_memory(data):
            again = "source=images" if hint else self.how_to_resume
            raise UserError(
                f"{self.path} was trained on {data}, images in memory that a run folder does not store\n"
                f"give the same images again, in Python: {again}"
            )
        is_name = not Path(data).is_absolute()  # folders are stored as absolute paths
        if is_name and self.config.imports:
            with self.explain_unknown_names():
                DATASETS.find(data)
        if is_name and not hint:
            raise UserError(f"{self.path} was trained on {data}, which is not a data set in mixnn.data.DATASETS")
        hint = hint or f"use `{calling('pretrain', 'FOLDER', resume=self.path)}`"
        raise UserError(f"{data}, which {self.path} was trained on, is gone: {hint}")

    def images(self, source: Any = "", data_dir: str = "", split: str = "all") -> Images:
        """The images of a source; without one, those of the run's data.

        "all" are all images of a folder, a list of files or shards, also the test images. Of other data, they are the
        training images.
        """
        if not is_given(source):
            self.check_data(f"use {setting('source', 'FOLDER')}")
            if self.data is not None:
                return self.data.images(split)
            if split != "all":  # as training split them, by labels and holdout; its limit is for training only
                place = data_dir or self.config.data_dir
                return configured_dataset(dataclasses.replace(self.config, data_dir=place, limit=0)).images(split)
            source = self.config.data
        elif isinstance(source, list | tuple) and not source:
            raise UserError("the list of files is empty")
        return open_images(source, data_dir or self.config.data_dir, split)

    def write(self, name: str, text: str) -> None:
        write_atomically(self.path / name, text.encode())

    def log(self, record: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        check_not_removed(self.path / "metrics.jsonl")
        try:
            with open(self.path / "metrics.jsonl", "a") as file:
                file.write(_log_line(record))
        except OSError as error:
            raise UserError(f"cannot write {self.path / 'metrics.jsonl'}: {error.strerror}") from None

    def metrics(self, warn: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; those that cannot be read are left out, and `warn` says how many."""
        path = self.path / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # the last one may be being written
        has_checksums = any(CHECKSUM in line for line in lines)  # earlier versions wrote none
        found = [_log_record(line, has_checksums) for line in lines]
        readable = [record for record in found if record is not None]
        if lost := len(found) - len(readable):
            warn(f"{plural(lost, 'line')} of {path} cannot be read and {'is' if lost == 1 else 'are'} left out")
        return readable

    def write_judgement(self, found: dict[str, Any]) -> None:
        """Label-free numbers at the start and later, and which weights were kept: when, and which share was trained."""
        self.write(JUDGEMENT, json.dumps(found, indent=1) + "\n")

    def judgement(self, warn: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
        """What `write_judgement` wrote; empty if there is nothing, or if it is damaged."""
        found = self._read_json(JUDGEMENT, warn)
        points, keys = found.get("points"), {"step", "progress", "problems"}
        well_formed = isinstance(points, list) and all(isinstance(p, dict) and keys <= p.keys() for p in points)
        well_formed &= isinstance(found.get("start"), dict) and isinstance(found.get("share", 1.0), int | float)
        if found and not well_formed:
            warn(f"{self.path / JUDGEMENT} does not have the expected format and is not used")
            return {}
        return found

    def truncate_log(self, step: int, warn: Callable[[str], None] = lambda _: None) -> None:
        """Drop log lines after a step, so that a resumed run's log equals that of an uninterrupted one."""
        kept = [record for record in self.metrics(warn) if record.get("step", 0) <= step]
        self.write("metrics.jsonl", "".join(map(_log_line, kept)))
        (self.path / DIVERGED).unlink(missing_ok=True)

    @contextmanager
    def recording_divergence(self) -> Iterator[None]:
        try:
            yield
        except Diverged as error:
            if is_main_process():
                with suppress(UserError):  # the disk may be full as well
                    self.write(DIVERGED, f"{error}\n")
            raise

    def results(self, warn: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
        """results.json; empty if there is none, or if it is damaged."""
        return self._read_json("results.json", warn)

    def save_results(self, results: dict[str, Any], warn: Callable[[str], None] = lambda _: None) -> None:
        """Add to results.json. A damaged one is kept under another name, since part of it may be readable."""
        problems: list[str] = []
        known, path = self.results(problems.append), self.path / "results.json"
        if problems:
            with suppress(OSError):  # then writing fails as well, and says why
                path.replace(self.path / DAMAGED_RESULTS)
            warn(f"{path} was damaged: what it held is in {DAMAGED_RESULTS} now, and the new results are in a new file")
        self.write("results.json", json.dumps(known | results, indent=1) + "\n")

    def command(self, warn: Callable[[str], None] = lambda _: None) -> str:
        """What was typed to start the run; empty if command.txt is missing or damaged."""
        try:
            return (self.path / "command.txt").read_text().strip()
        except (OSError, ValueError) as error:
            warn(f"command.txt of {self.path} cannot be read: {error}")
            return ""

    def summary(self, warn: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
        """Everything about the run except its weights; tables are made from it."""
        return {
            "config": dataclasses.asdict(self.config),
            "command": self.command(warn),
            "environment": self.environment(warn),
            "results": self.results(warn),
            "metrics": self.metrics(warn),
        }

    def save_checkpoint(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
        return checkpoint.save(self.path / "checkpoints", step, tensors, state)

    def load_checkpoint(self, warn: Callable[[str], None]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The newest intact checkpoint; damaged and missing ones are named."""
        problems: list[str] = []

        def note(problem: str) -> None:
            problems.append(problem)
            warn(problem)

        tensors, state = self._newest_checkpoint(note)
        step, logged = state.get("step", 0), max((record.get("step", 0) for record in self.metrics()), default=0)
        if step < logged and not problems:
            warn(f"{self.path} was trained to step {logged}, but its newest checkpoint is of step {step}")
        return tensors, state

    def _newest_checkpoint(self, warn: Callable[[str], None]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        paths = checkpoint.list_checkpoints(self.path / "checkpoints")
        for path in paths:
            try:
                return checkpoint.load(path)
            except checkpoint.Damaged as error:
                warn(f"{error}{'' if path == paths[-1] else '; using the one before'}")
        damaged = ": all are damaged" if paths else ""
        again = f"train it again with {calling('pretrain', ..., out=self.path, overwrite=True)}"
        raise UserError(f"{self.path} has no usable checkpoint{damaged}\n{again}")

    @property
    def has_checkpoint(self) -> bool:
        return bool(checkpoint.list_checkpoints(self.path / "checkpoints"))

    @property
    def can_resume(self) -> bool:
        """Whether there is an intact checkpoint to train from."""
        try:
            self.load_training(lambda _: None)
        except UserError:
            return False
        return True

    def load_training(self, warn: Callable[[str], None]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The newest intact checkpoint, to train further; UserError if the run was made without training."""
        tensors, state = self._newest_checkpoint(warn)
        if not any(name.startswith("method.") for name in tensors):
            raise UserError(
                f"{self.path} holds the {self.config.init_from} encoder as it comes and was not trained: "
                f"use `{calling('pretrain', self.config.data)}`"
            )
        return tensors, state


def did_you_mean(path: Path, is_wanted: Callable[[Path], bool]) -> str:
    """Hint for a message about a missing folder: one next to it with a similar name, if there is one."""
    names = [other.name for other in sorted(path.parent.glob("*")) if is_wanted(other)]
    longer = [name for name in names if name.startswith(path.name)]
    close = longer or difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _signature(settings: str) -> str:
    """The last line of config.yaml, a comment that shows whether the file was edited."""
    return f"# checksum {zlib.crc32(settings.encode()):08x}; a run cannot change its settings, so do not edit them\n"


def _log_line(record: dict[str, Any]) -> str:
    """A line of metrics.jsonl, which ends with a checksum of what is before it."""
    text = json.dumps(record)[:-1]
    return f'{text}{CHECKSUM.decode()}{zlib.crc32(text.encode()):08x}"}}\n'


def _log_record(line: bytes, has_checksum: bool) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None if it is damaged."""
    if has_checksum:
        text, _, rest = line.rpartition(CHECKSUM)
        if rest != b'%08x"}' % zlib.crc32(text):
            return None
        line = text + b"}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    numbers = [record[name] for name in ("epoch", "step") if name in record] if isinstance(record, dict) else []
    return record if numbers and all(isinstance(number, int | float) for number in numbers) else None


def _is_begun(path: Path) -> bool:
    """Whether the folder holds only what is written before it becomes a run folder."""
    first = rf"{re.escape(LOCK)}|command\.txt|{TEMPORARY.pattern}|\.(command\.txt|config\.yaml)\.\d+\.tmp"
    return path.is_dir() and all(file.is_file() and re.fullmatch(first, file.name) for file in path.iterdir())


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and state of the code, so that a result can be traced to what made it."""
    return {
        "mixnn": mixnn.__version__,
        "git": _git_state(),
        "code": code_digest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device_name(device),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git_state() -> str | None:
    """Commit of the code, with + if the working tree differs; None outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(PACKAGE.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "mixnn/__init__.py")  # otherwise the commit belongs to another repository
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
