"""Overlap where numbers travel: gradients leave while the backward goes on, parameters come while the next
forward has begun.

A run of parameters is sent as soon as the backward has finished the last piece in it. A layer's forward
waits for the runs with its own parameters alone. Which layers touch which parameters is only sure in a
chain (nn.Sequential, at any depth); any other module may reach into its children, as attention does, and
waits for everything below it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from manyhands.ps.client import Client
from manyhands.ps.gradient_buffer import GradientBuffer

Where = tuple[str, int]
"""(server, number of one of its runs)."""


class Overlap:
    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        gradient_buffer: GradientBuffer,
    ) -> None:
        self._model = model
        self._gradient_buffer = gradient_buffer
        self._parameters = parameters
        self._client: Client | None = None
        self._where: dict[int, list[Where]] = {}
        self._pieces: dict[Where, int] = {}
        self._left: dict[Where, int] = {}
        self._order: dict[Where, int] = {}
        self._unsent: set[Where] = set()
        self._push: tuple[int, int] | None = None
        self._accumulating = False
        self._handles: list[Any] = []

    def follow(self, client: Client, *, enabled: bool) -> None:
        """From now on, with the servers of this client. Not enabled: gradients all leave at the end,
        and forwards wait for nothing."""
        self.stop()
        travelling = client.travelling()
        if not travelling:
            return
        self._client = client
        self._where, self._pieces, self._order = defaultdict(list), defaultdict(int), {}
        layout = client.layout
        for name, parameter in self._parameters.items():
            slot = layout.slots[name]
            for server, runs in travelling.items():
                for i, run in enumerate(runs):
                    if (
                        run.buffer == slot.buffer
                        and run.start < slot.stop
                        and slot.start < run.stop
                    ):
                        self._where[id(parameter)].append((server, i))
                        self._pieces[server, i] += 1
                        self._order.setdefault((server, i), len(self._order))
        for server, runs in travelling.items():
            for i in range(len(runs)):
                self._order.setdefault((server, i), len(self._order))
        if not enabled:
            return
        self._gradient_buffer.landed = self._done
        for module, owned in _waits(self._model):
            needed: dict[str, set[int]] = defaultdict(set)
            for parameter in owned:
                for server, i in self._where.get(id(parameter), ()):
                    needed[server].add(i)
            if needed:
                wanted = {server: sorted(numbers) for server, numbers in needed.items()}
                self._handles.append(module.register_forward_pre_hook(_waiting_for(client, wanted)))

    def stop(self) -> None:
        self._gradient_buffer.landed = lambda parameter: None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._client, self._push = None, None

    def begin(self, seq: int, slot: int) -> None:
        if self._client is not None:
            self._push = (seq, slot)
            self._left = dict(self._pieces)
            self._unsent = set(self._order)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Another backward adds to these gradients: they stay here."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def finish(self) -> None:
        """The backward is over: send what has not left yet."""
        if self._client is not None:
            for where in sorted(self._unsent, key=self._order.__getitem__):
                self._send(where)
            self._push = None

    def _done(self, parameter: Tensor) -> None:
        if self._push is None or self._accumulating:
            return
        for where in self._where.get(id(parameter), ()):
            self._left[where] -= 1
            if not self._left[where]:
                self._send(where)

    def _send(self, where: Where) -> None:
        assert self._client is not None
        assert self._push is not None
        self._unsent.discard(where)
        seq, slot = self._push
        server, i = where
        self._client.push_run(server, i, seq=seq, slot=slot, priority=self._order[where])


def _waits(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """The modules that wait, each with the parameters that it waits for."""
    if type(module) is nn.Sequential:
        for child in module.children():
            yield from _waits(child)
    else:
        yield module, list(module.parameters())


def _waiting_for(client: Client, runs: Mapping[str, list[int]]) -> Any:
    def wait(module: nn.Module, arguments: Any) -> None:
        client.wait_for_runs(runs)

    return wait
