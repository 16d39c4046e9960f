"""The exception tree. Each exception carries the exit code of the command that it ends.

ManyhandsError               1   any error that manyhands reports
├── UsageError               2   wrong input: says what was given, what is allowed, what to type
│   ├── JobError             2   the job file: missing, without a Job, or a method returns the wrong type
│   ├── SpecError            2   a strategy spec that does not parse or is not possible
│   ├── ClusterError         2   the cluster description: missing, malformed, or contradictory
│   ├── RunFolderError       2   a run folder that can't be made, read or resumed
│   └── DataError            2   a data set that is missing, truncated or of another format
├── RecordError              1   events.jsonl can't be written: the disk is full, or gone
├── CheckpointError          1   a checkpoint that can't be written or read back
├── Diverged                65   the loss or the weights are no longer finite
├── LinkError                1   a connection between members
│   ├── LinkClosed           1   the peer closed the connection
│   ├── LinkTimeout          1   the peer did not answer in time
│   └── BadFrame             1   what arrived is not a valid frame
├── ProtocolError            1   an invalid message from a member
├── LoaderLost               1   a worker's loader processes keep being killed
├── CoordinatorLost         70   an agent's coordinator ended without a final message
├── LabError                 1   a lab that can't be created here, or no longer exists
├── PeerLost                 1   a collective failed because a peer died
├── ViewChanging             1   the view is changing: abandon the current wait
├── WeightsLost              *   no member left has all of the weights: restart from a checkpoint
├── MemberError             *   a member failed and ended the run; its own exit code
└── Interrupted              *   stopped on request: 75 preempted and saved, 130 by Ctrl-C, 143 by SIGTERM
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BadFrame",
    "CheckpointError",
    "ClusterError",
    "CoordinatorLost",
    "DataError",
    "Diverged",
    "Interrupted",
    "JobError",
    "LabError",
    "LinkClosed",
    "LinkError",
    "LinkTimeout",
    "LoaderLost",
    "ManyhandsError",
    "MemberError",
    "PeerLost",
    "ProtocolError",
    "RecordError",
    "RunFolderError",
    "SpecError",
    "UsageError",
    "ViewChanging",
    "WeightsLost",
    "closest",
]


class ManyhandsError(Exception):
    """Base of all errors that manyhands reports. The message is written for the user."""

    exit_code = 1


class UsageError(ManyhandsError):
    exit_code = 2


class JobError(UsageError):
    pass


class SpecError(UsageError):
    pass


class ClusterError(UsageError):
    pass


class RunFolderError(UsageError):
    pass


class RecordError(ManyhandsError):
    pass


class CheckpointError(ManyhandsError):
    pass


class DataError(UsageError):
    pass


class Diverged(ManyhandsError):
    exit_code = 65


class LinkError(ManyhandsError):
    pass


class LinkClosed(LinkError):
    pass


class LinkTimeout(LinkError):
    pass


class BadFrame(LinkError):
    pass


class ProtocolError(ManyhandsError):
    pass


class LoaderLost(ManyhandsError):
    pass


class CoordinatorLost(ManyhandsError):
    exit_code = 70


class LabError(ManyhandsError):
    pass


class PeerLost(ManyhandsError):
    pass


class ViewChanging(ManyhandsError):
    """Raised out of any wait of a learner when the next view is coming; never shown to the user."""


class WeightsLost(ManyhandsError):
    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class MemberError(ManyhandsError):
    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(ManyhandsError):
    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def closest(name: str, allowed: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: "; did you mean ...?" or a full stop."""
    by_lower = {known.lower(): known for known in allowed}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else "."
