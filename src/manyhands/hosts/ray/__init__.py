"""Members on a Ray cluster: Ray provides slots, and the actor in each slot is an agent.

    resources.py       what is requested from Ray, and whether a cluster could ever provide it; pure
    broker.py          a process beside the coordinator that alone loads Ray: reserves slots, holds actors
    broker_client.py   the coordinator's connection to the broker
    messages.py        the messages between them
    actor.py           the actor in a slot: an agent (hosts/agent.py)

The launcher is hosts/launchers/ray.py.
"""
