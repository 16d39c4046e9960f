"""Garbage at the ports of a run that trains: refused and counted, and the run is as if nothing had been.

This file is also the program of the attacker, which is a process of its own: it has no key of the run
and, on unix sockets, no more than the same user.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import LinkError
from manyhands.ps.acceptor import HELLO_S
from manyhands.testing import harness
from manyhands.testing.conformance import assert_once_an_epoch
from manyhands.transport import Authority, connect
from manyhands.transport.link import HAS_PAYLOAD, HEADER, MAGIC, VERSION, pack
from manyhands.transport.listener import HANDSHAKE_S

BARRAGE_S = 0.4
"""Of garbage at one port, as fast as it goes."""
ATTACK_S = 60.0
PATIENCE_S = max(HANDSHAKE_S, HELLO_S) + 5.0
"""How long a server may take to close a connection that said something wrong. Noise can look like the
beginning of a long hello: the server waits for the rest as long as for any other, and may be busy then."""
SILENT = 200
GREW_BYTES = 64 << 20
"""What members may need more at most: the connections of an attack; far less than what is announced."""
GIB = 1 << 30

GATED = """
import time
from dataclasses import dataclass
from pathlib import Path
from manyhands.testing.jobs import Regression

@dataclass
class Gated(Regression):
    pause_s: float = 0.12
    gate: str = ""

    def __post_init__(self):
        self._calls = 0

    def loss(self, output, batch):
        self._calls += 1
        for calls, sign in ((5, "begun"), (12, "over")):
            deadline = time.monotonic() + 60
            path = Path(self.gate, sign)
            while self._calls > calls and not path.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
        return super().loss(output, batch)
"""
"""A job whose middle is attacked, however long the attacker takes."""


# The attacker ---------------------------------------------------------------------------------


@dataclass
class Attacker:
    """What one process does to one address; `failures` says what was not refused."""

    target: str
    kind: str
    """tls, proof or unix."""
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    failures: list[str] = field(default_factory=list)

    def attack(self) -> None:
        self.words()  # before the noise: of so many reasons to refuse, only the first kinds are logged
        with contextlib.ExitStack() as stack:
            for _ in range(SILENT):
                stack.enter_context(self.knock())
            self.keys()
            deadline = time.monotonic() + BARRAGE_S
            while time.monotonic() < deadline:
                for assault in (self.noise, self.frames, self.sizes, self.cut, self.words):
                    assault()

    def knock(self) -> socket.socket:
        if self.kind == "unix":
            sock = socket.socket(socket.AF_UNIX)  # blocking: it waits where the queue is full
            sock.connect(self.target)
            sock.settimeout(PATIENCE_S)
            return sock
        host, _, port = self.target.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE_S)

    def throw(self, data: bytes, *, reset: bool = False) -> None:
        """Send this and go; `reset`: without a farewell."""
        with self.knock() as sock, contextlib.suppress(ConnectionError):
            sock.sendall(data)
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def expect_end(self, data: bytes, what: str) -> None:
        """Send this and stay: the other side must end it."""
        with self.knock() as sock, contextlib.suppress(ConnectionError):
            sock.sendall(data)
            try:
                while sock.recv(1 << 16):
                    pass
            except TimeoutError:
                self.failures.append(f"{what} was not refused")

    def noise(self) -> None:
        for _ in range(12):
            self.expect_end(self.dice.randbytes(self.dice.randint(64, 1 << 14)), "noise")

    def frames(self) -> None:
        """Good headers with heads of nonsense, and real frames with some bytes changed."""
        for _ in range(8):
            head = self.dice.randbytes(self.dice.randint(1, 400))
            self.expect_end(header(len(head)) + head, "a head of noise")
        for head in (b"[]", b"1", b'"x"', b"[" * 400, b'{"kind":' + b"9" * 400 + b"}", b"\xff\xfe"):
            self.expect_end(header(len(head)) + head, f"the head {head[:9]!r}")
        for real in self.real():
            for _ in range(6):
                changed = bytearray(real)
                for _ in range(self.dice.randint(1, 6)):
                    changed[self.dice.randrange(len(changed))] ^= 1 << self.dice.randrange(8)
                self.throw(bytes(changed))

    def real(self) -> list[bytes]:
        claim = {"kind": "Claim", "name": "worker-0", "nonce": "0" * 64, "proof": "f" * 64}
        enter = {
            "kind": "EnterView",
            "sender": "worker-0",
            "view": 1,
            "slots": [],
            "row_grads": [],
            "seen": 0,
        }
        said = [b"".join(pack(head)) for head in (claim, enter)]
        return [*said, self.client_hello()]

    def client_hello(self) -> bytes:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            context.wrap_bio(incoming, outgoing).do_handshake()
        return outgoing.read()

    def sizes(self) -> None:
        head = (
            b'{"kind":"EnterView","sender":"worker-0","view":1,"slots":[],"row_grads":[],"seen":0}'
        )
        for announced in (
            header(len(head), GIB) + head + bytes(1 << 16),
            header(len(head), 1 << 22) + head + bytes(1 << 16),
            header(len(head), (1 << 63) - 1) + head,
            header((1 << 32) - 1) + bytes(1 << 16),
        ):
            self.expect_end(announced, "a size beyond all limits")

    def cut(self) -> None:
        """Connections that die in the middle of a frame or a handshake."""
        for real in self.real():
            for _ in range(4):
                self.throw(real[: self.dice.randrange(1, len(real))])
                self.throw(real[: self.dice.randrange(1, len(real))], reset=True)

    def keys(self) -> None:
        """A certificate of another authority, another run's secret, neither."""
        if self.kind == "unix":
            return
        other = Authority.create("another run")
        ways: list[dict[str, Any]] = [
            {"credentials": other.issue("worker-0")},
            {"secret": "the secret of another run", "name": "worker-0"},
            {"insecure": True},
        ]
        for way in ways:
            try:
                connect(f"tcp://{self.target}", timeout_s=0.3, **way).close()
            except LinkError:
                continue
            self.failures.append(f"was let in with {sorted(way)}")
        if self.kind == "tls":
            # One that takes any certificate for granted, and shows its own.
            context = other.issue("worker-0").client_context()
            context.verify_mode = ssl.CERT_NONE
            with (
                contextlib.suppress(ConnectionError, ssl.SSLError),
                context.wrap_socket(self.knock()) as sock,
            ):
                if sock.recv(1):
                    self.failures.append("was let in with another run's certificate")

    def words(self) -> None:
        """On a unix socket anyone of the same user is let in; not as somebody who is there."""
        if self.kind != "unix":
            return
        for head in (
            {
                "kind": "EnterView",
                "sender": "worker-0",
                "view": 1,
                "slots": [],
                "row_grads": [],
                "seen": 0,
            },
            {
                "kind": "EnterView",
                "sender": "worker-1",
                "view": 1,
                "slots": [],
                "row_grads": [],
                "seen": 0,
            },
            {"kind": "OpenDataLink", "sender": "worker-1", "view": 1},
            {"kind": "PeerHello", "sender": "worker-1", "view": 1, "sums": [], "undo": []},
            {"kind": "PeerHello", "sender": "worker-0", "view": 1, "sums": [], "undo": []},
            {"kind": "Decide", "decision": {"version": 1, "contributions": []}},
            {"kind": "Go"},
        ):
            with connect(f"unix:{self.target}", timeout_s=PATIENCE_S) as link:
                link.send(head)
                answer = link.recv(timeout_s=PATIENCE_S).message
                if answer["kind"] != "Refused":
                    self.failures.append(f"{head} was answered with {answer}")


def header(head_bytes: int, payload_bytes: int | None = None) -> bytes:
    flags = 0 if payload_bytes is None else HAS_PAYLOAD
    return HEADER.pack(MAGIC, VERSION, flags, 0, head_bytes, payload_bytes or 0)


def ring(bells: list[str]) -> None:
    """Datagrams of noise; whose queue is full loses them."""
    dice = random.Random(2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        for _ in range(2000):
            with contextlib.suppress(BlockingIOError):
                sock.sendto(dice.randbytes(dice.randrange(100)), dice.choice(bells))


def main() -> None:
    order = json.load(sys.stdin)
    attackers = [Attacker(target, order["kind"]) for target in order["ports"]]
    Path(order["begun"]).touch()
    for attacker in attackers:
        if order["bells"]:
            ring(order["bells"])
        attacker.attack()
    json.dump([failure for attacker in attackers for failure in attacker.failures], sys.stdout)


# The run --------------------------------------------------------------------------------------


def listening_tcp(pid: int) -> Iterator[str]:
    """The addresses at which a process listens, by the kernel's tables."""
    inodes = _sockets_of(pid)
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            host, _, port = fields[1].partition(":")
            address = socket.inet_ntoa(struct.pack("=I", int(host, 16)))
            yield f"{address}:{int(port, 16)}"


def listening_unix(pid: int, *, bells: bool = False) -> Iterator[str]:
    """The unix sockets where a process takes connections; `bells`: where it takes datagrams."""
    inodes = _sockets_of(pid)
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) < 8 or fields[6] not in inodes:
            continue
        accepts = bool(int(fields[3], 16) & 0x10000)  # __SO_ACCEPTCON
        if fields[4] == "0002" if bells else accepts:
            yield fields[7]


def _sockets_of(pid: int) -> set[str]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(descriptor.readlink())
            if name.startswith("socket:["):
                found.add(name[8:-1])
    return found


def memory_of(pid: int) -> int:
    """Its own memory, without files that it shares with whoever else has mapped them."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    lines = [line.split() for line in text.splitlines()]
    return sum(1024 * int(f[1]) for f in lines if f[0] in ("Pss_Anon:", "Pss_Shmem:"))


class Watch:
    """The most memory that processes needed, beyond what they had in the beginning."""

    def __init__(self, pids: list[int]) -> None:
        self.grew: dict[int, int] = dict.fromkeys(pids, 0)
        self._before = {pid: memory_of(pid) for pid in pids}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            for pid, before in self._before.items():
                with contextlib.suppress(OSError):
                    self.grew[pid] = max(self.grew[pid], memory_of(pid) - before)


@lru_cache
def undisturbed(strategy: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        done = harness.train("Regression", Path(folder) / "run", strategy=strategy, workers=2)
        assert done.code == 0, done.err
        return done.losses


def attacked(run: Path, *flags: str, strategy: str, kind: str) -> harness.Finished:
    """A run that was attacked at all its ports while it trained."""
    job, gate = run.parent / "job.py", run.parent / "gate"
    job.write_text(GATED)
    gate.mkdir()
    arguments = harness.train_arguments(job, run, *flags, strategy=strategy, workers=2, gate=gate)
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(2)
        pids = list(running.pids().values())
        before = len(committed(running))
        with Watch(pids) as watch:
            attack = subprocess.run(
                [sys.executable, __file__],
                input=json.dumps({**order_for(pids, kind), "begun": str(gate / "begun")}),
                capture_output=True,
                text=True,
                timeout=ATTACK_S,
            )
        after = len(committed(running))
        (gate / "over").touch()
        assert running.process.poll() is None, f"over before the attack was: {running.logs()}"
        done = running.wait()
    assert attack.returncode == 0, attack.stderr
    assert json.loads(attack.stdout) == []
    assert max(watch.grew.values()) < GREW_BYTES, watch.grew
    assert after > before, "it went on under attack"
    return done


def order_for(pids: list[int], kind: str) -> dict[str, Any]:
    """What the attacker is to attack."""
    try:
        if kind == "unix":
            ports = [port for pid in pids for port in listening_unix(pid)]
            bells = [bell for pid in pids for bell in listening_unix(pid, bells=True)]
        else:
            ports, bells = [port for pid in pids for port in listening_tcp(pid)], []
    except OSError as error:
        pytest.skip(f"the kernel does not tell where processes listen: {error}")
    assert len(ports) == 2, "each worker serves"
    return {"kind": kind, "ports": ports, "bells": bells}


def committed(running: harness.RunningCommand) -> list[dict[str, Any]]:
    return [e for e in running.events() if e["event"] == "StepCommitted"]


def check(done: harness.Finished) -> None:
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert done.of("MemberFailed") == []
    assert len(done.of("MemberStarted")) == 2
    assert_once_an_epoch(done)


def logs(done: harness.Finished) -> list[str]:
    return [path.read_text() for path in sorted((done.run / "logs").glob("worker-*"))]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "flags", "why"),
    [
        ("tls", (), "certificate verify failed"),
        ("proof", ("--trust-network",), "does not prove the run's secret"),
    ],
    ids=["tls", "proof"],
)
def test_garbage_from_the_network(
    tmp_path: Path, kind: str, flags: tuple[str, ...], why: str
) -> None:
    strategy = "ps:sync(transport=tcp)"
    done = attacked(tmp_path / "run", *flags, strategy=strategy, kind=kind)
    check(done)
    assert done.losses == undisturbed(strategy)
    for log in logs(done):
        assert "refused a connection from 127.0.0.1:" in log
        assert why in log
        assert "Traceback" not in log


@pytest.mark.long
def test_garbage_while_nobody_waits_for_anybody(tmp_path: Path) -> None:
    done = attacked(tmp_path / "run", strategy="ps:async(transport=tcp)", kind="tls")
    check(done)
    for log in logs(done):
        assert "refused a connection from 127.0.0.1:" in log
        assert "Traceback" not in log


def test_garbage_from_the_same_host(tmp_path: Path) -> None:
    done = attacked(tmp_path / "run", strategy="ps:sync", kind="unix")
    check(done)
    assert done.losses == undisturbed("ps:sync")
    for log in logs(done):
        assert "refused a connection from process " in log
        assert len([line for line in log.splitlines() if " refused " in line]) < 100
        assert "which is connected already: process " in log
        assert "a payload of 1073741824 bytes, over the limit" in log
        assert "too many others have not sent their first message" in log
        assert "Traceback" not in log


if __name__ == "__main__":
    main()
