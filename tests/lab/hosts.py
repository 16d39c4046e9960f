"""Short programs for the hosts of a lab, and what exists of a lab."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from manyhands.lab import network, records
from manyhands.testing.lab import LabHost

WITHIN_S = 20.0


def record_of(number: int) -> records.Record:
    """Return the record of an existing lab."""
    return next(r for r in records.records() if r.number == number)


def left_over(record: records.Record) -> list[str]:
    """Return what is left of a lab; nothing if another program reuses its number."""
    number = record.number
    if any(r.number == number and r != record for r in records.records()):
        return []
    prefix = f"manyhands-{number}-"
    namespaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    files = list(network.FILES.glob(f"{prefix}*"))
    files += records.FOLDER.glob(f"lab-{number}*")
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    here = (prefix, f"/lab-{number}/")
    return [
        *(line for line in namespaces.splitlines() if line.startswith(prefix)),
        *(str(path) for path in files),
        *(line for line in mounts if any(part in line for part in here)),
    ]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "that did not come"
        time.sleep(0.01)


PORT = 5000
ECHO = """
import socket, threading
def echo(one):
    while data := one.recv(65536):
        one.sendall(data)
listener = socket.create_server(("", PORT))
print("listens", flush=True)
while True:
    threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()
"""
TALK = """
import socket, sys
try:
    link = socket.create_connection((sys.argv[1], PORT), timeout=float(sys.argv[2]))
except OSError as error:
    sys.exit(type(error).__name__)
print("connected", flush=True)
for line in sys.stdin:
    within_s, word = line.split()
    link.settimeout(float(within_s))
    try:
        if word != "-":
            link.sendall(word.encode())
        answer = link.recv(65536).decode()
    except OSError as error:
        answer = type(error).__name__
    print(answer, flush=True)
"""


def python(code: str, *words: str) -> list[str]:
    """A short program for a host. Without site packages it starts three times as fast."""
    return [sys.executable, "-S", "-c", code.replace("PORT", str(PORT)), *words]


def listen(host: LabHost) -> subprocess.Popen[str]:
    """Whatever is sent there comes back."""
    server = host.start(python(ECHO), stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline() == "listens\n"
    return server


def reach(*ways: tuple[LabHost, str], within_s: float = 5.0) -> list[str]:
    """For each way, all at once: "connected", or the name of the error."""
    pipe = subprocess.PIPE
    dialling = [
        here.start(
            python(TALK, there, str(within_s)),
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for here, there in ways
    ]
    return [process.communicate(timeout=WITHIN_S)[0].strip() for process in dialling]


class Talk:
    """A connection from one host to another that stays open."""

    def __init__(self, here: LabHost, there: LabHost) -> None:
        pipe = subprocess.PIPE
        command = python(TALK, there.name, "5")
        self._process = here.start(command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout.readline() == "connected\n"

    def say(self, word: str, within_s: float) -> str:
        """What comes back, or the name of the error. "-" says nothing and only listens."""
        self._process.stdin.write(f"{within_s} {word}\n")
        self._process.stdin.flush()
        return str(self._process.stdout.readline().strip())
