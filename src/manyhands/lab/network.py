"""The network of a lab. The kernel holds all of its state.

Each host is a network namespace with a virtual cable (veth) to a switch, a bridge in its own namespace.
Nothing is connected to the machine's own network. Hosts and switch have static tables of Ethernet
addresses, so there is no ARP traffic and the counters show only what processes sent.

Cuts are silent: neither end may notice them.

    one host         its cable is unplugged at the switch; the host's own end stays up
    between two      each gets an unused Ethernet address for the other

Cost: about 0.1 s for three hosts, then nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.errors import LabError
from manyhands.lab.layout import INTERFACE, NOWHERE, SWITCH, LabLayout, shaping
from manyhands.lab.records import Record
from manyhands.lab.tools import batch, call

NAMESPACES = Path("/run/netns")
FILES = Path("/etc/netns")
"""Files that `ip netns exec` mounts over /etc, a folder for each namespace."""
WITHOUT_IPV6 = """
cd /proc/sys/net/ipv6/conf/default 2> /dev/null || exit 0
echo 1 > disable_ipv6
"""
"""For interfaces added later. With an IPv6 address they send packets even if no process does."""


@dataclass(frozen=True)
class Traffic:
    """Bytes on a host's interface, headers included."""

    sent_bytes: int
    received_bytes: int


def build(record: Record) -> None:
    layout = record.layout
    hosts = range(layout.num_hosts)
    for namespace in (layout.switch, *layout.namespaces):
        call("ip", "netns", "add", namespace)
        call("ip", "netns", "exec", namespace, "sh", "-c", WITHOUT_IPV6)
    batch("ip", layout.switch, _switch(layout))
    for index in hosts:
        plug(layout, index)
        batch("ip", layout.namespaces[index], _host(layout, index))
        _write_files(layout, index)
        _name(record, index)
    if record.bits is not None:
        rule = f"root {shaping(record.bits)}"
        batch("tc", layout.switch, [f"qdisc add dev {layout.port(i)} {rule}" for i in hosts])
        for index in hosts:
            batch("tc", layout.namespaces[index], [f"qdisc add dev {INTERFACE} {rule}"])


def remove(record: Record) -> None:
    """Remove all parts of it that exist. Its processes must be gone."""
    layout = record.layout
    for index in range(layout.num_hosts):
        if os.path.ismount(record.name_file(index)):  # pathlib's is_mount() is for folders only
            call("umount", str(record.name_file(index)))
    for namespace in (*layout.namespaces, layout.switch):
        shutil.rmtree(FILES / namespace, ignore_errors=True)
        if (NAMESPACES / namespace).exists():
            call("ip", "netns", "delete", namespace)
    record.forget()


def plug(layout: LabLayout, index: int) -> None:
    """Plug a host's cable into the switch."""
    port = layout.port(index)
    batch(
        "ip",
        layout.switch,
        [
            f"link set {port} master {SWITCH}",
            f"link set {port} type bridge_slave flood off learning off",
        ],
    )
    known = f"fdb replace {layout.hardware_address(index)} dev {port} master static"
    batch("bridge", layout.switch, [known])


def unplug(layout: LabLayout, index: int) -> None:
    batch("ip", layout.switch, [f"link set {layout.port(index)} nomaster"])


def set_link(layout: LabLayout, first: int, second: int, *, cut: bool) -> None:
    """Cut or restore the link between two hosts."""
    for here, there in ((first, second), (second, first)):
        batch("ip", layout.namespaces[here], [_neighbour(layout, there, cut=cut)])


def unplugged(layout: LabLayout) -> set[int]:
    """Return the hosts that are cut off from all others."""
    links = {link["ifname"]: link for link in _ask(layout.switch, "link", "show")}
    return {index for index in range(layout.num_hosts) if "master" not in links[layout.port(index)]}


def divided(layout: LabLayout) -> set[tuple[int, int]]:
    """Return the pairs of hosts that are cut from each other, the lower index first."""
    indices = {layout.address(index): index for index in range(layout.num_hosts)}
    found = set()
    for here, namespace in enumerate(layout.namespaces):
        for entry in _ask(namespace, "neighbour", "show", "nud", "permanent"):
            if entry.get("lladdr") == NOWHERE and entry["dst"] in indices:
                there = indices[entry["dst"]]
                found.add((min(here, there), max(here, there)))
    return found


def traffic(layout: LabLayout, index: int) -> Traffic:
    (link,) = _ask(layout.namespaces[index], "-statistics", "link", "show", INTERFACE)
    counts = link["stats64"]
    return Traffic(counts["tx"]["bytes"], counts["rx"]["bytes"])


def _ask(namespace: str, *words: str) -> list[dict[str, Any]]:
    if not (NAMESPACES / namespace).exists():
        raise LabError(f"{namespace} is gone: its lab was taken down.")
    found: list[dict[str, Any]] = json.loads(call("ip", "-n", namespace, "-json", *words) or "[]")
    return found


def _switch(layout: LabLayout) -> list[str]:
    # One that snoops on multicasts would send some itself.
    lines = [f"link add {SWITCH} type bridge mcast_snooping 0", f"link set {SWITCH} up"]
    for index, namespace in enumerate(layout.namespaces):
        far = f"name {INTERFACE} address {layout.hardware_address(index)} netns {namespace}"
        lines.append(f"link add {layout.port(index)} type veth peer {far}")
        lines.append(f"link set {layout.port(index)} up")
    return lines


def _host(layout: LabLayout, index: int) -> list[str]:
    return [
        "link set lo up",
        f"address add {layout.address(index)}/24 dev {INTERFACE}",
        f"link set {INTERFACE} up",
        *(_neighbour(layout, other) for other in range(layout.num_hosts) if other != index),
    ]


def _neighbour(layout: LabLayout, index: int, *, cut: bool = False) -> str:
    where = NOWHERE if cut else layout.hardware_address(index)
    return f"neighbour replace {layout.address(index)} lladdr {where} dev {INTERFACE} nud permanent"


def _write_files(layout: LabLayout, index: int) -> None:
    folder = FILES / layout.namespaces[index]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts").write_text(layout.hosts_file())
    if Path("/etc/resolv.conf").exists():
        # A name server could not be reached; without one, lookups fail at once.
        (folder / "resolv.conf").write_text("# There is no name server in a lab.\n")


def _name(record: Record, index: int) -> None:
    """Give a host its own name, kept alive by a mounted file as long as the lab exists."""
    held = record.name_file(index)
    held.touch()
    write = 'echo "$0" > /proc/sys/kernel/hostname'
    call("unshare", f"--uts={held}", "sh", "-c", write, record.layout.names[index])
