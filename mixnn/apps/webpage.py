"""Shared by the pages of report, search and explore: each is one HTML file that needs nothing from the network.

A content security policy allows the page's own style and script, by hash, and embedded images; nothing else. So no text
in the data can become code.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

from mixnn.files import PAGE_START


def read(package: str, name: str) -> str:
    """Text of a file in a package, such as its HTML template."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


HEAD = (
    PAGE_START
    + """{{policy}}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{{title}}</title>
<style>{{style}}</style>
</head>"""
)


def head(title: str, style: str, script: str = "", served: bool = False) -> str:
    """HTML up to the body of a page with this style and script. served: it may load images from its own server."""
    return fill(HEAD, policy=policy(style, script, served), title=html.escape(title), style=style)


def policy(style: str, script: str = "", served: bool = False) -> str:
    """Content security policy that allows only this style and script, and images (see `head` for `served`)."""
    allowed = [f"script-src {digest(script)}"] if script else []
    allowed += [f"style-src {digest(style)}", "img-src data:" + " 'self'" * served]
    return "; ".join(["default-src 'none'", "base-uri 'none'", "form-action 'none'", *allowed])


def digest(text: str) -> str:
    """Hash of a script or style, as a policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def fill(template: str, **values: str) -> str:
    """Replace each {{name}} by its value in one pass, so that no {{name}} inside a value is replaced."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], template)


def as_json(value: Any) -> str:
    """JSON that is safe inside a script element: no tag, comment or entity can start in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
