"""The broker: a process beside the coordinator that asks Ray for slots and holds an actor in each.

It is the only one that loads Ray, which may end a process that has lost its cluster, and has threads, signal
handlers and ways to print of its own. Both sides tell each other one JSON object a line, by `kind`:

    coordinator:  connect; then gather, more, fewer, there, lost, end
    broker:       connected or failed; then free, died, refused

    connect   to a cluster, or start one
    gather    slots: the first in one placement group, all or none; each of the others as it comes
    lost      an agent's link is closed: another actor for that slot
    end       or the end of standard input, when the coordinator is gone: no actor and no group is left

Ray ends actors and groups when it misses this process, so a broker that is killed leaves none either.
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from manyhands.errors import UsageError
from manyhands.hosts.ray.resources import CLIENT, LOCAL, RaySlot, no_clients
from manyhands.threads import describe, start_thread

DIAL_S = 5.0
"""Somebody listens where Ray's head should be."""
NODE_S = 10
"""Ray has found its node on this machine."""
POLL_S = 0.2
FREE_EVERY_S = 2.0
"""How often what is free is told, while slots are missing."""
PATIENCE_S = 0.5
MAX_PATIENCE_S = 8.0
"""Before an actor is asked for again that has ended by itself, the next time twice as long."""
END_S = 3.0
"""Agents that the coordinator has ended have returned, before their actors are killed."""
STUCK_S = 10.0
"""From the end of standard input to the end of this process, whatever Ray does."""
STORE_BYTES = 100 << 20
"""Of Ray's object store in a cluster that is started here: nothing of ours lies in it."""


@dataclass
class ActorSlot:
    """A slot, and who is in it."""

    slot: RaySlot
    group: Any
    index: int
    actor: Any = None
    result: Any = None
    there: bool = False
    """Its agent serves the coordinator."""
    ask_at: float | None = None
    """When to ask for an actor again."""
    patience_s: float = PATIENCE_S


class Broker:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._berths: dict[int, ActorSlot] = {}
        self._groups: list[Any] = []
        self._mode: dict[str, Any] = {}
        self._actor: Any = None
        self._folder: Path | None = None
        self._freed = 0.0

    def run(self) -> int:
        start_thread(self._read, name="read", on_error=self._deaf)
        asked = self._inbox.get()
        if asked["kind"] != "connect":
            return 0
        try:
            self._connect(asked)
        except UsageError as error:
            self._tell("failed", text=str(error))
            return 1
        try:
            while self._handle(self._next()):
                self._look()
                self._ask()
        finally:
            self._end()
        return 0

    # What the coordinator says ----------------------------------------------------------------

    def _read(self) -> None:
        for line in sys.stdin:
            self._inbox.put(json.loads(line))
        self._inbox.put({"kind": "gone"})
        time.sleep(STUCK_S)
        os._exit(1)

    def _deaf(self, error: BaseException) -> None:
        """The coordinator can't be understood any more: give everything back."""
        print(describe(error), file=sys.stderr, flush=True)
        self._inbox.put({"kind": "gone"})
        time.sleep(STUCK_S)
        os._exit(1)

    def _next(self) -> dict[str, Any] | None:
        try:
            return self._inbox.get(timeout=POLL_S)
        except queue.Empty:
            return None

    def _handle(self, said: Mapping[str, Any] | None) -> bool:
        """False: it is over."""
        match said:
            case {"kind": "gather", "slots": list(slots), "together": int(together)}:
                assert said is not None
                self._mode = dict(said["mode"])
                self._gather([RaySlot(*slot) for slot in slots], together)
            case {"kind": "more", "slots": list(slots)}:
                for slot in slots:
                    self._reserve([RaySlot(*slot)])
            case {"kind": "fewer", "rank": int(rank)} if rank in self._berths:
                self._give_back(rank)
            case {"kind": "there", "rank": int(rank)} if rank in self._berths:
                self._berths[rank].there = True
                self._berths[rank].patience_s = PATIENCE_S
            case {"kind": "lost", "rank": int(rank)} if rank in self._berths:
                if self._berths[rank].there:  # else Ray has told it before, and there is another
                    self._dismiss(self._berths[rank])
            case {"kind": "end"}:
                self._await_agents()
                return False
            case {"kind": "gone"}:
                return False
        return True

    def _tell(self, kind: str, **fields: Any) -> None:
        with suppress(BrokenPipeError):  # standard input tells the same
            self._out.write(json.dumps({"kind": kind, **fields}) + "\n")
            self._out.flush()

    # The cluster ------------------------------------------------------------------------------

    def _connect(self, asked: Mapping[str, Any]) -> None:
        # Else Ray looks for its node on this machine for a minute.
        os.environ.setdefault("RAY_gcs_server_request_timeout_seconds", str(NODE_S))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        address = asked["address"] or os.environ.get("RAY_ADDRESS", "") or "auto"
        if address.startswith(CLIENT):
            raise UsageError(f"RAY_ADDRESS: {no_clients(address)}")
        if address not in ("auto", LOCAL):
            dial(address)
        common: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "namespace": "manyhands",
        }
        if asked["ship"]:
            common["runtime_env"] = {"working_dir": asked["ship"]}
            # A submitted job (ray job submit) may have a folder of its own already.
            os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
        try:
            if address == LOCAL:
                self._start_here(asked, common)
            else:
                ray.init(address=address, **common)
        except ConnectionError as error:
            if address != "auto":
                raise UsageError(trouble(address, error)) from None
            self._start_here(asked, common)
        except (RuntimeError, ValueError, OSError) as error:
            raise UsageError(trouble(address, error)) from None
        # `ray job stop` sends it to every process of a job; the coordinator says when this one ends. After
        # ray.init, which has a handler of its own.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._tell(
            "connected",
            started=self._folder is not None,
            none_found=self._folder is not None and address != LOCAL,
            address=ray.get_runtime_context().gcs_address,
            host=ray.util.get_node_ip_address(),
            nodes=[node for node in ray.nodes() if node["Alive"]],
        )

    def _start_here(self, asked: Mapping[str, Any], common: Mapping[str, Any]) -> None:
        """A cluster of this machine alone, whose CPUs are as many as are asked for."""
        import ray

        # Its own, in this process and its children alone: Ray would leave one in the person's home.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        self._folder = Path(tempfile.mkdtemp(prefix="mh-ray-"))
        ray.init(
            address=LOCAL,
            num_cpus=max(len(os.sched_getaffinity(0)), asked["cpus"]),
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            _temp_dir=str(self._folder),
            **common,
        )

    # Slots and actors -------------------------------------------------------------------------

    def _gather(self, slots: list[RaySlot], together: int) -> None:
        if together:
            self._reserve(slots[:together])
        for slot in slots[together:]:
            self._reserve([slot])

    def _reserve(self, slots: list[RaySlot]) -> None:
        """All of these, or none until there is room for all."""
        from ray.util.placement_group import placement_group

        group = placement_group(
            [slot.resources for slot in slots], strategy=self._mode["placement"].upper()
        )
        self._groups.append(group)
        for index, slot in enumerate(slots):
            self._berths[slot.rank] = ActorSlot(slot, group, index, ask_at=0.0)

    def _ask(self) -> None:
        """An actor for each slot that should have one. Ray makes it as soon as the slot is reserved."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from manyhands.hosts.ray.actor import actor_class

        self._actor = self._actor or ray.remote(actor_class())
        now = time.monotonic()
        for rank, berth in self._berths.items():
            if berth.ask_at is None or now < berth.ask_at:
                continue
            slot, berth.ask_at = berth.slot, None
            berth.actor = self._actor.options(
                num_cpus=slot.cpus,
                num_gpus=int(slot.gpu),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    berth.group, placement_group_bundle_index=berth.index
                ),
            ).remote()
            told = {**self._mode, "rank": rank, "role": slot.role, "device": slot.device}
            berth.result = berth.actor.serve.remote(told)

    def _look(self) -> None:
        """Which actors have ended, and what is free for those that are waited for."""
        import ray

        by_result = {b.result: rank for rank, b in self._berths.items() if b.result is not None}
        if by_result:
            ended, _ = ray.wait(list(by_result), num_returns=len(by_result), timeout=0)
            for result in ended:
                self._on_end(by_result[result], result)
        missing = [berth for berth in self._berths.values() if not berth.there]
        if missing and time.monotonic() - self._freed > FREE_EVERY_S:
            self._freed = time.monotonic()
            free, total = ray.available_resources(), ray.cluster_resources()
            kinds = [kind for kind in ("CPU", "GPU") if kind in total or kind == "CPU"]
            self._tell("free", free={kind: free.get(kind, 0.0) for kind in kinds})

    def _on_end(self, rank: int, result: Any) -> None:
        import ray

        berth = self._berths[rank]
        try:
            how = ray.get(result)
        except ray.exceptions.RayError as error:
            how = {"ended": str(error).strip().partition("\n")[0]}
        if "refused" in how:
            self._tell("refused", rank=rank, text=how["refused"])
        elif "code" not in how:
            self._tell("died", rank=rank, why=how["ended"])
        self._dismiss(berth)

    def _dismiss(self, berth: ActorSlot) -> None:
        """Another actor in its place, in a while."""
        import ray

        if berth.actor is not None:
            with suppress(ray.exceptions.RayError):
                ray.kill(berth.actor)
        berth.actor = berth.result = None
        berth.there = False
        berth.ask_at = time.monotonic() + berth.patience_s
        berth.patience_s = min(2 * berth.patience_s, MAX_PATIENCE_S)

    def _give_back(self, rank: int) -> None:
        from ray.util.placement_group import remove_placement_group

        berth = self._berths.pop(rank)
        self._dismiss(berth)
        if not any(other.group is berth.group for other in self._berths.values()):
            self._groups.remove(berth.group)
            remove_placement_group(berth.group)

    def _await_agents(self) -> None:
        """The coordinator has told them that it ends."""
        import ray

        results = [berth.result for berth in self._berths.values() if berth.there and berth.result]
        if results:
            ray.wait(results, num_returns=len(results), timeout=END_S)

    def _end(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        with suppress(ray.exceptions.RayError):
            for berth in self._berths.values():
                if berth.actor is not None:
                    ray.kill(berth.actor)
            for group in self._groups:
                remove_placement_group(group)
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def dial(address: str) -> None:
    """Whether anybody listens there, which Ray itself asks for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=DIAL_S).close()
    except (OSError, ValueError) as error:
        raise UsageError(trouble(address, error)) from None


def trouble(address: str, error: BaseException) -> str:
    """What to say of a cluster that can't be connected to, and what to type."""
    told = [error]
    while (cause := told[-1].__cause__ or told[-1].__context__) is not None:
        told.append(cause)
    text = "\n".join(f"{type(each).__name__}: {each}" for each in told)
    where = "" if address in ("auto", LOCAL) else f" at {address}"
    if "resolve node to connect to" in text:
        return (
            f"The Ray cluster{where} is there, and this machine is no node of it. Make it one:  "
            f"ray start --address={address}  or submit a job from outside:  ray job submit "
            "--address http://HEAD:8265 --working-dir . -- manyhands train ... --on ray"
        )
    if "AuthenticationError" in text or "UNAUTHENTICATED" in text:
        return (
            f"The Ray cluster{where} wants its token, and has not got it. Set RAY_AUTH_MODE=token, and keep "
            "the token of that cluster where Ray looks for it: RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token."
        )
    reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
    return (
        f"There is no Ray cluster{where} to connect to ({reason}). Start one with  ray start --head, give "
        "the address of another in RAY_ADDRESS or as  --on ray=HOST:PORT, or use  --on ray=local  for one of "
        "this machine that lasts as long as the run."
    )


def main() -> int:
    """What Ray and its daemons print goes to standard error, which the coordinator keeps."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return Broker(out).run()


if __name__ == "__main__":
    sys.exit(main())
