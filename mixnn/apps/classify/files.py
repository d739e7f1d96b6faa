"""What classify reads and writes: images and labels in; predictions, suggestions and the classifier out.

The classifier is one file, classifier.npz: arrays that numpy.load reads, with about.json in the same zip. Nothing in it
is ever unpickled. It holds the name of its features and a hash of their encoder, and is refused with another.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mixnn.apps.classify.classifiers import Classifier, Scaler, Setting
from mixnn.apps.classify.features import RUN, Features
from mixnn.apps.embed import Embeddings, Encoder
from mixnn.config import UserError, calling, setting
from mixnn.data import Images
from mixnn.data import labels as data_labels
from mixnn.files import expand, write_atomically
from mixnn.progress import Reporter
from mixnn.runs import Run

OWN_LABELS = "data"  # instead of a CSV file: the labels that come with the images
CLASSIFIER = "classifier.npz"
PREDICTIONS = "predictions.csv"
SUGGESTIONS = "suggestions.csv"
SUGGESTED = "suggested.json"  # all that were ever suggested: labels of these are not a random sample
FORMAT = 2
FORMATS = (1, 2)  # the first had no features other than the run's


# --- labels ---


def read_labels(labels: Any, images: Images) -> dict[str, str]:
    """Name -> label, also for files that turn out to be unreadable."""
    if isinstance(labels, str) and labels == OWN_LABELS:
        if not images.labels:
            raise UserError(f"{images.title} comes without labels: give a CSV of file,label")
        return dict(images.labels)
    if not isinstance(labels, str | Path):
        return data_labels.from_values(labels, images.names)
    names = [*images.names, *(name for name, _ in images.skipped)]
    return data_labels.read_labels(labels, names, images.has_splits, images.path_of)


def readable_labels(labels: Any, given: dict[str, str], embeddings: Embeddings, reporter: Reporter) -> dict[str, str]:
    """The labels of images that have an embedding, with a warning for each of the others; there are two classes."""
    readable = {name: given[name] for name in embeddings.names if name in given}
    for name in sorted(given.keys() - readable.keys()):
        reporter.warn(f"{name} has a label but cannot be read")
    classes = sorted(set(readable.values()))
    if len(classes) < 2:
        problem = f"every label is {classes[0]!r}" if classes else "none of the labeled images can be read"
        place = f"{labels}: " if isinstance(labels, str | Path) else ""
        raise UserError(f"{place}{problem}, but a classifier needs two classes\nlabel images of another class too")
    return readable


# --- predictions and suggestions ---


def write_predictions(
    path: Path, names: Sequence[str], classes: Sequence[str], probabilities: np.ndarray, labels: dict[str, str]
) -> None:
    """One row per image: the two most likely labels with their confidences, or the label that was given."""
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, :2]
    rows: list[Sequence[object]] = [("file", "label", "confidence", "second", "second_confidence", "labeled")]
    for name, (first, second), p in zip(names, order.tolist(), probabilities, strict=True):
        if name in labels:
            rows.append((name, labels[name], "", "", "", "yes"))
        else:
            rows.append((name, classes[first], f"{p[first]:.4f}", classes[second], f"{p[second]:.4f}", ""))
    _write_csv(path, rows)


def predictions_name(new_images: Any) -> str:
    """File name of the predictions for new images."""
    if not isinstance(new_images, str | Path):
        return "predictions-images.csv"
    path = expand(new_images).resolve()
    return f"predictions-{path.stem if path.is_file() else path.name}.csv"


def write_suggestions(
    folder: Path, suggested: Sequence[str], labels: dict[str, str], labels_file: str | Path, earlier: Collection[str]
) -> Path:
    """A CSV with the images to label, then those that have a label: once filled in, it holds all labels.

    The file of labels itself is never replaced, nor one that someone has begun to fill in; a number is added instead.
    `earlier`: what was suggested before.
    """
    path, number = folder / SUGGESTIONS, 1
    while path.exists() and (path.resolve() == Path(labels_file).resolve() or _has_other_labels(path, labels)):
        number += 1
        path = folder / f"{Path(SUGGESTIONS).stem}-{number}.csv"
    _write_csv(path, [("file", "label"), *((name, "") for name in suggested), *labels.items()])
    every = sorted({*suggested, *earlier})
    write_atomically(folder / SUGGESTED, (json.dumps(every, indent=0) + "\n").encode())
    return path


def read_suggested(folder: Path) -> list[str]:
    """Names of all images that were ever suggested in this folder."""
    path = folder / SUGGESTED
    if not path.exists():
        return []
    try:
        names = json.loads(path.read_text())
    except (OSError, ValueError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path} is not a list of suggested images: move it away, or use another {setting('out')}")
    return names


def _has_other_labels(path: Path, labels: dict[str, str]) -> bool:
    """Whether the file holds labels that are not among these, or is no file of labels at all."""
    known = data_labels.KnownNames(labels)
    try:
        rows, _ = data_labels.read_rows(path, known)
    except UserError:
        return True
    return any(row.label and labels.get(known.in_folder(row.file) or "") != row.label for row in rows)


def _write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomically(path, text.getvalue().encode())


# --- the classifier ---


def encoder_identity(encoder: Encoder) -> dict[str, str]:
    """A hash of weights, normalization and image size, and the checkpoint's name for messages."""
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    digest.update(str(encoder.size).encode())
    return {"sha256": digest.hexdigest(), "checkpoint": Path(encoder.origin).stem}


def save_classifier(path: Path, classifier: Classifier, features: Features, results: dict[str, Any]) -> None:
    about = {
        "results": results,
        "format": FORMAT,
        "features": features.name,
        "encoder": encoder_identity(features.encoder) if features.encoder is not None else None,
        "classes": list(classifier.classes),
        "setting": asdict(classifier.setting),
        "temperature": classifier.temperature,
    }
    arrays = {"mean": classifier.scaler.mean, "scale": classifier.scaler.scale, **classifier.parameters}
    data = io.BytesIO()
    np.savez(data, allow_pickle=False, **arrays)
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr("about.json", json.dumps(about, indent=1))
    write_atomically(path, data.getvalue())


def find_classifier(folder: Path, run: Run) -> Path:
    """The saved classifier in this folder, or else in the run's own."""
    paths = [folder / CLASSIFIER, run.path / "classifier" / CLASSIFIER]
    for path in paths:
        if path.is_file():
            return path
    raise UserError(
        f"there is no classifier in {paths[0]}: make one first, with {calling('classify', run.path, 'LABELS.csv')}"
    )


def load_classifier(path: Path, features: Mapping[str, Features]) -> tuple[Classifier, Features]:
    """The classifier in a file, and its features; UserError if it was fitted with another encoder."""
    try:
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read("about.json"))
        if about["format"] not in FORMATS:
            raise UserError(
                f"{path} has format {about['format']}, but this version reads {FORMAT}: classify with the labels again"
            )
        used = features[about.get("features", RUN)]
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if name != "about.json"}
        scaler, setting = Scaler(arrays.pop("mean"), arrays.pop("scale")), Setting(**about["setting"])
        classifier = Classifier(tuple(about["classes"]), setting, scaler, arrays, float(about["temperature"]))
        if used.encoder is not None:
            then, now = about["encoder"], encoder_identity(used.encoder)
            if then["sha256"] != now["sha256"]:
                raise UserError(
                    f"the encoder has changed since {path} was made "
                    f"({then['checkpoint']} then, {now['checkpoint']} now)\n"
                    "make a new classifier: classify with the labels again"
                )
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged ({error}): classify with the labels again") from None
    return classifier, used
