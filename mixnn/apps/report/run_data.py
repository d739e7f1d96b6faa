"""A run folder, read for the report. Parts that cannot be read are left out and listed in `missing`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mixnn.apps.report.judged import Judged
from mixnn.apps.report.verdict import Verdict, is_number, judge
from mixnn.config import Config, UserError, calling
from mixnn.evaluation.evaluate import PROTOCOLS
from mixnn.runs import Run
from mixnn.runs.folder import DIVERGED, JUDGEMENT
from mixnn.training.judgement import NUMBERS


@dataclasses.dataclass
class RunData:
    """The files of one run, except weights and images."""

    run: Run
    name: str
    command: str
    environment: dict[str, Any]
    results: dict[str, Any]  # results.json
    metrics: list[dict[str, Any]]  # metrics.jsonl, one record per epoch
    diverged: str  # why training stopped, if loss or weights became NaN or inf
    judgement: dict[str, Any]  # judgement.json; empty if there is none
    missing: list[str]  # one sentence for each part that is missing or out of date

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def init_from(self) -> str:
        """Where the encoder's weights came from. Old runs do not have this setting, but their command may name it."""
        if self.config.init_from:
            return self.config.init_from
        found = re.search(r"--init-from[ =]('[^']*'|\S+)", self.command)
        return found[1].strip("'") if found else ""

    @property
    def judged(self) -> Judged | None:
        """The judgement without labels; None if there is none."""
        unfinished = bool(self.metrics) and self.metrics[-1]["epoch"] < self.config.epochs
        return Judged(self.judgement, self.init_from, unfinished) if self.judgement else None

    @property
    def verdict(self) -> Verdict:
        return judge(self.metrics, self.config.epochs, self.diverged, self.init_from, self.judged)


def read(run: str | Path | Run) -> RunData:
    """The data of a run, or of a run folder; UserError if it is not one."""
    found = Run.open(run.path if isinstance(run, Run) else run)  # a run may have gone on since it was opened
    if not found.made_by_mixnn:
        raise UserError(
            f"{found.path} is not a run folder, though it has a config.yaml; `{calling('pretrain')}` makes one"
        )
    if isinstance(run, Run):
        found = dataclasses.replace(found, data=run.data, network=run.network)
    data = read_files(found)
    data.missing += find_gaps(data)
    return data


def read_files(run: Run) -> RunData:
    """The data of a run; `missing` has only the files that cannot be read."""
    missing: list[str] = []

    def part(name: str, read: Callable[[], Any], empty: Any) -> Any:
        """The content of one file, or `empty` and a sentence in `missing`."""
        try:
            value = read()
        except (OSError, ValueError) as error:
            missing.append(f"{name} cannot be read: {error}.")
            return empty
        if type(value) is not type(empty):
            missing.append(f"{name} does not have the expected format.")
            return empty
        return value

    def note(sentence: str) -> None:
        missing.append(f"{sentence.replace(f'{run.path}/', '')}.")

    metrics = part("metrics.jsonl", lambda: run.metrics(note), [])
    return RunData(
        run=run,
        name=run.path.name or run.path.resolve().name,
        command=run.command(note),
        environment=run.environment(note),
        results=_well_formed(run.results(note)),
        metrics=[record for record in metrics if is_number(record.get("epoch"))],
        diverged=part(DIVERGED, lambda: _text(run.path / DIVERGED), ""),
        judgement=part(JUDGEMENT, lambda: _judgement(run.path / JUDGEMENT), {}),
        missing=missing,
    )


def find_gaps(data: RunData) -> list[str]:
    """One sentence for each thing the run lacks, and for each result of an older checkpoint than the last."""
    gaps, run, evaluate = [], data.run, f"`{data.run.command_line('evaluate')}`"
    if not data.metrics and run.config.epochs:
        gaps.append("No epoch is logged, so there are no curves.")
    not_evaluated = [protocol.label for name, protocol in PROTOCOLS.items() if name not in data.results]
    if run.dataset().has_labeled_test and not_evaluated:
        what_to_do = f"run {evaluate}" if run.has_checkpoint else "the run has no checkpoint"
        gaps.append(f"Not evaluated: {', '.join(not_evaluated)} ({what_to_do}).")
    for name, protocol in PROTOCOLS.items():
        step = data.results.get(name, {}).get("protocol", {}).get("checkpoint_step")
        last_step = data.metrics[-1].get("step", 0) if data.metrics else 0
        if run.has_checkpoint and step is not None and step < last_step:
            older = f"evaluated at step {step}, but training went on to step {last_step}"
            gaps.append(f"{protocol.label}: {older} (run {evaluate} again).")
    return gaps


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}


def _judgement(path: Path) -> Any:
    content = _json(path)
    return _well_formed_judgement(content) if content else content


def _well_formed_judgement(content: Any) -> dict[str, Any]:
    """The content of judgement.json with every check once; ValueError if something is missing."""
    try:
        checks = {check["progress"]: check for check in content["points"]}  # a run of few steps has several of one step
        found = {"start": content["start"], "points": [checks[progress] for progress in sorted(checks)]}
        numbers = [found["start"][name] for name in NUMBERS]
        numbers += [check[name] for check in found["points"] for name in (*NUMBERS, "progress")]
        numbers += [content["kept"], content["share"]]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it lacks {error}") from None
    if not found["points"] or not all(map(is_number, numbers)):
        raise ValueError("it lacks numbers")
    return found | {"kept": content["kept"], "share": content["share"]}


def _well_formed(results: dict[str, Any]) -> dict[str, Any]:
    """results.json without entries that are not in the form `evaluate` writes. Unknown entries stay."""
    known = (*PROTOCOLS, "evaluated_with")
    return {name: value for name, value in results.items() if name not in known or _is_result(value)}


def _is_result(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("protocol", {}), dict)
