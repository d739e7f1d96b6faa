"""The first layers of a network for small images as CUDA kernels written in Triton: convolution, batch norm and ReLU.

Each output of a 3x3 convolution of three channels takes 27 multiplications. Computing it again is cheaper than reading
it from memory. So the outputs x are never stored: they are computed where they are needed, from the 27 inputs of each
pixel, its patch.

What batch norm needs of x follows from sums over patches p, which get a 28th number that is always 1. With x = w p, the
moments of x are products of w with sum(p) and sum(p p). Backward, nothing needs the gradient of x itself, but only its
product with the patches, for the gradient of the weights. That is linear in the gradient of y = relu(norm(x)), so one
pass over it is enough. With the slopes s (the gradient of y where y is positive) and m pixels in a group:

    dx = scale (s - sum(s) / m - x_hat sum(s x_hat) / m)
    sum(dx p) = scale (sum(s p) - sum(s) sum(p) / m - sum(x_hat p) sum(s x_hat) / m)

All of this is made of sum(s p) and sum(p p): sum(s) is the product of s with the 1, and sum(s x) = w sum(s p).

Patches, weights and slopes are in bf16, sums in float32 and in a fixed order, so results are the same bits every time.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnn.nn.batch_norm_kernels import affine, is_last, load_pair, store_pair, zeroed_counters

TAPS = tl.constexpr(27)  # inputs of an output: 3 channels, 3 rows, 3 columns
COLS = tl.constexpr(32)  # TAPS and the 1, rounded up to a power of two
PIXELS = 128  # of a tile
TILES = tl.constexpr(4)  # most tiles per program of the kernel of the moments
BLOCK = tl.constexpr(8)  # rows of sum(p p), or channels, per program of a kernel that adds up the images of a group
IMAGES = tl.constexpr(8)  # images that such a program loads at once
REGISTERS = 128  # per thread of the kernel of the slopes, so that four programs fit on a multiprocessor
COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # the interpreter cannot multiply bf16
NOT_SPECIALIZED = ("tiles", "parts", "groups", "per_view", "num_groups")  # their values compile no kernels of their own


@triton.jit
def _product(a, b):
    if not COMPILED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b)


@triton.jit
def stem_pad_kernel(
    x, padded, size, strides, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Images in bf16 with a border of zeros, so that patches need no check of borders, and a channel of ones."""
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    column, row = at % (WIDTH + 2) - 1, at // (WIDTH + 2) % (HEIGHT + 2) - 1
    channel, image = at // ((WIDTH + 2) * (HEIGHT + 2)) % 4, at // ((WIDTH + 2) * (HEIGHT + 2) * 4)
    inside = (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH) & (channel < 3) & (at < size)
    of_x = image * strides[0] + channel * strides[1] + row * strides[2] + column * strides[3]
    inputs = tl.load(x + of_x, mask=inside, other=0.0).to(tl.float32)
    tl.store(padded + at, tl.where(channel == 3, 1.0, inputs).to(tl.bfloat16), mask=at < size)


@triton.jit
def _patches(padded, image, first, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr):
    """Patches of an image's pixels from `first` on, a column for each: (COLS, PIXELS); zeros beyond the last pixel."""
    AREA: tl.constexpr = (HEIGHT + 2) * (WIDTH + 2)
    tap, pixel = tl.arange(0, COLS), first + tl.arange(0, PIXELS)
    exists = (tap <= TAPS)[:, None]  # tap TAPS is the first of the channel of ones
    if HEIGHT * WIDTH % PIXELS:
        exists = exists & (pixel < HEIGHT * WIDTH)[None, :]
    of_tap = tap // 9 * AREA + tap // 3 % 3 * (WIDTH + 2) + tap % 3
    of_pixel = pixel // WIDTH * (WIDTH + 2) + pixel % WIDTH
    start = padded + image.to(tl.int64) * (4 * AREA)
    return tl.load(start + (of_tap[:, None] + of_pixel[None, :]), mask=exists, other=0.0)


@triton.jit
def _weights(weight, channel, strides):
    """Weights of some channels, (channels, COLS)."""
    tap = tl.arange(0, COLS)
    at = tap // 9 * strides[1] + tap // 3 % 3 * strides[2] + tap % 3 * strides[3]
    return tl.load(weight + channel[:, None] * strides[0] + at[None, :], mask=(tap < TAPS)[None, :], other=0.0)


@triton.jit
def _rows(image, first, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr):
    """Row numbers of an image's pixels from `first` on in the matrix (images * pixels, C), and which of them exist."""
    pixel = (first + tl.arange(0, PIXELS))[:, None]
    return image.to(tl.int64) * (HEIGHT * WIDTH) + pixel, pixel < HEIGHT * WIDTH


@triton.jit
def _add_images(partial, group, row, size, parts, groups, per_view):
    """Rows of the matrices (size, COLS), added up over all parts of all images of a group."""
    first, tap = group // groups * per_view + group % groups, tl.arange(0, COLS)
    total = tl.zeros((IMAGES, row.shape[0], COLS), tl.float32)
    num = per_view // groups * parts
    for i in tl.range(0, num, IMAGES, num_stages=1):
        number = i + tl.arange(0, IMAGES)
        matrix = (first + number // parts * groups) * parts + number % parts
        at = (matrix[:, None, None] * size + row[None, :, None]) * COLS + tap[None, None, :]
        total += tl.load(partial + at, mask=(number < num)[:, None, None], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _column(matrix, index):
    return tl.sum(tl.where(tl.arange(0, COLS)[None, :] == index, matrix, 0.0), 1)


# Forward


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def stem_moments_kernel(padded, partial, tiles, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr):
    """sum(p p) over some tiles of an image, (COLS, COLS)."""
    image, part = tl.program_id(0), tl.program_id(1)
    total = tl.zeros((COLS, COLS), tl.float32)
    for i in tl.range(part * TILES, tl.minimum((part + 1) * TILES, tiles), num_stages=1):
        patches = _patches(padded, image, i * PIXELS, HEIGHT, WIDTH, PIXELS)
        total += _product(patches, tl.trans(patches))
    row, tap = tl.arange(0, COLS)[:, None], tl.arange(0, COLS)[None, :]
    tl.store(partial + ((image * tl.num_programs(1) + part) * COLS + row) * COLS + tap, total)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def stem_stats_kernel(
    partial, weight, moments, stats, counters, parts, groups, per_view, num_groups, w_strides, CHANNELS: tl.constexpr
):
    """sum(p p) of a group, of which the last program makes mean and variance of x."""
    group, row = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tap, channel = tl.arange(0, COLS), tl.arange(0, CHANNELS)
    moments += group * (COLS * COLS)
    some_rows = _add_images(partial, group, row, COLS, parts, groups, per_view)
    tl.store(moments + row[:, None] * COLS + tap[None, :], some_rows)
    if is_last(counters + group, COLS // BLOCK):
        sums = tl.load(moments + tap[:, None] * COLS + tap[None, :], cache_modifier=".cg")
        w = _weights(weight, channel, w_strides).to(tl.float32)
        x_patch = tl.dot(w, sums, input_precision="ieee") / tl.sum(tl.where(tap == TAPS, _column(sums, TAPS), 0.0), 0)
        mean = _column(x_patch, TAPS)
        var = tl.maximum(tl.sum(x_patch * w, 1) - mean * mean, 0.0)
        store_pair(stats, mean, var, channel, group, num_groups, CHANNELS)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def stem_forward_kernel(
    padded, weight, norm_weight, norm_bias, y, stats, eps, groups, per_view, num_groups, w_strides,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """y of a tile of an image's pixels."""
    image, first, channel = tl.program_id(0), tl.program_id(1) * PIXELS, tl.arange(0, CHANNELS)
    w, patches = _weights(weight, channel, w_strides), _patches(padded, image, first, HEIGHT, WIDTH, PIXELS)
    x = _product(tl.trans(patches), tl.trans(w))  # not rounded to bf16: its statistics and gradients are not either
    group = image // per_view * groups + image % groups
    mean, var = load_pair(stats, channel, group, num_groups, CHANNELS)
    _, scale, shift = affine(mean, var, norm_weight, norm_bias, eps, channel)
    out = tl.maximum(x * scale[None, :] + shift[None, :], 0.0)
    row, exists = _rows(image, first, HEIGHT, WIDTH, PIXELS)
    tl.store(y + row * CHANNELS + channel[None, :], out.to(tl.bfloat16), mask=exists)


# Backward


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def stem_slope_kernel(
    padded, y, dy, dy2, partial, tiles, TWO: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """sum(s p) of an image, (CHANNELS, COLS)."""
    image, channel = tl.program_id(0), tl.arange(0, CHANNELS)
    total = tl.zeros((CHANNELS, COLS), tl.float32)
    for i in tl.range(tiles, num_stages=1):  # not through shared memory, which would leave room for fewer programs
        row, exists = _rows(image, i * PIXELS, HEIGHT, WIDTH, PIXELS)
        at = row * CHANNELS + channel[None, :]
        slope = tl.load(dy + at, mask=exists, other=0.0)
        if TWO:  # added as autograd does it, so their sum is rounded
            slope = (slope.to(tl.float32) + tl.load(dy2 + at, mask=exists, other=0.0).to(tl.float32)).to(tl.bfloat16)
        slope = tl.where(tl.load(y + at, mask=exists, other=0.0) > 0, slope, 0.0).to(tl.bfloat16)
        patches = _patches(padded, image, i * PIXELS, HEIGHT, WIDTH, PIXELS)
        total += _product(tl.trans(slope), tl.trans(patches))
    at = (image * CHANNELS + channel)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(partial + at, total)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def stem_gradient_kernel(
    partial, moments, weight, norm_weight, norm_bias, stats, eps, by_group, counters, d_weight, d_parameters,
    groups, per_view, num_groups, w_strides, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK channels, also those of batch norm. A program does a group; the last adds the groups."""
    group, block, tap = tl.program_id(0), tl.program_id(1), tl.arange(0, COLS)
    channel = block * BLOCK + tl.arange(0, BLOCK)
    slope_patch = _add_images(partial, group, channel, CHANNELS, 1, groups, per_view)
    patch_patch = tl.load(moments + (group * COLS + tap)[:, None] * COLS + tap[None, :])
    w = _weights(weight, channel, w_strides).to(tl.float32)
    mean, var = load_pair(stats, channel, group, num_groups, CHANNELS)
    inverse_std, scale, _ = affine(mean, var, norm_weight, norm_bias, eps, channel)
    x_patch = tl.sum(w[:, :, None] * patch_patch[None, :, :], 1)
    sum_patch = _column(patch_patch, TAPS)
    num = tl.sum(tl.where(tap == TAPS, sum_patch, 0.0), 0)
    slopes = _column(slope_patch, TAPS)
    slopes_x_hat = (tl.sum(slope_patch * w, 1) - mean * slopes) * inverse_std
    x_hat_patch = (x_patch - mean[:, None] * sum_patch[None, :]) * inverse_std[:, None]
    removed = slopes[:, None] * sum_patch[None, :] + slopes_x_hat[:, None] * x_hat_patch
    gradient = scale[:, None] * (slope_patch - removed / num)
    # Columns TAPS and TAPS + 1 have no weights: they carry the gradients of batch norm's bias and weight
    gradient = tl.where((tap == TAPS)[None, :], slopes[:, None], gradient)
    gradient = tl.where((tap == TAPS + 1)[None, :], slopes_x_hat[:, None], gradient)
    at = channel[:, None] * COLS + tap[None, :]
    tl.store(by_group + group * (CHANNELS * COLS) + at, gradient)
    if is_last(counters + block, num_groups):
        total = tl.zeros((BLOCK, COLS), tl.float32)
        for i in range(num_groups):
            total += tl.load(by_group + i * (CHANNELS * COLS) + at, cache_modifier=".cg")
        to = tap // 9 * w_strides[1] + tap // 3 % 3 * w_strides[2] + tap % 3 * w_strides[3]
        to = d_weight + channel[:, None] * w_strides[0] + to[None, :]
        tl.store(to, total.to(d_weight.dtype.element_ty), mask=(tap < TAPS)[None, :])
        store_pair(d_parameters, _column(total, TAPS), _column(total, TAPS + 1), channel, 0, 1, CHANNELS)


# Launches


def forward(
    x: Tensor, weight: Tensor, norm_weight: Tensor, norm_bias: Tensor, views: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (B, C, H, W) in channels_last order, mean and variance by group of the convolution of x (B, 3, H, W).

    Also what backward needs: the images with a border, and sum(p p) by group.
    """
    (images, _, height, width), channels, num_groups = x.shape, len(weight), views * groups
    y = weight.new_empty(images, height, width, channels).permute(0, 3, 1, 2)
    padded = weight.new_empty(images, 4, height + 2, width + 2)
    tiles = triton.cdiv(height * width, PIXELS)
    parts = triton.cdiv(tiles, TILES.value)
    partial = torch.empty((images, parts, COLS.value, COLS.value), device=x.device)
    moments = torch.empty((num_groups, COLS.value, COLS.value), device=x.device)
    stats = torch.empty((2, num_groups, channels), device=x.device)
    sizes, layout = {"HEIGHT": height, "WIDTH": width}, (groups, images // views, num_groups)
    with torch.cuda.device_of(x):
        stem_pad_kernel[(triton.cdiv(padded.numel(), 1024),)](
            x, padded, padded.numel(), x.stride(), **sizes, COUNT=1024, num_warps=4
        )
        stem_moments_kernel[(images, parts)](padded, partial, tiles, **sizes, PIXELS=PIXELS, num_warps=4)
        stem_stats_kernel[(num_groups, COLS.value // BLOCK.value)](
            partial, weight, moments, stats, zeroed_counters(x.device, num_groups), parts, *layout, weight.stride(),
            CHANNELS=channels, num_warps=4,
        )  # fmt: skip
        stem_forward_kernel[(images, tiles)](
            padded, weight, norm_weight, norm_bias, y, stats, eps, *layout, weight.stride(),
            **sizes, CHANNELS=channels, PIXELS=PIXELS, num_warps=4,
        )  # fmt: skip
    return y, stats, padded, moments


def backward(
    dy: Tensor, dy2: Tensor | None, y: Tensor, padded: Tensor, moments: Tensor, weight: Tensor, norm_weight: Tensor,
    norm_bias: Tensor, stats: Tensor, views: int, groups: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the weights, in their type, and of batch norm's bias and weight, stacked (2, C)."""
    (images, channels, height, width), num_groups = y.shape, views * groups
    two, blocks = dy2 is not None, channels // BLOCK.value
    maps = [t.contiguous(memory_format=torch.channels_last) for t in (dy, dy if dy2 is None else dy2)]
    partial = torch.empty((images, channels, COLS.value), device=y.device)
    by_group = torch.empty((num_groups, channels, COLS.value), device=y.device)
    d_weight, d_parameters = torch.empty_like(weight), torch.empty((2, channels), device=y.device)
    with torch.cuda.device_of(y):
        stem_slope_kernel[(images,)](
            padded, y, *maps, partial, triton.cdiv(height * width, PIXELS), TWO=two, HEIGHT=height, WIDTH=width,
            CHANNELS=channels, PIXELS=PIXELS, num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip
        stem_gradient_kernel[(num_groups, blocks)](
            partial, moments, weight, norm_weight, norm_bias, stats, eps, by_group, zeroed_counters(y.device, blocks),
            d_weight, d_parameters, groups, images // views, num_groups, weight.stride(), CHANNELS=channels,
            num_warps=4,
        )  # fmt: skip
    return d_weight, d_parameters
