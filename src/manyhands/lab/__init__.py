"""A lab: several hosts on one Linux machine, to try a job on a slow or broken network.

Each host is a network namespace with its own host name; hosts share a switch, and the machine's
files, cores, devices and process ids. Links have a bandwidth, can be cut silently and healed, and count
their bytes. Needs root.

    layout.py      names, addresses and bandwidths; pure
    records.py     the labs of this machine and their owners, to clean up after a killed owner
    network.py     namespaces, cables, switch, cuts, counters
    processes.py   entering a host, and killing its processes
    signals.py     cleaning up when a signal ends the program
    lab.py         Lab and LabHost, the Python interface
    run_all.py     one command on every host, as torchrun would start it
"""

from manyhands.lab.lab import Lab, LabHost
from manyhands.lab.network import Traffic

__all__ = ["Lab", "LabHost", "Traffic"]
