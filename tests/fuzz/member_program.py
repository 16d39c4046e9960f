"""Starts real workers quickly, for test_coordinator_to_members.py: a process that has loaded all forks.

Each line of standard input is an invitation. The answer is the process id of the worker that gets it.
"""

from __future__ import annotations

import os
import sys

import torch

import manyhands.compute.loaders
import manyhands.strategies.single
import manyhands.testing.jobs
import manyhands.worker.loop  # noqa: F401
from manyhands.worker.main import live
from manyhands.worker.program import run

torch.set_num_threads(1)


def become_worker(invitation: str, out: str) -> None:
    os.setpgid(0, 0)  # a worker that fails ends its process group
    reading, writing = os.pipe()
    os.write(writing, invitation.encode())
    os.close(writing)
    with open(out, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv.append(str(reading))
    run(live)


if __name__ == "__main__":
    for line in sys.stdin:
        while True:  # those that have ended
            try:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    break
            except ChildProcessError:
                break
        if not line.strip():
            print("", flush=True)
            continue
        child = os.fork()
        if not child:
            become_worker(line, sys.argv[1])
        print(child, flush=True)
