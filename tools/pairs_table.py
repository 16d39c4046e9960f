"""Writes the table of docs/strategies/pairs.md from what strategies and codecs declare.

python tools/pairs_table.py
"""

from __future__ import annotations

from pathlib import Path

from manyhands.strategies.pairs import markdown

PAGE = Path(__file__).parents[1] / "docs" / "strategies" / "pairs.md"
BEGIN = "<!-- Made by tools/pairs_table.py from what the strategies declare. -->\n"
END = "<!-- end of the table -->\n"


def with_table(page: str) -> str:
    """Return the page with the table of today."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE} has lost the comments around its table")
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    print(PAGE)
