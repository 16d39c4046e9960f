"""srun's variables: who each task is, where the first one is, and what is said of wrong ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import ClusterError
from manyhands.hosts.discovery import detect

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}


def test_a_task_knows_all_others_by_the_layout() -> None:
    spec = detect(STEP)
    assert [(e.host, e.local_rank) for e in spec.entries] == [
        ("node01", 0),
        ("node01", 1),
        ("node02", 0),
        ("node02", 1),
    ]
    assert (spec.me.name, spec.me.rank, spec.size, spec.source) == ("task-2", 2, 4, "srun")
    assert (spec.host, spec.port) == ("node01", 15000 + (8 * 4711 + 1) % 16000)


def test_the_other_usual_layout() -> None:
    spec = detect(
        STEP | {"SLURM_DISTRIBUTION": "cyclic", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}
    )
    assert [e.host for e in spec.entries] == ["node01", "node02", "node01", "node02"]
    assert [e.local_rank for e in spec.entries] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_DISTRIBUTION": "plane=2"},
        {"SLURM_TASKS_PER_NODE": "3,1"},
        {"SLURM_TASKS_PER_NODE": "2(x3)"},
        {"SLURM_LOCALID": "1"},
    ],
)
def test_a_layout_that_does_not_fit_leaves_the_others_unknown(change: dict[str, str]) -> None:
    spec = detect(STEP | change)
    assert [e.host for e in spec.entries] == ["node01", "", "node02", ""]
    assert spec.me.local_rank == int((STEP | change)["SLURM_LOCALID"])


def test_the_list_and_the_number_of_the_step_count_before_those_of_the_job() -> None:
    step = {"SLURM_STEP_NODELIST": "node02", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NODEID": "0"}
    spec = detect(STEP | step)
    assert (spec.size, spec.host, spec.me.host) == (3, "node02", "node02")


def test_master_variables_of_the_script_take_precedence() -> None:
    spec = detect(STEP | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "3000", "WORLD_SIZE": "4"})
    assert (spec.host, spec.port, spec.me.rank) == ("10.0.0.9", 3000, 2)


def test_a_job_script_itself_is_one_process() -> None:
    script = {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"}
    assert detect(script, or_alone=True).size == 1
    with pytest.raises(
        ClusterError, match="inside the Slurm job 4711, but srun has not started it"
    ):
        detect(script)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID is 4 and SLURM_NTASKS is 4: tasks go from 0 to 3"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x': it must be a whole number"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS is 'many'"),
        ({"SLURM_NTASKS": "0"}, "SLURM_NTASKS is 0: it must be from 1"),
        ({"SLURM_NTASKS": None}, "SLURM_PROCID is set, but SLURM_NTASKS is not"),
        ({"SLURM_JOB_NODELIST": None}, "but SLURM_JOB_NODELIST is not"),
        ({"SLURM_JOB_ID": None}, "but SLURM_JOB_ID is not"),
        ({"SLURM_JOB_ID": "j"}, "SLURM_JOB_ID is 'j'"),
        ({"SLURM_LOCALID": "-1"}, "SLURM_LOCALID is '-1'"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID is 2, and SLURM_JOB_NODELIST is 'node[01-02]'"),
        ({"SLURM_NODEID": None}, "Neither SLURM_NODEID nor SLURMD_NODENAME says which host"),
        ({"SLURM_JOB_NODELIST": "node[01-"}, "a '[' without its ']'"),
        ({"SLURM_TASKS_PER_NODE": "two"}, "SLURM_TASKS_PER_NODE is 'two'"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is 0: it must be from 1 to 65535"),
        ({"MASTER_ADDR": "a b"}, "MASTER_ADDR is 'a b'"),
        ({"WORLD_SIZE": "5"}, "WORLD_SIZE is '5', and srun has started 4 tasks"),
    ],
)
def test_errors_name_the_wrong_variable(change: dict[str, str | None], wanted: str) -> None:
    environ = {name: value for name, value in (STEP | change).items() if value is not None}
    with pytest.raises(ClusterError) as caught:
        detect(environ)
    assert wanted in str(caught.value)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=9),
    st.sampled_from(["block", "cyclic"]),
    st.integers(1, 10**9),
)
def test_all_tasks_of_a_step_read_the_same_cluster(
    counts: list[int], layout: str, job: int
) -> None:
    spots = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    if layout == "cyclic":
        spots.sort(key=lambda spot: spot[::-1])
    seen = set()
    for rank, (node, local) in enumerate(spots):
        spec = detect(
            STEP
            | {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(len(spots)), "SLURM_JOB_ID": str(job)}
            | {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(local), "SLURM_DISTRIBUTION": layout}
            | {"SLURM_JOB_NODELIST": f"n[0-{len(counts) - 1}]"}
            | {"SLURM_TASKS_PER_NODE": ",".join(map(str, counts))},
        )
        assert (spec.me.rank, spec.me.host, spec.me.local_rank) == (rank, f"n{node}", local)
        seen.add((spec.entries, spec.host, spec.port))
    assert len(seen) == 1
    assert 15000 <= next(iter(seen))[2] < 31000, "below the ports that Linux gives out by itself"
