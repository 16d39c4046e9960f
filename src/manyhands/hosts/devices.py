"""Picks the device of a member. Imports torch only when called."""

from __future__ import annotations

import os
import re
import socket

from manyhands.errors import UsageError


def check_device(wish: str) -> None:
    """Refuse an invalid device before any process is started."""
    for part in wish.split(","):
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", part.strip()):
            raise UsageError(
                f"--device {wish}: allowed are auto, cpu, cuda and cuda:N, or several of them, one per "
                "worker: cuda,cpu"
            )


def pick_device(wish: str, local_rank: int) -> str:
    """`auto`, `cpu`, `cuda` or `cuda:N` as the device of the member with this rank on its host; of several
    with commas between, each member has one, in turn."""
    check_device(wish)
    import torch

    wishes = [part.strip() for part in wish.split(",")]
    if len(wishes) > 1:
        turn, place = divmod(local_rank, len(wishes))
        wish = wishes[place]
        # Its index among the members that asked for any GPU.
        local_rank = turn * wishes.count(wish) + wishes[:place].count(wish)
    gpus = torch.cuda.device_count() if wish != "cpu" else 0
    if wish == "auto":
        wish = "cuda" if gpus else "cpu"
    if wish == "cpu":
        return "cpu"
    number = wish.partition(":")[2]
    if gpus == 0:
        raise UsageError(f"--device {wish}: torch sees no GPU here. Use --device cpu or auto.")
    if number and int(number) >= gpus:
        raise UsageError(f"--device {wish}: this machine has GPUs 0 to {gpus - 1}.")
    return f"cuda:{int(number) if number else local_rank % gpus}"


def device_id(device: str) -> str:
    """Identify a device in the whole cluster."""
    if not device.startswith("cuda"):
        return f"{socket.gethostname()}/cpu/{os.getpid()}"
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def describe_device(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' if threads > 1 else ''})"
