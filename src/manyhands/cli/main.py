"""`manyhands`: one thin file per command."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from manyhands import __version__
from manyhands.cli import entry
from manyhands.cli.habits import check_set
from manyhands.cli.parser import Parser
from manyhands.errors import ManyhandsError

if TYPE_CHECKING:
    from manyhands.coordinator.options import LaunchPlan

COMMANDS = {
    "train": "train",
    "resume": "resume",
    "scale": "scale",
    "list": "list_runs",
    "show": "show",
    "words": "words",
    "launch": "launch",
    "key": "key",
    "doctor": "doctor",
    "lab": "lab",
}
"""Command to module. Only the module of the command that was typed is imported, to start fast."""

EXAMPLES = """\
examples:
  manyhands train examples/digits.py                     two workers, all-reduce
  manyhands train job.py --strategy single               the reference: one worker
  manyhands train job.py:Name --workers 4 --set lr=0.05  another job in the file, a hyperparameter
  manyhands resume runs/digits-20260101-120000           continue where it stopped
  manyhands list --sort best                             the runs here, the best first
  manyhands show runs/digits-20260101-120000             one of them: curves, best checkpoint, lost members
  manyhands scale runs/digits-20260101-120000 --workers 4  more workers, while it trains
  manyhands launch slurm job.py --nodes 4 --gpus 8       the file that starts it on a cluster
  manyhands doctor                                       what works on this machine
  manyhands lab run --hosts 3 -- python train.py         three hosts on this machine

exit codes: 0 done, 2 wrong use, 65 diverged, 75 preempted and saved, 130/143 stopped by
Ctrl-C/SIGTERM, otherwise that of the first member that failed.
"""


def main(argv: Sequence[str] | None = None, *, launch_plan: LaunchPlan | None = None) -> int:
    """Run a command; return its exit code. `launch_plan`: how to start members, instead of as processes of
    this machine."""
    parser = Parser(
        prog="manyhands",
        description="Distributed training: every strategy is one switch on the same job file.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"manyhands {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    words = list(sys.argv[1:] if argv is None else argv)
    for name in COMMANDS.keys() & words[:1] or COMMANDS:
        command = importlib.import_module(f"manyhands.cli.{COMMANDS[name]}")
        sub = subparsers.add_parser(
            name,
            help=command.HELP,
            description=command.__doc__,
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, explain=None)
    try:
        check_set(words)
        own, passed = _split(words)
        arguments, left_over = parser.parse_known_args(own)
        arguments.passed, arguments.launch_plan = passed, launch_plan
        if left_over:
            if arguments.explain:
                arguments.explain(arguments.parser, words)
            arguments.parser.refuse(left_over, words)
        if signal.getsignal(signal.SIGINT) == entry.stop:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return int(arguments.run(arguments))
    except ManyhandsError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `manyhands list | head`
        return 0


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split off what follows --, for a command that passes it on."""
    if words[:1] != ["launch"] or "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


if __name__ == "__main__":
    sys.exit(entry.main())
