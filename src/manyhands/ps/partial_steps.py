"""Steps of an optimizer with parts of a batch, where each push is an update of its own. Pure.

Without rounds a push is a part f of a batch, such as a quarter with four workers. Its gradient is the mean
over that part, and its learning rate f times the job's, so the pushes of a batch move the weights as far as
one step. Two things remain to be corrected for an optimizer with momentum b:

    decay    A step of the optimizer multiplies momentum by b, so with n pushes a batch it would forget n
             times as fast. A push multiplies it by b**f instead, and adds (1 - b**f)/(1 - b) of the
             gradient: the pushes of a batch add what one step adds.
    ahead    A gradient is stale: other pushes move the weights between its computation and its update. Most
             of that movement is momentum, and known beforehand. So the weights that workers see are those
             that momentum alone will reach within AHEAD batches:

                 momentum  m := b**f m + (1 - b**f)/(1 - b) g
                 weights   w := w - f lr (b**AHEAD m + (1 - b**AHEAD)/(1 - b) g)

             With AHEAD = 1 and f = 1 this is Nesterov's momentum. A gradient moves the weights by 1/(1 - b)
             of itself in total, as it does in a single process.

Hakimi et al. 2019 ("Taming Momentum in a Distributed Asynchronous Environment", DANA) look ahead too, with a
momentum for each worker. Decay by parts of a batch needs one momentum however many workers there are, so
nothing is lost or inherited when a worker comes or goes.

Adam's moments decay by b**f likewise. It divides a gradient by its size, to which noise contributes: the mean
of a part is noisier than that of a batch, by sqrt(1/f), and its step so much smaller. So its learning rate is
sqrt(f) times the job's, not f (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient
Algorithms").

Cost: one more pass over the gradients and parameters of an update for SGD, six for Adam; no state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.compute.train_state import multiplied_lr
from manyhands.ps.staleness import MomentumRule

Group = dict[str, Any]

AHEAD = 2.0
"""Batches to look ahead: each worker has at most two pushes in flight."""


class Steps:
    """Steps as the optimizer does them, whatever part of a batch its gradients are."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, *, lr_scale: float, part: float) -> None:
        """Update the parameters that have a gradient, which is the mean over a part of a batch. `lr_scale`
        includes the part."""
        with multiplied_lr(self.optimizer, lr_scale):
            self.optimizer.step()


class StepsAhead(Steps, ABC):
    """Steps whose momentum decays by the part of a batch, of weights that are ahead by momentum."""

    def step(self, *, lr_scale: float, part: float) -> None:
        if part == 0:
            return
        for group in self.optimizer.param_groups:
            if self._has_momentum(group):
                self._look_ahead(group, lr_scale, part)
        with self._settings(lambda group: self._changes(group, lr_scale, part)):
            self.optimizer.step()

    @abstractmethod
    def _has_momentum(self, group: Group) -> bool:
        """Return whether there is anything to look ahead by."""

    @abstractmethod
    def _look_ahead(self, group: Group, lr_scale: float, part: float) -> None:
        """Do the part of the update that is not momentum's."""

    @abstractmethod
    def _changes(self, group: Group, lr_scale: float, part: float) -> Group:
        """Return the settings for the rest of the update."""

    @contextmanager
    def _settings(self, changes: Callable[[Group], Group]) -> Iterator[None]:
        groups = self.optimizer.param_groups
        changed = [changes(group) for group in groups]
        before = [
            {key: group[key] for key in new} for group, new in zip(groups, changed, strict=True)
        ]
        try:
            for group, new in zip(groups, changed, strict=True):
                group.update(new)
            yield
        finally:
            for group, old in zip(groups, before, strict=True):
                group.update(old)


class SgdAhead(StepsAhead):
    def _has_momentum(self, group: Group) -> bool:
        return bool(group["momentum"])

    def _look_ahead(self, group: Group, lr_scale: float, part: float) -> None:
        b, decay = group["momentum"], group["weight_decay"]
        by = float(group["lr"]) * lr_scale * geometric(b, _ahead(group)) * (1 - group["dampening"])
        for parameter in _with_gradient(group):
            assert parameter.grad is not None
            state = self.optimizer.state[parameter]
            if (
                state.get("momentum_buffer") is None
            ):  # else the first gradient would count as a whole batch
                state["momentum_buffer"] = torch.zeros_like(parameter)
            # In place, and the gradient is only read: replica holders read it too.
            weights = parameter.detach()
            if decay:
                weights.mul_(1 - by * decay)
            weights.add_(parameter.grad, alpha=by if group["maximize"] else -by)

    def _changes(self, group: Group, lr_scale: float, part: float) -> Group:
        if not self._has_momentum(group):
            return {"lr": group["lr"] * lr_scale}
        b = group["momentum"]
        gain = geometric(b, part) * (1 - group["dampening"])
        lr = group["lr"] * lr_scale * b ** _ahead(group)
        return {"lr": lr, "momentum": b**part, "dampening": 1 - gain, "nesterov": False}


class AdamAhead(StepsAhead):
    """The same for Adam and AdamW, whose moments are means: (1 - b) times the sums above."""

    def step(self, *, lr_scale: float, part: float) -> None:
        # `lr_scale` includes the part, and Adam's rate goes by its root.
        super().step(lr_scale=lr_scale / math.sqrt(part) if part else 0.0, part=part)

    def _has_momentum(self, group: Group) -> bool:
        return bool(group["betas"][0])

    def _look_ahead(self, group: Group, lr_scale: float, part: float) -> None:
        b, b2 = group["betas"]
        by = float(group["lr"]) * lr_scale * (1 - b**AHEAD)
        decay = 0.0 if group.get("decoupled_weight_decay") else group["weight_decay"]
        for parameter in _with_gradient(group):
            gradient, weights = parameter.grad, parameter.detach()
            assert gradient is not None
            if group["maximize"]:
                gradient = -gradient
            if decay:
                gradient = gradient.add(weights, alpha=decay)
            state = self.optimizer.state.get(parameter, {})
            square, step = state.get("exp_avg_sq"), float(state.get("step", 0.0)) + 1
            size = (gradient * gradient).mul_(1 - b2**part)
            if square is not None:
                size.add_(square, alpha=b2**part)
            if group["amsgrad"] and state.get("max_exp_avg_sq") is not None:
                torch.maximum(size, state["max_exp_avg_sq"], out=size)
            size.div_(1 - b2 ** (part * step)).sqrt_().add_(group["eps"])
            weights.addcdiv_(gradient, size, value=-by)

    def _changes(self, group: Group, lr_scale: float, part: float) -> Group:
        b, b2 = group["betas"]
        rate = group["lr"] * lr_scale
        lr = rate * b**AHEAD if b else rate
        changed: Group = {"lr": lr, "betas": (b**part, b2**part)}
        if group.get("decoupled_weight_decay"):  # it goes by the part, and not by its root
            changed["weight_decay"] = group["weight_decay"] * math.sqrt(part) * float(rate / lr)
        return changed


AHEAD_FOR: dict[type[Optimizer], type[Steps]] = {
    torch.optim.SGD: SgdAhead,
    torch.optim.Adam: AdamAhead,
    torch.optim.AdamW: AdamAhead,
}
"""Not for subclasses, which may do anything."""


def steps_of(optimizer: Optimizer, rule: MomentumRule) -> Steps:
    """Choose how an optimizer's steps are done; those that have no way to look ahead do them as they are."""
    return AHEAD_FOR.get(type(optimizer), Steps)(optimizer) if rule == "ahead" else Steps(optimizer)


def geometric(b: float, n: float) -> float:
    """Return 1 + b + ... + b**(n-1), for any n: what n batches of the same gradient add up to."""
    return n if b == 1 else (1 - b**n) / (1 - b)


def _ahead(group: Group) -> float:
    """Nesterov's momentum looks one batch ahead itself."""
    return AHEAD + bool(group["nesterov"])


def _with_gradient(group: Group) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]
