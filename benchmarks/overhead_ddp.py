"""The hand-written loop for benchmarks/overhead.py: torch DDP as in its tutorial.

A batch is gathered with one index operation, not sample by sample: the fastest way for a loop. Run by
torchrun; rank 0 prints when its first step was done and how long the timed steps took.
"""

from __future__ import annotations

import json
import os
import sys
import time

import overhead_models as models
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    name, steps, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    if name == "Perceptron":
        model, batch = models.perceptron(), models.PERCEPTRON_BATCH
        inputs, targets = models.perceptron_data(steps * batch)
    else:
        model, batch = models.Transformer(), models.TRANSFORMER_BATCH
        inputs, targets = models.transformer_data(steps * batch)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    share = batch // world
    first_done = started = 0.0
    for step in range(steps):
        if step == first:
            started = time.perf_counter()
        begin = step * batch + rank * share
        mine = order[begin : begin + share]
        optimizer.zero_grad()
        loss = models.loss(model(inputs[mine]), targets[mine])
        loss.backward()
        optimizer.step()
        if step == 0:
            first_done = time.time()
    seconds = time.perf_counter() - started
    if rank == 0:
        print(
            json.dumps({"first": first_done, "steps_per_s": (steps - first) / seconds}), flush=True
        )
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
