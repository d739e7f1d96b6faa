"""Networks in bf16 with fp32 weights: autocast, but with all weights cast in one launch.

Autocast casts weights one by one, and their gradients back one by one: some 75 small launches per step. On several
processes there are a few launches instead of one, each with a part of the gradients. Autograd runs them last, so
gradients are sent after the backward pass.

A network that was not given a type runs under the caller's autocast, if there is one.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mixnn.device import side_stream, wait_side_stream
from mixnn.dist import split_by_bytes


def run_parts(
    parts: list[nn.Module], x: Tensor, dtype: torch.dtype | None, chunk_bytes: int = sys.maxsize
) -> list[Tensor]:
    """Outputs of all parts, each applied to the output of the one before.

    They are computed in the type given, fp32 or bf16, or with None as the caller's autocast says. Weights are cast in
    chunks of at most chunk_bytes.
    """
    outputs, bf16 = [], dtype == torch.bfloat16
    together = bf16 and not torch.compiler.is_compiling()  # a compiler fuses the casts itself
    weights = _cast_weights(parts, torch.bfloat16, chunk_bytes) if together else [{} for _ in parts]
    with nullcontext() if dtype is None else torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        for part, cast in zip(parts, weights, strict=True):
            x = functional_call(part, cast, (x,)) if cast else part(x)
            outputs.append(x)
    return outputs


def _cast_weights(parts: list[nn.Module], dtype: torch.dtype, chunk_bytes: int) -> list[dict[str, Tensor]]:
    """The parameters that autocast would cast, in this type, by name."""
    originals = [
        {
            f"{path}.{name}".lstrip("."): parameter
            for path, layer in part.named_modules()
            if isinstance(layer, nn.Conv2d | nn.Linear)
            for name, parameter in layer.named_parameters()
        }
        for part in parts
    ]
    chunks = split_by_bytes((p for of_part in originals for p in of_part.values()), chunk_bytes)
    cast = (tensor for chunk in chunks for tensor in CastAll.apply(dtype, *chunk))
    return [{name: next(cast) for name in of_part} for of_part in originals]


class CastAll(torch.autograd.Function):
    """Cast tensors to another type, and their gradients back, each way in one launch."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        return _cast(tensors, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wait_side_stream(gradients[0].device)  # convolutions compute their gradients there
        return None, *_cast(gradients, ctx.dtype)


def is_cast(weight: Tensor) -> bool:
    """Whether its gradient goes through CastAll, which waits for the side stream."""
    return isinstance(weight.grad_fn, CastAll._backward_cls)


class WeightStream:
    """Context that computes the gradient of a cast weight on the side stream, because only the optimizer needs it.

    A layer makes one in each forward pass. If a network uses a layer twice, autograd adds the gradients at once, so
    they are computed as usual.
    """

    def __init__(self, weight: Tensor) -> None:
        self.uses = weight.__dict__.setdefault("uses", [0])  # of this weight, in this pass; shared by all of them
        self.uses[0] += 1

    def __call__(self, device: torch.device, *tensors: Tensor) -> AbstractContextManager[None]:
        """A context for the computation, which reads these tensors."""
        if self.uses[0] > 1 or torch.is_anomaly_enabled():
            return nullcontext()
        return side_stream(device, *tensors)


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    out = [torch.empty_like(t, dtype=dtype) for t in tensors]
    torch._foreach_copy_(out, list(tensors))
    return tuple(out)
