"""For images that do not fit on the device: batches are read one step ahead and copied while the device works."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from mixnn.data.stored import StoredImages


class Prefetcher:
    """`load(index, next_index)` fills the device's buffer with images[index] and starts to read images[next_index].

    The buffer has room for `capacity` images. If they are fewer, its end keeps what was there.
    """

    def __init__(self, images: Tensor | StoredImages, capacity: int, device: torch.device) -> None:
        assert images.device.type == "cpu"
        self.images = images
        shape = (capacity, *images.shape[1:])
        self.buffer = torch.empty(shape, dtype=torch.uint8, device=device)
        cuda = device.type == "cuda"
        self.host_buffers = [torch.empty(shape, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
        self.copied = [torch.cuda.Event() if cuda else None for _ in self.host_buffers]
        self.reader = ThreadPoolExecutor(1)
        self.ahead: tuple[Tensor, Future[int]] | None = None
        self.slot = 0

    def load(self, index: Tensor, next_index: Tensor | None = None) -> None:
        index = index.cpu()  # no copy for the trainer, whose indices are on the CPU already
        if self.ahead is not None and torch.equal(self.ahead[0], index):
            slot = self.ahead[1].result()
        else:
            slot = self._read(index, self._next_slot())
        self.buffer[: len(index)].copy_(self.host_buffers[slot][: len(index)], non_blocking=True)
        if (event := self.copied[slot]) is not None:
            event.record()
        self.ahead = None
        if next_index is not None:
            next_index = next_index.cpu()
            self.ahead = next_index, self.reader.submit(self._read, next_index, self._next_slot())

    def _next_slot(self) -> int:
        self.slot = 1 - self.slot
        return self.slot

    def _read(self, index: Tensor, slot: int) -> int:
        if (event := self.copied[slot]) is not None:
            event.synchronize()  # the copy to the device that last used this buffer is done
        target = self.host_buffers[slot][: len(index)]
        if isinstance(self.images, StoredImages):
            self.images.read(index, target)
        else:
            torch.index_select(self.images, 0, index, out=target)
        return slot
