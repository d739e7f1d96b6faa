"""figures: the paper's figures and some of ours, from finished runs.

Each is written as SVG and PNG, with a caption that says what was run. The same runs give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from mixnn.config import SETTING, Param, UserError, setting, unknown, verb
from mixnn.files import check_free, write_atomically
from mixnn.paper.asking import data_of
from mixnn.paper.plots import curves, points
from mixnn.paper.plots.material import Drawing, Lacking, Material
from mixnn.paper.plots.style import encode, styled
from mixnn.paper.plots.tsne import tsne
from mixnn.progress import Reporter
from mixnn.runs import Run

__all__ = ["FIGURES", "figures"]

FIGURES: dict[str, Callable[[Material], Drawing]] = {
    **curves.PURITY,
    "attention": curves.attention,
    "ranks": curves.ranks,
    "loss": curves.loss,
    "accuracy": curves.accuracy,
    "methods": curves.methods,
    "share": points.share,
    "main": points.main,
    "tsne": tsne,
}


@verb
def figures(
    names: Annotated[Sequence[str], Param("which figures [all whose runs are there]", metavar="name")] = (),
    *,
    results: Annotated[str | Path, Param("finished runs, one JSON file each", metavar="FOLDER")] = "results",
    out: Annotated[str | Path, Param("where the figures go", metavar="FOLDER")] = "figures",
    data: Annotated[str | Path, Param("data set")] = "cifar10",
    runs: Annotated[Sequence[str | Path | Run], Param("a run folder, for t-SNE", flag="--run", metavar="RUN")] = (),
    overwrite: Annotated[bool, Param("replace figures that exist")] = False,
    reporter: Reporter | None = None,
    **settings: Annotated[Any, SETTING],
) -> list[Path]:
    """Draw these figures, or all of them as far as their runs are there; returns the files.

    Runs are the summaries in `results` and the run folders `runs`. `settings` are Config's fields, for runs that were
    made with others than the defaults.

    Examples:
        mixnn figures
        mixnn figures purity-methods accuracy --setting epochs=20 --results results/epochs20
    """
    for name in names:
        if name not in FIGURES:
            raise unknown("figure", name, FIGURES)
    data, settings = data_of(data, settings)
    reporter, results, out = reporter or Reporter(), Path(results).expanduser(), Path(out).expanduser()
    folders = [run if isinstance(run, Run) else Run.open(run) for run in runs]
    if not results.is_dir() and not folders:
        raise UserError(
            f"no finished runs: there is no folder {results.absolute()}; `mixnn reproduce` makes one\n"
            f"for another folder use {setting('results', 'FOLDER')}, for run folders {setting('runs', 'RUN')}"
        )
    for run in folders:
        if run.config.data != data:
            raise UserError(
                f"{run.path} is of {run.config.data}, and the figures of {data}: use {setting('data', run.config.data)}"
            )
    material = Material.gather(results, folders, data, settings)
    for name in names or FIGURES:
        for path in files_of(name, material, out).values():
            check_free(path, overwrite)
    drawn: dict[Path, bytes] = {}
    lacking: list[str] = []
    for name in names or FIGURES:
        try:
            figure, caption = draw(name, material)
        except Lacking as reason:
            lacking.append(f"{name} lacks {reason}")
            continue
        content = {**figure, "txt": caption.encode()}
        drawn |= {path: content[ending] for ending, path in files_of(name, material, out).items()}
    if names and lacking:
        raise UserError("\n".join(lacking))
    for path, file in drawn.items():
        write_atomically(path, file)
    for text in lacking:
        reporter.info(f"skipped: {text}")
    return list(drawn)


def files_of(name: str, material: Material, out: Path) -> dict[str, Path]:
    """Where a figure goes, by the ending."""
    return {ending: out / f"{material.name}-{name}.{ending}" for ending in ("svg", "png", "txt")}


def draw(name: str, material: Material) -> tuple[dict[str, bytes], str]:
    """A figure's files by their ending, and its caption."""
    with styled():
        drawing = FIGURES[name](material)
        return encode(drawing.figure), drawing.caption
