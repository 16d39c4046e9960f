"""The exception tree. Each exception carries the exit code of the command that it ends.

ManyhandsError               1
├── UsageError               2
│   ├── JobError             2
│   ├── SpecError            2
│   ├── ClusterError         2
│   ├── RunFolderError       2
│   └── DataError            2
├── RecordError              1
├── CheckpointError          1
├── Diverged                65
├── LinkError                1
│   ├── LinkClosed           1
│   ├── LinkTimeout          1
│   └── BadFrame             1
├── ProtocolError            1
├── LoaderLost               1
├── CoordinatorLost         70
├── LabError                 1
├── PeerLost                 1
├── ViewChanging             1
├── WeightsLost              *   set where it is raised
├── MemberError              *
└── Interrupted              *
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class ManyhandsError(Exception):
    """Base of all errors that manyhands reports. The message is written for the user."""

    exit_code = 1
    run: Path | None = None
    """The folder of the run that it ended, if training had begun. See `mh.Result`."""

    def __init__(self, message: str = "", *, exit_code: int | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


class UsageError(ManyhandsError):
    """Wrong input. The message tells what was given, what is allowed, and what to type."""

    exit_code = 2


class JobError(UsageError):
    """The job file is missing or has no Job, or a method of the job returned the wrong type."""


class SpecError(UsageError):
    """A strategy spec does not parse, or its options contradict each other."""


class ClusterError(UsageError):
    """The cluster description is missing, malformed or contradictory."""


class RunFolderError(UsageError):
    """A run folder can't be created, read or resumed."""


class DataError(UsageError):
    """A data set is missing, truncated or of another format."""


class RecordError(ManyhandsError):
    """events.jsonl can't be written: the disk is full, or gone."""


class CheckpointError(ManyhandsError):
    """A checkpoint can't be written or read."""


class Diverged(ManyhandsError):
    """The loss or the weights are no longer finite."""

    exit_code = 65


class LinkError(ManyhandsError):
    """A connection between members failed."""


class LinkClosed(LinkError):
    """The peer closed the connection."""


class LinkTimeout(LinkError):
    """The peer did not answer in time."""


class BadFrame(LinkError):
    """The received bytes are not a valid frame."""


class ProtocolError(ManyhandsError):
    """A member sent an invalid message."""


class LoaderLost(ManyhandsError):
    """A worker's loader processes keep being killed."""


class CoordinatorLost(ManyhandsError):
    """An agent's coordinator ended without a final message."""

    exit_code = 70


class LabError(ManyhandsError):
    """A lab can't be created here, or no longer exists."""


class PeerLost(ManyhandsError):
    """A collective failed because a peer died."""


class ViewChanging(ManyhandsError):
    """Raised out of any wait of a learner when the next view is coming; never shown to the user."""


class WeightsLost(ManyhandsError):
    """No surviving member has all of the weights: restart from a checkpoint."""


class MemberError(ManyhandsError):
    """A member failed and ended the run; has the member's exit code."""


class Interrupted(ManyhandsError):
    """Stopped on request: 75 preempted and saved, 130 by Ctrl-C, 143 by SIGTERM."""


def check_choice(option: str, value: str, allowed: Iterable[str]) -> None:
    """Raise UsageError unless the value of an option, such as --sort, is allowed."""
    known = list(allowed)
    if value not in known:
        raise UsageError(
            f"{option} {value}: it must be one of {', '.join(known)}{closest(value, known)}"
        )


def closest(name: str, allowed: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: "; did you mean ...?" or a full stop."""
    by_lower = {known.lower(): known for known in allowed}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else "."
