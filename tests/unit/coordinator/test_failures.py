"""The first failure: a consequence never hides its cause."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from manyhands.coordinator.failures import FirstFailure, Grade, MemberFailure

SETTLE_S = 1.0


def cause(member: str) -> MemberFailure:
    return MemberFailure(member, "killed by SIGKILL", exit_code=137)


def consequence(member: str) -> MemberFailure:
    return MemberFailure(member, "lost a peer", grade=Grade.CONSEQUENCE)


def suspicion(member: str) -> MemberFailure:
    return MemberFailure(member, "the link is closed", grade=Grade.SUSPICION)


def judge(
    arrivals: list[tuple[float, MemberFailure]], *, every_s: float, until_s: float
) -> MemberFailure | None:
    """Add the failures as they arrive and ask for the verdict all the time."""
    first = FirstFailure(SETTLE_S)
    todo = sorted(arrivals, key=lambda arrival: arrival[0])
    for tick in range(int(until_s / every_s) + 1):
        now = tick * every_s
        while todo and todo[0][0] <= now:
            at, failure = todo.pop(0)
            first.add(failure, at)
        if (verdict := first.verdict(now)) is not None:
            return verdict
    return None


times = st.floats(0.0, 0.9)


@given(
    victims=st.lists(times, min_size=1, max_size=5),
    culprit=times,
    suspicions=st.lists(times, max_size=2),
    every_s=st.sampled_from([0.01, 0.05, 0.1]),
)
def test_a_cause_in_time_is_never_hidden(
    victims: list[float], culprit: float, suspicions: list[float], every_s: float
) -> None:
    arrivals: list[tuple[float, MemberFailure]] = [
        (at, consequence(f"worker-{i}")) for i, at in enumerate(victims)
    ]
    # Links close before anybody says why: the culprit's own, and those of its peers.
    arrivals += [(at, suspicion(f"worker-{i}")) for i, at in enumerate(suspicions)]
    arrivals.append((min(culprit, *victims), suspicion("culprit")))
    arrivals.append((culprit, cause("culprit")))
    # The culprit's peers, once ended, exit with a code of their own: no cause of anything.
    arrivals += [(at, cause(f"worker-{i}")) for i, at in enumerate(victims) if at >= culprit]
    arrivals.sort(key=lambda arrival: (arrival[0], arrival[1] != cause("culprit")))
    verdict = judge(arrivals, every_s=every_s, until_s=3.0)
    assert verdict is not None
    assert verdict.member == "culprit"


@given(st.lists(times, min_size=1, max_size=5))
def test_without_a_cause_the_first_consequence_is_reported(victims: list[float]) -> None:
    arrivals: list[tuple[float, MemberFailure]] = [
        (at, consequence(f"worker-{i}")) for i, at in enumerate(sorted(victims))
    ]
    assert judge(arrivals, every_s=0.05, until_s=SETTLE_S + max(victims) - 0.06) is None
    verdict = judge(arrivals, every_s=0.05, until_s=SETTLE_S + max(victims) + 0.06)
    assert verdict == consequence("worker-0")


def test_a_cause_is_certain_at_once() -> None:
    first = FirstFailure(SETTLE_S)
    first.add(cause("a"), 5.0)
    first.add(cause("b"), 5.0)
    assert first.verdict(5.0) == cause("a")


def test_the_first_reason_of_a_member_counts() -> None:
    """A worker that lost a peer, and said so, exits with 1: that exit is no cause."""
    first = FirstFailure(SETTLE_S)
    first.add(consequence("a"), 0.0)
    first.add(MemberFailure("a", "ended with exit code 1"), 0.1)
    assert first.verdict(0.2) is None
    first.add(cause("b"), 0.3)
    assert first.verdict(0.3) == cause("b")


def test_a_suspicion_counts_only_when_nothing_better_comes() -> None:
    first = FirstFailure(SETTLE_S)
    first.add(suspicion("a"), 0.0)
    assert first.verdict(0.5) is None
    assert first.verdict(SETTLE_S) == suspicion("a")
    first.add(consequence("b"), SETTLE_S)
    assert first.verdict(2 * SETTLE_S) == consequence("b")
    first.add(cause("a"), 2 * SETTLE_S)
    assert first.verdict(2 * SETTLE_S) == cause("a")
