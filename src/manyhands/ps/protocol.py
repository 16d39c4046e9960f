"""The messages between workers and servers: one frozen dataclass each. Pure.

The first message declares what a connection is for: EnterView for a worker's control messages, OpenDataLink
for its bulk data, PeerHello for the link between two servers.

    worker to server    EnterView           its gradients in shared memory, or none; the version it has seen
                        PushMessage         a gradient is complete
                        GradientSpan        a piece of a gradient as the payload, on a data link
                        Rest, Wake          don't wait for this worker; it continues
                        PushesEnd           no push of this worker follows for now
                        AskMissing          which workers does the next step wait for?
                        PullRequest         asks for the newest parameters
                        Statistics          buffers of the first worker's model, for all
                        RowGradients        gradients of table rows
                        RowsRequest         asks for table rows
                        StateRequest, TableStateRequest     ask for the state of the optimizer, or of tables
    server to worker    ViewBegun           placement, version, outcome of earlier pushes
                        NewVersion          a version, and which of the worker's pushes it has
                        ParameterSpan       a piece of the parameters as the payload, on a data link
                        PushDropped         a push was too late, and is not used
                        PermitMessage       which step may begin
                        MissingWorkers      the answer to AskMissing
                        RowsAnswer          the answer to RowsRequest
                        TensorMessage, StateEnd             the answer to the requests for state
                        Refused             the last message to a peer that broke the protocol
    server to server    ServerStatus, RecoveryPlan, TensorMessage, Moved, Go    see view_change.py
                        PushReceived        to the leader: this server has all of a push
                        Decide              from the leader: apply this
                        PartialNorm, ReplicaSum, SumHeld, SumTaken, Commit      see updates.py

A process with the run's key may connect, and may still be broken. So each message is parsed when it arrives,
in the thread of an event loop: the server's own thread never sees one with a wrong field. A wrong message is
a ProtocolError: no part of it is used, its connection is closed, its sender gets the reason, and the
coordinator is asked to end the sender, because all others would wait for it.

Some checks need the server's state and are made there: which slots and spans exist (sessions.py), which
push is due (policies.py), which message a view change expects (view_change.py), which update is in progress
(updates.py). Servers trust each other's decisions, such as the numbers that a server adds to its own blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from manyhands.embeddings.row_placement import RowPlacement
from manyhands.errors import ProtocolError
from manyhands.ps.placement import PlacementRecord
from manyhands.ps.policies import Contribution, Decision, Index, Number, StartPermit
from manyhands.ps.recovery_plan import RecoveryPlan, ServerStatus
from manyhands.transport.fields import MessageSet, Weight, at_least, at_most, max_length

SPARSE_BYTES = 256 << 20
"""Limit for the ids or gradients of rows in one message."""
MAX_SLOTS = 16
"""Upper bound on the slots of a policy."""

Addresses = Annotated[list[Annotated[str, max_length(100)]], max_length(MAX_SLOTS)]
"""Of segments of shared memory."""
SparseBytes = Annotated[int, at_least(1), at_most(SPARSE_BYTES)]


class WeightsUnknown(ProtocolError):
    """A worker has seen weights that no server of its view knows: they are lost."""


# The first message of a connection ---------------------------------------------------------------


@dataclass(frozen=True)
class EnterView:
    sender: str
    view: Index
    slots: Addresses
    """Its gradient buffers in shared memory; empty if gradients are sent."""
    row_grads: Addresses
    """Likewise, gradients of table rows."""
    seen: Index
    """The newest version that it has seen."""


@dataclass(frozen=True)
class OpenDataLink:
    """One more connection of a worker, for bulk data."""

    sender: str
    view: Index


@dataclass(frozen=True)
class PeerHello:
    sender: str
    view: Index
    sums: Addresses
    """Its sums in shared memory."""
    undo: Addresses
    """Its undo log of table rows; empty if it changes none."""


# From workers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PushMessage:
    """A gradient is complete."""

    push: Contribution
    began: Index
    """The version that it was computed with."""
    after: Index
    """The worker's push before it."""


@dataclass(frozen=True)
class GradientSpan:
    """A piece of a gradient, with its numbers as the payload."""

    seq: Number
    slot: Index
    span: Index


@dataclass(frozen=True)
class AskMissing:
    """Asks for which workers the step after `seq` waits."""

    seq: Index


@dataclass(frozen=True)
class Statistics:
    """Buffers of the first worker's model, such as those of batch normalization; the leader forwards them."""

    tag: Index
    """Tells one exchange from another."""


@dataclass(frozen=True)
class RowGradients:
    """Gradients of table rows, sent before their push."""

    seq: Number
    slot: Index
    bytes: SparseBytes


@dataclass(frozen=True)
class RowsRequest:
    """Asks for rows; the payload has their ids."""

    tag: Index
    table: str
    bytes: SparseBytes


@dataclass(frozen=True)
class TableStateRequest:
    since: Index
    """0: all rows; else those touched in this step or later."""


@dataclass(frozen=True)
class StateRequest:
    """Asks for the state of the optimizer."""


@dataclass(frozen=True)
class PullRequest:
    """Asks for the newest parameters."""


@dataclass(frozen=True)
class Rest:
    """Asks not to wait for this worker until it wakes."""


@dataclass(frozen=True)
class Wake:
    """The worker continues after a rest."""


@dataclass(frozen=True)
class PushesEnd:
    """Announces that no push of this worker follows until its pushes are resolved."""


# To workers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """Reason why a connection is closed."""

    why: str
    lost: bool
    """If true, the weights are lost, and the receiver is not to blame."""


@dataclass(frozen=True)
class ViewBegun:
    version: Index
    ticks: Index
    done: Index
    """The worker's last push that is in the weights."""
    late: Sequence[Index]
    """Its last pushes that were dropped."""
    last: Sequence[tuple[Index, int]]
    """(step, part) of the last update."""
    travels: bool
    """If true, gradients and parameters are sent over data links."""
    placement: PlacementRecord
    row_placement: RowPlacement | None
    """Placement of table rows, if they are served."""
    permit: StartPermit | None


@dataclass(frozen=True)
class AppliedPush:
    seq: Number
    staleness: Index
    lr: float


@dataclass(frozen=True)
class NewVersion:
    version: Index
    ticks: Index
    own: Sequence[AppliedPush] = ()
    """The worker's pushes in it."""
    sent: int = 0
    """Bytes that this server has sent since it last told this worker."""
    pulled: bool = False
    """If true, this answers a pull."""
    permit: StartPermit | None = None


@dataclass(frozen=True)
class ParameterSpan:
    """A piece of the parameters, with its numbers as the payload."""

    version: Index
    span: Index


@dataclass(frozen=True)
class PushDropped:
    seq: Number
    permit: StartPermit | None


@dataclass(frozen=True)
class PermitMessage:
    permit: StartPermit | None


@dataclass(frozen=True)
class MissingWorkers:
    names: Sequence[str]


@dataclass(frozen=True)
class RowsAnswer:
    """Rows of a request, as the payload."""

    tag: Index


@dataclass(frozen=True)
class StateEnd:
    """End of an answer: all tensors were sent."""

    of: Literal["state", "table_state"]


# Between servers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorMessage:
    """The state of a block, or one of its tensors as the payload: see tensor_messages.py."""

    block: Index
    role: str
    state: str | None = None
    """The encoded state, in the first message of a block."""


@dataclass(frozen=True)
class Moved:
    """The sender has all its blocks."""


@dataclass(frozen=True)
class Go:
    """The view begins."""


@dataclass(frozen=True)
class PushReceived:
    push: PushMessage


@dataclass(frozen=True)
class Decide:
    decision: Decision


@dataclass(frozen=True)
class PartialNorm:
    version: Number
    value: Weight
    """The squared norm of this server's part of the gradient."""


@dataclass(frozen=True)
class ReplicaSum:
    """A piece of a sum, as the payload; or the decision that it belongs to; or both."""

    version: Number
    span: Index | None = None
    decision: Decision | None = None
    resend_all: bool = False
    """If true, spans that were sent before this decision are void, and all are sent again."""


@dataclass(frozen=True)
class SumHeld:
    version: Number
    owner: str


@dataclass(frozen=True)
class SumTaken:
    version: Number


@dataclass(frozen=True)
class Commit:
    version: Number


Opening = EnterView | OpenDataLink | PeerHello

OPENINGS = MessageSet(EnterView, OpenDataLink, PeerHello, strict=True)
FROM_WORKER = MessageSet(
    PushMessage,
    AskMissing,
    Statistics,
    RowGradients,
    RowsRequest,
    TableStateRequest,
    Rest,
    Wake,
    PushesEnd,
    PullRequest,
    StateRequest,
    strict=True,
)
FROM_DATA_LINK = MessageSet(GradientSpan, strict=True)
TO_WORKER = MessageSet(
    Refused,
    ViewBegun,
    NewVersion,
    ParameterSpan,
    PushDropped,
    PermitMessage,
    MissingWorkers,
    Statistics,
    RowsAnswer,
    TensorMessage,
    StateEnd,
    strict=True,
)
BETWEEN_SERVERS = MessageSet(
    PeerHello,
    ServerStatus,
    RecoveryPlan,
    TensorMessage,
    Moved,
    Go,
    PushReceived,
    Decide,
    PartialNorm,
    ReplicaSum,
    SumHeld,
    SumTaken,
    Commit,
    Refused,
    strict=True,
)
