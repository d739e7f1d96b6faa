"""The page: arrays, names and thumbnails in one HTML file. Arrays travel as base64 of little-endian numbers."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mixnn.apps import webpage

SCRIPTS = ("data.js", "thumbs.js", "map.js", "groups.js", "page.js", "hands.js")
NO_LABEL = 2**16 - 1
LIMIT = 60_000_000  # bytes of a page that a browser still opens in a moment


@dataclass
class Atlas:
    """All that is known of N images but their pixels."""

    names: list[str]
    points: np.ndarray  # float32 (N, 2)
    neighbors: np.ndarray  # (N, K), nearest first
    cosines: np.ndarray  # (N, K)
    labels: np.ndarray  # (N,), -1: none
    classes: list[str]
    clusters: np.ndarray  # (N,)
    title: str = ""
    layout: str = ""
    notes: list[str] = field(default_factory=list)  # what a reader must know: images left out, thumbnails shrunk
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names)


def write(
    atlas: Atlas,
    side: int = 0,
    order: np.ndarray | None = None,
    sheets: Iterable[tuple[bytes, str]] = (),
    served: bool = False,
) -> bytes:
    """The page as a file; `sheets` hold thumbnails of this side, in `order`. served: they are asked for by number."""
    slots = np.zeros(len(atlas), np.uint32)
    slots[order if order is not None else slice(None)] = np.arange(len(atlas))
    sheets = list(sheets)
    meta = {
        "title": atlas.title,
        "count": len(atlas),
        "neighbors": atlas.neighbors.shape[1],
        "classes": atlas.classes,
        "layout": atlas.layout,
        "notes": atlas.notes,
        "skipped": atlas.skipped,
        "side": side,
        "sheets": len(sheets),
        "served": served,
        "key": hashlib.sha256("\0".join([atlas.title, *atlas.names]).encode(errors="replace")).hexdigest()[:16],
    }
    index_type = "<u2" if len(atlas) <= 2**16 else "<u4"
    blocks = [
        text_block("meta", meta),
        text_block("names", atlas.names),
        array_block("points", atlas.points, "<f4"),
        array_block("neighbors", atlas.neighbors, index_type),
        array_block("cosines", np.rint((np.clip(atlas.cosines, -1, 1) + 1) / 2 * 65535), "<u2"),
        array_block("labels", np.where(atlas.labels < 0, NO_LABEL, atlas.labels), "<u2"),
        array_block("clusters", atlas.clusters, "<u2"),
        array_block("slots", slots, "<u4"),
    ]
    pictures = [
        f'<script type="text/plain" id="sheet{i}" data-type="{kind}">{base64.b64encode(data).decode()}</script>'
        for i, (data, kind) in enumerate(sheets)
    ]
    template, style, *scripts = (
        webpage.read("mixnn.apps.explore", name) for name in ("page.html", "page.css", *SCRIPTS)
    )
    script = '"use strict";\n{\n' + "\n".join(scripts) + "\n}"
    return webpage.fill(
        template,
        head=webpage.head(atlas.title, style, script, served),
        script=script,
        data="\n".join(blocks),
        sheets="\n".join(pictures),
    ).encode(errors="backslashreplace")


def text_block(name: str, value: Any) -> str:
    return f'<script type="application/json" id="data-{name}">{webpage.as_json(value)}</script>'


def array_block(name: str, values: np.ndarray, kind: str) -> str:
    """Numbers as base64; `kind` is numpy's name of the type, which the page knows too."""
    text = base64.b64encode(np.ascontiguousarray(values).astype(kind).tobytes()).decode()
    return f'<script type="text/plain" id="data-{name}" data-type="{kind[1:]}">{text}</script>'
