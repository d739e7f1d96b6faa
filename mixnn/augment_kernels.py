"""A whole view as two CUDA kernels written in Triton: all stages but the blur, a program per image; then the blur.

`augment.py` has the same stages in plain PyTorch, hundreds of small kernels on CUDA, and a test compares the two.
What is decided per image (crop, flip, order of the color jitter, blur) agrees exactly: it is computed from the same
uniforms by the same float32 operations, with correctly rounded divisions and roots and without fused multiply-adds.

There the resampling is products of matrices; here a pixel of the view sums the few pixels whose weight is not zero, for
example 2 x 2 where a crop is enlarged. The blur is a product of matrices in both, and has a kernel of its own because
it needs more registers.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

MAX_SIZE = 64  # of a view: a program holds it in registers
MAX_SIDE = 128  # of an image: a pixel of a view reads all pixels under it, one after another
PIXELS_PER_WARP = 128  # with 256 a program uses twice the registers, and more than there are at 64 x 64 pixels
BLUR_WARPS = 16  # at most; its programs need more registers

ATTEMPTS = tl.constexpr(10)  # as augment.NUM_ATTEMPTS; the crop takes 2 * ATTEMPTS + 2 uniforms
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# Integers whose values compile no kernels of their own.
NOT_SPECIALIZED = (
    *("height", "width", "size", "num_draws", "center_height", "center_width"),
    *("flip_column", "jitter_column", "gray_column", "blur_column"),
)


@triton.jit
def _exp(x):
    """e^x with the same bits as torch.exp."""
    return tl.exp(x) if INTERPRETED else libdevice.exp(x)


@triton.jit
def _round(x):
    """Round to the nearest integer, halves to even, for 0 <= x < 2^22: what is left of the fraction is rounded away."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _clamp(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _luma(r, g, b):
    return 0.2989 * r + 0.587 * g + 0.114 * b


@triton.jit
def _crop_box(u, height, width, center_height, center_width, area_low, area_span, ratio_low, ratio_span):
    """`augment.crop_boxes`: top, left, height and width."""
    attempt = tl.arange(0, 16)
    exists = attempt < ATTEMPTS
    area = area_low + area_span * tl.load(u + attempt, mask=exists, other=0.5)
    target = area * (height * width).to(tl.float32)
    ratio = _exp(ratio_low + ratio_span * tl.load(u + ATTEMPTS + attempt, mask=exists, other=0.5))
    w = _round(tl.sqrt_rn(target * ratio))
    h = _round(tl.sqrt_rn(tl.div_rn(target, ratio)))
    fits = exists & (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = tl.min(tl.where(fits, attempt, 16), 0)
    found = first < 16
    chosen_h = tl.sum(tl.where(attempt == first, h, 0.0), 0)
    chosen_w = tl.sum(tl.where(attempt == first, w, 0.0), 0)
    top = tl.floor(tl.load(u + 2 * ATTEMPTS) * (height - chosen_h + 1))
    left = tl.floor(tl.load(u + 2 * ATTEMPTS + 1) * (width - chosen_w + 1))
    top = tl.where(found, top, ((height - center_height) // 2).to(tl.float32))
    left = tl.where(found, left, ((width - center_width) // 2).to(tl.float32))
    return top, left, tl.where(found, chosen_h, center_height), tl.where(found, chosen_w, center_width)


@triton.jit
def _window(length, out, size):
    """For each output pixel: the center of its window in the box, and the first pixel; half the width, and the taps."""
    scale = tl.div_rn(length, size.to(tl.float32))
    center = (out + 0.5) * scale
    reach = tl.maximum(scale, 1.0)
    return center, tl.ceil(center - reach - 0.5), reach, tl.ceil(2 * reach).to(tl.int32)


@triton.jit
def _weight(pixel, center, reach, length):
    """A triangle around the center; 0 outside the box."""
    weight = tl.maximum(reach - tl.abs(pixel + 0.5 - center), 0.0)
    return tl.where((pixel >= 0) & (pixel < length), weight, 0.0)


@triton.jit
def _pixels(size, SIDE: tl.constexpr):
    """Row, column and place in memory of each pixel of a square, and which are inside the view.

    They are one long vector, so that neighboring threads have neighboring pixels. For a matrix of pixels Triton chose
    threads along a column, and each access touched 32 lines of memory.
    """
    pixel = tl.arange(0, SIDE * SIDE)
    y, x = pixel // SIDE, pixel % SIDE
    return y, x, y * size + x, (y < size) & (x < size)


@triton.jit
def _resize(image, y, x, inside, top, left, box_height, box_width, flipped, height, width, size):
    """`augment.resample` with Pillow's bilinear weights: red, green and blue of each pixel of the view."""
    center_y, first_y, reach_y, taps_y = _window(box_height, y.to(tl.float32), size)
    center_x, first_x, reach_x, taps_x = _window(box_width, tl.where(flipped, size - 1 - x, x).to(tl.float32), size)
    r = tl.zeros(y.shape, tl.float32)
    g = tl.zeros(y.shape, tl.float32)
    b = tl.zeros(y.shape, tl.float32)
    total = tl.zeros(y.shape, tl.float32)
    for i in range(taps_y):
        weight_y = _weight(first_y + i, center_y, reach_y, box_height)
        row = (top + first_y + i).to(tl.int32) * width
        for j in range(taps_x):
            weight = weight_y * _weight(first_x + j, center_x, reach_x, box_width)
            at = image + row + (left + first_x + j).to(tl.int32)
            counts = inside & (weight > 0)
            r += weight * tl.load(at, mask=counts, other=0).to(tl.float32)
            g += weight * tl.load(at + height * width, mask=counts, other=0).to(tl.float32)
            b += weight * tl.load(at + 2 * height * width, mask=counts, other=0).to(tl.float32)
            total += weight
    scale = 1 / tl.where(inside, total * 255, 1.0)
    return r * scale, g * scale, b * scale


@triton.jit
def _rank(u, a, b, c, before_a, before_b, before_c):
    """Count which of a, b and c come before u; among equals, the one of the lower number does."""
    return (
        ((a < u) | ((a == u) & before_a)).to(tl.int32)
        + ((b < u) | ((b == u) & before_b)).to(tl.int32)
        + ((c < u) | ((c == u) & before_c)).to(tl.int32)
    )


@triton.jit
def _blend(r, g, b, factor, to_mean, to_gray, inside, size):
    gray = _luma(r, g, b)
    mean = tl.sum(tl.where(inside, gray, 0.0)) / (size * size)
    other = mean * to_mean + gray * to_gray
    return _clamp(other + r * factor), _clamp(other + g * factor), _clamp(other + b * factor)


@triton.jit
def _trapezoid(hue, value, chroma):
    hue -= 6 * tl.floor(hue * (1 / 6))
    return value - chroma * _clamp(2 - tl.abs(hue - 2))


@triton.jit
def _shift_hue(r, g, b, shift):
    """`augment.shift_hue`."""
    value = tl.maximum(tl.maximum(r, g), b)
    chroma = value - tl.minimum(tl.minimum(r, g), b)
    sector = tl.where(value == r, g - b, tl.where(value == g, b - r + 2 * chroma, r - g + 4 * chroma))
    hue = sector / tl.maximum(chroma, 1e-12) + 6 * shift
    return _trapezoid(hue + 5, value, chroma), _trapezoid(hue + 3, value, chroma), _trapezoid(hue + 1, value, chroma)


@triton.jit
def _color_jitter(r, g, b, u, inside, size, low_b, span_b, low_c, span_c, low_s, span_s, low_h, span_h):
    """`augment.color_jitter`, one operation after another. Four uniforms are for the factors, four for the order."""
    brightness = low_b + span_b * tl.load(u)
    contrast = low_c + span_c * tl.load(u + 1)
    saturation = low_s + span_s * tl.load(u + 2)
    shift = low_h + span_h * tl.load(u + 3)
    u_b, u_c, u_s, u_h = tl.load(u + 4), tl.load(u + 5), tl.load(u + 6), tl.load(u + 7)
    round_c = _rank(u_c, u_b, u_s, u_h, True, False, False)
    round_s = _rank(u_s, u_b, u_c, u_h, True, True, False)
    round_h = _rank(u_h, u_b, u_c, u_s, True, True, True)
    for k in range(4):
        if k == round_h:
            r, g, b = _shift_hue(r, g, b, shift)
        else:
            factor = tl.where(k == round_c, contrast, tl.where(k == round_s, saturation, brightness))
            to_mean = tl.where(k == round_c, 1 - contrast, 0.0)
            to_gray = tl.where(k == round_s, 1 - saturation, 0.0)
            r, g, b = _blend(r, g, b, factor, to_mean, to_gray, inside, size)
    return r, g, b


@triton.jit
def _normalize(plane, mean, std, channel):
    return (plane - tl.load(mean + channel)) * (1 / tl.load(std + channel))


@triton.jit
def _happens(u, column, probability):
    """Whether a stage is applied. One that is off has no column."""
    return tl.load(u + column, mask=probability > 0, other=1.0) < probability


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def view_kernel(
    images, index, u, mean, std, out, height, width, size, num_draws,
    flip_column, jitter_column, gray_column, blur_column, flip, jitter, gray, blur,
    center_height, center_width, area_low, area_span, ratio_low, ratio_span,
    brightness_low, brightness_span, contrast_low, contrast_span, saturation_low, saturation_span, hue_low, hue_span,
    SIDE: tl.constexpr,
):  # fmt: skip
    """The view of this program's image: images[index], or the image of the program's number without an index."""
    number = tl.program_id(0)
    u += number * num_draws
    out += number.to(tl.int64) * (3 * size * size)
    source = number.to(tl.int64) if index is None else tl.load(index + number)
    image = images + source * (3 * height * width)
    top, left, box_height, box_width = _crop_box(
        u, height, width, center_height, center_width, area_low, area_span, ratio_low, ratio_span
    )
    flipped = _happens(u, flip_column, flip)
    y, x, place, inside = _pixels(size, SIDE)
    r, g, b = _resize(image, y, x, inside, top, left, box_height, box_width, flipped, height, width, size)
    if _happens(u, jitter_column, jitter):
        r, g, b = _color_jitter(
            r, g, b, u + jitter_column + 1, inside, size, brightness_low, brightness_span,
            contrast_low, contrast_span, saturation_low, saturation_span, hue_low, hue_span,
        )  # fmt: skip
    if _happens(u, gray_column, gray):
        r = _luma(r, g, b)
        g = r
        b = r
    if not _happens(u, blur_column, blur):  # or else `blur_kernel` does the rest
        r, g, b = _clamp(r), _clamp(g), _clamp(b)
        if mean is not None:
            r, g, b = _normalize(r, mean, std, 0), _normalize(g, mean, std, 1), _normalize(b, mean, std, 2)
    tl.store(out + 3 * place, r, mask=inside)
    tl.store(out + 3 * place + 1, g, mask=inside)
    tl.store(out + 3 * place + 2, b, mask=inside)


@triton.jit
def _box_through(distance, radius):
    """Sum of a box blur's weights of the pixels up to this distance."""
    return _clamp((radius + 1 + distance) / (2 * radius + 1))


@triton.jit
def _product(a, b):
    """a @ b in float32; not on tensor cores, which would round to TF32 or need many more registers."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _blur_matrix(sigma, size, SIDE: tl.constexpr):
    """`augment.blur_matrix`, with zeros outside the view."""
    variance = tl.div_rn(sigma * sigma, 3.0)
    full = tl.floor((tl.sqrt_rn(12 * variance + 1) - 1) / 2)
    part = (2 * full + 1) * (full * (full + 1) - 3 * variance) / (6 * (variance - (full + 1) * (full + 1)))
    y, x = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    distance = (x - y).to(tl.float32)
    through = tl.where(x == size - 1, 1.0, _box_through(distance, full + part))
    before = tl.where(x == 0, 0.0, _box_through(distance - 1, full + part))
    box = tl.where((y < size) & (x < size), through - before, 0.0)
    return _product(_product(box, box), box)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def blur_kernel(
    u, mean, std, out, size, num_draws, blur_column, blur, sigma_low, sigma_span, SIDE: tl.constexpr
):  # fmt: skip
    """Blur one channel of a view that `view_kernel` left as it was before the blur, and normalize it."""
    number, channel = tl.program_id(0), tl.program_id(1)
    u += number * num_draws
    if _happens(u, blur_column, blur):
        _, _, place, inside = _pixels(size, SIDE)
        at = out + number.to(tl.int64) * (3 * size * size) + 3 * place + channel
        plane = tl.load(at, mask=inside, other=0.0)
        matrix = _blur_matrix(sigma_low + sigma_span * tl.load(u + blur_column + 1), size, SIDE)
        blurred = _product(_product(matrix, tl.reshape(plane, (SIDE, SIDE))), tl.trans(matrix))
        plane = _clamp(tl.reshape(blurred, (SIDE * SIDE,)))
        if mean is not None:
            plane = _normalize(plane, mean, std, channel)
        tl.store(at, plane, mask=inside)


def supports(images: Tensor, size: int) -> bool:
    """Whether there is a kernel: for 8-bit color images in contiguous memory that are not large, and small views."""
    _, channels, height, width = images.shape
    small = size <= MAX_SIZE and max(height, width) <= MAX_SIDE
    return small and channels == 3 and images.dtype == torch.uint8 and images.is_contiguous()


def make_view(
    images: Tensor,
    index: Tensor | None,
    u: Tensor,
    size: int,
    numbers: dict[str, float],
    mean: Tensor | None = None,
    std: Tensor | None = None,
) -> Tensor:
    """`augment.plain_augment` of images[index] on CUDA, normalized if mean and std are given.

    The numbers are the kernel's arguments of the same names.
    """
    height, width = images.shape[2:]
    out = torch.empty((len(u), 3, size, size), device=u.device, memory_format=torch.channels_last)
    side, u = max(16, triton.next_power_of_2(size)), u.contiguous()
    sigma = {name: numbers[name] for name in ("sigma_low", "sigma_span")}
    numbers = {name: value for name, value in numbers.items() if name not in sigma}
    with torch.cuda.device_of(images):
        view_kernel[(len(u),)](
            images, None if index is None else index.contiguous(), u, mean, std, out,
            height, width, size, u.shape[1], **numbers, SIDE=side,
            num_warps=side * side // PIXELS_PER_WARP, enable_fp_fusion=False,
        )  # fmt: skip
        if numbers["blur"] > 0:
            blur_kernel[(len(u), 3)](
                u, mean, std, out, size, u.shape[1], numbers["blur_column"], numbers["blur"], **sigma, SIDE=side,
                num_warps=min(BLUR_WARPS, side * side // PIXELS_PER_WARP), enable_fp_fusion=False,
            )  # fmt: skip
    return out
