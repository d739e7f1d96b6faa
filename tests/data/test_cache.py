"""A folder is decoded once per size, again when it changes, and an entry is complete and undamaged or not used."""

import gc
import json
import multiprocessing
import os
import shutil
import time

import numpy as np
import pytest
import torch
from PIL import Image

from mixnn import data
from mixnn.config import UserError
from mixnn.data import cache
from mixnn.data.decode import decode
from mixnn.data.stored import StoredImages


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


def copy_of_decoded(folder, size=8):
    """Pixels and facts, without holding the entry."""
    found = cache.decoded(folder, names(folder), size)
    return torch.as_tensor(found.images[:]).clone().numpy(), found.infos


@pytest.mark.parametrize("memory", [2**30, 0], ids=["in memory", "in the file"])
def test_a_second_reading_decodes_nothing(folder, monkeypatch, tmp_path, memory):
    first, infos = copy_of_decoded(folder)
    monkeypatch.setattr(cache, "decode_into", lambda *_: pytest.fail("decoded again"))
    monkeypatch.setattr(cache, "_available_memory", lambda: memory)
    again = cache.decoded(folder, names(folder), 8)
    assert isinstance(again.images, StoredImages) == (not memory)
    assert np.array_equal(again.images[:], first)
    assert again.infos == infos
    assert cache.decoded(folder, names(folder), 8).images is again.images, "held once"
    assert len(entries(tmp_path)) == 1


def test_an_entry_that_nobody_uses_is_forgotten(folder, tmp_path):
    found = cache.decoded(folder, names(folder), 8)
    (entry,) = entries(tmp_path)
    assert entry in cache._open_entries
    del found
    gc.collect()
    assert entry not in cache._open_entries


def test_the_processes_of_a_run_share_the_memory(folder, monkeypatch):
    copy_of_decoded(folder)
    monkeypatch.setattr(
        cache, "_available_memory", lambda: 3000
    )  # the images take 1152 bytes, at most half may be used
    assert not isinstance(cache.decoded(folder, names(folder), 8).images, StoredImages)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert isinstance(cache.decoded(folder, names(folder), 8).images, StoredImages)


def _use_after_truncation(folder):
    found = cache.decoded(folder, names(folder), 64)
    assert cache.decoded(folder, names(folder), 64).images.sum() == found.images.sum()
    for path in cache.cache_root().glob("*/images.npy"):
        os.truncate(path, 0)
    os._exit(int(found.images.sum() == 0))


def test_an_entry_truncated_under_a_running_job_does_not_harm_it(folder):
    child = multiprocessing.get_context("fork").Process(target=_use_after_truncation, args=(folder,))
    child.start()
    child.join(60)
    assert child.exitcode == 0, "a memory map would be SIGBUS"


def _read_after_truncation(folder, says):
    cache._available_memory = lambda: 0
    images = data.load(folder, "train", size=64).images
    assert images[torch.tensor([5, 0])].any()
    for path in cache.cache_root().glob("*/images.npy"):
        os.truncate(path, 0)
    try:
        images[torch.tensor([1, 4])]
    except UserError as error:
        says.send(str(error))


def test_an_entry_too_large_for_memory_that_is_truncated_in_use_is_a_clear_error(folder, tmp_path):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_read_after_truncation, args=(folder, there))
    child.start()
    child.join(60)
    assert child.exitcode == 0, "a memory map would be SIGBUS"
    assert here.poll(), "the reads gave something"
    assert here.recv().startswith(f"{entries(tmp_path)[0] / 'images.npy'} in the image cache can no longer be read")
    assert np.array_equal(copy_of_decoded(folder, 64)[0][0], decode(folder / "0.png", 64)), "it is built again"


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


def edit(change):
    """Damage to the list of facts, which leaves the rest as it is."""

    def damage(data: bytes) -> bytes:
        facts = json.loads(data)
        return json.dumps(facts | {"infos": change(facts["infos"])}).encode()

    return damage


def flip(position):
    """Damage to one bit."""

    def damage(data: bytes) -> bytes:
        return data[:position] + bytes([data[position] ^ 1]) + data[position:][1:]

    return damage


DAMAGE = {
    "facts missing": ("facts.json", None),
    "facts empty": ("facts.json", lambda _: b""),
    "facts cut": ("facts.json", lambda data: data[:40]),
    "facts not text": ("facts.json", lambda _: b"\xff\xfe\x00"),
    "facts of another type": ("facts.json", lambda _: b'{"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6, "g": 7}'),
    "facts of fewer files": ("facts.json", edit(lambda infos: infos[1:])),
    "facts with fewer fields": ("facts.json", edit(lambda _: [[9, 9, "RGB"]] * 6 + ["unreadable"])),
    "facts without content": ("facts.json", edit(lambda _: [None] * 7)),
    "facts of more images": ("facts.json", edit(lambda _: [[9, 9, "RGB", "0"]] * 7)),
    "a fact changed": ("facts.json", lambda data: data.replace(b"[20, 9,", b"[20, 8,")),
    "checksum changed": ("facts.json", lambda data: data.replace(b'"crc32": ', b'"crc32": 1')),
    "images missing": ("images.npy", None),
    "images empty": ("images.npy", lambda _: b""),
    "header cut": ("images.npy", lambda data: data[:20]),
    "header damaged": ("images.npy", lambda data: data.replace(b"(6,", b"((6")),
    "pixels cut": ("images.npy", lambda data: data[:-1]),
    "pixels too many": ("images.npy", lambda data: data + b"0"),
    "images are junk": ("images.npy", lambda data: b"junk" * (len(data) // 4)),
    "images are a zip": ("images.npy", lambda data: b"PK" + data[2:]),
    "first pixel flipped": ("images.npy", flip(128)),
    "last pixel flipped": ("images.npy", flip(-1)),
    "images of another size": ("images.npy", lambda data: data.replace(b"8, 8)", b"4,16)")),
}


@pytest.mark.parametrize("file, damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_rebuilt_and_one_line_says_so(folder, tmp_path, capfd, file, damage):
    images, infos = copy_of_decoded(folder)
    (entry,) = entries(tmp_path)
    kept = {path.name: path.read_bytes() for path in entry.iterdir()}
    path = entry / file
    path.unlink()
    if damage:
        path.write_bytes(damage(kept[file]))
        assert path.read_bytes() != kept[file]
    again = cache.decoded(folder, names(folder), 8)
    assert np.array_equal(again.images, images)
    assert again.infos == infos
    assert entries(tmp_path) == [entry]
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == kept
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert f"{entry} in the image cache is damaged" in err
    del again
    copy_of_decoded(folder)
    assert capfd.readouterr() == ("", ""), "it is whole again"


def test_an_entry_too_large_for_memory_is_checked_too(folder, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(cache, "_available_memory", lambda: 0)
    images, _ = copy_of_decoded(folder)
    path = entries(tmp_path)[0] / "images.npy"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(flip(-1)(content))
    assert np.array_equal(copy_of_decoded(folder)[0], images)
    assert "its checksum does not match" in capfd.readouterr().err
    assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == 0o444, "nobody cuts it by accident"


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


def test_the_remains_of_a_killed_run_are_removed_by_the_next(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "decode_into", lambda *_: os._exit(9))
    child = multiprocessing.get_context("fork").Process(target=cache.decoded, args=(folder, names(folder), 8))
    child.start()
    child.join(60)
    monkeypatch.undo()
    monkeypatch.setenv("MIXNN_CACHE", str(tmp_path / "cache"))
    assert entries(tmp_path), "killed in the middle"
    assert len(cache.decoded(folder, names(folder), 8).images) == 6
    (entry,) = entries(tmp_path)
    assert entry.name.isalnum(), "the remains are gone"


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
    assert len(json.loads((entry / "facts.json").read_text())["infos"]) == 7


def one_entry_too_many(folder, tmp_path, monkeypatch, size):
    """Images of this size fit only if an entry is removed."""
    needed = len(names(folder)) * 3 * size * size
    taken = sum(path.stat().st_size for entry in entries(tmp_path) for path in entry.iterdir())
    monkeypatch.setenv("MIXNN_CACHE_SIZE", f"{(taken + needed - 100) / 1e6:.6f} MB")


def used(entry, hours_ago):
    then = time.time() - 3600 * hours_ago
    for path in (entry / "facts.json", entry):
        os.utime(path, (then, then))


def three_entries(folder, tmp_path):
    """Entries for 6, 7 and 8 pixels, used long ago in the order 7, 6, 8."""
    found = {}
    for size, hours_ago in ((6, 20), (7, 30), (8, 10)):
        before = set(entries(tmp_path)) if found else set()
        copy_of_decoded(folder, size)
        (found[size],) = set(entries(tmp_path)) - before
        used(found[size], hours_ago)
    return found


def test_the_least_recently_used_entries_are_removed_when_the_cache_is_full(folder, tmp_path, monkeypatch):
    found = three_entries(folder, tmp_path)
    one_entry_too_many(folder, tmp_path, monkeypatch, 9)
    copy_of_decoded(folder, 9)
    assert found[7] not in entries(tmp_path)
    assert {found[6], found[8]} < set(entries(tmp_path))
    copy_of_decoded(folder, 6)  # now the one used last
    one_entry_too_many(folder, tmp_path, monkeypatch, 10)
    copy_of_decoded(folder, 10)
    assert found[8] not in entries(tmp_path)
    assert found[6] in entries(tmp_path)


def test_what_a_process_uses_is_never_removed(folder, tmp_path, monkeypatch):
    found = three_entries(folder, tmp_path)
    monkeypatch.setenv("MIXNN_CACHE_SIZE", "0MB")
    in_use = cache.decoded(folder, names(folder), 7)
    used(found[7], 100)
    new = cache.decoded(folder, names(folder), 9)
    assert len(entries(tmp_path)) == 2, "that, and what is needed now"
    assert found[7] in entries(tmp_path)
    del in_use, new
    copy_of_decoded(folder, 10)
    assert len(entries(tmp_path)) == 1


def test_a_full_disk_makes_room_too_and_nothing_but_entries_is_removed(folder, tmp_path, monkeypatch):
    found = three_entries(folder, tmp_path)
    (tmp_path / "cache" / "notes.txt").write_text("mine")
    (tmp_path / "cache" / "mine").mkdir()
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 0))
    copy_of_decoded(folder, 6 + 3)
    left = {path.name for path in entries(tmp_path)}
    assert {"notes.txt", "mine"} < left
    assert found[7].name not in left


@pytest.mark.parametrize("text", ["5", "many", "-1GB", "10 bananas"])
def test_a_size_limit_that_is_no_size_is_refused(folder, monkeypatch, text):
    monkeypatch.setenv("MIXNN_CACHE_SIZE", text)
    with pytest.raises(UserError, match=r"MIXNN_CACHE_SIZE=.* is not a size: write it as 500MB, 20GB or 1TB"):
        cache.decoded(folder, names(folder), 8)


def test_chunks_of_files_make_the_same_entry_as_all_at_once(folder, tmp_path, monkeypatch):
    images, infos = copy_of_decoded(folder)
    monkeypatch.setenv("MIXNN_CACHE", str(tmp_path / "another"))
    monkeypatch.setattr(cache, "CHUNK", 3)
    in_chunks, same = copy_of_decoded(folder)
    assert np.array_equal(in_chunks, images)
    assert same == infos


def test_a_folder_says_what_it_is(folder):
    (folder / "copy of 1.png").write_bytes((folder / "1.png").read_bytes())
    Image.new("L", (30, 40)).save(folder / "gray.png")
    images = data.load(folder, "train", size=8)
    assert images.summary.num_images == 8
    assert images.summary.sides == (9, 12, 30)
    assert images.summary.modes == {"RGB": 7, "L": 1}
    assert images.summary.duplicates == [["1.png", "copy of 1.png"]]
    text = "\n".join(images.summary.lines())
    assert "8 images, shorter side 9 to 30, median 12 pixels; 7 color, 1 gray" in text
    assert "1 unreadable file left out" in text
    assert "1 file with the same content as another (1.png = copy of 1.png)" in text
