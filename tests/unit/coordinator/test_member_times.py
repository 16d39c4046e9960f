"""What each member has done: nothing is lost, whom they waited for, and a line that stays short."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.control.messages import StepRow
from manyhands.coordinator.member_times import EXTREMES, MAX_LISTED, MemberTimesMeter
from manyhands.coordinator.progress import CommittedStep, MemberPart
from manyhands.events.events import MEMBER_COLUMNS, MemberTimes, StepCommitted, to_record
from manyhands.events.jsonl import encode
from manyhands.hosts.messages import Beat
from manyhands.hosts.view import SERVER, WORKER

MAX_BYTES = 4096


def column(event: MemberTimes, name: str) -> dict[str, object]:
    at = MEMBER_COLUMNS.index(name)
    return {member: row[at] for member, row in event.members.items()}


def row(
    step: int, compute_s: float | None, wait_s: float | None, *, waited_for: str = "", sent: int = 0
) -> StepRow:
    return StepRow(
        step=step,
        weight=1.0,
        loss_sum=1.0,
        lr=0.1,
        step_s=(compute_s or 0.0) + (wait_s or 0.0),
        compute_s=compute_s,
        wait_s=wait_s,
        bytes_sent=sent,
        waited_for=waited_for,
    )


def committed(number: int, parts: Sequence[MemberPart]) -> CommittedStep:
    event = StepCommitted(
        step=number,
        epoch=0,
        samples=sum(part.samples for part in parts),
        shares={},
        loss=1.0,
        lr=0.1,
        step_s=1.0,
        compute_s=1.0,
        wait_s=0.0,
        bytes_sent=0,
    )
    return CommittedStep(event, len(parts), 1.0, (), parts)


def meter_of(workers: int, *, servers: int = 0, lockstep: bool = True) -> MemberTimesMeter:
    meter = MemberTimesMeter(lockstep=lockstep)
    roles = {f"worker-{n}": WORKER for n in range(workers)}
    meter.enter_view(roles | {f"server-{n}": SERVER for n in range(servers)}, 0.0)
    return meter


def beat(phase: str, *, cpu_s: float = 0.0, updates: int = 0) -> Beat:
    return Beat(phase, 0.0, 0, cpu_s=cpu_s, updates=updates)


def take(meter: MemberTimesMeter, now: float = 100.0) -> MemberTimes:
    event = meter.take(now, step=1)
    assert event is not None
    return event


@settings(max_examples=50)
@given(
    members=st.integers(1, 60),
    num_steps=st.integers(1, 40),
    lockstep=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_steps_samples_and_bytes_add_up(
    members: int, num_steps: int, lockstep: bool, seed: int
) -> None:
    """Over all events, whether members are listed or summed up."""
    chance, meter = random.Random(seed), meter_of(members, lockstep=lockstep)
    samples, sent, now, events = 0, 0, 0.0, []
    for step in range(1, num_steps + 1):
        parts = []
        for n in range(members):
            one = row(step, chance.random(), chance.random(), sent=chance.randint(0, 9))
            parts.append(MemberPart(f"worker-{n}", chance.randint(0, 5), one))
            samples, sent = samples + parts[-1].samples, sent + one.bytes_sent
        meter.committed(committed(step, parts))
        now += chance.random()
        if (event := meter.take(now, step=step)) is not None:
            events.append(event)
    if (event := meter.take(now, step=num_steps, last=True)) is not None:
        events.append(event)
    for name, whole in (("steps", num_steps * members), ("samples", samples), ("bytes_sent", sent)):
        total = 0.0
        for event in events:
            values = column(event, name).values()
            total += sum(value for value in values if isinstance(value, int))
            for summary in event.others.values():
                mean, number = summary[name], summary["members"]
                assert isinstance(mean, tuple)
                assert isinstance(number, int)
                total += mean[1] * number
        assert abs(total - whole) < 1e-3 * members * len(events)


def test_at_most_once_a_second_and_only_if_something_has_changed() -> None:
    meter = meter_of(1)
    meter.committed(committed(1, [MemberPart("worker-0", 4, row(1, 0.1, 0.0))]))
    assert meter.take(0.9, step=1) is None
    event = meter.take(1.25, step=1)
    assert event is not None
    assert (event.seconds, event.step) == (1.25, 1)
    assert meter.take(9.0, step=1) is None
    assert meter.take(9.0, step=1, last=True) is None
    meter.on_beat("worker-0", beat("evaluating"), 9.5)
    meter.on_beat("worker-0", beat("evaluating"), 10.5)
    event = meter.take(10.6, step=1)
    assert event is not None
    assert event.members == {"worker-0": (0, 0, None, None, None, 0, None, "evaluating")}
    meter.committed(committed(2, [MemberPart("worker-0", 4, row(2, 0.1, 0.0))]))
    assert meter.take(10.7, step=2) is None
    assert meter.take(10.7, step=2, last=True) is not None


def test_in_lockstep_all_wait_for_the_last() -> None:
    meter = meter_of(3)
    for step, (first, second, third) in enumerate(
        [((0.2, 0.9), (1.0, 0.1), (0.9, 0.2)), ((0.2, 0.2), (0.2, 0.2), (0.3, 0.1))], start=1
    ):
        parts = [
            MemberPart(f"worker-{n}", 1, row(step, *times))
            for n, times in enumerate([first, second, third])
        ]
        meter.committed(committed(step, parts))
    event = take(meter)
    # The last one of a step waits, too: for the exchange, not for a worker.
    assert column(event, "waited_for") == {
        "worker-0": "worker-1",
        "worker-1": "worker-2",
        "worker-2": "worker-1",
    }
    assert column(event, "compute_s") == {"worker-0": 0.4, "worker-1": 1.2, "worker-2": 1.2}
    assert column(event, "wait_s") == {"worker-0": 1.1, "worker-1": 0.3, "worker-2": 0.3}


def test_a_wait_that_all_share_is_that_for_the_server() -> None:
    meter = meter_of(2, servers=1)
    parts = [
        MemberPart("worker-0", 1, row(1, 0.1, 2.1, waited_for="server-0")),
        MemberPart("worker-1", 1, row(1, 0.2, 2.0, waited_for="server-0")),
    ]
    meter.committed(committed(1, parts))
    event = take(meter)
    assert column(event, "waited_for") == {
        "worker-0": "server-0",
        "worker-1": "server-0",
        "server-0": None,
    }


def test_without_lockstep_workers_wait_for_servers_alone() -> None:
    meter = meter_of(2, servers=2, lockstep=False)
    late = MemberPart("worker-0", 0, row(1, 0.5, 0.1, waited_for="server-1"), applied=False)
    parts = [
        late,
        MemberPart("worker-0", 3, row(1, 0.5, 0.3, waited_for="server-0")),
        MemberPart("worker-1", 2, row(1, 9.0, 0.0, waited_for="worker-77")),
        MemberPart("worker-1", 1, None),
    ]
    parts[1].row.staleness = 3  # type: ignore[union-attr]
    meter.committed(committed(1, parts))
    event = take(meter)
    assert event.members["worker-0"] == (1, 3, 1.0, 0.4, "server-0", 0, 3.0, "joining its peers")
    assert event.members["worker-1"] == (2, 3, 9.0, 0.0, None, 0, 0.0, "joining its peers")


def test_on_a_gpu_nobody_knows_who_waited() -> None:
    meter = meter_of(2)
    parts = [MemberPart(f"worker-{n}", 1, row(1, 0.1, None)) for n in range(2)]
    meter.committed(committed(1, parts))
    event = take(meter)
    assert set(column(event, "wait_s").values()) == {None}
    assert set(column(event, "waited_for").values()) == {None}


def test_servers_are_measured_by_their_beats() -> None:
    meter = meter_of(1, servers=1)
    meter.on_beat("server-0", beat("serving", cpu_s=3.0, updates=7), 1.0)
    assert take(meter, 1.0).members["server-0"] == (
        0,
        None,
        None,
        None,
        None,
        None,
        None,
        "serving",
    )
    meter.on_beat("server-0", beat("serving", cpu_s=0.25, updates=17), 2.0)
    meter.on_beat("server-0", beat("serving", cpu_s=1.5, updates=20), 3.0)  # on two cores
    meter.on_beat("worker-0", beat("training from step 17", cpu_s=0.9), 3.0)
    event = take(meter, 3.0)
    assert event.members["server-0"] == (13, None, 1.75, 0.75, None, None, None, "serving")
    assert event.members["worker-0"] == (0, 0, None, None, None, 0, None, "training")


def test_what_a_dead_member_did_is_told_once() -> None:
    meter = meter_of(2)
    parts = [MemberPart(f"worker-{n}", 2, row(1, 0.1, 0.1)) for n in range(2)]
    meter.committed(committed(1, parts))
    meter.enter_view({"worker-0": WORKER, "worker-2": WORKER}, 5.0)
    assert list(column(take(meter, 6.0), "samples").items()) == [
        ("worker-0", 2),
        ("worker-1", 2),
        ("worker-2", 0),
    ]
    parts = [MemberPart("worker-1", 2, None), MemberPart("worker-2", 2, row(2, 0.1, 0.1))]
    meter.committed(committed(2, parts))
    assert column(take(meter, 8.0), "samples") == {"worker-0": 0, "worker-2": 2, "worker-1": 2}
    meter.on_beat("worker-1", beat("training"), 8.0)
    meter.on_beat("worker-2", beat("resting"), 8.0)
    assert list(take(meter, 9.0).members) == ["worker-0", "worker-2"]


def large(workers: int, servers: int) -> MemberTimesMeter:
    """All numbers are as long as they get, and worker-17 is slow."""
    meter = meter_of(workers, servers=servers, lockstep=not servers)
    for step in range(1, 3):
        parts = []
        for n in range(workers):
            slow = n == 17
            compute_s, wait_s = (987.654321, 0.123456) if slow else (123.456789, 864.321 + n / 7)
            waited_for = f"server-{servers - 1 - n % 3}" if servers else ""
            one = row(step, compute_s, wait_s, waited_for=waited_for, sent=123_456_789_012)
            one.staleness = n
            parts.append(MemberPart(f"worker-{n}", 123_456, one))
        meter.committed(committed(step, parts))
    for n in range(workers):
        phase = "saving the checkpoint of step 123456" if n == 40 else "training from step 123456"
        meter.on_beat(f"worker-{n}", beat(phase), 1.0)
    for now in (1.0, 2.0):
        for n in range(servers):
            phase = "finishing whatever can be finished before the end of the run"
            one_beat = beat(phase, cpu_s=0.123456789, updates=1_234_567 * int(now))
            meter.on_beat(f"server-{n}", one_beat, now)
    return meter


def test_a_line_has_at_most_4_kb() -> None:
    for workers, servers in (
        (MAX_LISTED, 0),
        (MAX_LISTED // 2, MAX_LISTED // 2),
        (1000, 0),
        (9000, 999),
    ):
        event = take(large(workers, servers))
        size = len(encode(to_record(event)))
        assert size <= MAX_BYTES, (workers, servers, size)
        whole = workers + servers
        listed = whole if whole <= MAX_LISTED else EXTREMES
        assert len(event.members) == listed
        numbers = [summary["members"] for summary in event.others.values()]
        assert listed + sum(n for n in numbers if isinstance(n, int)) == whole


def test_of_many_members_those_that_stand_out_are_listed() -> None:
    event = take(large(1000, 0))
    assert column(event, "compute_s")["worker-17"] == 1975.3086
    assert column(event, "phase")["worker-40"] == "saving the checkpoint"
    assert "worker-999" in event.members, "the one that waited longest"
    others = event.others["workers"]
    assert others["members"] == 1000 - EXTREMES
    assert others["steps"] == (2, 2.0, 2)
    assert others["compute_s"] == (246.9136, 246.9136, 246.9136)
    assert others["waited_for"] == {"worker-17": 1000 - EXTREMES}
    assert others["phase"] == {"training": 1000 - EXTREMES}
