"""The inbox: everything that happens to a run, in order, for the one thread that decides."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

MAX_UNREAD_BYTES = 32 << 20
"""Limit on the messages of one member that wait in the inbox."""


@dataclass(frozen=True)
class MemberMessage:
    member: str
    message: Any
    """One of FROM_MEMBER (control/messages.py)."""
    num_bytes: int = 0


@dataclass(frozen=True)
class LinkLost:
    member: str
    reason: str


@dataclass(frozen=True)
class Garbage:
    """A member sent an invalid message. Its link is closed."""

    member: str
    reason: str


@dataclass(frozen=True)
class Exited:
    member: str
    exit_code: int


@dataclass(frozen=True)
class Signalled:
    number: int


@dataclass(frozen=True)
class HostNotice:
    """A notice about the hosts, for the user."""

    message: str


@dataclass(frozen=True)
class ThreadFailed:
    """A thread of the coordinator failed: without it, something would go unnoticed."""

    error: BaseException


InboxEvent = MemberMessage | LinkLost | Garbage | Exited | Signalled | HostNotice | ThreadFailed


class InboxQuota:
    """Limits the unread messages of one member: no more are received before there is room."""

    def __init__(self) -> None:
        self._used = 0
        self._changed = threading.Condition()

    def take(self, num_bytes: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._used or self._used + num_bytes <= MAX_UNREAD_BYTES
            )
            self._used += num_bytes

    def give_back(self, num_bytes: int) -> None:
        with self._changed:
            self._used -= num_bytes
            self._changed.notify_all()
