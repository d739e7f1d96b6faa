"""3x3 convolutions of 64 channels as CUDA kernels for Hopper GPUs, written in Gluon, Triton's lower level.

cuDNN multiplies a matrix that has every pixel nine times, and reads it from the L2 cache. With 64 channels, that takes
longer than the products. Here a program keeps the weights in shared memory and goes through its images row by row, so
it reads every pixel three times: once for each column of the filter. A row of inputs adds to three rows of outputs,
which stay in registers until they are complete.

One warp loads rows. Groups of four warps, called teams, multiply them; a team has its own images or its own row of the
filter. While one team stores its results, the tensor cores work for the others.

Numbers are added up in float32, in a fixed order, so results are the same bits every time.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: RUF005 (Gluon does not know stars in lists)
from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

VERSIONS = "3.6", "3.7"  # versions of Triton that compile these kernels; Gluon is not stable yet
CHANNELS = gl.constexpr(64)
TILE = gl.constexpr(64)  # pixels that a team multiplies at once: a row of one image, or of two that are half as wide
SLOTS = gl.constexpr(8)  # tiles that are loaded ahead for each team
ROWS_AHEAD = gl.constexpr(3)  # rows of x that are loaded ahead for the gradient of the weights
DY_ROWS_AHEAD = gl.constexpr(4)  # rows of dy, likewise
TEAM_REGISTERS, W_TEAM_REGISTERS, LOADER_REGISTERS = (gl.constexpr(num) for num in (232, 160, 24))
SUM_ROWS, SUM_COLS = 16, 128  # tile of the kernel that adds up the weights' gradients
MAX_PROGRAMS = 50_000  # with more, offsets would not fit into 32 bits
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
FACTOR = gl.constexpr(gl.DotOperandLayout(0, PRODUCT.value, 2))


# Forward; the gradient of x is the convolution of dy with flipped weights


@gluon.jit
def _load_tiles(x, weight, shared, start, HEIGHT: gl.constexpr, FLIP: gl.constexpr):
    """Load the weights, then the rows of each team's images, once for each column of the filter."""
    tiles, full, empty, weights, weights_full, _ = shared
    mbarrier.expect(weights_full, 9 * weight.block_type.nbytes)
    for tap in gl.static_range(9):
        from_column = (8 - tap if FLIP else tap) * CHANNELS
        tma.async_copy_global_to_shared(weight, [0, from_column], weights_full, weights.index(tap))
    number = 0
    for row in range((HEIGHT + 3) // 3 * 3):
        for column in gl.static_range(3):
            for team in gl.static_range(2):
                slot = team * SLOTS + number % SLOTS
                mbarrier.wait(empty.index(slot), ((number // SLOTS) & 1) ^ 1)
                mbarrier.expect(full.index(slot), x.block_type.nbytes)
                at = [start[2 * team], start[2 * team + 1], row, column - 1, 0]
                tma.async_copy_global_to_shared(x, at, full.index(slot), tiles.index(slot))
            number += 1


@gluon.jit
def _take_tile(tiles, full, empty, team: gl.constexpr, number):
    """The next tile of a team, moved to registers. Its slot can then be filled again."""
    slot = team * SLOTS + number % SLOTS
    mbarrier.wait(full.index(slot), (number // SLOTS) & 1)
    x = tiles.index(slot).reshape([TILE, CHANNELS]).load(FACTOR)
    mbarrier.arrive(empty.index(slot), count=1)
    return x


@gluon.jit
def _add_product(total, x, weights, tap: gl.constexpr, FLIP: gl.constexpr, FIRST: gl.constexpr = False):
    """Begin total + x * weights, or x * weights if it is the first."""
    w = weights.index(tap)
    if not FLIP:
        w = w.permute((1, 0))
    return warpgroup_mma(x, w, total, use_acc=not FIRST, is_async=True)


@gluon.jit
def _multiply_row(above, here, below, tiles, weights, full, empty, team: gl.constexpr, row, FLIP: gl.constexpr):
    """Add what a row of inputs contributes to three rows of outputs; the row below starts at zero."""
    x0 = _take_tile(tiles, full, empty, team, row * 3)
    x1 = _take_tile(tiles, full, empty, team, row * 3 + 1)
    x2 = _take_tile(tiles, full, empty, team, row * 3 + 2)
    above = _add_product(above, x0, weights, 6, FLIP)
    here = _add_product(here, x0, weights, 3, FLIP)
    below = _add_product(below, x0, weights, 0, FLIP, FIRST=True)
    above = _add_product(above, x1, weights, 7, FLIP)
    here = _add_product(here, x1, weights, 4, FLIP)
    below = _add_product(below, x1, weights, 1, FLIP)
    above = _add_product(above, x2, weights, 8, FLIP)
    here = _add_product(here, x2, weights, 5, FLIP)
    below = _add_product(below, x2, weights, 2, FLIP)
    above, here, below = warpgroup_mma_wait(0, deps=[above, here, below])
    return above, here, below


@gluon.jit
def _store_row(total, sums, squares, y, out, image, group, row, HEIGHT: gl.constexpr, SUMS: gl.constexpr):
    """Store a complete row of outputs, if it is one of the image's, and add it to the sums."""
    numbers = total.to(gl.bfloat16)
    if (row >= 0) & (row < HEIGHT):
        tma.store_wait(0)
        out.reshape([TILE, CHANNELS]).store(numbers)
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [image, group, row, 0, 0], out)
        if SUMS:
            values = numbers.to(gl.float32).reshape([TILE // 16, 2, 8, CHANNELS])
            sums += gl.sum(values, 1)
            squares += gl.sum(values * values, 1)
    return sums, squares


@gluon.jit
def _multiply_tiles(
    y, partial, shared, start, team: gl.constexpr,
    HEIGHT: gl.constexpr, FLIP: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """All rows of a team's images. Three rows of outputs take turns in three sets of registers."""
    tiles, full, empty, weights, weights_full, outs = shared
    image, group, out = start[2 * team], start[2 * team + 1], outs.index(team)
    a = gl.zeros([TILE, CHANNELS], gl.float32, PRODUCT)
    b = gl.zeros([TILE, CHANNELS], gl.float32, PRODUCT)
    c = gl.zeros([TILE, CHANNELS], gl.float32, PRODUCT)
    sums = gl.sum(a.reshape([TILE // 16, 2, 8, CHANNELS]), 1)
    squares = sums
    mbarrier.wait(weights_full, 0)
    for row in range(0, HEIGHT + 1, 3):
        a, b, c = _multiply_row(a, b, c, tiles, weights, full, empty, team, row, FLIP)
        sums, squares = _store_row(a, sums, squares, y, out, image, group, row - 1, HEIGHT, SUMS)
        b, c, a = _multiply_row(b, c, a, tiles, weights, full, empty, team, row + 1, FLIP)
        sums, squares = _store_row(b, sums, squares, y, out, image, group, row, HEIGHT, SUMS)
        c, a, b = _multiply_row(c, a, b, tiles, weights, full, empty, team, row + 2, FLIP)
        sums, squares = _store_row(c, sums, squares, y, out, image, group, row + 1, HEIGHT, SUMS)
    tma.store_wait(0)
    if SUMS:
        sums = gl.sum(gl.sum(sums, 1), 0)
        squares = gl.sum(gl.sum(squares, 1), 0)
        tile = gl.program_id(0) * 2 + team
        at = partial + tile * CHANNELS + gl.arange(0, CHANNELS, layout=sums.type.layout)
        gl.store(at, sums)
        gl.store(at + 2 * gl.num_programs(0) * CHANNELS, squares)


@gluon.jit(do_not_specialize=["groups"])
def conv_kernel(
    x, weight, y, partial, groups,
    HEIGHT: gl.constexpr, FLIP: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """The convolution of the images of two tiles, and the sums of its outputs and of their squares per tile.

    Tile i has images of group i % groups.
    """
    IMAGES: gl.constexpr = x.block_type.shape[0]
    weights = gl.allocate_shared_memory(gl.bfloat16, [9, CHANNELS, CHANNELS], weight.layout)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * SLOTS] + x.block_type.shape, x.layout)
    outs = gl.allocate_shared_memory(gl.bfloat16, [2] + y.block_type.shape, y.layout)
    full = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    weights_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(weights_full, count=1)
    fence_async_shared()
    tile = gl.program_id(0) * 2
    start = (tile // groups * IMAGES, tile % groups, (tile + 1) // groups * IMAGES, (tile + 1) % groups)
    shared = (tiles, full, empty, weights, weights_full, outs)
    gl.warp_specialize(
        [
            (_multiply_tiles, (y, partial, shared, start, 0, HEIGHT, FLIP, SUMS)),
            (_multiply_tiles, (y, partial, shared, start, 1, HEIGHT, FLIP, SUMS)),
            (_load_tiles, (x, weight, shared, start, HEIGHT, FLIP)),
        ],
        [4, 1],
        [TEAM_REGISTERS, LOADER_REGISTERS],
    )


# The gradient of the weights


@gluon.jit
def _load_rows(x, dy, shared, image, HEIGHT: gl.constexpr):
    """Load rows of x, once for each column of the filter, and of dy."""
    x_rows, x_full, x_empty, dy_rows, dy_full, dy_empty = shared
    for row in range(HEIGHT):
        slot = row % ROWS_AHEAD
        mbarrier.wait(x_empty.index(slot), ((row // ROWS_AHEAD) & 1) ^ 1)
        mbarrier.expect(x_full.index(slot), 3 * x.block_type.nbytes)
        for column in gl.static_range(3):
            at = [image, row, column - 1, 0]
            tma.async_copy_global_to_shared(x, at, x_full.index(slot), x_rows.index(slot * 3 + column))
        slot = row % DY_ROWS_AHEAD
        mbarrier.wait(dy_empty.index(slot), ((row // DY_ROWS_AHEAD) & 1) ^ 1)
        mbarrier.expect(dy_full.index(slot), dy.block_type.nbytes)
        tma.async_copy_global_to_shared(dy, [image, row, 0, 0], dy_full.index(slot), dy_rows.index(slot))


@gluon.jit
def _multiply_rows(partial, shared, team: gl.constexpr, HEIGHT: gl.constexpr):
    """The gradient of row `team` of the filter, which multiplies row r of dy with row r - 1 + team of x."""
    x_rows, x_full, x_empty, dy_rows, dy_full, dy_empty = shared
    PIXELS: gl.constexpr = 2 * TILE
    left = gl.zeros([CHANNELS, CHANNELS], gl.float32, PRODUCT)
    middle = gl.zeros([CHANNELS, CHANNELS], gl.float32, PRODUCT)
    right = gl.zeros([CHANNELS, CHANNELS], gl.float32, PRODUCT)
    if team == 0:  # row 0 of dy would need the row above the image
        mbarrier.wait(dy_full.index(0), 0)
        mbarrier.arrive(dy_empty.index(0), count=1)
    if team == 2:
        mbarrier.arrive(x_empty.index(0), count=1)
    for row in range(1 if team == 0 else 0, HEIGHT - 1 if team == 2 else HEIGHT):
        slot = row % DY_ROWS_AHEAD
        mbarrier.wait(dy_full.index(slot), (row // DY_ROWS_AHEAD) & 1)
        dy = dy_rows.index(slot).reshape([PIXELS, CHANNELS]).permute((1, 0)).load(FACTOR)
        mbarrier.arrive(dy_empty.index(slot), count=1)
        x_row = row - 1 + team
        slot = x_row % ROWS_AHEAD
        mbarrier.wait(x_full.index(slot), (x_row // ROWS_AHEAD) & 1)
        left = warpgroup_mma(dy, x_rows.index(slot * 3).reshape([PIXELS, CHANNELS]), left, is_async=True)
        middle = warpgroup_mma(dy, x_rows.index(slot * 3 + 1).reshape([PIXELS, CHANNELS]), middle, is_async=True)
        right = warpgroup_mma(dy, x_rows.index(slot * 3 + 2).reshape([PIXELS, CHANNELS]), right, is_async=True)
        left, middle, right = warpgroup_mma_wait(0, deps=[left, middle, right])
        mbarrier.arrive(x_empty.index(slot), count=1)
    out_channel = gl.arange(0, CHANNELS, layout=gl.SliceLayout(1, PRODUCT))[:, None]
    in_channel = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, PRODUCT))[None, :]
    at = partial + ((gl.program_id(0) * CHANNELS + out_channel) * 9 + team * 3) * CHANNELS + in_channel
    gl.store(at, left)
    gl.store(at + CHANNELS, middle)
    gl.store(at + 2 * CHANNELS, right)


@gluon.jit
def conv_weight_kernel(x, dy, partial, HEIGHT: gl.constexpr):
    """The part of the weights' gradient that comes from some images."""
    x_rows = gl.allocate_shared_memory(gl.bfloat16, [3 * ROWS_AHEAD] + x.block_type.shape, x.layout)
    dy_rows = gl.allocate_shared_memory(gl.bfloat16, [DY_ROWS_AHEAD] + dy.block_type.shape, dy.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [ROWS_AHEAD, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [ROWS_AHEAD, 1], mbarrier.MBarrierLayout())
    dy_full = gl.allocate_shared_memory(gl.int64, [DY_ROWS_AHEAD, 1], mbarrier.MBarrierLayout())
    dy_empty = gl.allocate_shared_memory(gl.int64, [DY_ROWS_AHEAD, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ROWS_AHEAD):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=3)  # by each team
    for i in gl.static_range(DY_ROWS_AHEAD):
        mbarrier.init(dy_full.index(i), count=1)
        mbarrier.init(dy_empty.index(i), count=3)
    fence_async_shared()
    shared = (x_rows, x_full, x_empty, dy_rows, dy_full, dy_empty)
    gl.warp_specialize(
        [
            (_multiply_rows, (partial, shared, 0, HEIGHT)),
            (_multiply_rows, (partial, shared, 1, HEIGHT)),
            (_multiply_rows, (partial, shared, 2, HEIGHT)),
            (_load_rows, (x, dy, shared, gl.program_id(0) * x.block_type.shape[0], HEIGHT)),
        ],
        [4, 4, 1],
        [W_TEAM_REGISTERS, W_TEAM_REGISTERS, LOADER_REGISTERS],
    )


@triton.jit
def add_kernel(partial, total, num, size, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The sum of the rows of a (num, size) matrix."""
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    sums = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, num, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        sums += tl.load(partial + row * size + column[None, :], mask=row < num, other=0.0)
    tl.store(total + column, tl.sum(sums, 0).to(total.dtype.element_ty))


# Launches


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether there is a kernel for this convolution, with stride 1 and padding 1, and it fills the GPU well."""
    images, channels, _, width = x.shape
    if (channels, *weight.shape) != (CHANNELS.value, CHANNELS.value, CHANNELS.value, 3, 3):
        return False
    if not x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return False
    if not triton.__version__.startswith(VERSIONS) or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    if torch.cuda.get_device_capability(x.device) != (9, 0):
        return False
    if not 0.7 * _tile_width(width) < width <= TILE.value or images % (2 * _tile_images(x)):
        return False
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = images // (2 * _tile_images(x))
    return 0.8 * processors * triton.cdiv(programs, processors) < programs < MAX_PROGRAMS


def forward(x: Tensor, weight: Tensor, bn_groups: int = 0) -> tuple[Tensor, Tensor | None]:
    """The convolution of x, and sums for a batch norm (`Convolution`) if tiles are as wide as images."""
    complete = x.shape[3] == _tile_width(x.shape[3]) and len(x) % (max(1, bn_groups) * _tile_images(x)) == 0
    return _convolve(x, weight, bn_groups if complete else 0, flip=False)


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x."""
    return _convolve(dy, weight, 0, flip=True)[0]


def _convolve(x: Tensor, weight: Tensor, groups: int, flip: bool) -> tuple[Tensor, Tensor | None]:
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    y, programs = torch.empty_like(x), len(x) // _tile_images(x) // 2
    box = [_tile_images(x), 1, 1, _tile_width(x.shape[3]), CHANNELS.value]
    by_group = [_descriptor(t.permute(0, 2, 3, 1).unflatten(0, (-1, max(1, groups))), box) for t in (x, y)]
    weights = _descriptor(weight.permute(0, 2, 3, 1).flatten(1), [CHANNELS.value, CHANNELS.value])
    sums = torch.empty((2, 2 * programs, CHANNELS.value) if groups else 0, device=x.device)
    with torch.cuda.device_of(x):
        conv_kernel[(programs,)](
            by_group[0], weights, by_group[1], sums, max(1, groups),
            HEIGHT=x.shape[2], FLIP=flip, SUMS=groups > 0, num_warps=4,
        )  # fmt: skip
    return y, sums if groups else None


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weights, in their type."""
    x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    box = [2 * _tile_images(x), 1, _tile_width(x.shape[3]), CHANNELS.value]
    programs = len(x) // box[0]
    partial = torch.empty((programs, weight.numel()), device=x.device)
    total = torch.empty_like(weight, memory_format=torch.channels_last)
    with torch.cuda.device_of(x):
        conv_weight_kernel[(programs,)](
            *(_descriptor(t.permute(0, 2, 3, 1), box) for t in (x, dy)), partial, HEIGHT=x.shape[2], num_warps=4
        )
        add_kernel[(weight.numel() // SUM_COLS,)](
            partial, total, programs, weight.numel(), ROWS=SUM_ROWS, COLS=SUM_COLS, num_warps=4
        )
    return total


def _tile_width(width: int) -> int:
    return max(32, triton.next_power_of_2(width))


def _tile_images(x: Tensor) -> int:
    return TILE.value // _tile_width(x.shape[3])


def _descriptor(tensor: Tensor, box: list[int]) -> Any:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(box))
    return TensorDescriptor.from_tensor(tensor, box, layout)
