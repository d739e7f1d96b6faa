"""The first convolution of a network for small images as CUDA kernels written in Triton.

A 3x3 convolution of three channels has 27 products per output: it is bound by memory, and cuDNN's kernels, made for
many channels, take several times as long as writing the output. Here a program gathers the 27 inputs of each of its
pixels, which makes a matrix with a column per pixel, and multiplies it with the weights.

Numbers are rounded to bf16 and added up in float32, as in cuDNN. Partial gradients of the weights are added in a fixed
order, so results are the same bits every time.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS = 128  # of a tile
PROGRAMS = 1056  # of the weights' gradient: eight for each multiprocessor of an H200
TAPS = tl.constexpr(27)  # inputs of an output: 3 channels, 3 rows, 3 columns
COLS = tl.constexpr(32)  # TAPS, rounded up to a power of two
COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # the interpreter cannot multiply bf16
NOT_SPECIALIZED = ("num", "tiles")  # integers whose values compile no kernels of their own


@triton.jit
def _product(a, b):
    if not COMPILED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b)


@triton.jit
def _patches(x, first, num, strides, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr):
    """The inputs of the pixels from `first` on, a column for each, (COLS, PIXELS); zeros outside of the image."""
    tap, pixel = tl.arange(0, COLS)[:, None], (first + tl.arange(0, PIXELS))[None, :]
    image, row, column = pixel // (HEIGHT * WIDTH), pixel // WIDTH % HEIGHT, pixel % WIDTH
    row, column = row + tap // 3 % 3 - 1, column + tap % 3 - 1
    inside = (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH) & (tap < TAPS) & (pixel < num)
    at = image.to(tl.int64) * strides[0] + tap // 9 * strides[1] + row * strides[2] + column * strides[3]
    return tl.load(x + at, mask=inside, other=0.0).to(tl.bfloat16)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def stem_forward_kernel(
    x, weight, y, num, strides, w_strides,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile of pixels."""
    first, channel = tl.program_id(0) * PIXELS, tl.arange(0, CHANNELS)
    tap = tl.arange(0, COLS)
    at = tap // 9 * w_strides[1] + tap // 3 % 3 * w_strides[2] + tap % 3 * w_strides[3]
    w = tl.load(weight + channel[:, None] * w_strides[0] + at[None, :], mask=(tap < TAPS)[None, :], other=0.0)
    out = tl.trans(_product(w, _patches(x, first, num, strides, HEIGHT, WIDTH, PIXELS))).to(tl.bfloat16)
    pixel = (first + tl.arange(0, PIXELS))[:, None]
    tl.store(y + pixel.to(tl.int64) * CHANNELS + channel[None, :], out, mask=pixel < num)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def stem_weight_kernel(
    x, dy, partial, num, tiles, strides,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """The part of the weights' gradient, (CHANNELS, COLS), that comes from some tiles of pixels."""
    channel, tap = tl.arange(0, CHANNELS), tl.arange(0, COLS)
    total = tl.zeros((CHANNELS, COLS), tl.float32)
    for i in tl.range(tiles, num_stages=1):  # not through shared memory, which would leave room for fewer programs
        first = (tl.program_id(0) + i * tl.num_programs(0)) * PIXELS
        pixel = (first + tl.arange(0, PIXELS))[:, None]
        slope = tl.load(dy + pixel.to(tl.int64) * CHANNELS + channel[None, :], mask=pixel < num, other=0.0)
        patches = _patches(x, first, num, strides, HEIGHT, WIDTH, PIXELS)
        total += _product(tl.trans(slope), tl.trans(patches))
    at = (tl.program_id(0) * CHANNELS + channel[:, None]) * COLS + tap[None, :]
    tl.store(partial + at, total)


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """The convolution of x (B, 3, H, W) with weights (C, 3, 3, 3) in bf16: (B, C, H, W) in channels_last order."""
    (batch, _, height, width), channels = x.shape, len(weight)
    y = weight.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)
    num = batch * height * width
    with torch.cuda.device_of(x):
        stem_forward_kernel[(triton.cdiv(num, PIXELS),)](
            x, weight, y, num, x.stride(), weight.stride(),
            HEIGHT=height, WIDTH=width, CHANNELS=channels, PIXELS=PIXELS, num_warps=4,
        )  # fmt: skip
    return y


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weights, in their type."""
    (batch, _, height, width), channels = x.shape, len(weight)
    num = batch * height * width
    programs, dy = max(1, min(PROGRAMS, triton.cdiv(num, PIXELS))), dy.contiguous(memory_format=torch.channels_last)
    partial = torch.empty((programs, channels, COLS.value), device=x.device)
    with torch.cuda.device_of(x):
        stem_weight_kernel[(programs,)](
            x, dy, partial, num, triton.cdiv(num, PIXELS * programs), x.stride(),
            HEIGHT=height, WIDTH=width, CHANNELS=channels, PIXELS=PIXELS, num_warps=4,
        )  # fmt: skip
    total = partial.sum(0)[:, : TAPS.value].view(channels, 3, 3, 3)
    return torch.empty_like(weight).copy_(total)
