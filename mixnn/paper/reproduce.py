"""reproduce: a table of the paper with our numbers next to the published ones, running what is missing.

Each finished run is one small JSON file in the results folder. Missing runs are trained and evaluated, interrupted
ones are resumed, and runs that lack a number are only evaluated. A run that fails does not stop the others. Several
processes may fill a table together: each run is locked by the first process that starts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from mixnn import methods
from mixnn.config import (
    SETTING,
    Config,
    Interrupted,
    Param,
    UserError,
    fields_of,
    on_command_line,
    setting,
    unknown,
    verb,
)
from mixnn.data import configured_dataset
from mixnn.device import pick_device
from mixnn.evaluation.evaluate import PROTOCOLS, evaluate, protocols_of, save_summary
from mixnn.files import PACKAGE, expand, try_lock
from mixnn.paper.claims import NOT_RUN, judge_claims, print_claims, read_steps
from mixnn.paper.plan import (
    PlannedRun,
    Summaries,
    Summary,
    find,
    is_trained,
    key_of,
    last_record,
    load_finished,
    plan,
    plan_row,
    precision_of,
    resolve_data,
    valid_results,
)
from mixnn.paper.provenance import COMMITS, is_trained_by_other_code, read_commits, stale_protocols, stale_runs
from mixnn.paper.render import FORMATS, fill, print_tables
from mixnn.paper.tables import ORDERS, PAPER_DATASETS, PROBE_EPOCHS, TABLES, Row, Table, in_leaky_order, tables_with
from mixnn.progress import Reporter, duration, plural, print_table, reporter_for
from mixnn.runs import Run
from mixnn.runs.folder import device_name
from mixnn.training.pretrain import RESUMABLE_SETTINGS, start_pretrain

__all__ = ["reproduce", "tables_with"]


class Reproduction(dict[str, Any]):
    """Cells of each table, by its name. `show()` prints the tables, the plan, or the list of tables."""

    show: Callable[[], None]
    problem: str = ""  # why cells are missing, if runs failed

    def __init__(self, cells: Mapping[str, Any], show: Callable[[], None]) -> None:
        super().__init__(cells)
        self.show = show


@verb
def reproduce(
    table: Annotated[str, Param("which table, or all; without a name, the tables are listed")] = "",
    *,
    data: Annotated[str | Path, Param("data set, or a folder of images")] = "cifar10",
    seeds: Annotated[
        int | Sequence[int] | None,
        Param("seeds to run for every row [runs 0, shows all finished ones]", low=0, metavar="0,1,2"),
    ] = None,
    rows: Annotated[str | Sequence[str], Param("only this row of the table", flag="--row", metavar="NAME")] = (),
    results: Annotated[str | Path, Param("folder of finished runs, one JSON file each", metavar="FOLDER")] = "results",
    runs: Annotated[str | Path, Param("folder of the run folders", metavar="FOLDER")] = "runs",
    order: Annotated[
        str,
        Param("when the second direction searches the support set: fixed, or leaky as in the paper", choices=ORDERS),
    ] = ORDERS[0],
    claims: Annotated[bool, Param("print a verdict on each claim of the paper, and run nothing")] = False,
    run: Annotated[bool, Param("run what the table lacks")] = True,
    stale: Annotated[bool, Param("also rerun what older code made")] = False,
    dry_run: Annotated[bool, Param("show the plan and its time, run nothing")] = False,
    output: Annotated[str, Param("how to print the table", choices=tuple(FORMATS), flag="--format")] = "terminal",
    protocol: Annotated[str, Param(f"how runs are evaluated: all, {', '.join(PROTOCOLS)}")] = "all",
    probe_epochs: Annotated[int, Param("epochs of the linear probe", low=1)] = PROBE_EPOCHS,
    tables: Annotated[str | Path, Param("YAML file with tables of your own", metavar="FILE")] = "",
    verbose: bool | Reporter = False,
    **settings: Annotated[Any, SETTING],
) -> Reproduction:
    """Train and evaluate the missing runs of a table, or of "all". `show()` of the result prints the tables.

    It returns the cells by table. `rows` selects rows by name. With `run=False`, nothing is trained. `dry_run` only
    shows the plan. `stale` replaces results of older code, for all seeds that the table shows, on a device of the same
    precision. `order="leaky"` searches the support set in the order of the published numbers. `tables` is a file with
    tables of your own. `settings` are fields of Config. If runs fail, UserError says which. `claims` instead returns
    the verdicts on the paper's claims, from all finished runs.

    >>> mixnn.reproduce().show()  # doctest: +ELLIPSIS
    table ...
    >>> found = mixnn.reproduce("main", rows="MNN", run=False, results="results")
    >>> list(found)
    ['main']

    Examples:
        mixnn reproduce main --dry-run
        mixnn reproduce main --row MNN --row MSF --seeds 0,1,2
        mixnn reproduce main --results results --no-run --format markdown
        mixnn reproduce main --order leaky --no-run
        mixnn reproduce --claims
    """
    reporter, known = reporter_for(verbose), tables_with(tables)
    if claims:
        others = {"data": str(data) != "cifar10", "seeds": seeds is not None, "rows": rows, "order": order != ORDERS[0]}
        others |= {"stale": stale, "dry_run": dry_run, "protocol": protocol != "all", "tables": str(tables)}
        check_claims_alone(["the table"] * bool(table) + [name for name in others if others[name]], settings, output)
        judged = judge_claims(load_finished(expand(results), probe_epochs), steps=read_steps(expand(results)))
        if all(verdict.verdict == NOT_RUN for verdict in judged):
            _warn_without_runs(expand(results), reporter)
        return Reproduction(
            {"claims": [verdict.as_dict() for verdict in judged]}, partial(print_claims, judged, output)
        )
    if not table:
        listed = [(n, t.title, str(len(t.rows))) for n, t in known.items()]
        return Reproduction({}, lambda: print_table(("table", "what it compares", "rows"), listed))
    protocols = protocols_of(protocol)
    data, settings = resolve_data(data, settings)
    seeds = None if seeds is None else check_seeds(seeds)
    selected = select_tables(table, rows, known)
    selected = [in_leaky_order(t) for t in selected] if order == "leaky" else selected
    chosen, dropped = drop_rows_without_labels(selected, data, settings)
    if dropped:
        reason = f"training needs labels that {data}'s images lack: {'; '.join(dropped)}"
        if not chosen:
            raise UserError(f"nothing to run, because {reason}")
        reporter.warn(f"left out, because {reason}")
    folders = expand(results), expand(runs)
    runner = Runner(*folders, protocols, probe_epochs, reporter, stale)
    needed, finished = plan(chosen, data, seeds or [0], settings), runner.load_finished()
    shown_too = [] if seeds else finished_seeds(chosen, data, settings, finished, needed)
    if stale:
        needed = [*needed, *shown_too]
        if run or dry_run:
            check_stale_here(needed, finished)
    fingerprints = {other.fingerprint for planned in needed for other in planned.in_any_precision()}
    if (dry_run or not run) and not any(fingerprint in fingerprints for fingerprint, _ in finished):
        is_papers = data in PAPER_DATASETS and not settings and any(t.name in TABLES for t in chosen)
        _warn_without_runs(runner.results, reporter, is_papers)
    if dry_run:
        return Reproduction({}, runner.plan(needed, finished))
    missing = (
        [planned.on_this_device() for planned in needed if runner.missing_protocols(planned, finished)] if run else []
    )
    failed: dict[str, str] = {}
    elsewhere: list[str] = []
    no_data = _why_no_data(missing[0].config) if missing else ""  # asked once, not run by run
    if missing and not no_data:
        failed, elsewhere = runner.run_all(missing, finished)
        finished = runner.load_finished()
    if changed := stale_runs([*needed, *([] if stale else shown_too)], finished):
        names = ", ".join(changed)
        reporter.info(
            f"the code behind these runs has changed since: {names}; {setting('stale', True)} runs them again"
        )
    shown, commits = seeds or sorted({seed for _, seed in finished} | {0}), read_commits(runner.results)
    filled = [fill(t, data, shown, settings, finished, commits, probe_epochs, len(seeds or [0])) for t in chosen]
    found = {t.name: t.rows for t in filled}
    reproduction = Reproduction(found, partial(print_tables, filled, output, as_list=table == "all"))
    if elsewhere:
        reporter.warn(f"another process is running {', '.join(elsewhere)}: run this again later for their numbers")
    if no_data:
        reproduction.problem = f"{plural(len(missing), 'run')} missing, and {no_data}"
    if failed:
        names = "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
        again = f"{len(failed)} of {plural(len(missing), 'run')} failed; repeat this to try again"
        reproduction.problem = f"{again}\n{names}"
    if reproduction.problem and not on_command_line():  # a command prints first what is there
        raise UserError(reproduction.problem)
    return reproduction


def show_reproduce(reproduction: Reproduction) -> None:
    """Print what `reproduce` returned; UserError if runs failed."""
    reproduction.show()
    if reproduction.problem:
        raise UserError(reproduction.problem)


def _warn_without_runs(results: Path, reporter: Reporter, is_papers: bool = True) -> None:
    """Say that the folder has no finished run to show and, if the paper's are asked for, where those are."""
    here, folder = results.is_dir(), results.absolute()
    problem = f"{folder} has no finished runs to show" if here else f"no finished runs: there is no folder {folder}"
    committed = PACKAGE.parent / "results"
    if folder.resolve() == committed.resolve():
        reporter.warn(problem)
    elif is_papers and (committed / COMMITS).is_file():
        reporter.warn(f"{problem}; use {setting('results', str(committed))} to see the committed ones")
    elif is_papers:
        advice = f"run this in a checkout of it, or use {setting('results', 'FOLDER')}"
        reporter.warn(f"{problem}; the committed ones are in results/ of mixnn's repository: {advice}")
    elif not here:
        reporter.warn(f"{problem}; use {setting('results', 'FOLDER')} for another")


# What the user asks for, checked before anything runs


def check_claims_alone(others: Sequence[str], settings: Mapping[str, Any], output: str) -> None:
    """UserError if verdicts on claims are asked for together with what only tables have."""
    named = [other if " " in other else setting(other) for other in others] + ["the settings"] * bool(settings)
    if named:
        raise UserError(f"{setting('claims', True)} takes all finished runs: leave out {', '.join(named)}")
    if output == "latex":
        raise UserError(f"verdicts on claims cannot be printed in LaTeX: use another {setting('output')}")


def check_stale_here(needed: Iterable[PlannedRun], finished: Summaries) -> None:
    """UserError if stale runs cannot be replaced here, because this device trains in the other precision."""
    other: dict[str, list[str]] = {}
    for planned in needed:
        found = find(planned, finished)
        if found and stale_protocols(found) and planned.on_this_device().key != key_of(found):
            other.setdefault(precision_of(found), []).append(planned.in_precision(precision_of(found)).name)
    if other:
        was, names = next(iter(other.items()))
        ours = "fp32" if was == "bf16" else "bf16"
        advice = "use a CUDA device" if was == "bf16" else f"use {setting('setting', 'precision=fp32')}"
        raise UserError(
            f"{setting('stale', True)} replaces results by runs in the same precision. The table has "
            f"{plural(len(names), 'stale run')} in {was}, but this device trains in {ours}: {advice}, or keep runs in "
            f"{ours} apart, in another folder ({setting('results', 'FOLDER')})"
        )


def check_seeds(seeds: int | Iterable[int]) -> list[int]:
    """The seeds as a list; an int is one seed."""
    found = [seeds] if isinstance(seeds, int) else list(seeds)
    if not found or not all(isinstance(seed, int) and seed >= 0 for seed in found):
        raise UserError(f"seeds={seeds!r}: seeds takes integers from 0 on, as in {setting('seeds', '0,1,2')}")
    for seed in found:
        if found.count(seed) > 1:
            raise UserError(f"seed {seed} is given {found.count(seed)} times: give each seed once")
    return found


def select_tables(table: str, rows: str | Sequence[str], known: Mapping[str, Table]) -> list[Table]:
    """The table of this name, or all known ones, with only the rows of these names; a str is one name."""
    if table != "all" and table not in known:
        raise unknown("table", table, [*known, "all"])
    tables = list(known.values()) if table == "all" else [known[table]]
    names = {row.name.lower(): row.name for t in tables for row in t.rows}
    wanted = [rows] if isinstance(rows, str) else list(rows)
    for name in wanted:
        if name.lower() not in names:
            several = f"\nname several by repeating {setting('rows')}" if "," in name else ""
            raise UserError(f"{unknown('row', name, names.values())}{several}")
    lower = [name.lower() for name in wanted]
    return _filter_rows(tables, lambda row: not lower or row.name.lower() in lower)


def finished_seeds(
    tables: Sequence[Table], data: str, settings: Mapping[str, Any], finished: Summaries, needed: Sequence[PlannedRun]
) -> list[PlannedRun]:
    """The finished runs that these tables show besides the needed ones: those with other seeds."""
    names, seeds = {run.name for run in needed}, sorted({seed for _, seed in finished})
    return [run for run in plan(tables, data, seeds, settings) if run.name not in names and find(run, finished)]


def drop_rows_without_labels(
    tables: Sequence[Table], data: str, settings: Mapping[str, Any]
) -> tuple[list[Table], list[str]]:
    """The tables without rows that train with labels where images have none, and the names of these rows."""
    config = plan_row(tables[0].rows[0], data, [0], settings)[0].config
    dataset = configured_dataset(config)
    if not dataset.has_labeled_test:
        raise UserError(
            f"{data} has no labeled test images to evaluate on: it needs the folders train and test, and "
            f"{setting('labels', 'folders')} or a CSV"
        )
    dropped = [row.name for table in tables for row in table.rows if dataset.has_unlabeled and _needs_labels(row)]
    return _filter_rows(tables, lambda row: row.name not in dropped), sorted(set(dropped))


def _needs_labels(row: Row) -> bool:
    """Whether a row needs a label for every pretraining image; the supervised reference trains on labeled ones."""
    options = methods.resolve_options(row.method, {}, row.options)
    return methods.uses_labels(row.method, options) and methods.find(row.method).split == "pretrain"


def _filter_rows(tables: Iterable[Table], keep: Callable[[Row], bool]) -> list[Table]:
    """The tables with the rows to keep; tables that have none are left out."""
    filtered = [dataclasses.replace(t, rows=tuple(row for row in t.rows if keep(row))) for t in tables]
    return [t for t in filtered if t.rows]


def _why_no_data(config: Config) -> str:
    """Why the images cannot be read; empty if they can."""
    try:
        configured_dataset(config).check()
    except UserError as error:
        return str(error)
    return ""


# Missing runs


@dataclass(frozen=True)
class Runner:
    """Runs what is missing: each run is trained, resumed or only evaluated, depending on how far it has come."""

    results: Path  # folder of summaries
    runs: Path  # folder of run folders
    protocols: tuple[str, ...]  # to evaluate each run by
    probe_epochs: int
    reporter: Reporter
    stale: bool = False  # whether runs that older code made count as missing

    def run_all(self, missing: Sequence[PlannedRun], finished: Summaries) -> tuple[dict[str, str], list[str]]:
        """Complete one run after the other.

        Returns the runs that failed, with the reason, and the names of those that another process is running.
        """
        try:
            self.results.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot make the folder {self.results} ({error.strerror}): use another {setting('results')}"
            ) from None
        failed: dict[str, str] = {}
        elsewhere: list[str] = []
        pace, other_device = seconds_per_cost(finished, missing[0].config)
        pace = 0.0 if other_device else pace
        costs = {run.name: training_cost(run.config, self.epochs_left(run)) for run in missing}
        for i, run in enumerate(missing):
            left = sum(costs[later.name] for later in missing[i:]) * pace
            time_left = f", about {duration(left)} left" if left else ""
            self.reporter.info(f"[{i + 1}/{len(missing)}] {run.name}{time_left}")
            start = time.perf_counter()
            try:
                with try_lock(self.runs / ".locks" / run.name) as locked:
                    if not locked:
                        self.reporter.info("  another process is running it")
                        elsewhere.append(run.name)
                        continue
                    if not self.missing_protocols(run, self.load_finished()):  # another process has finished it
                        continue
                    self.complete(run)
                self.error_file(run).unlink(missing_ok=True)
                if costs[run.name]:
                    measured = (time.perf_counter() - start) / costs[run.name]
                    pace = (pace + measured) / 2 if pace else measured
            except Interrupted as error:
                raise Interrupted(f"{error}; or repeat the same command", error.signal) from None
            except KeyboardInterrupt:  # outside training, which turns it into Interrupted itself
                raise Interrupted("interrupted: the same command continues from here", signal.SIGINT) from None
            except Exception as error:  # the other runs may still succeed
                reason = str(error)
                failed[run.name] = reason.splitlines()[0] if reason else type(error).__name__
                where = "" if isinstance(error, UserError) else self._save_traceback(run)
                self.reporter.warn(f"{run.name} failed: {failed[run.name]}{where}")
        return failed, elsewhere

    def complete(self, run: PlannedRun) -> None:
        """Train a run as far as necessary, and evaluate it by the protocols asked for and those it had before."""
        self._check_settings(run)
        had = (find(run, self.load_finished()) or {"results": {}})["results"]
        if self.epochs_left(run):
            trained, valid = self._train(run), {}
        else:
            trained = Run.open(self.run_folder(run))
            summary = trained.summary()
            valid = valid_results(summary, self.probe_epochs)
            valid = {k: v for k, v in valid.items() if k not in self._stale_protocols(summary)}
        where: dict[str, Any] = {"device": run.config.device, "data_dir": run.config.data_dir}
        for protocol in dict.fromkeys([*self.protocols, *had]):
            if protocol not in valid:
                evaluate(trained, protocol=protocol, epochs=self.probe_epochs, verbose=self.reporter, **where)
        save_summary(trained.path, self.summary_file(run))

    def _check_settings(self, run: PlannedRun) -> None:
        """UserError if a run of this name has other settings, because a default has changed since it was made."""
        found: dict[Path, dict[str, Any]] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # training repairs what is damaged
            found[self.summary_file(run)] = dict(json.loads(self.summary_file(run).read_text())["config"]["options"])
        with contextlib.suppress(OSError, ValueError):
            found[self.run_folder(run)] = Run.open(self.run_folder(run)).config.options
        for path, old in found.items():
            new = run.config.options
            changed = [f"{k}={old[k]!r} (now {new[k]!r})" for k in old.keys() & new.keys() if old[k] != new[k]]
            if changed:
                raise UserError(
                    f"{path} has {', '.join(sorted(changed))}, because a default of {run.config.method} has changed: "
                    "move it away, or write the option into the row"
                )

    def _train(self, run: PlannedRun) -> Run:
        """Train a run from the start, or resume it."""
        path, config = self.run_folder(run), run.config
        begun = Run.find(path)
        if begun and begun.has_checkpoint and not self._is_stale(begun):
            defaults = {f.name: f.default for f in dataclasses.fields(Config)}
            given = {k: getattr(config, k) for k in RESUMABLE_SETTINGS if getattr(config, k) != defaults[k]}
            return start_pretrain(resume=path, settings=given, reporter=self.reporter)
        settings = {name: getattr(config, name) for name in fields_of(Config) if name != "data"}
        try:
            Run.check_replaceable(path, overwrite=True)
        except UserError:
            raise UserError(f"{path} is not a run folder: use another {setting('runs')}") from None
        about: dict[str, Any] = {"out": path, "overwrite": path.exists(), "command": run.command}
        return start_pretrain(config.data, settings=settings, options=config.options, reporter=self.reporter, **about)

    def load_finished(self) -> Summaries:
        return load_finished(self.results, self.probe_epochs)

    def missing_protocols(self, run: PlannedRun, finished: Summaries) -> list[str]:
        """The protocols that a run has yet to be evaluated by."""
        summary = find(run, finished)
        if summary is None:
            return list(self.protocols)
        stale = self._stale_protocols(summary)
        return [p for p in self.protocols if p not in summary["results"] or p in stale]

    def _stale_protocols(self, summary: Summary) -> list[str]:
        """The protocols whose numbers are to be made again because other code made them."""
        return stale_protocols(summary) if self.stale else []

    def _is_stale(self, folder: Run) -> bool:
        """Whether a run folder is to be trained again, because other code trained it."""
        return self.stale and is_trained_by_other_code(folder.environment(), vars(folder.config))

    def epochs_left(self, run: PlannedRun) -> float:
        """Epochs still to train; 0 only if the run folder has an intact checkpoint of the last epoch."""
        epochs = max(1, run.config.epochs)  # a run of zero epochs is still to be made
        try:
            folder = Run.open(self.run_folder(run))
            if self._is_stale(folder):
                return epochs
            summary = folder.summary()
            step = folder.load_checkpoint(lambda _: None)[1]["step"]
        except (OSError, ValueError):  # UserError too; training repairs or reports what is damaged
            return epochs
        record = last_record(summary)
        if is_trained(summary) and step == record.get("step", 0):
            return 0
        return max(1, epochs - step * record["epoch"] / record["step"]) if record else epochs

    def run_folder(self, run: PlannedRun) -> Path:
        return self.runs / run.name

    def summary_file(self, run: PlannedRun) -> Path:
        """The run's JSON in the results folder; a probe of another length than the paper's has a file of its own."""
        probe = "" if self.probe_epochs == PROBE_EPOCHS else f"-probe{self.probe_epochs}"
        return self.results / f"{run.name}{probe}.json"

    def error_file(self, run: PlannedRun) -> Path:
        return self.runs / f"{run.name}.error.txt"

    def _save_traceback(self, run: PlannedRun) -> str:
        """Write the current traceback; returns words that say where, or nothing if it cannot be written."""
        with contextlib.suppress(OSError):
            self.error_file(run).write_text(traceback.format_exc())
            return f"; {self.error_file(run)} has the traceback"
        return ""

    def plan(self, needed: Sequence[PlannedRun], finished: Summaries) -> Callable[[], None]:
        """What prints each run, what is to be done for it, and about how long that takes."""
        pace, other_device = seconds_per_cost(finished, needed[0].config)
        missing = [run.on_this_device() for run in needed if self.missing_protocols(run, finished)]
        left = {run.name: self.epochs_left(run) for run in missing}
        to_train = [run for run in missing if left[run.name]]
        rows = []
        for planned in needed:
            found = find(planned, finished)
            here, state = planned.on_this_device(), "there"
            run = here if here in missing or found is None else planned.in_precision(precision_of(found))
            if run in to_train:
                state = duration(training_cost(run.config, left[run.name]) * pace) if pace else "to run"
                if left[run.name] < run.config.epochs:
                    state += f", from epoch {run.config.epochs - left[run.name]:.0f} on"
                elif found:
                    lacking = [p for p in self.missing_protocols(run, finished) if p not in found["results"]]
                    why = f"there is neither {' nor '.join(lacking)} nor its run folder" if lacking else "stale"
                    state += f", again: {why}"
            elif run in missing:
                state = f"to evaluate: {' and '.join(self.missing_protocols(run, finished))}"
            rows.append((run.name, " ".join(f"{k}={v}" for k, v in _changed_options(run.config).items()), state))
        seconds = sum(training_cost(run.config, left[run.name]) for run in to_train) * pace
        total = f", about {duration(seconds)}{other_device} at the pace of the fastest run in {self.results}"
        rest = f"; {len(missing) - len(to_train)} to evaluate" if len(missing) > len(to_train) else ""
        to_do = f"{len(to_train)} of {plural(len(needed), 'run')} to do{total if pace and to_train else ''}{rest}"

        def show() -> None:
            print_table(("run", "non-default options", "time"), rows)
            print(to_do)

        return show


def _changed_options(config: Config) -> dict[str, Any]:
    defaults = methods.resolve_options(config.method, {}, {})
    return {k: v for k, v in config.options.items() if v != defaults[k]}


def training_cost(config: Config, epochs: float) -> float:
    """Cost of training for this many epochs, in encoder passes times epochs."""
    return methods.cost(config.method, config.options) * epochs


def seconds_per_cost(finished: Summaries, config: Config) -> tuple[float, str]:
    """Seconds per unit of training cost in the fastest run on the same data (slower ones may have shared a device).

    Takes runs on this device. If there are none, takes other devices, and returns also words that name the device.
    The seconds are 0 if there is no run at all.
    """
    paces: dict[str, float] = {}
    for summary in finished.values():
        run, metrics = summary["config"], summary["metrics"]
        if run["data"] == config.data and metrics:
            pace = metrics[-1]["seconds"] / (methods.cost(run["method"], run["options"]) * run["epochs"])
            device = summary.get("environment", {}).get("device") or "an unknown device"
            paces[device] = min(pace, paces.get(device, pace))
    here = device_name(pick_device(config.device))
    if here in paces or not paces:
        return paces.get(here, 0.0), ""
    device, pace = min(paces.items(), key=lambda item: item[1])
    return pace, f" on {device}"
