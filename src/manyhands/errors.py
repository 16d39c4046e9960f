"""One exception tree; each exception carries the exit code of the command that it ends.

ManyhandsError               1   anything that manyhands itself reports
├── UsageError               2   something given can't be: says what, what is allowed, what to type
│   ├── JobError             2   the job file: missing, without a Job, a method that returns the wrong thing
│   ├── SpecError            2   a strategy spec that does not parse or does not fit
│   ├── ClusterError         2   what says who takes part: absent, malformed, or contradicting itself
│   ├── RunFolderError       2   a run folder that can't be made, read or resumed
│   └── DataError            2   a data set that is absent, truncated or not what it says
├── RecordError              1   events.jsonl can't be written any more: the disk is full, or gone
├── CheckpointError          1   a checkpoint that can't be written or does not read back
├── Diverged                65   the loss or the weights are no finite numbers any more
├── LinkError                1   a connection between members
│   ├── LinkClosed           1   the other side is gone
│   ├── LinkTimeout          1   the other side did not answer in time
│   └── BadFrame             1   what arrived is not a message of ours
├── ProtocolError            1   a message of a member that makes no sense
├── LoaderLost               1   loader processes of a worker are killed again and again
├── CoordinatorLost         70   an agent's coordinator has ended without a word
├── LabError                 1   a lab of hosts that can't be made here, or is gone
├── PeerLost                 1   a collective failed because another member went away
├── ViewChanging             1   the membership changes: whatever was waited for is void
├── WeightsLost              *   nobody is left who has the weights, or part of them: only a checkpoint helps
├── MemberError             *   a member ended the run; the exit code is the member's own
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
    """Anything that manyhands itself reports: the message is for the person at the keyboard."""

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
    """Raised out of any wait of a learner when the next view is on its way; never seen by a person."""


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
    """How a sentence on a wrong name ends: with a question if an allowed name is near, else a full stop."""
    by_lower = {known.lower(): known for known in allowed}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else "."
