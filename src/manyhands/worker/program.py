"""What the programs of members have in common: join the coordinator, live, say how it ended, be gone."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from manyhands.compute.lazy_dynamo import compile_late
from manyhands.errors import LinkError, PeerLost
from manyhands.hosts.member import Member
from manyhands.threads import on_process_failure


def run(live: Callable[[Member], None]) -> NoReturn:
    """Be a member that lives like this, in a process that was started for it."""
    _log_to_stderr()
    compile_late()
    status = _run(live)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit(): after a failed collective, torch's destructors may wait for peers forever.
    os._exit(status)


def _run(live: Callable[[Member], None]) -> int:
    try:
        # Before torch is loaded: the coordinator should know at once that this process lives.
        member = Member.from_launcher()
    except LinkError as error:
        print(f"The coordinator can't be reached: {error}", file=sys.stderr)
        return 1
    on_process_failure(member.fail_and_end)
    try:
        live(member)
    except BaseException as error:  # SystemExit of a job's code too: whoever ends this run is named
        code = member.fail(error)
        if not isinstance(error, PeerLost):  # else the others wait for this one's end, to go on
            member.before_exit()
        return code
    member.leave()
    return 0


def _log_to_stderr() -> None:
    """What a member has to say about others, such as whom it refused, goes to its log, with the time."""
    ours = logging.getLogger("manyhands")
    if not ours.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        ours.addHandler(handler)
        ours.propagate = False  # a job that sets up logging of its own gets none of it twice
