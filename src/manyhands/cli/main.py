"""`manyhands`: one thin file a verb."""

from __future__ import annotations

import argparse
import importlib
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from manyhands import __version__
from manyhands.cli import entry
from manyhands.cli.habits import check_set, fields_meant
from manyhands.errors import ManyhandsError, closest

VERBS = {
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
"""And their files. Only the one that is wanted is loaded: it should start at once."""

EXAMPLES = """\
examples:
  manyhands train examples/digits.py                     two workers, all-reduce
  manyhands train job.py --strategy single               the reference: one worker
  manyhands train job.py:Name --workers 4 --set lr=0.05  another job of the file, a hyperparameter
  manyhands resume runs/digits-20260101-120000           go on where it stopped
  manyhands list --sort best                             the runs here, the best first
  manyhands show runs/digits-20260101-120000             one of them: curves, best checkpoint, who was lost
  manyhands scale runs/digits-20260101-120000 --workers 4  more workers, while it goes on
  manyhands launch slurm job.py --nodes 4 --gpus 8       the file that starts it on a cluster
  manyhands doctor                                       what works on this machine
  manyhands lab run --hosts 3 -- python train.py         three hosts on this machine

exit codes: 0 done, 2 wrong use, 65 diverged, 75 preempted and saved, 130/143 stopped by
Ctrl-C/SIGTERM, otherwise that of the first member that failed.
"""


class Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.set_defaults(parser=self)  # the innermost one knows which flags there are

    def refuse(self, left_over: Sequence[str], words: Sequence[str]) -> NoReturn:
        """These were left over, of these words."""
        flags = [word.partition("=")[0] for word in left_over if word.startswith("-")]
        if not flags:
            self.error(f"{' '.join(left_over)!r} is one too many.")
        known = [name for action in self._actions for name in action.option_strings]
        settings = fields_meant(flags, words) if "--set" in known else {}
        if flags[0] in settings:
            typed = " ".join(f"--set {pair}" for pair in settings.values())
            name = settings[flags[0]].partition("=")[0]
            self.error(f"there is no flag {flags[0]}: {name} is a field of the job. Type  {typed}")
        self.error(f"there is no flag {flags[0]}{closest(flags[0], known)}")

    def error(self, message: str) -> NoReturn:
        """argparse says what is wrong; we add the closest verb and where help is."""
        wrong = re.fullmatch(
            r"argument ([A-Z]+): invalid choice: '(.*)' \(choose from (.*)\)", message
        )
        if wrong:
            noun, given, allowed = wrong.groups()
            hint = closest(given, re.findall(r"[\w-]+", allowed))
            message = f"there is no {noun.lower()} {given!r}{hint}"
        print(f"error: {message}\nSee: {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="manyhands",
        description="Many hands train one model: every way is one switch on the same job file.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"manyhands {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True, parser_class=Parser)
    words = sys.argv[1:] if argv is None else argv
    for name in VERBS.keys() & words[:1] or VERBS:
        verb = importlib.import_module(f"manyhands.cli.{VERBS[name]}")
        sub = verbs.add_parser(
            name,
            help=verb.HELP,
            description=verb.__doc__,
            epilog=verb.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_arguments(sub)
        sub.set_defaults(run=verb.run)
    try:
        check_set(words)
        arguments, left_over = parser.parse_known_args(argv)
        if left_over:
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


if __name__ == "__main__":
    sys.exit(entry.main())
