"""Hand-written torch loops that the parameter servers are compared with.

limit     every worker trains alone with its own optimizer, without communication
lockstep  the same, but all begin each step together: the limit of synchronous training
shared    the minimum for training together in one host (ps_shared.py): no failures, no reports, no views
threads   one process with the threads and the batch of all workers
ddp       torch DDP over gloo, with gradients as views of its buckets
base      no contender: the memory of a process that has loaded torch and the data

python benchmarks/ps_bare.py MODE LOAD      prints one line of JSON
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

from ps_clock import steady
from ps_crew import begin_together, run_crew, tell
from ps_load import Load

BASE_S = 2.0


def lead(mode: str, load: Load) -> None:
    if mode == "threads":
        load = replace(
            load, workers=1, batch=load.workers * load.batch, threads=load.workers * load.threads
        )
    said = run_crew(mode, load, [str(rank) for rank in range(load.workers)])
    if mode == "base":
        tell({"began": max(s["began"] for s in said), "ended": min(s["ended"] for s in said)})
    else:
        tell(steady([s["times"] for s in said], samples=load.batch, skip=load.warm_up))


def work(mode: str, load: Load, rank: int, folder: str) -> None:
    import ps_shared
    import ps_torch
    import torch

    torch.set_num_threads(load.threads)
    model = ps_torch.make_model((784, 16, 10) if mode == "base" else load.widths)
    optimizer = ps_torch.make_optimizer(model.parameters())
    batches = ps_torch.Batches(load, rank)
    if mode == "ddp":
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        meeting = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=load.workers)
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    train = ps_shared.Trainer(model, rank, load, folder) if mode == "shared" else None
    together = ps_shared.Together(rank, load.workers, folder) if mode == "lockstep" else None
    begin_together()
    times = []
    for _ in range(3 if mode == "base" else load.all_steps):
        inputs, targets = batches.take()
        if train is not None:
            train.step(inputs, targets)
        else:
            optimizer.zero_grad()
            ps_torch.loss_of(model(inputs), targets).backward()
            optimizer.step()
        if together is not None:
            together.wait()
        times.append(time.time())
    if mode == "base":
        time.sleep(BASE_S)
        tell({"began": times[-1], "ended": time.time()})
    else:
        tell({"times": times})
    os._exit(0)  # taking a process group apart can hang, and nothing is left to save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=["limit", "lockstep", "shared", "threads", "ddp", "base"])
    parser.add_argument("load", type=Load.from_json)
    parser.add_argument("--role", type=int)
    parser.add_argument("--folder")
    given = parser.parse_args()
    if given.role is None:
        lead(given.mode, given.load)
    else:
        work(given.mode, given.load, given.role, given.folder)


if __name__ == "__main__":
    main()
