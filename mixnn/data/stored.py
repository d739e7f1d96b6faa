"""Images that are too many for memory: they stay in a file, and batches are read from it.

The file is not memory-mapped: if a mapped file is cut, a process that touches the map is killed (SIGBUS). A read can
fail with a message.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import IO

import numpy as np
import torch
from torch import Tensor

from mixnn.config import UserError, setting

MAX_BUFFERS = 1024  # of one read; Linux accepts no more
BLOCK = 2**26  # bytes copied to a device at a time


class StoredImages:
    """uint8 images [M,3,H,W] in an open file.

    It offers what is needed of a tensor of images: its shape, indexing, and copying it to a device. images[:] reads all
    of them.
    """

    dtype, device, ndim = torch.uint8, torch.device("cpu"), 4

    def __init__(self, file: IO[bytes], offset: int, shape: Sequence[int]) -> None:
        self.file, self.offset, self.shape = file, offset, torch.Size(shape)
        self.nbytes = math.prod(shape)
        self._rows = torch.arange(shape[0])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Tensor | slice | int | Sequence[int]) -> Tensor:
        rows = self._rows[index]
        found = torch.empty((*rows.shape, *self.shape[1:]), dtype=torch.uint8)
        self.read(rows.reshape(-1), found)
        return found

    def to(self, device: torch.device | str) -> Tensor:
        """All images, in the memory of the device."""
        found = torch.empty(self.shape, dtype=torch.uint8, device=device)
        for rows in self._rows.split(max(1, BLOCK // math.prod(self.shape[1:]))):
            found[rows[0] : rows[-1] + 1] = self[rows]
        return found

    def read(self, rows: Tensor, target: Tensor) -> None:
        """Fill the target with the images at these positions. Neighbors in the file are read at once."""
        num_bytes, memory = math.prod(self.shape[1:]), target.view(-1).numpy().data
        order = np.argsort(rows.numpy(), kind="stable")
        sorted_rows, places = rows.numpy()[order], order.tolist()
        starts = np.flatnonzero(np.diff(sorted_rows, prepend=-2) != 1).tolist()
        runs = [
            (int(sorted_rows[first]), places[first : min(first + MAX_BUFFERS, end)])
            for start, end in pairwise([*starts, len(places)])
            for first in range(start, end, MAX_BUFFERS)
        ]
        self._announce([(row * num_bytes, len(run) * num_bytes) for row, run in runs])
        for row, run in runs:
            buffers = [memory[i * num_bytes : (i + 1) * num_bytes] for i in run]
            self._read(buffers, row * num_bytes, len(run) * num_bytes)

    def _announce(self, parts: list[tuple[int, int]]) -> None:
        """Let the system fetch all parts at once. From a disk, random images come two to four times as fast then."""
        if len(parts) > 1 and hasattr(os, "posix_fadvise"):
            for start, num_bytes in parts:
                os.posix_fadvise(self.file.fileno(), self.offset + start, num_bytes, os.POSIX_FADV_WILLNEED)

    def _read(self, buffers: list[memoryview], start: int, num_bytes: int) -> None:
        try:
            if os.preadv(self.file.fileno(), buffers, self.offset + start) == num_bytes:
                return
            reason = "it became shorter"
        except OSError as error:
            reason = error.strerror or str(error)
        raise UserError(
            f"{self.file.name} in the image cache can no longer be read ({reason}): run the command again, or continue "
            f"a training run with {setting('resume')}; the images are decoded again then"
        )
