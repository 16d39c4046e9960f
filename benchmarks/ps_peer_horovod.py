"""Horovod's DistributedOptimizer over gloo: all-reduce, not a parameter server, but a common baseline.

python benchmarks/ps_peer_horovod.py allreduce LOAD      prints one line of JSON
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ps_clock import steady
from ps_load import Load


def lead(load: Load) -> None:
    with tempfile.TemporaryDirectory(prefix="horovod-") as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "horovod.runner.launch", "--gloo"),
                *("-np", str(load.workers), "-H", f"localhost:{load.workers}"),
                *(sys.executable, __file__, "allreduce", load.to_json(), "--folder", folder),
            ],
            check=True,
            stdout=sys.stderr,  # standard output is for the result
            env=os.environ | {"OMP_NUM_THREADS": str(load.threads), "HOROVOD_GLOO_IFACE": "lo"},
        )
        logs = [
            json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(load.workers)
        ]
    print(json.dumps(steady(logs, samples=load.batch, skip=load.warm_up)), flush=True)


def work(load: Load, folder: str) -> None:
    import horovod.torch as hvd
    import ps_torch
    import torch

    hvd.init()
    torch.set_num_threads(load.threads)
    model = ps_torch.make_model(load.widths)
    batches = ps_torch.Batches(load, hvd.rank())
    optimizer = hvd.DistributedOptimizer(
        ps_torch.make_optimizer(model.parameters()), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    times = []
    for _ in range(load.all_steps):
        inputs, targets = batches.take()
        optimizer.zero_grad()
        ps_torch.loss_of(model(inputs), targets).backward()
        optimizer.step()
        times.append(time.time())
    Path(folder, f"{hvd.rank()}.json").write_text(json.dumps(times))
    hvd.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=["allreduce"])
    parser.add_argument("load", type=Load.from_json)
    parser.add_argument("--folder")
    given = parser.parse_args()
    if given.folder is None:
        lead(given.load)
    else:
        work(given.load, given.folder)


if __name__ == "__main__":
    main()
