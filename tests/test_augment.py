"""Views against Pillow where it does the same, against naive loops elsewhere; the laws of the random parameters."""

import colorsys
import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from mixnn import augment as aug

STEP = 1 / 255


def random_images(num, height, width, channels=3, seed=0):
    """Noise over a ramp: hard edges and smooth parts."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 200, width)[None, None, None] * np.linspace(0.3, 1, height)[None, None, :, None]
    noise = rng.integers(-120, 120, (num, channels, height, width))
    return torch.from_numpy(np.clip(ramp + noise, 0, 255).astype(np.uint8))


def uniforms(num, view, seed=0):
    return torch.rand(num, view.num_draws, generator=torch.Generator().manual_seed(seed))


def to_pillow(image_u8):
    return Image.fromarray(image_u8.permute(1, 2, 0).numpy())


def from_pillow(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def plain(size, **stages):
    """The whole image, resized to size: every stage off but those given."""
    return aug.View(size, **{"area": (1.0, 1.0), "ratio": (1.0, 1.0), "flip": 0.0, **stages})


def assert_close_to_pillow(ours, pillow, worst, mean):
    error = (ours - pillow).abs()
    assert error.max() <= worst * STEP
    assert error.mean() <= mean * STEP


# Crop, resize, flip


@pytest.mark.parametrize(
    "size_in, size_out", [((32, 32), 32), ((8, 8), 32), ((96, 96), 64), ((40, 25), 16), ((9, 31), 20)]
)
def test_crop_and_flip_equal_pillows_crop_bilinear_resize_and_mirror(size_in, size_out):
    view = aug.View(size_out, area=(0.08, 1.0), flip=0.5)
    images, u = random_images(48, *size_in), uniforms(48, view)
    ours = aug.augment(images, view, u)
    boxes = torch.stack(aug.crop_boxes(u[:, :22], *size_in, view), dim=1).int().tolist()
    for image, x, (top, left, height, width), flipped in zip(images, ours, boxes, u[:, 22] < 0.5, strict=True):
        expected = to_pillow(image).crop((left, top, left + width, top + height))
        expected = expected.resize((size_out, size_out), Image.Resampling.BILINEAR)
        expected = ImageOps.mirror(expected) if flipped else expected
        # Pillow rounds to whole steps after each of its two passes: half a step each, at worst.
        assert_close_to_pillow(x, from_pillow(expected), worst=1.01, mean=0.4)


def test_resize_weights_sum_to_one_and_stay_inside_the_box():
    start, length = torch.tensor([0.0, 5.0, 11.0]), torch.tensor([12.0, 1.0, 1.0])
    a = aug.resize_matrix(start, length, None, 5, 12)
    torch.testing.assert_close(a.sum(2), torch.ones(3, 5))
    assert (a[1] == torch.nn.functional.one_hot(torch.tensor(5), 12)).all()
    assert (a[2] == torch.nn.functional.one_hot(torch.tensor(11), 12)).all()


def test_flip_reverses_the_rows_of_the_matrix_exactly():
    start, length = torch.tensor([2.0, 3.0]), torch.tensor([7.0, 5.0])
    a = aug.resize_matrix(start, length, torch.tensor([True, False]), 6, 10)
    straight = aug.resize_matrix(start, length, None, 6, 10)
    assert torch.equal(a[0], straight[0].flip(0))
    assert torch.equal(a[1], straight[1])


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_whole_image_at_its_own_size_comes_back_exactly(channels):
    images, view = random_images(5, 17, 17, channels), plain(17)
    x = aug.augment(images, view, uniforms(5, view))
    assert x.dtype == torch.float32
    assert torch.equal(x, images.float() / 255)


def test_stages_that_do_not_happen_leave_the_image_exactly():
    view = plain(16, flip=0.5, jitter=0.5, gray=0.5, blur=0.5)
    images, u = random_images(4, 16, 16), uniforms(4, view)
    u[:, [22, 23, 32, 33]] = 0.5  # an event of probability p happens when u < p
    assert torch.equal(aug.augment(images, view, u), images.float() / 255)


# Random-resized crop


def torchvision_box(u, height, width, view):
    """RandomResizedCrop.get_params as a loop over one image's uniforms."""
    for k in range(10):
        target = height * width * (view.area[0] + (view.area[1] - view.area[0]) * u[k])
        low, high = math.log(view.ratio[0]), math.log(view.ratio[1])
        ratio = math.exp(low + (high - low) * u[10 + k])
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(u[20] * (height - h + 1)), int(u[21] * (width - w + 1)), h, w
    if width / height < view.ratio[0]:
        w, h = width, round(width / view.ratio[0])
    elif width / height > view.ratio[1]:
        w, h = round(height * view.ratio[1]), height
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize(
    "size, area, ratio",
    [
        ((32, 32), (0.2, 1.0), (3 / 4, 4 / 3)),
        ((96, 96), (0.08, 1.0), (3 / 4, 4 / 3)),
        ((8, 8), (0.2, 1.0), (3 / 4, 4 / 3)),
        ((20, 50), (0.5, 1.0), (3 / 4, 4 / 3)),  # the fallback, wide
        ((50, 21), (0.5, 1.0), (3 / 4, 4 / 3)),  # the fallback, tall
        ((32, 32), (1.0, 1.0), (1 / 2, 3.0)),  # the fallback, the whole image
        ((5, 5), (0.001, 0.05), (1.0, 1.0)),  # boxes that round to nothing
    ],
)
def test_boxes_equal_torchvisions_loop_on_the_same_uniforms(size, area, ratio):
    view = aug.View(8, area=area, ratio=ratio)
    u = torch.rand(2000, 22, generator=torch.Generator().manual_seed(1))
    boxes = torch.stack(aug.crop_boxes(u, *size, view), dim=1).int().tolist()
    expected = [list(torchvision_box(row, *size, view)) for row in u.tolist()]
    differing = sum(ours != loop for ours, loop in zip(boxes, expected, strict=True))
    assert differing <= 2  # a side within 1e-6 of a half may round differently in float32


def test_the_largest_uniform_keeps_the_box_inside_the_image():
    u = torch.full((1, 22), 1 - 2**-24)
    u[:, :20] = torch.arange(20) / 20
    for size in range(2, 100):
        top, left, height, width = aug.crop_boxes(u, size, size, aug.View(8))
        assert top + height == size
        assert left + width == size


def quantiles(values, num=9):
    return np.quantile(np.asarray(values), np.linspace(0.1, 0.9, num))


def test_area_and_ratio_are_distributed_as_in_torchvision():
    rng, view, num, side = random.Random(0), aug.strong(32), 20_000, 96
    loop = np.array([torchvision_box([rng.random() for _ in range(22)], side, side, view)[2:] for _ in range(num)])
    u = torch.rand(num, 22, generator=torch.Generator().manual_seed(2))
    _, _, h, w = (t.numpy() for t in aug.crop_boxes(u, side, side, view))
    np.testing.assert_allclose(quantiles(h * w), quantiles(loop.prod(1)), rtol=0.03)
    np.testing.assert_allclose(quantiles(np.log(w / h)), quantiles(np.log(loop[:, 1] / loop[:, 0])), atol=0.02)
    assert 0.2 * side**2 * 0.97 < (h * w).min()
    assert np.abs(np.log(w / h)).max() < math.log(4 / 3) + 0.03


def test_offsets_are_uniform_over_the_positions_that_fit():
    view = aug.View(8, area=(0.25, 0.25), ratio=(1.0, 1.0))  # 6 x 6 of 12 x 12: positions 0 to 6
    u = torch.rand(21_000, 22, generator=torch.Generator().manual_seed(3))
    top, left, _, _ = aug.crop_boxes(u, 12, 12, view)
    joint = torch.bincount((7 * top + left).long(), minlength=49)
    expected = 21_000 / 49
    assert len(joint) == 49
    assert ((joint - expected) ** 2 / expected).sum() < 85  # chi-square, 48 degrees of freedom: p = 0.001


# Blur


SIGMAS = [0.1, 0.5, 0.9, 1.3, 1.7, 2.0, 5.0]


def box_blur(x, sigma):
    """One of the three passes of Pillow's Gaussian blur along the last axis, without its rounding."""
    variance = sigma**2 / 3
    whole = math.floor((math.sqrt(12 * variance + 1) - 1) / 2)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    n = x.shape[-1]
    columns = []
    for i in range(n):
        near = sum(x[..., min(max(i + d, 0), n - 1)] for d in range(-whole, whole + 1))
        far = x[..., max(i - whole - 1, 0)] + x[..., min(i + whole + 1, n - 1)]
        columns.append((near + part * far) / (2 * (whole + part) + 1))
    return np.stack(columns, axis=-1)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_pillows_gaussian_blur_is_three_box_blurs_rounded_after_each_pass(sigma):
    image = random_images(1, 20, 20)[0]
    expected = image.double().numpy()
    for _ in range(3):
        expected = np.floor(box_blur(expected, sigma) + 0.5)
    for _ in range(3):
        expected = np.floor(box_blur(expected.swapaxes(1, 2), sigma) + 0.5).swapaxes(1, 2)
    pillow = from_pillow(to_pillow(image).filter(ImageFilter.GaussianBlur(sigma)))
    # Pillow's weights are cut to 24 bits, so an exact half rounds down there.
    assert_close_to_pillow(torch.from_numpy(expected / 255), pillow, worst=1.01, mean=0.15)


@pytest.mark.parametrize("size", [1, 2, 8, 20])
def test_blur_matrix_equals_three_box_blurs_without_rounding(size):
    x = np.random.default_rng(0).random(size)
    ours = aug.blur_matrix(torch.tensor(SIGMAS), size).double().numpy() @ x
    for row, sigma in zip(ours, SIGMAS, strict=True):
        expected = box_blur(box_blur(box_blur(x, sigma), sigma), sigma)
        np.testing.assert_allclose(row, expected, atol=2e-6)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("size", [8, 32])
def test_blur_equals_pillows_gaussian_blur(sigma, size):
    view = plain(size, blur=1.0, sigma=(sigma, sigma))
    images = random_images(8, size, size)
    ours = aug.augment(images, view, uniforms(8, view))
    expected = torch.stack([from_pillow(to_pillow(i).filter(ImageFilter.GaussianBlur(sigma))) for i in images])
    # Six passes, each rounded by up to half a step; the narrower the blur, the less of it averages out.
    worst, mean = (3.0, 1.0) if sigma < 1 else (1.5, 0.4)
    assert_close_to_pillow(ours, expected, worst, mean)


def test_blur_of_sigma_zero_is_the_identity():
    assert torch.equal(aug.blur_matrix(torch.zeros(1), 7)[0], torch.eye(7))


# Color

NEUTRAL = {aug.BRIGHTNESS: 1.0, aug.CONTRAST: 1.0, aug.SATURATION: 1.0, aug.HUE: 0.0}


def jitter_one(x, order, factors):
    """color_jitter with one order and the given factors for all images, the others neutral."""
    row = [{**NEUTRAL, **factors}[i] for i in range(4)]
    return aug.color_jitter(x, torch.tensor([row] * len(x)), torch.tensor([order] * len(x)))


def naive_luma(r, g, b):
    return 0.2989 * r + 0.587 * g + 0.114 * b


def naive_operation(pixels, operation, factor):
    """One jitter operation on the list of (r, g, b) of one image, pixel by pixel."""
    if operation == aug.HUE:
        hsv = [colorsys.rgb_to_hsv(*p) for p in pixels]
        return [colorsys.hsv_to_rgb((h + factor) % 1, s, v) for h, s, v in hsv]
    mean = sum(naive_luma(*p) for p in pixels) / len(pixels)
    other = {
        aug.BRIGHTNESS: lambda _: 0.0,
        aug.CONTRAST: lambda _: mean,
        aug.SATURATION: lambda p: naive_luma(*p),
    }[operation]
    return [tuple(min(max(factor * c + (1 - factor) * other(p), 0.0), 1.0) for c in p) for p in pixels]


def naive_jitter(x, order, factors):
    pixels = [tuple(p) for p in x.flatten(1).T.tolist()]
    for operation in order:
        pixels = naive_operation(pixels, operation, factors[operation])
    return torch.tensor(pixels).T.view_as(x)


@pytest.mark.parametrize("factor", [0.6, 1.4])
@pytest.mark.parametrize("operation", [aug.BRIGHTNESS, aug.CONTRAST, aug.SATURATION])
def test_brightness_contrast_saturation_equal_pillows_enhancers(operation, factor):
    images = random_images(4, 12, 12)
    enhancer = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[operation]
    expected = torch.stack([from_pillow(enhancer(to_pillow(i)).enhance(factor)) for i in images])
    ours = jitter_one(images.float() / 255, [0, 1, 2, 3], {operation: factor})
    assert_close_to_pillow(
        ours, expected, worst=1.5, mean=0.7
    )  # Pillow's gray and its blend are rounded, the blend down


@pytest.mark.parametrize("shift", [-0.5, -0.1, 0.0, 0.07, 0.1, 0.5])
def test_hue_shift_equals_colorsys(shift):
    x = random_images(2, 9, 9).float() / 255
    x[0, :, 0, :3] = torch.tensor([0.0, 0.5, 1.0])  # black, gray, white
    x[0, :, 1, :3] = torch.eye(3)  # pure colors
    x[0, :, 2, :3] = 1 - torch.eye(3)
    ours = torch.stack(aug.shift_hue(x.unbind(1), torch.full((2,), shift)), dim=1)
    expected = torch.stack([naive_jitter(i, [aug.HUE], {aug.HUE: shift}) for i in x])
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


# Strong enough that values are clipped on the way: without clipping some operations commute.
CLIPPING = [1.7, 1.6, 1.8, 0.2]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_jitter_applies_its_operations_in_the_given_order(order):
    x = random_images(1, 8, 8, seed=5).float() / 255
    ours = jitter_one(x, order, dict(enumerate(CLIPPING)))[0]
    torch.testing.assert_close(ours, naive_jitter(x[0], order, CLIPPING), atol=2e-5, rtol=0)


def test_all_orders_of_jitter_give_different_images():
    x = random_images(1, 8, 8, seed=5).float() / 255
    results = [jitter_one(x, order, dict(enumerate(CLIPPING))) for order in itertools.permutations(range(4))]
    assert min((a - b).abs().max() for a, b in itertools.combinations(results, 2)) > 0.01


def test_each_image_is_jittered_with_its_own_factors_and_order():
    x = random_images(24, 6, 6).float() / 255
    orders = list(itertools.permutations(range(4)))
    factors = torch.rand(24, 4, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.6
    factors[:, aug.HUE] = (factors[:, aug.HUE] - 1) / 4
    ours = aug.color_jitter(x, factors, torch.tensor(orders))
    expected = torch.stack([naive_jitter(*row) for row in zip(x, orders, factors.tolist(), strict=True)])
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)


def test_jitter_parameters_are_uniform_and_every_order_equally_likely():
    view = aug.strong(8)
    u = torch.rand(24_000, 8, generator=torch.Generator().manual_seed(4))
    factors, order = aug.jitter_parameters(u, view)
    expected = torch.linspace(0.1, 0.9, 9)
    for i, (low, high) in enumerate([(0.6, 1.4), (0.6, 1.4), (0.6, 1.4), (-0.1, 0.1)]):
        measured = (factors[:, i] - low) / (high - low)
        torch.testing.assert_close(measured.quantile(expected), expected, atol=0.012, rtol=0)
    counts = torch.bincount((order * torch.tensor([64, 16, 4, 1])).sum(1))
    counts = counts[counts > 0]
    assert len(counts) == 24
    assert ((counts - 1000) ** 2 / 1000).sum() < 49.7  # chi-square, 23 degrees of freedom: p = 0.001


def test_grayscale_is_torchvisions_luma_on_all_three_channels():
    view = plain(10, gray=1.0)
    images = random_images(3, 10, 10)
    x = aug.augment(images, view, uniforms(3, view))
    r, g, b = (images.double() / 255).unbind(1)
    for channel in x.unbind(1):
        torch.testing.assert_close(channel.double(), naive_luma(r, g, b), atol=1e-6, rtol=0)


# Whole views


def test_strong_view_is_crop_then_jitter_then_gray_then_blur():
    view = aug.View(16, jitter=1.0, gray=0.5, blur=1.0)
    images, u = random_images(6, 24, 24), uniforms(6, view)
    x = aug.augment(images, dataclasses.replace(view, jitter=0.0, gray=0.0, blur=0.0), u[:, :23])
    x = aug.color_jitter(x, *aug.jitter_parameters(u[:, 24:32], view))
    gray = torch.where(u[:, 32].view(-1, 1, 1, 1) < 0.5, aug.grayscale(x), x)
    a = aug.blur_matrix(0.1 + 1.9 * u[:, 34], 16)
    expected = torch.einsum("bij,bcjk,blk->bcil", a, gray, a)
    torch.testing.assert_close(aug.augment(images, view, u), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("stage", ["flip", "jitter", "gray", "blur"])
@pytest.mark.parametrize("probability", [0.2, 0.9, 1.0])
def test_a_stage_happens_with_its_probability(stage, probability):
    view = plain(6, **{stage: probability})
    images = random_images(1, 6, 6).expand(4000, -1, -1, -1)
    changed = (aug.augment(images, view, uniforms(4000, view)) != images.float() / 255).flatten(1).any(1)
    assert abs(changed.float().mean() - probability) < 3.5 * math.sqrt(probability * (1 - probability) / 4000) + 1e-9


def test_stages_happen_independently_of_each_other_and_of_the_crop():
    view = aug.View(8, flip=0.5, jitter=0.5, gray=0.5, blur=0.5)
    assert view.draws == (22, 1, 9, 1, 2)
    # Each stage has columns of its own: changing them changes the view only when that stage happens.
    images, u = random_images(1, 8, 8), uniforms(1, view)
    u[:, [22, 23, 32, 33]] = 0.7  # no stage happens
    before = aug.augment(images, view, u)
    u[:, 24:32] = 1 - u[:, 24:32]
    u[:, 34] = 1 - u[:, 34]
    assert torch.equal(aug.augment(images, view, u), before)


def test_changing_one_images_uniforms_changes_only_that_image():
    view = aug.strong(16)
    images, u = random_images(8, 20, 20), uniforms(8, view)
    other = u.clone()
    other[3] = uniforms(1, view, seed=9)
    changed = (aug.augment(images, view, u) != aug.augment(images, view, other)).flatten(1).any(1)
    assert changed.tolist() == [i == 3 for i in range(8)]


def test_a_batch_is_its_slices_put_together():
    view = aug.strong(16)
    images, u = random_images(8, 20, 20), uniforms(8, view)
    parts = [aug.augment(images[i::2], view, u[i::2]) for i in range(2)]
    torch.testing.assert_close(torch.stack(parts, dim=1).flatten(0, 1), aug.augment(images, view, u), atol=1e-6, rtol=0)


def test_values_lie_between_0_and_1_also_for_white_images():
    view = aug.strong(20)
    images = torch.full((500, 3, 32, 32), 255, dtype=torch.uint8)
    images[250:] = random_images(250, 32, 32)
    x = aug.augment(images, view, uniforms(500, view))
    assert x.min() >= 0
    assert x.max() <= 1


def test_stages_that_are_off_take_no_draws():
    assert plain(8).num_draws == 22
    assert aug.weak(8, flip=0.0).num_draws == 22
    assert aug.weak(8).num_draws == 23
    assert aug.strong(8).num_draws == 35
    assert aug.strong(8, flip=0.0).num_draws == 34


def test_views_without_flip_never_mirror():
    ramp = torch.arange(0, 256, 8, dtype=torch.uint8).expand(200, 3, 32, 32)
    for view in (aug.strong(32, flip=0.0), aug.weak(32, flip=0.0)):
        x = aug.grayscale(aug.augment(ramp, view, uniforms(200, view)))
        assert (x[..., -1] >= x[..., 0]).all()
    view = aug.weak(32)
    mirrored = (aug.augment(ramp, view, uniforms(200, view)).diff(dim=3) < -1e-6).flatten(1).any(1)
    assert 0.8 < mirrored.float().mean() < 1


def test_named_views_are_those_of_the_paper_and_its_code():
    strong, weak = aug.strong(32), aug.weak(32)
    assert (strong.flip, strong.jitter, strong.gray, strong.blur, strong.sigma) == (0.5, 0.8, 0.2, 0.5, (0.1, 2.0))
    assert (strong.brightness, strong.contrast, strong.saturation, strong.hue) == (0.4, 0.4, 0.4, 0.1)
    assert strong.area == weak.area == (0.2, 1.0)
    assert (weak.flip, weak.jitter, weak.gray, weak.blur) == (0.9, 0.0, 0.0, 0.0)
    assert strong.ratio == weak.ratio == (3 / 4, 4 / 3)


def test_output_is_channels_last_and_normalize_keeps_it():
    view, mean, std = aug.strong(16), torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.3])
    x = aug.augment(random_images(4, 20, 20), view, uniforms(4, view))
    assert x.is_contiguous(memory_format=torch.channels_last)
    y = aug.normalize(x, mean, std)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert aug.normalize(x.contiguous(), mean, std).is_contiguous()
    for c in range(3):
        torch.testing.assert_close(y[:, c], (x[:, c] - mean[c]) / std[c])


@pytest.mark.parametrize("view", [aug.strong(16), aug.weak(16, flip=0.0)], ids=["strong", "weak"])
def test_compiled_whole_equals_eager(view):
    images, u = random_images(6, 20, 24), uniforms(6, view)
    compiled = torch.compile(aug.augment, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(images, view, u), aug.augment(images, view, u), atol=1e-6, rtol=0)


def test_no_random_number_is_drawn_inside():
    view = aug.strong(16)
    images, u = random_images(4, 20, 20), uniforms(4, view)
    state = torch.get_rng_state()
    assert torch.equal(aug.augment(images, view, u), aug.augment(images, view, u))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "bad, word",
    [
        ({"size": 0}, "size"),
        ({"flip": 1.5}, "flip"),
        ({"blur": -0.1}, "blur"),
        ({"area": (0.0, 1.0)}, "area"),
        ({"area": (0.5, 0.2)}, "area"),
        ({"ratio": (0.0, 1.0)}, "ratio"),
        ({"hue": 0.6}, "hue"),
        ({"contrast": -1.0}, "contrast"),
    ],
)
def test_impossible_settings_are_refused_by_name(bad, word):
    with pytest.raises(ValueError, match=word):
        aug.View(**{"size": 8, **bad})


def test_wrong_number_of_uniforms_is_refused():
    with pytest.raises(ValueError, match="35 uniforms"):
        aug.augment(random_images(2, 8, 8), aug.strong(8), torch.rand(2, 34))


# In a loop of one's own


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_floats_from_0_to_1_give_the_view_of_the_same_uint8_images(dtype):
    view = aug.strong(16)
    images, u = random_images(6, 20, 20), uniforms(6, view)
    x = aug.augment((images.double() / 255).to(dtype), view, u)
    assert x.dtype == torch.float32
    atol = 5e-3 if dtype == torch.float16 else 1e-4  # a hue is steep where a pixel is nearly gray
    torch.testing.assert_close(x, aug.augment(images, view, u), atol=atol, rtol=0)


def test_without_uniforms_they_come_from_the_generator_or_else_from_torchs_own():
    view, images = aug.strong(16), random_images(6, 20, 20)
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(aug.augment(images, view, generator=generator), aug.augment(images, view, uniforms(6, view)))
    torch.manual_seed(5)
    first, second = aug.augment(images, view), aug.augment(images, view)
    torch.manual_seed(5)
    assert torch.equal(aug.augment(images, view), first)
    assert not torch.equal(first, second)


def test_views_have_full_precision_under_the_callers_autocast():
    view, images = aug.strong(16), random_images(6, 20, 20)
    u = uniforms(6, view)
    with torch.autocast("cpu", torch.bfloat16):
        x = aug.augment(images, view, u)
    assert x.dtype == torch.float32
    assert torch.equal(x, aug.augment(images, view, u))


@pytest.mark.parametrize(
    "images, message",
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.int32), "uint8, or floats from 0 to 1, not torch.int32"),
        (torch.zeros(3, 8, 8), r"\(B, C, H, W\), not \(3, 8, 8\): for one image, use image\[None\]"),
        (torch.zeros(2, 1, 8, 8), "need 3 channels, and the images have 1"),
        (torch.full((2, 3, 8, 8), 255.0), "values from 255 to 255: give uint8, or floats from 0 to 1"),
        (torch.zeros(2, 3, 8, 8) - 0.5, "values from -0.5 to -0.5"),
        (torch.full((2, 3, 8, 8), math.nan), "values from nan to nan"),
    ],
)
def test_images_of_another_type_shape_or_range_are_refused(images, message):
    with pytest.raises(ValueError, match=message):
        aug.augment(images, aug.strong(8))


@pytest.mark.parametrize(
    "images, message",
    [
        (np.zeros((2, 3, 8, 8), np.uint8), r"not a numpy array: use torch\.from_numpy"),
        ([np.zeros((3, 8, 8), np.uint8)], r"each image of a list .* not a numpy array: use torch\.from_numpy"),
        ([Image.new("RGB", (8, 8))], r"not a PIL image: use torch\.from_numpy\(numpy\.array\(image\)\)"),
        ([(torch.zeros(3, 8, 8), 1)], "not a tuple: if an item has a label, take the image out of it first"),
        ([], "must be a tensor .* or a list of tensors"),
    ],
)
def test_what_is_not_a_tensor_is_refused_with_what_to_do(images, message):
    with pytest.raises(TypeError, match=message):
        aug.TwoViews(aug.strong(8))(images)
    with pytest.raises(TypeError, match="images must be a tensor"):
        aug.augment(images, aug.strong(8))


MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def test_the_module_augments_and_normalizes_and_has_no_weights():
    view, images = aug.strong(16), random_images(6, 20, 20)
    x = aug.augment(images, view, uniforms(6, view))
    module = aug.Augment(view)
    assert torch.equal(module(images, torch.Generator().manual_seed(0)), x)
    assert torch.equal(module.eval()(images, torch.Generator().manual_seed(0)), x), "eval mode changes nothing"
    normalized = aug.Augment(view, MEAN, STD)(images, torch.Generator().manual_seed(0))
    torch.testing.assert_close(normalized, aug.normalize(x, torch.tensor(MEAN), torch.tensor(STD)))
    assert aug.Augment(view, MEAN, STD).state_dict() == {}
    assert aug.Augment(view, MEAN, STD).to("meta").mean.is_meta, "mean and std move with the module"
    with pytest.raises(ValueError, match="both mean and std"):
        aug.Augment(view, MEAN)


@pytest.mark.parametrize("index", [[4, 0, 4], None])
def test_views_of_a_batch_are_normalized_views_of_the_images_at_its_positions(index):
    images, views = random_images(3 if index is None else 6, 20, 20), [aug.strong(16), aug.weak(16)]
    draws, mean, std = [uniforms(3, view) for view in views], torch.tensor(MEAN), torch.tensor(STD)
    chosen = images if index is None else images[index]
    expected = [aug.normalize(aug.augment(chosen, v, u), mean, std) for v, u in zip(views, draws, strict=True)]
    ours = aug.make_views(images, None if index is None else torch.tensor(index), draws, views, mean, std)
    assert [torch.equal(x, want) for x, want in zip(ours, expected, strict=True)] == [True, True]


def test_two_views_are_drawn_one_after_the_other():
    images, g = random_images(6, 20, 20), torch.Generator().manual_seed(0)
    expected = [aug.Augment(view, MEAN, STD)(images, g) for view in (aug.strong(16), aug.weak(16))]
    x1, x2 = aug.TwoViews(aug.strong(16), aug.weak(16), MEAN, STD)(images, torch.Generator().manual_seed(0))
    assert torch.equal(x1, expected[0])
    assert torch.equal(x2, expected[1])
    x1, x2 = aug.TwoViews(aug.strong(16))(images)
    assert x1.shape == x2.shape
    assert not torch.equal(x1, x2)


def collate(samples):
    """Images of different sizes to one batch of two views; at the module's top, so that workers can use it."""
    return aug.TwoViews(aug.strong(16), mean=MEAN, std=STD)([image for image, _ in samples])


@pytest.mark.parametrize("workers", [0, 1])
def test_images_of_different_sizes_are_cropped_in_a_dataloaders_collate(workers):
    samples = [(random_images(1, height, 30, seed=height)[0], height) for height in (20, 24, 40, 17)]
    x1, x2 = next(iter(torch.utils.data.DataLoader(samples, batch_size=4, collate_fn=collate, num_workers=workers)))
    assert x1.shape == x2.shape == (4, 3, 16, 16)


def test_a_list_gives_a_view_of_each_image_in_its_order():
    images, g = (
        [random_images(1, height, 30, seed=height)[0] for height in (20, 24, 17)],
        torch.Generator().manual_seed(0),
    )
    expected = torch.cat([aug.augment(image[None], aug.strong(16), generator=g) for image in images])
    assert torch.equal(aug.Augment(aug.strong(16))(images, torch.Generator().manual_seed(0)), expected)


# Against torchvision, where it imports


@pytest.fixture(scope="module")
def torchvision_functional():
    try:
        from torchvision.transforms.v2 import functional
    except Exception as error:  # a build for another torch raises RuntimeError
        pytest.skip(f"torchvision does not import: {error}")
    return functional


def test_crop_and_resize_are_torchvisions(torchvision_functional):
    view = aug.View(16, area=(0.08, 1.0), flip=0.0)
    images, u = random_images(24, 40, 25), uniforms(24, view)
    boxes = torch.stack(aug.crop_boxes(u, 40, 25, view), dim=1).int().tolist()
    x = images.float() / 255
    expected = [
        torchvision_functional.resized_crop(image, *box, [16, 16], antialias=True)
        for image, box in zip(x, boxes, strict=True)
    ]
    torch.testing.assert_close(aug.augment(images, view, u), torch.stack(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_jitter_with_the_same_factors_and_order_is_torchvisions(torchvision_functional, order):
    f, x, factors = torchvision_functional, random_images(8, 12, 12).float() / 255, (1.3, 0.7, 1.4, 0.08)
    expected = x
    for operation in order:
        adjust = (f.adjust_brightness, f.adjust_contrast, f.adjust_saturation, f.adjust_hue)[operation]
        expected = adjust(expected, factors[operation])
    torch.testing.assert_close(jitter_one(x, order, dict(enumerate(factors))), expected, atol=2e-5, rtol=0)


def test_grayscale_is_torchvisions(torchvision_functional):
    x = random_images(4, 12, 12).float() / 255
    torch.testing.assert_close(aug.grayscale(x), torchvision_functional.rgb_to_grayscale(x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_blur_is_close_to_torchvisions_gaussian(torchvision_functional, sigma):
    """Pillow's three box blurs approximate the Gaussian; away from the edges, which torchvision mirrors."""
    view, images = plain(32, blur=1.0, sigma=(sigma, sigma)), random_images(4, 32, 32)
    ours = aug.augment(images, view, uniforms(4, view))
    expected = torchvision_functional.gaussian_blur(images.float() / 255, [17, 17], [sigma, sigma])
    error = (ours - expected)[..., 8:-8, 8:-8].abs()
    assert error.max() < 8 * STEP
    assert error.mean() < 1.5 * STEP


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_in_a_cuda_graph_equals_the_cpu():
    view = aug.strong(16)
    images, u = random_images(32, 24, 24), uniforms(32, view)
    images_gpu, u_gpu = images.cuda(), torch.zeros_like(u, device="cuda")
    aug.augment(images_gpu, view, u_gpu)  # libraries set themselves up outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = aug.augment(images_gpu, view, u_gpu)
    u_gpu.copy_(u)
    graph.replay()
    torch.testing.assert_close(x.cpu(), aug.augment(images, view, u), atol=1e-4, rtol=0)
