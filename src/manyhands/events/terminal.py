"""The console for a terminal, drawn with rich: imported only there.

Below the permanent lines there is ONE live line, redrawn on events and on `tick()`, at most ten
times a second: erase and rewrite it in one write. There is no thread and the cursor is never hidden,
so a killed run leaves a sane terminal. In a narrow terminal the bar is shortened first; then the least
important figures are dropped.
"""

from __future__ import annotations

import time
from typing import TextIO

from rich.console import Console as Rich
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from manyhands.events import text
from manyhands.events.console import DIM, GOOD, STRONG, Clock, Console, Part
from manyhands.events.events import Event, RunFinished

REDRAW_EVERY_S = 0.1
BAR_CELLS = (16, 32)
"""Minimum and maximum width of the progress bar."""


class RichConsole(Console):
    """Prints permanent lines in colour, and one live line with a progress bar."""

    def __init__(self, out: Rich, err: Rich, *, clock: Clock = time.monotonic) -> None:
        super().__init__(clock=clock)
        self.out = out
        self.err = err
        self._live = False
        self._over = False
        self._drawn_at = float("-inf")

    def line(self, *parts: Part, error: bool = False) -> None:
        if error:
            self._erase()
            self.err.print(Text.assemble(*parts), soft_wrap=True)
            return
        with self.out:
            self._erase()
            # Long paths and commands are for copying: let the terminal wrap them.
            self.out.print(Text.assemble(*parts), soft_wrap=True)
            self._draw()

    def handle(self, event: Event) -> None:
        if isinstance(event, RunFinished):
            self.close()
        super().handle(event)

    def progress(self) -> None:
        now = self.clock()
        if now - self._drawn_at >= REDRAW_EVERY_S:
            self._drawn_at = now
            with self.out:  # one write to the terminal: no flicker
                self._erase()
                self._draw()

    def close(self) -> None:
        self._erase()
        self._over = True

    def _erase(self) -> None:
        if self._live:
            self._live = False
            self.out.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))

    def _draw(self) -> None:
        if self._over or self.status.started is None:
            return
        line = self._starting() if self.starting else self._training()
        # Leave the last cell free: some terminals wrap a full line.
        line.truncate(max(1, self.out.width - 1))
        self.out.print(line, end="", soft_wrap=True)
        self._live = True

    def _starting(self) -> Text:
        frames = "-\\|/" if self.out.options.ascii_only else "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
        frame = frames[int(self.elapsed_s / REDRAW_EVERY_S) % len(frames)]
        line = text.starting_line(self.status, self.elapsed_s)
        return Text.assemble((f"{frame} ", GOOD), line)

    def _training(self) -> Text:
        now = text.progress(self.status)
        room = self.out.width - 1 - len(f"{now.epoch}  {now.steps}") - 1
        figures = list(now.figures)
        while figures and len("  ".join(["", *figures])) + BAR_CELLS[0] > room:
            figures.pop()
        tail = "  ".join(["", *figures])
        bar = self._bar(now.done, max(BAR_CELLS[0], min(BAR_CELLS[1], room - len(tail))))
        return Text.assemble((now.epoch, STRONG), " ", *bar, f"  {now.steps}", (tail, DIM))

    def _bar(self, done: float, cells: int) -> list[tuple[str, str]]:
        full, empty = ("=", " ") if self.out.options.ascii_only else ("━", "━")
        if self.out.color_system is None:
            empty = " "  # without colour the rest of the bar must look different
        num_full = int(done * cells)
        return [(full * num_full, GOOD), (empty * (cells - num_full), "bright_black")]


def rich_stream(stream: TextIO) -> Rich:
    """Return a rich console on `stream` that prints plain text, never markup."""
    console = Rich(file=stream, highlight=False, markup=False, emoji=False)
    if console.no_color:
        # NO_COLOR: no bold or dim either, nothing but the erasing of the live line.
        console = Rich(file=stream, highlight=False, markup=False, emoji=False, color_system=None)
    return console
