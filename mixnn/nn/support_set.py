"""The support set S: a first-in-first-out ring buffer of teacher embeddings, from which neighbors are taken.

Rows are stored raw and normalized where they are used. Everything is a saved buffer, the position too, so checkpoints
include S and no step reads a number back to the host. Rows never written are random unit vectors with label -1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SupportRows(NamedTuple):
    """Rows of a support set: its contents, or what is pushed."""

    z_QD: Tensor
    labels_Q: Tensor
    index_Q: Tensor  # which image of the data set a row came from; -1: never written


class SupportSet(nn.Module):
    """Ring buffer of Q rows. `read` and `preview_push` write nothing; `push` is the only writer.

    >>> support_set = mixnn.nn.SupportSet(size=64, dim=16)
    >>> support_set.z_QD.shape
    torch.Size([64, 16])
    """

    z_QD: Tensor
    labels_Q: Tensor
    index_Q: Tensor
    position: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("z_QD", F.normalize(torch.randn(size, dim), dim=1))
        self.register_buffer("labels_Q", torch.full((size,), -1))
        self.register_buffer("index_Q", torch.full((size,), -1))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))

    def read(self) -> SupportRows:
        return SupportRows(self.z_QD, self.labels_Q, self.index_Q)

    def slots(self, count: int) -> Tensor:
        """Positions of the next `count` rows; wraps if Q is not a multiple of the batch size."""
        return (self.position + torch.arange(count, device=self.position.device)) % len(self.z_QD)

    def newest(self, rows: SupportRows) -> SupportRows:
        """The last rows, if there are more than S can hold."""
        size = len(self.z_QD)
        return rows if len(rows.z_QD) <= size else SupportRows(*(column[-size:] for column in rows))

    def preview_push(self, rows: SupportRows) -> SupportRows:
        """What S would hold after a push, without pushing: the authors' leaky queue searches this."""
        rows = self.newest(rows)
        slots = self.slots(len(rows.z_QD))
        return SupportRows(*(old.index_copy(0, slots, new) for old, new in zip(self.read(), rows, strict=True)))

    @torch.no_grad()
    def push(self, rows: SupportRows) -> None:
        rows = self.newest(rows)
        slots = self.slots(len(rows.z_QD))
        for old, new in zip(self.read(), rows, strict=True):
            old.index_copy_(0, slots, new)
        self.position.copy_((self.position + len(slots)) % len(self.z_QD))
