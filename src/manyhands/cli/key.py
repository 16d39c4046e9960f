"""Print a fresh key for a run over several hosts: 64 characters that nobody can guess.

Whoever has the key can take part in the run, read what its members tell each other, and make its members do
what he likes: treat it as a password. Give it to every process in a file that only you can read, or in the
variable MANYHANDS_KEY; never on a command line.
"""

from __future__ import annotations

import argparse

from manyhands.hosts.key import fresh_key

HELP = "print a fresh key for a run over several hosts"
EXAMPLES = """\
examples:
  (umask 077; manyhands key > run.key)                         a file for yourself only
  manyhands train job.py --on env --key-file run.key           on every host
  export MANYHANDS_KEY=$(manyhands key)                        or in the environment of all
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    print(fresh_key())
    return 0
