"""The program of a worker process: `python -m manyhands.worker.main`, started by a launcher.

Builds the learner that its spec names and runs the loop with it.
"""

from __future__ import annotations

from manyhands.hosts.member import Member
from manyhands.worker.program import run


def live(member: Member) -> None:
    from manyhands.strategies.registry import make_strategy
    from manyhands.worker.loop import Worker

    with member.phase("loading the job"):
        learner = make_strategy(member.assignment["strategy"]).build()
        worker = Worker(member, learner)
    with member.phase("waiting for orders"):
        worker.run()


if __name__ == "__main__":
    run(live)
