"""What the writers of launch files share: words for a shell, and what is refused. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from manyhands.errors import UsageError

Flags = Sequence[Sequence[str]]
"""Of `manyhands train`, each with its value: [["--workers", "4"], ["--quiet"]]."""


def one_line(flag: str, text: str) -> str:
    """A value that can stand in a file: anything but line breaks and other control characters."""
    if not text.strip():
        raise UsageError(f"{flag} is empty.")
    if not text.isprintable():
        raise UsageError(f"{flag} {text!r}: line breaks and control characters can't be passed on.")
    return text


def matching(flag: str, text: str, pattern: str, example: str) -> str:
    """A value that has to look like something."""
    if not re.fullmatch(pattern, text):
        raise UsageError(f"{flag} {text!r}: it must look like {example}.")
    return text


def at_least(flag: str, value: int, least: int) -> int:
    if value < least:
        raise UsageError(f"{flag} {value}: it must be at least {least}.")
    return value


def quoted(flags: Flags) -> list[str]:
    """Each flag with its value, quoted for a shell."""
    for words in flags:
        for word in words[1:]:
            one_line(words[0], word)
    return [shlex.join(words) for words in flags]
