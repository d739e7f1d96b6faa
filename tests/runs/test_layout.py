"""Aligned images get their layout into the vectors, others do not; and mirroring is judged by the images."""

import torch
from torch import nn

from mixnn.data import ImageSet
from mixnn.runs.encoder import Encoder
from mixnn.runs.layout import (
    MIN_ALIGNMENT,
    SIDE,
    WEIGHT,
    Layout,
    alignment,
    mean_layout,
    read_layout,
    shrink,
    spread,
)
from mixnn.training.configure import MAX_UNLIKE, mirrored_unlike


def noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def aligned(count: int) -> torch.Tensor:
    """A bright left half, the same in every image, under noise."""
    images = noise(count) // 4
    images[:, :, :, :16] += 150
    return images


def test_the_mean_image_tells_aligned_images_from_others():
    assert alignment(shrink(aligned(50))) > MIN_ALIGNMENT > alignment(shrink(noise(50)))
    assert mean_layout(noise(50)) is None
    layout = mean_layout(aligned(50))
    assert layout is not None
    assert layout.shape == (3, SIDE, SIDE)
    assert layout[:, :, :8].mean() > 2 * layout[:, :, 8:].mean()


def test_two_images_that_have_nothing_in_common_are_not_aligned():
    assert mean_layout(noise(2)) is None
    assert mean_layout(noise(1)) is None
    assert alignment(shrink(noise(1).expand(3, -1, -1, -1))) > 0.99


def test_brightness_as_a_whole_is_no_layout():
    flat = torch.arange(0, 250, 5, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 32, 32)
    assert alignment(shrink(flat)) < MIN_ALIGNMENT


def test_a_vector_is_the_unit_features_and_then_the_layout():
    images, features = aligned(4), torch.randn(4, 5)
    mean = shrink(images).mean(0)
    vectors = Layout(mean, 0.5)(features, images)
    assert vectors.shape == (4, 5 + 3 * SIDE**2)
    torch.testing.assert_close(vectors[:, :5], nn.functional.normalize(features))
    torch.testing.assert_close(vectors[:, 5:].norm(dim=1), torch.full((4,), 0.5 * WEIGHT))
    expected = (shrink(images) - mean).flatten(1)
    torch.testing.assert_close(nn.functional.cosine_similarity(vectors[:, 5:], expected), torch.ones(4))


def test_the_spread_is_the_distance_of_unit_features_from_their_mean():
    assert spread(torch.tensor([[1.0, 0.0], [5.0, 0.0]])) == 0  # equal but for their length
    assert spread(torch.tensor([[1.0, 0.0], [-2.0, 0.0]])) == 1
    features = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) + 1
    unit = nn.functional.normalize(features)
    expected = (unit - unit.mean(0)).square().sum(1).mean().sqrt()
    assert abs(spread(features) - expected) < 1e-5
    assert spread(features + 10) < 0.2 * spread(features)  # features that are more alike


def test_a_layout_is_stored_and_read_again():
    images, features = aligned(4), torch.randn(4, 5)
    layout = Layout(shrink(images).mean(0), 0.3)
    again = read_layout({"other": torch.zeros(1)} | layout.tensors())
    assert again is not None
    torch.testing.assert_close(again(features, images), layout(features, images), rtol=0, atol=0)
    assert read_layout({"other": torch.zeros(1)}) is None


class MeanColor(nn.Module):
    num_features = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def test_an_encoder_with_a_layout_gives_longer_vectors():
    images, zero, one = aligned(3), torch.zeros(3), torch.ones(3)
    plain = Encoder(MeanColor(), 32, zero, one)
    longer = Encoder(MeanColor(), 32, zero, one, layout=Layout(shrink(images).mean(0), 0.5))
    assert (plain.num_features, longer.num_features) == (3, 3 + 3 * SIDE**2)
    assert longer(images).shape == (3, longer.num_features)
    torch.testing.assert_close(longer(images)[:, :3], nn.functional.normalize(plain(images)))


def image_set(images: torch.Tensor) -> ImageSet:
    ones = (1.0, 1.0, 1.0)
    return ImageSet(images, torch.full((len(images),), -1), None, [], (0.0, 0.0, 0.0), ones, mirror=True)


def test_mirrored_images_are_unlike_the_others_only_where_sides_matter():
    shapes = nn.functional.interpolate(noise(6, 1)[:, :, :4, :4].float(), 32).to(torch.uint8) // 2  # six kinds of image
    one_sided = shapes.repeat(10, 1, 1, 1) + noise(60) // 8
    either = torch.cat([one_sided[:30], one_sided[30:].flip(3)])
    assert mirrored_unlike(image_set(one_sided)) > MAX_UNLIKE
    assert mirrored_unlike(image_set(either)) < MAX_UNLIKE
