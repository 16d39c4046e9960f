"""`python -m manyhands`: the command, where its script is not on the path."""

from __future__ import annotations

import sys

from manyhands.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
