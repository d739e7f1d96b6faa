"""The runs that a table lacks, one after the other: trained, resumed or only evaluated, as far as each has come."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixnn import methods
from mixnn.config import Config, Interrupted, UserError, setting
from mixnn.device import pick_device
from mixnn.evaluation.evaluate import evaluate, save_summary
from mixnn.evaluation.linear import Protocol
from mixnn.files import try_lock
from mixnn.paper.plan import Planned, counting, finished, last, trained
from mixnn.progress import Reporter, duration, plural, print_table
from mixnn.runs import Run
from mixnn.runs.folder import device_name
from mixnn.training.pretrain import MOVABLE, pretrain

Summaries = Mapping[tuple[str, int], Any]
NOTHING: dict[str, Any] = {"results": {}}


@dataclass(frozen=True)
class Work:
    """What is wanted of every run, and where runs and results lie."""

    results: Path
    runs: Path
    metrics: tuple[str, ...]
    probe_epochs: int

    def finished(self) -> Summaries:
        return finished(self.results, self.probe_epochs)

    def lacking(self, planned: Planned, done: Summaries) -> list[str]:
        """The metrics that are wanted of a run and that its summary has not."""
        known = done.get((planned.fingerprint, planned.seed), NOTHING)["results"]
        return [metric for metric in self.metrics if metric not in known]

    def folder(self, planned: Planned) -> Path:
        return self.runs / planned.name

    def epochs_left(self, planned: Planned) -> float:
        """What training has yet to do; nothing only where the run folder has a whole checkpoint of the last epoch."""
        epochs = max(1, planned.config.epochs)  # a run of none is still to be made
        try:
            run = Run.open(self.folder(planned))
            summary = run.summary()
            step = run.load_checkpoint(lambda _: None)[1]["step"]
        except (OSError, ValueError):  # UserError too; what is damaged, training repairs or names
            return epochs
        logged = last(summary)
        if trained(summary) and step == logged.get("step", 0):
            return 0
        return max(1, epochs - step * logged["epoch"] / logged["step"]) if logged else epochs

    def file(self, planned: Planned) -> Path:
        """Of the summary; one with another probe than the paper's stands beside it, and replaces none."""
        probe = "" if self.probe_epochs == Protocol.epochs else f"-probe{self.probe_epochs}"
        return self.results / f"{planned.name}{probe}.json"

    def one(self, planned: Planned, reporter: Reporter) -> None:
        """Train a run as far as it needs it, and measure what is wanted of it or was known before."""
        known = self.finished().get((planned.fingerprint, planned.seed), NOTHING)["results"]
        there = not self.epochs_left(planned)
        run = Run.open(self.folder(planned)) if there else self._train(planned, reporter)
        where: dict[str, Any] = {"device": planned.config.device, "data_dir": planned.config.data_dir}
        measured = counting(run.summary(), self.probe_epochs)["results"] if there else {}
        for metric in dict.fromkeys([*self.metrics, *known]):
            if metric not in measured:
                evaluate(run, protocol=metric, epochs=self.probe_epochs, reporter=reporter, **where)
        save_summary(run.path, self.file(planned))

    def _train(self, planned: Planned, reporter: Reporter) -> Run:
        path, config = self.folder(planned), planned.config
        if Run.is_one(path) and any((path / "checkpoints").glob("*")):
            own = {f.name: f.default for f in dataclasses.fields(Config)}
            given = {name: getattr(config, name) for name in MOVABLE if getattr(config, name) != own[name]}
            return pretrain(resume=path, reporter=reporter, **given)
        settings = {k: v for k, v in vars(config).items() if k not in ("data", "options")}
        try:
            Run.check_free(path, overwrite=True)
        except UserError:
            raise UserError(f"{path} is not a run folder: use another {setting('runs')}") from None
        where: dict[str, Any] = {"out": path, "overwrite": path.exists()}
        return pretrain(
            config.data, options=config.options, command=planned.command, reporter=reporter, **where, **settings
        )


def carry_out(
    work: Work, missing: Sequence[Planned], done: Summaries, reporter: Reporter
) -> tuple[dict[str, str], list[str]]:
    """Run after run; returns those that failed, with the reason, and those that another process is at."""
    try:
        work.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the folder {work.results} ({error.strerror}): use another {setting('results')}"
        ) from None
    failed: dict[str, str] = {}
    elsewhere: list[str] = []
    pace, whose = pace_of(done, missing[0].config)
    pace = 0.0 if whose else pace
    costs = {p.name: cost(p, work.epochs_left(p)) for p in missing}
    for i, planned in enumerate(missing):
        left = sum(costs[p.name] for p in missing[i:]) * pace
        reporter.info(f"[{i + 1}/{len(missing)}] {planned.name}" + (f", about {duration(left)} left" if left else ""))
        start = time.perf_counter()
        try:
            with try_lock(work.runs / ".claims" / planned.name) as mine:
                if not mine:
                    reporter.info("  another process is at it")
                    elsewhere.append(planned.name)
                    continue
                if not work.lacking(planned, work.finished()):  # by now
                    continue
                work.one(planned, reporter)
            _error_file(work, planned).unlink(missing_ok=True)
            if costs[planned.name]:
                spent = (time.perf_counter() - start) / costs[planned.name]
                pace = spent if not pace else (pace + spent) / 2
        except Interrupted as error:
            raise Interrupted(f"{error}; or type the same command again", error.signal) from None
        except KeyboardInterrupt:  # not in training, which answers by itself
            raise Interrupted("interrupted: the same command goes on from here", signal.SIGINT) from None
        except Exception as error:  # one run's trouble is not the others'
            reason = str(error)
            failed[planned.name] = reason.splitlines()[0] if reason else type(error).__name__
            where = "" if isinstance(error, UserError) else _keep_traceback(_error_file(work, planned))
            reporter.warn(f"{planned.name} failed: {failed[planned.name]}{where}")
    return failed, elsewhere


def _error_file(work: Work, planned: Planned) -> Path:
    return work.runs / f"{planned.name}.error.txt"


def _keep_traceback(file: Path) -> str:
    """Write it beside the run; returns where, or nothing if that cannot be written either."""
    with contextlib.suppress(OSError):
        file.write_text(traceback.format_exc())
        return f"; {file} has the traceback"
    return ""


def show(work: Work, needed: Sequence[Planned], done: Summaries) -> None:
    """The plan: each run, what is to be done for it, and about how long that takes."""
    pace, whose = pace_of(done, needed[0].config)
    missing = [p for p in needed if work.lacking(p, done)]
    left = {p.name: work.epochs_left(p) for p in missing}
    to_train = [p for p in missing if left[p.name]]
    rows = []
    for p in needed:
        state = "there"
        if p in to_train:
            state = duration(cost(p, left[p.name]) * pace) if pace else "to run"
            if left[p.name] < p.config.epochs:
                state += f", from epoch {p.config.epochs - left[p.name]:.0f} on"
            elif (p.fingerprint, p.seed) in done:
                state += f", again: there is neither {' nor '.join(work.lacking(p, done))} nor its run folder"
        elif p in missing:
            state = f"to evaluate: {' and '.join(work.lacking(p, done))}"
        rows.append((p.name, " ".join(f"{k}={v}" for k, v in _differences(p).items()), state))
    print_table(("run", "options other than the method's own", "time"), rows)
    time = duration(sum(cost(p, left[p.name]) for p in to_train) * pace)
    total = f", about {time}{whose} at the pace of the fastest run in {work.results}" if pace else ""
    rest = f"; {len(missing) - len(to_train)} to evaluate" if len(missing) > len(to_train) else ""
    print(f"{len(to_train)} of {plural(len(needed), 'run')} to do{total if to_train else ''}{rest}")


def _differences(planned: Planned) -> dict[str, Any]:
    defaults = methods.resolve_options(planned.config.method, {}, {})
    return {k: v for k, v in planned.config.options.items() if v != defaults[k]}


def cost(planned: Planned, epochs: float) -> float:
    """Of so many epochs of a run, in encoder passes times epochs."""
    return methods.cost(planned.config.method, planned.config.options) * epochs


def pace_of(done: Summaries, config: Config) -> tuple[float, str]:
    """Seconds for one unit of cost in the fastest run on these data (others may have shared a device); 0 if none.

    Of the runs on this device; where there is none, of others, with words that name theirs.
    """
    paces: dict[str, float] = {}
    for summary in done.values():
        its, metrics = summary["config"], summary["metrics"]
        if its["data"] == config.data and metrics:
            pace = metrics[-1]["seconds"] / (methods.cost(its["method"], its["options"]) * its["epochs"])
            device = summary.get("environment", {}).get("device") or "an unknown device"
            paces[device] = min(pace, paces.get(device, pace))
    here = device_name(pick_device(config.device))
    if here in paces or not paces:
        return paces.get(here, 0.0), ""
    device, pace = min(paces.items(), key=lambda item: item[1])
    return pace, f" on {device}"
