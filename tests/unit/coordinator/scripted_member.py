"""The program of a member that does what its assignment says, and reports what it saw. Without torch."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

from manyhands.control.messages import TO_MEMBER, Notice, Ready
from manyhands.errors import ViewChanging
from manyhands.hosts.member import Member
from manyhands.hosts.view import Seat


def note(member: Member, **facts: Any) -> None:
    member.send(Notice(0, json.dumps(facts)))


def main() -> None:
    member = Member.from_launcher(TO_MEMBER)
    noted: list[tuple[int, bool]] = []
    """At each view: its number, and whether it could be received already."""
    member.on_view = lambda: noted.append((member.newest_view, member.has_message()))
    task = member.assignment
    keys = member.invitation.credentials
    member.send(Ready(Seat(member.name, member.host)))
    note(
        member,
        secret=member.invitation.secret,
        certificate=keys.certificate if keys else None,
        thread=threading.current_thread().name,
    )
    if "print" in task:
        print(task["print"], flush=True)
    for key, value in task.get("post", {}).items():
        member.post(key, value)
    if "fetch" in task:
        note(member, got=member.fetch(task["fetch"], timeout_s=20))
    if "wait_through_views" in task:
        first = member.next_message(timeout_s=20).view.number
        began = time.monotonic()
        try:
            member.fetch("what nobody posts", timeout_s=20)
        except ViewChanging:
            note(member, noted=noted, first=first, seconds=time.monotonic() - began)
    member.next_message(timeout_s=20)
    member.leave()


if __name__ == "__main__":
    main()
    os._exit(0)
