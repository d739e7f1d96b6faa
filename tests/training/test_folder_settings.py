"""Settings chosen for a folder: sensible at every size, explained, and never against the user's own."""

import pytest
from PIL import Image

import mixnn
from mixnn.config import Config
from mixnn.data import open_dataset
from mixnn.data.images import list_files
from mixnn.training.configure import choices, open_data, resolve
from mixnn.training.folder_settings import OPTIONS, choose
from mixnn.training.trainer import configured_views
from tests.clock import Clock, use_clock


def chosen(num, side, cuda=False, given=None, options=None):
    return {c.name: c.value for c in choose(num, side, given or {}, options or {}, cuda)}


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("side", [0, 5, 8, 28, 32, 64, 100, 224, 4000])
@pytest.mark.parametrize("num", [4, 10, 60, 500, 1797, 5000, 100_000, 2_000_000])
def test_whatever_the_folder_the_settings_are_valid(num, side, cuda):
    found = choose(num, side, {}, {}, cuda)
    settings = {c.name: c.value for c in found if c.name not in OPTIONS}
    config = Config(data="x", **settings)  # checks itself
    options = {c.name: c.value for c in found if c.name in OPTIONS}
    assert config.batch_size <= num
    assert options["support_size"] >= config.batch_size
    assert 8 <= config.image_size <= 128
    assert config.warmup_epochs < config.epochs
    assert all(c.reason and str(c).startswith(f"{c.name} {c.value}: ") for c in found)


@pytest.mark.parametrize("epochs, warmup", [(1, 0), (2, 1), (19, 1), (20, 2), (50, 5), (800, 5)])
def test_the_warm_up_ends_before_the_run_does(epochs, warmup):
    assert chosen(500, 32, given={"epochs": epochs})["warmup_epochs"] == warmup


def test_a_run_of_no_epochs_needs_no_rate():
    assert not {"lr", "warmup_epochs"} & chosen(500, 32, given={"epochs": 0}).keys()


@pytest.mark.parametrize(
    "method, told", [("mnn", {"support_size", "hidden"}), ("simclr", {"hidden"}), ("supervised", set())]
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
    cpu, gpu = chosen(50_000, 300), chosen(50_000, 300, cuda=True)
    assert (cpu["image_size"], cpu["backbone"], cpu["batch_size"]) == (32, "resnet8", 128)
    assert (gpu["image_size"], gpu["backbone"], gpu["batch_size"], gpu["epochs"]) == (128, "resnet18", 256, 200)
    assert gpu["support_size"] == 4096
    assert "lr" not in gpu  # the paper's, for so many steps


def test_tiny_images_keep_their_size_and_most_of_each_crop():
    found = chosen(1797, 8)
    assert (found["image_size"], found["crop_area"], found["batch_size"], found["support_size"]) == (8, 0.6, 64, 512)


def test_what_the_user_gave_is_left_alone_and_counts():
    given = {"batch_size": "32", "image_size": 24, "lr": 0.1}
    found = chosen(1797, 200, given=given, options={"support_size": 100})
    assert not {"batch_size", "image_size", "lr", "support_size"} & set(found)
    assert found["bn_groups"] == 1
    assert [chosen(1797, 200, given={"batch_size": n})["bn_groups"] for n in (128, 256, 300, 512)] == [1, 8, 1, 16]
    assert chosen(1797, 200, given={"image_size": 0})["image_size"] == 32  # 0 stands for: choose


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


def test_a_folder_is_trained_with_what_was_chosen_within_the_budget(tmp_path, capfd, monkeypatch):
    use_clock(monkeypatch, Clock(), lambda _: 1.0)
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(40):
        Image.new("RGB", (20 + i % 3, 24), (6 * i, 100, 0)).save(folder / f"{i}.png")
    run = mixnn.pretrain(folder, out=tmp_path / "run", time_budget="1m")
    said = capfd.readouterr().err
    assert "40 images, shorter side 20 to 22" in said
    assert "image_size 20: the shorter side is about 21 pixels" in said
    assert "about 14 epochs fit: 1000 ms per step" in said
    assert "lr 0.3: larger than usual, because the run has only 56 steps" in said
    assert (run.config.image_size, run.config.backbone) == (20, "resnet8")
    assert len(run.metrics()) >= run.config.epochs >= 13
