"""What a run starts from: every kind of --init-from, the settings that follow from it, and clear errors."""

import importlib
import sys
import types
import urllib.error
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import mixnn
from mixnn.config import Config, UserError
from mixnn.data import open_dataset
from mixnn.data.image_set import NORMALIZATIONS
from mixnn.nn.resnet import ResNet
from mixnn.progress import Reporter
from mixnn.runs import weights
from mixnn.runs.layout import Layout
from mixnn.runs.weights import KEPT, STUDENT, initial_backbone, start_defaults
from mixnn.training.configure import configure, resolve
from mixnn.training.folder_settings import RECIPE, Choice, Chooser, choose, lines

SMALL = {"image_size": 8, "encode_size": 8, "batch_size": 4, "epochs": 0, "device": "cpu"}
OPTIONS = {"hidden": 16, "dim": 8, "support_size": 16}


def resnet8(size=8):
    torch.manual_seed(3)
    return ResNet("resnet8", size, 1).eval()


def timm_network():
    network = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.num_features = 4
    return network


class FakeTimm(types.ModuleType):
    """A timm with one small network, whose published weights are in a local file."""

    def __init__(self, file):
        super().__init__("timm")
        self.file, self.error = file, None
        self.mean, self.std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)

    def create_model(self, name, pretrained, num_classes):
        assert num_classes == 0
        name, _, tag = name.partition(".")
        if name not in self.list_models():
            raise RuntimeError(f"Unknown model ({name})")
        if tag:
            raise RuntimeError(f"Invalid pretrained tag ({tag}) for {name}.")
        network = timm_network()
        network.pretrained_cfg = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
        if pretrained:
            if self.error:
                raise self.error
            network.load_state_dict(torch.load(self.file, weights_only=True))
        return network

    def list_models(self):
        return ["tiny", "small"]

    def get_pretrained_cfg(self, name):
        if name == "small":
            return None  # as for a model of a hub
        return types.SimpleNamespace(input_size=(3, 64, 64), mean=self.mean, std=self.std)


class FakeModels(types.ModuleType):
    """A torchvision.models whose published weights are in a local file."""

    def __init__(self, file):
        super().__init__("torchvision.models")
        self.file, self.error = file, None
        self.mean, self.std = [0.48, 0.45, 0.4], [0.25, 0.25, 0.2]

    def get_model_weights(self, name):
        assert name == "resnet8"
        transforms = types.SimpleNamespace(mean=self.mean, std=self.std)
        return types.SimpleNamespace(DEFAULT=types.SimpleNamespace(transforms=lambda: transforms))

    def get_model(self, name, weights):
        assert (name, weights) == ("resnet8", "DEFAULT")
        if self.error:
            raise self.error
        network = ResNet(name, 128, 1)
        network.load_state_dict(torch.load(self.file, weights_only=True))
        network.fc = nn.Linear(network.num_features, 1000)
        return network


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """The current folder, with eight photographs and files of weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    rng = np.random.default_rng(0)
    for i in range(8):
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(tmp_path / "photos" / f"{i}.png")
    torch.save({"state_dict": resnet8().state_dict()}, "weights.pth")
    save_file(resnet8().state_dict(), "weights.safetensors")
    return tmp_path


@pytest.fixture
def timm(place, monkeypatch):
    torch.manual_seed(5)
    torch.save(timm_network().state_dict(), place / "timm.pth")
    module = FakeTimm(place / "timm.pth")
    monkeypatch.setitem(sys.modules, "timm", module)
    return module


@pytest.fixture
def torchvision(place, monkeypatch):
    """resnet8 stands for one of torchvision's own, which are larger."""
    torch.save(resnet8(128).state_dict(), place / "torchvision.pth")
    module = FakeModels(place / "torchvision.pth")
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", module)
    monkeypatch.setattr(weights, "PUBLISHED_RESNETS", ("resnet8", "resnet18"))
    return module


def pretrain(source="", out="run", **settings):
    settings = SMALL | ({"init_from": source} if source else {}) | settings
    settings = {name: value for name, value in settings.items() if value is not None}
    return mixnn.pretrain("photos", out=out, options=OPTIONS, verbose=Reporter(quiet=True), **settings)


def tensors_of(run, prefix):
    tensors, _ = run.load_checkpoint(pytest.fail)
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def assert_starts_with(run, wanted):
    """Student, teacher and the encoder of a run that has not trained have these weights."""
    encoder = mixnn.load(run, "cpu").backbone.state_dict()
    for found in (tensors_of(run, STUDENT), tensors_of(run, "method.teacher.f."), tensors_of(run, KEPT), encoder):
        assert found.keys() == wanted.keys()
        assert [name for name, t in wanted.items() if not torch.equal(found[name], t)] == []


# Each kind of start


@pytest.mark.parametrize("file", ["weights.pth", "weights.safetensors", "~/weights.pth"])
def test_a_run_starts_from_a_file_of_weights(place, monkeypatch, file):
    monkeypatch.setenv("HOME", str(place))
    run = pretrain(file)
    assert run.config.backbone == "resnet8"
    assert run.config.init_from == str(place / file.removeprefix("~/"))
    assert_starts_with(run, resnet8().state_dict())


def test_a_run_starts_from_another_run_and_has_its_sizes_and_normalization(place):
    pretrain("weights.pth", "first", image_size=12, encode_size=10, normalization="tensorflow")
    second = pretrain("first", "second", image_size=None, encode_size=None)
    config = second.config
    assert (config.backbone, config.image_size, config.encode_size) == ("resnet8", 12, 10)
    assert config.normalization == "tensorflow"
    assert config.init_from == str(place / "first")
    assert_starts_with(second, resnet8().state_dict())


def test_a_run_starts_from_the_imagenet_weights_by_default():
    run = pretrain(image_size=32, encode_size=32)
    config = run.config
    assert (config.init_from, config.backbone, config.normalization) == ("imagenet", "efficientnet_lite0", "tensorflow")
    assert_starts_with(run, mixnn.load("imagenet", "cpu").backbone.state_dict())


def test_a_run_starts_with_the_random_weights_of_its_seed_if_it_is_to():
    run = pretrain("none")
    assert (run.config.init_from, run.config.backbone, run.config.normalization) == ("none", "resnet8", "data")
    assert tensors_of(run, KEPT) == {}
    again = initial_backbone(run.config).state_dict()
    assert all(torch.equal(t, again[name]) for name, t in tensors_of(run, STUDENT).items())
    other = initial_backbone(replace(run.config, seed=1)).state_dict()
    assert not torch.equal(other["conv1.weight"], again["conv1.weight"])


def test_a_run_starts_from_a_model_of_timms_with_its_published_weights(timm):
    run = pretrain("timm:tiny")
    assert (run.config.backbone, run.config.normalization) == ("timm:tiny", "0.5,0.5,0.5/0.25,0.25,0.25")
    published = torch.load(timm.file, weights_only=True)
    assert_starts_with(run, {f"model.{name}": t for name, t in published.items()})


def test_a_run_starts_from_a_resnet_of_torchvisions_with_its_published_weights(torchvision):
    run = pretrain("torchvision:resnet8", image_size=0, encode_size=32)
    assert (run.config.backbone, run.config.normalization) == ("resnet8", "0.48,0.45,0.4/0.25,0.25,0.2")
    assert run.config.image_size == 128  # its conv1 is 7x7
    assert_starts_with(run, torch.load(torchvision.file, weights_only=True))


@pytest.mark.parametrize("name", ["imagenet", "none"])
def test_a_folder_of_the_same_name_is_not_taken_for_a_start(place, name):
    (place / name).mkdir()
    settings = {"init_from": name, "image_size": 32, "encode_size": 32, "batch_size": 4}
    config, _ = resolve(open_dataset("photos"), {}, settings)
    assert config.init_from == name
    initial_backbone(config)
    assert mixnn.load("imagenet", "cpu").origin == "imagenet"


# Settings that follow


@pytest.mark.usefixtures("timm", "torchvision")
def test_the_settings_of_each_start():
    torch.save(resnet8(128).state_dict(), "large_stem.pth")
    torch.save(mixnn.load("imagenet", "cpu").backbone.state_dict(), "lite0.pth")
    run = pretrain("weights.pth", normalization="torchvision", image_size=10)
    assert start_defaults("") == start_defaults("none") == {}
    assert start_defaults("imagenet") == {"backbone": "efficientnet_lite0", "normalization": "tensorflow"}
    assert start_defaults("timm:tiny") == {"backbone": "timm:tiny", "normalization": "0.5,0.5,0.5/0.25,0.25,0.25"}
    large = {"backbone": "resnet8", "image_size": 128}
    assert start_defaults("torchvision:resnet8") == large | {"normalization": "0.48,0.45,0.4/0.25,0.25,0.2"}
    assert start_defaults("large_stem.pth") == large | {"normalization": "torchvision"}
    small = start_defaults("weights.pth")
    assert (small["backbone"], small["image_size"] < 128) == ("resnet8", True)
    assert start_defaults("lite0.pth") == start_defaults("imagenet")
    sizes = {"image_size": 10, "encode_size": 8}
    assert start_defaults(str(run.path)) == {"backbone": "resnet8", "normalization": "torchvision"} | sizes


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("stem", [3, 7])
def test_crops_fit_the_stem_of_a_file_on_every_device(cuda, stem):
    torch.save(resnet8(128 if stem == 7 else 8).state_dict(), "start.pth")
    found = {c.name: c for c in choose(500, 200, {"init_from": "start.pth"}, {}, cuda)}
    size = found["image_size"].value
    assert (size >= 128) == (stem == 7)
    assert found["image_size"].reason == "as start.pth needs it"
    initial_backbone(Config(backbone="resnet8", image_size=size, init_from="start.pth", bn_groups=1))


@pytest.mark.usefixtures("torchvision")
def test_what_the_user_gave_is_used_instead():
    given = {"init_from": "torchvision:resnet8", "normalization": "data", "image_size": 160, "encode_size": 64}
    config = configure("photos", {}, given | {"batch_size": 4, "crop_area": 0.7, "optimizer": "sgd"})
    assert all(getattr(config, name) == value for name, value in given.items())
    assert (config.crop_area, config.optimizer, config.batch_norm) == (0.7, "sgd", "frozen")


@pytest.mark.parametrize(
    "source, backbone, normalization",
    [("imagenet", "efficientnet_lite0", "tensorflow"), ("run", "resnet8", "torchvision"), ("", "resnet18", "data")],
)
def test_a_named_data_set_follows_its_start_in_backbone_and_normalization_only(source, backbone, normalization):
    pretrain("weights.pth", normalization="torchvision")
    plain, config = (configure("cifar10", {}, {"init_from": given} if given else {}) for given in ("", source))
    assert (config.backbone, config.normalization) == (backbone, normalization)
    same = ("image_size", "encode_size", "optimizer", "lr", "batch_norm", "crop_area", "bn_groups", "options")
    assert [getattr(config, name) for name in same] == [getattr(plain, name) for name in same]
    mine = configure("cifar10", {}, {"init_from": source, "normalization": "data", "backbone": "resnet34"})
    assert (mine.backbone, mine.normalization) == ("resnet34", "data")


def test_a_start_has_the_layers_that_this_runs_images_need():
    """A ResNet has a max-pool from 64 pixels on, which no weight tells."""
    pretrain("weights.pth")
    config = Config(backbone="resnet8", image_size=64, bn_groups=1, init_from="run")
    assert isinstance(initial_backbone(config).maxpool, nn.MaxPool2d)
    assert not initial_backbone(config).training


@pytest.mark.parametrize("settings", [{"init_from": "none"}, {"image_size": 16}])
def test_a_share_of_trained_weights_needs_weights_to_start_from(settings):
    with pytest.raises(UserError, match="trained_share is for a folder of images and weights to start from"):
        configure("photos", {}, {"trained_share": 0.5, "batch_size": 4} | settings)
    with pytest.raises(UserError, match="trained_share is for a folder"):
        configure("cifar10", {}, {"trained_share": 0.5, "init_from": "imagenet"})


def test_paths_become_absolute_and_names_stay(place):
    (place / "labels.csv").write_text("file,label\n0.png,a\n")
    settings = {"init_from": "weights.pth", "labels": "labels.csv", "batch_size": 4, "image_size": 8}
    config, _ = resolve(open_dataset("photos", labels="labels.csv"), {}, settings)
    assert config.init_from == str(place / "weights.pth")
    assert config.labels == str(place / "labels.csv")
    config, _ = resolve(open_dataset("photos"), {}, {"image_size": 32, "encode_size": 32, "batch_size": 4})
    assert config.init_from == "imagenet"


# Errors


def refused(message, source, **settings):
    with pytest.raises(UserError, match=message):
        pretrain(source, **settings)


@pytest.fixture(autouse=True)
def _no_run_is_left(place):
    """A start that is refused leaves no folder."""
    yield
    if not (place / "run" / "config.yaml").exists():
        assert not (place / "run").exists()


def test_a_start_that_does_not_exist_is_refused_with_what_there_is():
    names = r"names: imagenet, none, timm:NAME, torchvision:NAME"
    refused(rf"init_from='imagnet': there is no run folder or file imagnet\n{names}", "imagnet")
    refused("there is no run folder or file some/where.pth", "some/where.pth")
    refused("photos is not a run folder", "photos")


@pytest.mark.usefixtures("timm", "torchvision")
def test_weights_of_another_backbone_are_refused_with_the_right_one():
    pretrain("weights.pth", "other")
    for source, holds in {
        "imagenet": "efficientnet_lite0",
        "weights.pth": "resnet8",
        "other": "resnet8",
        "timm:tiny": "timm:tiny",
        "torchvision:resnet8": "resnet8",
    }.items():
        message = f"holds the weights of {holds}, this run uses resnet18: use backbone='{holds}'"
        refused(message, source, backbone="resnet18")
    refused("holds the weights of timm:tiny, this run uses timm:small", "timm:tiny", backbone="timm:small")


@pytest.mark.usefixtures("torchvision")
def test_a_stem_that_does_not_fit_the_users_size_is_refused():
    refused("has a 7x7 conv1, but images of 32 pixels need 3x3", "torchvision:resnet8", image_size=32)
    refused("efficientnet_lite0 needs images of 32 pixels or more, not 16", "imagenet", image_size=16)


@pytest.mark.parametrize("broken", [False, True], ids=["missing", "built for another torch"])
@pytest.mark.parametrize("package, source", [("timm", "timm:tiny"), ("torchvision", "torchvision:resnet18")])
def test_a_package_that_does_not_import_is_named(place, monkeypatch, package, source, broken):
    for name in ("timm", "torchvision", "torchvision.models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        if not broken:
            monkeypatch.setitem(sys.modules, name, None)
    if broken:
        (place / package).mkdir()
        (place / package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
        monkeypatch.syspath_prepend(place)
        importlib.invalidate_caches()
    refused(f"pip install {package}", source)


NO_NETWORK = urllib.error.URLError("no route to host"), OSError("no route to host")


@pytest.mark.parametrize("error", NO_NETWORK, ids=lambda error: type(error).__name__)
def test_without_network_the_start_that_needs_none_is_named(timm, torchvision, error):
    timm.error = torchvision.error = error
    advice = r"no route to host.*\nuse init_from='imagenet', which needs no download, or a file of weights"
    refused(f"cannot download timm's weights of tiny: .*{advice}", "timm:tiny")
    refused(f"cannot download the weights of resnet8: .*{advice}", "torchvision:resnet8", image_size=128)


def test_a_damaged_download_is_no_traceback(timm, torchvision):
    timm.error = torchvision.error = RuntimeError("invalid hash value")
    refused("cannot make timm's tiny: invalid hash value", "timm:tiny")
    refused("cannot download the weights of resnet8: invalid hash value", "torchvision:resnet8", image_size=128)


@pytest.mark.usefixtures("timm", "torchvision")
def test_unknown_names_are_refused_with_others():
    refused("unknown timm model 'tinny', did you mean 'tiny'", "timm:tinny")
    refused(r"cannot make timm's tiny.in1k: Invalid pretrained tag \(in1k\)", "timm:tiny.in1k")
    refused("torchvision:vit_b_16 is not supported: use one of resnet8, resnet18, or timm:NAME", "torchvision:vit_b_16")


def test_a_resnet_that_torchvision_lacks_is_refused():
    refused("torchvision:resnet8 is not supported: use one of resnet18, resnet34, resnet50", "torchvision:resnet8")


# Choices


def test_a_value_of_the_user_is_returned_and_not_recorded():
    chooser = Chooser({"batch_size": "32"}, {"hidden": 8})
    assert chooser.value("batch_size", 64, "usual") == 32
    assert chooser.value("hidden", 256, "usual") == 8
    assert chooser.value("lr", 0.1, "usual") == 0.1
    assert chooser.found == [Choice("lr", 0.1, "usual")]


def test_the_first_choice_of_a_setting_stays():
    chooser = Chooser({"image_size": 0}, {})  # 0 stands for: choose
    assert chooser.value("image_size", 12, "as the start needs it") == 12
    assert chooser.value("image_size", 96, "fast") == 12
    assert chooser.found == [Choice("image_size", 12, "as the start needs it")]


def test_settings_of_the_recipe_are_printed_on_one_line():
    found = [Choice("lr", 0.1, RECIPE), Choice("batch_size", 64, "small"), Choice("crop_area", 0.4, RECIPE)]
    assert lines(found) == ["batch_size 64: small", "recipe: lr 0.1, crop_area 0.4"]
    assert lines(found[1:2]) == ["batch_size 64: small"]
    assert lines([]) == []


def test_a_folder_that_starts_from_weights_trains_with_frozen_batch_norm():
    config = configure("photos", {}, {"device": "cpu"})
    assert (config.init_from, config.optimizer, config.batch_norm) == ("imagenet", "adamw", "frozen")
    assert (config.image_size, config.encode_size) == (128, 224)
    names = [choice.name for choice in choose(8, 8, {}, {}, cuda=False)]
    assert len(names) == len(set(names))  # none is chosen, or printed, twice


# Normalization


def test_a_data_set_comes_with_its_own_mean_or_with_that_of_published_weights():
    for data in ("photos", np.zeros((4, 8, 8, 3), np.uint8)):
        dataset = open_dataset(data)
        own = dataset.load("train", 8)
        for name, (mean, std) in NORMALIZATIONS.items():
            dataset.normalization = name
            images = dataset.load("train", 8)
            assert (images.mean, images.std) == (mean, std)
            assert torch.equal(images.images, own.images)
            assert dataset.load("train", 8) is images
        dataset.normalization = "data"
        assert dataset.load("train", 8) is own


def test_tensorflows_pixels_lie_between_minus_one_and_one():
    mean, std = (np.array(values) * 255 for values in NORMALIZATIONS["tensorflow"])
    assert ((np.array([0.0, 127.0, 255.0])[:, None] - mean) / std)[:, 0] == pytest.approx([-127 / 128, 0, 1])


def test_a_run_is_encoded_and_evaluated_with_the_normalization_of_its_training():
    run = pretrain("weights.pth", normalization="torchvision")
    mean, std = NORMALIZATIONS["torchvision"]
    encoder = mixnn.load(run, "cpu")
    assert encoder.mean.tolist() == pytest.approx(mean)
    assert encoder.std.tolist() == pytest.approx(std)
    images = run.dataset().load("train", 8)
    assert (images.mean, images.std) == (mean, std)


def normalized_with(run):
    """Mean and std of the run's encoder, and of the images that it trains on."""
    encoder, images = mixnn.load(run, "cpu"), run.dataset().load("train", run.config.reading_size)
    assert (encoder.mean.tolist(), encoder.std.tolist()) == (pytest.approx(images.mean), pytest.approx(images.std))
    return images.mean, images.std


def test_images_are_normalized_as_for_the_weights_of_timm_and_torchvision(timm, torchvision):
    for source, module in {"timm:tiny": timm, "torchvision:resnet8": torchvision}.items():
        run = pretrain(source, module.__name__, image_size=None, encode_size=32)
        assert normalized_with(run) == (tuple(module.mean), tuple(module.std))
    timm.mean, timm.std = NORMALIZATIONS["torchvision"]
    assert start_defaults("timm:tiny")["normalization"] == "torchvision"
    timm.mean = timm.std = None
    assert start_defaults("timm:tiny")["normalization"] == "torchvision"
    assert start_defaults("timm:small")["normalization"] == "none", "as the model says, where timm has no list"


def test_a_plain_file_is_taken_for_published_weights_and_that_is_said():
    run = pretrain("weights.pth")
    assert normalized_with(run) == NORMALIZATIONS["torchvision"]
    for source in ("weights.pth", "weights.safetensors"):
        found = {choice.name: choice for choice in choose(8, 8, {"init_from": source}, {}, cuda=False)}
        assert str(found["normalization"]).startswith("normalization torchvision: as for published weights; the file")
    run_choice = {choice.name: choice for choice in choose(8, 8, {"init_from": "run"}, {}, cuda=False)}
    assert run_choice["normalization"].reason == "as run needs it"


def test_a_run_and_an_exported_file_bring_the_mean_and_std_of_their_own_images(place):
    first = pretrain("none", "first", image_size=12, encode_size=10)
    own = normalized_with(first)
    mixnn.export(first, "first.safetensors", verbose=Reporter(quiet=True))
    for i in range(8):
        Image.new("RGB", (8, 8), (i, 2 * i, 3 * i)).save(place / "photos" / f"{i}.png")  # other images now
    for source in ("first", "first.safetensors"):
        second = pretrain(source, f"from {source}", image_size=None, encode_size=None)
        assert (second.config.image_size, second.config.encode_size) == (12, 10)
        assert normalized_with(second) == (pytest.approx(own[0], abs=1e-5), pytest.approx(own[1], abs=1e-5))


def test_an_export_with_a_layout_is_a_start_too():
    run = pretrain("weights.pth")
    tensors, state = run.load_checkpoint(pytest.fail)
    layout = Layout(torch.zeros(3, 16, 16), 0.5)
    run.save_checkpoint(state["step"] + 1, tensors | layout.tensors(), state)
    mixnn.export(run, "with layout.safetensors", verbose=Reporter(quiet=True))
    assert mixnn.load("with layout.safetensors", "cpu").layout is not None
    assert_starts_with(pretrain("with layout.safetensors", "second"), resnet8().state_dict())


@pytest.mark.parametrize("given", ["0.5,0.4,0.3/0.2,0.25,0.5", ((0.5, 0.4, 0.3), (0.2, 0.25, 0.5))])
def test_mean_and_std_may_be_given_as_numbers(given):
    run = pretrain("none", normalization=given)
    assert run.config.normalization == "0.5,0.4,0.3/0.2,0.25,0.5"
    assert normalized_with(run) == ((0.5, 0.4, 0.3), (0.2, 0.25, 0.5))


@pytest.mark.parametrize(
    "given", ["0.5/0.5", "a,b,c/1,1,1", "0,0,0/1,0,1", "0,0,0/1,1,1/2,2,2", "nan,0,0/1,1,1", (1, 2)]
)
def test_numbers_that_are_no_mean_and_std_are_refused(given):
    refused("normalization=.*: give mean and std, three numbers each", "none", normalization=given)


def test_a_named_data_set_says_what_it_takes_from_its_start(capsys):
    settings = {"init_from": "weights.pth", "epochs": 0, "limit": 64, "device": "cpu"}
    mixnn.pretrain("digits", out="run", options=OPTIONS | {"support_size": 64}, verbose=True, **settings)
    assert "normalization torchvision: as for published weights" in capsys.readouterr().err
