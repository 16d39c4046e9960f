"""Members on a Ray cluster: Ray is asked for slots, and in each of them an actor is an agent.

    wish.py     what is asked of Ray, and whether a cluster could ever give it; pure
    far.py      the coordinator itself on the cluster, for a person outside of it
    broker.py   a process beside the coordinator, the only one that loads Ray: asks for slots, holds actors
    line.py     the coordinator's end of what it and the broker tell each other
    berth.py    what an actor does where Ray has put it: it is an agent (cluster/agent.py)

The launcher (cluster/launchers/ray.py) is that of agents, which come up in another way.
"""
