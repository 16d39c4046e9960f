"""The interface of event sinks, the stream that feeds them, and a queue for slow ones.

The stream passes each event to its sinks in order, in the caller's thread. Showing a run must never
end it: a sink that raises is reported once, closed and skipped from then on. The exception is an
`essential` sink (the JSONL file, which is the source of truth): its error reaches the caller.

A sink that may be slow goes behind `Queued`: a thread of its own and a bounded queue that drops and
counts events instead of blocking. An event costs the caller one call per sink; a queued sink costs an
append.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import ClassVar

from manyhands.errors import RecordError
from manyhands.events.events import Event, Noticed
from manyhands.threads import start_thread

log = logging.getLogger("manyhands.events")


class Sink(ABC):
    """Receives every event of a run in order, then one `close`."""

    essential: ClassVar[bool] = False
    """If true, an error of this sink ends the run; otherwise it ends only the sink."""

    @abstractmethod
    def handle(self, event: Event) -> None:
        """Handle one event, without changing it."""

    @abstractmethod
    def close(self) -> None:
        """Write what is pending and release files and threads. A second call does nothing."""


class Stream:
    """Passes every event to every sink, in order. Only the coordinator's thread emits."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self.sinks = list(sinks)
        """The sinks that are still open."""

    def emit(self, event: Event) -> None:
        for sink in tuple(self.sinks):
            try:
                sink.handle(event)
            except Exception as error:
                if not sink.essential:
                    self._drop(sink, error)
                elif isinstance(error, OSError):
                    # Training must not continue unrecorded.
                    raise RecordError(
                        f"The run's events.jsonl can't be written: {error}. Make room, then resume "
                        "the run: nothing that was saved is lost."
                    ) from error
                else:
                    raise

    def notice(self, message: str) -> None:
        """Emit a note for the user."""
        self.emit(Noticed(message=message))

    def close(self) -> None:
        """Close every sink, even if one raises; then raise the error of an essential one."""
        essential_error: Exception | None = None
        while self.sinks:
            sink = self.sinks.pop()
            try:
                sink.close()
            except Exception as error:
                if sink.essential:
                    essential_error = error
                else:
                    log.warning("%s could not be closed: %s", _name(sink), _reason(error))
        if essential_error is not None:
            raise essential_error

    def _drop(self, sink: Sink, error: Exception) -> None:
        self.sinks.remove(sink)
        if not isinstance(error, BrokenPipeError):  # `| head`: the reader has gone
            log.warning(
                "%s failed and gets no more events; the run continues. %s",
                _name(sink),
                _reason(error),
            )
        log.debug("how %s failed", _name(sink), exc_info=error)
        try:
            sink.close()
        except Exception:
            log.debug("%s also failed to close", _name(sink), exc_info=True)


class Queued(Sink):
    """Runs `sink` in a thread behind a queue of at most `limit` events.

    When the queue is full the newest event is dropped and counted in `dropped`. If the sink raises,
    the next `handle` (or else `close`) raises its error here, so that the stream drops it as it
    would have without the queue.
    """

    def __init__(self, sink: Sink, limit: int = 10_000) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, and is {limit}")
        self.sink = sink
        self.limit = limit
        self.dropped = 0
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._failed = False
        self._error: BaseException | None = None
        self._thread = start_thread(
            self._run, name=f"manyhands-{type(sink).__name__}", on_error=self._fail
        )

    def handle(self, event: Event) -> None:
        with self._changed:
            self._raise_error()
            if self._closing or self._failed or len(self._events) >= self.limit:
                self.dropped += 1
                return
            self._events.append(event)
            self._changed.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the sink empty its queue and close it, within `timeout_s`; otherwise abandon it."""
        with self._changed:
            first_time, self._closing = not self._closing, True
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            if self._thread.is_alive():
                self.dropped += len(self._events)
                self._events.clear()
            if self.dropped and first_time and not self._failed:
                log.warning("%s was too slow: %d events dropped", _name(self), self.dropped)
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            # Raised once: the stream then calls close(), which has nothing to add.
            error, self._error = self._error, None
            if isinstance(error, Exception):
                raise error
            raise RuntimeError(f"{_name(self)} ended with {error!r}") from error

    def _run(self) -> None:
        try:
            while (event := self._next()) is not None:
                self.sink.handle(event)
        except BaseException as error:
            self._fail(error)
        self.sink.close()

    def _next(self) -> Event | None:
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._closing)
            return self._events.popleft() if self._events else None

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if not self._failed:
                self._failed, self._error = True, error
            self.dropped += len(self._events)
            self._events.clear()


def _name(sink: Sink) -> str:
    return _name(sink.sink) if isinstance(sink, Queued) else type(sink).__name__


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
