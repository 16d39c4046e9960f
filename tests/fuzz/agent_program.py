"""An agent as a process of its own, for test_agent_links.py: `agent_program.py ADDRESS`."""

from __future__ import annotations

import sys

from manyhands.errors import ManyhandsError
from manyhands.hosts.agent import Agent
from manyhands.hosts.spec import COORDINATOR, ClusterSpec, Entry
from manyhands.hosts.view import WORKER
from manyhands.transport import Authority

KEY = Authority.from_secret("manyhands run", "the key of a run that is fuzzed")
ENTRIES = (Entry("rank-0", COORDINATOR, 0, slots=0), Entry("rank-1", WORKER, 1))


def spec(rank: int) -> ClusterSpec:
    return ClusterSpec(ENTRIES, "127.0.0.1", None, "a test", mine=ENTRIES[rank])


if __name__ == "__main__":
    try:
        sys.exit(Agent(spec(1), sys.argv[1], authority=KEY).run())
    except ManyhandsError as error:  # as the command line does
        sys.exit(str(error))
