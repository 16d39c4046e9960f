"""The run as a person sees it. All goes to stdout, only a failure goes to stderr.

`Console` decides what is said and when; its two children only draw. `PlainConsole` writes lines: to
a pipe, a file, a dumb terminal. `RichConsole` (terminal.py) writes the same lines in colour, above
one live line. Neither has a thread: they draw on events and on `tick()`, which the coordinator's
loop calls a few times a second. Not for use behind `Queued`: `tick` and `handle` belong to one
thread.
"""

from __future__ import annotations

import io
import math
import sys
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import TextIO

from manyhands.events import text
from manyhands.events.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Injected,
    MemberFailed,
    MemberLost,
    MemberReady,
    MemberStarted,
    Noticed,
    RateChanged,
    Recovered,
    Resumed,
    RunFinished,
    RunStarted,
    StepCommitted,
    Stopping,
    ViewChanged,
)
from manyhands.events.sinks import Sink

Clock = Callable[[], float]
Part = str | tuple[str, str]
"""Words, or words and their style."""

PLAIN_EVERY_S = 5.0
LABEL_CELLS = 12

# Styles as rich names them; only the terminal shows them.
GOOD, BAD, WARN, STRONG = "green", "bold red", "yellow", "bold"
OUTCOME_STYLES = {
    "finished": "bold green",
    "early-stopped": "bold green",
    "failed": BAD,
    "diverged": BAD,
}


class Console(Sink):
    """What is said at each event. The drawing is left to the children."""

    def __init__(self, *, quiet: bool = False, clock: Clock = time.monotonic) -> None:
        self.picture = text.Picture()
        self.quiet = quiet
        self.clock = clock
        self.started_at = clock()

    def handle(self, event: Event) -> None:
        first_failure = self.picture.failure is None
        first_view = self.picture.view is None
        self.picture.fold(event)
        match event:
            case MemberFailed() if first_failure:
                self.failure(text.failure(event))
            case RunFinished():
                self._finish(event)
            case _ if self.quiet:
                pass
            case RunStarted():
                self.line((text.title(event), STRONG))
                self.rows(text.start_rows(event))
            case ViewChanged() if first_view:
                self.rows(text.ready_rows(self.picture))
                self.line()
            case ViewChanged():
                if self.picture.lost is None:  # else it was said who goes on
                    self.line((text.view_line(event), WARN))
                self.rows(text.placement_rows(event))
            case Injected():
                self.line((text.injected_line(event), WARN))
            case MemberLost():
                self.line((text.lost_line(event), WARN))
            case Recovered():
                self.line((text.recovered_line(event), WARN))
            case Resumed() if first_view:
                self.rows([("resumed", text.resumed(event))])
            case Resumed():
                self.line(("resumed ", WARN), text.resumed(event))
            case Evaluated():
                best = ("  best", GOOD) if event.best else ""
                self.line(text.evaluation_line(event, self.picture), best)
            case RateChanged():
                self.line((text.rate_line(event, self.picture), WARN))
            case Noticed():
                self.line(("note", WARN), f": {text.clean(event.message)}")
            case Stopping():
                self.line(("stopping", WARN), f": {text.stopping(event.reason)}")
            case MemberStarted() | MemberReady() | StepCommitted() | CheckpointSaved():
                self.progress()

    def tick(self) -> None:
        """Called a few times a second, so that time passes on the screen while nothing happens."""
        if not self.quiet:
            self.progress()

    def close(self) -> None:
        pass

    def _finish(self, event: RunFinished) -> None:
        error = event.summary.get("error")
        if event.outcome in ("failed", "diverged") and self.picture.failure is None and error:
            self.failure(text.FailureLine(text.clean(str(error)), (), ""))
        run = self.picture.started.run if self.picture.started else None
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

    @property
    def starting(self) -> bool:
        return self.picture.started is not None and self.picture.view is None

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.started_at

    @abstractmethod
    def line(self, *parts: Part) -> None:
        """A line that stays."""

    @abstractmethod
    def rows(self, rows: text.Rows) -> None:
        """Labels and values that stay, one pair a line."""

    @abstractmethod
    def progress(self) -> None:
        """How far the run is; called often, shown when it is time."""

    @abstractmethod
    def failure(self, failure: text.FailureLine) -> None:
        """What went wrong, on stderr."""


class PlainConsole(Console):
    """Lines without any control codes: for pipes, files and dumb terminals."""

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
        self._said: tuple[float, int] | None = None
        """When a progress line was last written, and at which step."""

    def line(self, *parts: Part) -> None:
        words = "".join(part if isinstance(part, str) else part[0] for part in parts)
        print(words, file=self.out, flush=True)

    def rows(self, rows: text.Rows) -> None:
        for label, value in rows:
            self.line(f"  {label:<{LABEL_CELLS}}{value}")

    def progress(self) -> None:
        now, step = self.clock(), self.picture.step
        if math.isinf(self.every_s):
            return
        if self.starting:
            # The banner has just been written; only a slow start needs words.
            said_at = self._said[0] if self._said else self.started_at
            if now - said_at >= self.every_s:
                self._say(text.starting_line(self.picture, self.elapsed_s))
        elif self.picture.loss is not None and (
            self._said is None or (now - self._said[0] >= self.every_s and step != self._said[1])
        ):
            self._say(text.progress_line(self.picture))

    def failure(self, failure: text.FailureLine) -> None:
        print(f"error: {failure.head}", file=self.err)
        for line in failure.traceback:
            print(f"    {line}", file=self.err)
        if failure.log:
            print(f"  log: {failure.log}", file=self.err)
        self.err.flush()

    def _say(self, words: str) -> None:
        self._said = (self.clock(), self.picture.step)
        self.line(words)


def make_console(
    out: TextIO | None = None,
    err: TextIO | None = None,
    *,
    quiet: bool = False,
    shared: bool = False,
) -> Console:
    """The console that fits where `out` (stdout) and `err` (stderr) lead to. `shared`: somebody else writes
    there too, so nothing is drawn and there are no lines about progress."""
    out = sys.stdout if out is None else out
    err = sys.stderr if err is None else err
    for stream in (out, err):
        if isinstance(stream, io.TextIOWrapper):
            # A member's words may hold what an ASCII terminal can't show.
            stream.reconfigure(errors="backslashreplace")
    if shared:
        return PlainConsole(out, err, quiet=quiet, every_s=math.inf)
    if quiet or not out.isatty():
        return PlainConsole(out, err, quiet=quiet)
    # Only a terminal pays for the import of rich, which is also what reads NO_COLOR and TERM.
    from manyhands.events.terminal import RichConsole, rich_stream

    rich_out = rich_stream(out)
    if rich_out.is_dumb_terminal:
        return PlainConsole(out, err)
    return RichConsole(rich_out, rich_stream(err))
