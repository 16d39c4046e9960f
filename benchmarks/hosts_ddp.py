"""A hand-written DDP loop, one of several processes under torchrun, for benchmarks/hosts.py.

torchrun ... benchmarks/hosts_ddp.py LOAD FOLDER      writes the times of its steps to FOLDER/times-RANK
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import ps_torch
import torch
import torch.distributed as dist
from ps_load import Load
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    load, folder = Load.from_json(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(load.threads)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(ps_torch.make_model(load.widths), gradient_as_bucket_view=True)
    optimizer = ps_torch.make_optimizer(model.parameters())
    batches = ps_torch.Batches(load, rank)
    times = []
    for _ in range(load.all_steps):
        inputs, targets = batches.take()
        optimizer.zero_grad()
        ps_torch.loss_of(model(inputs), targets).backward()
        optimizer.step()
        times.append(time.time())
    (folder / f"times-{rank}").write_text(json.dumps(times))
    dist.barrier()  # nobody leaves while another still waits for its last bytes
    os._exit(0)  # taking a process group apart can hang, and nothing is left to save


if __name__ == "__main__":
    main()
