"""explore: the page's data without a browser, its server over loopback, and the page itself in a headless Chromium."""

from __future__ import annotations

import base64
import contextlib
import csv
import dataclasses
import http.client
import io
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits

import mixnn
from mixnn.apps import webpage
from mixnn.apps.classify import classify
from mixnn.apps.classify.features import RUN
from mixnn.apps.embeddings import Embeddings
from mixnn.apps.explore import layout, page
from mixnn.apps.explore.explore import build_map, explore, purity
from mixnn.apps.explore.page import MapData
from mixnn.apps.explore.server import Server
from mixnn.apps.projection import principal
from mixnn.apps.search import similarity
from mixnn.apps.thumbnails import Thumbnails
from mixnn.config import UserError
from mixnn.data import open_images
from mixnn.data.labels import from_csv
from mixnn.evaluation.neighbors import nearest
from mixnn.functional import unit
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.weights import STUDENT
from tests.apps.test_thumbnails import noise
from tests.browser import Browser, Page, find_browser

CPU = torch.device("cpu")
SCRIPT_NAME = "<img src=x onerror=alert(1)>.png"
TAG_NAME = "</script><script>alert(2)"  # a folder called < and one called script><script>alert(2)
QUOTED_NAME = 'a, "b".png'


class Quiet(Reporter):
    """Keeps all messages."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.messages: list[str] = []

    def info(self, text: str) -> None:
        self.messages.append(text)

    def warn(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 digits in class folders, three with names that no page should trust, and a file that is not an image."""
    root, digits = tmp_path_factory.mktemp("digits"), load_digits()
    for i in range(150):
        name = {0: SCRIPT_NAME, 1: QUOTED_NAME}.get(i, f"{i:03d}.png")
        path = root / ("<" if i == 2 else str(digits.target[i])) / ("script><script>alert(2)" if i == 2 else "") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.rint(digits.images[i] * 255 / 16).astype(np.uint8)).save(path)
    (root / "0" / "broken.png").write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return mixnn.pretrain(
        folder,
        out=tmp_path_factory.mktemp("runs") / "digits",
        backbone="resnet8",
        image_size=16,
        epochs=1,
        batch_size=32,
        bn_groups=1,
        labels="folders",
        knn_every=0,
        device="cpu",
        options={"support_size": 64, "hidden": 32},
        verbose=Reporter(quiet=True),
    )


@pytest.fixture(scope="module")
def made(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = explore(run, out=tmp_path_factory.mktemp("page") / "map.html", device="cpu", verbose=Quiet())
    assert path
    return path


# The page's data


class Blocks(HTMLParser):
    """The script elements of a page, by id, as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.tags: list[str] = []
        self.open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.open = dict(attrs).get("id") or "program"
            self.found[self.open] = ""

    def handle_endtag(self, tag: str) -> None:
        self.open = "" if tag == "script" else self.open

    def handle_data(self, data: str) -> None:
        if self.open:
            self.found[self.open] += data


def blocks(path: Path) -> dict[str, str]:
    return Blocks(path.read_text(encoding="utf-8")).found


def numbers(found: dict[str, str], name: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(found[f"data-{name}"]), kind)


def toy(count: int = 30, k: int = 4, **changes: Any) -> MapData:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(count, 6)).astype(np.float32)
    bank = unit(torch.from_numpy(vectors))
    cosine, index = (t.numpy() for t in nearest(bank, bank, k, torch.arange(count)))
    values: dict[str, Any] = {
        "names": [f"{i}.png" for i in range(count)],
        "points": layout.fit_to_frame(vectors[:, :2]),
        "neighbors": index,
        "cosines": cosine,
        "labels": np.arange(count) % 3 - 1,
        "classes": ["a", "b"],
        "clusters": np.arange(count) % 2,
    }
    return MapData(**values | changes)


def test_neighbors_and_similarities_are_those_of_search():
    """Vectors that have much in common, as those of photographs."""
    vectors = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32) + 3
    embedded = Embeddings([f"{i}.png" for i in range(40)], vectors)
    data = build_map(embedded, {}, layout="pca", neighbors=3)
    bank = embedded.unit()
    bank = similarity.center_rows(bank, similarity.bank_mean(bank))
    hits = similarity.nearest(bank, bank, 3, [[i] for i in range(40)])
    assert data.neighbors.tolist() == [[i for i, _ in row] for row in hits]
    np.testing.assert_allclose(data.cosines, [[cos for _, cos in row] for row in hits], atol=1e-6)


def test_what_is_put_into_the_page_comes_out_of_it(tmp_path: Path):
    data, path = toy(), tmp_path / "x.html"
    path.write_bytes(page.render(data))
    found = blocks(path)
    assert json.loads(found["data-names"]) == data.names
    np.testing.assert_array_equal(numbers(found, "points", "<f4").reshape(-1, 2), data.points)
    np.testing.assert_array_equal(numbers(found, "neighbors", "<u2").reshape(-1, 4), data.neighbors)
    cosines = numbers(found, "cosines", "<u2").reshape(-1, 4) / 65535 * 2 - 1
    np.testing.assert_allclose(cosines, data.cosines, atol=2e-5)
    labels = numbers(found, "labels", "<u2").astype(int)
    np.testing.assert_array_equal(np.where(labels == page.NO_LABEL, -1, labels), data.labels)
    np.testing.assert_array_equal(numbers(found, "clusters", "<u2"), data.clusters)


def test_a_page_of_many_images_numbers_them_with_four_bytes():
    count = 2**16 + 1
    data = toy(8, 2, names=[str(i) for i in range(count)])
    assert b'id="data-neighbors" data-type="u4"' in page.render(data)


@pytest.mark.parametrize(
    "name",
    ["</script><script>alert(1)</script>", "<!--<script>", "a&amp;b", "\u2028\u2029", "{{script}}", "\udc80", '"\\\n'],
)
def test_no_name_can_end_the_element_it_stands_in(name: str, tmp_path: Path):
    path = tmp_path / "x.html"
    data = toy(3, 1, names=[name, "b", "c"], classes=[name, "x"], title=name, notes=[name], skipped=[(name, name)])
    path.write_bytes(page.render(data))
    plain = Blocks(page.render(toy(3, 1)).decode())
    found = Blocks(path.read_text(encoding="utf-8"))
    assert json.loads(found.found["data-names"]) == [name, "b", "c"]
    assert json.loads(found.found["data-meta"])["classes"][0] == name
    assert found.tags == plain.tags, "a name must not make an element"
    assert found.found["program"] == plain.found["program"]


def test_the_policy_names_the_only_script_and_style_and_allows_no_connection():
    text = page.render(toy(3, 1)).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy
    assert policy[1].startswith("default-src 'none'; base-uri 'none'; form-action 'none'; script-src 'sha256-")
    assert policy[1].endswith("; img-src data:")
    assert "unsafe" not in policy[1]
    assert webpage.digest(Blocks(text).found["program"]) in policy[1]
    assert not re.search(r"https?://", text.replace("http://www.w3.org", ""))


# Neighbors, layout, clusters


def test_purity_leaves_out_pairs_with_an_unlabeled_image():
    index, labels = np.array([[1, 2], [0, 3], [3, 0], [0, 1]]), np.array([0, 0, 1, -1])
    assert purity(index, labels) == pytest.approx(100 * 2 / 4)  # 0-1, 0-2, 1-0, 2-0
    assert purity(index, np.full(4, -1)) == 0


def blobs(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three well separated classes of unit vectors."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    x = (np.eye(3, 12)[labels] * 5 + rng.normal(size=(count, 12))).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True), labels


@pytest.mark.parametrize("how", ["auto", "tsne", "pca"])
def test_a_layout_keeps_classes_apart_and_is_the_same_at_every_call(how: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout, "MAX_TSNE", 40)  # auto lays out 40, and places 50
    x, labels = blobs(90)
    points, name = layout.lay_out(x, how, 0, CPU)
    assert points.dtype == np.float32
    assert np.abs(points).max() == pytest.approx(1)
    near = np.argsort(np.square(points[:, None] - points[None]).sum(2), axis=1)[:, 1:6]
    assert (labels[near] == labels[:, None]).mean() > 0.9
    np.testing.assert_array_equal(points, layout.lay_out(x, how, 0, CPU).points)
    assert (
        name
        == {
            "auto": "t-SNE of 40 images, every other image next to its nearest neighbors among them",
            "tsne": "t-SNE",
            "pca": "the first two principal components",
        }[how]
    )
    assert len(np.unique(points, axis=0)) == 90, "two images at one point cannot both be clicked"


def test_an_image_is_placed_near_its_nearest_neighbors_and_on_no_other_point():
    x = np.eye(12, 14, dtype=np.float32)
    laid_out = np.stack([np.arange(12) % 4, np.arange(12) // 4], 1).astype(np.float32) * 10
    vectors = np.concatenate([x, x[[5, 5]] + 0.1 * x[[6, 6]] + 0.05 * x[[0, 0]]])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    points = layout.place_others(vectors, np.arange(12), laid_out, 0, CPU)
    np.testing.assert_array_equal(points[:12], laid_out)
    assert np.linalg.norm(points[12:] - laid_out[5], axis=1).max() < 10
    assert not np.array_equal(points[12], points[13])


def test_few_or_equal_vectors_have_a_layout_too():
    for count in (1, 2, 5):
        assert layout.lay_out(blobs(count)[0], "auto", 0, CPU).points.shape == (count, 2)
    same = np.ones((40, 4), np.float32) / 2
    assert np.isfinite(layout.lay_out(same, "auto", 0, CPU).points).all()
    assert layout.cluster(same, 5, 0).tolist() == [0] * 40


def test_principal_components_are_those_of_an_svd_with_fixed_signs():
    x = blobs(50)[0]
    centered = x - x.mean(0)
    axes = np.linalg.svd(centered, full_matrices=False)[2][:2].T
    axes *= np.sign(axes[np.abs(axes).argmax(0), [0, 1]])  # the largest coefficient of each axis is positive
    np.testing.assert_allclose(principal(x, 2), centered @ axes, atol=1e-5)


@pytest.mark.parametrize("signs", [(1, -1), (-1, 1), (-1, -1)])
def test_a_solver_that_turns_the_components_round_changes_no_sign(
    signs: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    x = blobs(50)[0]
    want, eigh = principal(x, 2), np.linalg.eigh

    def turned(square: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = eigh(square)
        return values, np.concatenate([vectors[:, :-2], vectors[:, -2:] * signs[::-1]], axis=1)

    monkeypatch.setattr(np.linalg, "eigh", turned)
    np.testing.assert_array_equal(principal(x, 2), want)


def test_clusters_are_the_separated_classes_largest_first():
    x, labels = blobs(90)
    keep = (labels != 2) | (np.arange(90) < 30)
    found = layout.cluster(x[keep], 3, 0)
    assert all(len(set(found[labels[keep] == c])) == 1 for c in range(3))
    assert np.bincount(found).tolist() == sorted(np.bincount(found), reverse=True)
    assert layout.num_clusters(1000, 0) == 7
    assert layout.num_clusters(10**6, 0) == layout.MAX_CLUSTERS
    assert layout.num_clusters(5, 12) == 5


# Thumbnails on the page


def test_the_page_says_when_thumbnails_are_shrunk_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    images = noise(1200, 32)
    vectors = blobs(1200)[0]
    data = toy(1200, names=images.images.names, points=vectors[:, :2])
    room = 1200 * images.bytes_per_image(16) * 4 / 3
    for share, note, side in (
        (1.1, "Thumbnails are 16 x 16 pixels", 16),
        (0.5, "There are no thumbnails", 0),
    ):
        monkeypatch.setattr(page, "MAX_BYTES", len(page.render(data)) + share * room)
        data.notes.clear()
        path = mixnn.apps.explore.explore._write(data, images, tmp_path / "x.html", 0, False, Quiet())
        meta = json.loads(blocks(path)["data-meta"])
        assert [words[: len(note)] for words in meta["notes"]] == [note]
        assert meta["side"] == side
        assert (meta["sheets"] > 0) == (side > 0)


def test_images_near_on_the_map_are_near_on_the_sheets():
    grid = np.stack(np.meshgrid(np.linspace(-1, 1, 32), np.linspace(-1, 1, 32)), -1).reshape(-1, 2)
    order = layout.morton_order(grid)
    assert sorted(order) == list(range(1024))
    steps = np.linalg.norm(np.diff(grid[order], axis=0), axis=1)
    assert np.median(steps) < 0.1
    assert np.ptp(grid[order[:64]], axis=0).max() < 0.5


# explore


def test_the_page_holds_every_image_that_can_be_read(made: Path, run: Run):
    found = blocks(made)
    meta, names = json.loads(found["data-meta"]), json.loads(found["data-names"])
    assert len(names) == meta["count"] == 150
    assert {f"0/{SCRIPT_NAME}", f"1/{QUOTED_NAME}"} <= set(names)
    assert meta["classes"] == [*"0123456789", "<"]
    assert [name for name, _ in meta["skipped"]] == ["0/broken.png"]
    assert meta["neighbors"] == 10
    assert meta["title"] == f"digits: {Path(run.config.data).name}"
    labels = [meta["classes"][label] for label in numbers(found, "labels", "<u2")]
    assert labels == [name.split("/")[0] for name in names]


def test_labels_come_from_a_csv_or_are_left_out(run: Run, tmp_path: Path):
    table = tmp_path / "labels.csv"
    table.write_text("file,label\n3/003.png,three\n4/004.png,four\n")
    for labels, expected in ((table, ["four", "three"]), ("none", [])):
        path = explore(run, out=tmp_path / f"{len(expected)}.html", labels=labels, layout="pca", verbose=Quiet())
        assert path
        assert json.loads(blocks(path)["data-meta"])["classes"] == expected


def test_labels_are_the_runs_own_however_its_folder_is_spelled(run: Run, tmp_path: Path, monkeypatch):
    place = Path(run.config.data)
    monkeypatch.chdir(place.parent)
    monkeypatch.setenv("HOME", str(place.parent))
    for i, source in enumerate((place.name, f"~/{place.name}", f"{place}/")):
        path = explore(run, source, out=tmp_path / f"{i}.html", layout="pca", verbose=Quiet())
        assert path
        assert json.loads(blocks(path)["data-meta"])["classes"] == [*"0123456789", "<"]


def test_a_data_set_has_its_own_labels_and_max_images_are_chosen_at_random(run: Run, tmp_path: Path):
    path = explore(
        run, "digits", out=tmp_path / "x.html", layout="pca", max_images=60, neighbors=3, device="cpu", verbose=Quiet()
    )
    assert path
    found = blocks(path)
    meta = json.loads(found["data-meta"])
    assert meta["classes"] == list("0123456789")
    assert "The map shows 60 of 1,297 images, chosen at random." in meta["notes"]
    truth = load_digits().target[np.random.RandomState(0).permutation(1797)[:1297]]
    for name, label in zip(json.loads(found["data-names"]), numbers(found, "labels", "<u2"), strict=True):
        assert truth[int(name.removeprefix("digits/train/"))] == label


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layout": "umap"}, "unknown layout 'umap'"),
        ({"out": "x.png"}, "ends in .html"),
        ({"out": "x.html", "serve": True}, "use only one of them"),
        ({"neighbors": 0}, "at least 1"),
        ({"max_images": 1}, "at least 2"),
        ({"thumb": 3}, "from 8 to 256"),
        ({"thumb": 1000}, "from 0 to 256"),
        ({"port": 70000, "serve": True}, "from 0 to 65535"),
        ({"source": "nowhere"}, "is not a folder"),
        ({"source": "digits", "labels": "folders"}, "its own labels"),
        ({"labels": "none.csv"}, "cannot read the labels"),
        ({"seed": 2**32}, "seed must be at most 4294967295"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_wrong_options_are_refused_with_what_to_do(options: dict[str, Any], message: str, run: Run):
    with pytest.raises(UserError, match=re.escape(message)):
        explore(run, verbose=Quiet(), **options)


# The server


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server(b"<title>map</title>", Thumbnails(open_images(folder)), side=32) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=300)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def test_the_server_gives_the_page_thumbnails_and_images_by_number(server: Server, folder: Path):
    status, body, headers = ask(server, "/")
    assert (status, body) == (200, b"<title>map</title>")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    names = open_images(folder).names
    number = names.index("3/003.png")
    status, body, headers = ask(server, f"/thumb/{number}")
    assert (status, headers["Content-Type"]) == (200, "image/png")
    assert Image.open(io.BytesIO(body)).size == (32, 32)
    status, body, headers = ask(server, f"/image/{number}")
    assert (status, headers["Content-Type"]) == (200, "image/png")
    original = np.asarray(Image.open(folder / "3/003.png").convert("RGB"))
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(body))), original)
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Python" not in headers["Server"]


@pytest.mark.parametrize(
    "path",
    [
        *("/thumb/151", "/thumb/-1", "/thumb/1e1", "/thumb/01", "/thumb/", "/thumb/0/", "/thumb/0?x", "/thumb/٣"),
        *("/image/999999999", "/image/9999999999999999999", "/image/../../etc/passwd", "/../../../etc/passwd"),
        *("/%2e%2e/%2e%2e/etc/passwd", "/etc/passwd", "//etc/passwd", "/image/0%00", "/index.html", "/3/003.png", "/x"),
    ],
)
def test_the_server_knows_no_other_address(server: Server, path: str):
    with contextlib.suppress(UnicodeEncodeError):
        assert ask(server, path)[:2] == (404, b"")


def test_a_file_that_is_not_an_image_is_not_found(server: Server, folder: Path):
    number = open_images(folder).names.index("0/broken.png")
    assert ask(server, f"/image/{number}")[0] == ask(server, f"/thumb/{number}")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT", "TRACE", "PATCH", "BREW"])
def test_the_server_takes_no_other_method(server: Server, method: str):
    status, body, headers = ask(server, "/", method)
    assert (status, body, headers["Allow"]) == (405, b"", "GET")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "0.0.0.0:{port}"]
)
def test_the_server_answers_only_to_its_own_name(server: Server, host: str):
    assert ask(server, "/", Host=host.format(port=server.server_port))[:2] == (403, b"")
    assert ask(server, "/thumb/0", Host=host.format(port=server.server_port))[0] == 403


def test_the_server_answers_to_localhost(server: Server):
    assert ask(server, "/", Host=f"localhost:{server.server_port}")[0] == 200


def test_the_server_listens_on_the_loopback_address_only(server: Server):
    assert server.server_address[0] == "127.0.0.1"
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_a_port_in_use_is_an_error(server: Server, folder: Path):
    with pytest.raises(UserError, match=f"cannot listen on port {server.server_port}"):
        Server(b"", Thumbnails(open_images(folder)), server.server_port)


def test_serving_ends_with_ctrl_c(run: Run, capsys: pytest.CaptureFixture[str]):
    class Stop(Quiet):
        """Requests the page as soon as its address is known, then presses Ctrl-C."""

        def info(self, text: str) -> None:
            super().info(text)
            if found := re.search(r"http://127.0.0.1:(\d+)/", text):
                self.port = int(found[1])
                threading.Thread(target=self.visit).start()

        def visit(self) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
            connection.request("GET", "/")
            self.page = connection.getresponse().read()
            connection.close()
            os.kill(os.getpid(), signal.SIGINT)

    reporter = Stop()
    assert explore(run, serve=True, layout="pca", device="cpu", verbose=reporter) is None
    assert b'"served":true' in reporter.page
    assert capsys.readouterr().out == f"http://127.0.0.1:{reporter.port}/\n"  # even when quiet
    assert reporter.messages[-1] == "stopped"
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection("127.0.0.1", reporter.port, timeout=300).request("GET", "/")


# The page in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not find_browser():
        pytest.skip("no Chromium or Chrome on the path, nor in $MIXNN_BROWSER: the page itself is not tested")
    with Browser() as found:
        yield found


@pytest.fixture
def tab(browser: Browser, made: Path) -> Iterator[Page]:
    """The page, fresh, on a desktop; it must end without errors, dialogs, or requests beyond itself."""
    found = browser.open()
    found.size(1280, 800)
    found.prefer(color_scheme="light", reduced_motion="reduce")
    found.goto(made.as_uri())
    found.run("localStorage.clear()")
    found.goto(made.as_uri())
    found.wait("window.explore")
    yield found
    assert found.problems == []
    assert set(found.requests) == {made.as_uri()}
    found.close()


def place(tab: Page, i: int) -> tuple[float, float]:
    """Where an image lies on the screen."""
    x, y = tab.run(
        f"(() => {{ const b = document.getElementById('overlay').getBoundingClientRect(), p = explore.where({i});"
        " return [p[0] + b.x, p[1] + b.y]; })()"
    )
    return x, y


def lonely(tab: Page) -> int:
    """Of the images far from any other on the map, the one nearest to its middle."""
    points = np.array(tab.run("explore.names.map((_, i) => explore.where(i))"))
    away = np.linalg.norm(points[:, None] - points[None], axis=2) + 1e9 * np.eye(len(points))
    middle = tab.run("[overlay.clientWidth / 2, overlay.clientHeight / 2]")
    apart = away.min(1) >= np.quantile(away.min(1), 0.9)
    return int(np.where(apart, np.linalg.norm(points - middle, axis=1), np.inf).argmin())


def text(tab: Page, selector: str) -> str:
    return tab.run(f"document.querySelector({json.dumps(selector)}).innerText")


def choose(tab: Page, field: str, value: str, event: str) -> None:
    target = f"document.getElementById({json.dumps(field)})"
    tab.run(f"{target}.value = {json.dumps(value)}; {target}.dispatchEvent(new Event('{event}'))")


def circle(x: float, y: float, radius: float) -> list[tuple[float, float]]:
    angles = np.linspace(0, 2 * np.pi, 12)
    return [(x + radius * float(np.cos(a)), y + radius * float(np.sin(a))) for a in angles]


def catch_export(tab: Page) -> str:
    """The text of the file that the export button offers."""
    tab.run(
        "window.caught = null; const make = URL.createObjectURL;"
        " URL.createObjectURL = (blob) => { window.caught = blob; return make(blob); };"
    )
    tab.click_on("#export")
    tab.wait("!!window.caught")
    return tab.run("window.caught.text()")


def test_the_page_and_the_command_report_the_same_purity(browser: Browser, made: Path, run: Run, tmp_path: Path):
    names, reporter = json.loads(blocks(made)["data-names"]), Quiet()
    rows = [f"{name},{name[0]}" for i, name in enumerate(names) if i % 3 and "," not in name and '"' not in name]
    (tmp_path / "some.csv").write_text("\n".join(["file,label", *rows]) + "\n")
    path = explore(run, out=tmp_path / "some.html", labels=tmp_path / "some.csv", layout="pca", verbose=reporter)
    assert path
    (told,) = (found[1] for line in reporter.messages if (found := re.match(r"([\d.]+)% of the 10 nearest", line)))
    tab = browser.open(path.as_uri())
    assert text(tab, "#summary").endswith(f"neighbor purity {told}% (10 nearest)")
    tab.close()


def test_hover_shows_the_image_and_its_name(tab: Page, folder: Path):
    i = lonely(tab)
    assert tab.run("document.getElementById('card').hidden")
    tab.mouse("mouseMoved", *place(tab, i))
    tab.wait("!document.getElementById('card').hidden")
    name = tab.run(f"explore.names[{i}]")
    assert text(tab, "#card b") == name.split("/")[1]
    assert f"label: {name.split('/')[0]}" in text(tab, "#card")
    squares_of_12 = (
        "(() => { const pen = new OffscreenCanvas(8, 8).getContext('2d', { willReadFrequently: true });"
        " pen.imageSmoothingEnabled = false; pen.drawImage(document.querySelector('#card canvas'), 0, 0, 8, 8);"
        " const { data } = pen.getImageData(0, 0, 8, 8); return data[3] && [...data].filter((_, p) => p % 4 === 0) })()"
    )
    assert tab.wait(squares_of_12) == np.asarray(Image.open(folder / name)).ravel().tolist()
    tab.mouse("mouseMoved", 5, 5)
    tab.wait("document.getElementById('card').hidden")


def test_a_click_shows_the_exact_neighbors_with_false_ones_marked_in_words(tab: Page, made: Path):
    i = lonely(tab)
    tab.click(*place(tab, i))
    found = blocks(made)
    index = numbers(found, "neighbors", "<u2").reshape(150, 10)[i]
    cosines = numbers(found, "cosines", "<u2").reshape(150, 10)[i] / 65535 * 2 - 1
    names = json.loads(found["data-names"])
    facts = "b => [b.title.split('\\n')[0], b.innerText, b.ariaLabel]"
    shown = tab.run(f"[...document.querySelectorAll('#neighbors button')].map({facts})")
    assert [title for title, _, _ in shown] == [names[j] for j in index]
    for k, (title, words, said) in enumerate(shown):
        false = title.split("/")[0] != names[i].split("/")[0]
        assert words.startswith(f"{k + 1}. {cosines[k]:.3f}")
        assert ("✗" in words) == ("false" in said) == false
    wrong = sum(names[j].split("/")[0] != names[i].split("/")[0] for j in index)
    expected = f"{wrong} of 10 neighbors" if wrong else "All labeled neighbors"
    assert text(tab, "#picked-summary").startswith(expected)
    tab.click_on("#neighbors li:nth-child(2) button")
    assert text(tab, "#picked-name") == names[index[1]]
    tab.click_on("#picked-back")
    assert text(tab, "#picked-name") == names[i]


def test_a_name_that_looks_like_html_stays_text(tab: Page):
    tab.click_on("#find")
    tab.type("onerror")
    tab.wait("document.querySelectorAll('#found-list button').length === 1")
    assert text(tab, "#found-list button") == f"0/{SCRIPT_NAME}"
    tab.key("Enter")
    assert text(tab, "#picked-name") == f"0/{SCRIPT_NAME}"
    i = tab.run(f"explore.names.indexOf({json.dumps('0/' + SCRIPT_NAME)})")
    tab.mouse("mouseMoved", *place(tab, i))
    choose(tab, "find", "script>", "input")
    assert TAG_NAME in text(tab, "#found-list")
    tab.click_on("#found-list button")
    assert "label: <" in text(tab, "#picked-facts")
    assert tab.run("document.images.length") == 0
    assert tab.run("document.querySelectorAll('#panel script').length") == 0


def test_finding_by_name_counts_lists_and_selects(tab: Page):
    tab.click_on("#find")
    tab.type("7/")
    tab.settle()
    expected = tab.run("explore.names.filter(n => n.includes('7/')).length")
    assert text(tab, "#found-count") == f"{expected} images"
    tab.click_on("#found-select")
    assert tab.run("explore.selection().every(i => explore.names[i].includes('7/'))")
    assert text(tab, "#selected") == f"{expected} images selected"
    choose(tab, "find", "zzz", "input")
    assert text(tab, "#found-count") == "0 images"


def test_lasso_name_undo_and_export_make_a_csv_that_labels_take(tab: Page, folder: Path, tmp_path: Path):
    i = lonely(tab)
    x, y = place(tab, i)
    tab.click_on("#lasso")
    tab.drag(circle(x, y, 9))
    tab.wait("explore.selection().length === 1")
    tab.type("first, really")
    tab.key("Enter")
    assert "first, really" in text(tab, "#group-list")
    assert tab.run("document.getElementById('color').value") == "group"
    tab.key("Escape")
    tab.drag(circle(x, y, 120), modifiers=8)  # Shift and drag, without the tool
    many = set(tab.wait("explore.selection().length > 1 && explore.selection()"))
    x, y = tab.run(f"explore.where({i})")
    away = [float(np.hypot(u - x, v - y)) for u, v in tab.run("explore.names.map((_, j) => explore.where(j))")]
    assert {j for j, far in enumerate(away) if far < 110} <= many <= {j for j, far in enumerate(away) if far < 121}
    tab.click_on("#name")
    tab.type('second "2"')
    tab.click_on("#name-form .primary")
    assert text(tab, "#group-list").split("\n")[0] == 'second "2"', "the first group lost its image and is gone"
    tab.click_on("#undo")
    assert "first, really" in text(tab, "#group-list")
    tab.click_on("#legend li:last-child button")  # in no group
    tab.click_on("#name")
    tab.type("rest")
    tab.key("Enter")
    table = tmp_path / "labels.csv"
    table.write_bytes(catch_export(tab).encode())
    names = open_images(folder).names
    labels = from_csv(table, names)
    chosen = tab.run(f"explore.names[{i}]")
    assert len(labels) == 150
    assert {name for name, label in labels.items() if label == "first, really"} == {chosen}
    assert {label for name, label in labels.items() if name != chosen} == {"rest"}
    assert f"0/{SCRIPT_NAME}" in labels
    assert f"1/{QUOTED_NAME}" in labels
    tab.click_on("#clear")
    assert text(tab, "#group-list") == ""
    assert tab.run("document.getElementById('export').disabled")
    tab.key("z", modifiers=2)
    assert "rest" in text(tab, "#group-list")


def test_the_facts_of_the_picked_image_follow_its_group(tab: Page):
    tab.click(*place(tab, lonely(tab)))
    before = text(tab, "#picked-facts")
    assert "group" not in before
    tab.click_on("#picked-select")
    tab.type("mine")
    tab.key("Enter")
    assert text(tab, "#picked-facts") == f"{before} · group: mine"
    tab.click_on("#undo")
    assert text(tab, "#picked-facts") == before


def test_groups_are_there_again_after_a_reload(tab: Page, made: Path):
    tab.click_on("#legend li:nth-child(3) button")
    tab.click_on("#name")
    tab.type("twos")
    tab.key("Enter")
    tab.wait("document.getElementById('group-list').textContent.startsWith('twos')")
    tab.goto(made.as_uri())
    tab.wait("window.explore")
    assert text(tab, "#group-list").startswith("twos")
    assert tab.run("explore.groups.members(0).every(i => explore.names[i].startsWith('2/'))")


def pixels(tab: Page) -> list[int]:
    """The painted points, as numbers that any change of color changes."""
    return tab.run(
        "(() => { const c = document.getElementById('points'), seen = {};"
        " const { data } = c.getContext('2d').getImageData(0, 0, c.width, c.height);"
        " for (const p of new Uint32Array(data.buffer)) seen[p] = (seen[p] || 0) + 1;"
        " return Object.entries(seen).sort((a, b) => b[1] - a[1]).slice(0, 12).map(([p]) => +p); })()"
    )


def test_colors_are_by_label_cluster_purity_or_group_in_light_and_dark(tab: Page):
    assert tab.run("[...document.getElementById('color').options].map(o => o.value)") == [
        *("label", "cluster", "purity", "group")
    ]
    seen = []
    for mode in ("label", "cluster", "purity", "group"):
        choose(tab, "color", mode, "change")
        tab.settle()
        seen.append(pixels(tab))
    assert len({tuple(colors) for colors in seen}) == 4
    assert "no groups" in text(tab, "#legend-help")
    assert {colors[0] for colors in seen} == {0xFFFFFFFF}
    tab.prefer(color_scheme="dark", reduced_motion="reduce")
    tab.settle()
    assert pixels(tab)[0] == 0xFF151413


@pytest.fixture(scope="module")
def classified(run: Run, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A copy of the run, without labels of its own, after `classify` with the labels of every third image."""
    place = tmp_path_factory.mktemp("classified") / "run"
    shutil.copytree(run.path, place)
    found = Run.open(place)
    config = dataclasses.replace(found.config, labels="")
    (place / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
    names = [name for name in open_images(folder).names if name[0].isdigit() and name.endswith(".png")]
    rows = [("file", "label"), *((name, f"class {name[0]}") for name in names[::3] if "broken" not in name)]
    with open(place.parent / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    found = Run.open(place)
    with pytest.MonkeyPatch.context() as patch:  # raw pixels may do better after one epoch
        patch.setattr(classify, "best_features", lambda _: RUN)
        mixnn.classify(found, place.parent / "labels.csv", device="cpu", model="knn", verbose=Reporter(quiet=True))
    return found


def written(run: Run) -> dict[str, dict[str, str]]:
    with open(run.path / "classifier" / "predictions.csv", newline="") as file:
        return {row["file"]: row for row in csv.DictReader(file)}


def test_predictions_of_classify_are_in_the_page(classified: Run, tmp_path: Path):
    path, rows = explore(classified, out=tmp_path / "map.html", layout="pca", verbose=Quiet()), written(classified)
    assert path
    found = blocks(path)
    names, meta = json.loads(found["data-names"]), json.loads(found["data-meta"])
    predicted, confidences = numbers(found, "predicted", "<u2"), numbers(found, "confidences", "<f4")
    labels = numbers(found, "labels", "<u2")
    assert [meta["classes"][i] for i in predicted] == [rows[name]["label"] for name in names]
    expected = [float(rows[name]["confidence"] or -1) for name in names]
    np.testing.assert_allclose(confidences, expected, atol=1e-6)
    assert [i != page.NO_LABEL for i in labels] == [rows[name]["labeled"] == "yes" for name in names]


def test_predictions_for_other_images_or_of_another_encoder_are_left_out(classified: Run, folder: Path, tmp_path: Path):
    def options(found: Run, **given: Any) -> tuple[bool, list[str]]:
        said = Quiet()
        path = explore(found, out=tmp_path / "map.html", layout="pca", overwrite=True, verbose=said, **given)
        assert path
        return json.loads(blocks(path)["data-meta"])["predicted"], said.messages

    assert options(classified)[0]
    other = shutil.copytree(folder, tmp_path / "other")
    assert not options(classified, source=other)[0], "images of the same names"
    copy = Run.open(shutil.copytree(classified.path, tmp_path / "copy"))
    moved = Run(copy.path, dataclasses.replace(copy.config, data=str(tmp_path / "gone")))
    assert options(moved, source=other)[0], "the same folder in another place"
    tensors, state = copy.load_checkpoint(pytest.fail)
    name = next(name for name in tensors if name.startswith(STUDENT) and name.endswith("bn1.bias"))
    copy.save_checkpoint(state["step"], tensors | {name: tensors[name] + 1}, state)
    shown, said = options(copy)
    assert not shown
    assert any("predictions.csv are not shown: the encoder has changed" in text for text in said)
    (copy.path / "classifier" / "classifier.npz").unlink()
    assert not options(copy)[0]


def test_the_map_is_colored_by_predicted_label_and_confidence(browser: Browser, classified: Run, tmp_path: Path):
    path = explore(classified, out=tmp_path / "map.html", layout="pca", verbose=Quiet())
    assert path
    tab, rows = browser.open(), written(classified)
    tab.size(1280, 800)
    tab.goto(path.as_uri())
    tab.wait("window.explore")
    assert tab.run("[...document.getElementById('color').options].map(o => o.value)") == [
        *("label", "predicted", "confidence", "cluster", "purity", "group")
    ]
    assert tab.run("document.getElementById('color').value") == "predicted", "most images have no label"
    seen = []
    for mode in ("predicted", "confidence", "label"):
        choose(tab, "color", mode, "change")
        tab.settle()
        seen.append(tuple(pixels(tab)))
        if mode == "confidence":
            assert "How sure the classifier is" in text(tab, "#legend-help")
    assert len(set(seen)) == 3
    names = tab.run("explore.names")
    i = next(i for i, name in enumerate(names) if not rows[name]["labeled"])
    tab.click_on("#find")
    tab.type(names[i])
    tab.key("Enter")
    told = re.search(r"predicted: (.+) \(confidence (.+)\)", text(tab, "#picked-facts"))
    assert told
    assert told[1] == rows[names[i]]["label"]
    assert float(told[2]) == pytest.approx(float(rows[names[i]]["confidence"]), abs=0.006)
    assert tab.problems == []
    tab.close()


def test_the_map_can_be_used_with_the_keyboard_alone(tab: Page):
    for _ in range(3):
        tab.key("Tab")
        if tab.run("document.activeElement.id") == "overlay":
            break
    assert tab.run("document.activeElement.id") == "overlay"
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid", "focus can be seen"
    first = tab.run("explore.marks.hovered")
    assert first >= 0, "the image in the middle is marked"
    before = tab.run(f"explore.where({first})")
    tab.key("ArrowRight")
    after = tab.run(f"explore.where({first})")
    assert (after[0] - before[0], after[1] - before[1]) == pytest.approx((-60, 0), abs=1e-6)
    tab.key("+")
    tab.key("ArrowDown", modifiers=8)
    marked = tab.run("explore.marks.hovered")
    assert tab.run("document.getElementById('announcement').textContent").startswith(
        tab.run(f"explore.names[{marked}]")
    )
    tab.key("s")
    assert tab.run("explore.selection()") == [marked]
    tab.key("Enter")
    assert tab.run("explore.marks.picked") == marked
    tab.key("Escape")
    assert tab.run("explore.selection()") == []
    tab.key("0")
    tab.settle()
    assert tab.run(f"explore.where({first})") == pytest.approx(before)
    tab.key("/")
    assert tab.run("document.activeElement.id") == "find"
    nameless = "e => !(e.labels?.length || e.textContent.trim() || e.ariaLabel)"
    assert tab.run(f"[...document.querySelectorAll('button, input, select')].filter({nameless}).map(e => e.id)") == []


def test_the_map_moves_and_zooms_with_the_mouse(tab: Page):
    i = lonely(tab)
    x, y = place(tab, i)
    tab.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=-200)
    tab.settle()
    assert place(tab, i) == pytest.approx((x, y), abs=0.5), "what is under the pointer stays there"
    other = (i + 1) % 150
    start = place(tab, other)
    tab.drag([(300, 600), (320, 610), (350, 630)])
    tab.settle()
    assert place(tab, other) == pytest.approx((start[0] + 50, start[1] + 30), abs=0.5)


def test_on_a_phone_all_is_within_reach_and_a_tap_picks(tab: Page, made: Path):
    tab.size(390, 844, 2, mobile=True)
    tab.goto(made.as_uri())
    assert tab.run("document.documentElement.scrollWidth") == 390
    small = (
        "[...document.querySelectorAll('button, input, select')].filter(e => e.offsetParent &&"
        " Math.min(e.offsetHeight, e.offsetWidth) < 40).map(e => e.id || e.className || e.textContent)"
    )
    assert tab.run(small) == []
    i = lonely(tab)
    x, y = place(tab, i)
    tab.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    tab.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    tab.wait(f"explore.marks.picked === {i}")
    a, b = tab.run("explore.where(0)"), tab.run("explore.where(149)")
    touches = [
        [{"x": 150, "y": 300, "id": 0}, {"x": 250, "y": 300, "id": 1}],
        [{"x": 100, "y": 300, "id": 0}, {"x": 300, "y": 300, "id": 1}],
    ]
    tab.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=touches[0])
    tab.call("Input.dispatchTouchEvent", type="touchMove", touchPoints=touches[1])
    tab.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    tab.settle()
    c, d = tab.run("explore.where(0)"), tab.run("explore.where(149)")
    grown = np.hypot(c[0] - d[0], c[1] - d[1]) / np.hypot(a[0] - b[0], a[1] - b[1])
    assert grown == pytest.approx(2, rel=0.05), "a pinch zooms by as much as the fingers part"


@pytest.mark.parametrize("count", [1, 2])
def test_a_map_of_one_or_two_images_works(browser: Browser, tmp_path: Path, count: int):
    path = tmp_path / "few.html"
    path.write_bytes(page.render(toy(count)))
    tab = browser.open(path.as_uri())
    tab.click(*place(tab, 0))
    assert text(tab, "#picked-name") == "0.png"
    assert text(tab, "#picked-summary").startswith(["There is no other image", "The 1 nearest image,"][count - 1])
    assert tab.problems == []
    tab.close()


def test_a_served_page_fetches_images_by_number_and_nothing_else(browser: Browser, folder: Path, run: Run):
    shown = mixnn.apps.embed.load_or_encode(run, folder, device="cpu", reporter=Reporter(quiet=True))
    data = mixnn.apps.explore.explore.build_map(shown, {}, layout="pca", device="cpu", reporter=Quiet())
    some = Thumbnails(open_images(folder).named(shown.names))
    with Server(page.render(data, 32, served=True), some, side=32) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            tab = browser.open()
            tab.size(1280, 800)
            tab.goto(server.url)
            tab.wait("window.explore")
            tab.click(*place(tab, lonely(tab)))
            picked = tab.run("explore.marks.picked")
            tab.wait("performance.getEntriesByType('resource').length > 10")
            assert tab.run("document.getElementById('picked-open').getAttribute('href')") == f"/image/{picked}"
            assert tab.run("[...document.getElementById('color').options].map(o => o.value)") == ["cluster", "group"]
            tab.settle()
            assert [url for url in tab.requests if not re.fullmatch(re.escape(server.url) + r"(thumb/\d+)?", url)] == []
            assert tab.problems == []
            tab.close()
        finally:
            server.shutdown()
            thread.join()
