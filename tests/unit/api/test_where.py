"""Where members run: what is asked of the cluster, what it has room for, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.api.options import Resolved, resolve_options
from manyhands.api.where import find_cluster, fit_strategy
from manyhands.errors import ManyhandsError, UsageError
from manyhands.hosts.discovery import detect
from manyhands.hosts.spec import ClusterSpec

KEY = "k" * 32


@pytest.fixture(autouse=True)
def _no_cluster_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MANYHANDS_KEY", "RANK", "WORLD_SIZE", "TF_CONFIG", "MANYHANDS_SLOTS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Rank 1 of 2."""
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host-0", "MASTER_PORT": "29500"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    return told


def tf_config(workers: int, servers: int) -> ClusterSpec:
    cluster = {
        "worker": [f"w{n}:2222" for n in range(workers)],
        "ps": [f"p{n}:2222" for n in range(servers)],
    }
    task = {"type": "worker", "index": 0}
    return detect({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}, hostname="w0")


def resolved(**given: Any) -> Resolved:
    return Resolved(given)


def options(cluster: ClusterSpec, **given: Any) -> Any:
    return resolve_options(resolved(**given), job="job.py", settings={}, cluster=cluster)


def test_without_on_there_is_no_cluster() -> None:
    assert find_cluster(resolved()) is None
    with pytest.raises(UsageError, match=r"--slots 2 is for  --on env"):
        find_cluster(resolved(slots=2))
    with pytest.raises(UsageError, match="did you mean 'env'"):
        find_cluster(resolved(on="envi"))


def test_an_environment_without_a_cluster_is_refused() -> None:
    with pytest.raises(ManyhandsError, match="torchrun"):
        find_cluster(resolved(on="env"))


@pytest.mark.usefixtures("environ")
def test_one_of_several_processes_gets_the_command_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["manyhands", "resume", "runs/a"])
    with pytest.raises(UsageError) as caught:
        find_cluster(resolved())
    assert caught.value.exit_code == 2
    assert "one of 2 processes" in str(caught.value)
    assert "\n    (umask 077; manyhands key > run.key)\n" in str(caught.value)
    assert "\n    manyhands resume runs/a --on env --key-file run.key\n" in str(caught.value)
    assert "--on local" in str(caught.value)
    assert find_cluster(resolved(on="local")) is None
    monkeypatch.setenv("MANYHANDS_ON", "local")
    assert find_cluster(resolved()) is None


@pytest.mark.usefixtures("environ")
def test_over_hosts_a_key_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"(?s)no key was given.*manyhands key > run.key"):
        find_cluster(resolved(on="env"))
    monkeypatch.setenv("MANYHANDS_KEY", KEY)
    cluster = find_cluster(given := resolved(on="env"))
    assert cluster is not None
    assert cluster.authority is not None
    assert not cluster.is_coordinator
    assert KEY not in json.dumps(given.sources)
    assert KEY not in repr(cluster)


@pytest.mark.usefixtures("environ")
def test_inside_a_host_no_key_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    cluster = find_cluster(resolved(on="env"))
    assert cluster is not None
    assert cluster.authority is None
    with pytest.raises(UsageError, match="no key was given"):
        find_cluster(resolved(on="env", control="tcp://0.0.0.0:29500"))


@pytest.mark.usefixtures("environ")
def test_slots_apply_to_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_KEY", KEY)
    cluster = find_cluster(resolved(on="env", slots=4))
    assert cluster is not None
    assert cluster.spec.num_workers == 8
    assert options(cluster.spec).workers == 8
    with pytest.raises(UsageError, match="at least 1"):
        find_cluster(resolved(on="env", slots=0))


def test_a_cluster_file_means_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_KEY", KEY)
    path = tmp_path / "cluster.toml"
    path.write_text('[[hosts]]\nname = "a"\n[[hosts]]\nname = "b"\n')
    cluster = find_cluster(resolved(cluster=path, **{"as": "b"}))
    assert cluster is not None
    assert cluster.spec.me.name == "b"


def test_workers_fill_the_remaining_slots() -> None:
    assert options(tf_config(3, 0)).workers == 3
    assert options(tf_config(3, 0), strategy="single").workers == 1
    dedicated = "ps:sync(placement=dedicated,servers=1)"
    assert options(tf_config(3, 0), strategy=dedicated).workers == 2
    assert options(tf_config(3, 2), strategy="ps:sync").workers == 3
    assert options(tf_config(3, 0)).threads == 0, "each host has its own number of cores"


def test_servers_of_the_description_are_dedicated() -> None:
    cluster = tf_config(2, 3)
    assert options(cluster).strategy == "ps:async(placement=dedicated,servers=3)"
    assert fit_strategy("ps:ssp(staleness=2)", cluster) == (
        "ps:ssp(staleness=2,placement=dedicated,servers=3)"
    )
    with pytest.raises(
        UsageError,
        match=r"^3 parameter servers in TF_CONFIG does not work with allreduce.*ps:async",
    ):
        fit_strategy("allreduce", cluster)
    with pytest.raises(UsageError, match=r"servers=1.*names 3 .*Leave servers out"):
        fit_strategy("ps:sync(servers=1)", cluster)
    assert fit_strategy("allreduce", tf_config(2, 0)) == "allreduce"


def test_more_workers_than_slots_are_refused_but_for_a_range() -> None:
    with pytest.raises(UsageError, match=r"--workers 4: TF_CONFIG has 3 slots.*--workers 3:4"):
        options(tf_config(3, 0), workers=4)
    with pytest.raises(UsageError, match=r"--workers 3 and 2 servers"):
        options(tf_config(3, 0), workers=3, strategy="ps:sync(placement=dedicated)")
    ranged = options(tf_config(3, 0), workers="2:6")
    assert (ranged.min_workers, ranged.workers) == (2, 6)
