"""report: one HTML file about one run or several, to be read without anything else.

What was run and how, results with their protocols, curves, a t-SNE map, nearest neighbors, and a verdict in words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch

import mixnn
from mixnn import diagnostics
from mixnn.apps.report import compare, facts, outcome, pictures
from mixnn.apps.report.facts import Facts
from mixnn.apps.report.page import render
from mixnn.apps.report.verdict import RULES, judge
from mixnn.config import DataDir, Device, Overwrite, Param, UserError, verb
from mixnn.device import pick_device
from mixnn.files import check_writable, write_atomically
from mixnn.progress import Reporter, plural
from mixnn.runs import Run
from mixnn.runs.images import check_there

__all__ = ["report"]

MAX_IMAGES = 5_000
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

# Curves that a run logs beside those of diagnostics.
OTHER_NAMES = {
    "loss": "the method's loss, mean over the steps of an epoch",
    "knn": "accuracy in %: test images named by the weighted vote of their k nearest training images",
    "images_per_s": "training images a second",
}
GROUPS = (
    ("Is it learning?", ("loss", "knn", "purity", "accuracy")),
    (
        "Whom does it take for neighbors?",
        (
            *("purity_k", "inconsistency", "d_neighbors", "cos_neighbors"),
            *("cas_entropy", "cas_entropy_0.1", "own_image", "norm_ratio"),
        ),
    ),
    ("Does it collapse?", ("spread", "rank", "d_positive")),
    ("Speed", ("images_per_s",)),
)
BY_RANK = re.compile(r"purity_(cas_)?(\d+)")


@verb
def report(
    runs: Annotated[
        str | Path | Run | Sequence[str | Path | Run], Param("run folders; several are compared", metavar="run")
    ],
    out: Annotated[str | Path, Param("the page", flag="--out", metavar="FILE")] = "report.html",
    *,
    device: Device = "auto",
    data_dir: DataDir = "",
    images: Annotated[int, Param("images on the map; 0: show no images", low=0, high=MAX_IMAGES)] = 500,
    overwrite: Overwrite = False,
    reporter: Reporter | None = None,
) -> Path:
    """Write the page about these run folders; `images` is how many are mapped (0: no images at all).

    Examples:
        mixnn report runs/photos
        mixnn report runs/photos runs/photos-2 --out compared.html
    """
    reporter, where = reporter or Reporter(), pick_device(device)
    runs = [runs] if isinstance(runs, str | Path | Run) else list(runs)
    if not runs:
        raise UserError("report needs a run folder, or several to compare: `mixnn pretrain` makes one")
    if len(runs) > len(LETTERS):
        raise UserError(f"{len(runs)} runs are more than a page can show: give at most {len(LETTERS)}")
    out = Path(out).expanduser()
    check_writable(out, overwrite)
    read = [facts.read(run.path if isinstance(run, Run) else run) for run in runs]
    galleries, looks = _look(read, data_dir, images, where, reporter) if images else ([], {})
    values = {
        "version": mixnn.__version__,
        "runs": [_about(f, LETTERS[i], looks.get(i)) for i, f in enumerate(_named(read))],
        "differences": compare.differences(read) if len(read) > 1 else [],
        "warnings": compare.warnings(read, LETTERS[: len(read)]),
        "groups": panels(read),
        "rules": RULES,
        "galleries": galleries,
    }
    write_atomically(out, render(values))
    reporter.info(f"{plural(len(read), 'run')} reported in {out}")
    return out


def _named(read: list[Facts]) -> list[Facts]:
    """Called by their folders' names, or by the paths given where two names are the same."""
    names = [f.name for f in read]
    return [replace(f, name=str(f.run.path)) if names.count(f.name) > 1 else f for f in read]


def _about(f: Facts, letter: str, look: dict[str, Any] | None) -> dict[str, Any]:
    verdict = judge(f.records, f.config.epochs, f.diverged, f.init_from)
    return {
        "letter": letter,
        "name": f.name,
        "method": f.config.method,
        "data": f.config.data,
        "card": facts.card(f),
        "changed": facts.changed(f.config),
        "settings": facts.every(f.config),
        "environment": {k: facts.text(v) for k, v in f.environment.items()},
        "evaluatedWith": {k: facts.text(v) for k, v in f.results.get("evaluated_with", {}).items()},
        "results": outcome.results(f),
        "others": outcome.others(f),
        "curves": outcome.curves(f),
        "verdict": {"state": verdict.state, "title": verdict.title, "sentences": verdict.sentences},
        "missing": f.missing,
        "look": look,
    }


def panels(read: Sequence[Facts]) -> list[dict[str, Any]]:
    """The curves that there are, in groups, each with what it means; `purity_k` stands for the curves by rank."""
    names = dict.fromkeys(name for f in read for name in outcome.curves(f)["values"])
    ranked = any(BY_RANK.fullmatch(name) for name in names)
    single = [name for name in names if not BY_RANK.fullmatch(name)] + ["purity_k"] * ranked
    known = {name for _, group in GROUPS for name in group}
    groups = [(title, [name for name in group if name in single]) for title, group in GROUPS]
    groups.append(("Other", [name for name in single if name not in known]))
    meanings = OTHER_NAMES | diagnostics.NAMES
    return [
        {"title": title, "panels": [{"name": name, "meaning": meanings.get(name, "")} for name in group]}
        for title, group in groups
        if group
    ]


def _look(
    read: list[Facts], data_dir: str | Path, images: int, where: torch.device, reporter: Reporter
) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """Maps and neighbors: one gallery for each data set, one look for each run (by its number) that can have one."""
    shown: dict[Any, pictures.Shown] = {}
    looks: dict[Any, dict[int, pictures.Look]] = {}
    for i, f in enumerate(read):
        config = pictures.configured(f.run, data_dir)
        key = pictures.key(config)
        try:
            check_there(f.run)
            encoder = pictures.load_encoder(f.run, f.missing.append)
            if key not in shown:
                reporter.info(f"reading images of {config.data}")
                shown[key] = pictures.load_shown(config, images, where)
            reporter.info(f"{f.run.path}: encoding {plural(shown[key].num_images, 'image')}")
            looks.setdefault(key, {})[i] = pictures.look(*encoder, shown[key], where)
        except UserError as error:
            why = f"No map and no neighbors: {'; '.join(str(error).splitlines())}."
            f.missing.append(why)
            reporter.warn(why)
            continue
        if looks[key][i].xy is None:
            f.missing.append("No map: too few images, or all have the same features.")
    galleries: list[dict[str, Any]] = []
    found: dict[int, dict[str, Any]] = {}
    for key, of_key in looks.items():
        about, seen = pictures.gallery(shown[key], list(of_key.values()))
        found |= {i: one | {"gallery": len(galleries)} for i, one in zip(of_key, seen, strict=True)}
        galleries.append(about)
    return galleries, found
