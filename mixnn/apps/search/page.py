"""Results as one HTML file: thumbnails inside, no script, no request; light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from mixnn.apps.search.originals import Originals, small_file
from mixnn.apps.search.queries import Asked
from mixnn.apps.search.text import summary, titles
from mixnn.apps.webpage import head
from mixnn.data.folder import printable
from mixnn.data.images import Images
from mixnn.progress import plural, shown

MAX_TILES = 1000  # on a page; at some 6 KB each it stays a page that opens
MAX_IN_GROUP = 60

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1d21; --soft: #5f6670; --line: #dcdfe4; --mark: #1d63d8;
  --frame: #f1f3f5; }
@media (prefers-color-scheme: dark) {
  :root { --back: #15171b; --text: #e7e9ec; --soft: #9aa1ab; --line: #343941; --mark: #7fb0ff; --frame: #22262c; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 80rem; background: var(--back); color: var(--text);
  font: 16px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; }
h2 { font-size: 1rem; margin: 2rem 0 .7rem; padding-top: .9rem; border-top: 1px solid var(--line); }
p { margin: .3rem 0; color: var(--soft); max-width: 45rem; }
h1, h2, p, figcaption { overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); gap: 1rem .8rem;
  margin-top: 1rem; }
figure { margin: 0; }
.frame { display: flex; aspect-ratio: 1; background: var(--frame); border-radius: 6px; overflow: hidden; }
.frame img { width: 100%; height: 100%; object-fit: contain; }
.frame img.tiny { image-rendering: pixelated; }
.frame i { margin: auto; color: var(--soft); font-size: .8rem; }
.asked .frame { outline: 3px solid var(--mark); }
.asked b { color: var(--mark); }
figcaption { font-size: .8rem; margin-top: .3rem; }
figcaption b { font-size: .95rem; font-variant-numeric: tabular-nums; }
figcaption i { font-style: normal; color: var(--soft); margin-right: .4em; }
figcaption bdi, figcaption span { color: var(--soft); display: block; }
@media (max-width: 30rem) { .tiles { grid-template-columns: repeat(3, 1fr); gap: .8rem .5rem; } }
"""


def render(result: dict[str, Any], images: Images, asked: list[Asked]) -> str:
    title = {"nearest": "Nearest images", "duplicates": "Near-duplicates", "outliers": "Outliers"}[result["kind"]]
    where = f"Run {result['run']}, images of {printable(images.short_title)}."
    if result["skipped"]:
        where += f" {plural(len(result['skipped']), 'file')} could not be read."
    return "\n".join(
        [
            head(title, STYLE),
            f"<h1>{title}</h1>\n{_paragraphs([*summary(result), where])}",
            *_sections(result, Originals(images), asked),
            "</html>",
        ]
    )


def _sections(result: dict[str, Any], originals: Originals, asked: list[Asked]) -> Iterable[str]:
    kind, left = result["kind"], MAX_TILES
    if kind == "outliers":
        rows = result["outliers"]
        yield _tiles(_image(row, "score", originals) for row in rows[:left])
        yield _more(len(rows) - left, "images")
        return
    parts = result["queries" if kind == "nearest" else "groups"]
    for number, part in enumerate(parts):
        if left <= 0:
            yield _more(len(parts) - number, "queries" if kind == "nearest" else "groups")
            return
        if kind == "nearest":
            heading, tiles = f"Nearest to {_name(part['query'])}", _answers(part, asked[number], originals, left)
        else:
            heading, tiles = titles(result)[number].capitalize(), _copies(part[:MAX_IN_GROUP], originals)
        left -= len(tiles)
        yield f"<h2>{heading}</h2>\n{_tiles(tiles)}"
        yield _more(len(part) - MAX_IN_GROUP, "images of this group") if kind == "duplicates" else ""


def _answers(row: dict[str, Any], asked: Asked, originals: Originals, left: int) -> list[str]:
    own = originals.thumbnail(row["query"]) if asked.path is None else small_file(asked.path)
    return [
        _tile(own, "<b>query</b>", "asked"),
        *(_image(hit, "similarity", originals) for hit in row["nearest"][:left]),
    ]


def _copies(group: list[dict[str, Any]], originals: Originals) -> list[str]:
    first, *others = group
    tiles = [_tile(originals.thumbnail(first["name"]), f"<b>first</b> {_name(first['name'])}", "asked")]
    for image in others:
        same = image["same_content_as"]
        note = "identical to the first" if same == first["name"] else f"identical to {same}" if same else ""
        tiles.append(_image(image, "similarity", originals, note))
    return tiles


def _image(row: dict[str, Any], value: str, originals: Originals, note: str = "") -> str:
    """A tile with rank, if there is one, value, note and name."""
    rank = f"<i>{row['rank']}</i>" if "rank" in row else ""
    note = f" <span>{_text(note)}</span>" if note else ""
    caption = f"{rank}<b>{row[value]:.4f}</b>{note} {_name(row['name'])}"
    return _tile(originals.thumbnail(row["name"]), caption)


def _tile(thumbnail: tuple[str, bool], caption: str, kind: str = "") -> str:
    uri, tiny = thumbnail
    picture = f'<img src="{uri}" alt=""{" class=tiny" * tiny}>' if uri else "<i>cannot be read</i>"
    return f'<figure class="{kind}"><div class="frame">{picture}</div><figcaption>{caption}</figcaption></figure>'


def _tiles(tiles: Iterable[str]) -> str:
    return '<div class="tiles">\n' + "\n".join(tiles) + "\n</div>"


def _more(count: int, what: str) -> str:
    return f"<p>{count:,} more {what} are not shown; the JSON form lists them.</p>" if count > 0 else ""


def _text(text: str) -> str:
    return escape(shown(text))


def _name(name: str) -> str:
    """bdi: a name with right-to-left characters must not turn its surroundings."""
    return f"<bdi>{_text(name)}</bdi>"


def _paragraphs(texts: list[str]) -> str:
    return "\n".join(f"<p>{_text(text[:1].upper() + text[1:].rstrip('.'))}.</p>" for text in texts)
