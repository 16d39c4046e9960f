"""A cluster file: TOML, or JSON of the same shape, the same on every host.

    port = 29600                      # of the coordinator; this is the default

    [[hosts]]
    name = "gpu-a"                    # the host's own name, or the value of  --as
    address = "10.0.0.1"              # where others reach it (default: its name)
    role = "coordinator"              # or worker, the default, server, evaluator
    devices = ["cuda:0", "cuda:1"]    # one for each member; without it: slots = 2

The entry of this host is the one that `--as` names, or the one whose name or address is the host name.
`parse` is pure; `read` opens the file.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.errors import ClusterError, closest
from manyhands.hosts.discovery.values import MAX_ENTRIES, MAX_PORT, is_host, once
from manyhands.hosts.spec import (
    COORDINATOR,
    DEFAULT_PORT,
    EVALUATOR,
    ROLES,
    WORKER,
    ClusterSpec,
    Entry,
)

KEYS = ("name", "address", "role", "rank", "slots", "devices", "port")
ELSEWHERE = {"chief": COORDINATOR, "master": COORDINATOR, "ps": "server"}
"""Other names of our roles."""
MAX_SLOTS = 1024
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")


def read(path: Path, *, name: str | None = None, hostname: str = "") -> ClusterSpec:
    """Read the cluster of a file; `name` is the value of `--as`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ClusterError(f"The cluster file {path} can't be read: {reason}.") from None
    try:
        as_json = path.suffix == ".json"
        data = json.loads(text, object_pairs_hook=once) if as_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ClusterError(f"The cluster file {path} can't be read as {kind}: {error}.") from None
    return parse(data, source=str(path), name=name, hostname=hostname)


def parse(
    data: Any, *, source: str = "cluster file", name: str | None = None, hostname: str = ""
) -> ClusterSpec:
    """Parse a cluster file. `mine` of the result is None if this host's entry is unknown."""
    if not isinstance(data, dict):
        raise ClusterError(f"{source} must be an object with a list of hosts.")
    _known(data, ("hosts", "port"), source)
    hosts = data.get("hosts")
    if not isinstance(hosts, list) or not hosts or not all(isinstance(h, dict) for h in hosts):
        raise ClusterError(
            f'{source} has no list of hosts. Write for each of them  [[hosts]]  and  name = "..."'
        )
    if len(hosts) > MAX_ENTRIES:
        raise ClusterError(f"{source} has {len(hosts)} hosts, and {MAX_ENTRIES} are allowed.")
    port = _number(data, "port", source, least=1, most=MAX_PORT, default=DEFAULT_PORT)
    entries = [_entry(host, f"hosts[{at}] of {source}") for at, host in enumerate(hosts)]
    for twice, times in Counter(entry.name for entry in entries).items():
        if times > 1:
            raise ClusterError(
                f"{source} has {times} hosts with the name {twice!r}: names tell them apart. For "
                f"several members on a host write one entry with  slots = {times}."
            )
    ranked = _rank(_elect(entries, source), hosts, source)
    first = ranked[0]
    assert port is not None
    return ClusterSpec(
        ranked,
        host=first.host,
        port=first.port or port,
        source=source,
        mine=_mine(ranked, source, name=name, hostname=hostname),
    )


def _entry(host: dict[str, Any], where: str) -> Entry:
    _known(host, KEYS, where)
    name = host.get("name")
    if not isinstance(name, str) or not name.strip() or name != name.strip():
        raise ClusterError(f'{where} has no name: write its host name, as  name = "gpu-a".')
    where = f"{name!r} in {where.partition(' of ')[2]}"
    address = host.get("address", name)
    if not isinstance(address, str) or not is_host(address):
        raise ClusterError(
            f"The address of {where} is {address!r}: it must be the name or the address of a host, "
            "without a port; a port is  port = 29600."
        )
    role = host.get("role", WORKER)
    if not isinstance(role, str) or role not in ROLES:
        meant = ELSEWHERE.get(str(role))
        hint = f"; did you mean {meant!r}?" if meant else closest(str(role), ROLES)
        raise ClusterError(f"The role of {where} is {role!r}; allowed are {', '.join(ROLES)}{hint}")
    devices = host.get("devices", [])
    if not isinstance(devices, list) or not all(
        isinstance(d, str) and _DEVICE.fullmatch(d) for d in devices
    ):
        raise ClusterError(
            f"The devices of {where} are {devices!r}: they must be a list of cpu, cuda or cuda:N, like  "
            'devices = ["cuda:0", "cuda:1"]'
        )
    least = 0 if role == COORDINATOR else 1
    if host.get("slots") == 0 and least:
        raise ClusterError(
            f"{where} has slots = 0, and is a {role}. Only the coordinator can have no slots: write  "
            'role = "coordinator"  there, too, or leave slots out.'
        )
    slots = _number(host, "slots", where, least=least, most=MAX_SLOTS, default=len(devices) or 1)
    assert slots is not None
    if devices and len(devices) != slots:
        raise ClusterError(
            f"{where} has slots = {slots} and {len(devices)} devices: each member has one device. "
            "Leave slots out."
        )
    return Entry(
        name=name,
        role=role,
        rank=-1,
        host=address.strip("[]"),
        port=_number(host, "port", where, least=1, most=MAX_PORT),
        local_rank=0,
        slots=slots,
        devices=tuple(devices),
    )


def _elect(entries: Sequence[Entry], source: str) -> list[Entry]:
    """Make one of them the coordinator: the one with that role, or the first worker."""
    named = [entry for entry in entries if entry.role == COORDINATOR]
    if len(named) > 1:
        names = ", ".join(entry.name for entry in named)
        raise ClusterError(
            f"{source} has {len(named)} coordinators: {names}. Only one is allowed; make the "
            'others  role = "worker".'
        )
    workers = [entry for entry in entries if entry.role == WORKER]
    if not named and not workers:
        raise ClusterError(
            f"{source} has no worker and no coordinator: no process would train. Remove the role of a "
            "host, to make it a worker."
        )
    chosen = (named or workers)[0]
    if not workers and not chosen.slots:
        raise ClusterError(
            f"{source} has no worker, and {chosen.name!r} has slots = 0: no process would train."
        )
    return [replace(e, role=COORDINATOR) if e is chosen else e for e in entries]


def _rank(
    entries: Sequence[Entry], hosts: Sequence[dict[str, Any]], source: str
) -> tuple[Entry, ...]:
    """Sort by rank: the given ranks, or the order of the file."""
    given = [
        _number(host, "rank", f"{entry.name!r} in {source}", least=0, most=len(hosts) - 1)
        for entry, host in zip(entries, hosts, strict=True)
    ]
    if all(rank is None for rank in given):
        ordered = sorted(entries, key=lambda e: (e.role != COORDINATOR, e.role == EVALUATOR))
        return tuple(replace(entry, rank=rank) for rank, entry in enumerate(ordered))
    holders: dict[int, Entry] = {}
    for entry, rank in zip(entries, given, strict=True):
        if rank is None:
            raise ClusterError(
                f"{entry.name!r} in {source} has no rank, and others have: give one to each, or to none."
            )
        if rank in holders:
            raise ClusterError(
                f"{holders[rank].name!r} and {entry.name!r} in {source} both have rank {rank}: ranks go "
                f"from 0 to {len(entries) - 1}, each once."
            )
        holders[rank] = entry
    ranked = tuple(replace(holders[rank], rank=rank) for rank in sorted(holders))
    first = next(entry for entry in ranked if entry.role == COORDINATOR)
    if first.rank != 0:
        raise ClusterError(
            f"{first.name!r} in {source} is the coordinator, and its rank is {first.rank}: it must be 0."
        )
    roles = [entry.role for entry in ranked]
    if EVALUATOR in roles and any(role != EVALUATOR for role in roles[roles.index(EVALUATOR) :]):
        raise ClusterError(
            f"{ranked[roles.index(EVALUATOR)].name!r} in {source} is an evaluator, which is not "
            "counted: its rank must come after all others."
        )
    return ranked


def _mine(
    entries: Sequence[Entry], source: str, *, name: str | None, hostname: str
) -> Entry | None:
    names = [entry.name for entry in entries]
    if name is not None:
        if name not in names:
            raise ClusterError(
                f"--as {name}: {source} has no host of that name; there are {', '.join(names)}"
                f"{closest(name, names)}"
            )
        return entries[names.index(name)]
    for mine in (
        [entry for entry in entries if entry.name == hostname],
        [entry for entry in entries if hostname and entry.host == hostname],
        [entry for entry in entries if hostname and _short(entry.name) == _short(hostname)],
        [entry for entry in entries if hostname and _short(entry.host) == _short(hostname)],
    ):
        if len(mine) == 1:
            return mine[0]
    return None


def _short(host: str) -> str:
    """Remove the domain; keep an address whole."""
    return host if re.fullmatch(r"[0-9.]+|.*:.*", host) else host.partition(".")[0].lower()


def _known(table: dict[str, Any], allowed: Sequence[str], where: str) -> None:
    for key in table:
        if key not in allowed:
            raise ClusterError(
                f"{where} has {key!r}; allowed are {', '.join(allowed)}{closest(key, allowed)}"
            )


def _number(
    table: dict[str, Any],
    key: str,
    where: str,
    *,
    least: int,
    most: int,
    default: int | None = None,
) -> int | None:
    value = table.get(key, default)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ClusterError(
            f"{key} of {where} is {value!r}: it must be a whole number from {least} to {most}."
        )
    return value
