"""search: nearest images, near-duplicates and outliers, in every format, on a folder of digits."""

import base64
import contextlib
import functools
import html.parser
import io
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import mixnn
from mixnn.apps.embeddings import Embeddings
from mixnn.apps.search import render, similarity
from mixnn.apps.search import search as search_module
from mixnn.apps.search.search import first_with_same_content, search, show_search
from mixnn.config import UserError
from mixnn.data.images import ImageFiles
from mixnn.evaluation import neighbors
from mixnn.progress import Reporter, escape_controls

QUIET = Reporter(quiet=True)
SIDE = 128  # of the files; the network sees 16 x 16, so a shift by one pixel is one by an eighth
ODD = "<img src=x onerror=document.title='gone'>.png"
NAMES = [ODD, "a b  c.png", "数字 ünï.png", "[red]:smile:.png", "quote\"'&amp;.png", "under/<b>deep<b>.png"]


load_digits = functools.cache(load_digits)


def digit(i: int) -> Image.Image:
    gray = np.uint8(load_digits().images[i] * 255 / 16)
    return Image.fromarray(gray).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def shifted(image: Image.Image, pixels: int) -> Image.Image:
    return Image.fromarray(np.roll(np.asarray(image), pixels, axis=1))


def noise(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8))


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A run on 96 digits, six of which have odd names."""
    root = tmp_path_factory.mktemp("searching")
    folder = root / "digits"
    (folder / "under").mkdir(parents=True)
    names = NAMES + [f"{i}.png" for i in range(90)]
    for i, name in enumerate(names):
        digit(i).save(folder / name)
    run = mixnn.pretrain(
        folder, out=root / "run", backbone="resnet8", epochs=1, image_size=16, batch_size=32, bn_groups=1, knn_every=0,
        device="cpu", options={"support_size": 64, "hidden": 64}, verbose=QUIET,
    )  # fmt: skip
    return SimpleNamespace(run=run, folder=folder, names=names, root=root)


def quietly(*args, **options) -> tuple[dict, str]:
    """The result, and what the command prints of it; the function itself prints nothing."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        result = search(*args, verbose=QUIET, device="cpu", **options)
        assert not out.getvalue()
        show_search(result)
    return result, out.getvalue()


def random_unit(count: int, width: int, seed: int = 0) -> np.ndarray:
    return similarity.normalize_rows(np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32))


def brute_force(bank: np.ndarray, queries: np.ndarray, topk: int, own: list[list[int]]) -> list[list[int]]:
    """Every cosine in float64, sorted by cosine and then by position."""
    found = []
    for query, mine in zip(queries, own, strict=True):
        cos = [float((row.astype(np.float64) * query.astype(np.float64)).sum()) for row in bank]
        found.append(sorted((i for i in range(len(bank)) if i not in mine), key=lambda i: (-cos[i], i))[:topk])
    return found


# Similarities that tell like from unlike


def clusters(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors of four classes that share a large part, as an encoder's do, and their classes."""
    rng = np.random.default_rng(seed)
    label = np.arange(count) % 4
    vectors = 3 * rng.standard_normal(64) + 2 * rng.standard_normal((4, 64))[label] + rng.standard_normal((count, 64))
    return similarity.normalize_rows(vectors.astype(np.float32)), label


def test_less_the_mean_two_random_images_have_a_similarity_of_zero_and_two_of_a_class_a_high_one():
    plain, label = clusters(200)
    cosines = plain @ plain.T
    assert cosines.mean() > 0.5
    centered = similarity.center_rows(plain, similarity.bank_mean(plain))
    assert centered is plain, "in place"
    np.testing.assert_allclose(np.linalg.norm(centered, axis=1), 1, rtol=1e-5)
    found, same = centered @ centered.T, label[:, None] == label
    assert abs(found.mean()) < 0.02
    assert np.median(found[same]) - np.median(found[~same]) > 2 * (np.median(cosines[same]) - np.median(cosines[~same]))


def test_few_images_and_images_that_are_all_alike_keep_their_plain_cosines():
    few, _ = clusters(similarity.MIN_CENTERED - 1)
    assert not similarity.bank_mean(few).any()
    assert similarity.bank_mean(clusters(similarity.MIN_CENTERED)[0]).any()
    alike = similarity.normalize_rows(np.float32(np.ones((50, 64)) + 1e-4 * random_unit(50, 64)))
    assert not similarity.bank_mean(alike).any(), "what is left would be noise"


def test_the_meaning_of_a_similarity_is_printed_and_few_images_have_copies_too(given, tmp_path):
    for name, original in (("4.png", "4.png"), ("copy.png", "4.png"), ("5.png", "5.png")):
        shutil.copy(given.folder / original, tmp_path / name)
    result, printed = quietly(given.run, source=tmp_path, duplicates=True)
    assert [image["file"] for group in result["groups"] for image in group] == ["4.png", "copy.png"]
    assert not result["centered"]
    assert "plain cosine" in printed
    for kind in ({"query": "4.png"}, {"duplicates": True}):
        result, printed = quietly(given.run, **kind)
        assert result["centered"]
        assert "similarity 0: as unlike as two random images here, 1: the same" in printed.splitlines()
    assert "by mean cosine to their 10 nearest" in quietly(given.run, outliers=True)[1]


def test_an_image_that_lacks_what_all_others_share_is_an_outlier(given, monkeypatch):
    """The vectors of a folder have much in common. Without their mean, an odd image differs in one number only."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(60, 32)).astype(np.float32)
    vectors[:, 0] += 8
    vectors[-3:, 0] = 0
    vectors[:57, 1:] *= rng.uniform(0.1, 3, (57, 1)).astype(np.float32)
    embeddings = Embeddings([f"{i}" for i in range(60)], vectors)
    monkeypatch.setattr(search_module, "load_or_encode", lambda *_, **__: embeddings)
    found = mixnn.search(given.run, outliers=True, topk=3)
    assert {row["file"] for row in found["outliers"]} == {"57", "58", "59"}


def test_a_name_without_its_folder_is_found_if_it_is_the_only_one():
    names = ["a/b/Cat.JPG", "a/dog.jpg", "c/dog.jpg"]
    assert search_module.check_query("cat.jpg", names) == ["a/b/Cat.JPG"]
    assert search_module.check_query(["b/Cat.JPG", "c/dog.jpg"], names) == ["a/b/Cat.JPG", "c/dog.jpg"]
    with pytest.raises(UserError, match=r"dog.jpg is the name of 2 images, such as a/dog.jpg, c/dog.jpg: give one"):
        search_module.check_query("dog.jpg", names)
    with pytest.raises(UserError, match=r"no such image: at\.jpg is not"):
        search_module.check_query("at.jpg", names)


def test_the_name_of_a_file_says_its_form(given, tmp_path):
    for name, form in (("a.json", "json"), ("b.html", "html"), ("c.txt", "terminal"), ("c.2024", "terminal")):
        assert mixnn.search(given.run, "4.png", out=tmp_path / name).form == form
    assert json.loads((tmp_path / "a.json").read_text())["kind"] == "nearest"
    assert mixnn.search(given.run, "4.png", output="json", out=tmp_path / "d.txt").form == "json"
    with pytest.raises(UserError, match=r"b.html.* would hold json"):
        mixnn.search(given.run, "4.png", output="json", out=tmp_path / "b.html", overwrite=True)
    with pytest.raises(UserError, match=r"e\.csv would not be a CSV: use a name that ends in .json, .html or .txt"):
        mixnn.search(given.run, "4.png", out=tmp_path / "e.csv")


def test_a_damaged_image_of_the_source_is_named_as_what_it_is(given, tmp_path):
    shutil.copytree(given.folder, tmp_path / "photos")
    (tmp_path / "photos" / "empty.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"cannot read empty\.png: "):
        mixnn.search(given.run, "empty.png", source=tmp_path / "photos", verbose=Reporter(quiet=True))


# Nearest neighbors of vectors


@pytest.mark.parametrize("block", [1, 7, 64, 333, 2**22])
@pytest.mark.parametrize("num_queries", [1, 5])
def test_exact_search_equals_brute_force_for_any_block_size(monkeypatch, block, num_queries):
    monkeypatch.setattr(neighbors, "BLOCK", block)
    monkeypatch.setattr(neighbors, "QUERIES", 3)
    monkeypatch.setattr(similarity, "RANKED", 100)
    bank = random_unit(333, 24)
    queries = random_unit(num_queries, 24, seed=1)
    own = [[] for _ in range(num_queries)]
    hits = similarity.nearest(queries, bank, 12, own)
    assert [[i for i, _ in row] for row in hits] == brute_force(bank, queries, 12, own)
    for query, row in zip(queries, hits, strict=True):
        assert [cos for _, cos in row] == pytest.approx(
            [float(bank[i].astype(float) @ query) for i, _ in row], abs=1e-12
        )


@pytest.mark.parametrize("block", [1, 13, 2**22])
def test_equal_images_keep_their_order_and_an_image_is_not_its_own_neighbor(monkeypatch, block):
    monkeypatch.setattr(neighbors, "BLOCK", block)
    bank = random_unit(60, 16)
    bank[[7, 20, 21, 45, 59]] = bank[3]
    own = [[3], [20], [21, 45], []]
    queries = np.stack([bank[3]] * 4)
    hits = similarity.nearest(queries, bank, 6, own)
    assert [[i for i, _ in row] for row in hits] == brute_force(bank, queries, 6, own)
    assert [i for i, _ in hits[0]][:5] == [7, 20, 21, 45, 59]
    assert hits[0][0][1] == pytest.approx(1, abs=1e-6)


def test_topk_can_be_all_other_images():
    bank = random_unit(9, 4)
    (hits,) = similarity.nearest(bank[:1], bank, 8, [[0]])
    assert sorted(i for i, _ in hits) == list(range(1, 9))


def test_faiss_finds_the_same():
    pytest.importorskip("faiss")
    bank = random_unit(500, 32)
    bank[[100, 400]] = bank[5]
    own = [[i] for i in range(10)]
    exact, faiss = (similarity.nearest(bank[:10], bank, 15, own, method) for method in ("exact", "faiss"))
    assert faiss == exact


def test_rows_become_unit_in_place_and_a_zero_row_stays_zero(monkeypatch):
    monkeypatch.setattr(similarity, "ROWS", 4)
    rows = np.random.default_rng(0).standard_normal((10, 6)).astype(np.float32)
    rows[9] = 0
    made = similarity.normalize_rows(rows)
    assert made is rows
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), [1] * 9 + [0], atol=1e-6)
    with pytest.raises(UserError, match="NaN or inf"):
        similarity.normalize_rows(np.array([[np.nan, 1]], np.float32))


# Near-duplicates and outliers, of vectors


@pytest.mark.parametrize("side", [1, 5, 2048])
def test_groups_are_the_connected_parts_of_the_graph_of_near_pairs(monkeypatch, side):
    monkeypatch.setattr(similarity, "BLOCK", side)
    bank = random_unit(40, 3)
    near = bank.astype(np.float64) @ bank.T >= 0.97
    reach = np.linalg.matrix_power(near.astype(float), 40) > 0
    parts = {tuple(np.flatnonzero(row)) for row in reach if row.sum() > 1}
    blocks = []
    found = similarity.near_duplicates(bank, 0.97, blocks.append)
    assert {tuple(sorted(i for i, _ in group)) for group in found} == parts
    assert len(found) == len(parts)
    assert [group[1][1] for group in found] == sorted((group[1][1] for group in found), reverse=True)
    assert len(parts) > 3, "an empty graph shows nothing"
    assert blocks == list(range(1, similarity.num_blocks(40) + 1))
    for group in found:
        cosines = [cos for _, cos in group]
        assert group[0] == (min(i for i, _ in group), 1.0)
        assert cosines == sorted(cosines, reverse=True)


def test_identical_images_are_one_group():
    bank = np.repeat(random_unit(1, 8), 300, axis=0)
    (group,) = similarity.near_duplicates(bank, 1.0)
    assert [i for i, _ in group] == list(range(300))


def test_the_threshold_is_so_near_that_about_one_pair_reaches_it_by_chance():
    for width, most in ((6, 5), (8, 5)):  # few directions: the nearest of all pairs are very near
        bank = random_unit(400, width)
        threshold, why = similarity.default_threshold(bank)
        cos = np.sort(bank.astype(np.float64) @ bank.T, axis=1)[:, ::-1]
        near, far = (1 - np.median(cos[:, k]) for k in (10, 20))
        assert 1 - threshold == pytest.approx(near / 2000 ** np.log2(far / near), rel=0.05)
        assert (np.triu(bank @ bank.T, 1) >= threshold).sum() <= most
        assert "times closer than an image usually is to its neighbor number 10 (" in why
    many = random_unit(200, 64)
    cos = np.sort(many.astype(np.float64) @ many.T, axis=1)[:, ::-1]
    assert similarity.default_threshold(many)[0] == pytest.approx(1 - (1 - np.median(cos[:, 10])) / 5, abs=2e-3)


def test_the_threshold_ignores_copies_and_few_images_have_one():
    bank = random_unit(200, 8)
    doubled = similarity.default_threshold(np.concatenate([bank, bank]))[0]
    assert doubled == pytest.approx(similarity.default_threshold(bank)[0], abs=0.03)
    assert similarity.default_threshold(bank[:2])[0] < 1
    assert similarity.default_threshold(np.concatenate([bank[:1]] * 30))[0] == 1


def test_an_outliers_score_is_the_mean_cosine_to_its_nearest_others():
    bank = random_unit(50, 6)
    bank[10:20] = bank[10]  # more copies than neighbors: an image may not be among its nearest
    cos = bank.astype(np.float64) @ bank.T
    np.fill_diagonal(cos, -2)
    naive = np.sort(cos, axis=1)[:, -3:].mean(axis=1)
    np.testing.assert_allclose(similarity.mean_similarity(bank, 3), naive, atol=1e-6)


# The verb, on files


def test_a_query_that_is_in_the_source_is_left_out_for_any_spelling_of_its_path(given):
    link = given.root / "link.png"
    if not link.exists():
        link.symlink_to(given.folder / "4.png")
    results = [
        quietly(given.run, spelling, topk=5)[0]["queries"][0]["nearest"]
        for spelling in (given.folder / "4.png", str(given.folder / "under" / ".." / "4.png"), link, "4.png")
    ]
    assert results[0] == results[1] == results[2] == results[3]
    assert [hit["rank"] for hit in results[0]] == [1, 2, 3, 4, 5]
    assert "4.png" not in [hit["file"] for hit in results[0]]
    similarities = [hit["similarity"] for hit in results[0]]
    assert similarities == sorted(similarities, reverse=True)


def test_the_search_agrees_with_vectors_of_the_encoder(given):
    image = given.root / "elsewhere.png"
    digit(200).save(image)
    (row,) = quietly(given.run.path, image, topk=3)[0]["queries"]
    from mixnn.data.decode import decode_all

    encoder = mixnn.load(given.run, "cpu")
    u8, _ = decode_all([image, *(given.folder / name for name in given.names)], 16)
    vectors = encoder(torch.from_numpy(u8)).double().numpy()
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors -= vectors[1:].mean(0)  # of the images searched, not of the query
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cos = vectors[1:] @ vectors[0]
    best = np.argsort(-cos)[:3]
    assert [hit["file"] for hit in row["nearest"]] == [given.names[i] for i in best]
    assert [hit["similarity"] for hit in row["nearest"]] == pytest.approx(cos[best].tolist(), abs=1e-5)


def test_a_folder_of_queries_searches_for_each_image_and_reports_unreadable_ones(given, capsys):
    folder = given.root / "queries"
    folder.mkdir(exist_ok=True)
    digit(300).save(folder / "one.png")
    shutil.copy(given.folder / "7.png", folder / "two.png")  # a copy is another file
    (folder / "bad.png").write_text("no image")
    (folder / "nowhere.png").symlink_to("gone.png")
    result, _ = quietly(given.run, folder, topk=2)
    assert [Path(row["query"]).name for row in result["queries"]] == ["one.png", "two.png"]
    first = result["queries"][1]["nearest"][0]
    assert first["file"] == "7.png"
    assert first["similarity"] == pytest.approx(1, abs=1e-5)
    said = capsys.readouterr().err
    assert "bad.png" in said
    assert "nowhere.png: a link that leads nowhere" in said


def test_an_image_of_a_data_set_is_a_query_by_its_name(given):
    result, printed = quietly(given.run, "digits/train/3", source="digits", topk=2)
    assert result["images"] == 1297
    assert "digits/train/3" not in [hit["file"] for hit in result["queries"][0]["nearest"]]
    out = given.root / "set.html"
    quietly(given.run, "digits/train/3", source="digits", topk=2, output="html", out=out)
    assert out.read_text().count("data:image/png") == 3
    assert "nearest to digits/train/3" in printed


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """40 digits, two copies of one, one saved as JPEG, one enlarged, one shifted by an eighth of a network's pixel."""
    folder = tmp_path_factory.mktemp("copies")
    for i in range(40):
        digit(100 + i).save(folder / f"{i}.png")
    shutil.copy(folder / "3.png", folder / "copy of 3.png")
    shutil.copy(folder / "3.png", folder / "3 again.png")
    digit(105).save(folder / "saved 5.jpg", quality=95)
    digit(106).resize((200, 200), Image.Resampling.BICUBIC).save(folder / "enlarged 6.png")
    shifted(digit(108), 1).save(folder / "shifted 8.png")
    return folder


def test_copies_are_found_and_different_digits_are_not(given, copies):
    result, printed = quietly(given.run, source=copies, duplicates=True)
    groups = [{image["file"] for image in group} for group in result["groups"]]
    assert groups[0] == {"3.png", "3 again.png", "copy of 3.png"}
    copied = [{"5.png", "saved 5.jpg"}, {"6.png", "enlarged 6.png"}, {"8.png", "shifted 8.png"}]
    assert sorted((group for group in groups[1:] if any(" " in name for name in group)), key=min) == copied
    others = [group for group in result["groups"] if not any(" " in image["file"] for image in group)]
    assert len(others) <= 1, "about one pair may be as near by chance"
    assert all(image["similarity"] < render.COPY for group in others for image in group[1:])
    same = {image["file"]: image["same_content_as"] for group in result["groups"] for image in group}
    first = result["groups"][0][0]["file"]
    assert [name for name, of in same.items() if of] == [n for n in same if n in groups[0] and n != first]
    assert {of for of in same.values() if of} == {first}
    assert f"(identical to {first})" in printed
    assert str(result["threshold"]) in printed
    assert "usually" in printed


def test_a_copy_that_the_encoder_finds_unlike_is_found_by_its_pixels(given, copies, tmp_path, monkeypatch):
    monkeypatch.setattr(similarity, "default_threshold", lambda _: (0.9999, "as strict as can be"))
    folder = shutil.copytree(copies, tmp_path / "copies")
    digit(117).resize((40, 40), Image.Resampling.BICUBIC).save(folder / "small 17.jpg", quality=40)
    result, printed = quietly(given.run, source=folder, duplicates=True)
    groups = [{image["file"] for image in group} for group in result["groups"]]
    (small,) = [i for i, group in enumerate(groups) if "small 17.jpg" in group]
    assert groups[small] == {"17.png", "small 17.jpg"}
    assert result["groups"][small][1]["similarity"] < 0.9999
    assert [image["same_pixels"] for image in result["groups"][small]] == [True, True]
    assert "small 17.jpg  (nearly the same pixels as the first)" in printed or "17.png  (nearly" in printed
    assert "close to another image of it, or has nearly the same pixels" in printed
    assert "(identical to" in printed
    strict, printed = quietly(given.run, source=folder, duplicates=True, threshold=0.9999)
    assert not any("small 17.jpg" in {image["file"] for image in group} for group in strict["groups"])
    assert "pixels" not in printed


def test_pairs_that_are_linked_otherwise_are_groups_too():
    bank = random_unit(10, 20)
    assert similarity.near_duplicates(bank, 0.99) == []
    linked = np.array([2]), np.array([7])
    ((first, second),) = similarity.near_duplicates(bank, 0.99, also_linked=lambda *_: linked)
    assert (first[0], second[0]) == (2, 7)
    assert second[1] == pytest.approx(float(bank[2] @ bank[7]), abs=1e-6)


def test_copies_are_not_called_similar_images_if_their_pixels_are_the_same(given, tmp_path, monkeypatch):
    monkeypatch.setattr(similarity, "default_threshold", lambda _: (0.9999, "as strict as can be"))
    for i in range(30):
        digit(100 + i).save(tmp_path / f"{i}.png")
    for side in (40, 50, 60, 70, 80):
        digit(103).resize((side, side), Image.Resampling.BICUBIC).save(tmp_path / f"3 at {side}.jpg", quality=60)
    result, _ = quietly(given.run, source=tmp_path, duplicates=True)
    assert [len(group) for group in result["groups"]] == [6]
    assert render.group_titles(result) == ["group 1, 6 images"]
    for image in result["groups"][0]:
        image["same_pixels"] = False
    assert "not copies" in render.group_titles(result)[0]


def test_a_threshold_is_taken_as_given(given, copies):
    assert quietly(given.run, source=copies, duplicates=True, threshold=1.0)[0]["groups"][0][1]["similarity"] == 1
    assert len(quietly(given.run, source=copies, duplicates=True, threshold=0.01)[0]["groups"][0]) == 45


def test_identical_images_cause_a_warning_about_collapse(given, tmp_path, capsys):
    for i in range(14):
        digit(0).save(tmp_path / f"{i}.png")
    result, _ = quietly(given.run, source=tmp_path, duplicates=True)
    assert [len(group) for group in result["groups"]] == [14]
    assert "not copies" not in render.group_titles(result)[0]
    assert "collapsed" in capsys.readouterr().err


def test_a_topk_above_the_number_of_readable_images_returns_all_of_them(given, tmp_path, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("4.png", "5.png", "6.png"):
        shutil.copy(given.folder / name, folder)
    (folder / "broken.png").write_text("no image")
    capsys.readouterr()
    found = search(given.run, folder / "4.png", source=folder, topk=50, verbose=Reporter())
    assert found["topk"] == len(found["queries"][0]["nearest"]) == 2
    assert "there are only 2 images other than the query, not 50" in capsys.readouterr().err
    assert len(search(given.run, source=folder, outliers=True, topk=50)["outliers"]) == 3
    (folder / "6.png").unlink()
    search(given.run, folder / "4.png", source=folder, topk=50, verbose=Reporter())
    assert "there is only 1 image other than the query, not 50" in capsys.readouterr().err


def test_the_title_of_a_large_group_says_if_its_images_are_not_copies():
    def group(count):
        return [{"file": "x", "similarity": 1.0, "same_content_as": None, "same_pixels": False}] * count

    result = {"threshold": 0.9, "groups": [group(6), group(6), group(4)], "lowest": [0.85, 0.91, 0.5]}
    varied, copies, few = render.group_titles(result)
    assert varied == "group 1, 6 images; probably similar images, not copies: the lowest similarity of two is 0.8500"
    assert copies == "group 2, 6 images"
    assert few == "group 3, 4 images"
    some = [*group(5), {"file": "y", "similarity": 1.0, "same_content_as": "x", "same_pixels": True}]
    title = render.group_titles(result | {"groups": [some, some, some]})[0]
    assert title.startswith("group 1, 6 images; probably similar images, besides the copies that are marked: ")
    strict = result | {"threshold": 0.999, "lowest": [0.995] * 3}
    assert "not copies" in render.group_titles(strict)[0], "below the threshold"


def test_the_lowest_similarity_is_between_two_images_of_the_group():
    angles = np.deg2rad([0, 10, 40, 90])
    bank = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    assert similarity.lowest_similarity(bank, [0, 1, 2]) == pytest.approx(np.cos(np.deg2rad(40)), abs=1e-6)


def test_noise_among_digits_is_the_first_outlier(given, copies, tmp_path):
    folder = tmp_path / "with noise"
    shutil.copytree(copies, folder)
    noise(0).save(folder / "20 noise.png")
    result, printed = quietly(given.run, source=folder, outliers=True, topk=3)
    assert result["outliers"][0]["file"] == "20 noise.png"
    scores = [row["score"] for row in result["outliers"]]
    assert scores == sorted(scores)
    assert "   1  " in printed


def test_contents_are_compared_by_bytes_and_missing_files_are_ignored(tmp_path):
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2"), ("d", b"22"), ("e", b"1"), ("f", b"")):
        (tmp_path / name).write_bytes(content)
    names = ["a", "b", "c", "d", "e", "f"]
    images = ImageFiles("", names, paths=[tmp_path / name for name in names])
    (tmp_path / "e").unlink()
    assert first_with_same_content(images, names) == {"b": "a"}
    assert render.thumbnail(images, "e") is None


def test_thumbnails_are_small_and_tiny_images_keep_their_pixels(tmp_path):
    noise(0).resize((900, 300)).save(tmp_path / "large.png")
    digit(0).resize((8, 8)).save(tmp_path / "tiny.png")
    noise(0).resize((4000, 2000)).save(tmp_path / "huge.jpg")
    names = {"large.png": ((192, 64), "JPEG", False), "huge.jpg": ((192, 96), "JPEG", False)}
    names |= {"tiny.png": ((8, 8), "PNG", True)}
    images = ImageFiles("", [*names, "absent.png"], paths=[tmp_path / name for name in (*names, "absent.png")])
    assert images.open(1).size == (4000, 2000)
    assert max(images.open(1, 384).size) < 4000, "decoded at a smaller size"
    for name, (size, kind, tiny) in names.items():
        thumb = render.thumbnail(images, name)
        with Image.open(io.BytesIO(base64.b64decode(thumb.data_uri.partition(",")[2]))) as image:
            assert (image.size, image.format, thumb.lossless) == (size, kind, tiny)
    assert render.thumbnail(images, "absent.png") is None


# Forms


@pytest.mark.parametrize("kind", [{"query": NAMES}, {"duplicates": True, "threshold": 0.5}, {"outliers": True}])
def test_json_is_the_result_and_names_survive_in_every_format(given, kind, monkeypatch):
    monkeypatch.setattr(render, "MAX_IN_GROUP", 96)
    options = kind if kind.get("threshold") else {"topk": 90, **kind}
    result, printed = quietly(given.run, **options, output="json")
    assert json.loads(printed) == result
    mentioned = [name for name in NAMES if name in _strings(result)]
    assert ODD in mentioned
    terminal = quietly(given.run, **options)[1]
    lines = terminal.splitlines()
    for name in mentioned:
        assert any(line.endswith(f"  {name}") for line in lines), name
    out = given.root / "odd.html"
    quietly(given.run, **options, output="html", out=out, overwrite=True)
    assert set(mentioned) <= set(_Page.of(out).names)


def _strings(value) -> set[str]:
    if isinstance(value, dict | list):
        return set().union(*map(_strings, value.values() if isinstance(value, dict) else value))
    return {value} if isinstance(value, str) else set()


class _Page(html.parser.HTMLParser):
    """Tags, attributes, and the texts of bdi elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.names: list[str] = []
        self.inside = False

    @classmethod
    def of(cls, path: Path) -> "_Page":
        made = cls()
        made.feed(path.read_text(encoding="utf-8"))
        return made

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.inside = tag == "bdi"
        self.names += [""] * self.inside

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "bdi"

    def handle_data(self, data):
        if self.inside:
            self.names[-1] += data


def test_the_page_has_no_script_no_handler_and_no_request(given):
    out = given.root / "page.html"
    quietly(given.run, [given.folder / name for name in NAMES], topk=90, output="html", out=out)
    made = _Page.of(out)
    assert set(made.tags) == {
        *("html", "head", "meta", "link", "title", "style"),
        *("h1", "h2", "p", "bdi", "div", "figure", "img", "figcaption", "b", "i"),
    }
    assert [a for a in made.attributes if a[1].startswith("on") or a[1] in ("href", "style")] == [
        ("link", "href", "data:,")  # the empty icon, so that none is asked for
    ]
    sources = [value for _, name, value in made.attributes if name == "src"]
    assert len(sources) == 6 * 91
    assert all(value.startswith("data:image/") for value in sources)
    assert "http://" not in out.read_text()
    assert "https://" not in out.read_text()


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium to look at the page with")
def test_a_browser_shows_the_names_as_they_are_and_runs_none_of_them(given):
    out = given.root / "browser.html"
    quietly(given.run, [given.folder / name for name in NAMES], topk=3, output="html", out=out)
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={given.root / 'profile'}"]
    dom = subprocess.run([*words, "--dump-dom", out.as_uri()], capture_output=True, text=True, timeout=600).stdout
    assert "<title>Nearest images</title>" in dom
    assert f"<bdi>{given.folder}/{ODD}</bdi>".replace("<img", "&lt;img").replace("'>", "'&gt;") in dom
    assert dom.count("<img ") == 6 * 4


def test_a_long_result_is_cut_on_the_page_and_says_so(given, monkeypatch):
    monkeypatch.setattr(render, "MAX_TILES", 8)
    monkeypatch.setattr(render, "MAX_IN_GROUP", 5)
    out = given.root / "long.html"
    quietly(given.run, given.folder, topk=3, output="html", out=out)
    assert _Page.of(out).tags.count("img") == 8
    assert "94 more queries are not shown" in out.read_text()
    quietly(given.run, duplicates=True, threshold=0.1, output="html", out=out, overwrite=True)
    assert _Page.of(out).tags.count("img") == 5
    assert "91 more images of this group" in out.read_text()
    quietly(given.run, outliers=True, topk=10, output="html", out=out, overwrite=True)
    assert f"images of {given.folder.name}." in out.read_text()
    assert str(given.folder.parent) not in out.read_text()  # it may be shown to others
    assert "2 more images are not shown" in out.read_text()


def test_with_out_the_result_goes_to_the_file_and_its_name_to_stdout(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert quietly(given.run, "4.png", out=tmp_path / "a.txt")[1] == f"{tmp_path / 'a.txt'}\n"
    assert (tmp_path / "a.txt").read_text().startswith("the 10 nearest among 96 images")
    assert quietly(given.run, outliers=True, output="html")[1] == f"{given.run.path / 'outliers.html'}\n"
    result, _ = quietly(given.run, "4.png", output="json", out=tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == result


def test_a_name_cannot_steer_the_terminal():
    assert escape_controls("a\x1b[31m\nb\u2028\udcff é 数 👩‍👧.png") == "a\\x1b[31m\\nb\\u2028\\udcff é 数 👩‍👧.png"


# Bad input


@pytest.mark.parametrize(
    "options, says",
    [
        ({}, "give exactly one of"),
        ({"query": "4.png", "outliers": True}, "give exactly one of"),
        ({"query": "absent.png"}, "no such image: absent.png is not a file, .* in the source$"),
        ({"query": "4.jpg"}, "no such image: 4.jpg is not a file, .* in the source, did you mean 4.png?"),
        ({"query": ["4.png", "x" * 5000]}, "name is too long"),
        ({"query": "{root}/broken.png"}, "cannot read .*broken.png: not an image"),
        ({"query": "{root}/empty"}, "no images in .*empty"),
        ({"query": "{root}/unreadable"}, "none of the 1 query images can be read"),
        ({"query": "4.png", "topk": 0}, "topk must be at least 1"),
        ({"query": "{folder}/4.png", "source": "{folder}/4.png"}, "there are no images other than the query"),
        ({"outliers": True, "topk": 1, "source": "{folder}/4.png"}, "outliers=True needs at least two images"),
        ({"duplicates": True, "source": "{folder}/4.png"}, "duplicates=True needs at least two images"),
        ({"duplicates": True, "threshold": 1.5}, "threshold=1.5"),
        ({"duplicates": True, "threshold": -0.1}, "threshold=-0.1"),
        ({"duplicates": True, "threshold": float("nan")}, "threshold=nan"),
        ({"query": "4.png", "threshold": 0.9}, "threshold works only with duplicates=True"),
        ({"duplicates": True, "topk": 10}, "duplicates=True lists all groups: leave out topk"),
        ({"query": "4.png", "output": "htm"}, "did you mean 'html'"),
        ({"query": "4.png", "method": "fais"}, "did you mean 'faiss'"),
        ({"outliers": True, "method": "faiss"}, "not with outliers=True"),
        ({"query": "4.png", "out": "{root}/no/where.json"}, "is not a folder"),
        ({"query": "4.png", "out": "{root}"}, "is a folder"),
        ({"query": "4.png", "source": "{root}/nowhere"}, "is not a folder, an image file or a data set"),
        ({"query": "4.png", "source": "{root}/empty"}, "no images in"),
    ],
)
def test_bad_input_gives_an_error_of_at_most_two_lines(given, options, says):
    for name in ("empty", "unreadable"):
        (given.root / name).mkdir(exist_ok=True)
    (given.root / "broken.png").write_text("no image")
    (given.root / "unreadable" / "x.png").write_text("no image")
    places = {"root": given.root, "folder": given.folder}
    options = {k: v.format(**places) if isinstance(v, str) else v for k, v in options.items()}
    with pytest.raises(UserError, match=says) as error:
        quietly(given.run, **options)
    assert len(str(error.value).splitlines()) <= 2


def test_a_run_whose_images_are_gone_suggests_a_source(given, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(given.run.path, run)
    settings = (run / "config.yaml").read_text().replace(str(given.folder), "gone")
    (run / "config.yaml").write_text(settings)
    with pytest.raises(UserError, match=r"gone, which .* was trained on, is gone: use source='FOLDER'"):
        quietly(run, "4.png")


def test_without_faiss_the_error_says_what_to_install(given, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(UserError, match="pip install faiss-cpu"):
        quietly(given.run, "4.png", method="faiss")
