"""evaluate on anyone's encoder: networks, functions, files, names and runs on other data."""

import dataclasses
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import mixnn
from mixnn.cli import main
from mixnn.config import UserError
from mixnn.data import load
from mixnn.data.image_set import NORMALIZATIONS
from mixnn.evaluation.evaluate import announce
from mixnn.nn.resnet import ResNet
from mixnn.progress import Reporter
from mixnn.runs import Run

EVALUATE = sys.modules[announce.__module__]
QUIET = {"verbose": Reporter(quiet=True)}
SMALL = {"limit": 200, "protocol": "knn", **QUIET}


class Recorder(nn.Module):
    """Pixels as features; remembers the images it got."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        self.seen.append(x)
        return x.flatten(1)


def raw_knn() -> float:
    train, test = (load("digits", split, limit=200) for split in ("train", "test"))
    x = [(s.images.float() / 255 - torch.tensor(s.mean).view(3, 1, 1)) / torch.tensor(s.std).view(3, 1, 1)
         for s in (train, test)]  # fmt: skip
    return mixnn.evaluation.knn(x[0].flatten(1), train.labels, x[1].flatten(1), test.labels).accuracy


@pytest.mark.parametrize("encoder", [lambda x: x.view(len(x), -1), nn.Flatten(), lambda x: x.flatten(1).numpy()])
def test_a_network_or_a_function_is_judged_by_its_features(encoder: Any):
    results = mixnn.evaluate(encoder, "digits", **SMALL)
    assert results["knn"]["weighted"] == pytest.approx(raw_knn(), abs=0.51)  # one of 200 images
    assert results["knn"]["protocol"]["data"] == "digits"
    assert results["knn"]["protocol"]["train_images"] == 200


@pytest.mark.parametrize(
    "normalization, mean, std",
    [
        ("auto", None, None),
        ("data", None, None),
        ("none", (0, 0, 0), (1, 1, 1)),
        ("torchvision", *NORMALIZATIONS["torchvision"]),
        (((0.1, 0.2, 0.3), [1, 2, 3]), (0.1, 0.2, 0.3), (1, 2, 3)),
    ],
)
def test_images_come_normalized_as_asked_for(normalization: Any, mean: Any, std: Any):
    recorder, train = Recorder(), load("digits", "train", limit=200)
    results = mixnn.evaluate(recorder, "digits", normalization=normalization, **SMALL)
    images = recorder.seen[-2]  # the test images come last, crops to estimate the time come first
    mean, std = mean or train.mean, std or train.std
    expected = (train.images.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)
    assert images.is_contiguous()
    assert results["knn"]["protocol"]["mean"] == pytest.approx(mean)
    assert results["knn"]["protocol"]["std"] == pytest.approx(std)


def test_images_and_crops_come_at_the_size_asked_for():
    recorder = Recorder()
    results = mixnn.evaluate(recorder, "digits", image_size=16, limit=40, epochs=1, **QUIET)
    assert {tuple(x.shape[1:]) for x in recorder.seen} == {(3, 16, 16)}
    assert results["linear"]["protocol"]["crop_size"] == results["linear"]["protocol"]["image_size"] == 16


def test_the_callers_network_is_left_as_it_was():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.5)).double()
    network[1].eval()  # a frozen part in a network that trains
    before = {name: t.clone() for name, t in network.state_dict().items()}
    mixnn.evaluate(network, "digits", limit=40, epochs=1, **QUIET)
    assert [m.training for m in network.modules()] == [True, True, False, True, True]
    assert all(torch.equal(t, before[name]) for name, t in network.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in network.parameters())


def test_a_network_with_channels_last_weights_gets_channels_last_images():
    seen = []

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
            return self.conv(x).flatten(1)

    mixnn.evaluate(Network().to(memory_format=torch.channels_last), "digits", **SMALL)
    assert all(seen)


@pytest.mark.parametrize(
    "encoder, message",
    [
        (lambda x: x, r"returned \(2, 3, 8, 8\) for 2 images instead of features.*\n.*mean\(\(2, 3\)\)"),
        (lambda x: x.flatten(), r"returned \(384,\) for 2 images"),
        (lambda x: {"features": x}, r"returned a dict instead of features \(B, F\)\npick the tensor"),
        (3, "cannot evaluate a int: give a run, a file of weights, a network"),
        (None, "cannot evaluate a NoneType"),
    ],
)
def test_what_is_not_an_encoder_is_refused_at_once(encoder: Any, message: str):
    with pytest.raises(UserError, match=message):
        mixnn.evaluate(encoder, "digits", **SMALL)


def test_maps_of_one_pixel_are_features():
    assert mixnn.evaluate(lambda x: x.mean((2, 3), keepdim=True), "digits", **SMALL)["knn"]["weighted"] > 0


@pytest.mark.parametrize("bad", ["torchvison", (1, 2), ((0, 0, 0), (1, 1, 0)), ((0, 0), (1, 1))])
def test_a_normalization_that_is_none_is_refused(bad: Any):
    with pytest.raises(UserError, match="normalization"):
        mixnn.evaluate(nn.Flatten(), "digits", normalization=bad, **SMALL)


def test_another_encoder_than_a_run_needs_data():
    with pytest.raises(UserError, match="which images\\? use data='cifar10'"):
        mixnn.evaluate(nn.Flatten(), **QUIET)
    with pytest.raises(UserError, match="there is no run folder or file imagnet\nnames: imagenet, timm:NAME"):
        mixnn.evaluate("imagnet", "digits", **QUIET)


# Runs, files and names


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("evaluated") / "run"
    settings = {"limit": 200, "batch_size": 32, "epochs": 1, "warmup_epochs": 0, "knn_every": 0}
    options = {"support_size": 64, "hidden": 16, "dim": 8}
    return mixnn.pretrain("digits", options=options, out=out, **settings, **QUIET)


def test_an_exported_file_a_loaded_encoder_and_the_run_itself_have_the_same_accuracies(run: Run, tmp_path: Path):
    expected = mixnn.evaluate(run, epochs=2, **QUIET)
    before = run.results()
    file = tmp_path / "encoder.safetensors"
    mixnn.export(run.path, file, **QUIET)
    for encoder in (file, str(file), mixnn.load(run), run, str(run.path)):
        found = mixnn.evaluate(encoder, "digits", limit=200, epochs=2, **QUIET)
        for protocol, number in (("knn", "weighted"), ("knn", "majority"), ("linear", "last")):
            assert found[protocol][number] == pytest.approx(expected[protocol][number], abs=1.01)  # two of 200
    assert run.results() == before, "results of other data stay out of the run"


def test_settings_for_other_data_are_refused_without_it(run: Run):
    for settings in ({"limit": 10}, {"image_size": 16}, {"normalization": "none"}, {"labels": "folders"}):
        with pytest.raises(UserError, match=f"{next(iter(settings))} is for other data than the run's own: add data="):
            mixnn.evaluate(run, **settings, **QUIET)
    with pytest.raises(UserError, match="source is for a run's own data"):
        mixnn.evaluate(run, "digits", source="elsewhere", **QUIET)


@pytest.mark.parametrize("size", [8, 224])  # with a first layer of 3x3 and of 7x7
def test_a_file_of_weights_is_built_and_sees_images_that_suit_its_first_layer(tmp_path: Path, size: int):
    torch.manual_seed(0)
    network = ResNet("resnet8", size, 1).eval()
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    found = mixnn.evaluate(tmp_path / "weights.pt", "digits", limit=20, protocol="knn", **QUIET)["knn"]
    about = {"image_size": size, "normalization": "torchvision", "limit": 20, "protocol": "knn"}
    direct = mixnn.evaluate(network, "digits", **about, **QUIET)["knn"]
    assert found["protocol"]["image_size"] == size
    assert found["protocol"]["mean"] == pytest.approx(NORMALIZATIONS["torchvision"][0])
    assert found["weighted"] == pytest.approx(direct["weighted"], abs=5.01)  # one of 20


@pytest.fixture
def fake_timm(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """timm with one model, made for one size of images as its transformers are, and what timm says about its weights.

    The weights "tiny.silent" come without a size.
    """
    asked, module = [], types.ModuleType("timm")

    def create_model(name: str, pretrained: bool, num_classes: int, img_size: int) -> nn.Module:
        asked.append((name, pretrained, num_classes, img_size))
        model = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * (img_size // 4) ** 2, 8))
        model.num_features = 8
        return model

    def get_pretrained_cfg(name: str) -> types.SimpleNamespace:
        size = None if name == "tiny.silent" else (3, 12, 12)
        return types.SimpleNamespace(input_size=size, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))

    module.create_model, module.get_pretrained_cfg = create_model, get_pretrained_cfg
    monkeypatch.setitem(sys.modules, "timm", module)
    return asked


def test_a_timm_name_comes_with_its_weights_size_and_normalization(fake_timm: list[tuple], capsys, tmp_path: Path):
    file = tmp_path / "results.json"
    words = ["evaluate", "timm:tiny", "--data", "digits", "--limit", "200", "--protocol", "knn", "--save", str(file)]
    assert main(words) == 0
    assert fake_timm == [("tiny", True, 0, 12)]
    out = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert out.startswith(f"kNN     {found['knn']['weighted']:.2f}")
    protocol = found["knn"]["protocol"]
    assert (protocol["encoder"], protocol["image_size"]) == ("timm:tiny", 12)
    assert (protocol["mean"], protocol["std"]) == ([0.5] * 3, [0.25] * 3)
    assert "torch" in found["evaluated_with"]


@pytest.mark.parametrize("name, asked, size", [("tiny", 0, 12), ("tiny", 20, 20), ("tiny.silent", 0, 224)])
def test_a_timm_model_is_made_for_the_images_it_gets(fake_timm: list[tuple], name: str, asked: int, size: int):
    about = {"protocol": "knn", "limit": 40, **QUIET}
    found = mixnn.evaluate(f"timm:{name}", "digits", image_size=asked, **about)["knn"]["protocol"]
    assert found["image_size"] == size
    assert fake_timm == [(name, True, 0, size)]


def test_imagenet_weights_see_images_of_224_pixels_as_they_were_trained(capsys):
    assert main(["evaluate", "imagenet", "--data", "digits", "--limit", "60", "--protocol", "knn", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["knn"]
    assert found["protocol"]["image_size"] == 224
    assert found["protocol"]["mean"] == pytest.approx([127 / 255] * 3)
    assert found["weighted"] > 30, "guessing gives 10"


# Folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, color in (("dark", 40), ("light", 200)):
        (tmp_path / name).mkdir()
        for i in range(10):
            pixels = np.clip(color + rng.normal(0, 20, (20, 24, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    return tmp_path


def test_a_folder_is_evaluated_with_its_labels_and_a_holdout(folder: Path):
    recorder = Recorder()
    found = mixnn.evaluate(recorder, folder, labels="folders", holdout=0.2, protocol="knn", **QUIET)["knn"]
    assert (found["protocol"]["train_images"], found["protocol"]["test_images"]) == (16, 4)
    assert found["weighted"] == 100.0
    assert recorder.seen[-1].shape[1:] == (3, 64, 64)
    with pytest.raises(UserError, match=r"has no test images.*holdout=0.2"):
        mixnn.evaluate(recorder, folder, labels="folders", **QUIET)


# How long it takes


@pytest.mark.parametrize("milliseconds, said", [(1000, True), (0.001, False)])
def test_long_work_is_announced_before_it_begins(
    capsys, monkeypatch: pytest.MonkeyPatch, milliseconds: float, said: bool
):
    begun: list[str] = []

    def run_protocol(_: Any) -> Any:
        begun.append(capsys.readouterr().err.replace("\n", " "))
        return {"weighted": 1.0, "majority": 1.0, "last": 1.0, "best": 1.0}, {"k": 1, "epochs": 1}

    for name, protocol in EVALUATE.PROTOCOLS.items():
        monkeypatch.setitem(EVALUATE.PROTOCOLS._entries, name, dataclasses.replace(protocol, run=run_protocol))
    monkeypatch.setattr(EVALUATE, "seconds_per_image", lambda _: milliseconds / 1000)
    assert main(["evaluate", "imagenet", "--data", "digits", "--limit", "100", "--epochs", "20"]) == 0
    # kNN: 100 + 100 images; linear: 100 + 20 x 100.
    assert ("this takes about 38 min: 2,300 images are encoded at 1e+03 ms each" in begun[0]) == said
    assert ("--protocol knn takes about 3 min" in begun[0]) == said


def test_the_first_batch_of_a_size_does_not_make_the_announced_time_too_long(monkeypatch: pytest.MonkeyPatch):
    now, sizes = [0.0], set()

    def features(_backbone: Any, _images: Any, order: torch.Tensor, *_: Any) -> torch.Tensor:
        now[0] += 1e-5 * len(order) + (len(order) not in sizes)  # a second to choose algorithms
        sizes.add(len(order))
        return torch.zeros(1)

    monkeypatch.setattr(EVALUATE, "features", features)
    monkeypatch.setattr(EVALUATE.time, "perf_counter", lambda: now[0])
    subject = SimpleNamespace(crop_size=8, device=torch.device("cpu"), backbone=None, train=range(5000), bf16=False)
    assert EVALUATE.seconds_per_image(subject) == pytest.approx(1e-5)
