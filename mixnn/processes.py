"""What torchrun tells a process about its run, through environment variables; does not import torch."""

from __future__ import annotations

import os

from mixnn.config import UserError


def world_size() -> int:
    """Number of processes of this run."""
    text = os.environ.get("WORLD_SIZE") or "1"
    if not text.isdecimal():
        raise UserError(f"WORLD_SIZE={text} is not a number of processes: unset it, or start the run with torchrun")
    return max(1, int(text))


def local_rank() -> int:
    """Number of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK") or 0) if world_size() > 1 else 0


def local_world_size() -> int:
    """Number of this run's processes on this machine."""
    text = os.environ.get("LOCAL_WORLD_SIZE") or ""
    return max(1, int(text)) if text.isdecimal() else world_size()


def is_main_process() -> bool:
    """Whether this is the process that prints and writes files."""
    alone = (os.environ.get("WORLD_SIZE") or "1") in ("0", "1")
    return alone or (os.environ.get("RANK") or "0") == "0"
