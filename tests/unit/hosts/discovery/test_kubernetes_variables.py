"""What the pods of a job are told."""

from __future__ import annotations

import pytest

from manyhands.errors import ClusterError
from manyhands.hosts.discovery import detect

POD = {
    "JOB_COMPLETION_INDEX": "1",
    "MANYHANDS_PODS": "3",
    "MANYHANDS_COORDINATOR": "digits-0.digits:29600",
}


def test_a_pod_knows_its_siblings_by_their_names() -> None:
    spec = detect(POD | {"MANYHANDS_SLOTS": "8"}, hostname="digits-1")
    assert [e.host for e in spec.entries] == ["digits-0.digits", "digits-1", "digits-2.digits"]
    assert (spec.host, spec.port, spec.me.name) == ("digits-0.digits", 29600, "pod-1")
    assert (spec.size, spec.num_workers) == (3, 24)


def test_names_that_do_not_end_in_an_index_are_left_unknown() -> None:
    spec = detect(POD | {"MANYHANDS_COORDINATOR": "10.1.2.3:80"})
    assert spec.entries[2].host == ""


def test_an_index_alone_is_no_cluster() -> None:
    assert detect({"JOB_COMPLETION_INDEX": "1"}, or_alone=True).size == 1
    with pytest.raises(ClusterError, match="the index alone does not say how many pods"):
        detect({"JOB_COMPLETION_INDEX": "1"})


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"JOB_COMPLETION_INDEX": None}, "MANYHANDS_PODS is set, but JOB_COMPLETION_INDEX is not"),
        ({"MANYHANDS_PODS": None}, "MANYHANDS_COORDINATOR is set, but MANYHANDS_PODS is not"),
        ({"MANYHANDS_COORDINATOR": None}, "but MANYHANDS_COORDINATOR is not"),
        ({"JOB_COMPLETION_INDEX": "3"}, "is 3 and MANYHANDS_PODS is 3: pods go from 0 to 2"),
        ({"JOB_COMPLETION_INDEX": "a"}, "JOB_COMPLETION_INDEX is 'a'"),
        ({"MANYHANDS_PODS": "0"}, "MANYHANDS_PODS is 0"),
        ({"MANYHANDS_PODS": "many"}, "MANYHANDS_PODS is 'many'"),
        ({"MANYHANDS_COORDINATOR": "digits-0"}, "it has no port: write digits-0:2222"),
        ({"MANYHANDS_COORDINATOR": "digits-0:http"}, "its port 'http' is not a number"),
        ({"MANYHANDS_SLOTS": "0"}, "MANYHANDS_SLOTS is 0: it must be from 1 to 1024"),
    ],
)
def test_errors_name_the_wrong_variable(change: dict[str, str | None], wanted: str) -> None:
    environ = {name: value for name, value in (POD | change).items() if value is not None}
    with pytest.raises(ClusterError) as caught:
        detect(environ)
    assert wanted in str(caught.value)
