"""A worker's gradients and parameters in flat memory, from backward to push.

    GradientBuffer    backward puts each gradient into the memory that servers read, as soon as it is computed
    WorkerMemory      the buffers themselves, and the parameters that the model computes with
    Overlap           over the network: gradients are sent while backward runs, parameters arrive while the
                      next forward runs

A parameter has no `.grad` when a backward begins, so autograd stores the gradient instead of adding it to
something; a hook copies it (from the second micro-batch on it adds) while it is still in the cache, and
drops it. Large linear layers skip even the copy: they compute the gradient of their weight in the buffer.

A span of a gradient is sent as soon as the backward has finished the last parameter in it. A layer's forward
waits only for the spans with its own parameters. Which layers use which parameters is only certain in a chain
(nn.Sequential, at any depth); any other module may reach into its children, as attention does, and waits for
everything below it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyhands.compute.gradients import WeightsFirst
from manyhands.ps.block_store import FlatTensors

if TYPE_CHECKING:
    from manyhands.ps.client import Client


class GradientBuffer:
    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self.landed: Callable[[Tensor], None] = lambda parameter: None
        """Called with each parameter whose gradient is complete."""
        self._parameters = dict(parameters)
        self._pieces: dict[int, dict[int, Tensor]] = {}
        self._target: dict[int, Tensor] = {}
        self._lent: set[int] = set()
        """Parameters whose gradient a layer computes directly in the buffer."""
        self._written: set[int] = set()
        for parameter in self._parameters.values():
            parameter.register_post_accumulate_grad_hook(self._land)
        WeightsFirst(model, memory=self._lend)

    def begin(self, flat: FlatTensors) -> None:
        """Have the next backward, or several, write to `flat`."""
        if id(flat) not in self._pieces:
            self._pieces[id(flat)] = {
                id(parameter): flat.piece(name).view_as(parameter)
                for name, parameter in self._parameters.items()
            }
        self._target = self._pieces[id(flat)]
        self._written, self._lent = set(), set()
        for parameter in self._parameters.values():
            parameter.grad = None

    def finish(self) -> None:
        """Zero the gradients that no backward has computed."""
        for key, piece in self._target.items():
            if key not in self._written:
                piece.zero_()
        self._target = {}

    def _lend(self, weight: Tensor) -> Tensor | None:
        key = id(weight)
        # Once only: autograd adds up the gradients of several uses before `_land`.
        if key not in self._target or key in self._lent:
            return None
        self._lent.add(key)
        return self._target[key].detach()  # with no other reference, autograd keeps it as it is

    def _land(self, parameter: Tensor) -> None:
        key, gradient = id(parameter), parameter.grad
        if key not in self._target:
            return  # not in a step: the job computes gradients of its own
        assert gradient is not None
        piece = self._target[key]
        with torch.no_grad():
            if key in self._written:
                piece.add_(gradient)
            elif gradient.data_ptr() != piece.data_ptr():
                piece.copy_(gradient)
        self._written.add(key)
        parameter.grad = None
        self.landed(parameter)


class WorkerMemory:
    """A worker's gradient buffers, and the parameters that its model computes with."""

    def __init__(
        self,
        buffer: GradientBuffer,
        params: FlatTensors,
        parameters: Mapping[str, nn.Parameter],
        *,
        slots: Sequence[FlatTensors],
        device: str,
        copies_params: bool,
    ) -> None:
        """`parameters` become views of flat memory: of `params`, which the servers update or send, or of a
        copy on `device`. The servers read gradients from `slots`. `copies_params`: if true, there is a copy
        on the CPU too, because parameters arrive while the model computes."""
        self.slots = slots
        self.params = params
        self._buffer = buffer
        self._copy: FlatTensors | None = None
        self._on_device: FlatTensors | None = None
        """Buffer of a backward on a GPU, before it is copied to a slot."""
        self.has_copy = copies_params or device != "cpu"
        """If true, the model computes with a copy of the parameters."""
        if self.has_copy:
            self._copy = FlatTensors.private(params.layout, device=device)
        if device != "cpu":
            self._on_device = FlatTensors.private(params.layout, device=device)
        self.refresh()
        for name, parameter in parameters.items():
            parameter.data = (self._copy or params).piece(name).view_as(parameter)

    def refresh(self) -> None:
        """Bring a copy of the parameters up to date."""
        if self._copy is not None:
            self._copy.copy_(self.params)

    def begin(self, slot: int) -> None:
        """Have the next backward, or several, write into this slot."""
        self._buffer.begin(self._on_device or self.slots[slot])

    def finish(self, slot: int) -> None:
        """Finish the gradient, which is complete."""
        self._buffer.finish()
        if self._on_device is not None:
            self.slots[slot].copy_(self._on_device)


SpanKey = tuple[str, int]
"""(server, index of one of its spans)."""


class Overlap:
    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        gradient_buffer: GradientBuffer,
        client: Client,
        *,
        enabled: bool,
    ) -> None:
        """If `enabled` is false, all gradients are sent at the end of backward, and forwards do not wait."""
        self._gradient_buffer = gradient_buffer
        self._client = client
        self._spans_of: dict[int, list[SpanKey]] = defaultdict(list)
        """By parameter: the spans that have a part of it."""
        self._num_params: dict[SpanKey, int] = defaultdict(int)
        self._unfinished: dict[SpanKey, int] = {}
        """By span that is not sent yet: parameters without a complete gradient."""
        self._push: tuple[int, int] | None = None
        self._accumulating = False
        self._handles: list[Any] = []
        spans = {
            (server, i): span
            for server, spans in client.spans.items()
            for i, span in enumerate(spans)
        }
        for name, parameter in parameters.items():
            slot = client.params.layout.slots[name]
            for key, span in spans.items():
                if span.buffer == slot.buffer and span.start < slot.stop and slot.start < span.stop:
                    self._spans_of[id(parameter)].append(key)
                    self._num_params[key] += 1
        for key in spans:
            self._num_params.setdefault(key, 0)
        self._priorities = {key: i for i, key in enumerate(self._num_params)}
        """In the order in which a forward needs the parameters."""
        if enabled and spans:
            gradient_buffer.landed = self._done
            for module, owned in _waits(model):
                self._wait_before(module, owned)

    def _wait_before(self, module: nn.Module, owned: Sequence[nn.Parameter]) -> None:
        needed: dict[str, set[int]] = defaultdict(set)
        for parameter in owned:
            for server, i in self._spans_of.get(id(parameter), ()):
                needed[server].add(i)

        def wait(module: nn.Module, arguments: Any) -> None:
            self._client.wait_for_params(needed)

        if needed:
            self._handles.append(module.register_forward_pre_hook(wait))

    def stop(self) -> None:
        self._gradient_buffer.landed = lambda parameter: None
        for handle in self._handles:
            handle.remove()

    def begin(self, seq: int, slot: int) -> None:
        self._push = (seq, slot)
        self._unfinished = dict(self._num_params)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Return a context in which gradients are not sent: another backward will add to them."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def finish(self) -> None:
        """Backward is over: send the rest."""
        for key in sorted(self._unfinished, key=self._priorities.__getitem__):
            self._send(key)
        self._push = None

    def _done(self, parameter: Tensor) -> None:
        if self._push is None or self._accumulating:
            return
        for key in self._spans_of.get(id(parameter), ()):
            self._unfinished[key] -= 1
            if not self._unfinished[key]:
                self._send(key)

    def _send(self, key: SpanKey) -> None:
        assert self._push is not None
        del self._unfinished[key]
        seq, slot = self._push
        server, i = key
        self._client.push_span(server, i, seq=seq, slot=slot, priority=self._priorities[key])


def _waits(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Return the modules that wait before their forward, each with the parameters for which it waits."""
    if type(module) is nn.Sequential:
        for child in module.children():
            yield from _waits(child)
    else:
        yield module, list(module.parameters())
