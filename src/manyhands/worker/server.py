"""The program of a dedicated server: `python -m manyhands.worker.server`, started by a launcher.

It builds the job's model and optimizer, as workers do, and serves them; it computes no gradients.
"""

from __future__ import annotations

import gc

from manyhands.contract import Context
from manyhands.control.messages import (
    Assignment,
    LeaveOrder,
    Left,
    Ready,
    StopOrder,
    Stopped,
    ViewJoined,
)
from manyhands.errors import ViewChanging
from manyhands.hosts.member import Member
from manyhands.hosts.messages import ViewFormed
from manyhands.hosts.view import SERVER, Seat, View
from manyhands.transport.fields import read
from manyhands.worker.program import run

POLL_S = 0.2


def live(member: Member) -> None:
    with member.phase("loading the job"):
        keeper = ServerProgram(member)
    gc.freeze()  # as in a worker
    with member.phase("serving"):
        keeper.run()


class ServerProgram:
    """A dedicated server, driven by the coordinator's orders."""

    def __init__(self, member: Member) -> None:
        from manyhands.strategies.registry import make_strategy
        from manyhands.worker.built_job import BuiltJob

        assignment = read(Assignment, member.assignment)
        self.member = member
        # Of the data only the length is needed, by the learning rate schedule.
        built = BuiltJob(assignment, device="cpu", evaluates=False)
        built.build()
        self.seat = Seat(member.name, member.host, role=SERVER)
        self.me = member.me(self.seat)
        member.on_view = self._view_coming
        config = make_strategy(assignment.strategy)
        self.server = config.build_server(Context(built.train_state, self.me))

    def run(self) -> None:
        self.member.send(Ready(self.seat))
        while True:
            message = self.member.next_message(timeout_s=POLL_S)
            self.server.check()
            self.member.activity.updates = self.server.num_updates
            match message:
                case ViewFormed(view):
                    with self.member.phase("joining its peers"):
                        self._on_view(view)
                case StopOrder():
                    self.member.send(Stopped(self.me.view.number))
                case LeaveOrder():
                    self.member.send(Left(self.me.view.number, self.server.close()))
                    return

    def _view_coming(self) -> None:
        self.me.newest_view = self.member.newest_view

    def _on_view(self, view: View) -> None:
        if view.number < self.me.newest_view:
            return  # the next one is in the queue
        self.me.view = view
        try:
            with self.me.view_change_on_lost_peer():
                joined = self.server.on_view(view)
        except ViewChanging:
            return
        self.member.send(ViewJoined(view.number, transport="", applied=joined.applied))


if __name__ == "__main__":
    run(live)
