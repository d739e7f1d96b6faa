import sys

import pytest
import torch
from torch import Tensor, nn

from mixnn.augment import View
from mixnn.data.image_set import ImageSet
from mixnn.evaluation.features import features
from mixnn.nn.resnet import ResNet

MODULE = sys.modules[features.__module__]  # the package exports the function under the module's name
MEAN, STD = (0.2, 0.4, 0.6), (0.5, 0.25, 0.125)


def image_set(count: int = 11, size: int = 8) -> ImageSet:
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=g)
    return ImageSet(images, torch.arange(count), None, [str(i) for i in range(count)], MEAN, STD, True)


class Watcher(nn.Module):
    """Features are the pixels; remembers its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        self.modes.append(self.training)
        return x.flatten(1)


@pytest.fixture
def backbone() -> ResNet:
    torch.manual_seed(0)
    network = ResNet("resnet8", 8, 1)
    network.train()
    with torch.no_grad():
        network(torch.randn(32, 3, 8, 8))  # statistics that are not the initial ones
    return network


def test_features_use_normalized_images_and_running_statistics(backbone: ResNet):
    images = image_set()
    x = (images.images / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    found = features(backbone, images)
    torch.testing.assert_close(found, backbone.eval()(x).detach(), rtol=1e-4, atol=1e-5)
    assert (found.dtype, found.shape, found.requires_grad) == (torch.float32, (11, 128), False)


def test_the_backbone_returns_to_training_mode_after_an_error():
    class Fails(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    backbone = Fails().train()
    with pytest.raises(RuntimeError, match="out of memory"):
        features(backbone, image_set())
    assert backbone.training


@pytest.mark.parametrize("training", [True, False])
def test_the_backbone_is_left_as_it_was(backbone: ResNet, training: bool):
    backbone.train(training)
    before = {name: t.clone() for name, t in backbone.state_dict().items()}
    features(backbone, image_set())
    assert all(module.training == training for module in backbone.modules())
    assert all(torch.equal(t, before[name]) for name, t in backbone.state_dict().items())
    assert all(p.grad is None for p in backbone.parameters())


def test_the_backbone_runs_in_eval_mode():
    watcher = Watcher().train()
    features(watcher, image_set())
    assert watcher.modes == [False]


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_the_size_of_the_chunks_does_not_change_the_features(
    backbone: ResNet, monkeypatch: pytest.MonkeyPatch, chunk: int
):
    expected = features(backbone, image_set())
    monkeypatch.setattr(MODULE, "CHUNK", chunk)
    torch.testing.assert_close(features(backbone, image_set()), expected, rtol=1e-4, atol=1e-5)


def test_order_selects_images_and_their_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(MODULE, "CHUNK", 2)
    order = torch.tensor([3, 0, 3, 10, 7])
    assert torch.equal(features(Watcher(), image_set(), order), features(Watcher(), image_set())[order])


@pytest.mark.parametrize("size, sizes", [(8, [8, 3]), (64, [8, 3]), (128, [2, 2, 2, 2, 2, 1]), (512, [1] * 11)])
def test_large_images_go_in_smaller_chunks(monkeypatch: pytest.MonkeyPatch, size: int, sizes: list[int]):
    monkeypatch.setattr(MODULE, "CHUNK", 8)
    watcher = Watcher()
    features(watcher, image_set(size=size))
    assert [len(x) for x in watcher.seen] == sizes


def test_a_view_of_the_whole_image_is_the_image():
    whole = features(Watcher(), image_set(), view=View(8, area=(1.0, 1.0), flip=0.0))
    torch.testing.assert_close(whole, features(Watcher(), image_set()), rtol=1e-4, atol=1e-4)


def test_views_depend_on_the_generator_alone_and_differ_between_images():
    images, view = image_set(), View(8, area=(0.08, 1.0), flip=0.5)
    images.images[:] = images.images[:1].clone()
    first, second, other = (
        features(Watcher(), images, view=view, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert len(first.unique(dim=0)) > len(images) // 2
