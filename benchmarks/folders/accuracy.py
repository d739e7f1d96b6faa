"""Compare the accuracy that `mixnn classify` prints with the truth, on folders whose classes are known.

    python benchmarks/folders/accuracy.py FOLDERS --out accuracy.json
    python benchmarks/folders/accuracy.py --table accuracy.json

FOLDERS holds one folder per data set, with a subfolder per class; prepare.py makes them. Each draw labels some images
and keeps the other labels secret. The classifier, its accuracy, its interval and its confidences are made as `classify`
makes them, with the ImageNet encoder. The truth is the share of all other images that it predicts right.

Draws are of two kinds: so many labels of every class, or the same number of labels chosen at random from the folder,
as a user would choose them who does not know the classes yet.

Results are saved after each folder; a later call with the same --out adds folders to them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mixnn
from mixnn.apps.classify.classifiers import (
    LabeledSet,
    accuracy_with_interval,
    held_out_predictions,
    list_settings,
    one_thread,
    select_settings,
)
from mixnn.apps.embed import Embeddings
from mixnn.files import write_atomically
from mixnn.progress import plural

DRAWS = {2: 8, 3: 8, 5: 8, 10: 5, 20: 3}  # labels per class -> number of draws
KINDS = {"balanced": "labels per class", "random": "the same number, at random"}


def draw_rows(classes: np.ndarray, per_class: int, kind: str, draw: int) -> np.ndarray:
    """Rows to label: `per_class` of each class, or that many on average, chosen at random."""
    rng = np.random.default_rng([per_class, draw])
    names = np.unique(classes)
    if kind == "random":
        return np.sort(rng.permutation(len(classes))[: per_class * len(names)])
    return np.concatenate([rng.permutation(np.flatnonzero(classes == c))[:per_class] for c in names])


def measure_draw(embeddings: Embeddings, classes: np.ndarray, rows: np.ndarray, seed: int) -> dict[str, Any] | None:
    """What `classify` says with these labels and what is true, in percent; None if it cannot test these labels."""
    labels = {embeddings.names[i]: str(classes[i]) for i in rows}
    _, data = LabeledSet.select(embeddings, labels)
    settings = list_settings("auto")
    held = held_out_predictions(data, settings, np.random.default_rng([seed, 0]))
    if held is None:
        return None
    best = select_settings(data, settings, np.random.default_rng([seed, 1]))[0]
    rest = np.delete(np.arange(len(classes)), rows)
    p = data.fit(best.setting, best.temperature).predict_proba(embeddings.vectors[rest])
    right = np.array(data.classes)[p.argmax(1)] == classes[rest]
    plain = accuracy_with_interval(held.right, np.full(len(held.y), 1 / len(held.y)))
    said = accuracy_with_interval(held.right, held.weights)
    said |= {f"plain_{key}": value for key, value in plain.items()}
    said |= {"confidence": 100 * p.max(1).mean(), "truth": 100 * right.mean()}
    rounded = {key: round(float(value), 2) for key, value in said.items()}
    return rounded | {"labels": len(rows)}


@one_thread()
def measure_folder(folder: Path) -> list[dict[str, Any]]:
    embeddings = mixnn.embed(folder)
    classes = np.array([name.split("/")[0] for name in embeddings.names])
    sizes = np.unique(classes, return_counts=True)[1]
    found = []
    for per_class, draws in DRAWS.items():
        if sizes.min() < 2 * per_class:
            continue
        for kind in KINDS:
            for draw in range(draws):
                rows = draw_rows(classes, per_class, kind, draw)
                if said := measure_draw(embeddings, classes, rows, draw):
                    found.append({"folder": folder.name, "per_class": per_class, "kind": kind, "draw": draw, **said})
    return found


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a row per kind of draw and number of labels."""
    lines = [
        "| labels per class | draws | truth inside the 95% interval | accuracy minus truth | in nine of ten draws "
        "| confidence minus truth | in nine of ten draws |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        for per_class in DRAWS:
            own = [row for row in rows if (row["kind"], row["per_class"]) == (kind, per_class)]
            if not own:
                continue
            inside = sum(row["low"] <= row["truth"] <= row["high"] for row in own)
            cells = []
            for key in ("accuracy", "confidence"):
                error = np.array([row[key] - row["truth"] for row in own])
                cells += [f"{error.mean():+.1f}", f"within {np.quantile(abs(error), 0.9):.0f}"]
            shown = f"{per_class}" if kind == "balanced" else f"{per_class} on average, at random"
            lines.append(f"| {shown} | {len(own)} | {inside} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="?", type=Path)
    parser.add_argument("--only", nargs="*", help="names of folders")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of this file")
    args = parser.parse_args(arguments)
    if args.table:
        print(format_table(json.loads(args.table.read_text())["rows"]))
        return
    if not (args.folders and args.out):
        parser.error("give FOLDERS and --out FILE, or --table FILE")
    saved = json.loads(args.out.read_text()) if args.out.exists() else {"mixnn": mixnn.__version__, "rows": []}
    done = {row["folder"] for row in saved["rows"]}
    for folder in sorted(args.folders.iterdir()):
        if not folder.is_dir() or folder.name in done or (args.only and folder.name not in args.only):
            continue
        found = measure_folder(folder)
        saved["rows"] += found
        write_atomically(args.out, (json.dumps(saved) + "\n").encode())
        print(f"{folder.name}: {plural(len(found), 'draw')}", flush=True)
    print(format_table(saved["rows"]))


if __name__ == "__main__":
    main()
