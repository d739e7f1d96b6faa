"""A local web server that can misbehave on request."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer


@dataclass
class Site:
    """The files that are served, and how; `ranges` records the Range header of every request."""

    files: dict[str, bytes] = field(default_factory=dict)
    url: str = ""
    cuts: list[int] = field(default_factory=list)  # the next requests are cut after this many bytes
    errors: list[int] = field(default_factory=list)  # the next requests are answered with these codes
    ignore_range: bool = False
    shift_range: int = 0  # answers with a range that starts this many bytes later
    send_total: bool = True  # whether a 416 response states the file's size
    ranges: list[str | None] = field(default_factory=list)


def handler(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            site.ranges.append(asked)
            data = site.files.get(self.path.lstrip("/"))
            if site.errors or data is None:
                self.send_error(site.errors.pop(0) if site.errors else 404)
                return
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and not site.ignore_range else None
            if start is not None and start >= len(data):
                self.send_response(416)
                if site.send_total:
                    self.send_header("Content-Range", f"bytes */{len(data)}")
                self.end_headers()
                return
            self.send_body(data, start)

        def send_body(self, data: bytes, start: int | None) -> None:
            first = (start or 0) + (site.shift_range if start else 0)
            self.send_response(200 if start is None else 206)
            if start is not None:
                self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - first))
            self.end_headers()
            cut = site.cuts.pop(0) if site.cuts else len(data)
            self.wfile.write(data[first : first + cut])

    return Handler


@contextlib.contextmanager
def serve(**files: bytes) -> Iterator[Site]:
    """Serve files by name; a double underscore in a name stands for a dot."""
    site = Site({name.replace("__", "."): data for name, data in files.items()})
    with HTTPServer(("127.0.0.1", 0), handler(site)) as server:
        site.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()
