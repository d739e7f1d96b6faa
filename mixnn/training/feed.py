"""Batches of images that do not fit on the device: read from the host one step ahead, copied while the device works."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class Feed:
    """`put(index, coming)` fills the device's buffer with images[index], and starts to read images[coming]."""

    def __init__(self, images: Tensor, batch_size: int, device: torch.device) -> None:
        assert images.device.type == "cpu"
        self.images = images
        shape = (batch_size, *images.shape[1:])
        self.buffer = torch.empty(shape, dtype=torch.uint8, device=device)
        cuda = device.type == "cuda"
        self.hosts = [torch.empty(shape, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
        self.copied = [torch.cuda.Event() if cuda else None for _ in self.hosts]
        self.reader = ThreadPoolExecutor(1)
        self.ahead: tuple[Tensor, Future[int]] | None = None
        self.turn = 0

    def put(self, index: Tensor, coming: Tensor | None = None) -> None:
        index, coming = index.cpu(), None if coming is None else coming.cpu()  # the trainer's are there already
        if self.ahead is not None and torch.equal(self.ahead[0], index):
            slot = self.ahead[1].result()
        else:
            slot = self._read(index, self._next())
        self.buffer.copy_(self.hosts[slot], non_blocking=True)
        if (event := self.copied[slot]) is not None:
            event.record()
        self.ahead = None if coming is None else (coming, self.reader.submit(self._read, coming, self._next()))

    def _next(self) -> int:
        self.turn = 1 - self.turn
        return self.turn

    def _read(self, index: Tensor, slot: int) -> int:
        if (event := self.copied[slot]) is not None:
            event.synchronize()  # the copy of two steps ago has left this buffer
        torch.index_select(self.images, 0, index, out=self.hosts[slot])
        return slot
