"""Do these hosts reach each other, and how well? The checks behind `manyhands doctor --cluster`.

    facts.py      what a host says of itself, and what was measured between two
    probe.py      one host's part: a listener that echoes, and the measuring of another host
    meeting.py    the first process gathers the others, has the pairs measured, and ends them
    judge.py      from all that to findings. Pure
    table.py      and to a table. Pure

Every process of the cluster runs the same command, as for training. One process of each host measures.
"""

from manyhands.doctor.hosts.facts import HostFacts, PairFacts
from manyhands.doctor.hosts.judge import judge
from manyhands.doctor.hosts.meeting import Attendant, ProbeLead
from manyhands.doctor.hosts.table import tell

__all__ = ["Attendant", "HostFacts", "PairFacts", "ProbeLead", "judge", "tell"]
