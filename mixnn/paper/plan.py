"""The runs behind the tables: which runs a row needs, and which of them are finished.

A run is identified by the fingerprint of its configuration. The fingerprint covers every setting that can change
numbers and differs from its default, so results stay valid when an option is added, and tables share runs. It also
covers the precision that was used: a run in bf16 on CUDA and one in fp32 on a CPU are different runs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixnn import methods
from mixnn.config import Config, UserError, setting
from mixnn.data import DATASETS, open_dataset
from mixnn.device import pick_device
from mixnn.files import expand
from mixnn.paper.tables import PROBE_EPOCHS, PROTOCOLS, Row, Table
from mixnn.training.configure import configure

RunKey = tuple[str, int]  # fingerprint and seed
Summary = Mapping[str, Any]  # a run's configuration, log and results, as `Run.summary` returns them
Summaries = Mapping[RunKey, Summary]

# Settings that change where or how a run is computed but not its numbers; and seed and options, which are kept apart.
NOT_IN_FINGERPRINT = (
    "device",
    "mode",
    "data_dir",
    "knn_every",
    "checkpoint_every",
    "loggers",
    "recipe",  # its settings count
    "resident",
    "on_error",
    "seed",
    "options",
    "imports",
    "precision",  # the one that was used counts, which "auto" does not say
)


# What the user asks for


def resolve_data(data: str | Path, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The data set and the settings as runs store them: a folder and a file of labels by their absolute paths.

    Refuses settings that the rows of a table decide.
    """
    for name in ("seed", "method", "options"):
        if name in settings:
            raise UserError(
                f"{name} cannot be a setting, because the table decides it: use {setting('seeds')} or {setting('rows')}"
            )
    if settings.get("time_budget"):
        raise UserError("a table compares runs of a fixed length: use epochs instead of time_budget")
    options = {field.name for cls in methods.METHODS.values() for field in dataclasses.fields(cls.Options)}
    for name in options & settings.keys():
        raise UserError(
            f"{name} is a method's option, not a setting: the rows of a table set it; "
            f"{setting('tables', 'FILE')} adds rows of yours"
        )
    labels = str(settings.get("labels", ""))
    if labels not in ("", "folders"):
        settings = {**settings, "labels": str(expand(labels).absolute())}
    return open_dataset(data).name, dict(settings)


# Planned runs


@dataclass(frozen=True)
class PlannedRun:
    """A run that a table needs, and the command that makes it."""

    config: Config
    fingerprint: str
    command: str

    @property
    def key(self) -> RunKey:
        return self.fingerprint, self.config.seed

    @property
    def name(self) -> str:
        """Name of its run folder and of its summary."""
        data = Path(self.config.data).name
        return f"{data}-{self.config.method}-{self.fingerprint}-seed{self.config.seed}"

    def on_this_device(self) -> PlannedRun:
        """This run as the device here would make it."""
        return self.in_precision(used_precision(self.config.precision, pick_device(self.config.device).type == "cuda"))

    def in_any_precision(self) -> list[PlannedRun]:
        """This run in bf16 and in fp32; if a precision was asked for, this run alone."""
        return [self.in_precision("bf16"), self.in_precision("fp32")] if self.config.precision == "auto" else [self]

    def in_precision(self, precision: str) -> PlannedRun:
        """This run as it would be in bf16 or fp32."""
        return dataclasses.replace(self, fingerprint=fingerprint(dataclasses.asdict(self.config), precision))


def used_precision(asked: str, on_cuda: bool) -> str:
    """The precision of training, bf16 or fp32, for a value of the setting `precision`."""
    return "bf16" if on_cuda and asked != "fp32" else "fp32"


def fingerprint(config: Mapping[str, Any], precision: str = "") -> str:
    """Eight hexadecimal digits that identify a configuration (given as a dict), its seed aside.

    `precision` is the one that was used, if the configuration leaves it to the device. The default is the recipe's,
    bf16.
    """
    known = _config_defaults()
    values = {k: v for k, v in config.items() if k in known and k not in NOT_IN_FINGERPRINT and v != known[k]}
    data = config["data"]
    if data in DATASETS and values.get("image_size") == DATASETS[data].train_size:
        values.pop("image_size")
    defaults = methods.resolve_options(config["method"], {}, {})
    options = {k: v for k, v in config["options"].items() if v != defaults.get(k)}
    if (precision or config.get("precision")) == "fp32":
        values["precision"] = "fp32"
    named = {"data": data, "method": config["method"], "options": options}
    return hashlib.sha256(json.dumps(values | named, sort_keys=True).encode()).hexdigest()[:8]


@functools.cache
def _config_defaults() -> dict[str, Any]:
    return dataclasses.asdict(Config())


def plan_row(row: Row, data: str, seeds: Iterable[int], settings: Mapping[str, Any]) -> list[PlannedRun]:
    """The runs of a row, one per seed."""
    runs = []
    for seed in seeds:
        given = {"method": row.method, "seed": seed, **settings}
        config = configure(data, row.options, given)
        flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        flags += [word for name, value in row.options.items() for word in ("--set", f"{name}={value}")]
        flags += [word for code in config.imports if "imports" not in given for word in ("--import", code)]
        command = shlex.join(["mixnn", "pretrain", data, *flags])
        runs.append(PlannedRun(config, fingerprint(dataclasses.asdict(config)), command))
    return runs


def plan(tables: Iterable[Table], data: str, seeds: Iterable[int], settings: Mapping[str, Any]) -> list[PlannedRun]:
    """All runs of the tables, without repetition; seed by seed, so that each table is complete as early as possible."""
    runs: dict[str, PlannedRun] = {}
    for seed in seeds:
        for table in tables:
            for row in table.rows:
                for run in plan_row(row, data, [seed], settings):
                    runs.setdefault(run.name, run)
    return list(runs.values())


def settings_off_recipe(table: Table, data: str, settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that can change numbers and differ from the recipe: name -> (our value, the recipe's)."""
    changed: dict[str, tuple[Any, Any]] = {}
    for row in table.rows:
        ours, recipe = (vars(plan_row(row, data, [0], given)[0].config) for given in (settings, {}))
        changed |= {k: (ours[k], recipe[k]) for k in settings if k not in NOT_IN_FINGERPRINT and ours[k] != recipe[k]}
    return changed


# Finished runs


def load_finished(folder: Path, probe_epochs: int = PROBE_EPOCHS) -> dict[RunKey, dict[str, Any]]:
    """Summaries of all fully trained runs in a folder of JSON files, with their valid results only.

    What they were evaluated with stands apart from the results.

    If several have the same configuration and seed, the one with most results is taken, and the last of equals.
    """
    finished: dict[RunKey, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            summary = json.loads(path.read_text())
            if not _is_summary(summary) or not is_trained(summary):
                continue
            key = key_of(summary)
            evaluated_with = summary["results"].get("evaluated_with", {})
            summary = {**summary, "results": valid_results(summary, probe_epochs), "evaluated_with": evaluated_with}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): repair or remove it") from None
        if key not in finished or len(summary["results"]) >= len(finished[key]["results"]):
            finished[key] = summary
    return finished


def key_of(summary: Summary) -> RunKey:
    """What identifies a finished run."""
    return fingerprint(summary["config"], precision_of(summary)), summary["config"]["seed"]


def precision_of(summary: Summary) -> str:
    """The precision a run was trained in, bf16 or fp32. Runs that do not say what device they used count as bf16."""
    on_cuda = summary.get("environment", {}).get("cuda", "unknown") is not None
    return used_precision(summary["config"].get("precision", "auto"), on_cuda)


def find(run: PlannedRun, finished: Summaries) -> Summary | None:
    """The finished run that a planned one stands for; None if there is none."""
    found = [finished[other.key] for other in run.in_any_precision() if other.key in finished]
    return max(found, key=lambda summary: len(summary["results"]), default=None)


def runs_of(
    row: Row, data: str, seeds: Iterable[int], settings: Mapping[str, Any], finished: Summaries
) -> list[Summary]:
    """The finished runs of a row, by seed, all in one precision: the one with most runs, and bf16 among equals."""
    first = plan_row(row, data, [0], settings)[0]  # seeds share a fingerprint
    by_precision = [[(run.fingerprint, seed) for seed in seeds] for run in first.in_any_precision()]
    return max(([finished[key] for key in keys if key in finished] for keys in by_precision), key=len)


def _is_summary(content: Any) -> bool:
    """Whether a JSON file holds the summary of a run with a known method; other files may lie in the same folder."""
    config = content.get("config") if isinstance(content, dict) else None
    if not isinstance(config, dict) or "options" not in config or not content.get("results"):
        return False
    return config.get("method") in methods.METHODS


def last_record(summary: Summary) -> Mapping[str, Any]:
    """The last record of a run's log; empty for a run of zero epochs."""
    return summary["metrics"][-1] if summary["metrics"] else {}


def is_trained(summary: Summary) -> bool:
    """Whether the run reached its last epoch; a run of zero epochs has an empty log and counts as trained."""
    return last_record(summary).get("epoch", 0) == summary["config"]["epochs"]


def valid_results(summary: Summary, probe_epochs: int) -> dict[str, Any]:
    """Results by protocol that were measured at the last step and, for the linear probe, after `probe_epochs`."""
    step, valid = last_record(summary).get("step", 0), {}
    for protocol in PROTOCOLS:
        how = summary["results"].get(protocol, {}).get("protocol", {})
        if how.get("checkpoint_step") == step and how.get("epochs", probe_epochs) == probe_epochs:
            valid[protocol] = summary["results"][protocol]
    return valid


def accuracy(summary: Summary, protocol: str) -> float | None:
    """The run's headline accuracy under a protocol; None if it was not evaluated."""
    result = summary["results"].get(protocol)
    return None if result is None else result[PROTOCOLS[protocol].headline]


def best_accuracy(summary: Summary, protocol: str) -> float | None:
    """The run's best accuracy over epochs under a protocol, which the test images chose; None if it has none."""
    best, last = summary["results"].get(protocol, {}).get(PROTOCOLS[protocol].best), accuracy(summary, protocol)
    return None if best is None or last is None else max(best, last)  # readings during training may be less precise
