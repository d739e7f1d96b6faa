"""The page on this machine only: 127.0.0.1, GET, and three kinds of address: /, /thumb/N and /image/N.

Images are asked for by their number, so no address can name a file. Another Host header than this server's own is
refused: a web site whose name was made to point here would send its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mixnn.apps.explore.pictures import SERVED, Pictures, cached
from mixnn.config import UserError, setting

HOST = "127.0.0.1"
ADDRESS = re.compile(r"/(thumb|image)/(0|[1-9][0-9]{0,8})", re.ASCII)
HEADERS = {
    "Cache-Control": "no-store",  # the next page on this port may hold other images
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
Found = tuple[bytes, str]  # contents and media type


class Server(ThreadingHTTPServer):
    """Serves a page and the pictures on it until it is stopped."""

    daemon_threads = True
    allow_reuse_address = False  # where it means that two may listen on one port

    def __init__(self, page: bytes, pictures: Pictures, port: int = 0, side: int = SERVED) -> None:
        self.page, self.count = page, len(pictures)
        self.makers: dict[str, Callable[[int], Found]] = {"thumb": cached(pictures, side), "image": pictures.full_size}
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise UserError(
                f"cannot listen on port {port}: {error.strerror}; without {setting('port')} a free one is taken"
            ) from None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def find(self, address: str) -> Found | None:
        """What lies at an address; None where nothing does."""
        if address == "/":
            return self.page, "text/html; charset=utf-8"
        match = ADDRESS.fullmatch(address)
        if not match or int(match[2]) >= self.count:
            return None
        try:
            return self.makers[match[1]](int(match[2]))
        except Exception:  # a file that is gone or damaged since it was embedded can raise nearly anything
            return None

    def handle_error(self, *_: object) -> None:
        """A browser that goes away in the middle of an answer is no news."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "mixnn", ""
    timeout = 30

    def parse_request(self) -> bool:
        """Refuses what is not a plain GET to this very host, whatever else it is."""
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
        """Requests are not worth a line each."""
