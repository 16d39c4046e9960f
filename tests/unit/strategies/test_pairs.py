"""The table of pairs: each pair that is refused is tried the way a user would, and the error names one that
works. The pairs that work are run in tests/strategies/test_pairs_in_process.py."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import manyhands
from manyhands import pairs
from manyhands.api.options import Resolved, resolve_options
from manyhands.cli.options import add_training_flags
from manyhands.control.messages import BuiltFacts, JobFields, WorkerFacts
from manyhands.coordinator.job_checks import features_of, why_not
from manyhands.coordinator.options import RunOptions
from manyhands.errors import SpecError
from manyhands.hosts.spec import COORDINATOR, ClusterSpec, Entry
from manyhands.hosts.view import SERVER, WORKER, Seat
from manyhands.pairs import CODEC, WORKERS, Feature, Unsupported
from manyhands.strategies import pairs as table
from manyhands.strategies.pairs import StrategyRow, check_pairs, nearest, refusal_of
from manyhands.strategies.registry import make_strategy
from manyhands.transport.fields import read

ROOT = Path(__file__).parents[3]
ROWS = table.rows()
REFUSED = [(row, refusal) for row in ROWS for refusal in row.refused.values()]


def on_hosts(*hosts: str, servers: int = 0) -> ClusterSpec:
    roles = [COORDINATOR, *[WORKER] * (len(hosts) - 1), *[SERVER] * servers]
    places = [*hosts, *[hosts[-1]] * servers]
    entries = tuple(
        Entry(f"rank-{rank}", role, rank, host=host)
        for rank, (role, host) in enumerate(zip(roles, places, strict=True))
    )
    return ClusterSpec(entries, hosts[0], None, "hosts.txt", entries[0])


def facts_of_job(**known: Any) -> WorkerFacts:
    fields = {"batch_size": 8, "epochs": 2, "eval_every": 1, "monitor": "loss", "patience": None}
    accumulate = known.pop("accumulate", 1)
    return WorkerFacts(
        **{"tables": {}, **known},
        job="Regression",
        fields=read(JobFields, fields),
        all_fields={**fields, "accumulate": accumulate},
        device="cpu",
        torch="2",
        parameters=7,
        train_samples=100,
        eval_samples=0,
        unit=("samples", 1.0),
        built=BuiltFacts([]),
    )


FLAGS: Mapping[Feature, list[str]] = {
    pairs.WORKERS: ["--workers", "3"],
    pairs.SCALING: ["--scale-batch", "sqrt"],
    pairs.ELASTIC: ["--chaos", "pause worker 1s"],
    pairs.TRUST: ["--trust-network"],
}
"""Features that the command line has."""
JOBS: Mapping[Feature, dict[str, Any]] = {
    pairs.ACCUMULATION: {"accumulate": 4},
    pairs.TABLES: {"tables": {"users": "4 numbers a row"}},
    pairs.ROW_MODEL: {"row_model": "WordModel"},
}
"""Features that the job has."""


def try_it(spec: str, feature: Feature, *also: Feature | None) -> None:
    """Do what a user does who wants this feature with this strategy; raise what the user would see."""
    workers = 1 if spec == "single" and feature != WORKERS else 3
    hosts = pairs.HOSTS in (feature, *also)
    if feature.kind == CODEC and feature.name not in spec:
        spec = f"{spec}+{feature.name}"
    flags = ["--strategy", spec, "--workers", str(workers), *FLAGS.get(feature, [])]
    if feature == pairs.OWN_LOOP:
        with manyhands.join(spec, device="cpu"):
            return
    if feature == pairs.SHRINKING:
        config = make_strategy(spec)
        if why := why_not(1, 2, RunOptions("job.py", spec, 2, config), facts_of_job()):
            raise SpecError(f"a request for 1 worker was refused: {why}")
        return
    cluster = on_hosts("here", "there", "there") if hosts else None
    if feature == pairs.SERVERS:
        cluster = on_hosts("here", "here", "here", servers=2)
    parser = argparse.ArgumentParser()
    add_training_flags(parser)
    options = resolve_options(
        Resolved(vars(parser.parse_args(flags))), job="job.py", settings={}, cluster=cluster
    )
    seats = [
        Seat(f"worker-{n}", "here", device="cuda:0", device_id=f"gpu {n}") for n in range(workers)
    ]
    given = features_of(
        facts_of_job(**JOBS.get(feature, {})),
        seats=seats if pairs.GPUS in (feature, *also) else (),
        spans_hosts=hosts,
    )
    check_pairs(options.config, given, workers=workers)


@pytest.mark.parametrize(
    ("row", "refusal"), [pytest.param(*c, id=f"{c[0].spec}-{c[1].feature.name}") for c in REFUSED]
)
def test_a_refused_pair_is_refused_with_one_that_works(
    row: StrategyRow, refusal: Unsupported
) -> None:
    feature, also = refusal.feature, refusal.along_with
    with pytest.raises(SpecError) as caught:
        try_it(row.spec, feature, also)
    text = str(caught.value)
    assert refusal.why in text
    if feature == pairs.SHRINKING:
        return
    named = re.findall(r"--strategy ('[^']+'|\S+?)(?:\.$|\s)", text) or re.findall(
        r'mh\.join\("(.+?)"\)', text
    )
    assert named, text
    try_it(shlex.split(named[0])[0], feature, also)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.spec)
def test_what_is_not_refused_is_accepted(row: StrategyRow) -> None:
    codecs = {feature for feature in pairs.features() if feature.kind == CODEC}
    assert codecs
    others = {*FLAGS, *JOBS, pairs.HOSTS, pairs.GPUS, pairs.SHRINKING}
    for feature in (others | codecs) - row.refused.keys():
        try_it(row.spec, feature)
        for codec in codecs - row.refused.keys():
            try_it(f"{row.spec}+{codec.name}", feature)


def test_a_codec_works_only_with_what_it_was_shown_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_registered", dict(pairs._registered))
    codec = pairs.register(
        Feature(
            "tiny",
            CODEC,
            "one bit",
            "`+ tiny`",
            works_with=("allreduce",),
            unsupported=(Unsupported(pairs.OWN_LOOP, "it has no residuals there"),),
        )
    )
    assert refusal_of(make_strategy("allreduce"), [codec]) is None
    with pytest.raises(
        SpecError, match=r"tiny does not work with ps:sync: .* with allreduce\. Use  --s"
    ):
        check_pairs(make_strategy("ps:sync"), {codec: "tiny"}, workers=2)
    assert nearest(make_strategy("single"), [codec], workers=1) == "allreduce"
    refusal = refusal_of(make_strategy("allreduce"), [codec, pairs.OWN_LOOP])
    assert refusal is not None
    assert refusal.why == "it has no residuals there"
    assert "| one bit (`+ tiny`) | no (" in table.markdown()


def test_the_nearest_keeps_the_codec() -> None:
    config = make_strategy("allreduce(tables=shared) + int8(chunk=512)")
    with pytest.raises(SpecError) as caught:
        check_pairs(config, {pairs.TABLES: "a table", pairs.HOSTS: "two hosts"}, workers=2)
    assert "does not work with allreduce(tables=shared)+int8(chunk=512): tables=shared" in str(
        caught.value
    )
    assert "Use  --strategy 'allreduce+int8(chunk=512)'." in str(caught.value)


def test_no_two_features_have_one_name() -> None:
    with pytest.raises(ValueError, match="another feature 'workers'"):
        pairs.register(Feature("workers", CODEC, "other", ""))
    assert pairs.register(WORKERS) == WORKERS


def test_the_nearest_keeps_the_other_options() -> None:
    config = make_strategy("ps:ssp(transport=shm,staleness=9)")
    assert nearest(config, [pairs.HOSTS], workers=2) == "ps:ssp(staleness=9)"
    shared = make_strategy("allreduce(tables=shared,bucket_mb=3)")
    given = [pairs.TABLES, pairs.HOSTS, WORKERS]
    assert nearest(shared, given, workers=2) == "allreduce(bucket_mb=3)"


def test_the_table_of_the_documentation_is_that_of_today() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "pairs_table.py"))
    page = tool["PAGE"].read_text()
    assert page == tool["with_table"](page), "write it with  python tools/pairs_table.py"
