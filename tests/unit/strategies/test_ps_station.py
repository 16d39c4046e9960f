"""Which workers serve, if nobody says how many."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.cluster.view import Me, Seat, View
from manyhands.strategies.ps import ParameterServer
from manyhands.strategies.ps_station import Station
from manyhands.strategies.registry import make_strategy
from manyhands.train.trainee import Trainee, find_tables

NAMES = [f"worker-{n}" for n in range(5)]


def servers(spec: str, model: nn.Module, *, shared: bool) -> list[str]:
    trainee = Trainee(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch).sum(),
        tables=find_tables(model, seed=1),
    )
    config = make_strategy(spec)
    assert isinstance(config, ParameterServer)
    station = Station(config, trainee, cast(Me, None))  # which it keeps for later
    station.shared = shared
    return station.servers_in(View(1, tuple(Seat(name, "here") for name in NAMES)))


def small() -> nn.Module:
    return nn.Linear(3, 2)


def large() -> nn.Module:
    return nn.Linear(600, 600)


def with_table() -> nn.Module:
    return nn.Sequential(mh.SparseEmbedding(100, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("name", ["ps:sync", "ps:async"])
def test_inside_a_host_nobody_serves_who_has_nothing_to_serve(name: str) -> None:
    assert servers(name, small(), shared=True) == NAMES[:2], "the block, and its replica"
    assert servers(f"{name}(replicas=0)", small(), shared=True) == NAMES[:1]
    assert servers(name, large(), shared=True) == NAMES
    assert servers(f"{name}(servers=4)", small(), shared=True) == NAMES[:4], "as was asked"


def test_all_serve_where_each_has_rows_of_tables_or_a_host_of_its_own() -> None:
    assert servers("ps:async", small(), shared=False) == NAMES
    assert servers("ps:sync", with_table(), shared=True) == NAMES
    assert servers("ps:async", with_table(), shared=True) == NAMES[:2], "workers change the rows"
    assert servers("ps:async", with_table(), shared=False) == NAMES
