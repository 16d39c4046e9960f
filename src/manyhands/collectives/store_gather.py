"""Gather texts through a torch store, before workers are connected, with waits that can be interrupted.

Each worker posts a text and waits for those of all others (`gather`). Neither a wait in a store nor
connecting can be ended from outside, and a store on a host that is gone may not even answer, so both run in a
thread of their own, which is abandoned if the wait is over or took too long (`interruptible`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from manyhands.threads import start_thread

if TYPE_CHECKING:
    import torch.distributed as dist

CHECK_EVERY_S = 0.005
POLL_S = 0.003

Result = TypeVar("Result")


def gather(
    store: dist.Store,
    what: str,
    text: str,
    *,
    rank: int,
    size: int,
    timeout_s: float,
    check: Callable[[], None],
) -> list[str]:
    """Post a text in a store, and return the texts of all workers in rank order.

    Raises TimeoutError if not all have posted theirs in time, and what `check` raises meanwhile.
    """
    stop = threading.Event()

    def post_and_wait() -> list[str]:
        store.set(f"{what}/{rank}", text)
        keys = [f"{what}/{each}" for each in range(size)]
        while not store.check(keys):
            if stop.is_set():
                return []
            time.sleep(POLL_S)
        return [store.get(key).decode() for key in keys]

    try:
        return interruptible(post_and_wait, timeout_s=timeout_s, check=check)
    except TimeoutError as error:
        raise TimeoutError(f"not all workers joined within {timeout_s:.0f} s") from error
    finally:
        stop.set()


def interruptible(
    call: Callable[[], Result], *, timeout_s: float, check: Callable[[], None]
) -> Result:
    """Return what `call` returns. If `check` raises before, or it takes longer than `timeout_s`, which raises
    TimeoutError, `call` is abandoned: its thread continues, and its result is dropped."""
    deadline = time.monotonic() + timeout_s
    results: list[Result] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        results.append(call())
        over.set()

    def fail(error: BaseException) -> None:
        errors.append(error)
        over.set()

    start_thread(run, name="joining", on_error=fail)
    while not over.wait(CHECK_EVERY_S):
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"it took longer than {timeout_s:.0f} s")
    if errors:
        raise errors[0]
    return results.pop()
