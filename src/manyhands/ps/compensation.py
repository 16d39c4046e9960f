"""Delay compensation: corrects a stale gradient by how far the weights have moved since.

A gradient g taken at old weights w0 and applied at w misses (w - w0) times the Hessian, which is
approximated by the diagonal of g g^T: g + strength * g * g * (w - w0) (Zheng et al. 2017, "Asynchronous
Stochastic Gradient Descent with Delay Compensation"; strengths of 0.01 to 2 are in use there).

Cost: one copy of the server's blocks for each worker, and two passes over them a push.
"""

from __future__ import annotations

from torch import Tensor

from manyhands.ps.block_store import BlockStore, FlatTensors


class Compensation:
    def __init__(self, strength: float) -> None:
        self.strength = strength
        self._then: dict[str, list[Tensor]] = {}
        """For each worker: the server's spans as they were when it got them."""

    def correct(self, worker: str, gradient: FlatTensors, params: BlockStore) -> None:
        """Correct a gradient of this worker, in place."""
        if worker not in self._then:
            return
        for span, then in zip(params.spans, self._then[worker], strict=True):
            mine = span.of(gradient)
            moved = span.of(params.flat) - then
            mine.addcmul_(mine * mine, moved, value=self.strength)

    def remember(self, worker: str, params: BlockStore) -> None:
        """Note that the worker gets the current weights."""
        then = self._then.get(worker)
        if then is None:
            self._then[worker] = [span.of(params.flat).clone() for span in params.spans]
            return
        for span, copy in zip(params.spans, then, strict=True):
            copy.copy_(span.of(params.flat))
