"""Costs of a run in words, for `manyhands train --check`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from manyhands.contract import Strategy
from manyhands.costs import (
    TRANSIENT,
    CostFacts,
    Holder,
    MemoryUse,
    Transfer,
    between_hosts,
    known_bytes,
    sent_by,
)
from manyhands.events.units import size
from manyhands.hosts.view import View

HOLDERS: dict[Holder, str] = {
    "worker": "each worker",
    "server": "each server",
    "host": "shared by the members of a host",
    "writer": "the worker that saves, from its first checkpoint on",
}


def cost_rows(config: Strategy, facts: CostFacts, view: View) -> list[tuple[str, str]]:
    """Return labels and values: what a step sends, and what members need memory for."""
    transfers, uses = config.traffic(facts, view), config.memory(facts)
    rows = []
    if transfers is None:
        rows.append(("sent", f"unknown: {config.name} does not compute it"))
    else:
        rows += _sent(transfers, view)
    if uses is None:
        rows.append(("memory", f"unknown: {config.name} does not compute it"))
    else:
        rows += _memory(uses)
        unknown = [use.purpose for use in uses if use.num_bytes is None]
        rows.append(("", f"computed from the sizes of the model; unknown: {_list(unknown)}"))
    return rows


def _sent(transfers: Sequence[Transfer], view: View) -> list[tuple[str, str]]:
    network = [t for t in transfers if t.through == "network"]
    shared = [t for t in transfers if t.through == "memory"]
    rows = []
    by_member = sent_by(transfers)
    parts = []
    for members, role in ((view.workers, "worker"), (view.seats[view.world :], "server")):
        sent = [by_member.get(seat.name, 0) for seat in members]
        if any(sent):
            parts.append(f"{_range(sent)} by each {role}")
    total = ", ".join(parts) or "nothing"
    if parts:
        total += f" in a step; {size(known_bytes(network))} by all ({_purposes(network)})"
    rows.append(("sent", total))
    if unknown := [t.what for t in transfers if t.num_bytes is None]:
        rows.append(("", f"and {_list(unknown)}, which depend on the data"))
    if shared:
        rows.append(
            (
                "shared",
                f"{size(known_bytes(shared))} in a step, read in memory ({_purposes(shared)})",
            )
        )
    hosts = {seat.name: seat.host for seat in view.seats}
    if not view.one_host:
        crossing = between_hosts(network, hosts.__getitem__)
        leaving: dict[str, int] = {}
        for each in crossing:
            host = hosts[each.source]
            leaving[host] = leaving.get(host, 0) + (each.num_bytes or 0)
        most = max(leaving.values(), default=0)
        rows.append(
            (
                "hosts",
                f"{size(known_bytes(crossing))} of it between hosts; one host sends at most {size(most)}",
            )
        )
    return rows


def _memory(uses: Sequence[MemoryUse]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for holder, words in HOLDERS.items():
        for on in ("device", "host"):
            mine = [use for use in uses if use.of == holder and use.on == on and use.num_bytes]
            if not mine:
                continue
            what = ", ".join(f"{use.purpose} {size(use.num_bytes or 0)}" for use in mine)
            rows.append(("" if rows else "memory", f"{words}: {size(known_bytes(mine))} ({what})"))
    return rows


def _purposes(transfers: Iterable[Transfer]) -> str:
    found: dict[str, int] = {}
    for transfer in transfers:
        found[transfer.what] = found.get(transfer.what, 0) + (transfer.num_bytes or 0)
    return ", ".join(f"{what} {size(num_bytes)}" for what, num_bytes in found.items() if num_bytes)


def _range(sizes: Sequence[int]) -> str:
    low, high = size(min(sizes)), size(max(sizes))
    return low if low == high else f"{low} to {high}"


def _list(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words)) or TRANSIENT
