"""One process of the doctor's process group: joins the group, all-reduces, checks the sum.

A program that a launcher starts, with an AddTask as the assignment in its invitation. It prints each step
before it begins it, so that the last line of its log shows where it got stuck or why it failed; it exits with
0 only if the sum is right.

Rank r contributes 2**r in every element, so that a wrong sum shows which rank is missing or counted twice.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from manyhands.hosts.invitation import Invitation
from manyhands.hosts.member import die_with
from manyhands.transport.fields import Count, Positive, Seconds, read

NUM_ELEMENTS = 1024


@dataclass(frozen=True)
class AddTask:
    backend: str
    rank: Count
    world: Positive
    store: str
    timeout_s: Seconds


def add_up(task: AddTask) -> None:
    print("importing torch", flush=True)
    import torch
    import torch.distributed as dist

    rank, world = task.rank, task.world
    limit = timedelta(seconds=task.timeout_s)
    device = torch.device("cpu")
    if task.backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    print("joining the group", flush=True)
    store = dist.FileStore(task.store, world)
    store.set_timeout(limit)
    group: Any
    if task.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        group = dist.ProcessGroupNCCL(store, rank, world, options)
    elif task.backend == "gloo":
        group = dist.ProcessGroupGloo(store, rank, world, limit)
    else:
        raise ValueError(f"Unknown backend {task.backend!r}")
    print("adding up", flush=True)
    tensor = torch.full((NUM_ELEMENTS,), 2.0**rank, device=device, dtype=torch.float64)
    group.allreduce([tensor]).wait()
    total, right = set(tensor.tolist()), 2.0**world - 1
    if total != {right}:
        raise ValueError(f"the sum is {sorted(total)[:3]}, and {right:g} is right")
    print("leaving", flush=True)
    del group


def main() -> int:
    invitation = Invitation.from_launcher()
    die_with(invitation.parent)
    try:
        add_up(read(AddTask, invitation.assignment))
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {reason(str(error))}", file=sys.stderr, flush=True)
        return 1
    return 0


def reason(text: str) -> str:
    """Return an error of torch in one line: its first, and what NCCL puts after the words "Last error"."""
    head, _, cause = text.strip().partition("\nLast error:\n")
    lines = [part.strip().splitlines()[0] for part in (head, cause) if part.strip()]
    return ": ".join(lines)


if __name__ == "__main__":
    # Without the interpreter's own end: threads of a failed group may wait there for a lost peer.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
