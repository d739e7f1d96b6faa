"""report: one self-contained HTML file about one or more runs.

It shows what was run and how, the results with their protocols, curves, a t-SNE map, nearest neighbors, and a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch

import mixnn
from mixnn.apps import webpage
from mixnn.apps.report import gallery, results, run_data, settings
from mixnn.apps.report.run_data import RunData
from mixnn.apps.report.verdict import RULES
from mixnn.config import (
    DataDir,
    Device,
    MovedTo,
    Overwrite,
    Param,
    UserError,
    calling,
    on_command_line,
    setting,
    short_path,
    verb,
)
from mixnn.device import pick_device
from mixnn.files import check_output, expand, write_atomically
from mixnn.progress import Reporter, plural, reporter_for
from mixnn.runs import Run

__all__ = ["report"]

MAX_IMAGES = 5_000
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
OUT = "the page [RUN/report.html; for several runs, comparison.html in the first run folder]"
SCRIPTS = ("dom.js", "curves.js", "map.js", "neighbors.js", "page.js")


@verb
def report(
    runs: Annotated[
        str | Path | Run | Sequence[str | Path | Run], Param("run folders; several are compared", metavar="run")
    ],
    out: Annotated[str | Path, Param(OUT, flag="--out", metavar="FILE")] = "",
    *,
    source: MovedTo = "",
    device: Device = "auto",
    data_dir: DataDir = "",
    images: Annotated[int, Param("images on the map; 0: show no images", low=0, high=MAX_IMAGES)] = 500,
    overwrite: Overwrite = False,
    verbose: bool | Reporter = False,
) -> Path:
    """Write a web page about one or more runs (default: RUN/report.html, or comparison.html in the first run folder).

    `images` is the number of images on the map; 0 leaves images out. `source` is where the images are now, if the
    folder that the runs were trained on was moved.

    >>> mixnn.report("runs/photos", out="report.html")
    PosixPath('report.html')

    Examples:
        mixnn report runs/photos
        mixnn report runs/photos runs/photos-2 --out compared.html
    """
    reporter, where = reporter_for(verbose), pick_device(device)
    runs = [runs] if isinstance(runs, str | Path | Run) else list(runs)
    if not runs:
        raise UserError(f"report needs at least one run folder; `{calling('pretrain')}` makes one")
    if len(runs) > len(LETTERS):
        raise UserError(f"{len(runs)} runs do not fit on one page: give at most {len(LETTERS)}")
    loaded = [run_data.read(run) for run in runs]
    loaded = [replace(data, run=data.run.moved(source)) for data in loaded]
    if str(out) and not on_command_line() and Run.is_run_folder(expand(out)):
        raise UserError(f"{out} is a run folder, not a file: give several runs as a list, mixnn.report([run1, run2])")
    default = loaded[0].run.path / ("comparison.html" if len(loaded) > 1 else "report.html")
    target = check_output(out, default, overwrite)
    galleries, embeddings = _embed(loaded, data_dir, images, where, reporter) if images else ([], {})
    values = {
        "version": mixnn.__version__,
        "runs": [_run_values(data, LETTERS[i], embeddings.get(i)) for i, data in enumerate(_unique_names(loaded))],
        "differences": settings.differences(loaded) if len(loaded) > 1 else [],
        "warnings": results.comparison_warnings(loaded, LETTERS[: len(loaded)]),
        "groups": results.panels(loaded),
        "rules": RULES,
        "galleries": galleries,
    }
    write_atomically(target, render(values))
    reporter.info(f"{plural(len(loaded), 'run')} in {target}: open it in a browser")
    return target


def render(values: dict[str, Any]) -> bytes:
    """The page: the values are embedded as JSON, and its own scripts draw them."""
    template, style, *scripts = (
        webpage.read("mixnn.apps.report", name) for name in ("page.html", "page.css", *SCRIPTS)
    )
    script = '"use strict";\n' + "\n".join(scripts)
    head, data = webpage.head("mixnn report", style, script), webpage.as_json(values)
    return webpage.fill(template, head=head, script=script, data=data).encode()


def _unique_names(loaded: list[RunData]) -> list[RunData]:
    """The runs, named by their full paths where two folders have the same name."""
    names = [data.name for data in loaded]
    return [replace(data, name=str(data.run.path)) if names.count(data.name) > 1 else data for data in loaded]


def _run_values(data: RunData, letter: str, embedding: dict[str, Any] | None) -> dict[str, Any]:
    """Everything the page shows about one run."""
    verdict, accuracies = data.verdict, results.accuracies(data)
    evaluated_with = data.results.get("evaluated_with", {})
    return {
        "letter": letter,
        "name": data.name,
        "method": data.config.method,
        "data": data.config.data,
        "overview": settings.overview(data),
        "changed": settings.changed_rows(data),
        "settings": settings.all_rows(data),
        "environment": {name: settings.as_text(value) for name, value in data.environment.items() if name != "given"},
        "evaluatedWith": {name: settings.as_text(value) for name, value in evaluated_with.items()},
        "headlines": results.headlines(accuracies),
        "results": accuracies,
        "otherResults": results.other_results(data),
        "judgement": results.judgement(data),
        "curves": results.curves(data),
        "verdict": {"state": verdict.state, "title": verdict.title, "sentences": verdict.sentences},
        "missing": data.missing,
        "embedding": embedding,
    }


def _embed(
    loaded: list[RunData], data_dir: str | Path, num_images: int, device: torch.device, reporter: Reporter
) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """Maps and neighbors: a gallery per data set, and the embedding of each run (by its number) that has one."""
    samples: dict[Any, gallery.Sample] = {}
    embedded: dict[Any, dict[int, gallery.Embedded]] = {}
    for i, data in enumerate(loaded):
        dataset, size = data.run.dataset(data_dir), data.config.reading_size
        key = dataset.key  # of several runs, the first one's size is enough for the thumbnails of all
        try:
            data.run.check_data(f"use {setting('source', 'FOLDER')}")
            encoder, step = gallery.load_last_encoder(data.run, device, data.missing.append)
            if key not in samples:
                reporter.info(f"reading the images of {short_path(dataset.name)}")
                samples[key] = gallery.load_sample(dataset, size, num_images, device)
            embedded.setdefault(key, {})[i] = gallery.embed_sample(
                data.run, dataset, encoder, step, samples[key], reporter
            )
        except UserError as error:
            reason = f"No map and no neighbors: {'; '.join(str(error).splitlines())}."
            data.missing.append(reason)
            reporter.warn(reason)
            continue
        if embedded[key][i].xy is None:
            data.missing.append("No map: too few images, or all have the same features.")
    galleries: list[dict[str, Any]] = []
    of_runs: dict[int, dict[str, Any]] = {}
    for key, of_key in embedded.items():
        about, values = gallery.page_values(samples[key], list(of_key.values()))
        of_runs |= {i: one | {"gallery": len(galleries)} for i, one in zip(of_key, values, strict=True)}
        galleries.append(about)
    return galleries, of_runs
