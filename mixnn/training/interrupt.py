"""SIGTERM and Ctrl-C as a flag, so that the loop can finish its step, save, and leave."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from mixnn import dist


class Flag:
    signal = 0


@contextmanager
def interrupts() -> Iterator[Flag]:
    """A flag that holds the number of the last SIGTERM or SIGINT; in a run on one process, a second acts as usual."""
    flag = Flag()
    if threading.current_thread() is not threading.main_thread():
        yield flag  # Python delivers signals to the main thread alone
        return
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _frame: FrameType | None) -> None:
        flag.signal = number
        if dist.size() == 1:  # torchrun passes on what the terminal has sent already
            restore()

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, note)
    try:
        yield flag
    finally:
        restore()
