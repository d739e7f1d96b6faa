"""Backbones by name: shapes, torchvision's names, and timm's models with split batch norms."""

import copy
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

import mixnn
from mixnn import methods
from mixnn.nn.backbone import BACKBONES, build_backbone, check_backbone
from mixnn.nn.batch_norm import SplitBatchNorm, split_batch_norms
from mixnn.progress import Reporter
from mixnn.runs.weights import load_backbone

QUIET = Reporter(quiet=True)
SMALL = {
    "epochs": 1,
    "warmup_epochs": 0,
    "limit": 64,
    "batch_size": 32,
    "knn_every": 0,
    "hidden": 8,
    "support_size": 32,
}


@pytest.mark.parametrize("name, features", [("resnet18", 512), ("resnet34", 512), ("resnet50", 2048), ("resnet8", 128)])
@pytest.mark.parametrize("size, side", [(32, 3), (64, 3), (128, 7)])
def test_features_and_stem_fit_the_image(name, features, size, side):
    with torch.device("meta"):
        backbone = build_backbone(name, size, 1)
    assert backbone.num_features == features
    assert backbone.conv1.kernel_size == (side, side)
    assert isinstance(backbone.maxpool, nn.MaxPool2d) == (size >= 64)


@pytest.mark.parametrize("name, count", [("resnet18", 11_176_512), ("resnet34", 21_284_672), ("resnet50", 23_508_032)])
def test_parameters_are_torchvisions_without_the_classifier(name, count):
    """Numbers of torchvision 0.20 less fc (11,689,512, 21,797,672 and 25,557,032 in all)."""
    with torch.device("meta"):
        backbone = build_backbone(name, 224, 8)
    assert sum(p.numel() for p in backbone.parameters()) == count


def test_a_bottleneck_has_torchvisions_names_and_its_stride_in_the_middle():
    with torch.device("meta"):
        backbone = build_backbone("resnet50", 224, 1)
    names = dict(backbone.named_parameters())
    assert names["layer2.0.conv3.weight"].shape == (512, 128, 1, 1)
    assert names["layer2.0.downsample.0.weight"].shape == (512, 256, 1, 1)
    assert names["layer1.0.downsample.1.bias"].shape == (256,)
    assert backbone.layer2[0].conv2.stride == (2, 2)
    assert backbone.layer2[0].conv1.stride == (1, 1)
    assert len(backbone.layer3) == 6


def test_a_large_network_runs():
    backbone = build_backbone("resnet50", 128, 2)
    assert backbone(torch.randn(4, 3, 128, 128)).shape == (4, 2048)


class FakeTimm(types.ModuleType):
    def create_model(self, name, pretrained, num_classes, **sizes):
        if name not in ("tiny", "vit"):
            raise RuntimeError(f"Unknown model ({name})")
        assert (pretrained, num_classes) == (False, 0)
        if name == "vit":
            return Transformer(**sizes)
        if sizes:
            raise TypeError("ResNet.__init__() got an unexpected keyword argument 'img_size'")
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-3, momentum=0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        model.num_features = 4
        return model

    def list_models(self):
        return ["tiny", "small", "vit"]


class Transformer(nn.Module):
    """As timm's vision transformers: made for one size of images, without batch norm."""

    num_features = 8

    def __init__(self, img_size=224, dynamic_img_size=False):
        super().__init__()
        self.img_size, self.dynamic = img_size, dynamic_img_size
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.positions = nn.Parameter(torch.zeros(1, (img_size // 4) ** 2, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        assert x.shape[2] == self.img_size, f"Input height ({x.shape[2]}) doesn't match model ({self.img_size})."
        return self.block(self.patches(x).flatten(2).mT + self.positions).mean(1)


def test_a_model_of_timms_is_wrapped_and_its_batch_norms_split(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", FakeTimm("timm"))
    backbone = build_backbone("timm:tiny", 32, 2)
    assert backbone.num_features == 4
    norm = backbone.model[1]
    assert isinstance(norm, SplitBatchNorm)
    assert (norm.groups, norm.eps, norm.momentum) == (2, 1e-3, 0.2)
    assert backbone(torch.randn(4, 3, 8, 8)).shape == (4, 4)
    with pytest.raises(mixnn.UserError, match="unknown timm model 'tinny', did you mean 'tiny'"):
        build_backbone("timm:tinny", 32, 2)


def test_a_transformer_of_timms_is_made_for_the_images_size_and_trains(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", FakeTimm("timm"))
    assert build_backbone("timm:vit", 16, 1).model.dynamic
    run = mixnn.pretrain(
        "digits",
        backbone="timm:vit",
        optimizer="adamw",
        decayed="weights",
        lr=0.01,
        out=tmp_path / "run",
        verbose=QUIET,
        **SMALL,
    )
    file = mixnn.export(run, verbose=QUIET)
    images = np.full((2, 3, 8, 8), 9, np.uint8)
    assert torch.equal(mixnn.load(file)(images), mixnn.load(run)(images))


def test_a_small_transformer_of_timms_own_trains(tmp_path):
    pytest.importorskip("timm", exc_type=Exception)
    name, own = "timm:vit_tiny_patch16_224", {"image_size": 32, "optimizer": "adamw", "lr": 0.01}
    run = mixnn.pretrain("digits", backbone=name, out=tmp_path / "run", verbose=QUIET, **own, **SMALL)
    assert mixnn.load(run)(np.zeros((2, 3, 32, 32), np.uint8)).shape == (2, 192)


def test_without_timm_the_way_to_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(mixnn.UserError, match="pip install timm"):
        build_backbone("timm:tiny", 32, 2)


def test_splitting_keeps_weights_and_statistics():
    network = nn.Sequential(nn.Sequential(nn.BatchNorm2d(3)), nn.BatchNorm1d(3))
    with torch.no_grad():
        network[0][0].weight.fill_(2.0)
        network[0][0].running_mean.fill_(3.0)
    split_batch_norms(network, 4)
    assert isinstance(network[0][0], SplitBatchNorm)
    assert isinstance(network[1], SplitBatchNorm)
    assert network[0][0].weight.tolist() == [2.0] * 3
    assert network[0][0].running_mean.tolist() == [3.0] * 3


@pytest.mark.parametrize("given, kept", [(0.3, 0.3), (0.0, 0.0), (None, 0.1)])
def test_splitting_keeps_the_momentum_of_running_statistics(given, kept):
    network = nn.Sequential(nn.BatchNorm2d(3, momentum=given))
    split_batch_norms(network, 2)
    assert network[0].momentum == kept


class WithActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: dropout and activation inside."""

    def __init__(self, features):
        super().__init__(features)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class Own(nn.Module):
    """Somebody's network."""

    num_features = 4

    def __init__(self, norm):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, WithActivation])
@pytest.mark.parametrize("method", ["byol", "mnn"])
def test_views_stay_apart_in_a_network_from_elsewhere(norm, method):
    torch.manual_seed(0)
    built = methods.build(method, Own(norm), {"hidden": 8, "dim": 4})
    x1, x2, other = torch.randn(3, 8, 3, 8, 8)
    (q, _), (q_beside_another, _) = built.student(x1, x2), built.student(x1, other)
    assert torch.equal(q[:8], q_beside_another[:8])
    assert not torch.equal(q[8:], q_beside_another[8:])


def test_one_view_alone_is_what_the_network_itself_gives():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Sequential(WithActivation(3), nn.Conv2d(3, 4, 1)), WithActivation(4))
    own, x = copy.deepcopy(network), torch.randn(8, 3, 5, 5)
    split_batch_norms(network, groups=1)
    torch.testing.assert_close(network(x), own(x))
    torch.testing.assert_close(network.eval()(x), own.eval()(x))


@pytest.mark.parametrize("norm", [nn.SyncBatchNorm, type("Mine", (nn.BatchNorm2d,), {})])
def test_a_batch_norm_that_would_mix_views_is_refused_by_its_place(norm):
    with pytest.raises(mixnn.UserError, match=f"f.net.1 is a {norm.__name__}, in which the views of a batch would"):
        methods.build("byol", Own(norm), {})


def test_an_unknown_name_is_refused():
    with pytest.raises(mixnn.UserError, match="unknown backbone 'resnet19', did you mean 'resnet18'"):
        check_backbone("resnet19")


def test_a_network_of_ones_own_is_trained_evaluated_and_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKBONES, "mine", lambda *_: Own(nn.BatchNorm2d))
    small = {"epochs": 1, "warmup_epochs": 0, "limit": 64, "batch_size": 32, "knn_every": 0, "bn_groups": 2}
    run = mixnn.pretrain("digits", backbone="mine", out=tmp_path / "run", verbose=QUIET, **small)
    assert mixnn.evaluate(run, protocol="knn", verbose=QUIET)["knn"]["weighted"] > 0
    backbone = load_backbone(run)[0]
    assert isinstance(backbone.net[1], SplitBatchNorm)
    assert backbone.net[1].groups == 2
    assert mixnn.load(run)(np.zeros((2, 3, 8, 8), np.uint8)).shape == (2, 4)


def test_the_length_of_the_features_is_found_if_the_network_does_not_say_it(monkeypatch):
    monkeypatch.setitem(BACKBONES, "mine", lambda: nn.Flatten())
    assert build_backbone("mine", 8, 1).num_features == 3 * 8 * 8


class Lying(nn.Module):
    num_features = 7

    def forward(self, x):
        return x.flatten(1)


def test_the_length_of_the_features_is_what_the_network_returns(monkeypatch):
    monkeypatch.setitem(BACKBONES, "mine", Lying)
    assert build_backbone("mine", 4, 1).num_features == 3 * 4 * 4


@pytest.mark.parametrize(
    "factory, message",
    [
        (lambda: nn.Conv2d(3, 4, 3), r"mine must return features \(B, F\), and returns shape \(2, 4, 6, 6\): pool or"),
        (lambda: nn.Linear(5, 3), "mine fails on images of 8 pixels: RuntimeError: .*\nuse another image_size"),
        (
            lambda depth: nn.Flatten(depth),
            "mine needs an argument depth: give it a default; mixnn passes only",
        ),
        (lambda: "resnet18", "mine must be a torch.nn.Module, not a str"),
    ],
)
def test_what_cannot_be_a_backbone_is_refused_with_the_reason(monkeypatch, factory, message):
    monkeypatch.setitem(BACKBONES, "mine", factory)
    with pytest.raises(mixnn.UserError, match=message):
        build_backbone("mine", 8, 1)


def test_a_factory_gets_the_arguments_that_it_has(monkeypatch):
    seen = []

    def factory(*, image_size, width=4, **others):
        seen.append((image_size, width, others))
        return nn.Flatten()

    monkeypatch.setitem(BACKBONES, "mine", factory)
    build_backbone("mine", 8, 2)
    assert seen == [(8, 4, {})]
