"""reproduce: a table of the paper, from the runs it needs to our numbers beside the paper's.

Finished runs lie as one small JSON each in the results folder. What is missing is trained and evaluated, an
interrupted run is resumed, and one that fails does not stop the others. Several processes may do it together: each run
belongs to the one that claims it first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mixnn import methods
from mixnn.config import Interrupted, UserError, unknown
from mixnn.evaluation import evaluate, save_summary
from mixnn.progress import Reporter, print_table
from mixnn.reproduction.planning import Planned, finished, plan
from mixnn.reproduction.rendering import FORMATS, cells, render
from mixnn.reproduction.tables import TABLES, Table, find
from mixnn.runs import Run
from mixnn.runs.claims import claim
from mixnn.training import pretrain

__all__ = ["TABLES", "reproduce"]


def reproduce(
    table: str,
    *,
    data: str = "cifar10",
    seeds: Sequence[int] = (0,),
    rows: Sequence[str] = (),
    results: str | Path = "results",
    runs: str | Path = "runs",
    run: bool = True,
    dry_run: bool = False,
    form: str = "terminal",
    protocol: str = "all",
    probe_epochs: int = 100,
    reporter: Reporter | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train and evaluate what a table (or "all") lacks, then print it; returns the cells by table.

    `rows` limits it to rows of these names; `run=False` prints what is there; `settings` are Config's fields.
    """
    say = reporter or Reporter()
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    chosen = [_only(t, rows) for t in (TABLES.values() if table == "all" else [find(table)])]
    chosen = [t for t in chosen if t.rows]
    if not chosen:
        raise unknown("row", rows[0], [row.name for row in find(table).rows] if table != "all" else [])
    needed, done = plan(chosen, data, seeds, settings), finished(Path(results))
    missing = [p for p in needed if (p.fingerprint, p.seed) not in done]
    if dry_run:
        _show(needed, missing, done)
        return {}
    failed: dict[str, str] = {}
    if run and missing:
        failed = _carry_out(missing, done, Path(results), Path(runs), protocol, probe_epochs, say)
        done = finished(Path(results))
    found = {t.name: cells(t, data, seeds, settings, done) for t in chosen}
    texts = [render(t, data, found[t.name], form) for t in chosen]
    print("\n\n".join(text for text in texts if text), end="\n" if any(texts) else "")
    if failed:
        names = "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
        raise UserError(f"{len(failed)} of {len(missing)} runs failed; the same command tries them again\n{names}")
    return found


def _only(table: Table, rows: Sequence[str]) -> Table:
    wanted = {name.lower() for name in rows}
    return Table(table.name, table.title, tuple(r for r in table.rows if not wanted or r.name.lower() in wanted))


def _carry_out(
    missing: list[Planned],
    done: Mapping[tuple[str, int], Any],
    results: Path,
    runs: Path,
    protocol: str,
    probe_epochs: int,
    say: Reporter,
) -> dict[str, str]:
    """Run after run; returns those that failed, with the reason."""
    results.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    pace = _pace(done, missing[0].config.data)
    for i, planned in enumerate(missing):
        left = [_cost(p) * pace for p in missing[i:]] if pace else []
        say.say(f"[{i + 1}/{len(missing)}] {planned.name}" + (f", about {_duration(sum(left))} left" if left else ""))
        start = time.perf_counter()
        try:
            with claim(runs / ".claims" / planned.name) as mine:
                if not mine:
                    say.say("  another process is at it")
                    continue
                if (planned.fingerprint, planned.seed) in finished(results):  # by now
                    continue
                _one(planned, results, runs, protocol, probe_epochs, say)
            spent = (time.perf_counter() - start) / max(_cost(planned), 1)
            pace = spent if not pace else (pace + spent) / 2
        except Interrupted as error:
            raise Interrupted(f"{error}; or type the same command again", error.signal) from None
        except Exception as error:  # one run's trouble is not the others'
            failed[planned.name] = str(error).splitlines()[0] if str(error) else type(error).__name__
            say.warn(f"{planned.name} failed: {failed[planned.name]}")
    return failed


def _one(planned: Planned, results: Path, runs: Path, protocol: str, probe_epochs: int, say: Reporter) -> None:
    path, config = runs / planned.name, planned.config
    trained = False
    if Run.is_one(path) and any((path / "checkpoints").glob("*")):
        run = pretrain(resume=path, reporter=say)
        trained = True
    if not trained:
        settings = {k: v for k, v in vars(config).items() if k not in ("data", "options")}
        command = f"mixnn.reproduce(...): {planned.name}"
        run = pretrain(
            config.data,
            set=config.options,
            out=path,
            overwrite=path.exists(),
            command=command,
            reporter=say,
            **settings,
        )
    evaluate(run, protocol=protocol, epochs=probe_epochs, reporter=say)
    save_summary(run.path, results / f"{planned.name}.json")


def _cost(planned: Planned) -> float:
    """Of a run, in encoder passes times epochs."""
    students, teachers = methods.passes(planned.config.method, planned.config.options)
    return (3 * students + teachers) * planned.config.epochs


def _pace(done: Mapping[tuple[str, int], Any], data: str) -> float:
    """Seconds for one unit of cost in the fastest run on these data (others may have shared a device); 0 if none."""
    paces = []
    for summary in (s for s in done.values() if s["config"]["data"] == data):
        seconds = summary["metrics"][-1]["seconds"] if summary["metrics"] else 0.0
        students, teachers = methods.passes(summary["config"]["method"], summary["config"]["options"])
        paces.append(seconds / max(1, (3 * students + teachers) * summary["config"]["epochs"]))
    return min(paces, default=0.0)


def _show(needed: list[Planned], missing: list[Planned], done: Mapping[tuple[str, int], Any]) -> None:
    pace = _pace(done, needed[0].config.data)
    rows = [
        (
            p.name,
            " ".join(f"{k}={v}" for k, v in _differences(p).items()),
            "there" if p not in missing else _duration(_cost(p) * pace) if pace else "to run",
        )
        for p in needed
    ]
    print_table(("run", "options other than the method's own", "time"), rows)
    total = f", about {_duration(sum(_cost(p) for p in missing) * pace)} at the fastest pace so far" if pace else ""
    print(f"{len(missing)} of {len(needed)} runs to do{total if missing else ''}")


def _differences(planned: Planned) -> dict[str, Any]:
    defaults = methods.resolve_options(planned.config.method, {}, {})
    return {k: v for k, v in planned.config.options.items() if v != defaults[k]}


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
