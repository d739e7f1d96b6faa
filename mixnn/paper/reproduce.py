"""reproduce: a table of the paper, from the runs it needs to our numbers beside the paper's.

Finished runs lie as one small JSON each in the results folder. What is missing is trained and evaluated, an
interrupted run is resumed, one that lacks a number is evaluated, and one that fails does not stop the others. Several
processes may do it together: each run belongs to the one that claims it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from mixnn.config import SETTING, Config, Param, UserError, setting, verb
from mixnn.evaluation.evaluate import PROTOCOLS
from mixnn.evaluation.linear import Protocol
from mixnn.paper.asking import data_of, runnable, seeds_of, tables_of
from mixnn.paper.plan import changed_since, plan
from mixnn.paper.render import FORMATS, cells, render, title
from mixnn.paper.runner import Work, carry_out, show
from mixnn.paper.tables import TABLES, tables_with
from mixnn.progress import Reporter, plural, print_table
from mixnn.runs.images import check_on_disk

__all__ = ["TABLES", "reproduce", "tables_with"]


@verb
def reproduce(
    table: Annotated[str, Param("which table, or all; without it, the tables are listed")] = "",
    *,
    data: Annotated[str | Path, Param("data set, or a folder of images")] = "cifar10",
    seeds: Annotated[int | Sequence[int], Param("seeds to run every row with", low=0, metavar="0,1,2")] = (0,),
    rows: Annotated[str | Sequence[str], Param("only this row of the table", flag="--row", metavar="NAME")] = (),
    results: Annotated[str | Path, Param("finished runs, one JSON file each", metavar="FOLDER")] = "results",
    runs: Annotated[str | Path, Param("where run folders are", metavar="FOLDER")] = "runs",
    run: Annotated[bool, Param("print what is there, run nothing")] = True,
    dry_run: Annotated[bool, Param("show the plan and its time, run nothing")] = False,
    output: Annotated[str, Param("how to print the table", choices=tuple(FORMATS), flag="--format")] = "terminal",
    protocol: Annotated[str, Param("how runs are evaluated", choices=tuple(PROTOCOLS))] = "all",
    probe_epochs: Annotated[int, Param("epochs of the linear probe", low=1)] = Protocol.epochs,
    tables: Annotated[str | Path, Param("YAML file with tables of your own", metavar="FILE")] = "",
    reporter: Reporter | None = None,
    **settings: Annotated[Any, SETTING],
) -> dict[str, Any]:
    """Train and evaluate what a table (or "all") lacks, then print it; returns the cells by table.

    Without a table, lists them.
    `rows` limits it to rows of these names; `run=False` prints what is there; `tables` is a file with tables of your
    own; `settings` are Config's fields.

    Examples:
        mixnn reproduce main --dry-run
        mixnn reproduce main --row MNN --row MSF --seeds 0,1,2
        mixnn reproduce main --results results --no-run --format markdown
    """
    reporter, known = reporter or Reporter(), tables_with(tables)
    if not table:
        print_table(("table", "what it compares", "rows"), [(n, t.title, str(len(t.rows))) for n, t in known.items()])
        return {}
    data, settings = data_of(data, settings)
    seeds, asked = seeds_of(seeds), tables_of(table, rows, known)
    chosen, without = runnable(asked, data, settings)
    if without:
        reason = f"training reads labels that {data}'s images lack: {'; '.join(without)}"
        if not chosen:
            raise UserError(f"nothing to run: {reason}")
        reporter.warn(f"left out, for {reason}")
    work = Work(Path(results).expanduser(), Path(runs).expanduser(), PROTOCOLS[protocol], probe_epochs)
    needed, done = plan(chosen, data, seeds, settings), work.finished()
    if not work.results.is_dir() and (dry_run or not run):
        reporter.warn(
            f"no finished runs: there is no folder {work.results.absolute()}; "
            f"use {setting('results', 'FOLDER')} for another"
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
    texts = [render(t, title(t, data, settings, probe_epochs), data, found[t.name], output) for t in chosen]
    if output == "json" and table == "all":
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
        check_on_disk(config)
    except UserError as error:
        return str(error)
    return ""
