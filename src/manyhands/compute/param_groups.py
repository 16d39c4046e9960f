"""The job's optimizer: built, checked against the model, and described.

An optimizer with parameters of another model trains nothing, and a parameter in no group never changes; torch
reports neither.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.embeddings.modules import ANCHOR
from manyhands.errors import JobError
from manyhands.events.units import plural
from manyhands.job import Job

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Each element's update depends on that element alone."""
MAX_NAMES = 5
"""Maximum number of parameters that are listed by name."""
HIDDEN = ("params", "param_names", "initial_lr", "lr", "fused", "foreach")
"""Settings of a group that are not described, or described elsewhere."""


def build_optimizer(job: Job, model: nn.Module) -> Any:
    """Call the job's optimizer() with the trainable parameters, and the model if it takes two arguments."""
    params = [p for p in model.parameters() if p.requires_grad]
    return job.optimizer(params, model) if takes_model(job) else job.optimizer(params)


def like(template: Optimizer, groups: Sequence[dict[str, Any]], **changed: Any) -> Optimizer:
    """Create an optimizer of the template's class and defaults for these groups. `changed`: arguments that
    differ."""
    cls = type(template)
    known = inspect.signature(cls.__init__).parameters
    arguments = {name: value for name, value in template.defaults.items() if name in known}
    return cls(groups, **(arguments | {k: v for k, v in changed.items() if k in known}))


def settings_in(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group, for the group of another optimizer."""
    of_parameters = ("params", "param_names", "initial_lr")
    return {key: value for key, value in group.items() if key not in of_parameters}


def takes_model(job: Job) -> bool:
    """Return true if optimizer() has a second argument without a default, or one called `model`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = inspect.signature(job.optimizer).parameters.values()
    second = [p for p in arguments if p.kind in kinds][1:2]
    return any(p.default is p.empty or p.name == "model" for p in second)


def check_optimizer(job: Job, model: nn.Module, optimizer: Optimizer) -> None:
    """Raise JobError unless the optimizer has exactly the trainable parameters of the model."""
    what = f"{type(job).__name__}.optimizer()"
    if foreign := foreign_parameters(model, optimizer):
        raise JobError(
            f"{what} has {foreign}, which would train nothing. Build it from its argument:  "
            "def optimizer(self, params): return torch.optim.SGD(params, lr=self.lr). For groups by name:  "
            "def optimizer(self, params, model)."
        )
    if left_out := untrained_parameters(model, optimizer):
        raise JobError(
            f"{what} leaves out {left_out}, which would never change. Put every parameter into a group; to "
            "leave one untrained, freeze it in model():  parameter.requires_grad_(False)"
        )


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether its parameters may be cut into blocks. False for subclasses, which may do anything."""
    return type(optimizer) in ELEMENTWISE


def foreign_parameters(model: nn.Module, optimizer: Optimizer) -> str:
    """Describe the parameters of the optimizer that are not in the model; empty if there are none."""
    own = {id(p) for p in model.parameters()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in given if id(p) not in own]
    if not foreign:
        return ""
    shapes = _some([str(tuple(p.shape)) for p in foreign])
    none = "" if len(foreign) < len(given) else " and none of the model's"
    return (
        f"{plural(len(foreign), 'parameter')} of shape {shapes} that the model does not have{none}"
    )


def untrained_parameters(model: nn.Module, optimizer: Optimizer) -> str:
    """Describe the trainable parameters of the model that are in no group; empty if there are none."""
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and id(p) not in given and name != ANCHOR
    ]
    return f"{plural(len(names), 'parameter')} of the model ({_some(names)})" if names else ""


def describe_optimizer(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, str]]:
    """Return labels and values: the optimizer's groups with their settings, and the frozen parameters."""
    names = {id(p): name for name, p in model.named_parameters()}
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    described = [f"{_sizes(group['params'])}: {_settings(optimizer, group)}" for group in groups]
    if len(groups) == 1:
        rows = [("optimizer", f"{kind}, {described[0]}")]
    else:
        rows = [("optimizer", f"{kind}, {len(groups)} groups")]
        for number, (group, what) in enumerate(zip(groups, described, strict=True), 1):
            some = _some([names.get(id(p), "?") for p in group["params"]])
            rows.append((f"group {number}", f"{what} ({some})" if some else what))
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    if frozen:
        rows.append(("frozen", f"{_sizes(list(frozen.values()))} ({_some(list(frozen))})"))
    return rows


def _some(words: Sequence[str]) -> str:
    more = [f"and {len(words) - MAX_NAMES} more"] if len(words) > MAX_NAMES else []
    return ", ".join([*words[:MAX_NAMES], *more])


def _sizes(parameters: Sequence[Tensor]) -> str:
    return f"{plural(len(parameters), 'tensor')}, {sum(p.numel() for p in parameters):,} numbers"


def _settings(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """Describe the learning rate, and settings that differ from the class's default or between groups."""
    usual = {n: p.default for n, p in inspect.signature(type(optimizer)).parameters.items()}
    shown = [f"lr {float(group.get('initial_lr', group['lr'])):g}"]
    for key in dict.fromkeys([*usual, *group]):
        if key not in group or key in HIDDEN:
            continue
        value = group[key]
        differs = value is not None and str(value) != str(usual.get(key, value))
        if differs or len({str(other.get(key)) for other in optimizer.param_groups}) > 1:
            shown.append(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(shown)
