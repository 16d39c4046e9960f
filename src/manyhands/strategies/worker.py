"""The program of a worker process: `python -m manyhands.strategies.worker`, started by a launcher.

Builds the learner that its spec names and runs the loop with it.
"""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import sys

from manyhands.cluster.member import Member
from manyhands.errors import LinkError


def log_to_stderr() -> None:
    """What a member has to say about others, such as whom it refused, goes to its log, with the time."""
    ours = logging.getLogger("manyhands")
    if not ours.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        ours.addHandler(handler)
        ours.propagate = False  # a job that sets up logging of its own gets none of it twice


def main() -> int:
    log_to_stderr()
    try:
        # Before torch is loaded: the coordinator should know at once that this process lives.
        member = Member.from_launcher()
    except LinkError as error:
        print(f"The coordinator can't be reached: {error}", file=sys.stderr)
        return 1
    try:
        from manyhands.strategies.registry import make_strategy
        from manyhands.train.loop import Worker

        with member.phase("loading the job"):
            learner = make_strategy(member.assignment["strategy"]).build()
            worker = Worker(member, learner)
        with member.phase("waiting for orders"):
            worker.run()
    except BaseException as error:  # SystemExit of a job's code too: whoever ends this run is named
        return member.fail(error)
    member.leave()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]  # frees semaphores of loaders
    # Not sys.exit(): after a failed collective, torch's destructors may wait for peers forever.
    os._exit(status)
