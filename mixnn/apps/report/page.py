"""The report as one HTML file from plain values: they go in as JSON, and the page's own script draws them."""

from __future__ import annotations

from typing import Any

from mixnn.apps import webpage

SCRIPTS = ("dom.js", "curves.js", "map.js", "neighbors.js", "page.js")


def render(values: dict[str, Any]) -> bytes:
    """The whole page."""
    template, style, *scripts = (
        webpage.read("mixnn.apps.report", name) for name in ("page.html", "page.css", *SCRIPTS)
    )
    script = '"use strict";\n' + "\n".join(scripts)
    head, data = webpage.head("mixnn report", style, script), webpage.as_json(values)
    return webpage.fill(template, head=head, script=script, data=data).encode()
