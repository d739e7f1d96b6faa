"""The explore page: arrays, names and thumbnails in one HTML file. Arrays are base64 of little-endian numbers."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mixnn.apps import webpage
from mixnn.apps.thumbnails import Encoded

SCRIPTS = ("data.js", "thumbs.js", "map.js", "groups.js", "page.js", "input.js")
NO_LABEL = 2**16 - 1
MAX_BYTES = 60_000_000  # size of a page that a browser still opens quickly


@dataclass
class MapData:
    """Everything the map shows of N images, except their pixels."""

    names: list[str]
    points: np.ndarray  # float32 (N, 2)
    neighbors: np.ndarray  # (N, K), nearest first
    cosines: np.ndarray  # (N, K)
    labels: np.ndarray  # (N,), index into classes; -1: no label
    classes: list[str]
    clusters: np.ndarray  # (N,)
    predicted: np.ndarray | None = None  # (N,), like labels, by `classify`; None: it was not run
    confidences: np.ndarray | None = None  # (N,), of these predictions; -1: none
    title: str = ""
    layout: str = ""  # how the layout was made, in words
    notes: list[str] = field(default_factory=list)  # what a reader should know: images left out, thumbnails shrunk
    skipped: list[tuple[str, str]] = field(default_factory=list)  # unreadable files, with reasons

    def __len__(self) -> int:
        return len(self.names)


def render(
    data: MapData,
    side: int = 0,
    order: np.ndarray | None = None,
    sheets: Iterable[Encoded] = (),
    served: bool = False,
) -> bytes:
    """The page as HTML. `sheets` hold thumbnails of this side, in `order`; served: the page requests them instead."""
    slots = np.zeros(len(data), np.uint32)
    slots[order if order is not None else slice(None)] = np.arange(len(data))
    sheets = list(sheets)
    meta = {
        "title": data.title,
        "count": len(data),
        "neighbors": data.neighbors.shape[1],
        "classes": data.classes,
        "layout": data.layout,
        "notes": data.notes,
        "skipped": data.skipped,
        "side": side,
        "sheets": len(sheets),
        "served": served,
        "predicted": data.predicted is not None,
        "key": hashlib.sha256("\0".join([data.title, *data.names]).encode(errors="replace")).hexdigest()[:16],
    }
    index_type = "<u2" if len(data) <= 2**16 else "<u4"
    blocks = [
        text_block("meta", meta),
        text_block("names", data.names),
        array_block("points", data.points, "<f4"),
        array_block("neighbors", data.neighbors, index_type),
        array_block("cosines", np.rint((np.clip(data.cosines, -1, 1) + 1) / 2 * 65535), "<u2"),
        class_block("labels", data.labels),
        array_block("clusters", data.clusters, "<u2"),
        array_block("slots", slots, "<u4"),
    ]
    if data.predicted is not None and data.confidences is not None:
        blocks += [class_block("predicted", data.predicted), array_block("confidences", data.confidences, "<f4")]
    sheet_blocks = [
        f'<script type="text/plain" id="sheet{i}" data-type="{sheet.media_type}">{sheet.base64}</script>'
        for i, sheet in enumerate(sheets)
    ]
    template, style, *scripts = (
        webpage.read("mixnn.apps.explore", name) for name in ("page.html", "page.css", *SCRIPTS)
    )
    script = '"use strict";\n{\n' + "\n".join(scripts) + "\n}"
    return webpage.fill(
        template,
        head=webpage.head(data.title, style, script, served),
        script=script,
        data="\n".join(blocks),
        sheets="\n".join(sheet_blocks),
    ).encode(errors="backslashreplace")


def text_block(name: str, value: Any) -> str:
    return f'<script type="application/json" id="data-{name}">{webpage.as_json(value)}</script>'


def class_block(name: str, numbers: np.ndarray) -> str:
    """Class numbers, with NO_LABEL for -1."""
    return array_block(name, np.where(numbers < 0, NO_LABEL, numbers), "<u2")


def array_block(name: str, values: np.ndarray, kind: str) -> str:
    """Numbers as base64; `kind` is numpy's name of the type, such as "<u2"."""
    text = base64.b64encode(np.ascontiguousarray(values).astype(kind).tobytes()).decode()
    return f'<script type="text/plain" id="data-{name}" data-type="{kind[1:]}">{text}</script>'
