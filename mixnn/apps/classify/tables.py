"""Labels in, predictions and suggestions out: CSV files that a spreadsheet opens."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mixnn.apps.embed import Embeddings
from mixnn.config import UserError, setting
from mixnn.data.labels import as_known, columns, from_csv, from_folders, read_rows
from mixnn.data.listing import list_splits
from mixnn.files import write_atomically

PREDICTIONS = "predictions.csv"
SUGGESTIONS = "suggestions.csv"
SUGGESTED = "suggested.json"  # all that ever were: their labels are no random sample to measure accuracy on
FOLDERS = "folders"  # in place of a CSV: the label is the subfolder, as in pretrain


def read_labels(labels: str | Path, embeddings: Embeddings, folder: Path) -> tuple[dict[str, str], list[str]]:
    """File -> label of the images that have an embedding, and the labelled files that could not be read."""
    unreadable = {name for name, _ in embeddings.skipped}
    names = [*embeddings.names, *unreadable]
    if str(labels) == FOLDERS:
        depth = 1 if folder.is_dir() and list_splits(folder).test else 0
        given = from_folders(names, depth)
    else:
        given = from_csv(Path(labels).expanduser(), names)
    found = {name: label for name, label in given.items() if name not in unreadable}
    classes = sorted(set(found.values()))
    if len(classes) < 2:
        every = f"every label is {classes[0]!r}" if classes else "none of the labelled images can be read"
        raise UserError(f"{labels}: {every}, and telling apart takes two\nlabel images of another class too")
    return found, sorted(unreadable & given.keys())


def write_predictions(
    path: Path, names: Sequence[str], classes: Sequence[str], probabilities: np.ndarray, given: dict[str, str]
) -> None:
    """A row an image: the likeliest label and the next, with confidences; one that was given is marked instead."""
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, :2]
    rows: list[Sequence[object]] = [("file", "label", "confidence", "second", "second_confidence", "labelled")]
    for name, (first, second), p in zip(names, order.tolist(), probabilities, strict=True):
        if name in given:
            rows.append((name, given[name], "", "", "", "yes"))
        else:
            rows.append((name, classes[first], f"{p[first]:.4f}", classes[second], f"{p[second]:.4f}", ""))
    _write(path, rows)


def write_suggestions(folder: Path, suggested: Sequence[str], given: dict[str, str], labels: str | Path) -> Path:
    """Images to label, then those that are labelled: filled in, the file holds all labels for the next round.

    The file of labels itself, and one that holds labels beside those given, is left alone: the next number is taken.
    """
    path, number = folder / SUGGESTIONS, 1
    while path.exists() and (path.resolve() == Path(labels).resolve() or _has_more(path, given)):
        number += 1
        path = folder / f"{Path(SUGGESTIONS).stem}-{number}.csv"
    _write(path, [("file", "label"), *((name, "") for name in suggested), *given.items()])
    every = sorted({*suggested, *ever_suggested(folder)})
    write_atomically(folder / SUGGESTED, (json.dumps(every, indent=0) + "\n").encode())
    return path


def ever_suggested(folder: Path) -> list[str]:
    """What was suggested here before, in any round."""
    path = folder / SUGGESTED
    if not path.exists():
        return []
    try:
        names = json.loads(path.read_text())
    except (OSError, ValueError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path} is no list of suggested images: move it away, or use another {setting('out')}")
    return names


def _has_more(path: Path, given: dict[str, str]) -> bool:
    """Whether someone has begun to fill it in."""
    try:
        rows = read_rows(path)
        header, file, label = columns(path, *rows[0])
    except UserError:
        return True  # whatever it is, it is not ours to lose
    filled = [row for _, row in rows[header:] if len(row) > max(file, label) and row[label].strip()]
    return any(given.get(as_known(row[file], given)) != row[label].strip() for row in filled)


def _write(path: Path, rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomically(path, text.getvalue().encode())
