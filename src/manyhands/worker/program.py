"""The common part of the programs of members: connect to the coordinator, run, report how it ended, exit."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from manyhands.compute.lazy_dynamo import compile_late
from manyhands.control.messages import TO_MEMBER
from manyhands.errors import LinkError, PeerLost
from manyhands.hosts.member import Member
from manyhands.threads import on_process_failure


def run(live: Callable[[Member], None]) -> NoReturn:
    """Run a member in the process that was started for it."""
    _log_to_stderr()
    compile_late()
    status = _run(live)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit(): after a failed collective, torch's destructors may wait for peers forever.
    os._exit(status)


@contextmanager
def loading() -> Iterator[None]:
    """Load objects that stay until the end, such as modules, without collecting garbage. Later collections
    skip it.

    Importing torch makes a million objects: one collection that walks over all of them takes 0.1 s, during
    the imports or in some step.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _run(live: Callable[[Member], None]) -> int:
    try:
        # Before torch is loaded: the coordinator should know at once that this process is alive.
        member = Member.from_launcher(TO_MEMBER)
    except LinkError as error:
        print(f"The coordinator can't be reached: {error}", file=sys.stderr)
        return 1
    on_process_failure(member.fail_and_end)
    return run_to_end(member, live)


def run_to_end(member: Member, live: Callable[[Member], None]) -> int:
    """Run a member, and report to the coordinator how it ended. Returns its exit code."""
    try:
        live(member)
    except (
        BaseException
    ) as error:  # SystemExit of a job's code too: the member that ends the run is reported
        code = member.fail(error)
        if not isinstance(error, PeerLost):  # otherwise the others wait for this process to end
            member.before_exit()
        return code
    member.leave()
    return 0


def _log_to_stderr() -> None:
    """Write log messages, such as refused connections, to the member's log, with the time."""
    ours = logging.getLogger("manyhands")
    if not ours.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        ours.addHandler(handler)
        ours.propagate = False  # not twice, if a job sets up logging of its own
