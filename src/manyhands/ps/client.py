"""A worker's side of the parameter servers: pushes gradients, waits for the news."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import LinkError, LinkTimeout
from manyhands.ps.memory import Flat
from manyhands.ps.server import _bytes
from manyhands.wire import Credentials, Link, connect


class Client:
    def __init__(
        self,
        worker: str,
        *,
        addresses: Mapping[str, str],
        blocks: Mapping[str, Sequence[int]],
        params: Flat,
        grads: Flat,
        timeout_s: float,
        credentials: Credentials | None = None,
    ) -> None:
        self._blocks = {server: list(numbers) for server, numbers in blocks.items()}
        self._params = params
        self._grads = grads
        self._news = threading.Condition()
        self._version = dict.fromkeys(addresses, 0)
        self._got: dict[str, dict[int, int]] = {server: {} for server in addresses}
        self._lost: dict[str, str] = {}
        self._state: dict[int, dict[str, Tensor]] = {}
        self._state_done: set[str] = set()
        self._links: dict[str, Link] = {}
        for server, address in addresses.items():
            link = connect(address, credentials=credentials, timeout_s=timeout_s, peer=server)
            segment = grads.segment
            link.send(
                {"k": "enter", "worker": worker, "grads": segment.address if segment else None}
            )
            self._links[server] = link
            threading.Thread(
                target=self._listen, args=(server, link), name=f"news-{server}", daemon=True
            ).start()

    @property
    def bytes_sent(self) -> int:
        """Over the network; inside a host, nothing but a few words."""
        if self._grads.segment is not None:
            return 0
        return sum(link.bytes_sent for link in self._links.values())

    def push(self, seq: int, *, samples: float, total: float) -> None:
        """Tell every server that this worker's gradients of step `seq` are there."""
        head = {"k": "push", "seq": seq, "samples": samples, "total": total}
        for server, link in self._links.items():
            if self._grads.segment is not None:
                link.send(head)
                continue
            for number in self._blocks[server]:
                link.send({**head, "block": number}, _bytes(self._grads.block(number)))

    def wait(self, version: int, *, timeout_s: float) -> None:
        """Until every server has told of this version."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while behind := [s for s, v in self._version.items() if v < version]:
                for server in behind:
                    if server in self._lost:
                        raise LinkError(f"{server} is gone: {self._lost[server]}")
                if not self._news.wait(deadline - time.monotonic()):
                    raise LinkTimeout(
                        f"waited {timeout_s:.0f} s for version {version} of {', '.join(behind)}"
                    )

    def state(self, *, timeout_s: float) -> dict[int, dict[str, Tensor]]:
        """What the servers' optimizers remember, by block."""
        with self._news:
            self._state, self._state_done = {}, set()
        for link in self._links.values():
            link.send({"k": "state"})
        with self._news:
            done = self._news.wait_for(lambda: len(self._state_done) == len(self._links), timeout_s)
            if not done:
                missing = sorted(set(self._links) - self._state_done)
                raise LinkTimeout(f"waited {timeout_s:.0f} s for the state of {', '.join(missing)}")
            return self._state

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _listen(self, server: str, link: Link) -> None:
        try:
            while True:
                message = link.recv(place=self._place)
                self._hear(server, message.head, message.payload)
        except LinkError as error:
            with self._news:
                self._lost[server] = str(error)
                self._news.notify_all()

    def _place(self, head: Mapping[str, Any], nbytes: int) -> memoryview | None:
        """New parameters are received straight into the model."""
        if head.get("k") == "new" and "block" in head:
            return _bytes(self._params.block(int(head["block"])))
        return None

    def _hear(self, server: str, head: Mapping[str, Any], payload: memoryview | None) -> None:
        with self._news:
            if head["k"] == "new":
                version = int(head["version"])
                if payload is not None:
                    got = self._got[server]
                    got[int(head["block"])] = version
                    if len(got) < len(self._blocks[server]):
                        return
                    version = min(got.values())
                self._version[server] = version
            elif "done" in head:
                self._state_done.add(server)
            elif payload is not None:
                dtype = getattr(torch, head["dtype"])
                tensor = torch.frombuffer(bytearray(payload), dtype=dtype).reshape(head["shape"])
                self._state.setdefault(int(head["block"]), {})[head["name"]] = tensor
            self._news.notify_all()
