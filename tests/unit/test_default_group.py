"""None of our code uses torch's default group: in `mh.join()` it is the user's. One module makes one, for
those of torch's own pieces that need it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

import manyhands

HOME = Path(manyhands.__file__).parent
FILES = sorted({*HOME.rglob("*.py")} - {HOME / "collectives" / "default_group.py"})
GROUPS = ("group", "process_group", "pg")
"""Names of the parameter that is the default group if nobody gives another."""
MAKES = {"init_process_group", "new_group", "new_subgroups", "split_group"}
"""Makes the default group, or a part of it."""
OBJECTS = {"group", "GroupMember"}


@cache
def place_of_group(name: str) -> int | None:
    """Return the position of a torch function's argument that may be left to be the default group; None if it
    has no such argument."""
    try:
        parameters = list(inspect.signature(getattr(dist, name)).parameters.values())
    except (AttributeError, TypeError, ValueError):
        return None
    for place, parameter in enumerate(parameters):
        if parameter.name in GROUPS and parameter.default is None:
            return place
    return None


def uses(tree: ast.AST) -> Iterator[str]:
    """Find uses of the default group. Functions of torch.distributed are recognized by their names."""
    modules = {"dist", "torch.distributed"}
    direct = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules |= {n.asname for n in names if n.name == "torch.distributed" and n.asname}
            case ast.ImportFrom(module="torch.distributed", names=names):
                direct |= {alias.name for alias in names}
            case ast.ImportFrom(module="torch.distributed.distributed_c10d", names=names):
                direct |= {alias.name for alias in names}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if ast.unparse(value) in modules:
                if name in OBJECTS:
                    yield f"line {node.lineno}: {name}"
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                if ast.unparse(value) in modules and takes_the_default(node, name):
                    yield f"line {node.lineno}: {name}"
            case ast.Call(func=ast.Name(id=name)):
                if name in direct and takes_the_default(node, name):
                    yield f"line {node.lineno}: {name}"
    for name in sorted(direct & (OBJECTS | {"_get_default_group", "_world"})):
        yield f"import of {name}"


def takes_the_default(call: ast.Call, name: str) -> bool:
    if name in MAKES:
        return True
    place = place_of_group(name)
    given = len(call.args) > (place or 0) or any(k.arg in GROUPS for k in call.keywords)
    return place is not None and not given


def test_nothing_uses_torchs_default_group() -> None:
    found = [
        f"{path.relative_to(HOME)} {what}"
        for path in FILES
        for what in uses(ast.parse(path.read_text()))
    ]
    assert not found, "exchange tensors through the Group of the view (collectives/group.py)"


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed as dist; dist.all_reduce(t)",
        "import torch.distributed as td; td.broadcast(t, 0)",
        "import torch; torch.distributed.barrier()",
        "import torch.distributed as dist; dist.get_rank()",
        "import torch.distributed as dist; dist.destroy_process_group()",
        "import torch.distributed as dist; dist.init_process_group('gloo')",
        "import torch.distributed as dist; dist.new_group([0, 1])",
        "import torch.distributed as dist; dist.group.WORLD",
        "from torch.distributed import all_gather; all_gather(parts, t)",
        "from torch.distributed.distributed_c10d import _get_default_group",
    ],
)
def test_the_rule_finds_violations(code: str) -> None:
    assert list(uses(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed as dist; dist.all_reduce(t, group=mine)",
        "import torch.distributed as dist; dist.destroy_process_group(mine)",
        "import torch.distributed as dist; dist.ProcessGroupGloo(store, 0, 2)",
        "import torch.distributed as dist; dist.is_nccl_available()",
        "group.all_reduce(t); self.broadcast(t)",
    ],
)
def test_groups_of_ones_own_are_fine(code: str) -> None:
    assert not list(uses(ast.parse(code)))
