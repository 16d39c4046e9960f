"""How Slurm writes hosts and counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import ClusterError
from manyhands.hosts.discovery.nodelist import expand_nodelist
from manyhands.hosts.discovery.slurm import expand_counts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", "node1"),
        ("node[01-04,07],gpu1", "node01 node02 node03 node04 node07 gpu1"),
        ("n[8-10]", "n8 n9 n10"),
        ("n[08-10]", "n08 n09 n10"),
        ("n[099-101]", "n099 n100 n101"),
        ("rack[1-2]n[1,3]", "rack1n1 rack1n3 rack2n1 rack2n3"),
        ("n[1-2]-ib.site.org,x", "n1-ib.site.org n2-ib.site.org x"),
        ("[1-2]", "1 2"),
        ("a,b,c[5]", "a b c5"),
    ],
)
def test_lists(text: str, hosts: str) -> None:
    assert expand_nodelist(text) == hosts.split()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "there is no host"),
        ("node[01-04", "a '[' without its ']'"),
        ("node01-04]", "a ']' without its '['"),
        ("n[1-[2-3]]", "a bracket inside a bracket"),
        ("n[]", "'' in brackets is not a number or LOW-HIGH"),
        ("n[1-]", "'1-' in brackets"),
        ("n[a-c]", "'a-c' in brackets"),
        ("n[1-2-3]", "'1-2-3' in brackets"),
        ("n[4-1]", "4-1 goes down"),
        ("a,,b", "there is nothing between two commas"),
        ("a,", "there is nothing between two commas"),
        ("a b", "'a b' can't be part of a host's name"),
        ("n[1-2],n2", "n2 is there twice"),
        ("n[0-999999999]", "more than 100000 hosts"),
        ("n[0-999][0-999]", "more than 100000 hosts"),
    ],
)
def test_broken_lists_are_named(text: str, wanted: str) -> None:
    with pytest.raises(ClusterError) as caught:
        expand_nodelist(text, name="SLURM_STEP_NODELIST")
    assert wanted in str(caught.value)
    assert f"SLURM_STEP_NODELIST is {text!r}" in str(caught.value)


@given(
    st.text("ab-", min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9)), min_size=1, max_size=5),
    st.integers(1, 5),
)
def test_brackets_round_trip(prefix: str, ranges: list[tuple[int, int]], width: int) -> None:
    numbers, parts = [], []
    at = 0
    for skip, length in ranges:
        low, high = at + skip, at + skip + length
        parts.append(f"{low:0{width}}-{high:0{width}}" if length else f"{low:0{width}}")
        numbers += range(low, high + 1)
        at = high + 1
    text = f"{prefix}[{','.join(parts)}]"
    hosts = expand_nodelist(text)
    assert [int(host.removeprefix(prefix)) for host in hosts] == numbers
    assert hosts == [f"{prefix}{number:0{width}}" for number in numbers]


@given(st.text("n[]-,0129 é", max_size=14))
def test_any_text_gives_hosts_or_an_error(text: str) -> None:
    try:
        hosts = expand_nodelist(text)
    except ClusterError:
        return
    assert hosts
    assert len(set(hosts)) == len(hosts)
    assert not any(set(host) & set("[], ") for host in hosts)


def test_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]


@pytest.mark.parametrize("text", ["", "2(x", "x3", "2(3)", "1,,2", "1(x999999)"])
def test_broken_counts_are_named(text: str) -> None:
    with pytest.raises(ClusterError, match="is not a number of tasks"):
        expand_counts(text)
