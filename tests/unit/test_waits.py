"""Waits of members for each other have a deadline, or one of the reasons below why they need none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import manyhands

HOME = Path(manyhands.__file__).parent
PACKAGES = (
    *("collectives", "ps", "hosts", "worker", "strategies"),
    *("coordinator", "control", "transport", "compute", "codecs", "embeddings", "events", "runs"),
)
WAITS = {"wait", "get", "join", "recv", "result", "accept", "communicate", "acquire"}
"""Methods that wait forever if they are called without arguments."""

LINK = "the link is closed when the peer dies, is unreachable (transport/keepalive.py), or the view ends"
WORK = "a thread that waits for work; its owner wakes it to end it"
PROCESS = "the whole life of a process, which was killed or may run as long as it likes"
OPERATION = "its group gives an operation a timeout"
SHORT = "what it waits for has deadlines of its own"

REASONS = {
    "collectives/between_hosts.py": {
        "self._thread.join()": "it was told to end, and waits for nothing else",
        "work.wait()": "it is complete",
    },
    "collectives/compressed.py": {"each.work.wait()": OPERATION},
    "collectives/group.py": {"made.barrier().wait()": OPERATION, "work.wait()": OPERATION},
    "collectives/shared_sums.py": {
        "self.all_reduce(torch.zeros(1), 'sum').wait()": OPERATION,
        "self.all_reduce(where, 'sum').wait()": OPERATION,
    },
    "collectives/reducer.py": {"self._notes_work.wait()": OPERATION, "work.wait()": OPERATION},
    "collectives/state_transfer.py": {"link.recv()": LINK, "self._over.wait()": SHORT},
    "compute/feed.py": {
        "future.result()": "the job's own code, which may take long; a hang is found by the coordinator "
        "(coordinator/stuck.py), and a process that dies is replaced"
    },
    "compute/loaders.py": {"self._process.wait()": PROCESS},
    "coordinator/coordinator.py": {"link.recv(FROM_MEMBER)": LINK, "member.handle.wait()": PROCESS},
    "coordinator/inbox.py": {
        "self._changed.wait_for(lambda: not self._used or self._used + num_bytes <= "
        "MAX_UNREAD_BYTES)": "the coordinator reads its inbox, which has a deadline for each of its waits"
    },
    "coordinator/outgoing.py": {
        "self._changed.wait_for(lambda: self._closed or self._waiting)": WORK
    },
    "events/sinks.py": {"self._changed.wait_for(lambda: self._events or self._closing)": WORK},
    "hosts/agent.py": {"handle.wait()": PROCESS},
    "hosts/launchers/local.py": {"self._process.wait()": PROCESS, "handle.wait()": PROCESS},
    "hosts/launchers/nodes.py": {"self._ended.wait()": PROCESS},
    "hosts/log_stream.py": {
        "self._changed.wait_for(lambda: self._closed or any(self._waiting.values()))": WORK
    },
    "hosts/member.py": {"self._link.recv(self._messages)": LINK},
    "hosts/ray/broker.py": {"self._inbox.get()": WORK},
    "hosts/ray/broker_client.py": {
        "self._messages.get()": "takes only what has arrived",
        "self._process.wait()": PROCESS,
        "self._reader.join()": "ends with the process, which has ended",
    },
    "hosts/rendezvous.py": {"self._process.wait()": PROCESS},
    "ps/acceptor.py": {"self._listener.accept()": WORK},
    "ps/rounds.py": {
        "self._has_news.wait()": WORK,
    },
    "ps/rows.py": {"self.grads[g.worker][g.slot].get()": "is not a wait"},
    "ps/server.py": {"self._acceptor.inbox.get()": WORK},
    "runs/dense.py": {"_without_rows.get()": "is not a wait"},
    "transport/counters.py": {
        "self._sock.recv(16)": "does not block: the socket is polled before, with a timeout",
    },
    "transport/listener.py": {
        "self._sock.accept()": "does not block: the loop has found a connection",
        "self.accept()": WORK,
        "self._thread.join()": SHORT,
    },
    "transport/tls.py": {
        "socket.socket.recv(sock, 1, socket.MSG_PEEK)": "does not block, like the rest of the handshake"
    },
}


def waits(tree: ast.AST) -> Iterator[str]:
    """Find calls that may wait forever."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, keywords = node.func.attr, {keyword.arg for keyword in node.keywords}
        timed = any(word and "timeout" in word for word in keywords)
        forever = name in WAITS and not node.args and not keywords
        forever |= name == "wait_for" and len(node.args) == 1 and not timed
        forever |= name == "recv" and not timed
        if forever:
            yield ast.unparse(node)


def found() -> dict[str, set[str]]:
    paths = [path for package in PACKAGES for path in sorted((HOME / package).rglob("*.py"))]
    return {str(p.relative_to(HOME)): set(waits(ast.parse(p.read_text()))) for p in paths}


def test_every_wait_has_a_deadline_or_a_reason() -> None:
    assert {file: calls for file, calls in found().items() if calls} == {
        file: set(calls) for file, calls in REASONS.items()
    }
