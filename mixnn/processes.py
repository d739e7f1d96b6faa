"""What torchrun tells a process about its run, through environment variables; does not import torch."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mixnn.config import UserError, parse_duration

JOIN_TIMEOUT = "5m"  # processes join before they read images, so this is plenty
PEER_TIMEOUT = "60s"  # a process sends a heartbeat every second, from a thread of its own


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


class Rendezvous(NamedTuple):
    """Where the processes of a run find each other. Process 0 serves it, unless torchrun does."""

    rank: int  # of this process
    host: str
    port: int
    is_served: bool  # by torchrun
    attempt: str  # torchrun may start a run again, with the same server


def read_rendezvous() -> Rendezvous:
    """Read the rendezvous from the environment; ValueError if something is missing."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(f"{name} is not set")
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Rendezvous(rank, os.environ["MASTER_ADDR"], port, is_served, attempt)


def join_limit() -> float:
    """Seconds that a process waits for the others: $MIXNN_JOIN_TIMEOUT, or five minutes."""
    return _seconds("MIXNN_JOIN_TIMEOUT", JOIN_TIMEOUT)


def peer_limit() -> float:
    """Seconds without a heartbeat after which a process counts as dead: $MIXNN_PEER_TIMEOUT, or a minute."""
    return _seconds("MIXNN_PEER_TIMEOUT", PEER_TIMEOUT)


def _seconds(name: str, default: str) -> float:
    text = os.environ.get(name) or default
    try:
        return parse_duration(text)
    except UserError:
        raise UserError(f"{name}={text} is not a duration: write it as 90s, 6m or 1h30m") from None


def is_restart() -> bool:
    """Whether torchrun or Slurm has started this command before, as the same job."""
    return any((os.environ.get(name) or "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def write_reason(reason: str) -> None:
    """Tell torchrun why this process ends: the report that it prints then begins with the first such reason."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    message = {"message": reason, "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}))


def is_main_process() -> bool:
    """Whether this is the process that prints and writes files."""
    alone = (os.environ.get("WORLD_SIZE") or "1") in ("0", "1")
    return alone or (os.environ.get("RANK") or "0") == "0"
