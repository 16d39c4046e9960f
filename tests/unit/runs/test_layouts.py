"""Tensors that are laid out over workers are saved whole, and loaded in any layout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from manyhands.collectives.lone_worker import LoneWorker
from manyhands.runs.dense import load_dense_state
from manyhands.runs.layouts import is_laid_out, laid_out_as, own_part, whole
from manyhands.runs.saver import load_optimizer_state, not_finite, optimizer_state


@pytest.fixture
def mesh() -> Iterator[Any]:
    group = LoneWorker()
    yield group.device_mesh([1], ["shard"])
    group.close()


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_a_laid_out_tensor_becomes_whole_and_back(mesh: Any, placement: Any) -> None:
    tensor = torch.arange(6.0).view(3, 2)
    laid_out = distribute_tensor(tensor, mesh, [placement])
    assert is_laid_out(laid_out)
    assert not is_laid_out(whole(laid_out))
    assert torch.equal(whole(laid_out), tensor)
    assert torch.equal(own_part(laid_out), tensor)
    back = laid_out_as(tensor.double() + 1, laid_out)
    assert (back.placements, back.dtype) == (laid_out.placements, torch.float32)
    assert torch.equal(whole(back), tensor + 1)


def test_what_is_not_laid_out_stays_as_it_is(mesh: Any) -> None:
    tensor, step = torch.ones(2), torch.tensor(3.0)
    laid_out = distribute_tensor(tensor, mesh, [Shard(0)])
    assert whole(tensor) is own_part(tensor) is laid_out_as(tensor, tensor) is tensor
    assert laid_out_as(step, laid_out) is step, "the number of steps belongs to no element"
    assert laid_out_as("word", laid_out) == "word"


def test_a_model_and_its_optimizer_load_what_others_have_saved(mesh: Any) -> None:
    def trained(layout: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        if layout:
            for name, parameter in list(model.named_parameters()):
                own = nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)]))
                setattr(model, name, own)
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return model, optimizer

    (plain, first), (sharded, second) = trained(False), trained(True)
    load_dense_state(sharded, plain.state_dict())
    load_optimizer_state(sharded, second, optimizer_state(plain, first))
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(whole(parameter), plain.get_parameter(name))
        ours, theirs = second.state[parameter], first.state[plain.get_parameter(name)]
        assert isinstance(ours["exp_avg"], DTensor)
        assert torch.equal(whole(ours["exp_avg"]), theirs["exp_avg"])
        assert ours["step"] == theirs["step"]
    assert not_finite(dict(sharded.named_parameters())) == []
    own_part(sharded.weight.data)[0, 0] = torch.nan
    assert not_finite(dict(sharded.named_parameters())) == ["weight"]


def test_a_run_without_layouts_does_not_load_what_they_need() -> None:
    code = (
        "import sys, torch; from manyhands.runs.layouts import whole; whole(torch.ones(1)); "
        "assert 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
