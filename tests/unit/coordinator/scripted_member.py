"""The program of a member that does what its assignment says, and tells what it saw. Without torch."""

from __future__ import annotations

import os
import threading
import time

from manyhands.errors import ViewChanging
from manyhands.hosts.member import Member


def main() -> None:
    member = Member.from_launcher()
    noted: list[tuple[int, bool]] = []
    """At each view: its number, and whether it could be heard already."""
    member.on_view = lambda: noted.append((member.newest_view, member.heard()))
    task = member.assignment
    keys = member.invitation.credentials
    member.say(
        "ready",
        secret=member.invitation.secret,
        certificate=keys.certificate if keys else None,
        thread=threading.current_thread().name,
    )
    if "print" in task:
        print(task["print"], flush=True)
    for key, value in task.get("post", {}).items():
        member.post(key, value)
    if "fetch" in task:
        member.say("report", got=member.fetch(task["fetch"], timeout_s=20))
    if "wait_through_views" in task:
        heard = member.hear(timeout_s=20)
        began = time.monotonic()
        try:
            member.fetch("what nobody posts", timeout_s=20)
        except ViewChanging:
            member.say("report", noted=noted, heard=heard, seconds=time.monotonic() - began)
    member.hear(timeout_s=20)
    member.leave()


if __name__ == "__main__":
    main()
    os._exit(0)
