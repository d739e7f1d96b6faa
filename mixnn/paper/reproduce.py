"""reproduce: a table of the paper, from the runs it needs to our numbers beside the paper's.

Finished runs lie as one small JSON each in the results folder. What is missing is trained and evaluated, an
interrupted run is resumed, one that lacks a number is evaluated, and one that fails does not stop the others. Several
processes may do it together: each run belongs to the one that claims it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mixnn.config import Config, UserError, unknown
from mixnn.data import configured_dataset
from mixnn.evaluation.evaluate import protocols_of
from mixnn.evaluation.linear import LinearProbe
from mixnn.paper.asking import data_of, runnable, seeds_of, tables_of
from mixnn.paper.plan import changed_since, plan
from mixnn.paper.render import FORMATS, cells, render, title
from mixnn.paper.runner import Work, carry_out, show
from mixnn.paper.tables import TABLES, tables_with
from mixnn.progress import Reporter, plural

__all__ = ["TABLES", "reproduce", "tables_with"]


def reproduce(
    table: str,
    *,
    data: str | Path = "cifar10",
    seeds: int | Sequence[int] = (0,),
    rows: str | Sequence[str] = (),
    results: str | Path = "results",
    runs: str | Path = "runs",
    run: bool = True,
    dry_run: bool = False,
    format: str = "terminal",
    protocol: str = "all",
    probe_epochs: int = LinearProbe.epochs,
    tables: str | Path = "",
    reporter: Reporter | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train and evaluate what a table (or "all") lacks, then print it; returns the cells by table.

    `rows` limits it to rows of these names; `run=False` prints what is there; `tables` is a file with tables of your
    own; `settings` are Config's fields.
    """
    reporter = reporter or Reporter()
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    protocols = protocols_of(protocol)
    if probe_epochs < 1:
        raise UserError(f"probe_epochs={probe_epochs}: a probe has at least 1 epoch")
    data, settings = data_of(data, settings)
    seeds, asked = seeds_of(seeds), tables_of(table, rows, tables_with(tables))
    chosen, without = runnable(asked, data, settings)
    if without:
        reason = f"training reads labels that {data}'s images lack: {'; '.join(without)}"
        if not chosen:
            raise UserError(f"nothing to run: {reason}")
        reporter.warn(f"left out, for {reason}")
    work = Work(Path(results).expanduser(), Path(runs).expanduser(), protocols, probe_epochs)
    needed, done = plan(chosen, data, seeds, settings), work.finished()
    if not work.results.is_dir() and (dry_run or not run):
        reporter.warn(
            f"no finished runs: there is no folder {work.results.absolute()}; type --results FOLDER for another"
        )
    if dry_run:
        show(work, needed, done)
        return {}
    missing = [p for p in needed if work.lacking(p, done)] if run else []
    failed: dict[str, str] = {}
    elsewhere: list[str] = []
    no_data = _no_data(missing[0].config) if missing else ""  # asked once, not run by run
    if missing and not no_data:
        failed, elsewhere = carry_out(work, missing, done, reporter)
        done = work.finished()
    for changed in changed_since(needed, done):
        reporter.warn(changed)
    found = {t.name: cells(t, data, seeds, settings, done) for t in chosen}
    texts = [render(t, title(t, data, settings, probe_epochs), data, found[t.name], format) for t in chosen]
    if format == "json" and table == "all":
        texts = ["[" + ",\n".join(texts) + "]"]
    print("\n\n".join(text for text in texts if text), end="\n" if any(texts) else "")
    if elsewhere:
        reporter.warn(f"another process is at {', '.join(elsewhere)}: what the table lacks of them, it will have later")
    if no_data:
        raise UserError(f"{plural(len(missing), 'run')} missing, and {no_data}")
    if failed:
        names = "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
        raise UserError(f"{len(failed)} of {plural(len(missing), 'run')} failed; the same command tries again\n{names}")
    return found


def _no_data(config: Config) -> str:
    """Why the images cannot be read, or nothing."""
    try:
        configured_dataset(config).check()
    except UserError as error:
        return str(error)
    return ""
