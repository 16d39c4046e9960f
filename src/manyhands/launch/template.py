"""Fill in the templates of launch files. Pure."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from manyhands.launch.flags import one_line

TEMPLATES = Path(__file__).with_name("templates")
PLACEHOLDER = re.compile(
    r"^(?P<indent> *)\{\{(?P<block>\w+)\}\}\n|\{\{(?P<inline>\w+)\}\}", re.MULTILINE
)


def fill(name: str, values: Mapping[str, object]) -> str:
    """Return the template with each `{{key}}` replaced by its value.

    A line that holds nothing but a placeholder takes all lines of the value, with that line's indentation;
    it disappears if the value is empty.
    """

    def value(match: re.Match[str]) -> str:
        if match["inline"]:
            return str(values[match["inline"]])
        text = str(values[match["block"]]).rstrip("\n")
        return textwrap.indent(text + "\n", match["indent"]) if text else ""

    text = (TEMPLATES / name).read_text(encoding="utf-8")
    return PLACEHOLDER.sub(value, text)


def shell_lines(words: Sequence[str]) -> list[str]:
    """Return the flags for `manyhands train`, quoted for a shell, one flag with its value on a line."""
    lines: list[list[str]] = []
    for word in words:
        one_line("The value", word)
        if word.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(word)
    return [shlex.join(line) for line in lines]
