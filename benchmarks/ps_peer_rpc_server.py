"""The server of ps_peer_rpc.py, in a module that both sides import: RPC finds functions by name."""

from __future__ import annotations

import threading

import ps_torch
from ps_load import Load
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future


class Server:
    def __init__(self, load: Load) -> None:
        self.parameters = list(ps_torch.make_model(load.widths).parameters())
        self.lock = threading.Lock()
        self._optimizer = ps_torch.make_optimizer(self.parameters)
        self._workers = load.workers
        self._waiting: list[Future[list[Tensor]]] = []
        for parameter in self.parameters:
            parameter.grad = None

    def values(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.parameters]

    def apply(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def add(self, gradients: list[Tensor]) -> Future[list[Tensor]]:
        """Sum up; the last worker's gradients start the update, and everybody is answered."""
        answer: Future[list[Tensor]] = Future()
        with self.lock:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                gradient.div_(self._workers)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
            self._waiting.append(answer)
            if len(self._waiting) == self._workers:
                self.apply()
                for waiting in self._waiting:
                    waiting.set_result(self.values())
                self._waiting = []
        return answer


_server: Server | None = None


def start(load: Load) -> None:
    global _server
    _server = Server(load)


@rpc.functions.async_execution
def push_sync(gradients: list[Tensor]) -> Future[list[Tensor]]:
    assert _server is not None
    return _server.add(gradients)


def push_async(gradients: list[Tensor]) -> list[Tensor]:
    assert _server is not None
    with _server.lock:
        for parameter, gradient in zip(_server.parameters, gradients, strict=True):
            parameter.grad = gradient
        _server.apply()
    return _server.values()
