"""Optimizers by name. To add one: a factory and its row in OPTIMIZERS.

A captured step cannot create tensors between replays. So an optimizer keeps its learning rate in a tensor, and its
state exists before the first step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from mixnn.config import Config, unknown

CHECKPOINT_NAMES = {"momentum_buffer": "momentum"}  # state of an optimizer -> its name in a checkpoint, if another


def sgd(parameters: list[Parameter], momentum: float, weight_decay: float) -> torch.optim.SGD:
    """SGD whose learning rate is a tensor (no host read, no recompilation) and whose momentum exists from the start."""
    lr = torch.zeros((), device=parameters[0].device)
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)
    for p in parameters:  # zeros here equal torch's own first step, and can be saved, loaded and captured
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return optimizer


def adamw(parameters: list[Parameter], weight_decay: float) -> torch.optim.AdamW:
    """AdamW with a learning rate in a tensor and moments that exist from the start, as for SGD above."""
    lr = torch.zeros((), device=parameters[0].device)
    on_cuda = parameters[0].is_cuda
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True, capturable=on_cuda)
    for p in parameters:
        optimizer.state[p] = {"step": torch.zeros((), device=p.device)}
        optimizer.state[p] |= {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
    return optimizer


OPTIMIZERS: dict[str, Callable[[list[Parameter], Config], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, config: sgd(parameters, config.sgd_momentum, config.weight_decay),
    "adamw": lambda parameters, config: adamw(parameters, config.weight_decay),
}


def check_optimizer(name: str) -> None:
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of the optimizer's state, by their names in a checkpoint: momentum.0, momentum.1, ..."""
    return {
        f"{CHECKPOINT_NAMES.get(key, key)}.{i}": value
        for i, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    }
