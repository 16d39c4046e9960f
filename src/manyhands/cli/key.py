"""Print a new random key for a run over several hosts: 64 characters.

Anyone who has the key can join the run, read the messages of its members and control them: treat it as a
password. Pass it to every process in a file that only you can read, or in the variable MANYHANDS_KEY; never
on a command line.
"""

from __future__ import annotations

import argparse

from manyhands.hosts.key import fresh_key

HELP = "print a new key for a run over several hosts"
EXAMPLES = """\
examples:
  (umask 077; manyhands key > run.key)                         a file that only you can read
  manyhands train job.py --on env --key-file run.key           on every host
  export MANYHANDS_KEY=$(manyhands key)                        or in the environment of every process
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    print(fresh_key())
    return 0
