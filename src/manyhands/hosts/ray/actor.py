"""The actor in a slot that Ray has given: an agent of the coordinator.

The actor's class is defined in a function, so that Ray sends its code and not its name: a node without
manyhands can then report that, where Ray would only report that the actor has died.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.errors import ManyhandsError, UsageError
from manyhands.hosts.agent import Agent
from manyhands.hosts.member import ORPHANED
from manyhands.hosts.ray.messages import ActorEnd, ActorTask, AgentTask
from manyhands.hosts.ray.resources import RaySlot
from manyhands.hosts.spec import COORDINATOR, ClusterSpec, Entry
from manyhands.hosts.view import WORKER
from manyhands.threads import start_thread
from manyhands.transport import Authority
from manyhands.transport.fields import read, write

NOT_FOR_MEMBERS = ("PYTHONBREAKPOINT", "RAY_AUTH_TOKEN")
"""Variables of Ray's workers that members should not have."""

WATCH_S = 0.5


def actor_class() -> type:
    class ManyhandsAgent:
        def serve(self, task: dict[str, Any]) -> dict[str, Any]:
            try:
                from manyhands.hosts.ray.actor import serve
            except ImportError as error:
                import platform
                import sys

                return {
                    "refused": f"The node {platform.node()} can't load manyhands ({error}; Python is "
                    f"{sys.executable}). Install it there: pip install 'manyhands[ray]'"
                }
            return serve(task)

    return ManyhandsAgent


def serve(task: Mapping[str, Any]) -> dict[str, Any]:
    """Run as an agent until the coordinator ends."""
    start_thread(_end_with, os.getppid(), name="raylet", on_error=lambda error: os._exit(ORPHANED))
    return write(_serve(read(ActorTask, task)))


def _serve(actor: ActorTask) -> ActorEnd:
    task = actor.task
    try:
        _prepare(task)
        authority = Authority.from_secret("manyhands run", task.key)
        agent = Agent(_spec(actor.slot), task.address, authority=authority, timeouts=task.timeouts)
        return ActorEnd(code=agent.run())
    except UsageError as error:
        return ActorEnd(refused=str(error))
    except ManyhandsError as error:
        return ActorEnd(ended=str(error))


def _prepare(task: AgentTask) -> None:
    """Change to the coordinator's folder, where this node has it: the job's path may be relative to it."""
    for name in NOT_FOR_MEMBERS:
        os.environ.pop(name, None)
    for name, value in task.variables.items():
        os.environ.setdefault(name, value)
    if not task.shipped and Path(task.folder).is_dir():
        os.chdir(task.folder)
    if not Path(task.job).is_file():
        raise UsageError(
            f"The node {os.uname().nodename} does not see the job file {task.job}. Put it where all nodes "
            "see it, or send its folder to them: --ray-ship FOLDER."
        )


def _end_with(raylet: int) -> None:
    """End when Ray has ended on this node: a busy actor may outlive it."""
    while os.getppid() == raylet:
        time.sleep(WATCH_S)
    os._exit(ORPHANED)  # the kernel kills the members


def _spec(slot: RaySlot) -> ClusterSpec:
    """Return the cluster as far as an agent needs it: its own entry."""
    others = tuple(
        Entry(f"ray-{number}", WORKER if number else COORDINATOR, number)
        for number in range(slot.rank)
    )
    return ClusterSpec((*others, slot.entry), "", None, "Ray", mine=slot.entry)
