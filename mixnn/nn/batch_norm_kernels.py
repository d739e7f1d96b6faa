"""Split batch norm, residual and ReLU as CUDA kernels written in Triton: two launches each way, or one.

A tensor is a matrix with a row of C channels per (image, pixel), in channels_last order; group j has the rows of images
j, j + G, ... of a view. Statistics are per cell: a block of channels of a group.

If a cell is small, one program loads it, adds it up and writes the result, without reading it again. The tiles of a
larger cell are read twice. Programs of the first launch add them up, and the last program of a cell totals their sums;
programs of the second launch apply the totals. The first launch goes backwards, so that the second one starts with what
was read last and is still in the L2 cache.

`batch_norm.py` has the formulas in plain PyTorch, and a test compares the two. All sums are added in a fixed order, so
results are the same bits every time.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
import os
from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tiles(NamedTuple):
    """How programs divide cells. Numbers of rows are for 16-bit types; float32 has half of them."""

    alone: int  # most rows of a small cell, which stay in registers between the sums and the result
    rows: int  # rows of a larger cell to which a program applies the sums
    warps: int


FORWARD = Tiles(alone=1024, rows=128, warps=8)
RESIDUAL = Tiles(alone=512, rows=128, warps=8)
BACKWARD = Tiles(alone=512, rows=128, warps=8)
COLS = 64  # most channels of a cell
ALONE_COLS, ALONE_WARPS, ALONE_REGISTERS = 32, 8, 128  # of a small cell
SUM_PROGRAMS = 512  # enough to fill a GPU; more programs make more partial sums
SUM_ROWS, SUM_WARPS, SUM_STAGES = 32, 4, 4  # their tiles, which are pipelined through shared memory
PARTIAL_ROWS = tl.constexpr(32)  # partial sums that a program loads at once
COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # the interpreter has no inline assembly
# Integers whose values compile no kernels of their own. Not `channels`, whose divisibility makes loads wide.
NOT_SPECIALIZED = ("tiles", "chunks", "parts", "groups", "per_view", "pixels", "rows", "num_groups")


def _kernel(function: Callable[..., None]) -> Any:
    return triton.jit(
        function, do_not_specialize=[name for name in NOT_SPECIALIZED if name in signature(function).parameters]
    )


# Tiles


@triton.jit
def _place(program, chunks, num_groups):
    """Group, chunk of rows and block of channels. Neighboring programs have different groups: neighboring images."""
    return program % num_groups, program // num_groups % chunks, program // num_groups // chunks


@triton.jit
def _channels(block, COLS: tl.constexpr):
    return block * COLS + tl.arange(0, COLS)


@triton.jit
def _tile(
    group, tile, block, groups, per_view, pixels, rows, channels,
    FULL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Where the tile's first image starts; offsets of rows from there; which rows exist; the block of channels."""
    first = tile * ROWS // pixels
    image = (group // groups) * per_view + first * groups + group % groups
    row = tile * ROWS - first * pixels + tl.arange(0, ROWS)
    next_images = ((row + 0.5) * (1.0 / pixels)).to(tl.int32)  # row // pixels, but faster
    offset = (row + next_images * ((groups - 1) * pixels)) * channels
    if FULL:
        exists = tl.full((ROWS, 1), True, tl.int1)
    else:
        exists = (row < rows - first * pixels)[:, None]
    return image.to(tl.int64) * pixels * channels, offset, exists, block


@triton.jit
def _store(out, numbers, at, COLS: tl.constexpr):
    start, offset, exists, block = at
    pointers = out + start + (offset[:, None] + _channels(block, COLS)[None, :])
    tl.store(pointers, numbers.to(out.dtype.element_ty), mask=exists)


# A tile is loaded and kept as 32-bit words, which hold one float32 or two 16-bit numbers.


@triton.jit
def _words_at(x, at, COLS: tl.constexpr):
    NUM: tl.constexpr = 32 // x.dtype.element_ty.primitive_bitwidth
    start, offset, _, block = at
    column = _channels(block, COLS // NUM)
    return (x + start).to(tl.pointer_type(tl.int32), bitcast=True) + ((offset // NUM)[:, None] + column[None, :])


@triton.jit
def _load(x, at, COLS: tl.constexpr, LAST: tl.constexpr = False):
    """Words of a tile. LAST: they are not read again, and may leave the L2 cache first."""
    policy: tl.constexpr = "evict_first" if LAST else ""
    return tl.load(_words_at(x, at, COLS), mask=at[2], other=0, eviction_policy=policy)


@triton.jit
def _numbers(words, dtype: tl.constexpr):
    """The numbers in words, as float32."""
    if dtype == tl.float32:
        numbers = words.to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:
        low, high = words << 16, words & -0x10000
        numbers = tl.interleave(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))
    else:
        halves = tl.interleave(words.to(tl.int16), (words >> 16).to(tl.int16))
        numbers = halves.to(dtype, bitcast=True).to(tl.float32)
    return numbers


@triton.jit
def _words(numbers, dtype: tl.constexpr):
    """The words of a tile of float32 numbers that are exact in this type."""
    if dtype == tl.float32:
        words = numbers.to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(tl.reshape(numbers, (numbers.shape[0], numbers.shape[1] // 2, 2)))
        if dtype == tl.bfloat16:
            words = ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (high.to(tl.int32, bitcast=True) & -0x10000)
        else:
            low = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
            words = (low & 0xFFFF) | (high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return words


@triton.jit
def _keep(words):
    """Return the same words as if they were new, so that the compiler keeps no float32 copy of 16-bit numbers."""
    if COMPILED:
        words = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], tl.int32, is_pure=False, pack=1)
    return words


# Sums


@triton.jit
def store_pair(out, a, b, channel, index, num, channels):
    """Store vectors a and b as row `index` of each half of a (2, num, channels) matrix."""
    at = index * channels + channel
    tl.store(out + at, a)
    tl.store(out + num * channels + at, b)


@triton.jit
def load_pair(pair, channel, index, num, channels):
    at = index * channels + channel
    return tl.load(pair + at), tl.load(pair + num * channels + at)


@triton.jit
def _add_rows(sums, channel, start, num, total, channels, step=1):
    """Sums of `num` rows from `start` on, `step` apart, of each half of a (2, total, channels) matrix.

    Other programs of the launch may have stored them, so loads pass by the L1 cache.
    """
    a = tl.zeros((PARTIAL_ROWS, channel.shape[0]), tl.float32)
    b = tl.zeros((PARTIAL_ROWS, channel.shape[0]), tl.float32)
    for i in tl.range(0, num, PARTIAL_ROWS, num_stages=1):
        row = i + tl.arange(0, PARTIAL_ROWS)
        at = (start + row * step)[:, None] * channels + channel[None, :]
        exists = (row < num)[:, None]
        a += tl.load(sums + at, mask=exists, other=0.0, cache_modifier=".cg")
        b += tl.load(sums + total * channels + at, mask=exists, other=0.0, cache_modifier=".cg")
    return tl.sum(a, 0), tl.sum(b, 0)


@triton.jit
def _add_groups(sums, d_parameters, channel, channels, num_groups):
    """Gradients of bias and weight: the sums of all groups."""
    d_bias, d_weight = _add_rows(sums, channel, 0, num_groups, num_groups, channels)
    store_pair(d_parameters, d_bias, d_weight, channel, 0, 1, channels)


@triton.jit
def is_last(counter, num):
    """Whether this program is the last of `num` to come here. It can then load what they stored before.

    The counter is 0 before the first program and after the last one.
    """
    tl.debug_barrier()  # all threads have stored
    last = tl.atomic_add(counter, 1, sem="acq_rel") == num - 1
    if last:
        tl.store(counter, 0)
    return last


# Forward


@triton.jit
def _moments(a, b, rows):
    mean = a * (1.0 / rows)
    return mean, tl.maximum(b * (1.0 / rows) - mean * mean, 0.0)


@triton.jit
def affine(mean, var, weight, bias, eps, channel):
    """1 / std, and the scale and shift that batch norm amounts to."""
    inverse_std = tl.rsqrt(var + eps)
    scale = inverse_std * tl.load(weight + channel)
    return inverse_std, scale, tl.load(bias + channel) - mean * scale


@triton.jit
def _store_y(
    words, residual_words, y, signs, scale, shift, at,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Store y, and its signs as bits, which backward needs after a residual and ReLU."""
    dtype: tl.constexpr = y.dtype.element_ty
    out = _numbers(words, dtype) * scale[None, :] + shift[None, :]
    if RESIDUAL:
        out += _numbers(residual_words, dtype)
    if RELU:
        out = tl.maximum(out, 0.0)
    _store(y, out, at, COLS)
    if RESIDUAL and RELU:
        bits = tl.reshape((out > 0).to(tl.int32), (ROWS, COLS // 8, 8)) << tl.arange(0, 8)[None, None, :]
        _store(signs, tl.sum(bits, 2), (at[0] // 8, at[1] // 8, at[2], at[3]), COLS // 8)


@_kernel
def bn_forward_alone_kernel(
    x, residual, weight, bias, y, stats, signs, eps, groups, per_view, pixels, rows, channels, num_groups,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """y = relu((x - mean) / std * weight + bias + residual), if a cell is one tile."""
    blocks = channels // COLS
    group, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    channel = _channels(block, COLS)
    at = _tile(group, 0, block, groups, per_view, pixels, rows, channels, FULL, ROWS)
    words = _load(x, at, COLS)
    residual_words = words
    if RESIDUAL:
        residual_words = _load(residual, at, COLS)
    value = _numbers(words, x.dtype.element_ty)
    mean, var = _moments(tl.sum(value, 0), tl.sum(value * value, 0), rows)
    store_pair(stats, mean, var, channel, group, num_groups, channels)
    _, scale, shift = affine(mean, var, weight, bias, eps, channel)
    _store_y(_keep(words), residual_words, y, signs, scale, shift, at, RESIDUAL, RELU, ROWS, COLS)


@_kernel
def bn_sum_kernel(
    x, stats, partial, counters, tiles, chunks, groups, per_view, pixels, rows, channels, num_groups,
    FULL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean and variance of every cell, from sums of x and x^2 over chunks of some tiles."""
    group, chunk, block = _place(tl.num_programs(0) - 1 - tl.program_id(0), chunks, num_groups)
    channel = _channels(block, COLS)
    a = tl.zeros((ROWS, COLS), tl.float32)
    b = tl.zeros((ROWS, COLS), tl.float32)
    for i in tl.range(tiles, num_stages=STAGES):
        tile = chunk * tiles + i
        at = _tile(group, tile, block, groups, per_view, pixels, rows, channels, FULL, ROWS)
        value = _numbers(_load(x, at, COLS), x.dtype.element_ty)
        a += value
        b += value * value
    row, total = group * chunks, num_groups * chunks
    store_pair(partial, tl.sum(a, 0), tl.sum(b, 0), channel, row + chunk, total, channels)
    if is_last(counters + group * (channels // COLS) + block, chunks):
        sum_x, sum_x2 = _add_rows(partial, channel, row, chunks, total, channels)
        mean, var = _moments(sum_x, sum_x2, rows)
        store_pair(stats, mean, var, channel, group, num_groups, channels)


@_kernel
def bn_moments_kernel(sums, stats, parts, groups, rows, channels, num_groups, COLS: tl.constexpr):
    """Mean and variance of every cell, from sums of x and x^2 over parts of it (`Convolution`)."""
    group, channel = tl.program_id(0), _channels(tl.program_id(1), COLS)
    first = group // groups * parts * groups + group % groups
    sum_x, sum_x2 = _add_rows(sums, channel, first, parts, num_groups * parts, channels, groups)
    mean, var = _moments(sum_x, sum_x2, rows)
    store_pair(stats, mean, var, channel, group, num_groups, channels)


@_kernel
def bn_forward_kernel(
    x, residual, weight, bias, y, stats, signs, eps, chunks, groups, per_view, pixels, rows, channels, num_groups,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """y = relu((x - mean) / std * weight + bias + residual), with the moments from bn_sum_kernel."""
    group, chunk, block = _place(tl.program_id(0), chunks, num_groups)
    channel = _channels(block, COLS)
    at = _tile(group, chunk, block, groups, per_view, pixels, rows, channels, FULL, ROWS)
    words = _load(x, at, COLS, LAST=True)
    residual_words = words
    if RESIDUAL:
        residual_words = _load(residual, at, COLS, LAST=True)
    mean, var = load_pair(stats, channel, group, num_groups, channels)
    _, scale, shift = affine(mean, var, weight, bias, eps, channel)
    _store_y(words, residual_words, y, signs, scale, shift, at, RESIDUAL, RELU, ROWS, COLS)


# Backward


@triton.jit
def _load_gradients(dy, dy2, at, TWO: tl.constexpr, COLS: tl.constexpr, LAST: tl.constexpr):
    """Words of one or two gradients."""
    words = _load(dy, at, COLS, LAST)
    words2 = words
    if TWO:
        words2 = _load(dy2, at, COLS, LAST)
    return words, words2


@triton.jit
def _load_signs(signs, at, COLS: tl.constexpr):
    start, offset, exists, block = at
    words = (signs + start // 8).to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.load(words + ((offset // 32)[:, None] + _channels(block, COLS // 32)[None, :]), mask=exists, other=0)


@triton.jit
def _slope(
    gradients, signs, words, scale, shift, dtype: tl.constexpr,
    TWO: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The gradient before the ReLU, whose mask is recomputed from x, or after a residual read from the signs.

    Two gradients are added as autograd does it, so their sum is rounded.
    """
    slope = _numbers(gradients[0], dtype)
    if TWO:
        slope = (slope + _numbers(gradients[1], dtype)).to(dtype).to(tl.float32)
    if RESIDUAL:
        bits = (signs[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        slope = tl.where(tl.reshape(bits, (ROWS, COLS)) > 0, slope, 0.0)
    elif RELU:
        slope = tl.where(_numbers(words, dtype) * scale[None, :] + shift[None, :] > 0, slope, 0.0)
    return slope


@triton.jit
def _store_dx(words, slope, dx, a, b, mean, inverse_std, scale, rows, at, COLS: tl.constexpr):
    of_x = -scale * inverse_std * b * (1.0 / rows)
    rest = -scale * a * (1.0 / rows) - mean * of_x
    x = _numbers(words, dx.dtype.element_ty)
    _store(dx, slope * scale[None, :] + (x * of_x[None, :] + rest[None, :]), at, COLS)


@_kernel
def bn_backward_alone_kernel(
    dy, dy2, x, signs, weight, bias, stats, eps, slopes, sums, counters, dx, d_parameters,
    groups, per_view, pixels, rows, channels, num_groups,
    TWO: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    FULL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dx = weight / std * (slope - mean(slope) - x_hat * mean(slope * x_hat)), if a cell is one tile.

    RESIDUAL: also stores the slopes, which are the residual's gradient.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    blocks = channels // COLS
    group, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    channel = _channels(block, COLS)
    at = _tile(group, 0, block, groups, per_view, pixels, rows, channels, FULL, ROWS)
    words = _load(x, at, COLS)
    gradients = _load_gradients(dy, dy2, at, TWO, COLS, False)
    bits = words
    if RESIDUAL:
        bits = _load_signs(signs, at, COLS)
    mean, var = load_pair(stats, channel, group, num_groups, channels)
    inverse_std, scale, shift = affine(mean, var, weight, bias, eps, channel)
    slope = _slope(gradients, bits, words, scale, shift, dtype, TWO, RESIDUAL, RELU, ROWS, COLS)
    a = tl.sum(slope, 0)
    b = tl.sum(slope * (_numbers(words, dtype) - mean[None, :]), 0) * inverse_std  # no slope where no row exists
    slope_words = _keep(_words(slope, dtype))
    if RESIDUAL:
        tl.store(_words_at(slopes, at, COLS), slope_words, mask=at[2])
    slope = _numbers(_keep(slope_words), dtype)
    _store_dx(_keep(words), slope, dx, a, b, mean, inverse_std, scale, rows, at, COLS)
    store_pair(sums, a, b, channel, group, num_groups, channels)
    if is_last(counters + block, num_groups):
        _add_groups(sums, d_parameters, channel, channels, num_groups)


@_kernel
def bn_sum_slope_kernel(
    dy, dy2, x, signs, weight, bias, stats, eps, slopes, sums, partial, counters,
    tiles, chunks, groups, per_view, pixels, rows, channels, num_groups,
    TWO: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    FULL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of the slope and of slope * x_hat of every cell.

    RESIDUAL: also stores the slopes, which are the residual's gradient.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    group, chunk, block = _place(tl.num_programs(0) - 1 - tl.program_id(0), chunks, num_groups)
    channel = _channels(block, COLS)
    mean, var = load_pair(stats, channel, group, num_groups, channels)
    inverse_std, scale, shift = affine(mean, var, weight, bias, eps, channel)
    a = tl.zeros((ROWS, COLS), tl.float32)
    b = tl.zeros((ROWS, COLS), tl.float32)
    for i in tl.range(tiles, num_stages=STAGES):
        tile = chunk * tiles + i
        at = _tile(group, tile, block, groups, per_view, pixels, rows, channels, FULL, ROWS)
        words = _load(x, at, COLS)
        gradients = _load_gradients(dy, dy2, at, TWO, COLS, LAST=RESIDUAL)
        bits = words
        if RESIDUAL:
            bits = _load_signs(signs, at, COLS)
        slope = _slope(gradients, bits, words, scale, shift, dtype, TWO, RESIDUAL, RELU, ROWS, COLS)
        if RESIDUAL:
            tl.store(_words_at(slopes, at, COLS), _words(slope, dtype), mask=at[2])
        a += slope
        b += slope * (_numbers(words, dtype) - mean[None, :])  # the slope is 0 in rows that do not exist
    row, total = group * chunks, num_groups * chunks
    store_pair(partial, tl.sum(a, 0), tl.sum(b, 0) * inverse_std, channel, row + chunk, total, channels)
    if is_last(counters + group * (channels // COLS) + block, chunks):
        sum_1, sum_x_hat = _add_rows(partial, channel, row, chunks, total, channels)
        store_pair(sums, sum_1, sum_x_hat, channel, group, num_groups, channels)


@_kernel
def bn_backward_kernel(
    dy, dy2, x, weight, bias, stats, eps, sums, dx, d_parameters,
    chunks, groups, per_view, pixels, rows, channels, num_groups,
    TWO: tl.constexpr, RELU: tl.constexpr, LAST: tl.constexpr,
    FULL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dx = weight / std * (slope - mean(slope) - x_hat * mean(slope * x_hat)), with sums from bn_sum_slope_kernel.

    LAST: nothing reads dy and dy2 later. One program per block of channels also adds up the sums of all groups.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    group, chunk, block = _place(tl.program_id(0), chunks, num_groups)
    channel = _channels(block, COLS)
    at = _tile(group, chunk, block, groups, per_view, pixels, rows, channels, FULL, ROWS)
    words = _load(x, at, COLS, LAST=True)
    mean, var = load_pair(stats, channel, group, num_groups, channels)
    inverse_std, scale, shift = affine(mean, var, weight, bias, eps, channel)
    gradients = _load_gradients(dy, dy2, at, TWO, COLS, LAST)
    slope = _slope(gradients, words, words, scale, shift, dtype, TWO, False, RELU, ROWS, COLS)
    a, b = load_pair(sums, channel, group, num_groups, channels)
    _store_dx(words, slope, dx, a, b, mean, inverse_std, scale, rows, at, COLS)
    if (group == 0) & (chunk == 0):
        _add_groups(sums, d_parameters, channel, channels, num_groups)


# Launches

COUNTERS, STREAMS = 4096, 64  # counters of a stream, and streams that have their own


class _Counters:
    """Counters of a device, a row per stream, so that kernels that run at the same time share none.

    A kernel leaves counters as it found them, so they are zeroed once, and never freed. A stream that captures a graph
    gets a row too: it lies outside of the graph's memory. As with cuBLAS's workspaces, two graphs that were captured on
    one stream must not be replayed at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self.rows = [*torch.zeros((STREAMS, COUNTERS), dtype=torch.int32, device=device)]
        self.of_stream: dict[int, Tensor] = {}
        self.zeroed = torch.cuda.Event()
        self.zeroed.record(torch.cuda.current_stream(device))

    def of(self, stream: torch.cuda.Stream) -> Tensor | None:
        """The row of a stream, or None if there are too many streams."""
        if stream.cuda_stream not in self.of_stream and self.rows:
            if not torch.cuda.is_current_stream_capturing():  # before a capture, torch waits for the whole device
                stream.wait_event(self.zeroed)
            self.of_stream[stream.cuda_stream] = self.rows.pop()
        return self.of_stream.get(stream.cuda_stream)


_counters_of: dict[torch.device, _Counters] = {}


def zeroed_counters(device: torch.device, num: int) -> Tensor:
    """Zeroed counters: those of the current stream, or else new ones."""
    found = None
    if device.type == "cuda" and num <= COUNTERS:
        if device not in _counters_of and not torch.cuda.is_current_stream_capturing():
            _counters_of[device] = _Counters(device)
        if device in _counters_of:
            found = _counters_of[device].of(torch.cuda.current_stream(device))
    return torch.zeros(num, dtype=torch.int32, device=device) if found is None else found


class _Layout:
    """How a tensor (images, channels, ...) is divided into cells and tiles, and which programs there are."""

    def __init__(self, x: Tensor, views: int, groups: int, tiles: Tiles) -> None:
        images, self.channels = x.shape[:2]
        pixels = x.numel() // (images * self.channels)
        rows = images // views // groups * pixels
        self.device, self.num_groups = x.device, views * groups
        self.numbers = groups, images // views, pixels, rows, self.channels, self.num_groups
        most_alone, most_rows = (num * 2 // x.element_size() for num in tiles[:2])
        self.alone = rows <= most_alone
        cols = math.gcd(ALONE_COLS if self.alone else COLS, self.channels)
        self.cells = self.num_groups * self.channels // cols
        padded = max(16, triton.next_power_of_2(rows))
        size, sum_size = min(padded, most_alone if self.alone else most_rows), min(padded, SUM_ROWS)
        assert (size + pixels) * groups * self.channels < 2**31, "offsets inside a tile have 32 bits"
        assert size + pixels < 2**21, "rows are divided by pixels in float32"
        self.sizes: dict[str, Any] = {"FULL": rows % size == 0, "ROWS": size, "COLS": cols}
        if self.alone:
            self.sizes |= {"num_warps": max(1, ALONE_WARPS * size // most_alone), "maxnreg": ALONE_REGISTERS}
            return
        self.sizes |= {"num_warps": tiles.warps}
        self.chunks = triton.cdiv(rows, size)
        sum_tiles = triton.cdiv(rows, sum_size)
        self.tiles_per_sum = max(1, sum_tiles * self.cells // SUM_PROGRAMS)
        self.sum_chunks = triton.cdiv(sum_tiles, self.tiles_per_sum)
        full = rows % (self.tiles_per_sum * sum_size) == 0
        self.sum_sizes: dict[str, Any] = {"FULL": full, "ROWS": sum_size, "COLS": cols}
        self.sum_sizes |= {"STAGES": SUM_STAGES, "num_warps": SUM_WARPS}

    def empty(self, *shape: int) -> Tensor:
        return torch.empty((2, *shape, self.channels), dtype=torch.float32, device=self.device)

    def counters(self) -> Tensor:
        return zeroed_counters(self.device, self.cells)

    def launch_alone(self, kernel: Any, *args: Any, **form: bool) -> None:
        kernel[(self.cells,)](*args, *self.numbers, **form, **self.sizes)

    def launch_sums(self, kernel: Any, *args: Any, **form: bool) -> None:
        counts = self.tiles_per_sum, self.sum_chunks
        args += self.empty(self.num_groups, self.sum_chunks), self.counters()
        kernel[(self.cells * self.sum_chunks,)](*args, *counts, *self.numbers, **form, **self.sum_sizes)

    def launch(self, kernel: Any, *args: Any, **form: bool) -> None:
        kernel[(self.cells * self.chunks,)](*args, self.chunks, *self.numbers, **form, **self.sizes)


def supports(dtype: torch.dtype, channels: int) -> bool:
    """Whether there are kernels: for bf16, fp16 and fp32, and channels in multiples of 32."""
    return dtype in (torch.bfloat16, torch.float16, torch.float32) and channels % 32 == 0


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, views: int, groups: int, eps: float, relu: bool,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`batch_norm.batch_norm` on CUDA."""
    layout = _Layout(x, views, groups, FORWARD if residual is None else RESIDUAL)
    y, stats, signs = torch.empty_like(x), layout.empty(layout.num_groups), empty_signs(x, residual, relu)
    given = x, x if residual is None else residual, weight, bias, y
    form = {"RESIDUAL": residual is not None, "RELU": relu}
    if layout.alone:
        layout.launch_alone(bn_forward_alone_kernel, *given, stats, signs, eps, **form)
    else:
        if sums is not None and sums.shape[1] % layout.num_groups == 0:  # no part has images of two views
            stats = moments(sums, views, groups, layout.numbers[3])
        else:
            layout.launch_sums(bn_sum_kernel, x, stats)
        layout.launch(bn_forward_kernel, *given, stats, signs, eps, **form)
    return y, stats, signs


def moments(sums: Tensor, views: int, groups: int, rows: int) -> Tensor:
    """Mean and variance by group, (2, views * groups, C), from sums over parts of the images (`Convolution`)."""
    num_groups, (_, parts, channels) = views * groups, sums.shape
    stats, cols = sums.new_empty((2, num_groups, channels)), math.gcd(COLS, channels)
    bn_moments_kernel[(num_groups, channels // cols)](
        sums, stats, parts // num_groups, groups, rows, channels, num_groups, COLS=cols, num_warps=4
    )
    return stats


def empty_signs(x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """Memory for the sign bits of y, if backward will need them."""
    return x.new_empty(x.numel() // 8 if relu and residual is not None else 0, dtype=torch.uint8)


def backward(
    dy: Tensor, dy2: Tensor | None, x: Tensor, signs: Tensor | None, stats: Tensor, weight: Tensor, bias: Tensor,
    views: int, groups: int, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`batch_norm.batch_norm_backward` on CUDA."""
    layout = _Layout(x, views, groups, BACKWARD)
    sums, d_parameters = layout.empty(layout.num_groups), layout.empty()
    dx, slopes = torch.empty_like(x), x.new_empty(0) if signs is None else torch.empty_like(x)
    given = weight, bias, stats, eps
    gradients, two = (dy, dy if dy2 is None else dy2), dy2 is not None
    tensors = *gradients, x, x if signs is None else signs, *given, slopes, sums
    form = {"TWO": two, "RESIDUAL": signs is not None, "RELU": relu}
    if layout.alone:
        layout.launch_alone(bn_backward_alone_kernel, *tensors, layout.counters(), dx, d_parameters, **form)
        return dx, slopes, d_parameters
    layout.launch_sums(bn_sum_slope_kernel, *tensors, **form)
    form = {"TWO": two, "RELU": relu, "LAST": True}
    if signs is not None:  # the slopes are stored, so they take the gradients' place
        gradients, form = (slopes, slopes), {"TWO": False, "RELU": False, "LAST": False}
    layout.launch(bn_backward_kernel, *gradients, x, *given, sums, dx, d_parameters, **form)
    return dx, slopes, d_parameters


# Running statistics


@_kernel
def bn_update_kernel(
    stats, group_weights, mean, var, momentum, unbias, channels, num_groups, GROUPS: tl.constexpr, COLS: tl.constexpr
):
    """Running statistics move by `momentum` toward the weighted mean of the groups' moments."""
    group, channel = tl.arange(0, GROUPS), tl.program_id(0) * COLS + tl.arange(0, COLS)
    exists = group < num_groups
    w = tl.load(group_weights + group, mask=exists, other=0.0)[:, None]
    at = group[:, None] * channels + channel[None, :]
    a = tl.sum(w * tl.load(stats + at, mask=exists[:, None], other=0.0), 0)
    b = tl.sum(w * tl.load(stats + num_groups * channels + at, mask=exists[:, None], other=0.0), 0)
    old_mean, old_var = tl.load(mean + channel), tl.load(var + channel)
    tl.store(mean + channel, old_mean + momentum * (a - old_mean))
    tl.store(var + channel, old_var + momentum * (b * unbias - old_var))


def update_running_stats(
    stats: Tensor, group_weights: Tensor, mean: Tensor, var: Tensor, momentum: float, unbias: float
) -> None:
    """`batch_norm.update_running_stats` on CUDA."""
    _, num_groups, channels = stats.shape
    bn_update_kernel[(channels // 32,)](
        stats, group_weights, mean, var, momentum, unbias, channels, num_groups,
        GROUPS=triton.next_power_of_2(num_groups), COLS=32,
    )  # fmt: skip
