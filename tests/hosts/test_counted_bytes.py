"""The bytes of a connection, as the kernel counts them, where packets are lost."""

from __future__ import annotations

import sys

from manyhands.testing.lab import Lab

MANY = 5_000_000
SHORT_QUEUE = 30_000
"""Of an interface, in bytes: it drops what does not fit."""
RECEIVE = """
import socket
listener = socket.create_server(("", 5000))
print("listens", flush=True)
connection, _ = listener.accept()
while connection.recv(1 << 20):
    pass
"""
SEND = """
import socket, struct, sys
from manyhands.collectives.connections import Connections, open_sockets
before = open_sockets()
connection = socket.create_connection((sys.argv[1], 5000))
connections = Connections(before)
made = connections.bytes_sent()
connection.sendall(bytes(MANY))
while_under_way = connections.bytes_sent() - made
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
with_repeats, = struct.unpack_from("Q", info, 200)
print(while_under_way, connections.bytes_sent() - made, with_repeats)
"""


def test_what_tcp_sends_again_counts_once(lab: Lab) -> None:
    here, there, _ = lab.hosts
    here.run(
        f"tc qdisc replace dev eth0 root tbf rate 200mbit burst 8k limit {SHORT_QUEUE}".split()
    )
    server = there.start([sys.executable, "-S", "-c", RECEIVE], stdout=-1, text=True)
    assert server.stdout.readline() == "listens\n"
    sent = here.run([sys.executable, "-c", SEND.replace("MANY", str(MANY)), there.name]).stdout
    under_way, ended, with_repeats = map(int, sent.split())
    assert server.wait(timeout=20) == 0
    assert with_repeats > MANY + 100_000, "nothing was sent again"
    assert 0 < under_way <= MANY, "what is acknowledged between two questions may be missing"
    assert ended == MANY + 1, "with the end of the stream"
