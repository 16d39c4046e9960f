"""A group of one worker: the same interface, and nothing is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.collectives.group import Group, Reduction, Work


class Done:
    """Work that is complete."""

    def wait(self) -> None:
        return


class LoneWorker(Group):
    """A group of one worker: nothing is sent."""

    def __init__(self, *, device: str = "cpu") -> None:
        super().__init__(rank=0, size=1, device=device)

    def describe(self) -> str:
        return "none"

    def cut(self) -> None:
        return

    def close(self) -> None:
        return

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
