"""Every pair of the table that one process can have works, with threads for processes. Those that are refused
are in tests/unit/strategies/test_pairs.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands import pairs
from manyhands.pairs import CODEC, features
from manyhands.strategies.pairs import rows
from manyhands.testing import in_process
from manyhands.testing.conformance import PAIRS, Case, Check, checks_of_pairs

ELSEWHERE = {
    pairs.HOSTS: "tests/hosts, tests/lab",
    pairs.GPUS: "a machine with GPUs",
    pairs.SERVERS: "tests/hosts: a cluster description",
    pairs.OWN_LOOP: "test_join.py: its processes are started by somebody else",
}
"""What one process can't have, and what tests it."""
LIKE_OTHERS = {
    "allreduce(tls=true)": "gloo has TLS for a whole process: tests/unit/collectives/test_gloo_tls.py",
    **{
        f"ps:{mode}(transport=shm)": "inside a host it is the default"
        for mode in ("sync", "async", "ssp", "backup")
    },
}
OVER_TCP = ["ps:sync", "ps:async", "ps:ssp", "ps:backup"]
"""Strategies that are also tried over TCP, which they use by themselves only between hosts."""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with in_process.folder_in_memory() as folder:
        yield folder


def working() -> Iterator[tuple[Case, Check]]:
    for row in rows():
        if row.spec in LIKE_OTHERS:
            continue
        codecs = [f.name for f in features() if f.kind == CODEC and f not in row.refused]
        specs = [row.spec, *(f"{row.spec} + {codec}" for codec in codecs)]
        if row.spec in OVER_TCP:
            specs.append(f"{row.spec}(transport=tcp)")
        for spec in specs:
            case = Case(spec, workers=row.config.traits.default_workers, in_process=True)
            for check in checks_of_pairs(case):
                yield case, check


@pytest.mark.parametrize(
    ("case", "check"),
    [pytest.param(*pair, id=f"{pair[1].__name__}-{pair[0]}") for pair in working()],
)
def test_pairs_that_work(case: Case, check: Check, tmp_path: Path) -> None:
    check(case, tmp_path)


def test_every_feature_is_tried() -> None:
    tried = {*PAIRS, *ELSEWHERE}
    assert {feature.name for feature in features() if feature.kind != CODEC} == {
        feature.name for feature in tried
    }
    assert LIKE_OTHERS.keys() <= {row.spec for row in rows()}
