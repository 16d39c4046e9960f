"""What workers and other servers may say to a server, field by field. Pure.

Whoever has the run's key may speak, and may still be broken. So each message is checked when it comes in,
by the thread that reads it: the server's own thread gets none that is not as it should be. What is wrong
is Nonsense: nothing of it is used, the connection that it came by is closed, its sender is told why, and the
coordinator is asked to end it: else all others would wait for it.

A connection is for what its first word says: `enter` for words, `lane` for bulk, `peer` between servers.

What only the server's state can tell is checked there: which slots and runs there are (worker_session.py),
which push is due (decider.py), whose turn it is when a view begins (view_change.py), which update is under
way (updates.py).
What a server may decide, such as the numbers that it adds to its own blocks, the others believe.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from manyhands.errors import LinkError, ManyhandsError
from manyhands.ps.ledger import Contribution

PEER, ENTER, LANE = "peer", "enter", "lane"
REFUSED = "refused"
"""The kind of the last word to a worker that talks nonsense; it has the fields `why` and
`lost`: whether the weights are, and nobody is to blame."""

_LARGEST = 1 << 53
SPARSE_BYTES = 256 << 20
"""At most, of ids or gradients of rows in one message."""
_MANY = 16
"""More slots than any policy has."""
_TICKS = 1 << 16
"""More steps of a schedule than any batch is."""


MALFORMED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError),
)
"""What reading a message raises that has other fields than it should."""


class Nonsense(LinkError):
    """A message that no worker of ours sends."""


class Forgotten(Nonsense):
    """A worker has seen weights that no server of its view knows of: they are lost."""


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _counted(value: Any) -> bool:
    return _whole(value) and value > 0


def _amount(value: Any) -> bool:
    """A finite number, 0 or more; NaN is in no range."""
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max


def _positive(value: Any) -> bool:
    return _amount(value) and 0 < value < _LARGEST


def _factor(value: Any) -> bool:
    return _amount(value) and value <= 1


def _number(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _ticks(value: Any) -> bool:
    return _whole(value) and value <= _TICKS


def _fraction(value: Any) -> bool:
    """A part of one batch: the schedule is moved on by it."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and _whole(value[0])
        and _counted(value[1])
        and value[0] <= value[1]
    )


def _name(value: Any) -> bool:
    return isinstance(value, str)


def _addresses(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MANY
        and all(isinstance(each, str) and len(each) <= 100 for each in value)
    )


def _sparse(value: Any) -> bool:
    return _counted(value) and value <= SPARSE_BYTES


def _nothing(value: Any) -> bool:
    return type(value) is int and value == 0


def _record(value: Any) -> bool:
    return isinstance(value, dict)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _anything(value: Any) -> bool:
    return True


Check = Callable[[Any], bool]

_CONTRIBUTION: Mapping[str, Check] = {
    "worker": _name,
    "seq": _counted,
    "slot": _whole,
    "step": _whole,
    "part": _whole,
    "samples": _amount,
    "total": _positive,
    "share": _fraction,
    "staleness": _nothing,  # the lead's to say
    "scale": _factor,
    "lr_factor": _positive,
    "ticks": _ticks,
    "loss": _number,
}
"""A push is a list of these: a Contribution, in the order of its fields."""


def _push(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(_CONTRIBUTION)
        and all(check(each) for check, each in zip(_CONTRIBUTION.values(), value, strict=True))
    )


_FIRST: Mapping[str, Mapping[str, Check]] = {
    ENTER: {
        "worker": _name,
        "view": _whole,
        "slots": _addresses,
        "baskets": _addresses,
        "seen": _whole,
    },
    LANE: {"worker": _name, "view": _whole},
    PEER: {"server": _name, "view": _whole, "sums": _addresses, "undo": _addresses},
}
_SAYS: Mapping[str, Mapping[str, Mapping[str, Check]]] = {
    ENTER: {
        "push": {"seq": _counted, "push": _push, "began": _whole, "after": _whole},
        "who": {"seq": _whole},
        "buffers": {"tag": _whole},
        "basket": {"seq": _counted, "slot": _whole, "bytes": _sparse},
        "rows": {"tag": _whole, "table": _name, "bytes": _sparse},
        "table_state": {"tag": _whole, "since": _whole},
        "rest": {},
        "wake": {},
        "ends": {},
        "pull": {},
        "state": {},
    },
    LANE: {"run": {"seq": _counted, "slot": _whole, "i": _whole}},
}
_CARRIES = ("run", "buffers", "basket", "rows")


_TELLS: Mapping[str, Mapping[str, Check]] = {
    PEER: _FIRST[PEER],
    "status": dict.fromkeys(
        ("server", "host", "view", "prepared", "placement", "ledger", "replicas", "seen", "homes"),
        _anything,
    ),
    "plan": {"plan": _record},
    "block": {"n": _whole, "role": _name},
    "moved": {},
    "go": {},
    "had": _SAYS[ENTER]["push"],
    "decide": {"decision": _record},
    "norm": {"v": _counted, "value": _amount},
    "replica": {"v": _counted},
    "held": {"v": _counted, "owner": _name},
    "taken": {"v": _counted},
    "commit": {"v": _counted},
    REFUSED: {"why": _name, "lost": _flag},
}
"""Between servers."""
_MAY_TELL: Mapping[str, Mapping[str, Check]] = {
    "block": {"state": _name},
    "replica": {"i": _whole, "decision": _record, "anew": _flag},
}
"""Fields that are not in every message of a kind."""
Made = TypeVar("Made")


def check_first(head: Mapping[str, Any]) -> tuple[str, str]:
    """The kind of a connection and who is at its other end, by the first word there."""
    kind = _fitting(head, _FIRST)
    return kind, str(head["server" if kind == PEER else "worker"])


def check_said(line: str, who: str, head: Mapping[str, Any], *, payload: bool) -> str:
    """The kind of a later word of `who`, on a connection of the kind `line`."""
    kind = _fitting(head, _SAYS[line])
    if payload != (kind in _CARRIES):
        raise Nonsense(f"{kind!r} with{'' if payload else 'out'} a payload")
    if kind == "push":
        given = contribution_of(head["push"])
        if given.worker != who or given.seq != head["seq"] or head["after"] >= head["seq"]:
            raise Nonsense(f"push {head['seq']} of {who} is {reprlib.repr(head)}")
    return kind


def check_told(head: Mapping[str, Any]) -> str:
    """The kind of a message of another server."""
    return _fitting(head, _TELLS, _MAY_TELL)


def made_of(what: str, make: Callable[[], Made]) -> Made:
    """What a record that came over the network is of."""
    try:
        return make()
    except (ManyhandsError, *MALFORMED) as error:
        raise Nonsense(f"{what} that is none: {error!r}") from error


def contribution_of(record: Any) -> Contribution:
    """A push as its worker says it."""
    worker, seq, slot, step, part, samples, total, share, *others = record
    staleness, scale, factor, ticks, loss = others
    return Contribution(
        *(worker, seq, slot, step, part, float(samples), float(total), (share[0], share[1])),
        *(staleness, float(scale), float(factor), ticks, float(loss)),
    )


def _fitting(
    head: Mapping[str, Any],
    kinds: Mapping[str, Mapping[str, Check]],
    more: Mapping[str, Mapping[str, Check]] | None = None,
) -> str:
    kind = head.get("k")
    if not isinstance(kind, str) or kind not in kinds:
        raise Nonsense(f"{reprlib.repr(kind)}, where {', '.join(sorted(kinds))} may be said")
    optional = (more or {}).get(kind, {})
    fields = {**kinds[kind], **{name: c for name, c in optional.items() if name in head}}
    if head.keys() != {"k", *fields}:
        said = reprlib.repr(sorted(head.keys() - {"k"}))
        raise Nonsense(f"{kind!r} with the fields {said}, where {sorted(fields)} belong")
    for name, check in fields.items():
        if not check(head[name]):
            raise Nonsense(f"{kind!r} with {name} {reprlib.repr(head[name])}")
    return kind
