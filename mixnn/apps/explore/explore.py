"""explore: a map of images in the browser, with neighbors, false neighbors, and groups to export as labels."""

from __future__ import annotations

import csv
import warnings
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch

from mixnn.apps.classify.features import all_features
from mixnn.apps.classify.files import PREDICTIONS, find_classifier, load_classifier
from mixnn.apps.embed import Embeddings, load_or_encode
from mixnn.apps.explore import layout as layouts
from mixnn.apps.explore import page
from mixnn.apps.explore.page import MapData
from mixnn.apps.explore.server import SERVED_SIDE, Server
from mixnn.apps.search.similarity import bank_mean, center_rows
from mixnn.apps.thumbnails import MAX_SIDE, MIN_SIDE, SIDES, Thumbnails
from mixnn.config import RUN_OR_FOLDER, DataDir, Device, Param, Source, UserError, setting, verb
from mixnn.data import DATASETS
from mixnn.data.dataset import is_given
from mixnn.data.folder import natural_key
from mixnn.data.images import Images
from mixnn.data.labels import FOLDERS, read_labels
from mixnn.device import pick_device
from mixnn.evaluation.neighbors import nearest
from mixnn.files import check_output, expand, write_atomically
from mixnn.progress import Reporter, plural, reporter_for
from mixnn.runs import Run
from mixnn.runs.encoder import Encoder, load_encoder
from mixnn.runs.start import open_run

__all__ = ["explore"]

USE_SERVE = "Use mixnn explore --serve to see the images themselves."


class Prediction(NamedTuple):
    """The label that `classify` predicted for an image, or was given for it; then there is no confidence."""

    label: str
    confidence: float | None


@verb
def explore(
    run: Annotated[str | Path | Run, RUN_OR_FOLDER],
    source: Source = "",
    *,
    out: Annotated[str | Path, Param("the page [RUN/explore.html]", metavar="FILE")] = "",
    serve: Annotated[bool, Param("serve the page on a local address until Ctrl-C, instead of writing a file")] = False,
    port: Annotated[int, Param("port of that address [any that is free]", low=0, high=2**16 - 1)] = 0,
    labels: Annotated[
        str | Path,
        Param("folders, a CSV of file,label, or none [the run's own labels, or those of `classify`]", metavar="LABELS"),
    ] = "",
    layout: Annotated[str, Param("how to lay out the map", choices=layouts.LAYOUTS)] = "auto",
    neighbors: Annotated[int, Param("neighbors to show per image", low=1)] = 10,
    max_images: Annotated[int, Param("most images to show; if there are more, a random sample", low=2)] = 50_000,
    thumb: Annotated[int, Param("side of thumbnails in pixels; 0: the largest that fits", low=0, high=MAX_SIDE)] = 0,
    seed: Annotated[int, Param("seed of the map", low=0, high=2**32 - 1)] = 0,
    browser: Annotated[bool, Param("open the page in the browser", flag="--open")] = False,
    device: Device = "auto",
    data_dir: DataDir = "",
    overwrite: Annotated[bool, Param("replace the output file if it exists")] = False,
    verbose: bool | Reporter = False,
) -> Path | None:
    """Write one HTML file with a map of all images (default: RUN/explore.html), or serve the map until Ctrl-C.

    labels: "folders", a CSV of file,label, or "none". If empty, the labels the run was trained with (a named data set
    has its own), or else those that `classify` was given. The map can also be colored by what `classify` predicted.
    layout: auto, tsne (of all images) or pca. auto is t-SNE; above 4,000 images, it is t-SNE of 4,000 of them, and the
    others are placed next to their neighbors.
    thumb: side of the thumbnails in the file; 0 is the largest that keeps the file under 60 MB.

    >>> mixnn.explore("runs/photos", out="map.html", layout="pca")
    PosixPath('map.html')

    Examples:
        mixnn explore runs/photos --open
        mixnn explore runs/photos ./new --serve
    """
    reporter = reporter_for(verbose)
    run = open_run(run, reporter)
    _check_options(expand(out) if str(out) else None, serve, thumb)
    images = run.images(source, str(data_dir))
    target = None if serve else check_output(out, run.path / "explore.html", overwrite)
    label_of, encoder, predictions = _labels(run, source, labels, images), None, dict[str, Prediction]()
    file = run.path / "classifier" / PREDICTIONS
    if file.is_file() and _is_training_data(run, source):
        encoder = load_encoder(run, device, reporter)
        predictions = _predictions(file, run, encoder, reporter)
    if not label_of and str(labels) != "none":
        label_of = {name: found.label for name, found in predictions.items() if found.confidence is None}
    embedded = load_or_encode(run, images, device=device, encoder=encoder, reporter=reporter)
    sample = _sample(embedded, max_images, seed)
    data = build_map(
        sample, label_of, predictions, layout=layout, neighbors=neighbors, seed=seed, device=device, reporter=reporter
    )
    data.title = f"{run.path.resolve().name}: {images.short_title}"
    if len(sample) < len(embedded):
        data.notes.append(f"The map shows {len(sample):,} of {plural(len(embedded), 'image')}, chosen at random.")
    thumbnails = Thumbnails(images.rows([images.position[name] for name in sample.names]))
    if target is None:
        _serve(data, thumbnails, port, thumb or min(SERVED_SIDE, thumbnails.native_side), browser, reporter)
        return None
    return _write(data, thumbnails, target, thumb, browser, reporter)


def _check_options(out: Path | None, serve: bool, thumb: int) -> None:
    if out and serve:
        raise UserError(f"{setting('out')} writes a file and {setting('serve')} writes none: use only one of them")
    if out and out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out} would be a web page: use a name that ends in .html")
    if thumb and not MIN_SIDE <= thumb <= MAX_SIDE:
        side = f"a side from {MIN_SIDE} to {MAX_SIDE} pixels, or 0 to choose it"
        raise UserError(f"{setting('thumb', thumb)}: use {side}")


def _labels(run: Run, source: Any, labels: str | Path, images: Images) -> dict[str, str]:
    """Name -> label, for the images that have one."""
    data = source if is_given(source) else run.config.data
    labels = str(labels) or (run.config.labels if _is_training_data(run, source) else "")
    if labels == "none":
        return {}
    if not labels:
        return dict(images.labels)
    if labels == FOLDERS and images.labels:
        raise UserError(
            f"{images.title} has its own labels: leave out {setting('labels')}, or give a CSV of file,label"
        )
    if labels == FOLDERS and (not isinstance(data, str | Path) or not expand(data).is_dir()):
        raise UserError(f"{setting('labels', 'folders')} needs a folder of images: give a CSV of file,label instead")
    return read_labels(labels, images.names, images.has_splits, images.path_of)


def _is_training_data(run: Run, source: Any) -> bool:
    """Whether a source is what the run was trained on. If that folder is gone, the source is where it was moved to."""
    if not is_given(source) or not isinstance(source, str | Path):
        return not is_given(source)
    given, own = (expand(path).absolute() for path in (source, run.config.data))
    return given == own or (given.is_dir() and run.config.data not in DATASETS and not own.exists())


def _predictions(file: Path, run: Run, encoder: Encoder, reporter: Reporter) -> dict[str, Prediction]:
    """Name -> what `classify` wrote; empty, with a warning, if the classifier was made with another encoder."""
    try:
        load_classifier(find_classifier(file.parent, run), all_features(run, encoder, reporter))
        with open(file, newline="", encoding="utf-8") as lines:
            return {
                row["file"]: Prediction(row["label"], float(row["confidence"]) if row["confidence"] else None)
                for row in csv.DictReader(lines)
            }
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:  # a UserError is a ValueError
        reporter.warn(f"the predictions in {file} are not shown: {str(error).splitlines()[0]}")
        return {}


def _sample(embedded: Embeddings, max_images: int, seed: int) -> Embeddings:
    """At most `max_images` images, chosen at random, in their old order."""
    if not np.isfinite(embedded.vectors).all():
        raise UserError("this encoder gives NaN or inf: its training has failed")
    if len(embedded) <= max_images:
        return embedded
    chosen = np.sort(np.random.default_rng(seed).permutation(len(embedded))[:max_images])
    names = [embedded.names[i] for i in chosen]
    return Embeddings(names, embedded.vectors[chosen], embedded.skipped, embedded.about)


def build_map(
    embedded: Embeddings,
    label_of: dict[str, str],
    predictions: Mapping[str, Prediction] = MappingProxyType({}),
    *,
    layout: str = "auto",
    neighbors: int = 10,
    seed: int = 0,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> MapData:
    """Neighbors, layout, clusters, labels and predicted labels of embedded images."""
    reporter, where = reporter or reporter_for(False), pick_device(device)
    vectors, names = embedded.unit(), embedded.names
    centered = center_rows(vectors.copy(), bank_mean(vectors))  # as `search` does it
    bank = torch.from_numpy(centered).to(where)
    with reporter.bar("neighbors", len(names)) as advance:
        cosines, index = (t.cpu().numpy() for t in nearest(bank, bank, neighbors, torch.arange(len(bank)), advance))
    reporter.info("computing the layout of the map")
    points, layout_name = layouts.lay_out(vectors, layout, seed, where)
    found = [predictions.get(name) for name in names]
    classes = sorted(
        {label_of[name] for name in names if name in label_of} | {one.label for one in found if one}, key=natural_key
    )
    number = {label: i for i, label in enumerate(classes)}
    labels = np.array([number[label_of[name]] if name in label_of else -1 for name in names])
    clusters = layouts.cluster(vectors, layouts.num_clusters(len(names), len(classes)), seed)
    if 2 * (labels >= 0).sum() >= len(labels):  # of few labels, hardly any two are neighbors
        reporter.info(
            f"{purity(index, labels):.1f}% of the {index.shape[1]} nearest neighbors have the same label as the image"
        )
    data = MapData(names, points, index, cosines, labels, classes, clusters, layout=layout_name)
    data.skipped = embedded.skipped
    if any(found):
        data.predicted = np.array([number[one.label] if one else -1 for one in found])
        data.confidences = np.array(
            [-1.0 if one is None or one.confidence is None else one.confidence for one in found]
        )
    return data


def purity(index: np.ndarray, labels: np.ndarray) -> float:
    """Percentage of neighbors with the image's own label; pairs with an unlabeled image (-1) do not count."""
    pairs = (labels[:, None] >= 0) & (labels[index] >= 0)
    same = pairs & (labels[index] == labels[:, None])
    return 100 * float(same.sum()) / max(1, int(pairs.sum()))


def _write(data: MapData, thumbnails: Thumbnails, out: Path, thumb: int, browser: bool, reporter: Reporter) -> Path:
    """Write the page to one file, and open it in the browser if asked."""
    room = (page.MAX_BYTES - len(page.render(data))) * 3 / 4  # base64 takes four letters for three bytes
    side = thumb or thumbnails.largest_side(room)
    if not side:
        data.notes.append(f"There are no thumbnails: they would make this page too large for a browser. {USE_SERVE}")
    elif not thumb and side < min(thumbnails.native_side, SIDES[0]):
        data.notes.append(f"Thumbnails are {side} x {side} pixels, to keep this page under 60 MB. {USE_SERVE}")
    order = layouts.morton_order(data.points)
    with reporter.bar("thumbnails", len(data)) as advance:
        sheets = thumbnails.sheets(order, side, advance) if side else ()
        text = page.render(data, side, order, sheets)
    write_atomically(out, text)
    size = f"{len(text) / 1e6:.1f} MB"
    if len(text) > page.MAX_BYTES * 1.05:
        reporter.warn(f"{out} has {size}, which may be slow in a browser: leave thumb out, or serve it")
    reporter.info(f"{plural(len(data), 'image')} in {out}, {size}: open it in a browser")
    if browser:
        webbrowser.open(out.resolve().as_uri())
    return out


def _serve(data: MapData, thumbnails: Thumbnails, port: int, side: int, browser: bool, reporter: Reporter) -> None:
    """Serve the page on a local address until Ctrl-C, and open it in the browser if asked."""
    with Server(page.render(data, side, served=True), thumbnails, port, side) as server:
        reporter.info(f"{plural(len(data), 'image')} at {server.url}, on this machine only; press Ctrl-C to stop")
        if reporter.quiet:
            print(server.url, flush=True)  # the result, like the name of a file
        if browser:
            webbrowser.open(server.url)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about odd metadata of images that could be embedded
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                reporter.info("stopped")
