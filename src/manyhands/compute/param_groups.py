"""The job's optimizer: built, checked against the model, and described.

An optimizer that has other parameters than the model's trains nothing, and a parameter that no group has
never changes; torch says nothing of either.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.embeddings.modules import ANCHOR
from manyhands.errors import JobError
from manyhands.job import Job

MAX_NAMES = 5
"""Parameters that are listed by name."""


def build_optimizer(job: Job, model: nn.Module) -> Any:
    """What the job's optimizer() returns; it gets the model too if it takes two arguments."""
    params = [p for p in model.parameters() if p.requires_grad]
    return job.optimizer(params, model) if takes_model(job) else job.optimizer(params)


def takes_model(job: Job) -> bool:
    """If true, optimizer() is called with the parameters and the model: a second argument without a default,
    or one called `model`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = inspect.signature(job.optimizer).parameters.values()
    places = [p for p in arguments if p.kind in kinds]
    return len(places) > 1 and (places[1].default is places[1].empty or places[1].name == "model")


def check_optimizer(job: Job, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that has other parameters than the model's, or not all that can be trained."""
    what = f"{type(job).__name__}.optimizer()"
    if foreign := foreign_parameters(model, optimizer):
        raise JobError(
            f"{what} has {foreign}, which would train nothing. Build it over what it is given:  "
            "def optimizer(self, params): return torch.optim.SGD(params, lr=self.lr). Groups by name:  "
            "def optimizer(self, params, model)."
        )
    if left_out := untrained_parameters(model, optimizer):
        raise JobError(
            f"{what} leaves out {listed(left_out)}, which would never change. Add a group for "
            f"{'it' if len(left_out) == 1 else 'them'}, or freeze what is not to be trained, in model():  "
            "parameter.requires_grad_(False)"
        )


def foreign_parameters(model: nn.Module, optimizer: Optimizer) -> str:
    """In words: the parameters of the optimizer that are not the model's, if there are any."""
    mine = {id(p) for p in model.parameters()}
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    others = [p for p in listed if id(p) not in mine]
    if not others:
        return ""
    shapes = _some([str(tuple(p.shape)) for p in others])
    none = "" if len(others) < len(listed) else " and none of the model's"
    return f"{_count(others)} of shape {shapes} that the model does not have{none}"


def untrained_parameters(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of trainable parameters of the model that are in no group."""
    listed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and id(p) not in listed and name != ANCHOR
    ]


def describe_optimizer(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, str]]:
    """Labels and values: the optimizer's groups, what each is set to, and what is frozen."""
    names = {id(p): name for name, p in model.named_parameters()}
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    rows = []
    for number, group in enumerate(groups, 1):
        what = f"{_sizes(group['params'])}: {_settings(optimizer, group)}"
        if len(groups) == 1:
            rows.append(("optimizer", f"{kind}, {what}"))
            break
        if number == 1:
            rows.append(("optimizer", f"{kind}, {len(groups)} groups"))
        some = _some([names.get(id(p), "?") for p in group["params"]])
        rows.append((f"group {number}", f"{what} ({some})" if some else what))
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    if frozen:
        rows.append(("frozen", f"{_sizes(list(frozen.values()))} ({_some(list(frozen))})"))
    return rows


def listed(names: Sequence[str]) -> str:
    """Parameters by name, as a part of a sentence."""
    return f"{_count(names)} of the model ({_some(names)})"


def _count(values: Sequence[Any]) -> str:
    return f"{len(values)} parameter{'' if len(values) == 1 else 's'}"


def _some(words: Sequence[str]) -> str:
    more = [f"and {len(words) - MAX_NAMES} more"] if len(words) > MAX_NAMES else []
    return ", ".join([*words[:MAX_NAMES], *more])


def _sizes(parameters: Sequence[Tensor]) -> str:
    numbers = sum(p.numel() for p in parameters)
    return f"{len(parameters)} tensor{'' if len(parameters) == 1 else 's'}, {numbers:,} numbers"


def _settings(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """The learning rate, and what else is not as the optimizer's class has it, or not as in all groups."""
    usual = {n: p.default for n, p in inspect.signature(type(optimizer)).parameters.items()}
    hidden = ("params", "param_names", "initial_lr", "lr", "fused", "foreach")
    groups = optimizer.param_groups
    shown = [
        key
        for key in dict.fromkeys([*usual, *group])
        if key in group
        and key not in hidden
        and (
            _differ(group[key], usual.get(key, group[key]))
            or _vary(other.get(key) for other in groups)
        )
    ]
    rate = float(group.get("initial_lr", group["lr"]))
    return ", ".join([f"lr {rate:g}", *(f"{key} {_short(group[key])}" for key in shown)])


def _differ(value: Any, usual: Any) -> bool:
    return value is not None and str(value) != str(usual)


def _vary(values: Iterable[Any]) -> bool:
    return len({str(value) for value in values}) > 1


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
