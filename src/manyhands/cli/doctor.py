"""What this machine has, and whether what manyhands needs works here."""

from __future__ import annotations

import argparse

NAME = "doctor"
HELP = "what this machine has, what works, and what to fix"
EXAMPLES = "example:\n  manyhands doctor\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    return 0
