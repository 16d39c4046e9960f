"""Who sits where in a view: replicas that are whole stay together, and the first worker can save."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.coordinator.views import in_replicas
from manyhands.hosts.view import SERVER, Seat, View


def ordered(workers: str, *, size: int, before: str = "", cant_save: str = "") -> str:
    """Each letter is a worker; replicas before are separated by spaces."""
    found = in_replicas(
        list(workers),
        size=size,
        before=[list(replica) for replica in before.split()],
        may_save=lambda name: name not in cant_save,
    )
    return "".join(found)


def test_whole_replicas_stay_together_and_come_first() -> None:
    assert ordered("bcd", size=2, before="ab cd") == "cdb"
    assert ordered("abcdef", size=2, before="ab cd ef") == "abcdef"
    assert ordered("bdef", size=2, before="ab cd ef") == "efbd"
    assert ordered("cdbx", size=2, before="cd") == "cdbx"


def test_of_all_replicas_one_that_can_save_is_the_first() -> None:
    assert ordered("abcd", size=2, before="ab cd", cant_save="a") == "cdab"
    assert ordered("abcd", size=2, before="ab cd", cant_save="bd") == "abcd"
    assert ordered("abc", size=1, cant_save="a") == "bca"
    assert ordered("abc", size=2, cant_save="a") == "abc", "c alone is no replica"


@given(
    alive=st.lists(st.sampled_from("abcdefghij"), unique=True),
    size=st.integers(1, 4),
    cant_save=st.sets(st.sampled_from("abcdefghij")),
)
def test_no_worker_is_lost_and_no_whole_replica_is_split(
    alive: list[str], size: int, cant_save: set[str]
) -> None:
    letters = "abcdefghij"[: 10 - 10 % size]
    before = [letters[first : first + size] for first in range(0, len(letters), size)]
    alive.sort()
    found = ordered(
        "".join(alive), size=size, before=" ".join(before), cant_save="".join(cant_save)
    )
    assert sorted(found) == alive
    for replica in before:
        if set(replica) <= set(alive):
            assert replica in found
            assert found.index(replica) % size == 0


def test_replicas_are_neighbours_in_rank() -> None:
    seats = (*(Seat(name, "here") for name in "abcd"), Seat("s", "here", role=SERVER))
    view = View(1, seats, replica_size=2)
    assert [[seat.name for seat in replica] for replica in view.replicas] == [
        ["a", "b"],
        ["c", "d"],
    ]
    assert [view.replica(name) for name in "abcd"] == [0, 0, 1, 1]
    assert [len(replica) for replica in View(1, seats).replicas] == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="4 workers, in replicas of 3"):
        View(1, seats, replica_size=3)
