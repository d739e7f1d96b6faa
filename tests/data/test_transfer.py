import errno
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from mixnn.data import transfer
from mixnn.data.download import silent
from mixnn.data.transfer import Unreachable, download
from tests.data.server import Site, serve

DATA = random.Random(0).randbytes(300_000)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transfer, "PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture
def site() -> Iterator[Site]:
    with serve(x__bin=DATA) as site:
        yield site


def fetch(site: Site, folder: Path, progress=silent) -> bytes:
    download(f"{site.url}/x.bin", folder / "x.bin", progress)
    assert not (folder / "x.bin.part").exists()
    return (folder / "x.bin").read_bytes()


def test_a_file_arrives_whole_and_progress_ends_at_its_size(site: Site, tmp_path: Path):
    seen: list[tuple[int, int]] = []
    assert fetch(site, tmp_path, lambda done, total: seen.append((done, total))) == DATA
    assert seen[-1] == (len(DATA), len(DATA))
    assert seen == sorted(seen)


def test_a_cut_connection_is_resumed_from_the_byte_it_broke_at(site: Site, tmp_path: Path):
    site.cuts = [100_000, 50_000]
    assert fetch(site, tmp_path) == DATA
    assert site.ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_tries_that_bring_bytes_are_not_counted(site: Site, tmp_path: Path):
    site.cuts = [10_000] * 10
    assert fetch(site, tmp_path) == DATA
    assert len(site.ranges) == 11


def test_a_later_call_goes_on_where_an_earlier_one_ended(site: Site, tmp_path: Path):
    (tmp_path / "x.bin.part").write_bytes(DATA[:123_456])
    seen: list[int] = []
    assert fetch(site, tmp_path, lambda done, _: seen.append(done)) == DATA
    assert site.ranges == ["bytes=123456-"]
    assert seen[0] > 123_456


def test_a_server_that_ignores_ranges_is_read_from_the_start(site: Site, tmp_path: Path):
    site.ignore_range = True
    site.cuts = [100_000]
    assert fetch(site, tmp_path) == DATA


def test_a_server_that_answers_with_another_range_is_read_from_the_start(site: Site, tmp_path: Path):
    site.shift_range = 7
    site.cuts = [100_000]
    assert fetch(site, tmp_path) == DATA
    assert site.ranges[-1] is None


def test_a_part_that_is_already_whole_is_taken(site: Site, tmp_path: Path):
    (tmp_path / "x.bin.part").write_bytes(DATA)
    assert fetch(site, tmp_path) == DATA
    assert site.ranges == [f"bytes={len(DATA)}-"]


@pytest.mark.parametrize("say_total", [True, False])
def test_a_part_longer_than_the_file_is_dropped(site: Site, tmp_path: Path, say_total: bool):
    site.say_total = say_total
    (tmp_path / "x.bin.part").write_bytes(DATA + b"more")
    assert fetch(site, tmp_path) == DATA


def test_errors_of_the_server_are_tried_again(site: Site, tmp_path: Path):
    site.errors = [503, 500, 502]
    assert fetch(site, tmp_path) == DATA


def test_a_server_that_stays_broken_is_given_up_and_the_beginning_kept(site: Site, tmp_path: Path):
    (tmp_path / "x.bin.part").write_bytes(DATA[:5])
    site.errors = [503] * 9
    with pytest.raises(Unreachable, match="503"):
        fetch(site, tmp_path)
    assert len(site.ranges) == 4
    assert (tmp_path / "x.bin.part").read_bytes() == DATA[:5]


def test_a_missing_file_is_given_up_at_once(site: Site, tmp_path: Path):
    with pytest.raises(Unreachable, match=r"404(.|\n)*put it at .*y.bin"):
        download(f"{site.url}/y.bin", tmp_path / "y.bin", silent)
    assert len(site.ranges) == 1


def test_a_host_that_is_away_is_unreachable(site: Site, tmp_path: Path):
    with serve() as other:
        url = other.url
    with pytest.raises(Unreachable, match="refused"):
        download(f"{url}/x.bin", tmp_path / "x.bin", silent)
    assert site.ranges == []


def test_a_full_disk_is_not_mistaken_for_a_bad_connection(site: Site, tmp_path: Path):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fetch(site, tmp_path, full)
    assert len(site.ranges) == 1
