"""The broker: a process beside the coordinator that reserves slots in Ray and holds an actor in each.

It is the only process that loads Ray: Ray may end a process that has lost its cluster, and has its own
threads, signal handlers and output. Coordinator and broker exchange one message a line (messages.py). At the
end of the run, or when standard input ends because the coordinator is gone, it releases every actor and
group.

Ray ends actors and groups when their driver is gone, so a broker that is killed leaves none either.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from manyhands.errors import UsageError
from manyhands.hosts.ray.actor import actor_class
from manyhands.hosts.ray.messages import (
    TO_BROKER,
    ActorDied,
    ActorEnd,
    ActorRefused,
    ActorTask,
    AgentJoined,
    AgentLost,
    ConnectRay,
    EndBroker,
    FreeResources,
    RayConnected,
    RayFailed,
    ReleaseSlot,
    ReserveSlots,
)
from manyhands.hosts.ray.resources import CLIENT, LOCAL, RayNode, RaySlot, no_clients
from manyhands.threads import describe, start_thread
from manyhands.transport.fields import encode, read, write

CONNECT_S = 5.0
"""Time limit for Ray's head node to accept a connection."""
POLL_S = 0.2
FREE_EVERY_S = 2.0
"""Interval of reports of free resources, while slots are missing."""
RETRY_S = 0.5
MAX_RETRY_S = 8.0
"""Delay before an actor that ended by itself is replaced; doubles each time."""
END_S = 3.0
"""Time for agents to return after the end, before their actors are killed."""
STUCK_S = 10.0
"""Time from the end of standard input to the end of this process, even if Ray hangs."""
STORE_BYTES = 100 << 20
"""Object store of a cluster that is started here; this package puts nothing into it."""


@dataclass
class ActorSlot:
    """A reserved slot and its actor."""

    slot: RaySlot
    group: Any
    index: int
    actor: Any = None
    result: Any = None
    joined: bool = False
    """If true, its agent has connected to the coordinator."""
    start_at: float | None = None
    """Time to start an actor; None: it has one."""
    retry_s: float = RETRY_S


class Broker:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Messages of the coordinator; None: it is gone."""
        self._slots: dict[int, ActorSlot] = {}
        """By rank."""
        self._request: ReserveSlots | None = None
        self._actor_class: Any = ray.remote(actor_class())
        self._folder: Path | None = None
        self._reported_at = 0.0

    def run(self) -> int:
        start_thread(self._read, name="read", on_error=self._on_unreadable)
        request = self._inbox.get()
        if not isinstance(request, ConnectRay):
            return 0
        try:
            self._connect(request)
        except UsageError as error:
            self._send(RayFailed(str(error)))
            return 1
        try:
            while True:
                with suppress(queue.Empty):
                    if not self._handle(self._inbox.get(timeout=POLL_S)):
                        return 0
                self._check_actors()
                self._start_actors()
        finally:
            self._end()

    # Messages of the coordinator --------------------------------------------------------------

    def _read(self) -> None:
        for line in sys.stdin:
            self._inbox.put(TO_BROKER.read(json.loads(line)))
        self._coordinator_gone()

    def _on_unreadable(self, error: BaseException) -> None:
        """Release everything: the coordinator's messages can't be read any more."""
        print(describe(error), file=sys.stderr, flush=True)
        self._coordinator_gone()

    def _coordinator_gone(self) -> None:
        self._inbox.put(None)
        time.sleep(STUCK_S)
        os._exit(1)

    def _handle(self, message: Any) -> bool:
        """Handle a message; false at the end."""
        match message:
            case ReserveSlots(slots, num_together):
                self._request = message
                if num_together:
                    self._reserve(slots[:num_together])
                for slot in slots[num_together:]:
                    self._reserve([slot])
            case ReleaseSlot(rank) if rank in self._slots:
                self._release(rank)
            case AgentJoined(rank) if rank in self._slots:
                self._slots[rank].joined = True
                self._slots[rank].retry_s = RETRY_S
            case AgentLost(rank) if rank in self._slots:
                if self._slots[rank].joined:  # else Ray reported it before, and there is another
                    self._replace(self._slots[rank])
            case EndBroker():
                self._await_agents()
                return False
            case None:
                return False
        return True

    def _send(self, message: Any) -> None:
        with suppress(BrokenPipeError):  # standard input ends, too
            self._out.write(encode(message) + "\n")
            self._out.flush()

    # The cluster ------------------------------------------------------------------------------

    def _connect(self, request: ConnectRay) -> None:
        address = request.address or os.environ.get("RAY_ADDRESS", "") or "auto"
        if address.startswith(CLIENT):
            raise UsageError(f"RAY_ADDRESS: {no_clients(address)}")
        if address not in ("auto", LOCAL):
            check_port(address)
        common: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "namespace": "manyhands",
        }
        if request.ship:
            common["runtime_env"] = {"working_dir": request.ship}
            # A submitted job (ray job submit) may have a folder of its own already.
            os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
        try:
            if address == LOCAL:
                self._start_here(request, common)
            else:
                ray.init(address=address, **common)
        except ConnectionError as error:
            if address != "auto":
                raise UsageError(trouble(address, error)) from None
            self._start_here(request, common)
        except (RuntimeError, ValueError, OSError) as error:
            raise UsageError(trouble(address, error)) from None
        # `ray job stop` sends SIGTERM to every process of a job, but the coordinator ends this one. Set after
        # ray.init, which installs a handler of its own.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._send(
            RayConnected(
                address=ray.get_runtime_context().gcs_address,
                host=ray.util.get_node_ip_address(),
                started=self._folder is not None,
                none_found=self._folder is not None and address != LOCAL,
                nodes=tuple(RayNode.of(node) for node in ray.nodes() if node["Alive"]),
            )
        )

    def _start_here(self, request: ConnectRay, common: Mapping[str, Any]) -> None:
        """Start a cluster of this machine alone, with as many CPUs as requested."""
        # A token of its own, for this process and its children only: Ray would leave one in the user's home.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        self._folder = Path(tempfile.mkdtemp(prefix="mh-ray-"))
        ray.init(
            address=LOCAL,
            num_cpus=max(len(os.sched_getaffinity(0)), request.cpus),
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            _temp_dir=str(self._folder),
            **common,
        )

    # Slots and actors -------------------------------------------------------------------------

    def _reserve(self, slots: Sequence[RaySlot]) -> None:
        """Reserve all of these slots, or none until there is room for all."""
        assert self._request is not None
        group = placement_group(
            [slot.resources for slot in slots], strategy=self._request.placement.upper()
        )
        for index, slot in enumerate(slots):
            self._slots[slot.rank] = ActorSlot(slot, group, index, start_at=0.0)

    def _start_actors(self) -> None:
        """Create an actor for each slot that lacks one. Ray starts it as soon as the slot is reserved."""
        now = time.monotonic()
        for held in self._slots.values():
            if held.start_at is None or now < held.start_at:
                continue
            assert self._request is not None
            slot, held.start_at = held.slot, None
            held.actor = self._actor_class.options(
                num_cpus=slot.cpus,
                num_gpus=int(slot.gpu),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    held.group, placement_group_bundle_index=held.index
                ),
            ).remote()
            held.result = held.actor.serve.remote(write(ActorTask(slot, self._request.task)))

    def _check_actors(self) -> None:
        """Handle actors that have ended; report free resources while slots are missing."""
        by_result = {
            held.result: rank for rank, held in self._slots.items() if held.result is not None
        }
        if by_result:
            ended, _ = ray.wait(list(by_result), num_returns=len(by_result), timeout=0)
            for result in ended:
                self._on_end(by_result[result], result)
        missing = [held for held in self._slots.values() if not held.joined]
        if missing and time.monotonic() - self._reported_at > FREE_EVERY_S:
            self._reported_at = time.monotonic()
            free, total = ray.available_resources(), ray.cluster_resources()
            kinds = [kind for kind in ("CPU", "GPU") if kind in total or kind == "CPU"]
            self._send(FreeResources({kind: free.get(kind, 0.0) for kind in kinds}))

    def _on_end(self, rank: int, result: Any) -> None:
        try:
            end = read(ActorEnd, ray.get(result))
        except ray.exceptions.RayError as error:
            end = ActorEnd(ended=str(error).strip().partition("\n")[0])
        if end.refused:
            self._send(ActorRefused(rank, end.refused))
        elif end.code is None:
            self._send(ActorDied(rank, end.ended))
        self._replace(self._slots[rank])

    def _replace(self, held: ActorSlot) -> None:
        """Kill the actor; another one is started in its slot after a delay."""
        if held.actor is not None:
            with suppress(ray.exceptions.RayError):
                ray.kill(held.actor)
        held.actor = held.result = None
        held.joined = False
        held.start_at = time.monotonic() + held.retry_s
        held.retry_s = min(2 * held.retry_s, MAX_RETRY_S)

    def _release(self, rank: int) -> None:
        held = self._slots.pop(rank)
        self._replace(held)
        if not any(other.group is held.group for other in self._slots.values()):
            remove_placement_group(held.group)

    def _await_agents(self) -> None:
        """Wait for the agents, which the coordinator has told to end."""
        results = [held.result for held in self._slots.values() if held.joined and held.result]
        if results:
            ray.wait(results, num_returns=len(results), timeout=END_S)

    def _end(self) -> None:
        with suppress(ray.exceptions.RayError):
            for rank in list(self._slots):
                self._release(rank)
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def check_port(address: str) -> None:
    """Check that something listens there; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise UsageError(trouble(address, error)) from None


def trouble(address: str, error: BaseException) -> str:
    """Explain why a cluster can't be connected to, with the remedy."""
    errors = [error]
    while (cause := errors[-1].__cause__ or errors[-1].__context__) is not None:
        errors.append(cause)
    text = "\n".join(f"{type(each).__name__}: {each}" for each in errors)
    where = "" if address in ("auto", LOCAL) else f" at {address}"
    if "resolve node to connect to" in text:
        return (
            f"The Ray cluster{where} is there, and this machine is no node of it. Make it one:  "
            f"ray start --address={address}  or submit a job from outside:  ray job submit "
            "--address http://HEAD:8265 --working-dir . -- manyhands train ... --on ray"
        )
    if "AuthenticationError" in text or "UNAUTHENTICATED" in text:
        return (
            f"The Ray cluster{where} requires a token, and got none. Set RAY_AUTH_MODE=token, and keep "
            "the token of that cluster where Ray looks for it: RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token."
        )
    reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
    return (
        f"There is no Ray cluster{where} to connect to ({reason}). Start one with  ray start --head, give "
        "the address of another in RAY_ADDRESS or as  --on ray=HOST:PORT, or use  --on ray=local  for one of "
        "this machine that lasts as long as the run."
    )


def main() -> int:
    """Run with the output of Ray and its daemons on standard error, which the coordinator keeps."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return Broker(out).run()


if __name__ == "__main__":
    sys.exit(main())
