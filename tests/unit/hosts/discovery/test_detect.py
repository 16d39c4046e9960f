"""Which of several descriptions counts, and what is said when they contradict each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhands.errors import ClusterError
from manyhands.hosts.discovery import describe, detect

RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
TORCHRUN = RANK | {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1"}
SRUN = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "n1",
}
POD = {"JOB_COMPLETION_INDEX": "1", "MANYHANDS_PODS": "2", "MANYHANDS_COORDINATOR": "p-0:1"}


def tf(index: int, count: int = 2) -> dict[str, str]:
    cluster = {"worker": [f"h{n}:1" for n in range(count)]}
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
    }


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        (TORCHRUN | SRUN | POD | tf(1), "torchrun"),
        (tf(1) | RANK | SRUN | POD, "TF_CONFIG"),
        (RANK | SRUN | POD, "RANK and WORLD_SIZE"),
        (SRUN | POD, "srun"),
        (POD, "Kubernetes"),
    ],
)
def test_the_order_when_all_agree(environ: dict[str, str], source: str) -> None:
    assert detect(environ).source == source


def test_a_cluster_file_takes_precedence(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[[hosts]]\nname="a"\n[[hosts]]\nname="b"\n')
    named = {"MANYHANDS_CLUSTER": str(path), "MANYHANDS_AS": "b"}
    assert detect(TORCHRUN | tf(0) | named).me.name == "b"
    assert detect(TORCHRUN, cluster=path, name="a").me.name == "a"
    assert detect(named, name="a").me.name == "a", "a flag counts before a variable"


def test_torchrun_takes_precedence_over_its_own_launcher() -> None:
    one_of_four = SRUN | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert detect(TORCHRUN | one_of_four).size == 2


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (tf(0) | RANK, ("TF_CONFIG", "number 0 of 2", "RANK and WORLD_SIZE", "number 1 of 2")),
        (RANK | SRUN | {"SLURM_NTASKS": "3"}, ("RANK and WORLD_SIZE", "srun", "number 1 of 3")),
        (SRUN | POD | {"MANYHANDS_PODS": "5"}, ("srun", "Kubernetes", "number 1 of 5")),
        (tf(1, count=3) | POD, ("TF_CONFIG", "number 1 of 3", "Kubernetes", "number 1 of 2")),
    ],
)
def test_a_contradiction_names_both(environ: dict[str, str], names: tuple[str, ...]) -> None:
    with pytest.raises(ClusterError) as caught:
        detect(environ)
    for name in (*names, "Unset"):
        assert name in str(caught.value)


def test_a_name_without_a_file_is_refused() -> None:
    with pytest.raises(ClusterError, match="--as b: names are those of a cluster file"):
        detect(RANK, name="b")
    with pytest.raises(ClusterError, match="MANYHANDS_AS=b: names"):
        detect(RANK | {"MANYHANDS_AS": "b"})


def test_no_description_is_an_error_that_lists_the_options() -> None:
    with pytest.raises(ClusterError) as caught:
        detect({})
    for way in ("torchrun", "srun", "launch kubernetes", "WORLD_SIZE", "TF_CONFIG", "--cluster"):
        assert way in str(caught.value)


def test_the_table_shows_the_cluster() -> None:
    lines = describe(detect(tf(1, count=3) | {"HOME": "/"})).splitlines()
    assert lines[0] == "read from    TF_CONFIG"
    assert lines[1] == "coordinator  h0:1"
    assert lines[2] == "room for     3 workers"
    assert lines[3] == "this is      worker-1"
    assert lines[5].split() == ["rank", "name", "role", "host", "port", "local", "rank", "slots"]
    assert lines[7].split("  ")[-1].strip() == "<- this process"
    assert len(lines) == 9
