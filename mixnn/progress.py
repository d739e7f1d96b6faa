"""What a command says while it works, on stderr: a live bar on a terminal, else a few lines. Results go to stdout.

Functions called from Python print nothing unless they are called with verbose=True. Their warnings are Python's, of the
category MixnnWarning.
"""

from __future__ import annotations

import os
import sys
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from mixnn.config import MixnnWarning

PROGRESS_INTERVAL = 60  # seconds between lines of progress without a live bar, besides the first and the last
PACKAGE = f"{Path(__file__).parent}{os.sep}"
NAMED = 20  # unreadable files that a message names; the others are counted


def escape_controls(text: str) -> str:
    """Escape the characters that would move the cursor or change colors, or that no terminal can print."""
    escaped = ("Cc", "Cs", "Zl", "Zp")
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in escaped else c for c in text)


def plural(count: int, word: str) -> str:
    """1 image, 1,297 images."""
    return f"{count:,} {word}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Reporter:
    """Messages and progress bars on stderr. With `quiet`, only warnings; a warning is given once."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = _console(stderr=True)
        self.quiet = quiet
        self.warned: set[str] = set()

    def info(self, text: str) -> None:
        if not self.quiet:
            self.console.print(escape_controls(text), soft_wrap=True)

    def warn(self, text: str) -> None:
        if text in self.warned:
            return
        self.warned.add(text)
        self.console.print(f"mixnn: {escape_controls(text)}", style="yellow", soft_wrap=True)

    def warn_of_skipped(self, files: Sequence[tuple[str, str]]) -> None:
        """Warn of files with their reasons: the first by name, the others as a number."""
        for text in _about_skipped(files):
            self.warn(text)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[..., None]]:
        """Show a progress bar up to `total`; call what it yields as advance(done, note)."""
        live = self.console.is_terminal and not self.quiet
        columns: tuple[Any, ...] = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, disable=not live) as progress:
            task = progress.add_task(title, total=total, note="")
            last: float | None = None

            def advance(done: float, note: object = "") -> None:
                nonlocal last
                text = f"{note:.2f}" if isinstance(note, float) else str(note)
                progress.update(task, completed=done, note=text)
                now = time.monotonic()
                due = last is None or done == total or now - last >= PROGRESS_INTERVAL
                if not live and done == int(done) and due:
                    last = now
                    self.info(f"{title} {done:.0f}/{total} {text}".rstrip())

            yield advance

    @contextmanager
    def bytes_bar(self, title: str) -> Iterator[Callable[[int, int], None]]:
        """Show the progress of a download; call what it yields as progress(done, total)."""
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            task = progress.add_task(title, total=None)

            def advance(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total or None)

            yield advance


class PythonReporter(Reporter):
    """Reporter for calls from Python: prints only if asked to, and gives warnings to the `warnings` module."""

    def __init__(self, verbose: bool = False) -> None:
        super().__init__(quiet=not verbose)

    def warn(self, text: str) -> None:
        warnings.warn(escape_controls(text), MixnnWarning, stacklevel=_levels_to_caller())

    def warn_of_skipped(self, files: Sequence[tuple[str, str]]) -> None:
        """All in one warning."""
        if files:
            self.warn("; ".join(_about_skipped(files)))


class NullReporter(Reporter):
    """A reporter that prints nothing: in a run on several processes, only the main process reports."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.console.quiet = True


def _about_skipped(files: Sequence[tuple[str, str]]) -> list[str]:
    more = [f"skipped {plural(len(files) - NAMED, 'more file')}"] if len(files) > NAMED else []
    return [f"skipped {name}: {why}" for name, why in files[:NAMED]] + more


def reporter_for(verbose: bool | Reporter) -> Reporter:
    """The reporter that a function's argument `verbose` stands for. The command line passes its own."""
    return verbose if isinstance(verbose, Reporter) else PythonReporter(verbose)


def _levels_to_caller() -> int:
    """The stacklevel that makes a warning point at the line outside mixnn that led to it."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


def _console(stderr: bool = False) -> Console:
    """A console that prints text unchanged: a file may be named [red] or :cat:."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], wrap: bool = True) -> None:
    """Print a plain table, 120 columns wide unless stdout is a terminal. The first column is never wrapped."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, no_wrap=i == 0 or not wrap)
    for row in rows:
        table.add_row(*map(escape_controls, row))
    console = _console()
    console.width = console.width if console.is_terminal else 120
    console.print(table)
