"""The only way to start a thread: every thread has a handler for its failure.

A thread that ends with an exception takes its work with it, while everything that depends on it waits forever
or continues as if it were done. So `start_thread` and `start_timer` require `on_error`, which is called with
an exception of the target, in the same thread. It passes the error on to the owner:

    a result that is waited for          keep the error; the next call of the owner raises it
    a connection                        close it; its other end and its readers notice
    the coordinator                     its inbox
    anything else of a process          `fail_process`, which ends a member and reports its traceback
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

OnError = Callable[[BaseException], object]
"""Called in the thread that failed. Must not wait for that thread."""


def start_thread(
    target: Callable[..., object], *args: Any, name: str, on_error: OnError
) -> threading.Thread:
    """Start a daemon thread that runs `target(*args)`; its exception goes to `on_error`."""
    thread = threading.Thread(target=_guard, args=(target, args, on_error), name=name, daemon=True)
    thread.start()
    return thread


def start_timer(
    delay_s: float, target: Callable[..., object], *args: Any, name: str, on_error: OnError
) -> threading.Timer:
    """Run `target(*args)` in a daemon thread after `delay_s`, unless it is cancelled before."""
    timer = threading.Timer(delay_s, _guard, (target, args, on_error))
    timer.name, timer.daemon = name, True
    timer.start()
    return timer


def fail_process(error: BaseException) -> None:
    """Report a failure of the whole process: an `on_error` for threads on which it depends."""
    _on_process_failure(error)


def on_process_failure(handler: OnError) -> OnError:
    """Set what `fail_process` does here; return what it did before.

    By default it prints the traceback, and the process continues.
    """
    global _on_process_failure
    before, _on_process_failure = _on_process_failure, handler
    return before


def describe(error: BaseException) -> str:
    """Return the error and where it happened, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _guard(target: Callable[..., object], args: tuple[Any, ...], on_error: OnError) -> None:
    try:
        target(*args)
    except BaseException as error:
        try:
            on_error(error)
        except BaseException as second:
            second.__cause__ = second.__cause__ or error
            fail_process(second)


def _reraise(error: BaseException) -> None:
    raise error  # threading.excepthook prints it


_on_process_failure: OnError = _reraise
