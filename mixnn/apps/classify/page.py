"""The page of `--suggest`: the suggested images with a field for each label, and a button that saves them as a CSV."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from html import escape

from mixnn.apps import webpage
from mixnn.apps.search.render import MAX_TILES, thumbnail
from mixnn.data import Images
from mixnn.progress import escape_controls, plural

PACKAGE = "mixnn.apps.classify"


def render(images: Images, suggested: Sequence[str], labels: Mapping[str, str], file: str, command: str) -> bytes:
    """The page as HTML. It saves the labels typed, and those given before, under the name `file`.

    `command`: how to use the saved file. The page asks the network for nothing.
    """
    template, style, script = (webpage.read(PACKAGE, f"page.{kind}") for kind in ("html", "css", "js"))
    title = f"Label {plural(len(suggested), 'image')}"
    data = {
        "names": list(suggested),
        "labels": list(labels.items()),
        "file": file,
        "key": hashlib.sha256(str(images.title).encode(errors="replace")).hexdigest()[:16],
    }
    left = len(suggested) - MAX_TILES
    note = f"<p>{plural(left, 'more image')} can only be labeled in the CSV file itself.</p>" if left > 0 else ""
    return webpage.fill(
        template,
        head=webpage.head(title, style, script),
        title=escape(title),
        file=escape(file),
        also=f", which also holds the {plural(len(labels), 'label')} that you gave" if labels else "",
        command=escape(escape_controls(command)),
        note=note,
        tiles="\n".join(_tile(images, name) for name in suggested[:MAX_TILES]),
        data=webpage.as_json(data),
        script=script,
    ).encode(errors="backslashreplace")


def _tile(images: Images, name: str) -> str:
    thumb = thumbnail(images, name)
    picture = (
        f'<img src="{thumb.data_uri}" alt=""{" class=tiny" * thumb.lossless}>' if thumb else "<i>cannot be read</i>"
    )
    text = escape(escape_controls(name))
    return (
        f'<div class="tile"><div class="frame">{picture}</div><bdi>{text}</bdi>'
        f'<input type="text" list="known" autocomplete="off" maxlength="100" placeholder="label" '
        f'aria-label="Label of {text}"></div>'
    )
