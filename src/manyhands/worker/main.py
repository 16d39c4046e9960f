"""The program of a worker process: `python -m manyhands.worker.main`, started by a launcher.

Builds the learner of its spec and runs the loop with it.
"""

from __future__ import annotations

import gc

from manyhands.control.messages import Assignment
from manyhands.hosts.member import Member
from manyhands.transport.fields import read
from manyhands.worker.program import loading, run


def live(member: Member) -> None:
    with loading():
        from manyhands.strategies.registry import make_strategy
        from manyhands.worker.loop import Worker

    with member.phase("loading the job"):
        worker = Worker(member, make_strategy(read(Assignment, member.assignment).strategy))
    gc.freeze()  # the job stays, too
    with member.phase("waiting for orders"):
        worker.run()


if __name__ == "__main__":
    run(live)
