"""Checks behind `manyhands doctor --cluster`: whether hosts reach each other, and how fast.

    cluster.py    rank 0 gathers the agents, has the pairs measured, and ends them
    findings.py   what is wrong, and what to do; pure
    table.py      the measurements as a table; pure

Every process of the cluster runs the same command, as for training. All but rank 0 are agents
(hosts/agent.py), and one agent of each host measures with its probe (hosts/probe.py).
"""

from manyhands.doctor.hosts.cluster import ClusterProbe, agent_timeouts
from manyhands.doctor.hosts.findings import find_problems
from manyhands.doctor.hosts.table import format_table

__all__ = ["ClusterProbe", "agent_timeouts", "find_problems", "format_table"]
