"""Split batch norm, residual and ReLU as CUDA kernels written in Triton: one launch each way.

A tensor is a matrix with a row of C channels per (image, pixel), in channels_last order; group j has the rows of images
j, j + G, ... of a view. Statistics are per cell: a block of channels of a group. A cell has a counter and two sums.

If a cell is small, one program loads it, adds it up and writes the result, without reading it again. The tiles of a
larger cell are read twice, by programs of two kinds: some add them up, others apply the sums. Both are in one launch,
which sums cell after cell, and applies a cell's sums a few cells later. By then they are known, and the second read
comes from the L2 cache. Such a program waits only for programs with lower numbers, which never wait. A GPU starts
programs in the order of their numbers (CUB's scan relies on it too), so no program waits forever.

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
    """Rows of a program (half as many in float32), and most registers of a thread."""

    alone: int  # in a small cell: they stay in registers between the sums and the result
    sums: int
    applies: int
    registers: int  # in large cells


# Programs are short, so that few bytes of the L2 cache lie between the sums of a cell and their use. A multiprocessor
# holds 5 programs or more, whose loads together hide the latency; those of sums are pipelined through shared memory.
FORWARD = Tiles(alone=1024, sums=256, applies=64, registers=64)
RESIDUAL = Tiles(alone=512, sums=256, applies=64, registers=80)
BACKWARD = Tiles(alone=512, sums=256, applies=64, registers=96)
COLS, WARPS, SUM_ROWS, SUM_STAGES = 64, 4, 32, 4  # channels of a cell, warps of a program; and its loop over sums
ALONE_COLS, ALONE_WARPS, ALONE_REGISTERS = 32, 8, 128
PARTIAL_ROWS = tl.constexpr(32)  # partial sums that a program loads at once
LAG = 32  # MB that a GPU moves between the sums of a cell and their use, which takes 8 us; 0: in two launches
BACKWARDS = 1, 0  # 1 if sums, and in two launches their use, go from the last cell to the first
HINTS = True  # tell the L2 cache which tensors are read for the last time
SIGN_BITS = True  # keep the sign of y, which backward needs after a residual and ReLU, in a bit instead of reading y
COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # the interpreter has no inline assembly
# Integers whose values compile no kernels of their own. Not `channels`, whose divisibility makes loads wide.
NOT_SPECIALIZED = ("sum_chunks", "chunks", "lag", "back", "groups", "per_view", "pixels", "rows", "num_groups")


def _kernel(function: Callable[..., None]) -> Any:
    return triton.jit(
        function, do_not_specialize=[name for name in NOT_SPECIALIZED if name in signature(function).parameters]
    )


# Tiles


@triton.jit
def _channels(block, COLS: tl.constexpr):
    return block * COLS + tl.arange(0, COLS)


@triton.jit
def _tile(group, tile, groups, per_view, pixels, rows, channels, FULL: tl.constexpr, ROWS: tl.constexpr):
    """Where the image starts that has the tile's first row; offsets of the rows from there; which rows exist."""
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
def _words_at(x, block, start, offset, COLS: tl.constexpr):
    NUM: tl.constexpr = 32 // x.dtype.element_ty.primitive_bitwidth
    column = _channels(block, COLS // NUM)
    return (x + start).to(tl.pointer_type(tl.int32), bitcast=True) + ((offset // NUM)[:, None] + column[None, :])


@triton.jit
def _load(x, block, start, offset, exists, COLS: tl.constexpr, LAST: tl.constexpr):
    """Words of a tile. LAST: they are not read again."""
    at = _words_at(x, block, start, offset, COLS)
    if LAST:
        words = tl.load(at, mask=exists, other=0, eviction_policy="evict_first")
    else:
        words = tl.load(at, mask=exists, other=0)
    return words


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
    """The same words. The compiler takes them for new ones, so it keeps no float32 copy of 16-bit numbers for later."""
    if COMPILED:
        words = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], tl.int32, is_pure=False, pack=1)
    return words


@triton.jit
def _bytes_at(block, offset, COLS: tl.constexpr):
    """Offsets of a tile's sign bits, 8 channels per byte."""
    return (offset // 8)[:, None] + _channels(block, COLS // 8)[None, :]


# Sums


@triton.jit
def _store_pair(out, a, b, block, index, num, channels, COLS: tl.constexpr):
    """Store vectors a and b as row `index` of each half of a (2, num, channels) matrix."""
    at = index * channels + _channels(block, COLS)
    tl.store(out + at, a)
    tl.store(out + num * channels + at, b)


@triton.jit
def _load_pair(pair, block, index, num, channels, COLS: tl.constexpr):
    """Vectors that another program of the launch may have stored, so loads pass by the L1 cache."""
    at = index * channels + _channels(block, COLS)
    a = tl.load(pair + at, cache_modifier=".cg")
    return a, tl.load(pair + num * channels + at, cache_modifier=".cg")


@triton.jit
def _add_rows(sums, block, start, num, total, channels, COLS: tl.constexpr):
    """Sums of `num` rows from `start` on, of each half of a (2, total, channels) matrix."""
    a = tl.zeros((PARTIAL_ROWS, COLS), tl.float32)
    b = tl.zeros((PARTIAL_ROWS, COLS), tl.float32)
    for i in tl.range(0, num, PARTIAL_ROWS, num_stages=1):
        row = i + tl.arange(0, PARTIAL_ROWS)
        at = (start + row)[:, None] * channels + _channels(block, COLS)[None, :]
        exists = (row < num)[:, None]
        a += tl.load(sums + at, mask=exists, other=0.0, cache_modifier=".cg")
        b += tl.load(sums + total * channels + at, mask=exists, other=0.0, cache_modifier=".cg")
    return tl.sum(a, 0), tl.sum(b, 0)


# Programs of a launch and their order. A launch may leave out one kind, which then has 0 chunks and no lag.


@triton.jit
def _place(sum_chunks, chunks, lag, back, channels, num_groups, COLS: tl.constexpr):
    """Whether this program sums or applies, and its cell and chunk. The first and last turns have one kind only."""
    turn = tl.program_id(0) // (sum_chunks + chunks)
    chunk = tl.program_id(0) % (sum_chunks + chunks)
    cells = num_groups * (channels // COLS)
    is_sum = chunk < sum_chunks
    cell = tl.where(is_sum, turn, turn - lag)
    exists = (cell >= 0) & (cell < cells)
    chunk = tl.where(is_sum, chunk, chunk - sum_chunks)
    if back != 0:
        chunk = tl.where(is_sum, sum_chunks, chunks) - 1 - chunk
        cell = cells - 1 - cell
    return is_sum & exists, (is_sum == 0) & exists, cell, chunk


# A cell's counter is 0 between launches. Programs that sum count up. The last of them makes the counter negative, which
# lets the others proceed, and each of these adds 1.


@triton.jit
def _is_last(counter, num):
    """Count this program, whose stores others can then load; whether it is the last of `num` programs."""
    tl.debug_barrier()  # all threads have stored
    return tl.atomic_add(counter, 1, sem="acq_rel") == num - 1


@triton.jit
def _proceed(counter, sum_chunks, chunks):
    tl.debug_barrier()
    tl.atomic_add(counter, -(sum_chunks + chunks), sem="release")


@triton.jit
def _read(counter):
    if COMPILED:
        value = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter], tl.int32, is_pure=False, pack=1
        )
    else:
        value = tl.atomic_add(counter, 0)
    return value


@triton.jit
def _wait(counter):
    while _read(counter) >= 0:
        pass
    tl.debug_barrier()  # all threads have seen it
    tl.atomic_add(counter, 1, sem="relaxed")


# Forward


@triton.jit
def _moments(a, b, rows):
    mean = a * (1.0 / rows)
    return mean, tl.maximum(b * (1.0 / rows) - mean * mean, 0.0)


@triton.jit
def _affine(mean, var, weight, bias, eps, block, COLS: tl.constexpr):
    """1 / std, and the scale and shift that batch norm amounts to."""
    channel = _channels(block, COLS)
    inverse_std = tl.rsqrt(var + eps)
    scale = inverse_std * tl.load(weight + channel)
    return inverse_std, scale, tl.load(bias + channel) - mean * scale


@triton.jit
def _store_y(
    words, residual_words, y, signs, scale, shift, block, start, offset, exists,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, SIGNS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y.dtype.element_ty
    out = _numbers(words, dtype) * scale[None, :] + shift[None, :]
    if RESIDUAL:
        out += _numbers(residual_words, dtype)
    if RELU:
        out = tl.maximum(out, 0.0)
    tl.store(y + start + (offset[:, None] + _channels(block, COLS)[None, :]), out.to(dtype), mask=exists)
    if SIGNS:
        bits = tl.reshape((out > 0).to(tl.int32), (ROWS, COLS // 8, 8)) << tl.arange(0, 8)[None, None, :]
        tl.store(signs + start // 8 + _bytes_at(block, offset, COLS), tl.sum(bits, 2).to(tl.uint8), mask=exists)


@_kernel
def bn_forward_alone_kernel(
    x, residual, weight, bias, y, stats, signs, eps, groups, per_view, pixels, rows, channels, num_groups,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, SIGNS: tl.constexpr,
    FULL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """y = relu((x - mean) / std * weight + bias + residual), if a cell is one tile."""
    dtype: tl.constexpr = x.dtype.element_ty
    blocks = channels // COLS
    group, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    start, offset, exists = _tile(group, 0, groups, per_view, pixels, rows, channels, FULL, ROWS)
    words = _load(x, block, start, offset, exists, COLS, False)
    residual_words = words
    if RESIDUAL:
        residual_words = _load(residual, block, start, offset, exists, COLS, False)
    value = _numbers(words, dtype)
    mean, var = _moments(tl.sum(value, 0), tl.sum(value * value, 0), rows)
    _store_pair(stats, mean, var, block, group, num_groups, channels, COLS)
    _, scale, shift = _affine(mean, var, weight, bias, eps, block, COLS)
    _store_y(
        _keep(words), residual_words, y, signs, scale, shift, block, start, offset, exists,
        RESIDUAL, RELU, SIGNS, ROWS, COLS,
    )  # fmt: skip


@_kernel
def bn_forward_kernel(
    x, residual, weight, bias, y, stats, signs, partial, counters, eps, sum_chunks, chunks, lag, back,
    groups, per_view, pixels, rows, channels, num_groups,
    SUMS: tl.constexpr, APPLIES: tl.constexpr, HINTS: tl.constexpr,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, SIGNS: tl.constexpr,
    FULL: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_TILES: tl.constexpr, SUM_STAGES: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """y = relu((x - mean) / std * weight + bias + residual), with sums of x and x^2 from other programs."""
    dtype: tl.constexpr = x.dtype.element_ty
    is_sum, applies, cell, chunk = _place(sum_chunks, chunks, lag, back, channels, num_groups, COLS)
    group, block = cell // (channels // COLS), cell % (channels // COLS)
    counter = counters + cell
    if SUMS:  # noqa: SIM102 (known to the compiler)
        if is_sum:
            a = tl.zeros((SUM_ROWS, COLS), tl.float32)
            b = tl.zeros((SUM_ROWS, COLS), tl.float32)
            for i in tl.range(SUM_TILES, num_stages=SUM_STAGES):
                start, offset, exists = _tile(
                    group, chunk * SUM_TILES + i, groups, per_view, pixels, rows, channels, FULL, SUM_ROWS
                )
                value = _numbers(_load(x, block, start, offset, exists, COLS, False), dtype)
                a += value
                b += value * value
            row = group * sum_chunks
            total = num_groups * sum_chunks
            _store_pair(partial, tl.sum(a, 0), tl.sum(b, 0), block, row + chunk, total, channels, COLS)
            if _is_last(counter, sum_chunks):
                sum_x, sum_x2 = _add_rows(partial, block, row, sum_chunks, total, channels, COLS)
                mean, var = _moments(sum_x, sum_x2, rows)
                _store_pair(stats, mean, var, block, group, num_groups, channels, COLS)
                _proceed(counter, sum_chunks, chunks)
    if APPLIES:  # noqa: SIM102
        if applies:
            start, offset, exists = _tile(group, chunk, groups, per_view, pixels, rows, channels, FULL, ROWS)
            words = _load(x, block, start, offset, exists, COLS, HINTS)
            residual_words = words
            if RESIDUAL:
                residual_words = _load(residual, block, start, offset, exists, COLS, HINTS)
            if SUMS:
                _wait(counter)
            mean, var = _load_pair(stats, block, group, num_groups, channels, COLS)
            _, scale, shift = _affine(mean, var, weight, bias, eps, block, COLS)
            _store_y(
                words, residual_words, y, signs, scale, shift, block, start, offset, exists,
                RESIDUAL, RELU, SIGNS, ROWS, COLS,
            )  # fmt: skip


# Backward


@triton.jit
def _load_slope(
    dy, dy2, saved, block, start, offset, exists,
    TWO: tl.constexpr, SAVED: tl.constexpr, SIGNS: tl.constexpr, COLS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Words of one or two gradients, and what is saved for the ReLU's mask."""
    words = _load(dy, block, start, offset, exists, COLS, LAST)
    words2 = words
    if TWO:
        words2 = _load(dy2, block, start, offset, exists, COLS, LAST)
    mask = words
    if SIGNS:
        mask = tl.load(saved + start // 8 + _bytes_at(block, offset, COLS), mask=exists, other=0).to(tl.int32)
    elif SAVED:
        mask = _load(saved, block, start, offset, exists, COLS, LAST)
    return words, words2, mask


@triton.jit
def _slope(
    loaded, words, scale, shift, dtype: tl.constexpr,
    TWO: tl.constexpr, RELU: tl.constexpr, SAVED: tl.constexpr, SIGNS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The gradient before the ReLU, whose mask is saved or recomputed from x.

    Two gradients are added as autograd does it, so their sum is rounded.
    """
    slope = _numbers(loaded[0], dtype)
    if TWO:
        slope = (slope + _numbers(loaded[1], dtype)).to(dtype).to(tl.float32)
    if RELU:
        if SIGNS:
            bits = (loaded[2][:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
            positive = tl.reshape(bits, (ROWS, COLS)) > 0
        elif SAVED:
            positive = _numbers(loaded[2], dtype) > 0
        else:
            positive = _numbers(words, dtype) * scale[None, :] + shift[None, :] > 0
        slope = tl.where(positive, slope, 0.0)
    return slope


@triton.jit
def _add_groups(sums, d_parameters, counters, block, channels, num_groups, COLS: tl.constexpr):
    """The last group to come here adds the sums of all: the gradients of bias and weight."""
    counter = counters + num_groups * (channels // COLS) + block  # behind those of the cells
    if _is_last(counter, num_groups):
        d_bias, d_weight = _add_rows(sums, block, 0, num_groups, num_groups, channels, COLS)
        _store_pair(d_parameters, d_bias, d_weight, block, 0, 1, channels, COLS)
        tl.store(counter, 0)


@triton.jit
def _store_dx(words, slope, dx, a, b, mean, inverse_std, scale, rows, block, start, offset, exists, COLS: tl.constexpr):
    dtype: tl.constexpr = dx.dtype.element_ty
    of_x = -scale * inverse_std * b * (1.0 / rows)
    rest = -scale * a * (1.0 / rows) - mean * of_x
    out = slope * scale[None, :] + (_numbers(words, dtype) * of_x[None, :] + rest[None, :])
    tl.store(dx + start + (offset[:, None] + _channels(block, COLS)[None, :]), out.to(dtype), mask=exists)


@_kernel
def bn_backward_alone_kernel(
    dy, dy2, x, saved, weight, bias, stats, dx, slopes, sums, d_parameters, counters, eps,
    groups, per_view, pixels, rows, channels, num_groups,
    TWO: tl.constexpr, RELU: tl.constexpr, SAVED: tl.constexpr, SIGNS: tl.constexpr,
    FULL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dx = weight / std * (slope - mean(slope) - x_hat * mean(slope * x_hat)), if a cell is one tile.

    SAVED: also stores the slopes, which are the residual's gradient.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    blocks = channels // COLS
    group, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    start, offset, exists = _tile(group, 0, groups, per_view, pixels, rows, channels, FULL, ROWS)
    words = _load(x, block, start, offset, exists, COLS, False)
    loaded = _load_slope(dy, dy2, saved, block, start, offset, exists, TWO, SAVED, SIGNS, COLS, False)
    mean, var = _load_pair(stats, block, group, num_groups, channels, COLS)
    inverse_std, scale, shift = _affine(mean, var, weight, bias, eps, block, COLS)
    slope = _slope(loaded, words, scale, shift, dtype, TWO, RELU, SAVED, SIGNS, ROWS, COLS)
    a = tl.sum(slope, 0)
    b = tl.sum(slope * (_numbers(words, dtype) - mean[None, :]), 0) * inverse_std  # no slope where no row exists
    slope_words = _keep(_words(slope, dtype))
    if SAVED:
        tl.store(_words_at(slopes, block, start, offset, COLS), slope_words, mask=exists)
    slope = _numbers(_keep(slope_words), dtype)
    _store_dx(_keep(words), slope, dx, a, b, mean, inverse_std, scale, rows, block, start, offset, exists, COLS)
    _store_pair(sums, a, b, block, group, num_groups, channels, COLS)
    _add_groups(sums, d_parameters, counters, block, channels, num_groups, COLS)


@_kernel
def bn_backward_kernel(
    dy, dy2, x, saved, weight, bias, stats, dx, slopes, sums, d_parameters, partial, counters, eps,
    sum_chunks, chunks, lag, back, groups, per_view, pixels, rows, channels, num_groups,
    SUMS: tl.constexpr, APPLIES: tl.constexpr, HINTS: tl.constexpr,
    TWO: tl.constexpr, RELU: tl.constexpr, SAVED: tl.constexpr, SIGNS: tl.constexpr,
    FULL: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_TILES: tl.constexpr, SUM_STAGES: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dx = weight / std * (slope - mean(slope) - x_hat * mean(slope * x_hat)), with sums from other programs.

    SAVED: they also store the slopes, which are the residual's gradient.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    is_sum, applies, cell, chunk = _place(sum_chunks, chunks, lag, back, channels, num_groups, COLS)
    group, block = cell // (channels // COLS), cell % (channels // COLS)
    counter = counters + cell
    if SUMS:  # noqa: SIM102 (known to the compiler)
        if is_sum:
            mean, var = _load_pair(stats, block, group, num_groups, channels, COLS)
            inverse_std, scale, shift = _affine(mean, var, weight, bias, eps, block, COLS)
            a = tl.zeros((SUM_ROWS, COLS), tl.float32)
            b = tl.zeros((SUM_ROWS, COLS), tl.float32)
            for i in tl.range(SUM_TILES, num_stages=SUM_STAGES):
                start, offset, exists = _tile(
                    group, chunk * SUM_TILES + i, groups, per_view, pixels, rows, channels, FULL, SUM_ROWS
                )
                words = _load(x, block, start, offset, exists, COLS, False)
                loaded = _load_slope(
                    dy, dy2, saved, block, start, offset, exists, TWO, SAVED, SIGNS, COLS, HINTS and SAVED
                )
                slope = _slope(loaded, words, scale, shift, dtype, TWO, RELU, SAVED, SIGNS, SUM_ROWS, COLS)
                if SAVED:
                    tl.store(_words_at(slopes, block, start, offset, COLS), _words(slope, dtype), mask=exists)
                a += slope
                b += slope * (_numbers(words, dtype) - mean[None, :])  # the slope is 0 in rows that do not exist
            row = group * sum_chunks
            total = num_groups * sum_chunks
            _store_pair(partial, tl.sum(a, 0), tl.sum(b, 0) * inverse_std, block, row + chunk, total, channels, COLS)
            if _is_last(counter, sum_chunks):
                sum_1, sum_x_hat = _add_rows(partial, block, row, sum_chunks, total, channels, COLS)
                _store_pair(sums, sum_1, sum_x_hat, block, group, num_groups, channels, COLS)
                _proceed(counter, sum_chunks, chunks)
                _add_groups(sums, d_parameters, counters, block, channels, num_groups, COLS)
    if APPLIES:  # noqa: SIM102
        if applies:
            start, offset, exists = _tile(group, chunk, groups, per_view, pixels, rows, channels, FULL, ROWS)
            words = _load(x, block, start, offset, exists, COLS, HINTS)
            mean, var = _load_pair(stats, block, group, num_groups, channels, COLS)
            inverse_std, scale, shift = _affine(mean, var, weight, bias, eps, block, COLS)
            if SAVED:
                if SUMS:
                    _wait(counter)
                slope = _numbers(_load(slopes, block, start, offset, exists, COLS, False), dtype)
            else:
                loaded = _load_slope(dy, dy2, saved, block, start, offset, exists, TWO, False, False, COLS, HINTS)
                if SUMS:
                    _wait(counter)
                slope = _slope(loaded, words, scale, shift, dtype, TWO, RELU, False, False, ROWS, COLS)
            a, b = _load_pair(sums, block, group, num_groups, channels, COLS)
            _store_dx(words, slope, dx, a, b, mean, inverse_std, scale, rows, block, start, offset, exists, COLS)


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


class _Layout:
    """How a tensor (images, channels, ...) is divided into cells and tiles, and which programs there are.

    A cell is one tile (`alone`) if it fits. Else it has chunks of rows: those of programs that sum, and of programs
    that apply the sums.
    """

    def __init__(self, x: Tensor, views: int, groups: int, tiles: Tiles) -> None:
        images, self.channels = x.shape[:2]
        pixels = x.numel() // (images * self.channels)
        rows = images // views // groups * pixels
        self.device, self.num_groups = x.device, views * groups
        self.numbers = groups, images // views, pixels, rows, self.channels, self.num_groups
        most = [num * 2 // x.element_size() for num in tiles[:3]]
        self.alone = rows <= most[0]
        cols = math.gcd(ALONE_COLS if self.alone else COLS, self.channels)
        self.cells = self.num_groups * self.channels // cols
        self.bytes = rows * cols * x.element_size()  # of a cell of one tensor
        sizes = [min(num, max(16, triton.next_power_of_2(rows))) for num in (most[:1] if self.alone else most[1:])]
        self.chunks = [triton.cdiv(rows, size) for size in sizes]
        self.sizes: dict[str, Any] = {"FULL": all(rows % size == 0 for size in sizes), "ROWS": sizes[-1], "COLS": cols}
        if self.alone:
            warps = max(1, ALONE_WARPS * sizes[0] // most[0])
            self.sizes |= {"num_warps": warps, "maxnreg": ALONE_REGISTERS}
        else:
            sum_rows = min(SUM_ROWS, sizes[0])
            self.sizes |= {"SUM_ROWS": sum_rows, "SUM_TILES": sizes[0] // sum_rows, "SUM_STAGES": SUM_STAGES}
            self.sizes |= {"num_warps": WARPS, "maxnreg": tiles.registers}
        assert (max(sizes) + pixels) * groups * self.channels < 2**31, "offsets inside a tile have 32 bits"
        assert max(sizes) + pixels < 2**21, "rows are divided by pixels in float32"

    def empty(self, *shape: int) -> Tensor:
        return torch.empty((2, *shape, self.channels), dtype=torch.float32, device=self.device)

    def counters(self) -> Tensor:
        """Counters of the cells, then of each block of channels."""
        return _counters(self.device, self.cells + self.cells // self.num_groups)

    def launch(self, kernel: Any, moved: int, *args: Any, **form: bool) -> None:
        """Sums and their use in one launch, or, if there is no LAG, in two. The kernel moves so many tensors."""
        sum_chunks, chunks = self.chunks
        lag = min(self.cells, math.ceil(LAG * 1e6 / (moved * self.bytes)))
        launches = [(sum_chunks, chunks, BACKWARDS[0])]
        if not lag:
            launches = [(sum_chunks, 0, BACKWARDS[0]), (0, chunks, BACKWARDS[1])]
        for sums, applies, back in launches:
            kernel[((self.cells + lag) * (sums + applies),)](
                *args, sums, applies, lag, back, *self.numbers,
                SUMS=sums > 0, APPLIES=applies > 0, HINTS=HINTS, **form, **self.sizes,
            )  # fmt: skip


def supports(dtype: torch.dtype, channels: int) -> bool:
    """Whether there are kernels: for bf16, fp16 and fp32, and channels in multiples of 32."""
    return dtype in (torch.bfloat16, torch.float16, torch.float32) and channels % 32 == 0


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, views: int, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`batch_norm.batch_norm` on CUDA."""
    layout = _Layout(x, views, groups, FORWARD if residual is None else RESIDUAL)
    y, stats, signs = torch.empty_like(x), layout.empty(layout.num_groups), empty_signs(x, residual, relu)
    tensors = x, x if residual is None else residual, weight, bias, y, stats, signs
    form = {"RESIDUAL": residual is not None, "RELU": relu, "SIGNS": signs.numel() > 0}
    if layout.alone:
        bn_forward_alone_kernel[(layout.cells,)](*tensors, eps, *layout.numbers, **form, **layout.sizes)
    else:
        partial = layout.empty(layout.num_groups, layout.chunks[0])
        layout.launch(bn_forward_kernel, 2 + (residual is not None), *tensors, partial, layout.counters(), eps, **form)
    return y, stats, signs


def empty_signs(x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """Memory for the sign bits of y, if backward will need them."""
    return x.new_empty(x.numel() // 8 if SIGN_BITS and relu and residual is not None else 0, dtype=torch.uint8)


def backward(
    dy: Tensor, dy2: Tensor | None, x: Tensor, saved: Tensor | None, stats: Tensor, weight: Tensor, bias: Tensor,
    views: int, groups: int, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`batch_norm.batch_norm_backward` on CUDA."""
    layout = _Layout(x, views, groups, BACKWARD)
    sums, d_parameters = layout.empty(layout.num_groups), layout.empty()
    dx, slopes = torch.empty_like(x), x.new_empty(0) if saved is None else torch.empty_like(x)
    tensors = (
        dy, dy if dy2 is None else dy2, x, x if saved is None else saved, weight, bias, stats,
        dx, slopes, sums, d_parameters,
    )  # fmt: skip
    form = {
        "TWO": dy2 is not None, "RELU": relu, "SAVED": saved is not None,
        "SIGNS": saved is not None and saved.dtype == torch.uint8,
    }  # fmt: skip
    if layout.alone:
        bn_backward_alone_kernel[(layout.cells,)](
            *tensors, layout.counters(), eps, *layout.numbers, **form, **layout.sizes
        )
    else:
        partial = layout.empty(layout.num_groups, layout.chunks[0])
        moved = 3 + form["TWO"] + form["SAVED"]
        layout.launch(bn_backward_kernel, moved, *tensors, partial, layout.counters(), eps, **form)
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
