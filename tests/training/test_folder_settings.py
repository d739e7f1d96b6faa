"""Settings chosen for a folder: sensible at every size, explained, and never against the user's own."""

import pytest
from PIL import Image

import mixnn
from mixnn.config import Config
from mixnn.data import open_dataset
from mixnn.data.images import list_files
from mixnn.progress import Reporter
from mixnn.training import folder_settings, judgement
from mixnn.training.configure import choices, open_data, resolve
from mixnn.training.folder_settings import OPTIONS, choose
from mixnn.training.trainer import configured_views
from tests.clock import Clock, use_clock

FROM_NOTHING = {"init_from": "none"}


def chosen(num, side, cuda=False, given=None, options=None):
    return {c.name: c.value for c in choose(num, side, given or {}, options or {}, cuda)}


@pytest.mark.parametrize("given", [{}, FROM_NOTHING])
@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("side", [0, 5, 8, 28, 32, 64, 100, 224, 4000])
@pytest.mark.parametrize("num", [4, 10, 60, 500, 1797, 5000, 100_000, 2_000_000])
def test_whatever_the_folder_the_settings_are_valid(num, side, cuda, given):
    found = choose(num, side, given, {}, cuda)
    settings = given | {c.name: c.value for c in found if c.name not in OPTIONS}
    config = Config(data="x", **settings)  # checks itself
    options = {c.name: c.value for c in found if c.name in OPTIONS}
    assert config.batch_size <= num
    assert options["support_size"] >= config.batch_size
    assert 8 <= config.image_size <= 128
    assert config.warmup_epochs < config.epochs
    assert all(c.reason and str(c).startswith(f"{c.name} {c.value}: ") for c in found)


@pytest.mark.parametrize("epochs, warmup", [(1, 0), (2, 1), (19, 1), (20, 2), (50, 5), (800, 5)])
@pytest.mark.parametrize("start", [{}, FROM_NOTHING])
def test_the_warm_up_ends_before_the_run_does(epochs, warmup, start):
    assert chosen(500, 32, given=start | {"epochs": epochs})["warmup_epochs"] == warmup


def test_a_long_run_from_good_weights_has_a_lower_rate():
    rates = [chosen(640, 32, given={"epochs": epochs})["lr"] for epochs in (10, 60, 500)]  # 10 steps per epoch
    assert rates == [2.4e-3, 2.4e-3, pytest.approx(0.35 * 2.4e-3, rel=0.02)]


def test_a_run_of_no_epochs_needs_no_rate():
    assert not {"lr", "warmup_epochs"} & chosen(500, 32, given=FROM_NOTHING | {"epochs": 0}).keys()
    assert "warmup_epochs" not in chosen(500, 32, given={"epochs": 0})


@pytest.mark.parametrize(
    "method, told",
    [
        ("mnn", {"support_size", "hidden", "symmetric"}),
        ("simclr", {"hidden", "symmetric"}),
        ("supervised", set()),
    ],
)
def test_only_options_that_the_method_has_are_chosen_and_files_that_are_no_images_do_not_count(tmp_path, method, told):
    for i in range(8):
        Image.new("RGB", (8, 8), (30 * i, 0, 0)).save(tmp_path / f"{i}.png")
    (tmp_path / "broken.png").write_text("nonsense")
    dataset = open_dataset(tmp_path)
    _, images = resolve(dataset, {}, {"batch_size": 2})
    found = {c.name: c for c in choices(dataset, {}, {"method": method, "device": "cpu"}, len(images))}
    assert set(OPTIONS) & found.keys() == told
    assert found["batch_size"].reason == "8 images give 4 steps per epoch"


def test_a_gpu_gets_larger_images_networks_and_batches():
    cpu, gpu = (chosen(50_000, 300, cuda, FROM_NOTHING) for cuda in (False, True))
    assert (cpu["image_size"], cpu["backbone"], cpu["batch_size"]) == (32, "resnet8", 128)
    assert (gpu["image_size"], gpu["backbone"], gpu["batch_size"], gpu["epochs"]) == (128, "resnet18", 256, 200)
    assert gpu["support_size"] == 4096
    assert "lr" not in gpu  # the paper's, for so many steps


@pytest.mark.parametrize("cuda, size, steps", [(False, 128, 600), (True, 128, 1_200)])
@pytest.mark.parametrize("side", [8, 300])
def test_a_folder_starts_from_imagenet_weights_whatever_the_size_of_its_images(side, cuda, size, steps):
    found = chosen(2_000, side, cuda)
    assert (found["init_from"], found["backbone"], found["normalization"]) == (
        "imagenet", "efficientnet_lite0", "tensorflow",
    )  # fmt: skip
    assert (found["image_size"], found["encode_size"], found["batch_size"]) == (size, 224, 64)
    assert found["epochs"] * (2_000 // 64) == pytest.approx(steps, rel=0.1)
    assert (found["optimizer"], found["batch_norm"], found["symmetric"]) == ("adamw", "frozen", False)


@pytest.mark.parametrize(
    "given, start",
    [
        ({}, "imagenet"),
        ({"image_size": 32}, "imagenet"),
        ({"image_size": 0}, "imagenet"),
        ({"image_size": 31}, "none"),
        ({"backbone": "resnet8"}, "none"),
    ],
)
def test_what_the_weights_do_not_fit_starts_from_nothing(given, start):
    found = chosen(1797, 200, given=given)
    assert found["init_from"] == start
    assert ("encode_size" in found) == (start == "imagenet")


def test_tiny_images_keep_their_size_and_most_of_each_crop():
    found = chosen(1797, 8, given=FROM_NOTHING)
    assert (found["image_size"], found["crop_area"], found["batch_size"], found["support_size"]) == (8, 0.6, 64, 512)


def test_what_the_user_gave_is_left_alone_and_counts():
    given = {"batch_size": "32", "image_size": 24, "lr": 0.1}
    for start in ({}, FROM_NOTHING, {"init_from": "imagenet", "image_size": 40}):
        found = chosen(1797, 200, given=given | start, options={"support_size": 100})
        assert not {"batch_size", "image_size", "lr", "support_size", *start} & set(found)
        assert found["bn_groups"] == 1
    for start, groups, size in ((FROM_NOTHING, [1, 8, 1, 16], 32), ({}, [1, 1, 1, 1], 128)):
        several = [chosen(1797, 200, given=start | {"batch_size": n}) for n in (128, 256, 300, 512)]
        assert [found["bn_groups"] for found in several] == groups
        assert chosen(1797, 200, given=start | {"image_size": 0})["image_size"] == size  # 0 stands for: choose


@pytest.mark.parametrize("given, flip", [({}, 0.5), ({"mirror": "yes"}, 0.5), ({"mirror": "no"}, 0.0)])
def test_a_folders_images_are_flipped_unless_a_mirrored_one_is_another(tmp_path, given, flip):
    for i in range(4):
        Image.new("RGB", (8, 8), (60 * i, 0, 0)).save(tmp_path / f"{i}.png")
    assert chosen(4, 8, given=given).get("mirror", "given") == ("given" if given else "yes")
    dataset = open_data(tmp_path, given)
    config, images = resolve(dataset, {}, given | {"batch_size": 2})
    assert [view.flip for view in configured_views(config, images.mirror, ("strong", "plain"))] == [flip, flip]
    assert dataset.load("train", 8).mirror == images.mirror == bool(flip), "the linear probe flips alike"


def test_the_embedded_digits_are_never_flipped():
    assert not open_dataset("digits", mirror=True).load("train").mirror


def test_the_typical_side_is_the_median_of_those_that_can_be_read(tmp_path):
    for i, side in enumerate((10, 20, 30, 40, 50)):
        Image.new("RGB", (100, side)).save(tmp_path / f"{i}.png")
    (tmp_path / "broken.png").write_bytes(b"x")
    assert list_files(sorted(tmp_path.iterdir())).typical_side == 30
    assert list_files([tmp_path / "broken.png"]).typical_side == 0


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(40):
        Image.new("RGB", (20 + i % 3, 24), (6 * i, 100, 0)).save(folder / f"{i}.png")
    return folder


@pytest.fixture
def tiny_recipe(monkeypatch):
    monkeypatch.setattr(folder_settings, "TRAIN_SIZE", 32)
    monkeypatch.setattr(folder_settings, "ENCODE_SIZE", 40)
    monkeypatch.setattr(folder_settings, "HIDDEN", 16)
    return monkeypatch


def test_a_folder_is_trained_with_what_was_chosen_within_the_budget(photos, tmp_path, capfd, monkeypatch):
    use_clock(monkeypatch, Clock(), lambda _: 1.0)
    run = mixnn.pretrain(photos, out=tmp_path / "run", time_budget="1m", init_from="none", verbose=Reporter())
    said = capfd.readouterr().err
    assert "40 images, shorter side 20 to 22" in said
    assert "image_size 20: the shorter side is about 21 pixels" in said
    assert "about 14 epochs fit: 1000 ms per step" in said
    assert "lr 0.3: larger than usual, because the run has only 56 steps" in said
    assert "judged without labels: it finds an image's other view among 256 crops of 40 images in " in said
    assert (run.config.image_size, run.config.backbone) == (20, "resnet8")
    assert len(run.metrics()) >= run.config.epochs >= 13


@pytest.mark.usefixtures("tiny_recipe")
def test_by_default_a_folder_trains_the_imagenet_encoder(photos, tmp_path, capfd):
    run = mixnn.pretrain(photos, out=tmp_path / "run", epochs=1, batch_size=20, verbose=Reporter())
    said = capfd.readouterr().err
    assert "init_from imagenet: use init_from='none' to start from nothing" in said
    assert "image_size 32: " in said
    assert "encode_size 40: " in said
    assert "recipe: optimizer adamw, lr 0.0024, " in said
    config = run.config
    assert (config.init_from, config.backbone, config.batch_norm) == ("imagenet", "efficientnet_lite0", "frozen")
    assert (config.options["symmetric"], config.options["hidden"]) == (False, 16)
    assert mixnn.load(run).size == 40


@pytest.mark.parametrize(
    "found, views, area", [(0.0, "w/w", 0.4), (0.6992, "w/w", 0.4), (0.7, "s/w", 0.6), (1.0, "s/w", 0.6)]
)
def test_colors_change_and_crops_are_large_from_seven_tenths_of_the_views_on(found, views, area):
    chosen = judgement.views_for({"view_retrieval": found})
    assert [(choice.name, choice.value) for choice in chosen] == [("views", views), ("crop_area", area)]


@pytest.mark.parametrize("method", ["mnn", "msf"])
@pytest.mark.parametrize("known, views, area, other", [(0.0, "s/w", 0.6, 1.01), (1.01, "w/w", 0.4, 0.0)])
def test_the_views_follow_from_how_well_the_start_knows_the_images(
    photos, tmp_path, tiny_recipe, capfd, method, known, views, area, other
):
    tiny_recipe.setattr(judgement, "MIN_KNOWN", known)
    settings = {"epochs": 1, "batch_size": 20, "method": method, "verbose": Reporter()}
    run = mixnn.pretrain(photos, out=tmp_path / "run", **settings)
    assert (run.config.options["views"], run.config.crop_area) == (views, area)
    retrieval, told = run.judgement()["start"]["view_retrieval"], capfd.readouterr().err
    assert f"views {views}: the start finds an image's other view in {retrieval:.1%} of cases" in told
    assert told.count(f"crop_area {area}: ") == told.count("crop_area ") == 1
    tiny_recipe.setattr(judgement, "MIN_KNOWN", other)
    config = mixnn.pretrain(resume=run, epochs=2, verbose=Reporter()).config
    assert (config.options["views"], config.crop_area) == (views, area)


@pytest.mark.parametrize(
    "given, views, said",
    [
        ({"views": "s/s"}, "s/s", ""),
        ({"views": {"strong.blur": 0.2}}, "s/w", "views s/w: you changed the view strong"),
        ({"views": {"weak.flip": 0}}, "w/w", "views w/w: the start finds"),
        ({"views": {"1.area": [0.5, 1.0]}}, "w/w", "views w/w: the start finds"),
    ],
)
def test_what_the_user_says_about_views_is_respected(photos, tmp_path, tiny_recipe, capfd, given, views, said):
    tiny_recipe.setattr(judgement, "MIN_KNOWN", 1.01)
    run = mixnn.pretrain(photos, out=tmp_path / "run", epochs=1, batch_size=20, verbose=Reporter(), **given)
    told = capfd.readouterr().err
    assert run.config.options["views"] == views
    assert said in told if said else "views " not in told


@pytest.mark.parametrize(
    "given, used, told",
    [
        ({}, ("s/w", 0.6), ["views s/w", "crop_area 0.6"]),
        ({"crop_area": 0.3}, ("s/w", 0.3), ["views s/w"]),
        ({"views": "w/w"}, ("w/w", 0.6), ["crop_area 0.6"]),
        ({"time_budget": "1h"}, ("s/w", 0.6), ["views s/w", "crop_area 0.6"]),
    ],
)
def test_views_and_crops_are_chosen_apart(photos, tmp_path, tiny_recipe, capfd, given, used, told):
    tiny_recipe.setattr(judgement, "MIN_KNOWN", 0.0)
    if "time_budget" in given:
        use_clock(tiny_recipe, Clock(), lambda _: 200.0)
    else:
        given = given | {"epochs": 1}
    config = mixnn.pretrain(photos, out=tmp_path / "run", batch_size=20, verbose=Reporter(), **given).config
    assert (config.options["views"], config.crop_area) == used
    said = capfd.readouterr().err
    assert [line.partition(":")[0] for line in said.splitlines() if line.startswith(("views ", "crop_area "))] == told
    assert ", crop_area" not in said  # of the recipe


def test_a_run_from_nothing_and_a_method_without_views_choose_none(photos, tmp_path, tiny_recipe, capfd):
    tiny_recipe.setattr(judgement, "MIN_KNOWN", 1.01)
    settings = {"epochs": 1, "batch_size": 20, "verbose": Reporter()}
    run = mixnn.pretrain(photos, out=tmp_path / "nothing", init_from="none", **settings)
    assert run.config.options["views"] == "s/w"
    images = sorted(photos.iterdir())
    labels = [str(i % 2) for i in range(len(images))]
    mixnn.pretrain(images, out=tmp_path / "supervised", method="supervised", labels=labels, **settings)
    assert "views " not in capfd.readouterr().err
