"""Prints the progress of a run to stdout, and failures to stderr.

`Console` decides what is printed and when; its two subclasses only draw. `PlainConsole` writes lines to
a pipe, a file or a dumb terminal. `RichConsole` (terminal.py) writes the same lines in colour, above
one live line. Neither has a thread: they draw on events and on `tick()`, which the coordinator's
loop calls a few times a second. Don't put them behind `Queued`: `tick` and `handle` must be called by
the same thread.
"""

from __future__ import annotations

import io
import math
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TextIO

from manyhands.events import events, text
from manyhands.events.sinks import Sink

Clock = Callable[[], float]
Part = str | tuple[str, str]
"""Text, or text and its style."""

PLAIN_EVERY_S = 5.0
LABEL_CELLS = 12

# Styles as rich names them; only the terminal shows them.
GOOD, BAD, WARN, STRONG = "green", "bold red", "yellow", "bold"
DIM, LABEL = "dim", "cyan"
OUTCOME_STYLES = {
    "finished": "bold green",
    "early-stopped": "bold green",
    "limit": "bold green",
    "target": "bold green",
    "failed": BAD,
    "diverged": BAD,
}


class Console(Sink):
    """Decides what to print for each event. Subclasses draw."""

    raises = False
    """If true, what ended the run is raised to the caller of `mh.train()`, and not printed here."""

    def __init__(self, *, quiet: bool = False, clock: Clock = time.monotonic) -> None:
        self.status = text.RunStatus()
        self.quiet = quiet
        self.clock = clock
        self.started_at = clock()

    def handle(self, event: events.Event) -> None:
        first_failure = self.status.failure is None
        first_view = self.status.view is None
        self.status.fold(event)
        match event:
            case events.MemberFailed() if first_failure:
                self._fail(*text.failure(event))
            case events.RunFinished():
                self._finish(event)
            case _ if self.quiet:
                pass
            case events.RunStarted():
                self.line((text.title(event), STRONG))
                self.rows(text.start_rows(event))
            case events.ViewChanged() if first_view:
                self.rows(text.ready_rows(self.status))
                self.line()
            case events.ViewChanged():
                if self.status.lost is None:  # else the line about the loss has said it
                    self.line((text.view_line(event), WARN))
                self.rows(text.placement_rows(event))
            case events.Injected():
                self.line((text.injected_line(event), WARN))
            case events.MemberLost():
                self.line((text.lost_line(event), WARN))
            case events.Recovered():
                self.line((text.recovered_line(event), WARN))
            case events.Resumed() if first_view:
                self.rows([("resumed", text.resumed(event))])
            case events.Resumed():
                self.line(("resumed ", WARN), text.resumed(event))
            case events.Evaluated():
                best = ("  best", GOOD) if event.best else ""
                self.line(text.evaluation_line(event, self.status), best)
            case events.TargetReached():
                self.line(("target", GOOD), f": {text.target_line(event)}")
            case events.RateChanged():
                self.line((text.rate_line(event, self.status), WARN))
            case events.Noticed() | events.ScaleAnswered():
                self.line(("note", WARN), f": {text.clean(event.message)}")
            case events.Stopping():
                self.line(("stopping", WARN), f": {text.stopping(event.reason)}")
            case _:
                self.progress()

    def tick(self) -> None:
        """Update the elapsed time on the screen. Called a few times a second."""
        if not self.quiet:
            self.progress()

    def close(self) -> None:
        pass

    def _finish(self, event: events.RunFinished) -> None:
        error = event.summary.get("error")
        if event.outcome in ("failed", "diverged") and self.status.failure is None and error:
            self._fail(text.clean(str(error)))
        run = self.status.started.run if self.status.started else None
        style = OUTCOME_STYLES.get(event.outcome, "bold yellow")
        if self.quiet:
            self.line((text.outcome(event), style), text.summary_tail(event, run))
            return
        self.line()
        self.line((text.outcome(event), style))
        self.rows(text.summary_rows(event, run))
        if event.advice or event.resume_command is not None:
            self.line()
        if event.advice:
            self.line(text.clean(event.advice))
        if event.resume_command is not None:
            self.line("continue with:  ", (text.clean(event.resume_command), STRONG))

    def _fail(self, head: str, traceback: Sequence[str] = (), log: str = "") -> None:
        if self.raises:
            return
        self.line(("error", BAD), f": {head}", error=True)
        for line in traceback:
            self.line((f"    {line}", DIM), error=True)
        if log:
            self.line(("  log: ", LABEL), log, error=True)

    def rows(self, rows: text.Rows) -> None:
        """Print permanent lines of label and value."""
        for label, value in rows:
            style = STRONG if label == "view" else ""
            self.line((f"  {label:<{LABEL_CELLS}}", LABEL), (value, style))

    @property
    def starting(self) -> bool:
        return self.status.started is not None and self.status.view is None

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.started_at

    @abstractmethod
    def line(self, *parts: Part, error: bool = False) -> None:
        """Print a permanent line, on stderr if `error` is true."""

    @abstractmethod
    def progress(self) -> None:
        """Show the progress. Called often; decides itself when to draw."""


class PlainConsole(Console):
    """Prints lines without control codes: for pipes, files and dumb terminals."""

    def __init__(
        self,
        out: TextIO,
        err: TextIO,
        *,
        quiet: bool = False,
        every_s: float = PLAIN_EVERY_S,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(quiet=quiet, clock=clock)
        self.out = out
        self.err = err
        self.every_s = every_s
        self._printed: tuple[float, int] | None = None
        """Time and step of the last progress line."""

    def line(self, *parts: Part, error: bool = False) -> None:
        line = "".join(part if isinstance(part, str) else part[0] for part in parts)
        print(line, file=self.err if error else self.out, flush=True)

    def progress(self) -> None:
        now, step = self.clock(), self.status.step
        if math.isinf(self.every_s):
            return
        if self.starting:
            # The banner is new; only a slow start needs a line.
            printed_at = self._printed[0] if self._printed else self.started_at
            if now - printed_at >= self.every_s:
                self._print(text.starting_line(self.status, self.elapsed_s))
        elif self.status.loss is not None and (
            self._printed is None
            or (now - self._printed[0] >= self.every_s and step != self._printed[1])
        ):
            self._print(text.progress_line(self.status))

    def _print(self, line: str) -> None:
        self._printed = (self.clock(), self.status.step)
        self.line(line)


def make_console(
    out: TextIO | None = None,
    err: TextIO | None = None,
    *,
    quiet: bool = False,
    shared: bool = False,
) -> Console:
    """Return the console that fits `out` (stdout) and `err` (stderr).

    If `shared` is true, another process writes there too: no live line and no progress lines.
    """
    out = sys.stdout if out is None else out
    err = sys.stderr if err is None else err
    for stream in (out, err):
        if isinstance(stream, io.TextIOWrapper):
            # A member's messages may hold characters that an ASCII terminal can't show.
            stream.reconfigure(errors="backslashreplace")
    if shared:
        return PlainConsole(out, err, quiet=quiet, every_s=math.inf)
    if quiet or not out.isatty():
        return PlainConsole(out, err, quiet=quiet)
    # Import rich only for a terminal. It also reads NO_COLOR and TERM.
    from manyhands.events.terminal import RichConsole, rich_stream

    rich_out = rich_stream(out)
    if rich_out.is_dumb_terminal:
        return PlainConsole(out, err)
    return RichConsole(rich_out, rich_stream(err))
