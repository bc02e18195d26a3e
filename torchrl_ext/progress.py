"""What a person sees while a run works: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class RunProgress:
    """Stages, counters within a stage, and lines that stay."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr, highlight=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._began = time.monotonic()

    def line(self, text: str) -> None:
        """A line that stays, with the time since the start."""
        self.console.print(f"[dim]{time.monotonic() - self._began:6.0f}s[/dim] {text}", soft_wrap=True)

    def begin(self, what: str, total: int) -> None:
        """Starts a counter; without a terminal nothing is drawn until the line that sums it up."""
        self.end()
        if not self.console.is_terminal:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self.console, transient=True)
        self._bar.start()
        self._task = self._bar.add_task(what, total=total)

    def advance(self) -> None:
        """Counts one."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)

    def end(self) -> None:
        """Removes the counter."""
        if self._bar is not None:
            self._bar.stop()
            self._bar, self._task = None, None
