"""verify: whether a run folder, an exported file or the image cache is intact, and whether a run resumes exactly."""

from __future__ import annotations

import json
import math
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from mixnn import methods
from mixnn.apps import embeddings as store
from mixnn.apps.classify.files import CLASSIFIER
from mixnn.config import (
    Config,
    DataDir,
    Device,
    MovedTo,
    Param,
    UserError,
    calling,
    parse_duration,
    saved_config,
    setting,
    verb,
)
from mixnn.data.cache import ENTRY, INFOS, cache_root, check_entry
from mixnn.data.dataset import is_given, is_in_memory
from mixnn.files import LOCK, expand, leftovers, try_flock
from mixnn.progress import Reporter, duration, plural, print_table, reporter_for
from mixnn.runs import Run, checkpoint
from mixnn.runs.encoder import read_export
from mixnn.runs.folder import DAMAGED_RESULTS, DIVERGED, JUDGEMENT, environment
from mixnn.runs.weights import CARD, CHECKSUM, read_tensors, verify_checksum
from mixnn.training.pretrain import check_unchanged, settings_unlike_checkpoint
from mixnn.training.replay import Checkpoint, Comparison, OutOfTime, num_threads, replay_interval, replay_resume

__all__ = ["Verification", "verify"]

CACHE = "cache"  # stands for the image cache, wherever that is
EXPORTS = (".safetensors", ".onnx", ".pt2")
NAMED = 3  # things of one kind that a text names; the others are counted
# Of environment.json, what bits depend on, in words.
PROVENANCE = {
    "mixnn": "mixnn",
    "code": "code of mixnn",
    "torch": "torch",
    "device": "processor",
    "processes": "number of processes",
}
AGAIN = "delete it: it is made again when it is needed"

Status = Literal["ok", "wrong", "left out"]


@dataclass(frozen=True)
class Check:
    """One check and its outcome. `text` says what was found and, if that is wrong, what to do."""

    name: str
    status: Status
    text: str


class Verification(dict[str, Any]):
    """What `verify` found, as plain values: path, ok, and checks, each with name, status and text."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; some checks may have been left out."""
        return bool(self["ok"])

    @property
    def problems(self) -> list[str]:
        """Each problem, and what to do about it."""
        return [f"{check['name']}: {check['text']}" for check in self["checks"] if check["status"] == "wrong"]


@verb
def verify(
    path: Annotated[
        str | Path | Run, Param(f"run folder, exported file, or the word {CACHE} for the image cache", metavar="RUN")
    ],
    *,
    replay: Annotated[
        float | str, Param("time limit for training the last steps of a run again; 0: do not train", metavar="TIME")
    ] = "60s",
    source: MovedTo = "",
    device: Device = "auto",
    data_dir: DataDir = "",
    verbose: bool | Reporter = False,
) -> Verification:
    """Check that files are intact and that a run resumes exactly. Nothing in the run is changed.

    In a run folder, all files are read. The settings and the log are compared with the checkpoints, and the images with
    those of the training. Then the last steps are trained again in a temporary folder, from the checkpoint before the
    last to the last one. If that would take longer than `replay`, a few new steps are trained instead, with and without
    a resume. On a CPU the weights must have the same bits; on a GPU the largest difference is stated.

    >>> mixnn.verify("runs/photos").ok
    True

    Examples:
        mixnn verify runs/photos
        mixnn verify runs/photos --replay 10m
        mixnn verify encoder.safetensors
        mixnn verify cache
    """
    limit = f"{replay:g}" if isinstance(replay, float) else replay
    seconds = 0.0 if limit == "0" else parse_duration(limit, "replay")
    reporter = reporter_for(verbose)
    place = path.path if isinstance(path, Run) else expand(path)
    if str(path) == CACHE and not place.exists():
        place = cache_root()
    if not place.exists():
        raise UserError(f"there is no run folder, exported file or image cache called {place}")
    if place.is_file():
        checks = [_check_export(place)]
    elif (place / "config.yaml").is_file() or (place / "checkpoints").is_dir():
        given = path if isinstance(path, Run) else None
        checks = _RunChecks(place, given, str(data_dir), device, reporter).results(source, seconds)
    elif place == cache_root() or any(ENTRY.fullmatch(entry.name) for entry in place.iterdir()):
        checks = _check_cache(place)
    else:
        raise UserError(f"{place} is not a run folder, an exported file or an image cache")
    ok = all(check.status != "wrong" for check in checks)
    return Verification(path=str(place), ok=ok, checks=[asdict(check) for check in checks])


def show_verify(found: Verification) -> None:
    """Print one line per check."""
    print_table(("checked", "", "found"), [(c["name"], c["status"], c["text"]) for c in found["checks"]])


def _listed(names: Iterable[object]) -> str:
    """a, b, c and 2 more"""
    several = [str(name) for name in names]
    more = f" and {len(several) - NAMED} more" if len(several) > NAMED else ""
    return ", ".join(several[:NAMED]) + more


def _non_finite(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())]


# Exports and the cache


def _check_export(path: Path) -> Check:
    """An exported file: its checksum, its numbers and its card."""
    again = f"export it again, with {calling('export', ..., out=path, overwrite=True)}, or download it again"
    if path.suffix not in EXPORTS:
        raise UserError(f"{path} is not an exported file: these end in {', '.join(EXPORTS)}")
    try:
        card, text = _READERS[path.suffix](path)
    except UserError as error:
        return Check(path.name, "wrong", str(error).replace("\n", "; "))
    except Exception as error:  # damaged files can raise nearly anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return Check(path.name, "wrong", f"cannot be read ({reason}): {again}")
    card_file = path.with_name(f"{path.name}.json")
    if card is None or not card_file.is_file():
        return Check(path.name, "ok", text)
    try:
        same = json.loads(card_file.read_bytes()) == card
    except (OSError, ValueError, RecursionError):
        same = False
    if not same:
        return Check(path.name, "wrong", f"the card in {card_file.name} is not the one in the file: {again}")
    return Check(path.name, "ok", f"{text}, and {card_file.name} is the same card")


def _read_safetensors(path: Path) -> tuple[Any, str]:
    try:
        tensors, header = read_tensors(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    if bad := _non_finite(tensors):
        raise ValueError(f"NaN or inf in {_listed(bad)}")
    card = json.loads(header[CARD])
    if not isinstance(card, dict):
        raise ValueError("its card is not readable")
    how = _about_checksum(CHECKSUM in header)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read_export(path)
        except UserError as error:
            if "import the code" not in str(error):  # a network of the user's own need not be known here
                raise
    return card, f"{how}, the weights fit the card"


def _read_onnx(path: Path) -> tuple[Any, str]:
    how = _about_checksum(verify_checksum(path))
    try:
        import onnx
    except ImportError:
        return None, f"{how}; not read: that needs the onnx package"
    model = onnx.load(str(path))
    onnx.checker.check_model(model)
    return json.loads({p.key: p.value for p in model.metadata_props}[CARD]), f"{how}, a valid program"


def _read_pt2(path: Path) -> tuple[Any, str]:
    how = _about_checksum(verify_checksum(path))
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"the checksum of {damaged} does not match")
        (card,) = [name for name in archive.namelist() if name.endswith(f"{CARD}.json")]
        return json.loads(archive.read(card)), f"{how}; the checksums of its parts match"


def _about_checksum(has_one: bool) -> str:
    return "its checksum matches" if has_one else "it is of an earlier version and has no checksum"


_READERS: dict[str, Callable[[Path], tuple[Any, str]]] = {
    ".safetensors": _read_safetensors,
    ".onnx": _read_onnx,
    ".pt2": _read_pt2,
}


def _check_cache(root: Path) -> list[Check]:
    """Every entry of the image cache, and what killed processes left there."""
    checks, intact, old, images = [], 0, 0, 0
    for entry in sorted(path for path in root.iterdir() if ENTRY.fullmatch(path.name)):
        try:
            images += check_entry(entry)
            intact += 1
        except ValueError as error:
            if _is_old_entry(entry):
                old += 1
                continue
            checks.append(Check(entry.name, "wrong", f"damaged ({error}): {AGAIN}"))
    earlier = f"; {plural(old, 'more')} of earlier versions, which are not used" if old else ""
    text = f"{plural(intact, 'folder')} with {plural(images, 'image')}: their checksums match{earlier}"
    return [*checks, Check("entries", "ok", text), _check_leftovers([root])]


def _is_old_entry(entry: Path) -> bool:
    """Whether an entry is of the first version, which had no checksum and is not used any more."""
    try:
        return isinstance(json.loads((entry / INFOS).read_bytes()), list)
    except (OSError, ValueError, RecursionError):
        return False


def _check_leftovers(folders: Iterable[Path]) -> Check:
    found = [path for folder in folders for path in leftovers(folder)]
    if not found:
        return Check("temporary files", "ok", "none left over")
    names = _listed(path.name for path in found)
    return Check("temporary files", "wrong", f"left over by a process that was stopped: {names}; delete them")


# Runs


@dataclass
class _RunChecks:
    """The checks of one run folder. Each looks at one kind of file; none stops the others."""

    path: Path
    given: Run | None
    data_dir: str
    device: str
    reporter: Reporter

    def results(self, source: Any, seconds: float) -> list[Check]:
        if not self._is_idle():
            raise UserError(f"another process is training {self.path}: verify it after that has ended")
        intact, of_checkpoints = self._checkpoints()
        state = intact[0][1] if intact else {}
        run, of_config = self._config(state)
        found = [of_config, *of_checkpoints]
        found.append(self._log(run, intact[0] if intact else None))
        found += self._json_files(run)
        found += self._embeddings()
        found += [_check_export(p) for p in sorted(self.path.glob("encoder.*")) if p.suffix in EXPORTS]
        found.append(_check_leftovers([self.path, *(p for p in self.path.rglob("*") if p.is_dir())]))
        if of_config.status == "wrong" or not intact:
            return [*found, Check("data", "left out", "needs intact settings and an intact checkpoint")]
        here = replace(run.config, data_dir=self.data_dir or run.config.data_dir)
        run, of_data = self._data(replace(run, config=here), source, state)
        found.append(of_data)
        if seconds:
            found.append(self._replay(run, intact, of_data, seconds))
        return found

    def _is_idle(self) -> bool:
        try:
            with open(self.path / LOCK, "rb") as file:
                return try_flock(file.fileno(), shared=True)
        except OSError:
            return True

    def _checkpoints(self) -> tuple[list[Checkpoint], list[Check]]:
        """The intact checkpoints, newest first, and what is wrong with the others."""
        paths = checkpoint.list_checkpoints(self.path / "checkpoints")
        intact, wrong = [], []
        for path in paths:
            try:
                tensors, state = checkpoint.load(path)
            except checkpoint.Damaged as error:
                reason = str(error).removeprefix(f"{path} is ")
                wrong.append(Check(path.name, "wrong", f"{reason}: {_without(path, paths)}"))
                continue
            if bad := _non_finite(tensors):
                wrong.append(Check(path.name, "wrong", f"NaN or inf in {_listed(bad)}: {_without(path, paths)}"))
            elif checkpoint.name_of(state["step"]) != path.name:
                wrong.append(Check(path.name, "wrong", f"holds step {state['step']}: {_without(path, paths)}"))
            else:
                intact.append((tensors, state))
        if not paths:
            again = calling("pretrain", ..., out=self.path, overwrite=True)
            wrong.append(Check("checkpoints", "wrong", f"there is none: train the run again, with {again}"))
        if intact:
            steps = _listed(f"step {state['step']:,}" for _, state in reversed(intact))
            wrong.append(Check("checkpoints", "ok", f"{steps}: the checksum matches, all numbers are finite"))
        return intact, wrong

    def _config(self, state: dict[str, Any]) -> tuple[Run, Check]:
        """The run, with the settings of its checkpoint if config.yaml cannot be read."""
        name, restore = "config.yaml", "restore the file; the checkpoints hold the settings as well"
        try:
            run = self.given or Run.open(self.path)
            run = replace(Run.open(self.path, run.network), data=run.data)
            edited = run.was_config_edited()
            signed = (self.path / name).read_text().rstrip().rpartition("\n")[2].startswith("# ")
        except (UserError, OSError, ValueError) as error:
            return Run(self.path, _stored_config(state)), Check(name, "wrong", f"{error}: {restore}")
        try:
            check_unchanged(run, run.config, state)
        except UserError as error:
            return run, Check(name, "wrong", str(error).replace("\n", "; "))
        if not edited:
            return run, Check(name, "ok", "its checksum matches, and its settings are those of the last checkpoint")
        if changed := settings_unlike_checkpoint(run.config, state):
            return run, Check(name, "ok", f"{'; '.join(changed)}: these settings may change")
        if signed:
            return run, Check(name, "wrong", f"its checksum does not match, so it was changed: {restore}")
        return run, Check(name, "ok", "of an earlier version, without a checksum")

    def _log(self, run: Run, last: Checkpoint | None) -> Check:
        """metrics.jsonl: every line is readable, steps increase, and no epoch before the last checkpoint is missing."""
        name, problems = "metrics.jsonl", list[str]()
        try:
            records = run.metrics(lambda text: problems.append(text.replace(str(self.path / name), "it")))
        except OSError as error:
            return Check(name, "wrong", f"cannot be read: {error.strerror}")
        if (self.path / DIVERGED).is_file():
            return Check(name, "wrong", (self.path / DIVERGED).read_text(errors="replace").strip())
        if last is None:
            text = "; ".join(problems) or f"{plural(len(records), 'line')}, not compared with a checkpoint"
            return Check(name, "wrong" if problems else "ok", text)
        tensors, state = last
        per_epoch = max(1, state["data"]["images"] // state.get("batch", run.config.batch_size))
        steps = [record.get("step", round(record.get("epoch", 0) * per_epoch)) for record in records]
        if any(b <= a for a, b in pairwise(steps)):
            problems.append("the steps do not increase")
        odd = [
            s for s, r in zip(steps, records, strict=True) if abs(r.get("epoch", s / per_epoch) - s / per_epoch) > 0.01
        ]
        problems += [f"step and epoch do not fit together at step {_listed(odd)}"] if odd else []
        missing = [step for step in range(per_epoch, state["step"] + 1, per_epoch) if step not in steps]
        problems += [f"there is no line for step {_listed(missing)}"] if missing else []
        for record in (r for r, step in zip(records, steps, strict=True) if step == state["step"]):
            if other := _other_means(record, tensors, state):
                problems.append(f"{_listed(other)} at step {state['step']} is not that of the checkpoint")
        if missing == [state["step"]] and len(problems) == 1:
            how = calling("pretrain", resume=self.path)
            return Check(name, "wrong", f"the last epoch is not logged: {how} adds its line")
        if problems:
            return Check(name, "wrong", f"{'; '.join(problems)}: restore the file if you can; training is not affected")
        later = sum(step > state["step"] for step in steps)
        rest = f"; {later} after the last checkpoint, which a resume repeats" if later else ""
        return Check(name, "ok", f"{plural(len(records), 'line')}, complete up to step {state['step']:,}{rest}")

    def _json_files(self, run: Run) -> list[Check]:
        readers: dict[str, tuple[Callable[[Callable[[str], None]], Any], str]] = {
            "environment.json": (run.environment, "restore it; it only describes the run"),
            "results.json": (run.results, f"use {calling('evaluate', self.path)}"),
            JUDGEMENT: (run.judgement, "restore it; a resume begins a new one"),
            "command.txt": (run.command, "restore it; it only describes the run"),
        }
        found = []
        for name, (read, what_to_do) in readers.items():
            heard: list[str] = []
            read(heard.append)
            if heard:
                found.append(Check(name, "wrong", f"{heard[0].replace(str(self.path / name), 'it')}: {what_to_do}"))
            elif (self.path / name).is_file():
                found.append(Check(name, "ok", "readable"))
            elif name == "environment.json":
                found.append(Check(name, "wrong", f"missing: {what_to_do}"))
        if (self.path / DAMAGED_RESULTS).is_file():
            found.append(
                Check(DAMAGED_RESULTS, "wrong", "results that were damaged before: save what you need, delete it")
            )
        return found

    def _embeddings(self) -> list[Check]:
        """Check the stored embeddings and the saved classifier."""
        wrong, intact = [], 0
        for path in sorted([*self.path.glob("embeddings/*.npz"), *self.path.glob("embeddings.npz")]):
            try:
                found = store.read(path)
                if len(found.names) != len(found.vectors) or not np.isfinite(found.vectors).all():
                    raise UserError("its vectors are not finite, or not one per name")
                intact += 1
            except UserError as error:
                name = str(path.relative_to(self.path))
                wrong.append(Check(name, "wrong", f"{str(error).replace(f' from {path}', '')}: {AGAIN}"))
        if intact:
            wrong.append(Check("embeddings", "ok", f"{plural(intact, 'file')} of vectors: readable, all finite"))
        path = self.path / "classifier" / CLASSIFIER
        if path.is_file():
            wrong.append(_check_classifier(path))
        return wrong

    def _data(self, run: Run, source: Any, state: dict[str, Any]) -> tuple[Run, Check]:
        """The run with its images, and whether they are those of the training."""
        if is_in_memory(run.config.data) and not (is_given(source) or run.data):
            text = "images in memory, which a run folder does not store: give them in Python, with source=images"
            return run, Check("data", "left out", text)
        try:
            run = run.moved(source)
            run.check_data(f"put it back, or use {setting('source', 'FOLDER')}")
            if "labels" not in state["data"]:  # the encoder as it comes, or an old checkpoint
                now: dict[str, Any] = {"images": len(run.images())}
            else:
                self.reporter.info(f"reading the images of {run.config.data}")
                split = methods.find(run.config.method).split
                now = run.dataset().load(split, run.config.reading_size).identity()
        except UserError as error:
            return run, Check("data", "wrong", str(error).replace("\n", "; "))
        then = state["data"]
        changed = [name for name, value in now.items() if name in then and then[name] != value]
        if changed == ["labels"]:
            return run, Check("data", "wrong", "the images are the same, but not the labels: restore them")
        if changed:
            what = f"{plural(now['images'], 'image')}, {then['images']:,} in training"
            return run, Check("data", "wrong", f"not the images of the training ({what}): restore them")
        return run, Check("data", "ok", f"{plural(now['images'], 'image')}, as in training")

    def _replay(self, run: Run, intact: list[Checkpoint], of_data: Check, seconds: float) -> Check:
        tensors, state = intact[0]
        if of_data.status != "ok":
            return Check("replay", "left out", "needs the images of the training")
        if not any(name.startswith("method.") for name in tensors):
            return Check("replay", "left out", "the encoder was not trained")
        here = self.device if self.device != "auto" else state["device"]
        here = here if here == "cpu" or torch.cuda.is_available() else "cpu"
        threads = run.environment().get("threads") if here == "cpu" else 0
        began = time.perf_counter()
        try:
            with num_threads(threads if isinstance(threads, int) else 0):
                return self._replay_on(run, intact, here, began + seconds)
        except OutOfTime:
            longer = setting("replay", f"{math.ceil(4 * seconds)}s")
            return Check("replay", "left out", f"takes longer than {duration(seconds)}: use {longer} or more")
        except UserError as error:
            return Check("replay", "left out", str(error).replace("\n", "; "))

    def _replay_on(self, run: Run, intact: list[Checkpoint], device: str, until: float) -> Check:
        """Repeat the last interval if that is possible, and otherwise a few steps."""
        why = ""
        if len(intact) < 2:
            why = "there is one checkpoint"
        elif "time" in intact[0][1]:
            why = "its learning rate follows the clock"
        elif intact[0][1]["device"] != torch.device(device).type:
            why = f"it was trained on {intact[0][1]['device']}"
        if not why:
            first, last = (state["step"] for _, state in (intact[1], intact[0]))
            self.reporter.info(f"training from step {first:,} to {last:,} once more")
            try:
                found = replay_interval(run, intact[1], intact[0], device, until)
                others = self._other_environment(run, device)
                if not found.different or device != "cpu" or not others:
                    return _about_interval(found, device)
                apart = f"steps {first:,} to {last:,} differ by {found.largest:.1g}"
                why = f"{apart}, with another {_listed(others)} than then"
            except OutOfTime:
                why = f"steps {first:,} to {last:,} take too long"
        self.reporter.info("training a few steps with and without a resume")
        return _about_resume(replay_resume(run, intact[0], device, until), device, why)

    def _other_environment(self, run: Run, device: str) -> list[str]:
        """What differs now from the training, among the conditions that exact bits depend on."""
        then, now = run.environment(), environment(torch.device(device)) | {"processes": 1}
        return [words for name, words in PROVENANCE.items() if then.get(name, now[name]) != now[name]]


def _stored_config(state: dict[str, Any]) -> Config:
    try:
        return saved_config(state.get("settings", {}))
    except (UserError, TypeError, AttributeError):
        return Config()


def _without(path: Path, paths: list[Path]) -> str:
    """Advice on a checkpoint that cannot be used."""
    if path == paths[0] and len(paths) > 1:
        return "delete it; a resume goes on from the one before"
    return "delete it" if len(paths) > 1 else "train the run again"


def _other_means(record: dict[str, Any], tensors: dict[str, Tensor], state: dict[str, Any]) -> list[str]:
    """Names of logged numbers that are not the means of a checkpoint made at the same step."""
    means = dict(zip(state["names"], (tensors["sums"] / max(1, state["count"])).tolist(), strict=False))
    return [
        n for n, mean in means.items() if n in record and not math.isclose(record[n], mean, rel_tol=1e-9, abs_tol=1e-12)
    ]


def _check_classifier(path: Path) -> Check:
    name = f"{path.parent.name}/{path.name}"
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            json.loads(archive.read("about.json"))
    except Exception as error:  # damaged files can raise nearly anything
        damaged = str(error) or type(error).__name__
    if damaged:
        return Check(name, "wrong", f"damaged ({damaged}): classify with the labels again")
    return Check(name, "ok", "the checksums of its parts match")


def _about_interval(found: Comparison, device: str) -> Check:
    what = f"trained from step {found.first:,} to {found.last:,} once more"
    return _about(found, device, what, "a resume on this machine does not repeat the run")


def _about_resume(found: Comparison, device: str, why: str) -> Check:
    what = (
        f"{plural(found.last - found.first, 'new step')} after step {found.first:,}, with and without a resume ({why})"
    )
    return _about(found, device, what, "a resume on this machine is not exact")


def _about(found: Comparison, device: str, what: str, meaning: str) -> Check:
    tensors = plural(found.num_tensors, "tensor")
    if not found.different:
        return Check("replay", "ok", f"{what}: all {tensors} have the same bits")
    differ = f"{len(found.different)} of {tensors} differ, {found.different[0]} most, by {found.largest:.1g}"
    if device != "cpu":
        return Check("replay", "ok", f"{what}: {differ}; on a GPU, bits may differ")
    return Check(
        "replay",
        "wrong",
        f"{what}: {differ}. {meaning}: run this again; if it stays, suspect memory, processor or code",
    )
