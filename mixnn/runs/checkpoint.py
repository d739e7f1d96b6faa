"""Checkpoints: one safetensors file each, with a JSON state in its header. Nothing is ever unpickled.

A file is written under a temporary name, synced and renamed, so a killed process leaves the old files intact. A
checksum over tensors and state detects damaged files. The last two checkpoints are kept.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from mixnn.files import write_atomically

KEEP = 2


class Damaged(Exception):
    """A checkpoint that cannot be trusted; the text says why."""


def _checksum(tensors: dict[str, Tensor], state: str) -> int:
    crc = zlib.crc32(state.encode())
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), crc))
    return crc


def name_of(step: int) -> str:
    return f"step-{step:08d}.safetensors"


def save(folder: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
    """Write the checkpoint of a step and remove all but the last two."""
    on_host = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    text = json.dumps(state)
    metadata = {"state": text, "crc32": str(_checksum(on_host, text))}
    path = folder / name_of(step)
    write_atomically(path, serialize(on_host, metadata))
    left_over = folder.glob(".step-*.tmp")  # by a process that was killed while it wrote
    later = [
        old for old in list_checkpoints(folder) if old.name > path.name
    ]  # damaged: this run had to start before them
    earlier = [old for old in list_checkpoints(folder) if old.name <= path.name]
    for old in [*later, *earlier[KEEP:], *left_over]:
        old.unlink()
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (on the CPU) and state of one checkpoint; Damaged if the file is not what was written."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state = json.loads(metadata["state"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise Damaged(f"{path} is damaged ({error})") from None
    if str(_checksum(tensors, metadata["state"])) != metadata.get("crc32"):
        raise Damaged(f"{path} is damaged (its checksum does not match)")
    return tensors, state
