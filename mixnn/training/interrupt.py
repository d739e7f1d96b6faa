"""SIGTERM and Ctrl-C as a flag, so that the training loop can finish its step, save and stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from mixnn import dist


class Flag:
    """The number of the last signal; 0 if there was none."""

    signal = 0


@contextmanager
def interrupts() -> Iterator[Flag]:
    """Record SIGTERM and SIGINT in a flag; with one process, a second signal has its usual effect."""
    flag = Flag()
    if threading.current_thread() is not threading.main_thread():
        yield flag  # Python delivers signals to the main thread only
        return
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def record(number: int, _frame: FrameType | None) -> None:
        flag.signal = number
        if dist.size() == 1:  # torchrun forwards a signal that the terminal has sent to every process already
            restore()

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, record)
    try:
        yield flag
    finally:
        restore()
