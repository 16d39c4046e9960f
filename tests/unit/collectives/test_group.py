"""Every operation of a group, over gloo and in shared memory in real processes, and between threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from group_programs import DTYPES, MOVED, MOVES, REDUCES, Operation, Workers, execute, workers
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.collectives.group import Group, peer_lost
from manyhands.collectives.lone_worker import LoneWorker
from manyhands.testing.thread_group import Mismatch, run_workers

Run = Callable[[Sequence[Operation]], list[list[list[Any]]]]
"""Carries out a program on all workers of one implementation."""

EVERYTHING = [
    *(
        Operation(kind, dtype=dtype, size=3, seed=i)
        for i, dtype in enumerate(DTYPES)
        for kind in REDUCES
    ),
    *(
        Operation(kind, dtype=dtype, size=3, seed=i)
        for i, dtype in enumerate(MOVED)
        for kind in MOVES
    ),
    *(Operation("all_reduce", size=5, op=op, seed=7) for op in ("min", "max")),
    *(Operation("reduce_scatter", size=5, op=op, seed=8) for op in ("min", "max")),
    Operation("all_reduce", size=100_000, seed=9),
]


@pytest.fixture(
    scope="module",
    params=["gloo-1", "gloo-2", "gloo-3", "memory-3", "hosts-3"],
)
def processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    kind, size = request.param.split("-")
    folder = tmp_path_factory.mktemp(kind)
    hosts = {"gloo": "", "memory": "aaa", "hosts": "aba"}[kind]
    with workers(int(size), folder, hosts=hosts) as started:
        yield started


def in_threads(size: int, program: Sequence[Operation]) -> list[list[list[Any]]]:
    return run_workers(size, lambda group: execute(group, program))


def expected(size: int) -> list[list[list[Any]]]:
    """The results of EVERYTHING, from the inputs of all workers and what each operation is to do."""
    from group_programs import _input, _numbers

    results: list[list[list[Any]]] = [[] for _ in range(size)]
    for o in EVERYTHING:
        n = o.size
        whole = n * size if o.kind in ("reduce_scatter", "all_to_all") else n
        inputs = [_input(o, rank, whole) for rank in range(size)]
        for rank in range(size):
            if o.kind in REDUCES:
                stacked = torch.stack([each.double() for each in inputs])
                found = {"sum": stacked.sum(0), "min": stacked.amin(0), "max": stacked.amax(0)}[
                    o.op
                ]
                found = found if o.kind == "all_reduce" else found[rank * n : (rank + 1) * n]
            elif o.kind == "all_gather":
                found = torch.cat([each.view(-1) for each in inputs])
            elif o.kind == "all_to_all":
                found = torch.cat([each[rank * n : (rank + 1) * n] for each in inputs])
            elif o.kind == "uneven":
                parts = []
                for source in range(size):
                    counts = [(source + 2 * to) % (n + 1) for to in range(size)]
                    sent = _input(o, source, sum(counts))
                    parts.append(sent.split(counts)[rank])
                found = torch.cat(parts)
            elif o.kind == "broadcast":
                found = inputs[o.seed % size]
            else:
                found = inputs[(rank - 1) % size]
            if o.dtype == "uint8" and o.kind in REDUCES:
                found = found % 256
            results[rank].append(_numbers(found))
    return results


def test_every_operation_between_processes(processes: Workers) -> None:
    assert processes.execute(EVERYTHING) == expected(processes.size)


def test_a_split_may_be_closed_at_once(processes: Workers) -> None:
    """Also by a worker that is connected before the others are."""
    assert processes.execute([Operation("form")] * 100) == [[[]] * 100] * processes.size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_operation_between_threads(size: int) -> None:
    assert in_threads(size, EVERYTHING) == expected(size)


def test_a_lone_worker_does_the_same_as_a_group_of_one() -> None:
    assert [execute(LoneWorker(), EVERYTHING)] == in_threads(1, EVERYTHING)


def programs(size: int) -> st.SearchStrategy[list[Operation]]:
    ranks = st.permutations(range(size)).flatmap(
        lambda order: st.integers(1, size).map(lambda count: tuple(order[:count]))
    )
    on = st.one_of(st.just(()), ranks)
    sizes, seeds, together = st.integers(0, 40), st.integers(0, 9), st.booleans()
    reduces = st.builds(
        Operation,
        kind=st.sampled_from(REDUCES),
        dtype=st.sampled_from(DTYPES),
        size=sizes,
        op=st.sampled_from(["sum", "min", "max"]),
        seed=seeds,
        on=on,
        together=together,
    )
    moves = st.builds(
        Operation,
        kind=st.sampled_from(MOVES),
        dtype=st.sampled_from(MOVED),
        size=sizes,
        seed=seeds,
        on=on,
        together=together,
    )
    return st.lists(st.one_of(reduces, moves), min_size=1, max_size=6)


@given(data=st.data())
@settings(max_examples=25)
def test_both_implementations_agree_on_any_program(processes: Workers, data: st.DataObject) -> None:
    program = data.draw(programs(processes.size))
    assert processes.execute(program) == in_threads(processes.size, program)


def of_two(work: Callable[[Group], object]) -> None:
    run_workers(2, work)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda g: g.all_reduce(torch.ones(4, 4).t()[:2]),
            r"all_reduce: .*shape \(2, 4\).*contiguous",
        ),
        (lambda g: g.all_reduce(torch.ones(4, 4)[:, 1]), r"strides \(4,\)"),
        (lambda g: g.broadcast(torch.ones(8)[::2], source=0), "broadcast: .*must be contiguous"),
        (lambda g: g.recv(torch.ones(8)[::2], source=1 - g.rank), "recv: .*must be contiguous"),
        (lambda g: g.all_reduce(torch.ones(3).to_sparse()), "torch.sparse_coo"),
        (
            lambda g: g.all_gather(torch.ones(3), into=torch.ones(5)),
            "make 6, and the other tensor has 5",
        ),
        (
            lambda g: g.reduce_scatter(torch.ones(3), into=torch.ones(2)),
            "make 4, and the other tensor has 3",
        ),
        (
            lambda g: g.all_gather(torch.ones(1), into=torch.ones(2).int()),
            "the same dtype and device",
        ),
        (
            lambda g: g.all_to_all(torch.ones(3), into=torch.ones(3)),
            "can't be cut into 2 equal parts",
        ),
        (
            lambda g: g.all_to_all(torch.ones(3), into=torch.ones(3), send=[1, 1], receive=[1, 2]),
            "needs 2 numbers whose sum is 3",
        ),
        (
            lambda g: g.all_to_all(torch.ones(4), into=torch.ones(4), send=[1, 3], receive=[3, 1]),
            "elements to itself",
        ),
        (lambda g: g.broadcast(torch.ones(1), source=2), "the ranks are 0 to 1"),
        (lambda g: g.send(torch.ones(1), to=g.rank), "that is this worker itself"),
        (lambda g: g.split([0, 0]), r"split\(\[0, 0\]\): different ranks"),
        (lambda g: g.split([0, 5]), "different ranks of 0 to 1"),
        (lambda g: g.split([1 - g.rank]), "is not in it"),
    ],
)
def test_what_gloo_would_get_wrong_is_refused(
    call: Callable[[Group], object], message: str
) -> None:
    """Data in wrong places, and sizes with which it would end the process."""
    with pytest.raises(ValueError, match=message):
        of_two(call)


def test_tensors_that_are_only_read_may_have_any_strides() -> None:
    def work(group: Group) -> None:
        column = torch.arange(6.0).view(2, 3).t()[1] + 10 * group.rank
        gathered = torch.empty(4)
        group.all_gather(column, into=gathered)
        assert gathered.tolist() == [1, 4, 11, 14]

    of_two(work)


def test_numbers_and_uneven_tensors_are_gathered() -> None:
    def work(group: Group) -> None:
        assert group.gather_numbers([group.rank, -7]) == [(0, -7), (1, -7), (2, -7)]
        parts = group.gather_uneven(torch.arange(group.rank, dtype=torch.int16))
        assert [part.tolist() for part in parts] == [[], [0], [0, 1]]
        assert [len(part) for part in group.gather_uneven(torch.empty(0))] == [0, 0, 0]
        group.barrier()

    run_workers(3, work)


def test_threads_that_do_different_things_are_told_so() -> None:
    def work(group: Group) -> None:
        if group.rank:
            group.all_reduce(torch.ones(3))
        else:
            group.all_reduce(torch.ones(4))

    with pytest.raises(
        Mismatch, match=r"rank 0: all_reduce\(sum\) of 4 torch.float32\nrank 1: .* of 3"
    ):
        of_two(work)

    def send(group: Group) -> None:
        if group.rank:
            group.recv(torch.ones(3), source=0)
        else:
            group.send(torch.ones(4), to=1)

    with pytest.raises(
        Mismatch, match=r"4 torch\.float32 were sent, and 3 torch\.float32 expected"
    ):
        of_two(send)

    def uneven(group: Group) -> None:
        receive = [1 + group.rank, 1]
        into = torch.ones(sum(receive))
        group.all_to_all(torch.ones(2), into=into, send=[1, 1], receive=receive)

    with pytest.raises(Mismatch, match="rank 1 expects"):
        of_two(uneven)


def test_a_thread_that_waits_for_one_that_does_not_come_has_a_deadline() -> None:
    def work(group: Group) -> None:
        if group.rank == 0:
            group.all_reduce(torch.ones(3))

    with pytest.raises(
        RuntimeError, match=r"timed out waiting for ranks \[1\] in all_reduce"
    ) as caught:
        run_workers(2, work, timeout_s=0.05)
    assert peer_lost(caught.value)
