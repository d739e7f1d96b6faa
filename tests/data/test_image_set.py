from dataclasses import replace

import pytest
import torch

from mixnn.data import load
from mixnn.data.image_set import MIN_STD, ImageSet, channel_stats


def make(n: int = 6) -> ImageSet:
    images = torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, 3, 4, 5).contiguous()
    names = [f"{i}.png" for i in range(n)]
    return ImageSet(images, torch.arange(n) % 3, names, ["a", "b", "c"], (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), True)


def test_size_is_height_and_width_and_length_is_the_number_of_images():
    found = make()
    assert (found.size, len(found), found.num_classes) == ((4, 5), 6, 3)


def test_subset_keeps_images_labels_and_names_together_in_the_order_asked():
    found = make().subset(torch.tensor([4, 1]))
    assert found.images[:, 0, 0, 0].tolist() == [4, 1]
    assert found.labels.tolist() == [1, 1]
    assert found.names == ["4.png", "1.png"]


def test_limit_draws_the_same_images_for_the_same_seed_and_others_for_another():
    many = make(200)
    first, again, other = many.limit(20, seed=1), many.limit(20, seed=1), many.limit(20, seed=2)
    assert first.names == again.names != other.names
    assert len(set(first.names or [])) == 20
    assert first.images[:, 0, 0, 0].tolist() == sorted(first.images[:, 0, 0, 0].tolist())
    assert max(first.labels.tolist()) == 2, "a draw, not the first ones"


def test_limit_above_the_size_changes_nothing():
    found = make()
    assert found.limit(6) is found


def test_to_moves_images_and_labels():
    found = make().to("meta")
    assert found.images.device.type == found.labels.device.type == "meta"


@pytest.mark.parametrize(
    "wrong",
    [
        {"images": torch.zeros(6, 3, 4, 5)},
        {"images": torch.zeros(6, 1, 4, 5, dtype=torch.uint8)},
        {"labels": torch.zeros(5, dtype=torch.int64)},
        {"labels": torch.zeros(6)},
        {"names": ["one"]},
        {"std": (0.1, 0.0, 0.1)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_types_and_shapes_are_refused(wrong):
    with pytest.raises(AssertionError):
        replace(make(), **wrong)


def test_channel_stats_equal_the_definition_for_each_channel():
    images = torch.randint(0, 256, (7, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[:, 1] //= 2
    mean, std = channel_stats(images)
    scaled = images.double() / 255
    torch.testing.assert_close(torch.tensor(mean).double(), scaled.mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.tensor(std).double(), scaled.std((0, 2, 3), correction=0), rtol=1e-6, atol=0)


def test_std_of_images_of_one_color_is_not_zero():
    assert channel_stats(torch.zeros(2, 3, 4, 4, dtype=torch.uint8))[1] == (MIN_STD,) * 3


@pytest.mark.parametrize(
    ("share", "batch_size", "told"),
    [(1.0, 2, True), (0.5, 256, True), (0.5, 16, True), (0.5, 8, False), (0.1, 256, False)],
)
def test_purity_is_told_where_batches_hold_pairs_of_labeled_images(share: float, batch_size: int, told: bool):
    images = load("digits", "train").limit(100)
    few = torch.where(torch.arange(100) < 100 * share, images.labels, -1)
    assert replace(images, labels=few).can_measure_purity(batch_size) == told
