"""An argument parser that says what to type instead of a wrong word."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from manyhands.cli.habits import fields_meant
from manyhands.errors import closest


class Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.set_defaults(parser=self)  # the parser of the command itself, not its parents

    def refuse(self, left_over: Sequence[str], words: Sequence[str]) -> NoReturn:
        """End with an error about the words that no argument matched."""
        flags = [word.partition("=")[0] for word in left_over if word.startswith("-")]
        if not flags:
            self.error(f"unexpected argument {' '.join(left_over)!r}.")
        known = [name for action in self._actions for name in action.option_strings]
        dashes = "-- " if self.get_default("explain") else ""  # passes --set on
        settings = fields_meant(flags, words) if "--set" in known or dashes else {}
        if flags[0] in settings:
            typed = " ".join(f"--set {pair}" for pair in settings.values())
            name = settings[flags[0]].partition("=")[0]
            self.error(
                f"there is no flag {flags[0]}: {name} is a field of the job. Type  {dashes}{typed}"
            )
        # Compared without the dashes, which all flags have.
        long = [name[2:] for name in known if name.startswith("--")]
        hint = closest(flags[0].lstrip("-"), long).replace("'", "'--", 1)
        self.error(f"there is no flag {flags[0]}{hint}")

    def num_values(self, word: str) -> int | None:
        """Return how many of the next words are values of this flag; None if the word is no known flag."""
        flag, equals, _ = word.partition("=")
        action = self._option_string_actions.get(flag)
        if action is None or flag in ("-h", "--help"):
            return None
        return 0 if equals or action.nargs == 0 else 1

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, the closest allowed word and where to find help."""
        wrong = re.fullmatch(
            r"argument ([A-Z]+): invalid choice: '(.*)' \(choose from (.*)\)", message
        )
        if wrong:
            noun, word, allowed = wrong.groups()
            choices = re.findall(r"[\w-]+", allowed)
            hint = closest(word, choices)
            message = f"there is no {noun.lower()} {word!r}{hint}"
            if hint == ".":
                message += f" There are: {', '.join(choices)}."
        elif missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            message = f"{self.prog} needs {missing[1]}."
        print(f"error: {message}\nSee: {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)
