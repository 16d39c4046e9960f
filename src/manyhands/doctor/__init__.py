"""Checks whether this machine has what training needs, and whether it works: `manyhands doctor`.

    software.py      versions, optional packages, what torch was built with
    machine.py       cores, memory, devices, shared memory, open files, disk: read from the system
    network.py       the hostname, and links: a real round trip each
    collectives.py   real processes that form a process group and all-reduce

Each check is a function that examines one thing and returns a Finding; paths are arguments. The order here is
the order of the output: prerequisites come first.

Cost: a few milliseconds for most; a second or two for importing torch; for each process group the time that
new processes take to start and import torch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from manyhands.doctor import collectives, machine, network, software
from manyhands.doctor.finding import Check, Finding, wants_colour

__all__ = ["Check", "Finding", "checks", "wants_colour"]


def checks(runs: Path = Path("runs")) -> list[Check]:
    """Return all checks, in order. `runs` is the folder where run folders go."""
    return [
        Check("manyhands", software.check_manyhands),
        Check("python", software.check_python),
        Check("torch", software.check_torch),
        Check("cores", machine.check_cores),
        Check("memory", machine.check_memory),
        Check("devices", machine.check_devices, "not known without torch"),
        Check("backends", software.check_backends, "not known without torch"),
        Check("shared memory", machine.check_shared_memory),
        Check("open files", machine.check_open_files),
        Check("run folder", partial(machine.check_run_folder, runs)),
        Check("hostname", network.check_hostname),
        Check("unix sockets", network.check_unix_sockets),
        Check("TLS links", network.check_tls_links),
        Check("gloo group", collectives.check_gloo, "not tried without torch"),
        Check("nccl group", collectives.check_nccl, "not tried without torch"),
        *(Check(name, partial(software.check_package, name)) for name in software.PACKAGES),
    ]
