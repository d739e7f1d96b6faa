"""What torchrun tells a process about its run, through environment variables; does not import torch."""

from __future__ import annotations

import os
from typing import NamedTuple

from mixnn.config import UserError, parse_duration

JOIN_TIMEOUT = "5m"  # processes join before they read images, so this is plenty


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


class MeetingPoint(NamedTuple):
    """Where the processes of a run find each other. Process 0 serves it, unless torchrun does."""

    rank: int  # of this process
    host: str
    port: int
    is_served: bool  # by torchrun
    attempt: str  # torchrun may start a run again, with the same server


def meeting_point() -> MeetingPoint:
    """What this process was told about it; ValueError if something is missing."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(f"{name} is not set")
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return MeetingPoint(rank, os.environ["MASTER_ADDR"], port, is_served, attempt)


def join_limit() -> float:
    """Seconds that a process waits for the others: $MIXNN_JOIN_TIMEOUT, or five minutes."""
    text = os.environ.get("MIXNN_JOIN_TIMEOUT") or JOIN_TIMEOUT
    try:
        return parse_duration(text)
    except UserError:
        raise UserError(f"MIXNN_JOIN_TIMEOUT={text} is not a duration: write it as 90s, 6m or 1h30m") from None


def is_main_process() -> bool:
    """Whether this is the process that prints and writes files."""
    alone = (os.environ.get("WORLD_SIZE") or "1") in ("0", "1")
    return alone or (os.environ.get("RANK") or "0") == "0"
