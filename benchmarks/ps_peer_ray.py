"""A parameter server on Ray, after the pattern in Ray's documentation.

One actor holds the parameters and the optimizer, other actors compute gradients, and the driver passes
references between them; arrays go through Ray's object store. `sync`: an update takes the gradients of all
workers, and the driver reads the weights every few steps. `async`: ray.wait() for the first worker, apply
its gradients, send it the new weights.

    python benchmarks/ps_peer_ray.py sync|async LOAD      prints one line of JSON
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ps_clock import steady
from ps_load import Load

LOOK_EVERY = 10
"""Steps between two looks of the driver, as in Ray's example; fewer when there are few steps."""


@ray.remote
class Server:
    def __init__(self, load: Load) -> None:
        import ps_torch
        import torch

        torch.set_num_threads(load.threads)
        self._parameters = list(ps_torch.make_model(load.widths).parameters())
        self._optimizer = ps_torch.make_optimizer(self._parameters)

    def apply(self, *gradients: list[Any]) -> list[Any]:
        import torch

        for index, parameter in enumerate(self._parameters):
            # What comes from the object store can't be written to: the first is copied.
            total = torch.from_numpy(gradients[0][index].copy())
            for other in gradients[1:]:
                total += torch.from_numpy(other[index].copy())
            parameter.grad = total.div_(len(gradients))
        self._optimizer.step()
        return self.weights()

    def weights(self) -> list[Any]:
        return [parameter.detach().numpy() for parameter in self._parameters]


@ray.remote
class Worker:
    def __init__(self, load: Load, rank: int) -> None:
        import ps_torch
        import torch

        torch.set_num_threads(load.threads)
        self._model = ps_torch.make_model(load.widths)
        self._batches = ps_torch.Batches(load, rank)

    def gradients(self, weights: list[Any]) -> list[Any]:
        import ps_torch
        import torch

        with torch.no_grad():
            for parameter, value in zip(self._model.parameters(), weights, strict=True):
                parameter.numpy()[...] = value
        inputs, targets = self._batches.take()
        self._model.zero_grad()
        ps_torch.loss_of(self._model(inputs), targets).backward()
        return [parameter.grad.numpy() for parameter in self._model.parameters()]


def synchronous(load: Load, server: Any, workers: list[Any]) -> dict[str, Any]:
    look = min(LOOK_EVERY, max(1, load.steps // 8))
    weights = server.weights.remote()
    times: list[float] = []
    skip = -(-load.warm_up // look)
    while len(times) < skip + load.steps // look + 1 and not _enough(times, skip, load):
        for _ in range(look):
            weights = server.apply.remote(*[w.gradients.remote(weights) for w in workers])
        ray.wait([weights], fetch_local=False)
        times.append(time.time())
    return steady([times], samples=look * load.workers * load.batch, skip=skip)


def asynchronous(load: Load, server: Any, workers: list[Any]) -> dict[str, Any]:
    weights = server.weights.remote()
    busy = {worker.gradients.remote(weights): worker for worker in workers}
    times: list[float] = []
    skip = load.warm_up * load.workers
    while len(times) < load.all_steps * load.workers and not _enough(times, skip, load):
        (first,), _ = ray.wait(list(busy), fetch_local=False)
        worker = busy.pop(first)
        weights = server.apply.remote(first)
        busy[worker.gradients.remote(weights)] = worker
        times.append(time.time())
    return steady([times], samples=load.batch, skip=skip)


def _enough(times: list[float], skip: int, load: Load) -> bool:
    return len(times) > skip + 8 and times[-1] - times[skip] > load.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=["sync", "async"])
    parser.add_argument("load", type=Load.from_json)
    given = parser.parse_args()
    load: Load = given.load
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # for the actors
    ray.init(
        address="local",
        num_cpus=load.workers + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=tempfile.gettempdir(),  # sockets lie in there: their paths must be short
    )
    server = Server.remote(load)
    workers = [Worker.remote(load, rank) for rank in range(load.workers)]
    measured = (synchronous if given.mode == "sync" else asynchronous)(load, server, workers)
    ray.shutdown()
    print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main()
