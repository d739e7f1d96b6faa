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
# Integers whose values compile no kernels of their own.
NOT_SPECIALIZED = ("rows", "num", "stride")


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
