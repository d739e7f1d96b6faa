"""Split batch norm, residual and ReLU as CUDA kernels written in Triton: two passes over memory each way.

Each way takes three launches: partial sums over rows (in parallel), their totals (tiny), one pass that applies them. A
tensor is a matrix with a row of C channels per (image, pixel), in channels_last order; group j has the rows of images
j, j + G, ... of a view. `batch_norm.py` has the same formulas in plain PyTorch, and a test compares the two.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows per tile (64 channels wide), as measured on an H200: applying is fastest with many numbers per thread; summing
# with few, because it keeps two sums for each, and with pipelined loads. One size for both made a step 0.9 ms longer.
ROWS, WARPS = 128, 8
SUM_ROWS, SUM_WARPS, SUM_STAGES = 32, 4, 4
SUM_PROGRAMS = 512  # enough to fill a GPU; more programs make more partial sums
TOTAL_CHUNKS, TOTAL_COLS = 128, 16  # partial sums loaded at once: in most layers, a single wait for memory
# Integers whose values compile no kernels of their own. Not `channels`, whose divisibility makes loads wide.
NOT_SPECIALIZED = ("tiles", "groups", "per_view", "pixels", "rows", "num_groups", "chunks", "count")


def _kernel(function: Callable[..., None]) -> Any:
    return triton.jit(
        function, do_not_specialize=[name for name in NOT_SPECIALIZED if name in signature(function).parameters]
    )


@triton.jit
def _tile(group, tile, block, groups, per_view, pixels, rows, channels, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Offsets (ROWS, COLS) of a tile of a group's rows, a mask of the rows that exist, and the channels."""
    row = tile * ROWS + tl.arange(0, ROWS)
    image = (group // groups) * per_view + (row // pixels) * groups + group % groups
    channel = block * COLS + tl.arange(0, COLS)
    start = (image.to(tl.int64) * pixels + row % pixels) * channels
    return start[:, None] + channel[None, :], (row < rows)[:, None], channel


@triton.jit
def _moments(stats, group, num_groups, channel, channels, eps):
    mean = tl.load(stats + group * channels + channel)
    var = tl.load(stats + (num_groups + group) * channels + channel)
    return mean, tl.rsqrt(var + eps)


@triton.jit
def _store_sums(out, first, second, group, channel, channels, num_groups):
    at = (group * tl.num_programs(1) + tl.program_id(1)) * channels + channel
    tl.store(out + at, tl.sum(first, 0))
    tl.store(out + num_groups * tl.num_programs(1) * channels + at, tl.sum(second, 0))


@_kernel
def bn_sum_kernel(
    x,
    out,
    tiles,
    groups,
    per_view,
    pixels,
    rows,
    channels,
    num_groups,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums of x and of x^2 over this program's tiles."""
    group, chunk, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.zeros((ROWS, COLS), tl.float32)
    second = tl.zeros((ROWS, COLS), tl.float32)
    for t in tl.range(tiles, num_stages=STAGES):
        at, mask, _ = _tile(group, chunk * tiles + t, block, groups, per_view, pixels, rows, channels, ROWS, COLS)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        first += value
        second += value * value
    channel = block * COLS + tl.arange(0, COLS)
    _store_sums(out, first, second, group, channel, channels, num_groups)


@_kernel
def bn_total_kernel(
    sums, out, chunks, count, channels, num_groups, MOMENTS: tl.constexpr, CHUNKS: tl.constexpr, COLS: tl.constexpr
):
    """Both sums over all chunks of a group; with MOMENTS, those of x and x^2 become mean and variance."""
    group = tl.program_id(0)
    channel = tl.program_id(1) * COLS + tl.arange(0, COLS)
    first = tl.zeros((CHUNKS, COLS), tl.float32)
    second = tl.zeros((CHUNKS, COLS), tl.float32)
    for start in range(0, chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        at = (group * chunks + chunk)[:, None] * channels + channel[None, :]
        first += tl.load(sums + at, mask=(chunk < chunks)[:, None], other=0.0)
        second += tl.load(sums + num_groups * chunks * channels + at, mask=(chunk < chunks)[:, None], other=0.0)
    a, b = tl.sum(first, 0), tl.sum(second, 0)
    if MOMENTS:
        a /= count
        b = tl.maximum(b / count - a * a, 0.0)
    tl.store(out + group * channels + channel, a)
    tl.store(out + (num_groups + group) * channels + channel, b)


@_kernel
def bn_forward_kernel(
    x, residual, weight, bias, stats, y, eps, groups, per_view, pixels, rows, channels, num_groups,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """y = relu((x - mean) / std * weight + bias + residual)."""
    group = tl.program_id(0)
    at, mask, channel = _tile(
        group, tl.program_id(1), tl.program_id(2), groups, per_view, pixels, rows, channels, ROWS, COLS
    )
    mean, inverse_std = _moments(stats, group, num_groups, channel, channels, eps)
    scale = inverse_std * tl.load(weight + channel)
    shift = tl.load(bias + channel) - mean * scale
    out = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if RESIDUAL:
        out += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        out = tl.maximum(out, 0.0)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _slope(dy, x, y, weight, bias, channel, at, mask, mean, inverse_std, SAVED: tl.constexpr, RELU: tl.constexpr):
    """The gradient before the ReLU, and the standardized x; without a residual the ReLU's mask is recomputed."""
    slope = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    x_hat = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * inverse_std[None, :]
    if RELU:
        if SAVED:
            positive = tl.load(y + at, mask=mask, other=0.0) > 0
        else:
            positive = x_hat * tl.load(weight + channel)[None, :] + tl.load(bias + channel)[None, :] > 0
        slope = tl.where(positive, slope, 0.0)
    return slope, x_hat


@_kernel
def bn_sum_slope_kernel(
    dy, x, y, weight, bias, stats, out, slopes, eps, tiles, groups, per_view, pixels, rows, channels, num_groups,
    SAVED: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of the slope and of slope * x_hat over this program's tiles; with SAVED, stores the residual's gradient."""
    group, chunk, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel = block * COLS + tl.arange(0, COLS)
    mean, inverse_std = _moments(stats, group, num_groups, channel, channels, eps)
    first = tl.zeros((ROWS, COLS), tl.float32)
    second = tl.zeros((ROWS, COLS), tl.float32)
    for t in tl.range(tiles, num_stages=STAGES):
        at, mask, _ = _tile(group, chunk * tiles + t, block, groups, per_view, pixels, rows, channels, ROWS, COLS)
        slope, x_hat = _slope(dy, x, y, weight, bias, channel, at, mask, mean, inverse_std, SAVED, RELU)
        first += slope
        second += slope * x_hat  # the slope is 0 in rows that do not exist
        if SAVED:
            tl.store(slopes + at, slope.to(slopes.dtype.element_ty), mask=mask)
    _store_sums(out, first, second, group, channel, channels, num_groups)


@_kernel
def bn_backward_kernel(
    dy, x, weight, bias, stats, sums, dx, d_parameters, eps, groups, per_view, pixels, rows, channels, num_groups,
    RELU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """dx = weight / std * (slope - mean(slope) - x_hat * mean(slope * x_hat)).

    The first program of a block of channels also adds up the groups' sums: the gradients of bias and weight.
    """
    group = tl.program_id(0)
    at, mask, channel = _tile(
        group, tl.program_id(1), tl.program_id(2), groups, per_view, pixels, rows, channels, ROWS, COLS
    )
    mean, inverse_std = _moments(stats, group, num_groups, channel, channels, eps)
    slope, x_hat = _slope(dy, x, x, weight, bias, channel, at, mask, mean, inverse_std, False, RELU)
    a = tl.load(sums + group * channels + channel) / rows
    b = tl.load(sums + (num_groups + group) * channels + channel) / rows
    scale = inverse_std * tl.load(weight + channel)
    out = scale[None, :] * (slope - a[None, :] - x_hat * b[None, :])
    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
    if (group == 0) & (tl.program_id(1) == 0):
        each = tl.arange(0, GROUPS)
        of_group = sums + each[:, None] * channels + channel[None, :]
        exists = (each < num_groups)[:, None]
        tl.store(d_parameters + channel, tl.sum(tl.load(of_group, mask=exists, other=0.0), 0))
        second = tl.load(of_group + num_groups * channels, mask=exists, other=0.0)
        tl.store(d_parameters + channels + channel, tl.sum(second, 0))


class _Layout:
    """How a tensor (images, channels, ...) is divided into groups, tiles and programs."""

    def __init__(self, x: Tensor, views: int, groups: int) -> None:
        images, channels = x.shape[:2]
        pixels = x.numel() // (images * channels)
        per_view = images // views
        self.rows = per_view // groups * pixels
        self.num_groups, self.channels = views * groups, channels
        self.cols = 64 if channels % 64 == 0 else 32
        self.blocks = channels // self.cols
        sum_tiles = triton.cdiv(self.rows, SUM_ROWS)
        self.per_program = max(1, sum_tiles * self.num_groups * self.blocks // SUM_PROGRAMS)
        self.chunks = triton.cdiv(sum_tiles, self.per_program)
        self.numbers = (groups, per_view, pixels, self.rows, channels, self.num_groups)
        self.sum_grid = (self.num_groups, self.chunks, self.blocks)
        self.apply_grid = (self.num_groups, triton.cdiv(self.rows, ROWS), self.blocks)
        self.sizes = {"ROWS": ROWS, "COLS": self.cols, "num_warps": WARPS}
        self.sum_sizes = {"ROWS": SUM_ROWS, "COLS": self.cols, "STAGES": SUM_STAGES, "num_warps": SUM_WARPS}

    def partial(self, x: Tensor) -> Tensor:
        return x.new_empty((2, self.num_groups, self.chunks, self.channels), dtype=torch.float32)

    def total(self, partial: Tensor, moments: bool) -> Tensor:
        out = partial.new_empty((2, self.num_groups, self.channels))
        bn_total_kernel[(self.num_groups, self.channels // TOTAL_COLS)](
            partial, out, self.chunks, self.rows, self.channels, self.num_groups,
            MOMENTS=moments, CHUNKS=TOTAL_CHUNKS, COLS=TOTAL_COLS,
        )  # fmt: skip
        return out


def supports(dtype: torch.dtype, channels: int) -> bool:
    """Whether there are kernels: for bf16, fp16 and fp32, and channels in multiples of 32."""
    return dtype in (torch.bfloat16, torch.float16, torch.float32) and channels % 32 == 0


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, views: int, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """`batch_norm.batch_norm` on CUDA."""
    layout = _Layout(x, views, groups)
    partial = layout.partial(x)
    bn_sum_kernel[layout.sum_grid](x, partial, layout.per_program, *layout.numbers, **layout.sum_sizes)
    stats, y = layout.total(partial, moments=True), torch.empty_like(x)
    bn_forward_kernel[layout.apply_grid](
        x, x if residual is None else residual, weight, bias, stats, y, eps, *layout.numbers,
        RESIDUAL=residual is not None, RELU=relu, **layout.sizes,
    )  # fmt: skip
    return y, stats


def backward(
    dy: Tensor, x: Tensor, y: Tensor | None, stats: Tensor, weight: Tensor, bias: Tensor,
    views: int, groups: int, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`batch_norm.batch_norm_backward` on CUDA."""
    layout, saved = _Layout(x, views, groups), y is not None
    partial, dx = layout.partial(x), torch.empty_like(x)
    slopes = torch.empty_like(x) if saved else x.new_empty(0)
    bn_sum_slope_kernel[layout.sum_grid](
        dy, x, y if saved else x, weight, bias, stats, partial, slopes, eps, layout.per_program, *layout.numbers,
        SAVED=saved, RELU=relu, **layout.sum_sizes,
    )  # fmt: skip
    sums, d_parameters = layout.total(partial, moments=False), partial.new_empty((2, layout.channels))
    bn_backward_kernel[layout.apply_grid](
        slopes if saved else dy, x, weight, bias, stats, sums, dx, d_parameters, eps, *layout.numbers,
        RELU=relu and not saved, GROUPS=triton.next_power_of_2(layout.num_groups), **layout.sizes,
    )  # fmt: skip
    return dx, slopes, d_parameters


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
