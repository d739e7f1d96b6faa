"""A folder is decoded once for each size, again when it changes, and never half."""

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


def test_images_are_those_of_decode_in_order_without_the_unreadable(folder):
    found = cache.decoded(folder, names(folder), 8)
    want = [decode(folder / f"{i}.png", 8) for i in (0, 1, 2, 4, 5, 6)]
    assert np.array_equal(found.images, np.stack(want))
    assert found.facts[3] == "not an image that Pillow can read"
    assert [f.height for i, f in enumerate(found.facts) if i != 3] == [9, 10, 11, 13, 14, 15]


def test_a_second_reading_maps_the_file_and_decodes_nothing(folder, monkeypatch, tmp_path):
    first = cache.decoded(folder, names(folder), 8)
    monkeypatch.setattr(cache, "decode_into", lambda *_: pytest.fail("decoded again"))
    again = cache.decoded(folder, names(folder), 8)
    assert isinstance(again.images, np.memmap)
    assert np.array_equal(again.images, first.images)
    assert again.facts == first.facts
    assert len(entries(tmp_path)) == 1


def test_files_of_one_date_and_size_are_told_apart(folder, tmp_path):
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


def test_a_failure_in_the_middle_leaves_nothing_and_memory_serves(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "_as_npy", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    found = cache.decoded(folder, names(folder), 8)
    assert len(found.images) == 6
    assert entries(tmp_path) == []


def test_a_place_that_cannot_be_written_is_no_obstacle(folder, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MIXNN_CACHE", str(tmp_path / "file" / "cache"))
    assert len(cache.decoded(folder, names(folder), 8).images) == 6


def _decode(folder, start):
    while time.time() < start:
        pass
    cache.decoded(folder, names(folder), 8)


def test_two_at_once_keep_one_whole_entry(folder, tmp_path):
    context = multiprocessing.get_context("fork")
    start = time.time() + 0.3
    workers = [context.Process(target=_decode, args=(folder, start)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    (entry,) = entries(tmp_path)
    assert len(json.loads((entry / "facts.json").read_text())) == 7


def test_progress_is_told(folder, monkeypatch):
    monkeypatch.setattr(cache, "CHUNK", 3)
    seen = []
    cache.decoded(folder, names(folder), 8, lambda *now: seen.append(now))
    assert seen == [(3, 7), (6, 7), (7, 7)]


def test_a_folder_says_what_it_is(folder):
    (folder / "copy of 1.png").write_bytes((folder / "1.png").read_bytes())
    Image.new("L", (30, 40)).save(folder / "gray.png")
    images = data.load(folder, "train", size=8)
    assert images.scan.num_images == 8
    assert images.scan.sides == (9, 12, 30)
    assert images.scan.modes == {"RGB": 7, "L": 1}
    assert images.scan.duplicates == [["1.png", "copy of 1.png"]]
    text = "\n".join(images.scan.lines())
    assert "8 images, shorter side 9 to 30, median 12 pixels; modes: 7 RGB, 1 L" in text
    assert "1 file that cannot be read left out" in text
    assert "1 file with the same content as another (1.png = copy of 1.png)" in text
