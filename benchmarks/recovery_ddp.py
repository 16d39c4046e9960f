"""The same training as users of torchrun write it: DDP, saved regularly, loaded at every start.

    torchrun ... recovery_ddp.py FOLDER

Runs until it is stopped. `record.jsonl` in the folder lists the process of each rank, and when rank 0
finished which step in which restart. Each line is one write, so a kill can't tear it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import recovery_model
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    folder = Path(sys.argv[1])
    record = Record(folder / "record.jsonl")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    record.write(rank=rank, pid=os.getpid())
    torch.manual_seed(0)
    inputs, targets = recovery_model.data()
    model = recovery_model.perceptron()
    optimizer = recovery_model.optimizer(model.parameters())
    saved, done = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    model = DistributedDataParallel(model)
    share = recovery_model.BATCH // world
    for step in itertools.count(done + 1):
        epoch, place = divmod(step - 1, recovery_model.SAVE_EVERY)
        if place == 0 or step == done + 1:
            order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
        begin = place * recovery_model.BATCH + rank * share
        mine = order[begin : begin + share]
        optimizer.zero_grad()
        recovery_model.loss(model(inputs[mine]), targets[mine]).backward()
        optimizer.step()
        if rank == 0:
            record.write(step=step)
            if step % recovery_model.SAVE_EVERY == 0:
                save(
                    {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                    },
                    saved,
                )


def save(state: dict[str, Any], path: Path) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


class Record:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._round = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def write(self, **fields: int) -> None:
        line = json.dumps({"time": time.time(), "round": self._round, **fields})
        os.write(self._file, line.encode() + b"\n")


if __name__ == "__main__":
    main()
