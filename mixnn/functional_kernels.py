"""CUDA kernels written in Triton for the functions of a step that would otherwise take dozens of small launches.

`functional.py` has them in plain PyTorch, and a test compares the two. Matrices are float32, and only the prediction's
gradient is computed.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_DIM = 4096  # of vectors: a program holds a few in registers
PER_PROGRAM = 2048  # numbers that a program makes unit
CHUNK = 64  # support rows whose largest cosine decides whether they are looked at one by one
SEARCH_ROWS = 64  # rows that are compared with a chunk at once
MAX_SEARCH_DIM = 128  # a program of the search keeps a tile of z and one of s, this wide, in shared memory
# Integers whose values compile no kernels of their own.
NOT_SPECIALIZED = ("rows", "num", "stride", "size", "topk")


@triton.jit
def _unit(v):
    return v / tl.maximum(tl.sqrt(tl.sum(v * v, 0)), 1e-12)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def unit_kernel(v, out, rows, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows of v divided by their lengths."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    at = row.to(tl.int64)[:, None] * DIM + column[None, :]
    exists = (row < rows)[:, None] & (column < DIM)[None, :]
    x = tl.load(v + at, mask=exists, other=0.0)
    length = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12)
    tl.store(out + at, x / length[:, None], mask=exists)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def targets_kernel(
    neighbors, z, lam, value, out, num, stride, MIXER: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Target 0 of this program's row is unit z, the others are mixed. lam is a number per row, or else `value`."""
    row, target = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLS)
    exists = column < DIM
    mixed = tl.load(z + row * DIM + column, mask=exists, other=0.0)
    if target == 0:
        mixed = _unit(mixed)
    else:
        neighbor = tl.load(neighbors + (row * (num - 1) + target - 1) * DIM + column, mask=exists, other=0.0)
        share = value if lam is None else tl.load(lam + row * stride)
        if MIXER == "none":
            mixed = _unit(neighbor)
        elif MIXER == "raw_renorm":
            mixed = _unit(share * neighbor + (1 - share) * mixed)
        else:
            mixed = share * _unit(neighbor) + (1 - share) * _unit(mixed)
            if MIXER == "unit_renorm":
                mixed = _unit(mixed)
    tl.store(out + (row * num + target) * DIM + column, mixed, mask=exists)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def squared_error_kernel(p, targets, w, losses, slopes, num, stride, DIM: tl.constexpr, COLS: tl.constexpr):
    """Weighted squared error of this program's row, and the gradient of the mean over all rows.

    With u = p / |p| and m = sum_i w_i target_i, the error is 2 sum_i w_i - 2 <u, m>. Its gradient points away from the
    part of m that is orthogonal to u: -2 (m - <u, m> u) / |p|.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLS)
    exists = column < DIM
    v = tl.load(p + row * DIM + column, mask=exists, other=0.0)
    mean = tl.zeros((COLS,), tl.float32)
    total = 0.0
    for i in range(num):
        weight = tl.load(w + row * stride + i)
        mean += weight * tl.load(targets + (row * num + i) * DIM + column, mask=exists, other=0.0)
        total += weight
    length = tl.maximum(tl.sqrt(tl.sum(v * v, 0)), 1e-12)
    u = v / length
    along = tl.sum(u * mean, 0)
    tl.store(losses + row, 2 * (total - along))
    slope = (mean - along * u) * (-2 / (length * tl.num_programs(0)))
    tl.store(slopes + row * DIM + column, slope, mask=exists)


@triton.jit
def _chunk(s, first, size, DIM: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr):
    """The unit support rows of a chunk, and which of them exist."""
    row, column = first + tl.arange(0, CHUNK), tl.arange(0, COLS)
    exists = row < size
    at = row.to(tl.int64)[:, None] * DIM + column[None, :]
    v = tl.load(s + at, mask=exists[:, None] & (column < DIM)[None, :], other=0.0)
    return v / tl.maximum(tl.sqrt(tl.sum(v * v, 1)), 1e-12)[:, None], exists


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def chunk_maxima_kernel(
    z, s, maxima, rows, size, DIM: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    """Largest cosine of each of ROWS unit z with the support rows of this program's chunk."""
    chunk, row, column = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    unit_s, exists = _chunk(s, chunk * CHUNK, size, DIM, COLS, CHUNK)
    inside = (row < rows)[:, None] & (column < DIM)[None, :]
    unit_z = tl.load(z + row.to(tl.int64)[:, None] * DIM + column[None, :], mask=inside, other=0.0)
    cosines = tl.dot(unit_z, tl.trans(unit_s), input_precision="tf32x3")  # as exact as float32, to a few roundings
    cosines = tl.where(exists[None, :], cosines, -2.0)  # less than any cosine
    at = maxima + row.to(tl.int64) * tl.num_programs(0) + chunk
    tl.store(at, tl.max(cosines, 1), mask=row < rows)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def candidates_kernel(
    z, s, chunks, cosines, places, size, topk, DIM: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr
):
    """Cosines of this program's unit z with the support rows of one of its chunks, and their places."""
    row, k, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, COLS)
    first = tl.load(chunks + row * topk + k).to(tl.int32) * CHUNK
    unit_s, exists = _chunk(s, first, size, DIM, COLS, CHUNK)
    unit_z = tl.load(z + row * DIM + column, mask=column < DIM, other=0.0)
    found = tl.where(exists, tl.sum(unit_s * unit_z[None, :], 1), -2.0)
    at = (row * topk + k) * CHUNK + tl.arange(0, CHUNK)
    tl.store(cosines + at, found)
    tl.store(places + at, (first + tl.arange(0, CHUNK)).to(tl.int64))


def supports(tensor: Tensor) -> bool:
    """Whether there are kernels for it: float32, at least one dimension, not empty, rows of at most MAX_DIM."""
    return (
        tensor.dtype == torch.float32
        and tensor.dim() > 0
        and 0 < tensor.numel() < 2**31
        and tensor.shape[-1] <= MAX_DIM
    )


def unit(v_D: Tensor) -> Tensor:
    """`functional.unit` on CUDA, without gradient."""
    v_D = v_D.contiguous()
    dim = v_D.shape[-1]
    out, rows, columns = torch.empty_like(v_D), v_D.numel() // dim, triton.next_power_of_2(dim)
    size = max(1, PER_PROGRAM // columns)
    with torch.cuda.device_of(v_D):
        unit_kernel[(triton.cdiv(rows, size),)](v_D, out, rows, DIM=dim, ROWS=size, COLS=columns, num_warps=4)
    return out


def can_search(z_BD: Tensor, s_QD: Tensor, topk: int) -> bool:
    """Whether there are kernels for these shapes, and many more chunks than neighbors to find, so that they pay."""
    fits = z_BD.dim() == 2 and z_BD.shape[1] == s_QD.shape[1] <= MAX_SEARCH_DIM
    return fits and 0 < 8 * topk * CHUNK <= len(s_QD)


def nearest_rows(z_BD: Tensor, s_QD: Tensor, topk: int) -> Tensor:
    """`functional.nearest_rows` on CUDA, of what `can_search` allows.

    The K nearest rows are in the K chunks whose largest cosines are largest. So the maxima of all chunks are computed,
    and then all cosines of these K. The cosines with all support rows are never written to memory.
    """
    z_BD, s_QD = unit(z_BD), s_QD.contiguous()
    (batch, dim), size = z_BD.shape, len(s_QD)
    columns, num = max(16, triton.next_power_of_2(dim)), triton.cdiv(size, CHUNK)
    maxima_BN = z_BD.new_empty(batch, num)
    cosines_BM = z_BD.new_empty(batch, topk * CHUNK)
    places_BM = torch.empty(cosines_BM.shape, dtype=torch.long, device=z_BD.device)
    with torch.cuda.device_of(z_BD):
        chunk_maxima_kernel[(num, triton.cdiv(batch, SEARCH_ROWS))](
            z_BD, s_QD, maxima_BN, batch, size, DIM=dim, COLS=columns, ROWS=SEARCH_ROWS, CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
        chunks_BK = maxima_BN.topk(topk, dim=1, sorted=False).indices
        candidates_kernel[(batch, topk)](
            z_BD, s_QD, chunks_BK, cosines_BM, places_BM, size, topk, DIM=dim, COLS=columns, CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
    return places_BM.gather(1, cosines_BM.topk(topk, dim=1).indices)


def can_mix(neighbors_BKD: Tensor, z_BD: Tensor, lam: Tensor | float) -> bool:
    """Whether there is a kernel for these shapes: lam is a number, (1, 1, 1) or (B, 1, 1)."""
    lams = ((1, 1, 1), (len(z_BD), 1, 1))
    return z_BD.shape == neighbors_BKD.shape[::2] and (not isinstance(lam, Tensor) or tuple(lam.shape) in lams)


def mixed_targets(neighbors_BKD: Tensor, z_BD: Tensor, lam: Tensor | float, mixer: str) -> Tensor:
    """`functional.mixed_targets` on CUDA, without gradient, of what `can_mix` allows."""
    batch, topk, dim = neighbors_BKD.shape
    out = z_BD.new_empty(batch, topk + 1, dim)
    draws, value = (lam.contiguous(), 0.0) if isinstance(lam, Tensor) else (None, 1.0 * lam)
    stride = 0 if draws is None or len(draws) == 1 else 1
    with torch.cuda.device_of(z_BD):
        targets_kernel[(batch, topk + 1)](
            neighbors_BKD.contiguous(), z_BD.contiguous(), draws, value, out, topk + 1, stride,
            MIXER=mixer, DIM=dim, COLS=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return out


class WeightedSquaredError(torch.autograd.Function):
    """`functional.weighted_squared_error` on CUDA, with the gradient of p_BD alone, and no second derivative."""

    @staticmethod
    def forward(ctx: Any, p_BD: Tensor, targets_BND: Tensor, w_BN: Tensor) -> Tensor:
        (batch, dim), num, w_BN = p_BD.shape, targets_BND.shape[1], w_BN.contiguous()
        losses, slopes = p_BD.new_empty(batch), torch.empty_like(p_BD, memory_format=torch.contiguous_format)
        with torch.cuda.device_of(p_BD):
            squared_error_kernel[(batch,)](
                p_BD.contiguous(), targets_BND.contiguous(), w_BN, losses, slopes, num, num if w_BN.dim() > 1 else 0,
                DIM=dim, COLS=triton.next_power_of_2(dim), num_warps=1,
            )  # fmt: skip
        ctx.save_for_backward(slopes)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return grad * slopes, None, None
