"""Which device a run uses."""

from __future__ import annotations

import torch

from mixnn.config import UserError


def pick_device(name: str) -> torch.device:
    """auto: CUDA where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}; valid: auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported; valid: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices; type --device cpu"
        )
    if device.type == "cuda":  # streams and graphs belong to the current device
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device
