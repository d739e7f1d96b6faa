"""Split batch norm, residual and ReLU as CUDA kernels written in Triton: two passes over memory each way.

Each way is: sums over rows (partial, in parallel), their totals (tiny), one pass that applies them. A tensor is seen as
rows of C channels, (image, pixel) in channels_last order; group j's rows are those of images j, j + G, ... of a view.
`batch_norm_plain.py` has the same in plain PyTorch; a test holds the two against each other.
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

# Sizes of tiles (64 channels wide), as measured on an H200: applying wants many numbers a thread, summing few, for it
# holds two sums of each, and loads that run ahead. With one size for both a step took 0.9 ms longer.
ROWS, WARPS = 128, 8
SUM_ROWS, SUM_WARPS, SUM_STAGES = 32, 4, 4
SUM_PROGRAMS = 512  # enough to fill a GPU; more makes more partial sums
TOTAL_CHUNKS, TOTAL_COLS = 128, 16  # partial sums added in one go: one wait for memory, in most layers
# Integers for which no kernel of its own is compiled; `channels` is not here, for its divisibility makes loads wide.
PLAIN = ("tiles", "groups", "per_view", "pixels", "rows", "num_groups", "chunks", "count")


def _kernel(function: Callable[..., None]) -> Any:
    return triton.jit(function, do_not_specialize=[name for name in PLAIN if name in signature(function).parameters])


@triton.jit
def _tile(group, tile, block, groups, per_view, pixels, rows, channels, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Offsets (ROWS, COLS) of a tile of a group's rows, which of them exist, and the channels."""
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
    """The gradient before the ReLU, and the standardized x; without a residual the ReLU's mask is computed anew."""
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
    """Sums of the slope and of slope * x_hat over this program's tiles; the residual's gradient on the way."""
    group, chunk, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel = block * COLS + tl.arange(0, COLS)
    mean, inverse_std = _moments(stats, group, num_groups, channel, channels, eps)
    first = tl.zeros((ROWS, COLS), tl.float32)
    second = tl.zeros((ROWS, COLS), tl.float32)
    for t in tl.range(tiles, num_stages=STAGES):
        at, mask, _ = _tile(group, chunk * tiles + t, block, groups, per_view, pixels, rows, channels, ROWS, COLS)
        slope, x_hat = _slope(dy, x, y, weight, bias, channel, at, mask, mean, inverse_std, SAVED, RELU)
        first += slope
        second += slope * x_hat  # where no row is, the slope is zero
        if SAVED:
            tl.store(slopes + at, slope.to(slopes.dtype.element_ty), mask=mask)
    _store_sums(out, first, second, group, channel, channels, num_groups)


@_kernel
def bn_backward_kernel(
    dy, x, weight, bias, stats, sums, dx, to_both, eps, groups, per_view, pixels, rows, channels, num_groups,
    RELU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """dx = weight / std * (slope - mean(slope) - x_hat * mean(slope * x_hat)).

    The first program of a block of channels adds the groups' sums up as well: the gradients of bias and weight.
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
        tl.store(to_both + channel, tl.sum(tl.load(of_group, mask=exists, other=0.0), 0))
        second = tl.load(of_group + num_groups * channels, mask=exists, other=0.0)
        tl.store(to_both + channels + channel, tl.sum(second, 0))


class _Layout:
    """How (images, channels, ...) falls into groups, tiles and programs."""

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
    """Halves and floats, channels in blocks of 32."""
    return dtype in (torch.bfloat16, torch.float16, torch.float32) and channels % 32 == 0


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, views: int, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """As batch_norm.batch_norm."""
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
    """As batch_norm.batch_norm_backward."""
    layout, saved = _Layout(x, views, groups), y is not None
    partial, dx = layout.partial(x), torch.empty_like(x)
    slopes = torch.empty_like(x) if saved else x.new_empty(0)
    bn_sum_slope_kernel[layout.sum_grid](
        dy, x, y if saved else x, weight, bias, stats, partial, slopes, eps, layout.per_program, *layout.numbers,
        SAVED=saved, RELU=relu, **layout.sum_sizes,
    )  # fmt: skip
    sums, to_both = layout.total(partial, moments=False), partial.new_empty((2, layout.channels))
    bn_backward_kernel[layout.apply_grid](
        slopes if saved else dy, x, weight, bias, stats, sums, dx, to_both, eps, *layout.numbers,
        RELU=relu and not saved, GROUPS=triton.next_power_of_2(layout.num_groups), **layout.sizes,
    )  # fmt: skip
    return dx, slopes, to_both


@_kernel
def bn_track_kernel(stats, share_of, mean, var, share, unbias, channels, num_groups, COLS: tl.constexpr):
    """Running statistics move by `share` toward the weighted mean of the groups' moments."""
    channel = tl.program_id(0) * COLS + tl.arange(0, COLS)
    a = tl.zeros((COLS,), tl.float32)
    b = tl.zeros((COLS,), tl.float32)
    for group in range(num_groups):
        w = tl.load(share_of + group)
        a += w * tl.load(stats + group * channels + channel)
        b += w * tl.load(stats + (num_groups + group) * channels + channel)
    old_mean, old_var = tl.load(mean + channel), tl.load(var + channel)
    tl.store(mean + channel, old_mean + share * (a - old_mean))
    tl.store(var + channel, old_var + share * (b * unbias - old_var))


def track(stats: Tensor, shares: Tensor, mean: Tensor, var: Tensor, share: float, unbias: float) -> None:
    """As batch_norm.track."""
    _, num_groups, channels = stats.shape
    bn_track_kernel[(channels // 32,)](stats, shares, mean, var, share, unbias, channels, num_groups, COLS=32)
