"""Search results as text for a terminal, or as one HTML file.

In the text, names come last and uncut, whatever the width of the terminal. The page has its thumbnails inside, no
script, and asks the network for nothing; it adapts to dark mode and narrow screens.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from html import escape
from typing import Any

from mixnn.apps.thumbnails import Encoded, preview
from mixnn.apps.webpage import head
from mixnn.data.folder import printable
from mixnn.data.images import Images
from mixnn.progress import escape_controls, plural

SCALE = {  # by whether the vectors are centered
    True: "similarity 0: as unlike as two random images here, 1: the same",
    False: "similarity is the plain cosine, because the images are few or nearly all the same; 1: the same",
}
LARGE_GROUP = 5  # an image seldom has more copies than this
COPY = 0.9  # different photographs hardly ever have a higher similarity (notes/log.md)
LINKED = "Similarities are to the first image of a group; one below the threshold is close to another image of it"
SAME_PIXELS = "nearly the same pixels as the first"
MAX_TILES = 1000  # per page: at some 6 KB each it still opens quickly
MAX_IN_GROUP = 60
THUMBNAIL = 192  # longest side in pixels: twice the size at which the page shows it

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
.main .frame { outline: 3px solid var(--mark); }
.main b { color: var(--mark); }
figcaption { font-size: .8rem; margin-top: .3rem; }
figcaption b { font-size: .95rem; font-variant-numeric: tabular-nums; }
figcaption i { font-style: normal; color: var(--soft); margin-right: .4em; }
figcaption bdi, figcaption span { color: var(--soft); display: block; }
@media (max-width: 30rem) { .tiles { grid-template-columns: repeat(3, 1fr); gap: .8rem .5rem; } }
"""


def terminal(result: dict[str, Any]) -> str:
    lines = {"nearest": _nearest_lines, "duplicates": _duplicate_lines, "outliers": _outlier_lines}[result["kind"]]
    return "\n".join([*summary(result), *lines(result)])


def summary(result: dict[str, Any]) -> list[str]:
    """What was found and what the numbers mean, in a few sentences; on the terminal and on the page."""
    among, scale = f"among {plural(result['images'], 'image')}", SCALE[result["centered"]]
    if result["kind"] == "nearest":
        count = len(result["queries"])
        return [f"the {result['topk']} nearest {among}" + f", for {count:,} queries" * (count > 1), scale]
    if result["kind"] == "outliers":
        score = f"by mean cosine to their {result['neighbors']} nearest (the score)"
        return [f"the {len(result['outliers']):,} most unusual {among}, {score}"]
    groups, threshold = result["groups"], f"threshold: similarity {result['threshold']:g}, {result['threshold_is']}"
    if not groups:
        return [f"no near-duplicates {among}", threshold, scale]
    members = plural(sum(map(len, groups)), "image")
    linked = LINKED + ", or has nearly the same pixels" * any(
        image["same_pixels"] for group in groups for image in group
    )
    return [f"{plural(len(groups), 'group')} of near-duplicates, {members}, {among}", f"{threshold}. {linked}", scale]


def group_titles(result: dict[str, Any]) -> list[str]:
    """A heading for each group of near-duplicates; it says if the group holds similar images rather than copies."""
    titles = []
    for number, (group, lowest) in enumerate(zip(result["groups"], result["lowest"], strict=True), 1):
        varied = len(group) >= LARGE_GROUP and lowest < max(COPY, result["threshold"] - 1e-5)  # float32 rounding
        varied = varied and not all(image["same_pixels"] for image in group)
        copies = any(image["same_pixels"] or image["same_content_as"] for image in group[1:])
        what = "probably similar images" + (", besides the copies that are marked" if copies else ", not copies")
        note = f"; {what}: the lowest similarity of two is {lowest:.4f}" if varied else ""
        titles.append(f"group {number}, {len(group)} images{note}")
    return titles


def _nearest_lines(result: dict[str, Any]) -> list[str]:
    lines = []
    for row in result["queries"]:
        lines += ["", f"nearest to {escape_controls(row['query'])}", "rank  similarity  file"]
        lines += [
            f"{hit['rank']:4}  {hit['similarity']:10.4f}  {escape_controls(hit['file'])}" for hit in row["nearest"]
        ]
    return lines


def _outlier_lines(result: dict[str, Any]) -> list[str]:
    rows = [f"{row['rank']:4}  {row['score']:7.4f}  {escape_controls(row['file'])}" for row in result["outliers"]]
    return ["", "rank    score  file", *rows]


def _duplicate_lines(result: dict[str, Any]) -> list[str]:
    lines = []
    for title, group in zip(group_titles(result), result["groups"], strict=True):
        lines += ["", title, "similarity  file"]
        for i, image in enumerate(group):
            same, cos = image["same_content_as"], f"{image['similarity']:.4f}" if i else "first"
            note = f"identical to {same}" if same else SAME_PIXELS if i and image["same_pixels"] else ""
            lines.append(f"{cos:>10}  {escape_controls(image['file'])}" + f"  ({escape_controls(note)})" * bool(note))
    return lines


def page(result: dict[str, Any], images: Images, queries: list[Images | None]) -> str:
    """The HTML page. A query without a picture of its own is an image of the source."""
    title = {"nearest": "Nearest images", "duplicates": "Near-duplicates", "outliers": "Outliers"}[result["kind"]]
    where = f"Run {result['run']}, images of {printable(images.short_title)}."
    if result["skipped"]:
        where += f" {plural(len(result['skipped']), 'file')} could not be read."
    return "\n".join(
        [
            head(title, STYLE),
            f"<h1>{title}</h1>\n{_paragraphs([*summary(result), where])}",
            *_sections(result, images, queries),
            "</html>",
        ]
    )


def _sections(result: dict[str, Any], images: Images, queries: list[Images | None]) -> Iterable[str]:
    kind, left = result["kind"], MAX_TILES
    if kind == "outliers":
        rows = result["outliers"]
        yield _tiles(_image(row, "score", images) for row in rows[:left])
        yield _more(len(rows) - left, "images")
        return
    parts = result["queries" if kind == "nearest" else "groups"]
    titles = group_titles(result) if kind == "duplicates" else []
    for number, part in enumerate(parts):
        if left <= 0:
            yield _more(len(parts) - number, "queries" if kind == "nearest" else "groups")
            return
        if kind == "nearest":
            heading, tiles = f"Nearest to {_name(part['query'])}", _hits(part, queries[number], images, left)
        else:
            heading, tiles = titles[number].capitalize(), _copies(part[:MAX_IN_GROUP], images)
        left -= len(tiles)
        yield f"<h2>{heading}</h2>\n{_tiles(tiles)}"
        yield _more(len(part) - MAX_IN_GROUP, "images of this group") if kind == "duplicates" else ""


def _hits(row: dict[str, Any], picture: Images | None, images: Images, left: int) -> list[str]:
    query = thumbnail(images, row["query"]) if picture is None else thumbnail(picture, picture.names[0])
    return [
        _tile(query, "<b>query</b>", "main"),
        *(_image(hit, "similarity", images) for hit in row["nearest"][:left]),
    ]


def _copies(group: list[dict[str, Any]], images: Images) -> list[str]:
    first, *others = group
    tiles = [_tile(thumbnail(images, first["file"]), f"<b>first</b> {_name(first['file'])}", "main")]
    for image in others:
        same = image["same_content_as"]
        note = "identical to the first" if same == first["file"] else f"identical to {same}" if same else ""
        note = note or SAME_PIXELS * image["same_pixels"]
        tiles.append(_image(image, "similarity", images, note))
    return tiles


def _image(row: dict[str, Any], value: str, images: Images, note: str = "") -> str:
    """A tile with the image's rank if it has one, its value, a note and its name."""
    rank = f"<i>{row['rank']}</i>" if "rank" in row else ""
    note = f" <span>{_text(note)}</span>" if note else ""
    caption = f"{rank}<b>{row[value]:.4f}</b>{note} {_name(row['file'])}"
    return _tile(thumbnail(images, row["file"]), caption)


def thumbnail(images: Images, name: str) -> Encoded | None:
    """None if the image cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return preview(images, images.position[name], THUMBNAIL)
    except Exception:  # a decoder can raise nearly anything for a damaged file
        return None


def _tile(thumb: Encoded | None, caption: str, kind: str = "") -> str:
    # Small images are lossless, and shown with visible pixels.
    picture = (
        f'<img src="{thumb.data_uri}" alt=""{" class=tiny" * thumb.lossless}>' if thumb else "<i>cannot be read</i>"
    )
    return f'<figure class="{kind}"><div class="frame">{picture}</div><figcaption>{caption}</figcaption></figure>'


def _tiles(tiles: Iterable[str]) -> str:
    return '<div class="tiles">\n' + "\n".join(tiles) + "\n</div>"


def _more(count: int, what: str) -> str:
    return f"<p>{count:,} more {what} are not shown; use --format json to list all.</p>" if count > 0 else ""


def _text(text: str) -> str:
    return escape(escape_controls(text))


def _name(name: str) -> str:
    """In a bdi element, so that right-to-left characters in a name do not affect the text around it."""
    return f"<bdi>{_text(name)}</bdi>"


def _paragraphs(texts: list[str]) -> str:
    return "\n".join(f"<p>{_text(text[:1].upper() + text[1:].rstrip('.'))}.</p>" for text in texts)
