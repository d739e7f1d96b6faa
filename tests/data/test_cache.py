"""A folder is decoded once per size, again when it changes, and an entry is complete or not there."""

import json
import multiprocessing
import os
import time

import numpy as np
import pytest
from PIL import Image

from mixnn import data
from mixnn.data import cache
from mixnn.data.decode import decode


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXNN_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "photos"
    place.mkdir()
    rng = np.random.default_rng(0)
    for i in range(7):
        Image.fromarray(rng.integers(0, 256, (9 + i, 20, 3), dtype=np.uint8)).save(place / f"{i}.png")
    (place / "3.png").write_bytes(b"no image")
    return place


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def entries(tmp_path):
    return sorted((tmp_path / "cache").iterdir())


def test_images_equal_those_of_decode_without_the_unreadable_ones(folder):
    found = cache.decoded(folder, names(folder), 8)
    want = [decode(folder / f"{i}.png", 8) for i in (0, 1, 2, 4, 5, 6)]
    assert np.array_equal(found.images, np.stack(want))
    assert found.infos[3] == "not an image that Pillow can read"
    assert [f.height for i, f in enumerate(found.infos) if i != 3] == [9, 10, 11, 13, 14, 15]


def test_a_second_reading_maps_the_file_and_decodes_nothing(folder, monkeypatch, tmp_path):
    first = cache.decoded(folder, names(folder), 8)
    monkeypatch.setattr(cache, "decode_into", lambda *_: pytest.fail("decoded again"))
    again = cache.decoded(folder, names(folder), 8)
    assert isinstance(again.images, np.memmap)
    assert np.array_equal(again.images, first.images)
    assert again.infos == first.infos
    assert len(entries(tmp_path)) == 1


def test_files_of_the_same_date_and_size_are_distinguished(folder, tmp_path):
    other = tmp_path / "others"
    other.mkdir()
    for i, place in enumerate((folder, other)):
        Image.new("RGB", (9, 9), (100 * i,) * 3).save(place / "0.bmp")
        os.utime(place / "0.bmp", ns=(0, 0))
    assert (folder / "0.bmp").stat().st_size == (other / "0.bmp").stat().st_size
    assert [cache.decoded(place, ["0.bmp"], 8).images.mean() for place in (folder, other)] == [0, 100]
    Image.new("RGB", (9, 9), (50,) * 3).save(folder / "0.bmp")  # rewritten, with the date it had
    os.utime(folder / "0.bmp", ns=(0, 0))
    assert cache.decoded(folder, ["0.bmp"], 8).images.mean() == 50


def test_a_moved_folder_is_not_decoded_again(folder, tmp_path, monkeypatch):
    cache.decoded(folder, names(folder), 8)
    moved = folder.rename(tmp_path / "moved")
    monkeypatch.setattr(cache, "decode_into", lambda *_: pytest.fail("decoded again"))
    assert len(cache.decoded(moved, names(moved), 8).images) == 6


def test_another_size_or_a_changed_file_is_another_entry(folder, tmp_path):
    cache.decoded(folder, names(folder), 8)
    cache.decoded(folder, names(folder), 6)
    Image.new("RGB", (9, 9), "red").save(folder / "0.png")
    os.utime(folder / "0.png", ns=(time.time_ns() + 10**9,) * 2)
    found = cache.decoded(folder, names(folder), 8)
    assert (found.images[0] == np.array([255, 0, 0])[:, None, None]).all()
    cache.decoded(folder, names(folder)[1:], 8)
    assert len(entries(tmp_path)) == 4


def drop_first(data: bytes) -> bytes:
    return json.dumps(json.loads(data)[1:]).encode()


DAMAGE = {
    "facts missing": ("facts.json", None),
    "facts empty": ("facts.json", lambda _: b""),
    "facts cut": ("facts.json", lambda data: data[:40]),
    "facts not text": ("facts.json", lambda _: b"\xff\xfe\x00"),
    "facts of another type": ("facts.json", lambda _: b'{"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6, "g": 7}'),
    "facts of fewer files": ("facts.json", drop_first),
    "facts with fewer fields": ("facts.json", lambda _: json.dumps([[9, 9, "RGB"]] * 6 + ["unreadable"]).encode()),
    "facts without content": ("facts.json", lambda _: json.dumps([None] * 7).encode()),
    "facts of more images": ("facts.json", lambda _: json.dumps([[9, 9, "RGB", "0"]] * 7).encode()),
    "images missing": ("images.npy", None),
    "images empty": ("images.npy", lambda _: b""),
    "header cut": ("images.npy", lambda data: data[:20]),
    "header damaged": ("images.npy", lambda data: data.replace(b"(6,", b"((6")),
    "pixels cut": ("images.npy", lambda data: data[:-1]),
    "pixels too many": ("images.npy", lambda data: data + b"0"),
    "images are junk": ("images.npy", lambda data: b"junk" * (len(data) // 4)),
    "images are a zip": ("images.npy", lambda data: b"PK" + data[2:]),
    "images of another size": ("images.npy", lambda data: data.replace(b"8, 8)", b"4,16)")),
}


@pytest.mark.parametrize("file, damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_rebuilt_silently(folder, tmp_path, capfd, file, damage):
    first = cache.decoded(folder, names(folder), 8)
    images = np.array(first.images)
    (entry,) = entries(tmp_path)
    kept = {path.name: path.read_bytes() for path in entry.iterdir()}
    path = entry / file
    path.unlink()
    if damage:
        path.write_bytes(damage(kept[file]))
        assert path.read_bytes() != kept[file]
    again = cache.decoded(folder, names(folder), 8)
    assert np.array_equal(again.images, images)
    assert again.infos == first.infos
    assert entries(tmp_path) == [entry]
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == kept
    assert capfd.readouterr() == ("", "")


def test_files_are_synced_before_the_entry_appears(folder, tmp_path, monkeypatch):
    synced = []

    def fsync(number):
        assert not list((tmp_path / "cache").glob("*/facts.json")), "the entry is there already"
        synced.append(os.fstat(number).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    cache.decoded(folder, names(folder), 8)
    (entry,) = entries(tmp_path)
    sizes = {name: (entry / name).stat().st_size for name in ("facts.json", "images.npy")}
    assert set(sizes.values()) <= set(synced), "both files, after the last byte was written"


def test_the_remains_of_a_killed_run_do_not_block_the_cache(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "decode_into", lambda *_: os._exit(9))
    child = multiprocessing.get_context("fork").Process(target=cache.decoded, args=(folder, names(folder), 8))
    child.start()
    child.join(60)
    monkeypatch.undo()
    monkeypatch.setenv("MIXNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "getpid", lambda: child.pid)  # a container gives the same number to every run
    assert len(entries(tmp_path)) == 1, "killed in the middle"
    assert isinstance(cache.decoded(folder, names(folder), 8).images, np.memmap)


@pytest.mark.parametrize("where", ["fsync", "replace", "rename"])
def test_a_failure_in_the_middle_leaves_nothing_and_memory_is_used(folder, monkeypatch, tmp_path, where):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, where, full)
    found = cache.decoded(folder, names(folder), 8)
    assert len(found.images) == 6
    assert entries(tmp_path) == []


def test_without_write_access_the_images_are_decoded_in_memory(folder, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MIXNN_CACHE", str(tmp_path / "file" / "cache"))
    assert len(cache.decoded(folder, names(folder), 8).images) == 6


def _decode(folder, barrier):
    barrier.wait(60)
    cache.decoded(folder, names(folder), 8)


def test_two_runs_at_once_keep_one_complete_entry(folder, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    workers = [context.Process(target=_decode, args=(folder, barrier)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    (entry,) = entries(tmp_path)
    assert len(json.loads((entry / "facts.json").read_text())) == 7


def test_progress_is_reported(folder, monkeypatch):
    monkeypatch.setattr(cache, "CHUNK", 3)
    seen = []
    cache.decoded(folder, names(folder), 8, lambda *now: seen.append(now))
    assert seen == [(3, 7), (6, 7), (7, 7)]


def test_a_folder_says_what_it_is(folder):
    (folder / "copy of 1.png").write_bytes((folder / "1.png").read_bytes())
    Image.new("L", (30, 40)).save(folder / "gray.png")
    images = data.load(folder, "train", size=8)
    assert images.summary.num_images == 8
    assert images.summary.sides == (9, 12, 30)
    assert images.summary.modes == {"RGB": 7, "L": 1}
    assert images.summary.duplicates == [["1.png", "copy of 1.png"]]
    text = "\n".join(images.summary.lines())
    assert "8 images, shorter side 9 to 30, median 12 pixels; modes: 7 RGB, 1 L" in text
    assert "1 unreadable file left out" in text
    assert "1 file with the same content as another (1.png = copy of 1.png)" in text
