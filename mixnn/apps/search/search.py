"""search: the images most like a given one, near-duplicates, and outliers, by the vectors of a run's encoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from mixnn.apps.embed import collect
from mixnn.apps.search import page, queries, similar, text
from mixnn.apps.search.index import METHODS, check_faiss, nearest, to_unit
from mixnn.apps.search.originals import Originals
from mixnn.apps.search.queries import Asked, Query
from mixnn.config import RUN, DataDir, Device, Overwrite, Param, UserError, setting, verb
from mixnn.data.listing import printable
from mixnn.data.source import Source
from mixnn.files import check_writable, write_atomically
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.images import source_for

__all__ = ["search"]

FORMS = ("terminal", "json", "html")
DIGITS = 6  # of similarities: float32 holds no more
COLLAPSED = 0.9999  # a threshold beyond this finds little but identical images


@verb
def search(
    run: Annotated[str | Path | Run, RUN],
    query: Annotated[Query, Param("images to look for: files, a folder of them, or names in the source")] = "",
    *,
    source: Annotated[
        str | Path | Sequence[str | Path],
        Param("folder, images or data set to search in [what the run was trained on]", metavar="FOLDER"),
    ] = "",
    topk: Annotated[int, Param("images per query, or outliers, to show", low=1)] = 10,
    duplicates: Annotated[bool, Param("find groups of nearly the same image instead")] = False,
    outliers: Annotated[bool, Param("find the images least like any other instead")] = False,
    threshold: Annotated[
        float | None,
        Param("cosine from which images count as duplicates [chosen]", low=0.001, high=1, metavar="COSINE"),
    ] = None,
    method: Annotated[str, Param("how to search", choices=("auto", *METHODS))] = "auto",
    output: Annotated[str, Param("how to show the results", choices=FORMS, flag="--format")] = "terminal",
    out: Annotated[str | Path, Param("write the results here; a page needs a file", metavar="FILE")] = "",
    device: Device = "auto",
    data_dir: DataDir = "",
    overwrite: Overwrite = False,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """The `topk` images of `source` (default: the data the run was trained on) most like each query, by cosine.

    A query is an image file, several, a folder, or the name of an image in the source; it is not among its own results.
    Instead of a query, `duplicates` finds groups of images alike by `threshold` or more, `outliers` the `topk` images
    least like their nearest. Prints the result as `output` says, or writes it to `out`; returns it as plain values.

    Examples:
        mixnn search runs/photos cat.jpg
        mixnn search runs/photos cat.jpg dog.jpg --source ./new --format html
        mixnn search runs/photos --duplicates
    """
    kind = _kind(query, duplicates, outliers)
    _check(kind, threshold, method)
    out = str(Path(out).expanduser()) if str(out) else f"{kind}.html" if output == "html" else ""  # a page is a file
    if out:
        check_writable(out, overwrite)
    run, reporter = run if isinstance(run, Run) else Run.open(run), reporter or Reporter()
    images = source_for(run, source, str(data_dir))
    if kind == "nearest":
        queries.check_query(query, set(images.names))  # a typo is found before an hour of embedding
    embeddings = collect(run, images, device=device, reporter=reporter)
    names, bank = embeddings.names, to_unit(embeddings.vectors)
    if kind != "nearest" and len(names) < 2:
        raise UserError(f"{kind} need at least two images, and {images.title} has one that can be read")
    asked: list[Asked] = []
    if kind == "nearest":
        asked, vectors = queries.encode(queries.find(query, images, embeddings), bank, run, device, reporter)
        found = _nearest(names, bank, asked, vectors, topk, "exact" if method == "auto" else method, reporter)
    elif kind == "duplicates":
        found = _duplicates(names, bank, threshold, Originals(images), reporter)
    else:
        found = _outliers(names, bank, topk, reporter)
    about = {"kind": kind, "run": run.path.name, "source": printable(images.title), "images": len(names)}
    result = about | found | {"skipped": [list(pair) for pair in embeddings.skipped]}
    _deliver(result, output, out, images, asked)
    return result


def _kind(query: Query, duplicates: bool, outliers: bool) -> str:
    given = isinstance(query, Path) or len(query) > 0
    kinds = [k for k, on in (("nearest", given), ("duplicates", duplicates), ("outliers", outliers)) if on]
    if len(kinds) != 1:
        others = f"{setting('duplicates', True)}, or {setting('outliers', True)}"
        raise UserError(f"search for what? give an image or a folder, or {others}: one of the three")
    return kinds[0]


def _check(kind: str, threshold: float | None, method: str) -> None:
    if method == "faiss":
        if kind != "nearest":
            raise UserError(f"{setting('method', 'faiss')} is for the images nearest to a query, not for {kind}")
        check_faiss()
    if threshold is not None and kind != "duplicates":
        raise UserError(f"{setting('threshold')} is for {setting('duplicates', True)}")


def _at_most(topk: int, available: int, what: str, reporter: Reporter) -> int:
    """All that there are, where more are asked for."""
    if not available:
        raise UserError(f"there are no {what} to be found")
    if topk > available:
        reporter.info(f"there are {available:,} {what}, and not {topk:,}")
    return min(topk, available)


def _nearest(
    names: list[str],
    bank: np.ndarray,
    asked: list[Asked],
    vectors: np.ndarray,
    topk: int,
    method: str,
    reporter: Reporter,
) -> dict[str, Any]:
    own = [query.own for query in asked]
    what = "images beside the one asked for" if any(own) else "images"
    topk = _at_most(topk, len(names) - max(map(len, own)), what, reporter)
    hits = nearest(vectors, bank, topk, own, method)
    rows = [
        {"query": query.name, "nearest": _ranked([(names[i], cos) for i, cos in found], "similarity")}
        for query, found in zip(asked, hits, strict=True)
    ]
    return {"topk": topk, "method": method, "queries": rows}


def _ranked(pairs: list[tuple[str, float]], what: str) -> list[dict[str, Any]]:
    return [{"rank": rank, "name": name, what: round(value, DIGITS)} for rank, (name, value) in enumerate(pairs, 1)]


def _duplicates(
    names: list[str], bank: np.ndarray, threshold: float | None, originals: Originals, reporter: Reporter
) -> dict[str, Any]:
    why = "as asked for"
    if threshold is None:
        threshold, why = similar.chosen_threshold(bank)
        if threshold > COLLAPSED:
            reporter.warn(
                "half of the images are all but the same as ten others: copies, or an encoder that has collapsed"
            )
    with reporter.bar("comparing", similar.num_blocks(len(bank))) as advance:
        found = similar.near_duplicates(bank, threshold, advance)
    same = originals.first_with_same_content([names[i] for group in found for i, _ in group])
    groups = [
        [
            {"name": names[i], "similarity": round(cos, DIGITS), "same_content_as": same.get(names[i])}
            for i, cos in group
        ]
        for group in found
    ]
    lowest = [round(similar.least_alike(bank, [i for i, _ in group]), DIGITS) for group in found]
    return {"threshold": threshold, "threshold_is": why, "groups": groups, "lowest": lowest}


def _outliers(names: list[str], bank: np.ndarray, topk: int, reporter: Reporter) -> dict[str, Any]:
    k = min(similar.NEIGHBORS, len(names) - 1)
    topk = _at_most(topk, len(names), "images", reporter)
    with reporter.bar("comparing", len(bank)) as advance:
        score = similar.unusual(bank, k, advance)
    least = np.argsort(score, kind="stable")[:topk]
    return {"neighbors": k, "outliers": _ranked([(names[i], float(score[i])) for i in least], "score")}


def _deliver(result: dict[str, Any], output: str, out: str | Path, images: Source, asked: list[Asked]) -> None:
    """To stdout, or to a file whose name then goes there."""
    if output == "html":
        made = page.render(result, images, asked)
    else:
        made = json.dumps(result, indent=1) if output == "json" else text.render(result)
    if out:
        write_atomically(Path(out), (made + "\n").encode())
    print(out or made)
