"""The invitation: what a member is given at its start, as JSON in a pipe."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from manyhands.hosts.timeouts import Timeouts
from manyhands.transport import Credentials
from manyhands.transport.fields import Count, read


@dataclass(frozen=True)
class Invitation:
    """Holds secrets: it is never on a command line, and the secrets are not in its repr."""

    member: str
    """The member's name."""
    address: str
    """Address of the coordinator."""
    scratch: str
    """The run's private folder on the member's host."""
    assignment: dict[str, Any]
    """Task of the member."""
    timeouts: Timeouts
    credentials: Credentials | None = None
    secured: bool = False
    """If true, the control link uses TLS with the credentials."""
    secret: str = field(default="", repr=False)
    """The run's secret, for links between members."""
    local_rank: Count = 0
    host: str = ""
    """The name of the member's host in this run; empty: its own hostname."""
    reach: str = "127.0.0.1"
    """Address at which members on other hosts reach this one."""
    parent: Count | None = None
    """The process that starts the member."""

    @classmethod
    def from_launcher(cls) -> Invitation:
        """Read the invitation of this process. Its last argument is the descriptor of the pipe."""
        with open(int(sys.argv.pop())) as pipe:
            return read(cls, json.load(pipe))
