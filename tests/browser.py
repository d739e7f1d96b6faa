"""A headless Chromium, driven through its DevTools protocol over loopback with a small websocket client.

with Browser() as browser:
    page = browser.open(path.as_uri())
    page.click(10, 20)
    assert page.run("document.title") == "x"
    assert page.problems == [] and page.requests == [path.as_uri()]
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WAIT = 300.0  # seconds; enough for anything on a busy machine


def find_browser() -> str | None:
    """$MIXNN_BROWSER, or the first of the usual names on the path."""
    return os.environ.get("MIXNN_BROWSER") or next((found for name in NAMES if (found := shutil.which(name))), None)


class WebSocket:
    """Text messages over one connection (RFC 6455, no extensions)."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=WAIT)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET {parts.path} HTTP/1.1", f"Host: {parts.netloc}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
        self.socket.sendall("\r\n".join(lines).encode())
        self.file = self.socket.makefile("rb")
        assert b" 101 " in self.file.readline()
        while self.file.readline().strip():
            pass

    def send(self, text: str) -> None:
        self._send(0x1, text.encode())

    def _send(self, opcode: int, data: bytes) -> None:
        size = len(data)
        short = size if size < 126 else 126 if size < 2**16 else 127
        length = b"" if short < 126 else struct.pack(">H" if short == 126 else ">Q", size)
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self.socket.sendall(bytes([0x80 | opcode, 0x80 | short]) + length + mask + masked)

    def receive(self, timeout: float) -> str:
        """The next message; TimeoutError if none comes in time."""
        message = b""
        while True:
            self.socket.settimeout(timeout if not message else WAIT)
            head = self._read(2)
            self.socket.settimeout(WAIT)
            opcode, size = head[0] & 0x0F, head[1] & 0x7F
            if size > 125:
                size = struct.unpack(">H" if size == 126 else ">Q", self._read(2 if size == 126 else 8))[0]
            data = self._read(size)
            if opcode == 0x8:
                raise ConnectionError("the browser closed the connection")
            if opcode == 0x9:
                self._send(0xA, data)
            elif opcode in (0x0, 0x1):
                message += data
                if head[0] & 0x80:
                    return message.decode()

    def _read(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) < count:
            raise ConnectionError("the browser is gone")
        return data

    def close(self) -> None:
        self.file.close()
        self.socket.close()


class Page:
    """One tab. `problems` collects console errors and exceptions, `requests` every URL that was requested."""

    def __init__(self, url: str) -> None:
        self.socket, self.number = WebSocket(url), 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.events: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.receive(WAIT))
            if message.get("id") == self.number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        self.events.append(method)
        if method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            self.requests += [] if url.startswith(("data:", "blob:")) else [url]
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str([argument.get("value") for argument in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["text"].startswith("Canvas2D: Multiple readback"):
            pass  # advice caused by the tests, which read pixels
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"a dialog: {params['message']}")
            self.number += 1
            self.socket.send(
                json.dumps({"id": self.number, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}})
            )

    def goto(self, url: str) -> None:
        """Opens a URL and waits until the page is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        end = time.monotonic() + WAIT
        while "Page.loadEventFired" not in self.events:
            self._note(json.loads(self.socket.receive(max(0.1, end - time.monotonic()))))

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Runs an expression until its value is true."""
        end = time.monotonic() + WAIT
        while not (value := self.run(expression)):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)
        return value

    def settle(self) -> None:
        """Waits until two more frames are drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def mouse(self, kind: str, x: float, y: float, held: bool = False, modifiers: int = 0) -> None:
        down = {"button": "left", "buttons": 1, "clickCount": 1} if held or kind != "mouseMoved" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, modifiers=modifiers, **down)

    def click(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def click_on(self, selector: str) -> None:
        """Clicks the middle of an element, scrolled into view, as a person would."""
        target = json.dumps(selector)
        box = self.run(
            f"(() => {{ const e = document.querySelector({target}); e.scrollIntoView({{block: 'nearest'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.click(*box)

    def drag(self, path: list[tuple[float, float]], modifiers: int = 0) -> None:
        self.mouse("mouseMoved", *path[0], modifiers=modifiers)
        self.mouse("mousePressed", *path[0], modifiers=modifiers)
        for place in path[1:]:
            self.mouse("mouseMoved", *place, held=True, modifiers=modifiers)
        self.mouse("mouseReleased", *path[-1], modifiers=modifiers)

    def key(self, key: str, modifiers: int = 0) -> None:
        """One key, by its name in KeyboardEvent.key. Modifiers: 1 Alt, 2 Ctrl, 4 Meta, 8 Shift."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 and not modifiers & 7 else {}
        code = codes.get(key, ord(key.upper()) if len(key) == 1 else 0)
        for kind in ("keyDown", "keyUp"):
            extra = text if kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, modifiers=modifiers, **extra
            )

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def size(self, width: int, height: int, scale: float = 1, mobile: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)

    def prefer(self, **features: str) -> None:
        """Media features, such as prefer(color_scheme="dark", reduced_motion="reduce")."""
        named = [{"name": "prefers-" + name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)

    def screenshot(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path

    def close(self) -> None:
        self.socket.close()


class Browser:
    """A browser with a fresh profile in a temporary folder, removed at the end."""

    def __init__(self, width: int = 1280, height: int = 800) -> None:
        program = find_browser()
        assert program, "no browser: check find_browser first"
        self.folder = tempfile.TemporaryDirectory(prefix="mixnn-browser-", ignore_cleanup_errors=True)
        words = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={self.folder.name}", "--no-first-run"]
        words += ["--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--mute-audio"]
        words += ["--disable-extensions", "--no-default-browser-check", f"--window-size={width},{height}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            words.append("--no-sandbox")  # Chromium refuses to run as root with it
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            [program, *words, "about:blank"], stdout=quiet, stderr=quiet, start_new_session=True
        )
        self.pages: list[Page] = []
        try:
            self.address = self._address()
        except BaseException:
            self.close()
            raise

    def _address(self) -> str:
        """The address of DevTools, from the file in the profile into which Chromium writes its port."""
        port_file, end = Path(self.folder.name, "DevToolsActivePort"), time.monotonic() + WAIT
        while time.monotonic() < end:
            assert self.process.poll() is None, f"the browser ended with {self.process.returncode}"
            port, line_ended, _ = (port_file.read_text() if port_file.exists() else "").partition("\n")
            if line_ended:
                return f"http://127.0.0.1:{port}"
            time.sleep(0.05)
        raise TimeoutError("the browser does not start")

    def open(self, url: str = "about:blank") -> Page:
        """A new tab with this URL, loaded."""
        request = urllib.request.Request(f"{self.address}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request, timeout=WAIT) as answer:
            page = Page(json.load(answer)["webSocketDebuggerUrl"])
        self.pages.append(page)
        if url != "about:blank":
            page.goto(url)
        return page

    def close(self) -> None:
        for page in self.pages:
            page.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
