"""A parameter server on torch.distributed.rpc, after torch's tutorials.

One process holds the parameters and the optimizer; a worker sends all gradients in one call, which returns
all parameters. `sync`: the call returns when the gradients of all workers have arrived (the function returns
a future). `async`: each call is applied at once, one at a time; a reply is sent while the next call may
already be applied.

    python benchmarks/ps_peer_rpc.py sync|async LOAD      prints one line of JSON
"""

from __future__ import annotations

import argparse
import threading
import time
import warnings

import ps_crew
from ps_clock import steady
from ps_load import Load


def lead(mode: str, load: Load) -> None:
    roles = ["server", *(f"worker-{rank}" for rank in range(load.workers))]
    _, *said = ps_crew.run_crew(mode, load, roles)
    ps_crew.tell(steady([s["times"] for s in said], samples=load.batch, skip=load.warm_up))


def take_part(mode: str, load: Load, role: str, folder: str) -> None:
    # Not above: the process that leads needs no torch.
    import ps_peer_rpc_server as ps
    import ps_torch
    import torch
    from torch.distributed import rpc

    warnings.filterwarnings("ignore")
    torch.set_num_threads(load.threads)
    rank = 0 if role == "server" else int(role.rpartition("-")[2]) + 1
    if role == "server":
        ps.start(load)  # before anybody can call
    rpc.init_rpc(
        role,
        rank=rank,
        world_size=load.workers + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=load.workers + 4,
            rpc_timeout=0,
            init_method=f"file://{folder}/store",
        ),
    )
    if role == "server":
        ps_crew.begin_together()
        ps_crew.tell({})
        threading.Event().wait()  # it serves until the crew is ended
    model = ps_torch.make_model(load.widths)
    batches = ps_torch.Batches(load, rank - 1)
    parameters = list(model.parameters())
    push = ps.push_sync if mode == "sync" else ps.push_async
    ps_crew.begin_together()
    times = []
    for _ in range(load.all_steps):
        inputs, targets = batches.take()
        model.zero_grad()
        ps_torch.loss_of(model(inputs), targets).backward()
        fresh = rpc.rpc_sync("server", push, args=([p.grad for p in parameters],))
        with torch.no_grad():
            for parameter, value in zip(parameters, fresh, strict=True):
                parameter.copy_(value)
        times.append(time.time())
    ps_crew.tell({"times": times})
    threading.Event().wait()  # others may still be at work: all end together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=["sync", "async"])
    parser.add_argument("load", type=Load.from_json)
    parser.add_argument("--role")
    parser.add_argument("--folder")
    given = parser.parse_args()
    if given.role is None:
        lead(given.mode, given.load)
    else:
        take_part(given.mode, given.load, given.role, given.folder)


if __name__ == "__main__":
    main()
