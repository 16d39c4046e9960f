"""A lab: several hosts on one Linux machine, to see a job on a slow or broken network.

Each host is a network namespace with a host name of its own; hosts share a switch, and the machine's
files, cores, devices and process ids. Links have a bandwidth; they can be cut silently and healed;
their bytes are counted. It needs root.

    layout.py      names, addresses and bandwidths; pure
    records.py     which labs there are and whose, so that nothing stays when an owner is killed
    network.py     namespaces, cables, switch, cuts, counters
    processes.py   getting into a host, and killing what is there
    signals.py     nothing stays when a signal ends the program either
    lab.py         Lab and Host, as a program uses them
    everywhere.py  one command on every host, as torchrun would start it
"""

from manyhands.lab.lab import Lab, LabHost
from manyhands.lab.network import Traffic

__all__ = ["Lab", "LabHost", "Traffic"]
