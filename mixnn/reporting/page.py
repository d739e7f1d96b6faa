"""One HTML file from plain values: they go in as JSON, and the page's own script draws them.

A content security policy names the page's style and script by their hashes and allows nothing else but embedded
images: no request leaves the page, and no text of the data can become code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPTS = ("dom.js", "curves.js", "map.js", "neighbors.js", "page.js")


def fill(values: dict[str, Any]) -> bytes:
    """The whole page."""
    style = _read("page.css")
    script = '"use strict";\n' + "\n".join(_read(name) for name in SCRIPTS)
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    parts = {"policy": f"{policy}; form-action 'none'", "style": style, "script": script, "data": as_json(values)}
    # In one pass, so that nothing in the values is taken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("page.html")).encode()


def as_json(values: Any) -> str:
    """JSON that can stand in a script element: no character of it can end the element or begin a comment."""
    text = json.dumps(values, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
