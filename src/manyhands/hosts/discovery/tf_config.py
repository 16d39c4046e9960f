"""`TF_CONFIG`, the JSON that describes a cluster to TensorFlow. Pure.

    {"cluster": {"chief": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222", ...], "ps": [...]},
     "task": {"type": "worker", "index": 0}}

| there | here |
| --- | --- |
| chief | the coordinator, which works too |
| worker | a worker; without a chief, the first is the coordinator |
| ps | a dedicated parameter server |
| evaluator | nothing to do: the workers evaluate. It may be missing from `cluster`, as in TensorFlow |

Other keys, such as `environment` and `rpc_layer`, are ignored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

from manyhands.errors import ClusterError, closest
from manyhands.hosts.discovery.values import once, split_address
from manyhands.hosts.spec import COORDINATOR, EVALUATOR, SERVER, WORKER, ClusterSpec, Entry

NAME = "TF_CONFIG"
ROLES = {"chief": COORDINATOR, "worker": WORKER, "ps": SERVER, "evaluator": EVALUATOR}
AT_MOST_ONE = ("chief", "evaluator")
TASK = '{"type": "worker", "index": 0}'
EXAMPLE = f'{{"cluster": {{"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}}, "task": {TASK}}}'
T = TypeVar("T")


def applies(environ: Mapping[str, str]) -> bool:
    return NAME in environ


def read(environ: Mapping[str, str], *, hostname: str = "") -> ClusterSpec:
    return parse(environ[NAME], hostname=hostname)


def parse(text: str, *, hostname: str = "") -> ClusterSpec:
    config = _load(text)
    cluster = _cluster(config)
    task, index = _task(config, cluster)
    entries: list[Entry] = []
    first = "chief" if "chief" in cluster else "worker"
    on_host: Counter[str] = Counter()
    for role in ROLES:
        for position, (host, port) in enumerate(cluster.get(role, ())):
            leads = role == first and position == 0
            entries.append(
                Entry(
                    name=f"{role}-{position}",
                    role=COORDINATOR if leads else ROLES[role],
                    rank=len(entries),
                    host=host,
                    port=port,
                    local_rank=on_host[host],
                )
            )
            on_host[host] += 1
    if task == "evaluator" and "evaluator" not in cluster:
        entries.append(Entry(name="evaluator-0", role=EVALUATOR, rank=len(entries), host=hostname))
    mine = next(entry for entry in entries if entry.name == f"{task}-{index}")
    chief = entries[0]
    return ClusterSpec(tuple(entries), host=chief.host, port=chief.port, source=NAME, mine=mine)


def _load(text: str) -> dict[str, Any]:
    if not text.strip():
        raise ClusterError(f"{NAME} is set, but empty. Write it like  {EXAMPLE}  or  unset {NAME}.")
    try:
        config = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ClusterError(
            f"{NAME} can't be read as JSON: {error}. Write it like  {EXAMPLE}"
        ) from None
    return _expect(config, dict, NAME, f'an object with "cluster" and "task", like  {EXAMPLE}')


def _expect(value: Any, kind: type[T], what: str, must_be: str) -> T:
    """Return a value that has to be of this type."""
    if not isinstance(value, kind):
        raise ClusterError(f"{what} is {_kind(value)}: it must be {must_be}")
    return value


Addresses = dict[str, list[tuple[str, int]]]


def _cluster(config: dict[str, Any]) -> Addresses:
    """Return the addresses by role, checked."""
    if "cluster" not in config:
        raise ClusterError(f'{NAME} has no "cluster": it must list the processes, like  {EXAMPLE}')
    must_be = f"an object of roles, like  {EXAMPLE}"
    given = _expect(config["cluster"], dict, f'"cluster" in {NAME}', must_be)
    cluster: Addresses = {}
    seen: dict[tuple[str, int], str] = {}
    for role, addresses in given.items():
        if role not in ROLES:
            raise ClusterError(
                f"{NAME} has the role {role!r}; allowed are {', '.join(ROLES)}"
                f"{closest(role, ROLES)}"
            )
        must_be = f'a list of addresses, like  "{role}": ["10.0.0.1:2222"]'
        _expect(addresses, list, f'"{role}" in {NAME}', must_be)
        if role in AT_MOST_ONE and len(addresses) > 1:
            raise ClusterError(
                f"{NAME} has {len(addresses)} addresses as {role!r}: only one is allowed. "
                + ("Make the others workers." if role == "chief" else "Take out the others.")
            )
        for position, address in enumerate(addresses):
            place = _address(role, position, address)
            if place in seen:
                raise ClusterError(
                    f"{NAME} has the address {address} twice, as {seen[place]} and as "
                    f"{role}[{position}]: two processes can't listen at one port."
                )
            seen[place] = f"{role}[{position}]"
            cluster.setdefault(role, []).append(place)
    if not cluster:
        raise ClusterError(f'"cluster" in {NAME} is empty: it must name at least one worker.')
    if "chief" not in cluster and "worker" not in cluster:
        raise ClusterError(
            f"{NAME} has no chief and no worker, only {', '.join(cluster)}: no process would train. "
            'Add  "worker": ["HOST:PORT"].'
        )
    return cluster


def _address(role: str, position: int, address: Any) -> tuple[str, int]:
    what = f"{role}[{position}] in {NAME}"
    try:
        return split_address(_expect(address, str, what, 'a text like  "10.0.0.1:2222"'))
    except ValueError as error:
        raise ClusterError(f"{what} is {address!r}: {error}.") from None


def _task(config: dict[str, Any], cluster: Addresses) -> tuple[str, int]:
    """Type and index of this process's task."""
    if "task" not in config:
        raise ClusterError(
            f'{NAME} has no "task": it must name the entry of this process, like  "task": {TASK}'
        )
    task = _expect(config["task"], dict, f'"task" in {NAME}', f"like  {TASK}")
    for key in ("type", "index"):
        if key not in task:
            raise ClusterError(f'"task" in {NAME} has no "{key}": it must be like  {TASK}')
    role = task["type"]
    if role not in ROLES if isinstance(role, str) else True:
        given = repr(role) if isinstance(role, str) else _kind(role)
        raise ClusterError(
            f"The task's type in {NAME} is {given}; allowed are {', '.join(ROLES)}"
            f"{closest(str(role), ROLES)}"
        )
    # TensorFlow leaves its one evaluator out of the cluster that trains.
    count = len(cluster.get(role, ())) or int(role == "evaluator")
    if not count:
        raise ClusterError(
            f'The task in {NAME} is a {role}, and "cluster" has none, only {", ".join(cluster)}. '
            f'Add  "{role}": ["HOST:PORT"]  to it, or give the task another type.'
        )
    return role, _index(task["index"], role, count)


def _index(given: Any, role: str, count: int) -> int:
    allowed = f"{role} goes from 0 to {count - 1}"
    if isinstance(given, str) and given.isascii() and given.isdecimal():
        given = int(given[:18])
    if not isinstance(given, int) or isinstance(given, bool):
        shown = repr(given) if isinstance(given, str) else _kind(given)
        raise ClusterError(
            f"The task's index in {NAME} is {shown}: it must be a whole number; {allowed}."
        )
    if not 0 <= given < count:
        raise ClusterError(f"The task's index in {NAME} is {given}: {allowed}.")
    return given


def _kind(value: Any) -> str:
    """Name the type of a value, for messages."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return "a text"
    return "a list" if isinstance(value, list) else "an object"
