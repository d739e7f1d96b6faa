"""Split batch norm, residual and ReLU as CUDA kernels written in Triton: one launch and one pass over memory each way.

A tensor is a matrix with a row of C channels per (image, pixel), in channels_last order; group j has the rows of images
j, j + G, ... of a view. A program has one tile: a chunk of a group's rows, a block of channels. It loads the tile once
and keeps it in registers while it waits for the sums of the group's other chunks, then writes its part of the result.

Programs that wait must all be on the GPU at once. If a group has too many chunks for that, a first launch makes the
sums and a second one reads the tensors again. Triton's interpreter, which runs programs one after another, does the
same. `batch_norm.py` has the formulas in plain PyTorch, and a test compares the two.

All sums are added in a fixed order, so results are the same bits every time.
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


class Tile(NamedTuple):
    """Numbers that a program keeps in registers, of each tensor; half as many rows in float32."""

    rows: int
    cols: int


FORWARD, RESIDUAL, BACKWARD = Tile(1024, 32), Tile(512, 32), Tile(512, 32)  # one tensor, or two at a time
# While some programs wait, others must load and store: a multiprocessor holds several. All programs that wait have the
# same warps and registers, so each fits where another ends.
WARPS, PROGRAMS, REGISTERS = 8, 2, 65536  # of a program; and programs and registers of a multiprocessor
# If sums need a launch of their own: it keeps two of them per number of a tile, so tiles are small; their loads are
# pipelined. More programs would make more partial sums, which each program of the second launch adds.
SUMS, SUM_WARPS, SUM_STAGES, SUM_PROGRAMS = Tile(32, 64), 4, 4, 512
SECOND = Tile(256, 32)
COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # the interpreter has no inline assembly
PARTIAL_ROWS = tl.constexpr(64)  # partial sums that a program loads at once
SIGN_BITS = True  # keep the sign of y, which backward needs after a residual and ReLU, in a bit instead of reading y
# Integers whose values compile no kernels of their own. Not `channels`, whose divisibility makes loads wide.
NOT_SPECIALIZED = ("chunks", "tiles", "groups", "per_view", "pixels", "rows", "num_groups")


def _kernel(function: Callable[..., None]) -> Any:
    return triton.jit(
        function, do_not_specialize=[name for name in NOT_SPECIALIZED if name in signature(function).parameters]
    )


# Parts of the kernels. The grid of all of them is (chunks, blocks of channels, groups): programs start in this order.


@triton.jit
def _channels(COLS: tl.constexpr):
    return tl.program_id(1) * COLS + tl.arange(0, COLS)


@triton.jit
def _tile(tile, groups, per_view, pixels, rows, channels, FULL: tl.constexpr, ROWS: tl.constexpr):
    """Where the image starts that has the tile's first row; offsets of the rows from there; which rows exist."""
    group = tl.program_id(2)
    first = tile * ROWS // pixels
    image = (group // groups) * per_view + first * groups + group % groups
    row = tile * ROWS - first * pixels + tl.arange(0, ROWS)
    next_images = ((row + 0.5) * (1.0 / pixels)).to(tl.int32)  # row // pixels, but faster
    offset = (row + next_images * ((groups - 1) * pixels)) * channels
    if FULL:
        exists = tl.full((ROWS, 1), True, tl.int1)
    else:
        exists = (row < rows - first * pixels)[:, None]
    return image.to(tl.int64) * pixels * channels, offset, exists


# A tile is loaded and kept as 32-bit words, which hold one float32 or two 16-bit numbers.


@triton.jit
def _words_at(x, start, offset, COLS: tl.constexpr):
    NUM: tl.constexpr = 32 // x.dtype.element_ty.primitive_bitwidth
    column = tl.program_id(1) * (COLS // NUM) + tl.arange(0, COLS // NUM)
    return (x + start).to(tl.pointer_type(tl.int32), bitcast=True) + ((offset // NUM)[:, None] + column[None, :])


@triton.jit
def _load_words(x, start, offset, exists, COLS: tl.constexpr):
    return tl.load(_words_at(x, start, offset, COLS), mask=exists, other=0)


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
def _load(x, start, offset, exists, COLS: tl.constexpr):
    return _numbers(_load_words(x, start, offset, exists, COLS), x.dtype.element_ty)


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
    """The same words. The compiler takes them for new ones, so it keeps no float32 copy of 16-bit numbers for later."""
    if COMPILED:
        words = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], tl.int32, is_pure=False, pack=1)
    return words


@triton.jit
def _bytes_at(offset, COLS: tl.constexpr):
    """Offsets of a tile's sign bits, 8 channels per byte."""
    return (offset // 8)[:, None] + (tl.program_id(1) * (COLS // 8) + tl.arange(0, COLS // 8))[None, :]


@triton.jit
def _store_pair(out, a, b, index, num, channels, COLS: tl.constexpr):
    """Store vectors a and b as row `index` of each half of a (2, num, channels) matrix."""
    at = index * channels + _channels(COLS)
    tl.store(out + at, a)
    tl.store(out + num * channels + at, b)


@triton.jit
def _add_rows(sums, start, num, total, channels, COLS: tl.constexpr):
    """Sums of `num` rows from `start` on, of each half of a (2, total, channels) matrix."""
    a = tl.zeros((PARTIAL_ROWS, COLS), tl.float32)
    b = tl.zeros((PARTIAL_ROWS, COLS), tl.float32)
    for i in tl.range(0, num, PARTIAL_ROWS, num_stages=1):
        row = i + tl.arange(0, PARTIAL_ROWS)
        at = (start + row)[:, None] * channels + _channels(COLS)[None, :]
        exists = (row < num)[:, None]
        a += tl.load(sums + at, mask=exists, other=0.0, cache_modifier=".cg")  # past L1, which may not have
        b += tl.load(sums + total * channels + at, mask=exists, other=0.0, cache_modifier=".cg")  # what others stored
    # A gather of all: it lets the compiler rearrange these vectors for a tile, instead of the tile for them.
    every = tl.arange(0, COLS)
    return tl.gather(tl.sum(a, 0), every, 0), tl.gather(tl.sum(b, 0), every, 0)


@triton.jit
def _store_partial(partial, a, b, channels, COLS: tl.constexpr):
    group, chunks = tl.program_id(2), tl.num_programs(0)
    _store_pair(partial, a, b, group * chunks + tl.program_id(0), tl.num_programs(2) * chunks, channels, COLS)


@triton.jit
def _add_partial(partial, chunks, channels, COLS: tl.constexpr):
    """Sums over all chunks of the group."""
    return _add_rows(partial, tl.program_id(2) * chunks, chunks, tl.num_programs(2) * chunks, channels, COLS)


# A counter per group and block of channels, where chunks wait for each other. As in CUDA's cooperative groups, the
# arrivals of all chunks add up to 2^31. That flips the sign, and leaves the other bits 0 for the next launch.


@triton.jit
def _read_counter(counters):
    """The counter before this chunk arrives."""
    counter = counters + tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    return counter, tl.atomic_add(counter, 0, sem="relaxed")


@triton.jit
def _wait_for_chunks(counter, before):
    """Wait for all chunks of the group, which must be on the GPU at once. Then what they stored can be loaded."""
    tl.debug_barrier()  # all threads have stored
    tl.atomic_add(counter, tl.where(tl.program_id(0) == 0, 0x7FFFFFFF - (tl.num_programs(0) - 2), 1), sem="release")
    while (tl.atomic_add(counter, 0, sem="acquire") ^ before) >= 0:
        pass
    tl.debug_barrier()


# Forward


@_kernel
def bn_sum_kernel(
    x, partial, tiles, groups, per_view, pixels, rows, channels,
    FULL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of x and x^2 over the tiles of each program, if they need a launch of their own."""
    a = tl.zeros((ROWS, COLS), tl.float32)
    b = tl.zeros((ROWS, COLS), tl.float32)
    for t in tl.range(tiles, num_stages=STAGES):
        start, offset, exists = _tile(
            tl.program_id(0) * tiles + t, groups, per_view, pixels, rows, channels, FULL, ROWS
        )
        value = _load(x, start, offset, exists, COLS)
        a += value
        b += value * value
    _store_partial(partial, tl.sum(a, 0), tl.sum(b, 0), channels, COLS)


@_kernel
def bn_forward_kernel(
    x, residual, weight, bias, y, stats, signs, partial, counters, eps, chunks,
    groups, per_view, pixels, rows, channels,
    FUSED: tl.constexpr, ALONE: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr, SIGNS: tl.constexpr,
    FULL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """y = relu((x - mean) / std * weight + bias + residual).

    FUSED: the sums are made here; else they are given. ALONE: a group has one chunk, so there is no need to wait.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    channel = _channels(COLS)
    start, offset, exists = _tile(tl.program_id(0), groups, per_view, pixels, rows, channels, FULL, ROWS)
    words = _load_words(x, start, offset, exists, COLS)
    if RESIDUAL:
        residual_words = _load_words(residual, start, offset, exists, COLS)
    if FUSED:
        if not ALONE:
            counter, before = _read_counter(counters)
        value = _numbers(words, dtype)
        a, b = tl.sum(value, 0), tl.sum(value * value, 0)
        if not ALONE:
            _store_partial(partial, a, b, channels, COLS)
            _wait_for_chunks(counter, before)
    if not ALONE:
        a, b = _add_partial(partial, chunks, channels, COLS)
    words = _keep(words)
    mean = a * (1.0 / rows)
    var = tl.maximum(b * (1.0 / rows) - mean * mean, 0.0)
    if tl.program_id(0) == 0:
        _store_pair(stats, mean, var, tl.program_id(2), tl.num_programs(2), channels, COLS)
    scale = tl.rsqrt(var + eps) * tl.load(weight + channel)
    shift = tl.load(bias + channel) - mean * scale
    out = _numbers(words, dtype) * scale[None, :] + shift[None, :]
    if RESIDUAL:
        out += _numbers(residual_words, residual.dtype.element_ty)
    if RELU:
        out = tl.maximum(out, 0.0)
    tl.store(y + start + (offset[:, None] + channel[None, :]), out.to(dtype), mask=exists)
    if SIGNS:
        bits = tl.reshape((out > 0).to(tl.int32), (ROWS, COLS // 8, 8)) << tl.arange(0, 8)[None, None, :]
        tl.store(signs + start // 8 + _bytes_at(offset, COLS), tl.sum(bits, 2).to(tl.uint8), mask=exists)


# Backward


@triton.jit
def _affine(stats, weight, bias, eps, channels, COLS: tl.constexpr):
    """Mean, 1 / std, and the scale and shift that batch norm amounts to."""
    channel = _channels(COLS)
    at = tl.program_id(2) * channels + channel
    mean = tl.load(stats + at)
    inverse_std = tl.rsqrt(tl.load(stats + tl.num_programs(2) * channels + at) + eps)
    scale = inverse_std * tl.load(weight + channel)
    return mean, inverse_std, scale, tl.load(bias + channel) - mean * scale


@triton.jit
def _slope(
    dy, dy2, x, saved, scale, shift, start, offset, exists,
    TWO: tl.constexpr, RELU: tl.constexpr, SAVED: tl.constexpr, SIGNS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The words of x, and the gradient before the ReLU, whose mask is saved or recomputed.

    Two gradients are added as autograd does it, so their sum is rounded.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    words = _load_words(x, start, offset, exists, COLS)
    slope = _load(dy, start, offset, exists, COLS)
    if TWO:
        slope = (slope + _load(dy2, start, offset, exists, COLS)).to(dtype).to(tl.float32)
    if RELU:
        if SIGNS:
            byte = tl.load(saved + start // 8 + _bytes_at(offset, COLS), mask=exists, other=0).to(tl.int32)
            bits = (byte[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
            positive = tl.reshape(bits, (ROWS, COLS)) > 0
        elif SAVED:
            positive = _load(saved, start, offset, exists, COLS) > 0
        else:
            positive = _numbers(words, dtype) * scale[None, :] + shift[None, :] > 0
        slope = tl.where(positive, slope, 0.0)
    return words, slope


@triton.jit
def _add_groups(a, b, sums, d_parameters, counters, channels, COLS: tl.constexpr):
    """Store a group's sums; the last group to come here adds those of all: the gradients of bias and weight."""
    num_groups = tl.num_programs(2)
    _store_pair(sums, a, b, tl.program_id(2), num_groups, channels, COLS)
    counter = counters + num_groups * tl.num_programs(1) + tl.program_id(1)  # behind those of groups and blocks
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    if (before & 0x7FFFFFFF) == num_groups - 1:  # in another launch chunks may have waited here, and left a sign
        d_bias, d_weight = _add_rows(sums, 0, num_groups, num_groups, channels, COLS)
        _store_pair(d_parameters, d_bias, d_weight, 0, 1, channels, COLS)
        tl.store(counter, before - (num_groups - 1))


@_kernel
def bn_sum_slope_kernel(
    dy, dy2, x, saved, weight, bias, stats, slopes, partial, eps, tiles,
    groups, per_view, pixels, rows, channels,
    TWO: tl.constexpr, RELU: tl.constexpr, SAVED: tl.constexpr, SIGNS: tl.constexpr,
    FULL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of the slope and of slope * x_hat over each program's tiles, if they need a launch; stores SAVED slopes."""
    dtype: tl.constexpr = x.dtype.element_ty
    mean, inverse_std, scale, shift = _affine(stats, weight, bias, eps, channels, COLS)
    a = tl.zeros((ROWS, COLS), tl.float32)
    b = tl.zeros((ROWS, COLS), tl.float32)
    for t in tl.range(tiles, num_stages=STAGES):
        start, offset, exists = _tile(
            tl.program_id(0) * tiles + t, groups, per_view, pixels, rows, channels, FULL, ROWS
        )
        words, slope = _slope(
            dy, dy2, x, saved, scale, shift, start, offset, exists, TWO, RELU, SAVED, SIGNS, ROWS, COLS
        )
        a += slope
        b += slope * (_numbers(words, dtype) - mean[None, :])  # the slope is 0 in rows that do not exist
        if SAVED:
            tl.store(_words_at(slopes, start, offset, COLS), _words(slope, dtype), mask=exists)
    _store_partial(partial, tl.sum(a, 0), tl.sum(b, 0) * inverse_std, channels, COLS)


@_kernel
def bn_backward_kernel(
    dy, dy2, x, saved, weight, bias, stats, dx, slopes, sums, d_parameters, partial, counters, eps, chunks,
    groups, per_view, pixels, rows, channels,
    FUSED: tl.constexpr, ALONE: tl.constexpr, TWO: tl.constexpr, RELU: tl.constexpr, SAVED: tl.constexpr,
    SIGNS: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dx = weight / std * (slope - mean(slope) - x_hat * mean(slope * x_hat)).

    FUSED: the sums are made here, and SAVED slopes stored, as the residual's gradient; else the sums are given.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    start, offset, exists = _tile(tl.program_id(0), groups, per_view, pixels, rows, channels, FULL, ROWS)
    at = offset[:, None] + _channels(COLS)[None, :]
    mean, inverse_std, scale, shift = _affine(stats, weight, bias, eps, channels, COLS)
    words, slope = _slope(dy, dy2, x, saved, scale, shift, start, offset, exists, TWO, RELU, SAVED, SIGNS, ROWS, COLS)
    if FUSED:
        if not ALONE:
            counter, before = _read_counter(counters)
        a = tl.sum(slope, 0)
        b = tl.sum(slope * (_numbers(words, dtype) - mean[None, :]), 0) * inverse_std  # no slope where no row exists
        slope_words = _keep(_words(slope, dtype))
        if not ALONE:
            _store_partial(partial, a, b, channels, COLS)
            _wait_for_chunks(counter, before)
    if not ALONE:
        a, b = _add_partial(partial, chunks, channels, COLS)
        mean, inverse_std, scale, _ = _affine(stats, weight, bias, eps, channels, COLS)  # again, to save registers
    if FUSED:
        if SAVED:  # after the wait, which would wait for these stores too
            tl.store(_words_at(slopes, start, offset, COLS), slope_words, mask=exists)
        words, slope = _keep(words), _numbers(_keep(slope_words), dtype)
    of_x = -scale * inverse_std * b * (1.0 / rows)
    rest = -scale * a * (1.0 / rows) - mean * of_x
    out = slope * scale[None, :] + (_numbers(words, dtype) * of_x[None, :] + rest[None, :])
    tl.store(dx + start + at, out.to(dtype), mask=exists)
    if tl.program_id(0) == 0:
        _add_groups(a, b, sums, d_parameters, counters, channels, COLS)


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


def _counters(device: torch.device, num: int) -> Tensor:
    """Zeroed counters: those of the current stream, or else new ones."""
    found = None
    if device.type == "cuda" and num <= COUNTERS:
        if device not in _counters_of and not torch.cuda.is_current_stream_capturing():
            _counters_of[device] = _Counters(device)
        if device in _counters_of:
            found = _counters_of[device].of(torch.cuda.current_stream(device))
    return torch.zeros(num, dtype=torch.int32, device=device) if found is None else found


def _max_chunks(device: torch.device) -> int:
    """How many chunks may wait for each other: half of the programs that are on the device at once.

    Programs start in order. So at any time only one group of a kernel waits for programs that have not started, and
    there is room for them, even if a kernel on another stream waits too.
    """
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS // 2


class _Layout:
    """How a tensor (images, channels, ...) is divided into groups, chunks of rows and blocks of channels.

    A program has one chunk and block. A chunk is one tile; or, if the number of programs is limited, several.
    """

    def __init__(self, x: Tensor, views: int, groups: int, tile: Tile, warps: int, limit: int | None = None) -> None:
        images, self.channels = x.shape[:2]
        pixels = x.numel() // (images * self.channels)
        rows = images // views // groups * pixels
        most = tile.rows * 2 // x.element_size()
        tile_rows = min(most, max(16, triton.next_power_of_2(rows)))
        cols = math.gcd(tile.cols, self.channels)
        self.num_groups, self.blocks, tiles = views * groups, self.channels // cols, triton.cdiv(rows, tile_rows)
        chunks = tiles if limit is None else max(1, min(PARTIAL_ROWS.value, limit // (self.num_groups * self.blocks)))
        self.tiles = triton.cdiv(tiles, chunks)
        self.chunks = triton.cdiv(tiles, self.tiles)
        self.grid = self.chunks, self.blocks, self.num_groups
        self.device, self.numbers = x.device, (groups, images // views, pixels, rows, self.channels)
        self.sizes = {
            "FULL": rows % (tile_rows * self.tiles) == 0, "ROWS": tile_rows, "COLS": cols,
            "num_warps": max(1, warps * tile_rows // most),
            "maxnreg": min(255, REGISTERS // (32 * WARPS * PROGRAMS) // 8 * 8),
        }  # fmt: skip
        assert (tile_rows + pixels) * groups * self.channels < 2**31, "offsets inside a tile have 32 bits"
        assert tile_rows + pixels < 2**21, "rows are divided by pixels in float32"

    def empty(self, *shape: int) -> Tensor:
        return torch.empty((2, *shape, self.channels), dtype=torch.float32, device=self.device)

    def counters(self) -> Tensor:
        """Counters of each group and block of channels, then of each block."""
        return _counters(self.device, (self.num_groups + 1) * self.blocks)


def _layouts(x: Tensor, views: int, groups: int, tile: Tile) -> tuple[_Layout, _Layout]:
    """The layouts for making the sums and for using them. They are the same object if one launch is enough."""
    layout = _Layout(x, views, groups, tile, WARPS)
    if layout.chunks <= _max_chunks(x.device):
        return layout, layout
    return _Layout(x, views, groups, SUMS, SUM_WARPS, SUM_PROGRAMS), _Layout(x, views, groups, SECOND, WARPS)


def supports(dtype: torch.dtype, channels: int) -> bool:
    """Whether there are kernels: for bf16, fp16 and fp32, and channels in multiples of 32."""
    return dtype in (torch.bfloat16, torch.float16, torch.float32) and channels % 32 == 0


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, views: int, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`batch_norm.batch_norm` on CUDA."""
    first, layout = _layouts(x, views, groups, FORWARD if residual is None else RESIDUAL)
    fused = first is layout
    partial, stats = layout.empty(layout.num_groups, first.chunks), layout.empty(layout.num_groups)
    y, signs = torch.empty_like(x), empty_signs(x, residual, relu)
    if not fused:
        bn_sum_kernel[first.grid](x, partial, first.tiles, *first.numbers, STAGES=SUM_STAGES, **first.sizes)
    bn_forward_kernel[layout.grid](
        x, x if residual is None else residual, weight, bias, y, stats, signs, partial, layout.counters(), eps,
        first.chunks, *layout.numbers, FUSED=fused, ALONE=fused and layout.chunks == 1, RESIDUAL=residual is not None,
        RELU=relu, SIGNS=signs.numel() > 0, **layout.sizes,
    )  # fmt: skip
    return y, stats, signs


def empty_signs(x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """Memory for the sign bits of y, if backward will need them."""
    return x.new_empty(x.numel() // 8 if SIGN_BITS and relu and residual is not None else 0, dtype=torch.uint8)


def backward(
    dy: Tensor, dy2: Tensor | None, x: Tensor, saved: Tensor | None, stats: Tensor, weight: Tensor, bias: Tensor,
    views: int, groups: int, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`batch_norm.batch_norm_backward` on CUDA."""
    first, layout = _layouts(x, views, groups, BACKWARD)
    fused = first is layout
    partial, sums = layout.empty(layout.num_groups, first.chunks), layout.empty(layout.num_groups)
    d_parameters = layout.empty()
    dx, slopes = torch.empty_like(x), x.new_empty(0) if saved is None else torch.empty_like(x)
    inputs = dy, dy if dy2 is None else dy2, x, x if saved is None else saved, weight, bias, stats
    form = {
        "TWO": dy2 is not None, "RELU": relu, "SAVED": saved is not None,
        "SIGNS": saved is not None and saved.dtype == torch.uint8,
    }  # fmt: skip
    if not fused:
        bn_sum_slope_kernel[first.grid](
            *inputs, slopes, partial, eps, first.tiles, *first.numbers, **form, STAGES=SUM_STAGES, **first.sizes
        )
        if saved is not None:
            inputs = slopes, slopes, *inputs[2:]
            form = dict.fromkeys(form, False)
    bn_backward_kernel[layout.grid](
        *inputs, dx, slopes, sums, d_parameters, partial, layout.counters(), eps, first.chunks, *layout.numbers,
        FUSED=fused, ALONE=fused and layout.chunks == 1, **form, **layout.sizes,
    )  # fmt: skip
    return dx, slopes, d_parameters


# Running statistics


@_kernel
def bn_update_kernel(stats, group_weights, mean, var, momentum, unbias, channels, num_groups, COLS: tl.constexpr):
    """Running statistics move by `momentum` toward the weighted mean of the groups' moments."""
    channel = tl.program_id(0) * COLS + tl.arange(0, COLS)
    a = tl.zeros((COLS,), tl.float32)
    b = tl.zeros((COLS,), tl.float32)
    for group in range(num_groups):
        w = tl.load(group_weights + group)
        a += w * tl.load(stats + group * channels + channel)
        b += w * tl.load(stats + (num_groups + group) * channels + channel)
    old_mean, old_var = tl.load(mean + channel), tl.load(var + channel)
    tl.store(mean + channel, old_mean + momentum * (a - old_mean))
    tl.store(var + channel, old_var + momentum * (b * unbias - old_var))


def update_running_stats(
    stats: Tensor, group_weights: Tensor, mean: Tensor, var: Tensor, momentum: float, unbias: float
) -> None:
    """`batch_norm.update_running_stats` on CUDA."""
    _, num_groups, channels = stats.shape
    bn_update_kernel[(channels // 32,)](
        stats, group_weights, mean, var, momentum, unbias, channels, num_groups, COLS=32
    )
