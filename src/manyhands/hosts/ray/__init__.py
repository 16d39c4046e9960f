"""Members on a Ray cluster: Ray is asked for slots, and in each of them an actor is an agent.

    resources.py     what is asked of Ray, and whether a cluster could ever give it; pure
    broker.py   a process beside the coordinator, the only one that loads Ray: asks for slots, holds actors
    broker_client.py     the coordinator's end of what it and the broker tell each other
    actor.py    what an actor does where Ray has put it: it is an agent (hosts/agent.py)

The launcher (hosts/launchers/ray.py) is that of agents, which come up in another way.
"""
