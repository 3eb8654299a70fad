"""Progress of a long piece of work: a bar on a terminal, a line now and then elsewhere (logs, pipes, CI)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from blockscale.report.text import duration


class Progress(ABC):
    """Tasks one after the other. Use as a context manager; `start` a task, `update` it as it goes, `finish` it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._begun = 0.0
        self._first = self._total = 0

    def start(self, label: str, total: int, done: int = 0) -> None:
        """Begin a task of ``total`` steps, ``done`` of them already behind it."""
        self._begun, self._first, self._total = time.perf_counter(), done, total
        self._start(label, total, done)

    def time_left(self, done: int) -> str:
        """Time left at the pace since `start`: ``"1 min 05 s left"``; empty before the first step."""
        steps = done - self._first
        if steps <= 0:
            return ""
        seconds = (time.perf_counter() - self._begun) / steps * (self._total - done)
        return f"{duration(seconds)} left"

    def note(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        self.console.print(text, soft_wrap=True, highlight=False)

    @abstractmethod
    def _start(self, label: str, total: int, done: int) -> None: ...

    @abstractmethod
    def update(self, done: int, **fields: str) -> None:
        """``done`` steps are behind; ``fields`` are shown as ``name value``."""

    @abstractmethod
    def finish(self, text: str = "") -> None:
        """The task is over, ``text`` says how it went."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None


class BarProgress(Progress):
    """A live bar by rich."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._rich = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._rich.add_task("", visible=False, shown="")

    def __enter__(self) -> Progress:
        self._rich.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._rich.stop()

    def _start(self, label: str, total: int, done: int) -> None:
        self._task = self._rich.add_task(label, total=total, completed=done, shown="")

    def update(self, done: int, **fields: str) -> None:
        """Move the bar."""
        shown = "  ".join([*(f"{name} {value}" for name, value in fields.items()), self.time_left(done)])
        self._rich.update(self._task, completed=done, shown=shown)

    def finish(self, text: str = "") -> None:
        """Leave the bar as it is, with ``text`` beside it."""
        self._rich.update(self._task, shown=text)
        self._rich.stop_task(self._task)


class LineProgress(Progress):
    """A line every ``every`` steps and one at the end."""

    def __init__(self, console: Console, every: int) -> None:
        super().__init__(console)
        self._every = every
        self._label = ""

    def _start(self, label: str, total: int, done: int) -> None:
        self._label = label
        self.note(f"{label}: step {done}/{total}")

    def update(self, done: int, **fields: str) -> None:
        """A line when it is time for one."""
        if done % self._every == 0 or done == self._total:
            values = [*(f"{name} {value}" for name, value in fields.items()), self.time_left(done)]
            self.note(f"{self._label}: step {done}/{self._total}  {'  '.join(values)}")

    def finish(self, text: str = "") -> None:
        """A last line."""
        if text:
            self.note(f"{self._label}: {text}")


def make_progress(console: Console, every: int) -> Progress:
    """A bar where ``console`` is a terminal, else a line every ``every`` steps (at least 1)."""
    return BarProgress(console) if console.is_terminal else LineProgress(console, max(1, every))
