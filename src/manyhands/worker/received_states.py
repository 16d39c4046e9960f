"""States that other workers held alone and have sent to this one, because they leave.

They are kept apart from the learner's own until a view without the sender begins. If the sender is in it
after all, it still has its state, and the copy is dropped.

Sender and receiver form a group of two, so it costs the bytes of the state once, in memory and on the
network, and the other workers only wait.
"""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.collectives.group import Group
from manyhands.collectives.state_sync import send_state
from manyhands.contract import Learner, State
from manyhands.hosts.view import View
from manyhands.runs.saver import gather_state


class ReceivedStates:
    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._states: dict[str, State] = {}
        """By sender."""

    def exchange(self, receivers: Mapping[str, str], view: View, group: Group) -> None:
        """Send the learner's state if this worker leaves, and receive those that it is to get. `receivers`:
        for each worker that leaves, the one that gets its state; the same for all workers of the view."""
        self.drop()
        for sender, receiver in receivers.items():
            ranks = [view.rank(sender), view.rank(receiver)]
            if group.rank not in ranks:
                continue
            sends = group.rank == ranks[0]
            own = gather_state(None, self._learner.snapshot())["learner"] if sends else {}
            pair = group.split(ranks)
            state = send_state(own, pair, 0)
            pair.close()
            if not sends and state:
                self._states[sender] = state

    def drop(self) -> None:
        """Forget what was received: its senders did not leave."""
        self._states.clear()

    def begin_view(self, view: View) -> None:
        """Forget the states of workers that are in this view."""
        for name in self._states.keys() & set(view.names):
            del self._states[name]

    def restore(self) -> list[str]:
        """Let the learner take over the states. Returns the names of their senders."""
        states, self._states = self._states, {}
        if states:
            self._learner.restore(list(states.values()))
        return list(states)
