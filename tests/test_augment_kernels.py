"""The CUDA kernel of a view against plain PyTorch: on a GPU, or else in Triton's interpreter."""

import itertools

import pytest
import torch

from mixnn import augment as aug
from tests.interpreter import CUDA, DEVICE, INTERPRETED, runs_kernels

if CUDA or INTERPRETED:
    from mixnn import augment_kernels as kernels

gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CASES = {  # view, height and width of the images
    "strong": (aug.strong(32), (32, 32)),
    "weak": (aug.weak(32), (32, 32)),
    "smaller, of odd sizes": (aug.View(20, area=(0.05, 1.0), flip=0.0, gray=0.5), (40, 25)),
    "larger": (aug.View(41, area=(0.01, 0.2), ratio=(0.2, 5.0), flip=1.0), (9, 31)),
    "much smaller, of large images": (aug.View(8, area=(0.5, 1.0)), (60, 40)),
    "the center, for no crop fits": (aug.View(16, area=(1.0, 1.0), ratio=(1.0, 1.0)), (24, 15)),
    "one pixel": (aug.View(1, jitter=1.0, blur=1.0), (5, 7)),
    "wide blur, across the edges": (aug.View(12, flip=0.0, blur=1.0, sigma=(0.01, 9.0)), (12, 12)),
    "strong jitter": (aug.View(16, jitter=0.9, brightness=2.0, contrast=2.0, saturation=2.0, hue=0.5), (16, 16)),
}
LARGE = aug.View(64, jitter=1.0, gray=0.2, blur=1.0)


def random_images(num, height, width):
    """Noise over a ramp, on the device; the last image is black, the one before it white."""
    noise = torch.randint(-90, 90, (num, 3, height, width), generator=torch.Generator().manual_seed(0))
    images = (torch.linspace(0, 255, width) + noise).clamp(0, 255).to(torch.uint8)
    images[-2], images[-1] = 255, 0
    return images.to(DEVICE)


def uniforms(num, view):
    return torch.rand(num, view.num_draws, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def by_kernel(images, view, u, index=None, mean=None, std=None):
    numbers = aug._kernel_numbers(view, *images.shape[2:])
    return kernels.make_view(images, index, u, view.size, numbers, mean, std)


def close(ours, want):
    """Within 1e-5, and in channels_last. A wrong crop, order or flip of one image is off by 0.01 or more."""
    assert ours.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ours, want, rtol=0, atol=1e-5)


@runs_kernels
@pytest.mark.parametrize("case", CASES)
def test_a_view_by_the_kernel_equals_plain_torch(case):
    view, sides = CASES[case]
    num = 500 if CUDA else 6
    images, u = random_images(num, *sides), uniforms(num, view)
    close(by_kernel(images, view, u), aug.plain_augment(images, view, u))


@runs_kernels
def test_color_jitter_in_each_order_equals_plain_torch():
    view, orders = aug.View(4, jitter=1.0), torch.tensor(list(itertools.permutations([0.1, 0.3, 0.6, 0.9])))
    images, u = random_images(24, 4, 4), uniforms(24, view)
    u[:, -4:] = orders.to(DEVICE)
    close(by_kernel(images, view, u), aug.plain_augment(images, view, u))


@runs_kernels
def test_the_kernel_takes_images_by_position_and_normalizes():
    view, index = aug.weak(8), torch.tensor([3, 0, 3, 5], device=DEVICE)
    images, u = random_images(6, 8, 8), uniforms(8, view)[::2]  # rows as one of two processes has them
    mean, std = (torch.tensor(values, device=DEVICE) for values in (MEAN, STD))
    want = aug.normalize(aug.plain_augment(images[index], view, u), mean, std)
    close(by_kernel(images, view, u, index, mean, std), want)


@pytest.mark.parametrize("case", [pytest.param("strong", marks=gpu), pytest.param("large", marks=gpu)])
def test_decisions_agree_for_every_one_of_many_images(case):
    view, sides = (LARGE, (64, 64)) if case == "large" else CASES[case]
    for start in range(0, 40_000, 4000):
        images = random_images(4000, *sides)
        u = torch.rand(4000, view.num_draws, generator=torch.Generator("cuda").manual_seed(start), device="cuda")
        error = (by_kernel(images, view, u) - aug.plain_augment(images, view, u)).abs().amax((1, 2, 3))
        assert error.max() < 2e-5, f"image {int(error.argmax())} of the seed {start}"


@pytest.mark.parametrize("index", [pytest.param([1, 1, 0], marks=gpu), pytest.param(None, marks=gpu)])
def test_views_on_a_gpu_are_made_by_the_kernel(index, monkeypatch):
    views, calls, real = [aug.strong(16), aug.weak(16)], [], kernels.make_view
    monkeypatch.setattr(kernels, "make_view", lambda *args: calls.append(1) or real(*args))
    images = random_images(3, 20, 20)
    draws = [uniforms(3, view) for view in views]
    mean, std = (torch.tensor(values, device=DEVICE) for values in (MEAN, STD))
    made = aug.make_views(
        images, None if index is None else torch.tensor(index, device="cuda"), draws, views, mean, std
    )
    assert calls == [1, 1]
    chosen = images if index is None else images[index]
    for ours, view, u in zip(made, views, draws, strict=True):
        torch.testing.assert_close(
            ours, aug.normalize(aug.plain_augment(chosen, view, u), mean, std), rtol=0, atol=5e-5
        )


@pytest.mark.parametrize(
    "images",
    [
        pytest.param(torch.rand(4, 3, 20, 20), marks=gpu, id="floats"),
        pytest.param(torch.zeros(4, 1, 20, 20, dtype=torch.uint8), marks=gpu, id="one channel"),
        pytest.param(torch.zeros(4, 3, 200, 20, dtype=torch.uint8), marks=gpu, id="large"),
        pytest.param(torch.zeros(4, 20, 20, 3, dtype=torch.uint8).permute(0, 3, 1, 2), marks=gpu, id="channels last"),
    ],
)
def test_other_images_take_the_plain_path(images, monkeypatch):
    monkeypatch.setattr(kernels, "make_view", None)
    assert aug.augment(images.cuda(), aug.weak(16)).shape == (4, images.shape[1], 16, 16)
