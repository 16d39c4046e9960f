"""Make several hosts on this machine, to try a job on a slow or broken network before renting a cluster.

Each host is a network namespace with its own host name and a virtual cable to one switch. Links have a
bandwidth, can be cut silently, and count their bytes. Hosts see each other and nothing else. Needs Linux
and root.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from manyhands.errors import Interrupted, UsageError
from manyhands.events.units import duration, plural, size
from manyhands.lab import Lab, LabHost
from manyhands.lab.lab import remove_all
from manyhands.lab.layout import bandwidth_text
from manyhands.lab.records import records
from manyhands.lab.run_all import run_on_all_hosts

HELP = "make several hosts on this machine, with links to slow down and to cut"
EXAMPLES = """\
examples:
  manyhands lab run --hosts 3 --bandwidth 100mbit -- python train.py
                                               once on every host, as torchrun would; then removes all
  manyhands lab up --hosts 3 --bandwidth 1gbit a lab that stays
  manyhands lab exec host-0 -- bash            a shell on a host
  manyhands lab cut host-1                     unplug it: packets are dropped silently
  manyhands lab cut host-0 host-2              only between these two
  manyhands lab heal                           undo all cuts
  manyhands lab status                         hosts, addresses, bytes, cuts
  manyhands lab down                           remove it, with all processes on its hosts

Each of these has its own --help:  manyhands lab run --help
"""
Action = Callable[[argparse.Namespace], int]
AddFlags = Callable[[argparse.ArgumentParser], None]
IMPOSSIBLE = ("latency", "delay", "jitter", "loss")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def action(
        name: str, act: Action, help: str, examples: str, *flags: AddFlags
    ) -> argparse.ArgumentParser:
        sub = actions.add_parser(
            name,
            help=help,
            description=f"{help[0].upper()}{help[1:]}.",
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(action=act)
        for add in flags:
            add(sub)
        return sub

    action("up", _up, "make a lab that stays until it is removed", UP, _add_size)
    shows = "show hosts, addresses, bytes and cuts of the labs here"
    action("status", _status, shows, "  manyhands lab status\n", _add_lab)
    execute = action("exec", _exec, "run a command on one host, in this terminal", EXEC, _add_lab)
    execute.add_argument("host", metavar="HOST", help="such as host-0")
    _add_command(execute)
    drops = "drop all packets of a host, or those between two hosts"
    cut = action("cut", partial(_change_links, Lab.cut), drops, CUT, _add_lab)
    cut.add_argument("host", metavar="A", help="such as host-0")
    cut.add_argument("other", metavar="B", nargs="?", help="cut only the link between A and B")
    undoes = "undo a cut, or all of them"
    heal = action("heal", partial(_change_links, Lab.heal), undoes, HEAL, _add_lab)
    heal.add_argument("host", metavar="A", nargs="?", help="heal the link of this host")
    heal.add_argument("other", metavar="B", nargs="?", help="heal the link between A and B")
    down = action("down", _down, "remove a lab, with all processes on its hosts", DOWN, _add_lab)
    down.add_argument(
        "--all", action="store_true", help="remove every lab, and what killed programs left behind"
    )
    once = "run a command once on every host of a new lab"
    action("run", _run, once, RUN, _add_size, _add_command)


UP = """\
  manyhands lab up --hosts 3
  manyhands lab up --hosts 8 --bandwidth 25gbit
"""
EXEC = """\
  manyhands lab exec host-0 -- bash
  manyhands lab exec host-1 -- python -m http.server 8000
"""
CUT = """\
  manyhands lab cut host-1           from all others
  manyhands lab cut host-0 host-2    from each other; both still reach the rest
"""
HEAL = """\
  manyhands lab heal                 everything
  manyhands lab heal host-1          its link; what is cut between two hosts stays cut
  manyhands lab heal host-0 host-2
"""
DOWN = """\
  manyhands lab down
  manyhands lab down --lab 1
  manyhands lab down --all
"""
RUN = """\
  manyhands lab run --hosts 3 -- hostname
  manyhands lab run --hosts 2 --bandwidth 100mbit -- python train.py --epochs 3

The command gets the variables that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and
the rest; host-0 is the master. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the lab's interface.

exit code: 0, or that of the first host that failed; the others are stopped then.
"""


def _add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hosts", type=int, default=2, metavar="N", help="number of hosts (default: 2)"
    )
    parser.add_argument(
        "--bandwidth",
        metavar="RATE",
        help="bandwidth of each host's link, in each direction, such as 100mbit or 1gbit (default: "
        "unlimited)",
    )
    for flag in IMPOSSIBLE:
        parser.add_argument(f"--{flag}", help=argparse.SUPPRESS)


def _add_lab(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lab", type=int, metavar="NUMBER", help="number of the lab, if there are several"
    )


def _add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND ...",
        help="the command and its arguments",
    )


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.action(arguments))


def _up(arguments: argparse.Namespace) -> int:
    lab = _new(arguments).up()
    _show(lab)
    print(f"\nA shell on a host:  manyhands lab exec{_which(lab)} host-0 -- bash")
    print(f"Remove it:          manyhands lab down{_which(lab)}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    numbers = [arguments.lab]
    if arguments.lab is None:
        numbers = [record.number for record in records() if not record.dead]
    if not numbers:
        print("There is no lab. Make one:  manyhands lab up --hosts 3")
    for place, number in enumerate(numbers):
        if place:
            print()
        _show(Lab.open(number))
    return 0


def _exec(arguments: argparse.Namespace) -> NoReturn:
    command = _command(arguments, f"exec {arguments.host}")
    Lab.open(arguments.lab).host(arguments.host).become(command)


def _change_links(change: Callable[..., None], arguments: argparse.Namespace) -> int:
    """Cut or heal links, and print all cuts."""
    lab = Lab.open(arguments.lab)
    change(lab, arguments.host, arguments.other)
    print(_cuts(lab))
    return 0


def _down(arguments: argparse.Namespace) -> int:
    if arguments.all:
        removed, kept = remove_all()
        for record in removed:
            print(f"removed lab {record.number}")
        for record in kept:
            print(f"kept lab {record.number}: {record.owner_text}")
        if not removed and not kept:
            print("There is no lab.")
        return 0
    kept = [record for record in records() if not record.dead and record.owner is None]
    if arguments.lab is None and len(kept) == 1:
        arguments.lab = kept[0].number  # the others end with their programs
    lab = Lab.open(arguments.lab)
    record = lab.record
    if record.owner is not None:
        raise UsageError(f"Lab {record.number} is {record.owner_text}: it ends with that process.")
    lab.down()
    print(f"removed lab {record.number}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    command = _command(arguments, "run")
    # Raise an exception, so that the commands on the hosts get SIGTERM before SIGKILL.
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        with _new(arguments) as lab:
            cells = max(len(host.name) for host in lab.hosts)

            def on_line(name: str, line: str) -> None:
                print(f"{name:{cells}} | {line}", flush=True)

            outcome = run_on_all_hosts(lab, command, on_line=on_line)
            print()
            for host in lab.hosts:
                ended = f"exit {outcome.codes[host.name]}"
                print(f"{host.name:{cells}}  {ended:8}  {_bytes(host)}")
            if outcome.failed:
                print(
                    f"error: {outcome.failed} failed first, with exit code {outcome.code}; the "
                    "others were stopped",
                    file=sys.stderr,
                )
            return outcome.code
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, _: Any) -> None:
    raise Interrupted("stopped by SIGTERM", exit_code=128 + number)


def _new(arguments: argparse.Namespace) -> Lab:
    for flag in IMPOSSIBLE:
        if getattr(arguments, flag) is not None:
            raise UsageError(
                f"--{flag}: a lab can't delay or lose single packets. That takes netem, which many "
                "kernels are built without. Use --bandwidth 100mbit, or  manyhands lab cut host-0."
            )
    return Lab(arguments.hosts, bandwidth=arguments.bandwidth)


def _command(arguments: argparse.Namespace, action: str) -> Sequence[str]:
    words: list[str] = arguments.command
    if words and words[0].startswith("-") and words[0] != "--":
        raise UsageError(
            f"{words[0]} would be the command: write flags first, then the command, such as  "
            f"manyhands lab {action} -- hostname"
        )
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise UsageError(
            f"There is no command. Write it after --:  manyhands lab {action} -- hostname"
        )
    return words


def _show(lab: Lab) -> None:
    record = lab.record
    print(
        f"lab {lab.number}: {plural(len(lab.hosts), 'host')}, {bandwidth_text(record.bits)}, "
        f"up for {duration(time.time() - record.made)}, {record.owner_text}"
    )
    cells = max(len(host.name) for host in lab.hosts)
    for host in lab.hosts:
        print(
            f"  {host.name:{cells}}  {host.address:14}  {_bytes(host)}  {len(host.processes())} running"
        )
    print(f"  {_cuts(lab)}")


def _cuts(lab: Lab) -> str:
    cuts = lab.cuts()
    return "cut: " + "; ".join(" - ".join(cut) for cut in cuts) if cuts else "nothing is cut"


def _bytes(host: LabHost) -> str:
    traffic = host.traffic()
    return f"sent {size(traffic.sent_bytes):>9}  received {size(traffic.received_bytes):>9}"


def _which(lab: Lab) -> str:
    """Return the flag that selects the lab, if there are several."""
    return f" --lab {lab.number}" if len(records()) > 1 else ""
