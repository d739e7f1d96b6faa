"""figures: the paper's figures and some of our own, drawn from finished runs.

Each figure is an SVG and a PNG, with a caption that says what was run. The same runs give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from mixnn.config import SETTING, Param, UserError, calling, setting, unknown, verb
from mixnn.files import check_may_write, expand, write_atomically
from mixnn.paper.plan import resolve_data
from mixnn.paper.plots import accuracies, curves
from mixnn.paper.plots.drawing import CannotDraw, Drawing, FinishedRuns, encode, figure_style
from mixnn.paper.plots.examples import examples
from mixnn.paper.plots.tsne import tsne
from mixnn.progress import Reporter, reporter_for
from mixnn.runs import Run

__all__ = ["FIGURES", "figures"]

FIGURES: dict[str, Callable[[FinishedRuns], Drawing]] = {
    **curves.PURITY,
    "attention": curves.attention,
    "attention-datasets": curves.attention_datasets,
    "ranks": curves.ranks,
    "loss": curves.loss,
    "accuracy": curves.accuracy,
    "methods": curves.methods,
    "share": accuracies.share,
    "main": accuracies.main,
    "tsne": tsne,
    "examples": examples,
}
ACROSS = ("attention-datasets",)  # figures of several data sets


@verb
def figures(
    names: Annotated[str | Sequence[str], Param("which figures [all whose runs are finished]", metavar="name")] = (),
    *,
    results: Annotated[str | Path, Param("folder of finished runs, one JSON file each", metavar="FOLDER")] = "results",
    out: Annotated[str | Path, Param("where the figures go", metavar="FOLDER")] = "figures",
    data: Annotated[str | Path, Param("data set")] = "cifar10",
    runs: Annotated[
        Sequence[str | Path | Run],
        Param("a run folder, for the figures tsne (of any data set) and examples", flag="--run", metavar="RUN"),
    ] = (),
    overwrite: Annotated[bool, Param("replace figures that exist")] = False,
    verbose: bool | Reporter = False,
    **settings: Annotated[Any, SETTING],
) -> list[Path]:
    """Draw these figures, or all whose runs are finished; returns the files.

    The runs are the summaries in the folder `results` and the run folders `runs`. `tsne` and `examples` need a run
    folder, because they encode images. `tsne` alone draws runs on several data sets next to each other. `settings` are
    fields of Config, for runs that were not made with the defaults.

    >>> mixnn.figures("main", results="results", out="figures")[0].name
    'cifar10-main.svg'

    Examples:
        mixnn figures
        mixnn figures purity-methods methods --setting epochs=20 --results results/epochs20
        mixnn figures tsne --run runs/cifar10-mnn
    """
    names = [names] if isinstance(names, str) else names
    for name in names:
        if name not in FIGURES:
            raise unknown("figure", name, FIGURES)
    data, settings = resolve_data(data, settings)
    reporter, results, out = reporter_for(verbose), expand(results), expand(out)
    folders = [run if isinstance(run, Run) else Run.open(run) for run in runs]
    if not results.is_dir() and not folders:
        raise UserError(
            f"no finished runs: there is no folder {results.absolute()}; `{calling('reproduce')}` makes one\n"
            f"use {setting('results', 'FOLDER')} for another folder, {setting('runs', 'RUN')} for run folders"
        )
    only_tsne = list(names) == ["tsne"]
    for run in folders:
        if run.config.data != data and not only_tsne:
            raise UserError(
                f"{run.path} was trained on {run.config.data}, but the figures are for {data}: "
                f"use {setting('data', run.config.data)}"
            )
    finished = FinishedRuns.load(results, folders, data, settings)
    if only_tsne and folders:
        together = "-".join(dict.fromkeys(Path(run.config.data).name for run in folders))
        finished = replace(finished, data=together, folders=tuple(folders))
    for name in names or FIGURES:
        for path in _files(name, finished, out).values():
            check_may_write(path, overwrite)
    drawn: dict[Path, bytes] = {}
    not_drawn: dict[str, str] = {}
    for name in names or FIGURES:
        try:
            content = _draw(name, finished)
        except CannotDraw as error:
            not_drawn[name] = str(error)
            continue
        drawn |= {path: content[suffix] for suffix, path in _files(name, finished, out).items()}
    if names and not_drawn:
        raise UserError("\n".join(f"cannot draw {name}: {reason}" for name, reason in not_drawn.items()))
    for path, file in drawn.items():
        write_atomically(path, file)
    for name, reason in not_drawn.items():
        reporter.info(f"skipped {name}: {reason}")
    return list(drawn)


def _files(name: str, finished: FinishedRuns, out: Path) -> dict[str, Path]:
    """The paths of a figure's files, by suffix."""
    stem = name if name in ACROSS else f"{finished.data_name}-{name}"
    return {suffix: out / f"{stem}.{suffix}" for suffix in ("svg", "png", "txt")}


def _draw(name: str, finished: FinishedRuns) -> dict[str, bytes]:
    """The content of a figure's files, by suffix; the caption is txt."""
    with figure_style():
        drawing = FIGURES[name](finished)
        return encode(drawing.figure) | {"txt": drawing.caption.encode()}
