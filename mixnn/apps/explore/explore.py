"""explore: a map of images in the browser, with neighbors, false neighbors, and groups to export as labels."""

from __future__ import annotations

import warnings
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from mixnn.apps.embed import Embeddings, collect
from mixnn.apps.explore import layout as layouts
from mixnn.apps.explore import page
from mixnn.apps.explore.page import Atlas
from mixnn.apps.explore.pictures import LARGEST, SERVED, SIDES, SMALLEST, Pictures, along_the_map
from mixnn.apps.explore.server import Server
from mixnn.config import RUN, DataDir, Device, Param, UserError, setting, verb
from mixnn.data.labels import from_csv, from_folders
from mixnn.data.listing import list_splits, natural_key
from mixnn.data.source import Source
from mixnn.device import pick_device
from mixnn.evaluation.neighbors import nearest
from mixnn.files import check_writable, write_atomically
from mixnn.progress import Reporter, plural
from mixnn.runs import Run
from mixnn.runs.images import source_for

__all__ = ["explore"]

WHOLE = "mixnn explore with --serve shows the images themselves."


@verb
def explore(
    run: Annotated[str | Path | Run, RUN],
    source: Annotated[
        str | Path | Sequence[str | Path], Param("folder, images or data set [what the run was trained on]")
    ] = "",
    *,
    out: Annotated[str | Path, Param("the page [RUN/explore.html]", metavar="FILE")] = "",
    serve: Annotated[bool, Param("serve it on a local address instead, until Ctrl-C")] = False,
    port: Annotated[int, Param("port of that address [any that is free]", low=0, high=2**16 - 1)] = 0,
    labels: Annotated[
        str | Path, Param("folders, a CSV of file,label, or none [the run's own labels]", metavar="LABELS")
    ] = "",
    layout: Annotated[str, Param("how to lay out the map", choices=layouts.LAYOUTS)] = "auto",
    neighbors: Annotated[int, Param("neighbors to show per image", low=1)] = 10,
    max_images: Annotated[int, Param("most images on the map; of more, a random sample", low=2)] = 50_000,
    thumb: Annotated[int, Param("side of the thumbnails in pixels; 0: as large as fits", low=0, high=LARGEST)] = 0,
    seed: Annotated[int, Param("seed of the map", low=0, high=2**32 - 1)] = 0,
    browser: Annotated[bool, Param("open the page in the browser", flag="--open")] = False,
    device: Device = "auto",
    data_dir: DataDir = "",
    overwrite: Annotated[bool, Param("replace the output file if it exists")] = False,
    reporter: Reporter | None = None,
) -> Path | None:
    """One HTML file with a map of all images (default: RUN/explore.html), or the same on a local address until Ctrl-C.

    labels: "folders", a CSV of file,label, "none", or empty for those the run was given (a data set has its own).
    layout: auto (t-SNE; above 4,000 images, of as many, and the others by their neighbors), tsne (of all) or pca.
    thumb: side of the thumbnails in the file; 0 is the largest with which it stays under 60 MB.

    Examples:
        mixnn explore runs/photos --open
        mixnn explore runs/photos ./new --serve
    """
    reporter, run = reporter or Reporter(), run if isinstance(run, Run) else Run.open(run)
    target = Path(out).expanduser() if str(out) else None
    _check(target, serve, thumb)
    if target:
        check_writable(target, overwrite)
    images = source_for(run, source, str(data_dir), how=f"use {run.typed('explore')} FOLDER")
    label_of = _labels(run, source, labels, images)
    found = collect(run, images, device=device, reporter=reporter)
    shown = _shown(found, max_images, seed)
    atlas = chart(shown, label_of, layout=layout, neighbors=neighbors, seed=seed, device=device, reporter=reporter)
    atlas.title = f"{run.path.resolve().name}: {images.short_title}"
    if len(shown) < len(found):
        atlas.notes.append(f"{len(shown):,} of {plural(len(found), 'image')}, drawn at random, are on this map.")
    pictures = Pictures.of(images, shown.names)
    if serve:
        _serve(atlas, pictures, port, thumb or min(SERVED, pictures.native_side), browser, reporter)
        return None
    return _write(atlas, pictures, target or run.path / "explore.html", thumb, browser, reporter)


def _check(out: Path | None, serve: bool, thumb: int) -> None:
    """Before anything is read."""
    if out and serve:
        raise UserError(f"{setting('out')} writes a file and {setting('serve')} needs none: leave out one of them")
    if out and out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out} would be a web page: let its name end in .html")
    if thumb and not SMALLEST <= thumb <= LARGEST:
        raise UserError(f"{setting('thumb', thumb)}: thumb must be from {SMALLEST} to {LARGEST}, or 0 to choose")


def _labels(run: Run, source: str | Path | Sequence[str | Path], labels: str | Path, images: Source) -> dict[str, str]:
    """Name -> label, of those images that have one."""
    given = source or run.config.data
    own = not source or (isinstance(source, str | Path) and _same(source, run.config.data))
    labels = str(labels) or (run.config.labels if own else "")
    if labels == "none":
        return {}
    if labels and labels != "folders":
        return from_csv(Path(labels).expanduser(), images.names)
    if not labels:
        return images.labels
    if images.labels:
        raise UserError(f"{given} has its own labels: leave out {setting('labels')}, or give a CSV of file,label")
    if not isinstance(given, str | Path) or not Path(given).expanduser().is_dir():
        raise UserError("labels from folders need a folder of images: give a CSV of file,label")
    return from_folders(images.names, depth=1 if list_splits(Path(given).expanduser()).test else 0)


def _same(source: str | Path, other: str) -> bool:
    """Whether two spellings are of one folder, or one data set."""
    return Path(source).expanduser().absolute() == Path(other).expanduser().absolute()


def _shown(found: Embeddings, max_images: int, seed: int) -> Embeddings:
    """At most so many images, drawn at random and kept in their order."""
    if not np.isfinite(found.vectors).all():
        raise UserError("this encoder's vectors are not all finite numbers: its training has failed")
    if len(found) <= max_images:
        return found
    chosen = np.sort(np.random.default_rng(seed).permutation(len(found))[:max_images])
    return Embeddings([found.names[i] for i in chosen], found.vectors[chosen], found.skipped, found.about)


def chart(
    shown: Embeddings,
    label_of: dict[str, str],
    *,
    layout: str = "auto",
    neighbors: int = 10,
    seed: int = 0,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> Atlas:
    """Neighbors, layout, clusters and labels of embedded images."""
    reporter, where = reporter or Reporter(), pick_device(device)
    vectors = shown.unit()
    bank = torch.from_numpy(vectors).to(where)
    with reporter.bar("neighbors", len(shown)) as advance:
        found = nearest(bank, bank, neighbors, torch.arange(len(bank)), advance)
    cosine, index = (t.cpu().numpy() for t in found)
    reporter.info("laying out the map")
    points, words = layouts.lay_out(vectors, layout, seed, where)
    classes = sorted({label_of[name] for name in shown.names if name in label_of}, key=natural_key)
    rank = {label: i for i, label in enumerate(classes)}
    numbered = np.array([rank[label_of[name]] if name in label_of else -1 for name in shown.names])
    clusters = layouts.cluster(vectors, layouts.num_clusters(len(shown), len(classes)), seed)
    if classes:
        reporter.info(
            f"{purity(index, numbered):.1f}% of the {index.shape[1]} nearest neighbors have the image's own label"
        )
    return Atlas(shown.names, points, index, cosine, numbered, classes, clusters, layout=words, skipped=shown.skipped)


def purity(index: np.ndarray, labels: np.ndarray) -> float:
    """Percent of all neighbors whose label is that of the image; pairs with an unlabelled image (-1) do not count."""
    pairs = (labels[:, None] >= 0) & (labels[index] >= 0)
    same = pairs & (labels[index] == labels[:, None])
    return 100 * float(same.sum()) / max(1, int(pairs.sum()))


def _write(atlas: Atlas, pictures: Pictures, out: Path, thumb: int, browser: bool, reporter: Reporter) -> Path:
    room = (page.LIMIT - len(page.write(atlas))) * 3 / 4  # base64 takes four letters for three bytes
    side = thumb or pictures.fitting_side(room)
    if not side:
        atlas.notes.append(f"Thumbnails are left out, as they would make this page too large for a browser. {WHOLE}")
    elif not thumb and side < min(pictures.native_side, SIDES[0]):
        atlas.notes.append(f"Thumbnails are shrunk to {side} x {side} pixels, to keep this page under 60 MB. {WHOLE}")
    order = along_the_map(atlas.points)
    with reporter.bar("thumbnails", len(atlas)) as advance:
        sheets = pictures.sheets(order, side, advance) if side else ()
        text = page.write(atlas, side, order, sheets)
    write_atomically(out, text)
    size = f"{len(text) / 1e6:.1f} MB"
    if len(text) > page.LIMIT * 1.05:
        reporter.warn(f"{out} has {size}, and browsers may be slow with it: leave thumb out, or serve it")
    reporter.info(f"{plural(len(atlas), 'image')} in {out}, {size}: open it in a browser")
    if browser:
        webbrowser.open(out.resolve().as_uri())
    return out


def _serve(atlas: Atlas, pictures: Pictures, port: int, side: int, browser: bool, reporter: Reporter) -> None:
    with Server(page.write(atlas, side, served=True), pictures, port, side) as server:
        reporter.info(f"{plural(len(atlas), 'image')} at {server.url} on this machine only; Ctrl-C ends it")
        if reporter.quiet:
            print(server.url, flush=True)  # as the name of a file is printed
        if browser:
            webbrowser.open(server.url)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of odd metadata: the images were embedded in spite of it
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                reporter.info("stopped")
