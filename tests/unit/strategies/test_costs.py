"""What strategies say that they cost. tests/strategies/test_costs.py compares it with real runs."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from manyhands.contract import Strategy
from manyhands.costs import (
    CostFacts,
    ModelSize,
    ParameterSize,
    TableSize,
    Transfer,
    between_hosts,
    known_bytes,
    sent_by,
)
from manyhands.hosts.view import SERVER, Seat, View
from manyhands.strategies import pairs
from manyhands.strategies.costs import cost_rows
from manyhands.strategies.registry import STRATEGIES, make_strategy

LAYERS, SIDE = 12, 512
M = LAYERS * SIDE * SIDE * 4
"""Bytes of the model."""
MOMENTUM = 1


def model(**changed: Any) -> ModelSize:
    numel = SIDE * SIDE
    parameters = tuple(
        ParameterSize(f"{i}.weight", (SIDE, SIDE), "float32", 4, 0, i, MOMENTUM * 4 * numel)
        for i in range(LAYERS)
    )
    return ModelSize(**{"parameters": parameters, **changed})


def members(workers: int, servers: int = 0, *, hosts: int = 1) -> View:
    seats = [Seat(f"worker-{i}", f"host-{i * hosts // workers}") for i in range(workers)]
    seats += [Seat(f"server-{i}", f"host-{i % hosts}", role=SERVER) for i in range(servers)]
    return View(1, tuple(seats))


def traffic(spec: str, view: View, **changed: Any) -> Sequence[Transfer]:
    given = {"model": model(), "workers": view.world, "encrypted": False, **changed}
    facts = CostFacts(**given, servers=len(view.seats) - view.world)
    transfers = make_strategy(spec).traffic(facts, view)
    assert transfers is not None
    return transfers


def memory(spec: str, *, workers: int, servers: int = 0, **changed: Any) -> Counter[str]:
    """Return the known bytes of all members by purpose, without the copy for checkpoints."""
    uses = make_strategy(spec).memory(
        CostFacts(**{"model": model(), "workers": workers, "servers": servers, **changed})
    )
    assert uses is not None
    number = {"worker": workers, "host": 1, "writer": 0, "server": servers or workers}
    total: Counter[str] = Counter()
    for use in uses:
        total[use.purpose] += number[use.of] * (use.num_bytes or 0)
    return total


@pytest.mark.parametrize("config", [row.config for row in pairs.rows()], ids=repr)
def test_every_strategy_says_what_it_costs(config: Strategy) -> None:
    workers = config.traits.default_workers
    servers = config.servers_for(workers)
    view, facts = members(workers, servers), CostFacts(model(), workers, servers)
    transfers, uses = config.traffic(facts, view), config.memory(facts)
    assert transfers is not None
    assert uses is not None
    names = set(view.names)
    for each in transfers:
        assert each.num_bytes is not None
        assert each.num_bytes >= 0
        assert 0 <= each.after <= 1
        assert {each.source, each.to} <= names
        assert each.source != each.to
    assert [use.purpose for use in uses if use.num_bytes is None] == ["activations and temporaries"]
    assert all(value for _, value in cost_rows(config, facts, view))


def test_costs_need_no_torch() -> None:
    specs = [*STRATEGIES, "ps:sync(transport=tcp)"]
    code = (
        "import sys\n"
        "from manyhands.costs import *\n"
        "from manyhands.hosts.view import *\n"
        "from manyhands.strategies.registry import make_strategy\n"
        "model = ModelSize((ParameterSize('a', (9, 9), 'float32', 4),))\n"
        "view = View(1, (Seat('a', 'h'), Seat('b', 'h')))\n"
        f"for config in map(make_strategy, {specs}):\n"
        "    facts = CostFacts(model, workers=2)\n"
        "    config.traffic(facts, view), config.memory(facts)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_single_worker_sends_nothing() -> None:
    assert not traffic("single", members(1))
    assert not known_bytes(traffic("allreduce", members(1)))


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_a_ring_sends_nearly_twice_the_gradients(workers: int) -> None:
    sent = sent_by(traffic("allreduce(transport=tcp)", members(workers)))
    between = sent_by(traffic("allreduce", members(workers, hosts=workers)))
    assert between == pytest.approx(sent, rel=1e-5)
    assert len(sent) == workers
    for num_bytes in sent.values():
        assert num_bytes == pytest.approx(2 * (workers - 1) / workers * M, rel=1e-4)


@pytest.mark.parametrize("spec", ["allreduce", "local(every=1)"])
def test_workers_of_one_host_reduce_in_memory(spec: str) -> None:
    found = traffic(spec, members(4))
    assert not sent_by(found)
    for num_bytes in sent_by(found, "memory").values():
        assert num_bytes == pytest.approx(2 * 3 / 4 * M, rel=1e-3)
    gpus = View(1, tuple(replace(seat, device="cuda:0") for seat in members(4).seats))
    assert sent_by(traffic(spec, gpus, gpu=True))
    exchanged = "exchange"
    assert memory(spec, workers=4)[exchanged]
    for without in ({"workers": 1}, {"workers": 4, "gpu": True}, {"workers": 4, "hosts": 4}):
        assert not memory(spec, **without)[exchanged]
    assert memory(spec, workers=4, hosts=2)[exchanged]


@pytest.mark.parametrize("hosts", [2, 3])
def test_between_hosts_the_sums_of_each_host_travel_once(hosts: int) -> None:
    view = members(3 * hosts, hosts=hosts)
    found = traffic("allreduce", view)
    assert known_bytes(between_hosts(found, lambda name: view.seat(name).host)) == pytest.approx(
        2 * (hosts - 1) * M, rel=1e-3
    )
    leaders = {f"worker-{3 * host}" for host in range(hosts)}
    assert set(sent_by(found)) == leaders
    for num_bytes in sent_by(found, "memory").values():
        assert num_bytes == pytest.approx(2 * 2 / 3 * M, rel=1e-3)
    uses = {
        spec: memory(spec, workers=6, hosts=2)["sums of a host"]
        for spec in ("allreduce", "allreduce(transport=tcp)")
    }
    assert uses["allreduce(transport=tcp)"] == 0
    assert uses["allreduce"] == pytest.approx(M, rel=0.05)


def test_buckets_leave_while_backward_runs() -> None:
    found = [t for t in traffic("allreduce(bucket_mb=3)", members(2)) if t.source == "worker-0"]
    gradients = [t for t in found if t.what == "gradients"]
    assert [t.after for t in gradients] == pytest.approx([1 / 4, 1 / 2, 3 / 4, 1.0])
    assert known_bytes(gradients) == M
    assert known_bytes(found) == M + 8 * (2 + LAYERS)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_a_codec_makes_gradients_smaller_and_nothing_else(workers: int) -> None:
    view = members(workers)
    plain = traffic("allreduce(transport=tcp)", view)
    coded = traffic("allreduce + int8(chunk=512)", view)
    ratio = known_bytes([t for t in coded if "gradients" in t.what]) / known_bytes(
        [t for t in plain if "gradients" in t.what]
    )
    assert ratio == pytest.approx(1 / 4 + 1 / 512, rel=1e-4)
    others = [[t for t in found if "gradients" not in t.what] for found in (plain, coded)]
    assert others[0] == others[1]
    assert len(set(sent_by(coded).values())) == 1
    assert {t.after for t in coded if t.what == "sums of gradients"} == {1.0}
    uses = memory("allreduce + int8(chunk=512)", workers=workers)
    assert uses["encoded gradients"] == pytest.approx(2 * ratio * M * workers, rel=1e-4)
    assert not memory("allreduce + int8", workers=1)["encoded gradients"]


def test_buckets_are_smaller_between_hosts() -> None:
    inside = traffic("allreduce", members(2))
    between = traffic("allreduce", members(2, hosts=2))
    assert len({t.after for t in inside}) == 1
    assert len({t.after for t in between}) > 4
    assert known_bytes(between) == known_bytes(inside)


def test_a_ring_over_two_hosts_crosses_twice() -> None:
    view = members(8, hosts=2)
    found = traffic("allreduce(transport=tcp)", view)
    crossing = between_hosts(found, lambda name: view.seat(name).host)
    assert known_bytes(crossing) == pytest.approx(2 * 2 * 7 / 8 * M, rel=1e-3)


def test_buffers_and_weights_of_samples_are_sent_too() -> None:
    spec = "allreduce(transport=tcp)"
    plain = known_bytes(traffic(spec, members(3)))
    more = traffic(spec, members(3), model=model(buffers={"float32": 1000}, weighted=True))
    assert known_bytes(more) == pytest.approx(plain + 2 * 1000 + 3 * round(8 * 4 / 3), abs=3)


def test_a_frozen_parameter_is_kept_and_not_sent() -> None:
    frozen = ParameterSize("head", (1000,), "float32", 4, -1, -1, None)
    whole = model(parameters=(*model().parameters, frozen))
    for spec in STRATEGIES:
        view = members(1 if spec == "single" else 2)
        assert known_bytes(traffic(spec, view, model=whole)) == known_bytes(traffic(spec, view))
        known = memory(spec, workers=view.world).total()
        assert memory(spec, workers=view.world, model=whole).total() == known + 4000 * view.world


@pytest.mark.parametrize("spec", ["ps:sync", "ps:async", "ps:ssp", "ps:backup(transport=shm)"])
def test_servers_of_one_host_send_nothing(spec: str) -> None:
    found = traffic(spec, members(3))
    assert not sent_by(found)
    assert sent_by(found, "memory")
    # They might come to be on several.
    assert sent_by(traffic(spec.removesuffix("(transport=shm)"), members(3), spans_hosts=True))


@pytest.mark.parametrize(
    ("spec", "servers", "models"),
    [
        ("ps:sync(transport=tcp)", 0, 2 * 3),
        ("ps:sync(transport=tcp,replicas=0)", 0, 2 * 3),
        ("ps:async(transport=tcp)", 0, 3 * 3),
        ("ps:ssp(transport=tcp)", 0, 3 * 3),
        ("ps:sync(transport=tcp,placement=dedicated)", 2, 4 + 4 + 1),
        ("ps:async(transport=tcp,placement=dedicated)", 2, 4 + 4 + 4),
        ("ps:backup(transport=tcp)", 0, 3 / 4 * 3 + (3 - 1) + 1),
    ],
)
def test_what_servers_exchange_in_models(spec: str, servers: int, models: float) -> None:
    found = traffic(spec, members(4, servers))
    assert known_bytes(found) == pytest.approx(models * M, rel=0.01)


def test_a_late_part_costs_its_gradient() -> None:
    view = members(4)
    plain = traffic("ps:backup(transport=tcp)", view)
    late = traffic("ps:backup(transport=tcp)", view, late_parts=1.0)
    assert known_bytes(late) - known_bytes(plain) == pytest.approx(3 / 4 * M, rel=0.01)


def test_tls_costs_a_little() -> None:
    plain = known_bytes(traffic("ps:sync(transport=tcp)", members(3)))
    tls = known_bytes(traffic("ps:sync(transport=tcp)", members(3), encrypted=True))
    assert 1.001 < tls / plain < 1.002


def test_spans_leave_in_the_order_of_the_backward() -> None:
    found = traffic("ps:sync(transport=tcp)", members(2))
    gradients = {t.after for t in found if t.what == "gradients"}
    assert min(gradients) <= 0.5 < max(gradients) == 1.0
    assert {t.after for t in traffic("ps:async(transport=tcp)", members(2))} == {1.0}
    assert {t.after for t in found if t.what != "gradients"} == {1.0}


def test_rows_depend_on_the_data() -> None:
    view, table = members(4), TableSize("users", 64, 300)
    for spec in ("allreduce", "ps:sync(transport=tcp)"):
        unknown = traffic(spec, view, model=model(tables=(table,)))
        assert {t.what for t in unknown if t.num_bytes is None} == {"rows"}
        known = TableSize("users", 64, 300, rows_per_sample=2.0)
        found = traffic(spec, view, model=model(tables=(known,)), batch_size=100)
        rows = known_bytes([t for t in found if t.what == "rows"])
        if spec == "allreduce":
            assert rows == 4 * 3 * (25 * 2 * (8 + 4 * 64))
        else:  # half of the rows are held by a worker's own server; each is pushed to two
            read, pushed = 100 * 2 * (8 + 4 * 64), 2 * 100 * 2 * (8 + 4 * 64) * 3 / 4
            assert rows == pytest.approx(read / 2 + pushed, rel=0.01)
    inside = traffic("ps:sync", view, model=model(tables=(known,)))
    assert "rows" not in {t.what for t in inside}


def test_memory_of_the_whole_model_in_each_worker() -> None:
    for spec in ("single", "allreduce"):
        found = memory(spec, workers=1, model=model(buffers={"int64": 8}))
        assert found == {
            "parameters": M,
            "gradients": M,
            "optimizer": M,
            "buffers": 8,
            "checkpoints": 0,
            "activations and temporaries": 0,
        }


def test_memory_of_servers() -> None:
    found = memory("ps:sync", workers=4)
    assert (found["parameters"], found["gradients to send"]) == (M, 4 * M)
    assert (found["sums of gradients"], found["optimizer"], found["replicas"]) == (2 * M, M, 2 * M)
    found = memory("ps:async(transport=tcp,compensate=0.04)", workers=4)
    assert (found["parameters"], found["copy of the parameters"]) == (4 * M, 4 * M)
    assert (found["gradients to send"], found["received gradients"]) == (8 * M, 2 * 3 * M)
    assert (found["replicas"], found["sums for replicas"]) == (M, 2 * M)
    assert found["compensation"] == 4 * M
    found = memory("ps:sync(placement=dedicated)", workers=4, servers=2)
    assert (found["parameters"], found["model as built"]) == (M, 2 * M)


def test_an_unknown_optimizer_makes_its_memory_unknown() -> None:
    whole = model(parameters=(ParameterSize("a", (9,), "float32", 4, 0, 0, None),))
    for spec in STRATEGIES:
        uses = make_strategy(spec).memory(CostFacts(whole, workers=2, servers=0))
        assert uses is not None
        unknown = {use.purpose for use in uses if use.num_bytes is None}
        assert {"optimizer", "checkpoints", "activations and temporaries"} <= unknown


def test_a_view_can_have_all_workers_by_default() -> None:
    assert make_strategy("allreduce").refit(7) == 7
