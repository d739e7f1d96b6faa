"""Serve the page on this machine only: 127.0.0.1, GET, and three kinds of path: /, /thumb/N and /image/N.

Images are requested by number, so no path can name a file. Requests whose Host header is not this server's are refused:
a web site whose name resolves to 127.0.0.1 (DNS rebinding) would send its own name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mixnn.apps.thumbnails import Thumbnails, preview
from mixnn.config import UserError, setting

SERVED_SIDE = 128  # default side of the thumbnails
LONGEST = 1600  # longest side of /image/N in pixels
HOST = "127.0.0.1"
PATH = re.compile(r"/(thumb|image)/(0|[1-9][0-9]{0,8})", re.ASCII)
HEADERS = {
    "Cache-Control": "no-store",  # the next page on this port may hold other images
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
Content = tuple[bytes, str]  # bytes and media type


class Server(ThreadingHTTPServer):
    """Server of a page and its images, until it is stopped."""

    daemon_threads = True
    allow_reuse_address = False  # on some systems it would let two servers listen on one port

    def __init__(self, page: bytes, thumbnails: Thumbnails, port: int = 0, side: int = SERVED_SIDE) -> None:
        def thumb(i: int) -> Content:
            return thumbnails.square(i, side)

        def image(i: int) -> Content:
            return preview(thumbnails.images, i, LONGEST, lossless_up_to=SERVED_SIDE)

        self.page, self.count = page, len(thumbnails)
        self.makers: dict[str, Callable[[int], Content]] = {"thumb": lru_cache(maxsize=4096)(thumb), "image": image}
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise UserError(
                f"cannot listen on port {port}: {error.strerror}; without {setting('port')} a free one is chosen"
            ) from None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def find(self, path: str) -> Content | None:
        """The content at a path; None if there is none."""
        if path == "/":
            return self.page, "text/html; charset=utf-8"
        match = PATH.fullmatch(path)
        if not match or int(match[2]) >= self.count:
            return None
        try:
            return self.makers[match[1]](int(match[2]))
        except Exception:  # a file removed or damaged after embedding can raise nearly anything
            return None

    def handle_error(self, *_: object) -> None:
        """Print nothing: a browser may close its connection in the middle of a response."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "mixnn", ""
    timeout = 30

    def parse_request(self) -> bool:
        """Refuse everything but a GET request for this host."""
        if not super().parse_request():
            return False
        port = self.server.server_port
        if self.headers.get_all("Host") not in ([f"{HOST}:{port}"], [f"localhost:{port}"]):
            return self.refuse(403)
        if self.command != "GET":
            return self.refuse(405)
        return True

    def do_GET(self) -> None:
        found = self.server.find(self.path)
        if found is None:
            self.refuse(404)
            return
        self.answer(200, *found)

    def refuse(self, code: int) -> bool:
        self.close_connection = True
        self.answer(code, b"", "text/plain")
        return False

    def answer(self, code: int, data: bytes, kind: str) -> None:
        self.send_response(code)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if code == 405:
            self.send_header("Allow", "GET")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print no line per request."""
