"""search: the images most similar to a query, near-duplicates, and outliers, by the vectors of a run's encoder."""

from __future__ import annotations

import difflib
import functools
import json
import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image

from mixnn.apps.embed import load_or_encode
from mixnn.apps.fingerprints import FingerprintEncoder, are_copies, copy_pairs
from mixnn.apps.search import render, similarity
from mixnn.apps.search.similarity import METHODS, bank_mean, center_rows, check_faiss, normalize_rows
from mixnn.config import RUN_OR_FOLDER, DataDir, Device, Overwrite, Param, UserError, setting, verb
from mixnn.data import open_images
from mixnn.data.dataset import is_given
from mixnn.data.folder import EXTENSIONS, list_images, printable
from mixnn.data.images import ImageFiles, Images, list_files
from mixnn.files import check_output, expand, write_atomically
from mixnn.progress import Reporter, plural, reporter_for
from mixnn.runs import Run
from mixnn.runs.encoder import load_encoder
from mixnn.runs.start import open_run

__all__ = ["SearchResult", "search", "show_search"]

Query = str | Path | Sequence[str | Path] | Any

FORMATS = ("terminal", "json", "html")
TOPK = 10
CLOSE = 0.75  # how alike a name must be to be suggested for a wrong one
MOST_TO_COMPARE = 100_000  # names among which the nearest to a wrong one is looked for
DIGITS = 6  # decimal places of similarities: float32 has no more
COLLAPSED = 0.9999  # a default threshold above this finds little but identical images


@dataclass(frozen=True)
class QueryImage:
    """One image to search for."""

    name: str  # as the user gave it
    picture: Images | None  # this image alone; None for an image of the source that is not a file
    rows: list[int]  # its own positions among the vectors searched; empty if it is not there
    from_folder: bool = False  # found in a folder that was given, so it may be left out if it cannot be read


class SearchResult(dict[str, Any]):
    """What `search` found, as plain values. As text, it is what the command prints."""

    form: str = "terminal"  # what the file holds, or what the command prints
    path: Path | None = None  # the file that was written

    def __str__(self) -> str:
        return render.terminal(self)

    __repr__ = __str__


@verb
def search(
    run: Annotated[str | Path | Run, RUN_OR_FOLDER],
    query: Annotated[Query, Param("images to look for: files, a folder of them, or names in the source")] = "",
    *,
    source: Annotated[
        str | Path | Sequence[str | Path] | Any,
        Param(
            "images to search: a folder, image files or a data set; if the run's images were moved, their new folder "
            "[the run's data]",
            metavar="FOLDER",
        ),
    ] = "",
    topk: Annotated[int | None, Param("images per query, or outliers, to show [10]", low=1)] = None,
    duplicates: Annotated[bool, Param("find groups of nearly identical images instead")] = False,
    outliers: Annotated[bool, Param("find the images least similar to any other instead")] = False,
    threshold: Annotated[
        float | None,
        Param(
            "images with this similarity or more, up to 1, are duplicates [chosen and printed]",
            low=0.001,
            high=1,
            metavar="SIMILARITY",
        ),
    ] = None,
    method: Annotated[str, Param("how to search", choices=("auto", *METHODS))] = "auto",
    output: Annotated[str, Param("how to show the results", choices=FORMATS, flag="--format")] = "terminal",
    out: Annotated[
        str | Path,
        Param(
            "file for the results [screen; a page: RUN/nearest.html, RUN/duplicates.html or RUN/outliers.html]",
            metavar="FILE",
        ),
    ] = "",
    device: Device = "auto",
    data_dir: DataDir = "",
    overwrite: Overwrite = False,
    verbose: bool | Reporter = False,
) -> SearchResult:
    """Find the `topk` images of `source` most similar to each query. Default source: the run's training data.

    Similarity is 0 for images as unlike as two random images of the source, and 1 for the same image. (It is the cosine
    of their vectors after subtracting the mean vector of the source. For fewer than 20 images, and for outliers, it is
    the plain cosine.)

    A query is an image file, several, a folder, or the name of an image in the source. Its results do not include the
    image itself. In Python, query and source may also be images in memory (docs/data.md).

    Instead of a query, `duplicates` finds groups of images whose similarity is `threshold` or more. Without a
    `threshold`, one is chosen, and images with nearly the same pixels (at 32 x 32) are duplicates too. `outliers`
    finds the `topk` images least similar to their neighbors.

    The result is plain values, which print as a list. With `out`, it is also written to a file, as text, JSON
    or a web page; a page goes to the run folder by default.

    >>> found = mixnn.search("runs/photos", "photos/cat0.png", topk=3)
    >>> [hit["rank"] for hit in found["queries"][0]["nearest"]]
    [1, 2, 3]

    Examples:
        mixnn search runs/photos cat.jpg
        mixnn search runs/photos cat.jpg dog.jpg --source ./new --format html
        mixnn search runs/photos --duplicates
    """
    kind = _kind(query, duplicates, outliers)
    _check_options(kind, threshold, method, topk)
    output = _form_of_file(output, out)
    topk = TOPK if topk is None else topk
    reporter = reporter_for(verbose)
    run = open_run(run, reporter)
    images = run.images(source, str(data_dir))
    query = [query] if isinstance(query, Image.Image) else query
    if kind == "nearest" and _is_paths(query):
        check_query(query, images.position)  # find a typo before an hour of embedding
    to_file = str(out) or output == "html"
    target = check_output(out, run.path / f"{kind}.html", overwrite) if to_file else None
    embeddings = load_or_encode(run, images, device=device, reporter=reporter)
    names, bank = embeddings.names, normalize_rows(embeddings.vectors)
    if kind == "outliers":  # the mean is what most images share, and an odd one lacks: it stays (notes/log.md)
        mean = np.zeros(bank.shape[1], np.float32)
    else:
        mean = bank_mean(bank)
        bank = center_rows(bank, mean)
    if kind != "nearest" and len(names) < 2:
        raise UserError(f"{setting(kind, True)} needs at least two images, but only one in {images.title} can be read")
    queries: list[QueryImage] = []
    if kind == "nearest":
        queries, vectors = encode_queries(find_queries(query, images, names), bank, mean, run, device, reporter)
        found = _nearest(names, bank, queries, vectors, topk, "exact" if method == "auto" else method, reporter)
    elif kind == "duplicates":
        fingerprints = _fingerprints(run, images, names, reporter) if threshold is None else None
        found = _duplicates(names, bank, fingerprints, threshold, images, reporter)
    else:
        found = _outliers(names, bank, topk, reporter)
    about = {"kind": kind, "run": run.path.name, "source": printable(images.title), "images": len(names)}
    about["centered"] = bool(mean.any())
    result = SearchResult(about | found | {"skipped": [list(pair) for pair in embeddings.skipped]})
    result.form, result.path = output, target
    if target and output == "html":
        write_atomically(target, (render.page(result, images, [query.picture for query in queries]) + "\n").encode())
    elif target:
        write_atomically(target, (_as_text(result) + "\n").encode())
    return result


def _as_text(result: SearchResult) -> str:
    return json.dumps(result, indent=1) if result.form == "json" else str(result)


def show_search(result: SearchResult) -> None:
    """Print the result of `search`, or the file that it was written to."""
    print(result.path or _as_text(result))


def _kind(query: Query, duplicates: bool, outliers: bool) -> str:
    has_query = is_given(query) and not (isinstance(query, list | tuple) and not query)
    kinds = [k for k, on in (("nearest", has_query), ("duplicates", duplicates), ("outliers", outliers)) if on]
    if len(kinds) != 1:
        others = f"{setting('duplicates', True)}, {setting('outliers', True)}"
        raise UserError(f"give exactly one of: an image or a folder to search for, {others}")
    return kinds[0]


def _check_options(kind: str, threshold: float | None, method: str, topk: int | None) -> None:
    if method == "faiss":
        if kind != "nearest":
            raise UserError(f"{setting('method', 'faiss')} works with a query, not with {setting(kind, True)}")
        check_faiss()
    if threshold is not None and kind != "duplicates":
        raise UserError(f"{setting('threshold')} works only with {setting('duplicates', True)}")
    if topk is not None and kind == "duplicates":
        all_groups = f"{setting('duplicates', True)} lists all groups"
        raise UserError(f"{all_groups}: leave out {setting('topk')}, or raise {setting('threshold')} for fewer")


def _form_of_file(output: str, out: str | Path) -> str:
    """The form of the results, which the name of the file may say."""
    ending = Path(out).suffix.lower()
    if ending == ".csv" and output == "terminal":
        raise UserError(f"{out} would not be a CSV: use a name that ends in .json, .html or .txt")
    said = {".json": "json", ".html": "html", ".htm": "html"}.get(ending, output)
    if output not in ("terminal", said):
        raise UserError(f"{out} would hold {output}: use another name, or leave out {setting('output', output)}")
    return said


def _is_paths(query: Query) -> bool:
    """Whether the query is given by files, folders or names, not by images in memory."""
    several = query if isinstance(query, list | tuple) else [query]
    return all(isinstance(part, str | Path) for part in several)


def check_query(query: Query, names: Collection[str]) -> list[str | Path]:
    """The parts of a query; UserError unless each is a file, a folder, or one of the names."""
    parts = [query] if isinstance(query, str | Path) else list(query)
    known = [str(part) in names or expand(part).exists() for part in parts]
    return [part if k else _in_a_subfolder(str(part), names) for part, k in zip(parts, known, strict=True)]


def _in_a_subfolder(name: str, names: Collection[str]) -> str:
    """The one image whose path ends in this name, in upper or lower case; UserError if there is none, or several."""
    ending = f"/{name.lower()}"
    same = [other for other in names if f"/{other.lower()}".endswith(ending)]
    if len(same) == 1:
        return same[0]
    if same:
        listed = ", ".join(printable(other) for other in same[:3])
        raise UserError(f"{printable(name)} is the name of {plural(len(same), 'image')}, such as {listed}: give one")
    close = difflib.get_close_matches(name, names, 1, CLOSE) if len(names) <= MOST_TO_COMPARE else []
    meant = f", did you mean {printable(close[0])}?" if close else ""
    raise UserError(
        f"no such image: {printable(name)} is not a file, a folder or the name of an image in the source{meant}"
    )


def find_queries(query: Query, images: Images, names: list[str]) -> list[QueryImage]:
    """All images that a query means. `names` are those of the vectors searched, in order."""
    if not _is_paths(query):
        given = open_images(query)
        return [QueryImage(f"query {name}", given.rows([i]), []) for i, name in enumerate(given.names)]
    row_of = {name: i for i, name in enumerate(names)}
    path_of = dict(zip(images.names, images.paths, strict=False))  # empty for a named data set
    rows_of = defaultdict(list)
    for i, name in enumerate(names if path_of else []):
        with suppress(OSError):  # the file is gone since it was listed
            rows_of[_file_id(path_of[name])].append(i)
    found = []
    for part in check_query(query, images.position):
        path = expand(part)
        if str(part) in images.position and str(part) not in row_of and not path.exists():
            raise UserError(f"cannot read {printable(str(part))}: the source's image is damaged or empty")
        if path.is_dir():
            inside = [path / name for name in list_images(path)[0]]
            if not inside:
                raise UserError(
                    f"no images in {path}\ngive a folder with files that end in {' '.join(sorted(EXTENSIONS))}"
                )
            found += [
                QueryImage(printable(str(f)), list_files([f]), rows_of.get(_file_id(f), []), from_folder=True)
                for f in inside
            ]
        elif path.exists():
            found.append(QueryImage(printable(str(part)), list_files([path]), rows_of.get(_file_id(path), [])))
        else:
            file = path_of.get(str(part))
            found.append(QueryImage(str(part), list_files([file]) if file else None, [row_of[str(part)]]))
    return found


def _file_id(path: Path) -> tuple[int, int]:
    """An identity that all spellings of a path and links to it share; a broken link has its own."""
    status = os.stat(path, follow_symlinks=path.exists())
    return status.st_dev, status.st_ino


def encode_queries(
    queries: list[QueryImage], bank_MF: np.ndarray, mean_F: np.ndarray, run: Run, device: str, reporter: Reporter
) -> tuple[list[QueryImage], np.ndarray]:
    """The queries that can be read, and their unit vectors, less the bank's mean like those of the bank.

    The encoder is loaded only for images that are not in the bank. A file that cannot be read is an error if the user
    gave it, and skipped with a warning if it was in a folder.
    """
    vectors = {i: bank_MF[query.rows[0]] for i, query in enumerate(queries) if query.rows}
    new = {i: query.picture for i, query in enumerate(queries) if query.picture and not query.rows}
    files = {i: picture.paths[0] for i, picture in new.items() if picture.paths}
    groups: list[tuple[list[int], Images]] = [([i], picture) for i, picture in new.items() if i not in files]
    groups += [([*files], ImageFiles("", [str(i) for i in files], paths=[*files.values()]))] if files else []
    encoder = load_encoder(run, device, reporter) if groups else None
    for numbers, group in groups:
        assert encoder is not None
        number = dict(zip(group.names, numbers, strict=True))
        for names, found, skipped in encoder.encode(group):
            vectors |= zip((number[n] for n in names), center_rows(normalize_rows(found), mean_F), strict=True)
            for query, why in ((queries[number[name]], why) for name, why in skipped):
                if not query.from_folder:
                    raise UserError(f"cannot read {query.name}: {why}")
                reporter.warn(f"skipped {query.name}: {why}")
    if not vectors:
        raise UserError(f"none of the {len(queries):,} query images can be read")
    readable = sorted(vectors)
    return [queries[i] for i in readable], np.stack([vectors[i] for i in readable])


def _at_most(topk: int, available: int, which: str, reporter: Reporter) -> int:
    """`topk`, or the number of images available if that is lower. `which`: more words about them."""
    if not available:
        raise UserError(f"there are no images{which}")
    if topk > available:
        reporter.info(
            f"there {'is' if available == 1 else 'are'} only {plural(available, 'image')}{which}, not {topk:,}"
        )
    return min(topk, available)


def _nearest(
    names: list[str],
    bank: np.ndarray,
    queries: list[QueryImage],
    vectors: np.ndarray,
    topk: int,
    method: str,
    reporter: Reporter,
) -> dict[str, Any]:
    own = [query.rows for query in queries]
    which = " other than the query" if any(own) else ""
    topk = _at_most(topk, len(names) - max(map(len, own)), which, reporter)
    hits = similarity.nearest(vectors, bank, topk, own, method)
    rows = [
        {"query": query.name, "nearest": _ranked([(names[i], cos) for i, cos in found], "similarity")}
        for query, found in zip(queries, hits, strict=True)
    ]
    return {"topk": topk, "method": method, "queries": rows}


def _ranked(pairs: list[tuple[str, float]], key: str) -> list[dict[str, Any]]:
    return [{"rank": rank, "file": name, key: round(value, DIGITS)} for rank, (name, value) in enumerate(pairs, 1)]


def _fingerprints(run: Run, images: Images, names: list[str], reporter: Reporter) -> np.ndarray:
    """Fingerprints of the named images, in this order; zeros for one that cannot be read any more."""
    found = load_or_encode(
        run, images, encoder=FingerprintEncoder(), kind="fingerprints", reporter=reporter, description="reading pixels"
    )
    if found.names == names:
        return found.vectors
    row_of, blank = dict(zip(found.names, found.vectors, strict=True)), np.zeros(found.vectors.shape[1], np.float32)
    return np.stack([row_of.get(name, blank) for name in names])


def _duplicates(
    names: list[str],
    bank: np.ndarray,
    fingerprints: np.ndarray | None,
    threshold: float | None,
    images: Images,
    reporter: Reporter,
) -> dict[str, Any]:
    """Groups of near-duplicates by their vectors and, if there are any, by their fingerprints."""
    why = "as given"
    if threshold is None:
        threshold, why = similarity.default_threshold(bank)
        if threshold > COLLAPSED:
            reporter.warn(
                "half of the images are nearly identical to ten others: they are copies, or the encoder has collapsed"
            )
    with reporter.bar("comparing", similarity.num_blocks(len(bank))) as advance:
        linked = None if fingerprints is None else functools.partial(copy_pairs, fingerprints)
        found = similarity.near_duplicates(bank, threshold, advance, linked)
    first = first_with_same_content(images, [names[i] for group in found for i, _ in group])
    groups, lowest = [], []
    for group in found:
        rows = [i for i, _ in group]
        if fingerprints is None:
            same = np.zeros(len(rows), bool)
        else:
            same = are_copies(fingerprints[rows], fingerprints[rows[:1]])
        members = zip(group, same.tolist(), strict=True)
        groups.append([_member(names[i], cos, first.get(names[i]), is_same) for (i, cos), is_same in members])
        lowest.append(round(similarity.lowest_similarity(bank, rows), DIGITS))
    return {"threshold": threshold, "threshold_is": why, "groups": groups, "lowest": lowest}


def _member(name: str, cos: float, same_content_as: str | None, same_pixels: bool) -> dict[str, Any]:
    """An image of a group; similarity and pixels are compared with the group's first image."""
    found: dict[str, Any] = {"file": name, "similarity": round(cos, DIGITS)}
    return found | {"same_content_as": same_content_as, "same_pixels": same_pixels}


def first_with_same_content(images: Images, names: list[str]) -> dict[str, str]:
    """Name -> the first of the names with identical content, for every name after that first one."""
    first: dict[bytes, str] = {}
    digests = {name: digest for name in names if (digest := images.digest(images.position[name]))}
    return {name: first[digest] for name, digest in digests.items() if first.setdefault(digest, name) != name}


def _outliers(names: list[str], bank: np.ndarray, topk: int, reporter: Reporter) -> dict[str, Any]:
    k = min(similarity.NEIGHBORS, len(names) - 1)
    topk = _at_most(topk, len(names), "", reporter)
    with reporter.bar("comparing", len(bank)) as advance:
        score = similarity.mean_similarity(bank, k, advance)
    lowest = np.argsort(score, kind="stable")[:topk]
    return {"neighbors": k, "outliers": _ranked([(names[i], float(score[i])) for i in lowest], "score")}
