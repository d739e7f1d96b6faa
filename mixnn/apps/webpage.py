"""What the pages of report, search and explore share: each is one HTML file that asks the network for nothing.

A content security policy names the page's own style and script by their hashes and allows nothing else but embedded
images, so that no text of the data can become code.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any


def read(package: str, name: str) -> str:
    """A file that lies beside a package's modules."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{policy}}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{{title}}</title>
<style>{{style}}</style>
</head>"""


def head(title: str, style: str, script: str = "", served: bool = False) -> str:
    """Of a page with this style and script alone, up to its body. served: it may ask its own server for images."""
    return fill(HEAD, policy=policy(style, script, served), title=html.escape(title), style=style)


def policy(style: str, script: str = "", served: bool = False) -> str:
    """For a page with this style and script alone. served: it may ask its own server for images."""
    allowed = [f"script-src {digest(script)}"] if script else []
    allowed += [f"style-src {digest(style)}", "img-src data:" + " 'self'" * served]
    return "; ".join(["default-src 'none'", "base-uri 'none'", "form-action 'none'", *allowed])


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def fill(template: str, **values: str) -> str:
    """{{name}} -> its value, in one pass: what is put in is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], template)


def as_json(value: Any) -> str:
    """JSON that may stand inside a script element: no tag, comment or entity can begin in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
