"""Several processes of one script that begin together, for contenders without a launcher.

The script is started once for each role, as `SCRIPT MODE LOAD --role ROLE --folder FOLDER`. A process prints
"ready", waits for a line on standard input, and prints its result as one line of JSON. If one ends without a
result, all are ended.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from typing import Any

from ps_load import Load


def run_crew(mode: str, load: Load, roles: list[str]) -> list[Any]:
    """The results, in the order of the roles. The deadline is the caller's."""
    with tempfile.TemporaryDirectory(prefix="crew-", dir="/dev/shm") as folder:
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, sys.argv[0], mode, load.to_json()),
                    *("--role", role, "--folder", folder),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ
                | {
                    "OMP_NUM_THREADS": str(load.threads),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "TP_SOCKET_IFNAME": "lo",
                },
            )
            for role in roles
        ]
        try:
            return _lead(processes, roles)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _lead(processes: list[subprocess.Popen[str]], roles: list[str]) -> list[Any]:
    heard: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for number, process in enumerate(processes):
        threading.Thread(target=_listen, args=(number, process, heard), daemon=True).start()
    ready: set[int] = set()
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        number, line = heard.get()
        if line == "ready\n":
            ready.add(number)
            if len(ready) == len(processes):
                for process in processes:
                    assert process.stdin is not None
                    process.stdin.write("go\n")
                    process.stdin.flush()
        elif line.startswith("{"):
            results[number] = json.loads(line)
        elif not line and number not in results:
            sys.exit(f"{roles[number]} ended without a result")
    return [results[number] for number in range(len(processes))]


def _listen(
    number: int, process: subprocess.Popen[str], heard: queue.SimpleQueue[tuple[int, str]]
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        heard.put((number, line))
    heard.put((number, ""))


def begin_together() -> None:
    """In a process of the crew: returns when all are ready."""
    print("ready", flush=True)
    sys.stdin.readline()


def tell(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)
