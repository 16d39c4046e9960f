"""Carries the output of members to the coordinator, with bounded buffers, so that no member ever waits.

A slow network must not block a member that prints. So its output is read as fast as it is printed, and the
excess over the buffer is dropped and counted (LogStream, in an agent). At the other end a full disk must not
end the run: output that can't be written is dropped and counted, too (LogFiles).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from manyhands.threads import OnError, describe, start_thread

CHUNK_BYTES = 1 << 15
BUFFER_BYTES = 1 << 20
"""Buffer of each member's output that waits to be sent."""


class LogStream:
    """Reads the output of members and passes it to `send(name, data)`, in a thread of its own."""

    def __init__(self, send: Callable[[str, bytes], None], *, on_error: OnError) -> None:
        """`on_error`: called if nothing can be sent any more."""
        self._send = send
        self._waiting: dict[str, bytearray] = {}
        self._left_out: dict[str, int] = {}
        self._changed = threading.Condition()
        self._sending = False
        self._closed = False
        self._on_error = on_error
        start_thread(self._carry, name="logs", on_error=self._fail)

    def follow(self, name: str, output: IO[bytes]) -> threading.Thread:
        """Read to the end of the output; the returned thread ends with it."""

        def on_error(error: BaseException) -> None:
            self.add(name, f"\n[its output can't be read any more: {describe(error)}]\n".encode())

        return start_thread(self._read, name, output, name=f"log-{name}", on_error=on_error)

    def add(self, name: str, data: bytes) -> None:
        with self._changed:
            waiting = self._waiting.setdefault(name, bytearray())
            if len(waiting) + len(data) > BUFFER_BYTES:
                self._left_out[name] = self._left_out.get(name, 0) + len(data)
                return
            if left_out := self._left_out.pop(name, 0):
                waiting += f"\n[{left_out:,} bytes were left out: the link is slow]\n".encode()
            waiting += data
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all was sent."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or not (self._sending or any(self._waiting.values())),
                timeout_s,
            )

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        self.close()  # flush() need not wait any longer
        self._on_error(error)

    def _read(self, name: str, output: IO[bytes]) -> None:
        with output:
            while data := os.read(output.fileno(), CHUNK_BYTES):
                self.add(name, data)

    def _carry(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or any(self._waiting.values()))
                if self._closed:
                    return
                name = next(name for name, waiting in self._waiting.items() if waiting)
                waiting = self._waiting.pop(name)  # next time it comes after the others
                data = bytes(waiting[:CHUNK_BYTES])
                if rest := waiting[CHUNK_BYTES:]:
                    self._waiting[name] = rest
                self._sending = True
            self._send(name, data)


class LogFiles:
    """Writes the logs of members on other hosts. A log that can't be written never ends anything."""

    def __init__(self, folder: Path, notify: Callable[[str], None]) -> None:
        """`notify` prints a notice of the run."""
        self._folder = folder
        self._notify = notify
        self._told = False
        self._left_out: dict[str, int] = {}

    def add(self, name: str, data: bytes | memoryview) -> None:
        """Append to the log of a member; without data, create it. Called by one thread per member."""
        try:
            with open(self._folder / f"{name}.log", "ab", buffering=0) as log:
                if left_out := self._left_out.get(name, 0):
                    log.write(f"\n[{left_out:,} bytes were left out: the disk]\n".encode())
                    self._left_out.pop(name)
                written = log.write(data) or 0
        except OSError as error:
            self._lose(name, len(data), str(error))
        else:
            if written < len(data):
                self._lose(name, len(data) - written, "only a part was written; is the disk full?")

    def _lose(self, name: str, num_bytes: int, why: str) -> None:
        self._left_out[name] = self._left_out.get(name, 0) + num_bytes
        if not self._told:
            self._told = True
            self._notify(
                f"the log of {name} can't be written ({why}); until there is room, the output of "
                "members on other hosts is dropped; the run continues"
            )
