"""Steps of an optimizer with parts of a batch, where each push is an update of its own. Pure.

Without rounds a push is a part f of a batch, such as a quarter with four workers. Its gradient is the mean
over that part, and its learning rate f times the job's, so the pushes of a batch move the weights as far as
one step. Two things remain to be corrected for an optimizer with momentum b:

    decay    A step of the optimizer multiplies momentum by b, so with n pushes a batch it would forget n
             times as fast. A push multiplies it by b**f instead, and adds (1 - b**f)/(1 - b) of the
             gradient: the pushes of a batch add what one step adds.
    ahead    A gradient is stale: other pushes move the weights between its computation and its update. Most
             of that movement is momentum, and known beforehand. So the weights that workers see are those
             that momentum alone will reach within a few batches, as Nesterov's momentum looks one ahead:

                 momentum  m := b**f m + (1 - b**f)/(1 - b) g
                 weights   w := w - f lr k (g + s b**f m),  k = 1/(1 - b + s b**f)

             With s = 1 and f = 1 this is Nesterov's momentum. With s = 1/2 they are ahead by 1.7 to 2 batches
             for b = 0.9 and above: a worker has at most two pushes in flight. A gradient moves the weights by
             1/(1 - b) of itself in total, as in a single process, whatever s is.

Hakimi et al. 2019 ("Taming Momentum in a Distributed Asynchronous Environment", DANA) look ahead too, with a
momentum for each worker. Decay by parts of a batch needs one momentum however many workers there are, so
nothing is lost or inherited when a worker comes or goes.

Adam's moments decay by b**f likewise. It divides a gradient by its size, to which noise contributes: the mean
of a part is noisier than that of a batch, by sqrt(1/f), and its step so much smaller. So its learning rate is
sqrt(f) times the job's, not f (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient
Algorithms").

Cost: none for SGD, whose own step does all of it, and one pass more over the parameters for Adam; no state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.compute.train_state import multiplied_lr
from manyhands.ps.staleness import MomentumRule

Group = dict[str, Any]

SHARE = 0.5
"""s above. A power of two, so that the momentum of a checkpoint, which is not scaled, has the same bits."""

CHUNK = 1 << 16
"""Numbers that several operations handle at a time, so that they stay in the cache."""


class Steps:
    """Steps as the optimizer does them, whatever part of a batch its gradients are."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, *, lr_scale: float, part: float) -> None:
        """Update the parameters that have a gradient, which is the mean over a part of a batch. `lr_scale`
        includes the part."""
        with multiplied_lr(self.optimizer, lr_scale):
            self.optimizer.step()

    def exported(self, state: Mapping[str, Any], group: Group) -> dict[str, Any]:
        """Return a parameter's state as the optimizer itself would have it."""
        return dict(state)

    def imported(self, state: Mapping[str, Any], group: Group) -> dict[str, Any]:
        """Undo `exported`, for state that may be another's."""
        return dict(state)


class StepsAhead(Steps, ABC):
    """Steps whose momentum decays by the part of a batch, of weights that are ahead by momentum."""

    def step(self, *, lr_scale: float, part: float) -> None:
        if part:
            with self._settings(lr_scale, part):
                self.optimizer.step()

    @abstractmethod
    def _changes(self, group: Group, lr_scale: float, part: float) -> Group:
        """Return the settings of a group for this step."""

    @contextmanager
    def _settings(self, lr_scale: float, part: float) -> Iterator[None]:
        groups = self.optimizer.param_groups
        changed = [self._changes(group, lr_scale, part) for group in groups]
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
    """Torch's own step with Nesterov's momentum, with the settings that make it the formula above. Its buffer
    is s m."""

    def _changes(self, group: Group, lr_scale: float, part: float) -> Group:
        rate = group["lr"] * lr_scale
        if not _looks_ahead(group):
            return {"lr": rate}
        for parameter in _with_gradient(group):
            state = self.optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                # Torch would begin with the whole gradient, as if it were a batch's.
                state["momentum_buffer"] = torch.zeros_like(parameter)
        b = group["momentum"]
        decay = b**part
        return {
            "lr": rate / (1 - b + SHARE * decay),
            "momentum": decay,
            "dampening": 1 - SHARE * (1 - decay) / (1 - b),
            "nesterov": True,
        }

    def exported(self, state: Mapping[str, Any], group: Group) -> dict[str, Any]:
        return _scaled(state, 1 / SHARE) if _looks_ahead(group) else dict(state)

    def imported(self, state: Mapping[str, Any], group: Group) -> dict[str, Any]:
        return _scaled(state, SHARE) if _looks_ahead(group) else dict(state)


class AdamAhead(StepsAhead):
    """Adam and AdamW. Their moments are means: (1 - b) times the sums above."""

    def step(self, *, lr_scale: float, part: float) -> None:
        super().step(lr_scale=lr_scale, part=part)
        for group in self.optimizer.param_groups if part else ():
            if group["betas"][0]:
                self._look_ahead(group, lr_scale, part)

    def _changes(self, group: Group, lr_scale: float, part: float) -> Group:
        b, b2 = group["betas"]
        kept = _kept(b, part)
        changed: Group = {
            "lr": group["lr"] * lr_scale / math.sqrt(part) * kept,  # `lr_scale` includes the part
            "betas": (b**part, b2**part),
        }
        if group["decoupled_weight_decay"]:  # it goes by the part, and not by its root
            changed["weight_decay"] = group["weight_decay"] * math.sqrt(part) / kept
        return changed

    def _look_ahead(self, group: Group, lr_scale: float, part: float) -> None:
        """Move the weights by the gradient itself, as far as they were not moved by momentum."""
        b, b2 = group["betas"]
        rate = float(group["lr"]) * lr_scale / math.sqrt(part) * (1 - _kept(b, part))
        for parameter in _with_gradient(group):
            assert parameter.grad is not None
            state = self.optimizer.state[parameter]
            square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
            root = math.sqrt(1 - b2 ** (part * float(state["step"])))
            flat = (
                each.view(-1).split(CHUNK) for each in (parameter.detach(), parameter.grad, square)
            )
            for weights, gradient, mean in zip(*flat, strict=True):
                if group["weight_decay"] and not group["decoupled_weight_decay"]:
                    decay = group["weight_decay"]
                    gradient = gradient.add(weights, alpha=-decay if group["maximize"] else decay)
                size = mean.sqrt().add_(group["eps"] * root)
                by = rate * root
                weights.addcdiv_(gradient, size, value=by if group["maximize"] else -by)


AHEAD_FOR: dict[type[Optimizer], type[Steps]] = {
    torch.optim.SGD: SgdAhead,
    torch.optim.Adam: AdamAhead,
    torch.optim.AdamW: AdamAhead,
}
"""Not for subclasses, which may do anything."""


def steps_of(optimizer: Optimizer, rule: MomentumRule) -> Steps:
    """Choose how an optimizer's steps are done; those that have no way to look ahead do them as they are."""
    return AHEAD_FOR.get(type(optimizer), Steps)(optimizer) if rule == "ahead" else Steps(optimizer)


def _looks_ahead(group: Group) -> bool:
    """Return whether there is momentum, of the usual kind."""
    return 0 < group["momentum"] < 1 and not group["dampening"]


def _kept(b: float, part: float) -> float:
    """Return the part of an update that is momentum's: in the formula above, k s b**f."""
    return SHARE * b**part / (1 - b + SHARE * b**part) if b else 1.0


def _scaled(state: Mapping[str, Any], factor: float) -> dict[str, Any]:
    buffer = state.get("momentum_buffer")
    return dict(state) if buffer is None else {**state, "momentum_buffer": buffer * factor}


def _with_gradient(group: Group) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]
