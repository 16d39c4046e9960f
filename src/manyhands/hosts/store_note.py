"""Reads or writes one note in a torch store: `python -m manyhands.hosts.store_note put|get HOST:PORT`.

`put` writes one line from standard input to the store. `get` prints the note each time it changes, until its
standard input closes, as it does when the parent process is gone.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from manyhands.threads import start_thread

KEY = "manyhands/coordinator"
CONNECT_S = 300.0
POLL_S = 0.2


def main() -> None:
    import os

    import torch.distributed as dist

    action, endpoint = sys.argv[1:]
    host, _, port = endpoint.rpartition(":")
    store = dist.TCPStore(
        host.strip("[]"), int(port), is_master=False, timeout=timedelta(seconds=CONNECT_S)
    )
    if action == "put":
        store.set(KEY, sys.stdin.read())
        return

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(0)

    start_thread(end_with_parent, name="parent", on_error=lambda error: os._exit(1))
    printed = None
    while True:
        if store.check([KEY]) and (note := store.get(KEY).decode()) != printed:
            printed = note
            print(note, flush=True)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
