"""A group of one worker: the same interface, and nothing is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.collectives.group import COLLECTIVE_S, CONNECT_S, Group, Reduction, Work

if TYPE_CHECKING:
    from manyhands.collectives.default_group import DefaultGroup


class Done:
    """Work that is complete."""

    def wait(self) -> None:
        return


class LoneWorker(Group):
    """A group of one worker: nothing is sent."""

    def __init__(self, *, device: str = "cpu") -> None:
        super().__init__(rank=0, size=1, device=device)
        self._made_default: DefaultGroup | None = None

    def describe(self) -> str:
        return "none"

    def cut(self) -> None:
        return

    def close(self) -> None:
        default, self._made_default = self._made_default, None
        if default is not None:
            default.close()

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        return Done()

    def _reduce_scatter(self, tensor: Tensor, into: Tensor, op: Reduction) -> Work:
        return self._all_gather(tensor, into)

    def _all_gather(self, tensor: Tensor, into: Tensor) -> Work:
        with torch.no_grad():
            into.view(-1).copy_(tensor.view(-1))
        return Done()

    def _all_to_all(
        self, tensor: Tensor, into: Tensor, sent: list[int], received: list[int]
    ) -> Work:
        return self._all_gather(tensor, into)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        return Done()

    def _send(self, tensor: Tensor, to: int, tag: int) -> Work:
        raise AssertionError("there is no peer")

    def _recv(self, tensor: Tensor, source: int, tag: int) -> Work:
        raise AssertionError("there is no peer")

    def _split(self, ranks: list[int]) -> Group:
        return LoneWorker(device=self.device)

    def _default_group(self, device: str) -> DefaultGroup:
        if self._made_default is None:
            from manyhands.collectives.default_group import DefaultGroup

            backend = "nccl" if device.startswith("cuda") else "gloo"
            made = DefaultGroup(
                dist.HashStore(),
                rank=0,
                size=1,
                backend=backend,
                connect_s=CONNECT_S,
                collective_s=COLLECTIVE_S,
                check=lambda: None,
            )
            made.form()
            self._made_default = made
        return self._made_default
