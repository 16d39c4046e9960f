"""What an actor does in the slot that Ray has given it: it is an agent of the coordinator.

The actor's class is made in a function, so that it travels as it is and not by its name: a node without
manyhands can say so, where Ray would only say that the actor has died.
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
from manyhands.hosts.spec import COORDINATOR, ClusterSpec, Entry
from manyhands.hosts.timeouts import Timeouts
from manyhands.hosts.view import WORKER
from manyhands.threads import start_thread
from manyhands.transport import Authority

NOT_THEIRS = ("PYTHONBREAKPOINT", "RAY_AUTH_TOKEN")
"""What Ray's workers have, and members should not."""

WATCH_S = 0.5


def actor_class() -> type:
    class ManyhandsAgent:
        def serve(self, told: dict[str, Any]) -> dict[str, Any]:
            try:
                from manyhands.hosts.ray.actor import serve
            except ImportError as error:
                import platform
                import sys

                return {
                    "refused": f"The node {platform.node()} can't load manyhands ({error}; Python is "
                    f"{sys.executable}). Install it there: pip install 'manyhands[ray]'"
                }
            return serve(told)

    return ManyhandsAgent


def serve(told: Mapping[str, Any]) -> dict[str, Any]:
    """Be an agent until the coordinator ends; how it ended."""
    start_thread(_end_with, os.getppid(), name="raylet", on_error=lambda error: os._exit(ORPHANED))
    try:
        _settle_in(told)
        authority = Authority.from_secret("manyhands run", told["key"])
        timeouts = Timeouts.from_dict(told["timeouts"])
        return {
            "code": Agent(
                _spec(told), told["address"], authority=authority, timeouts=timeouts
            ).run()
        }
    except UsageError as error:
        return {"refused": str(error)}
    except ManyhandsError as error:
        return {"ended": str(error)}


def _settle_in(told: Mapping[str, Any]) -> None:
    """The coordinator's folder, where this node has it: a job may be named from there."""
    for name in NOT_THEIRS:
        os.environ.pop(name, None)
    for name, value in told["variables"].items():
        os.environ.setdefault(name, value)
    if not told["shipped"] and Path(told["folder"]).is_dir():
        os.chdir(told["folder"])
    if not Path(told["job"]).is_file():
        raise UsageError(
            f"The node {os.uname().nodename} does not see the job file {told['job']}. Put it where all nodes "
            "see it, or send its folder to them: --ray-ship FOLDER."
        )


def _end_with(raylet: int) -> None:
    """End when Ray has ended on this node: an actor that is busy may go on without it."""
    while os.getppid() == raylet:
        time.sleep(WATCH_S)
    os._exit(ORPHANED)  # the kernel ends the members


def _spec(told: Mapping[str, Any]) -> ClusterSpec:
    """What an agent has to know of the cluster: itself."""
    rank = int(told["rank"])
    others = tuple(
        Entry(f"ray-{number}", WORKER if number else COORDINATOR, number) for number in range(rank)
    )
    me = Entry(f"ray-{rank}", told["role"], rank, devices=(told["device"],))
    return ClusterSpec((*others, me), "", None, "Ray", mine=me)
