"""A state that is sent comes back as it was."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manyhands.errors import JobError
from manyhands.runs.encoding import empty_tensors, flatten, unflatten
from manyhands.runs.saver import optimizer_state
from manyhands.testing.conformance import assert_same_bits

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers()
states = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(states)
def test_any_state_comes_back(state: Any) -> None:
    text, tensors = flatten(state)
    assert not tensors
    assert unflatten(text, []) == state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_come_back(dtype: torch.dtype) -> None:
    state = {"a": torch.ones(2, 3).to(dtype), "b": [torch.zeros(()).to(dtype), (1, None)], 3: "x"}
    text, tensors = flatten(state)
    empty = empty_tensors(text)
    assert [(t.dtype, t.shape) for t in empty] == [(t.dtype, t.shape) for t in tensors]
    for target, source in zip(empty, tensors, strict=True):
        target.copy_(source)
    assert_same_bits(unflatten(text, empty), state)


def test_the_state_of_a_training_comes_back() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    state = {"o": optimizer_state(model, optimizer), "s": scheduler.state_dict()}
    text, tensors = flatten(state)
    again = unflatten(text, tensors)
    assert_same_bits(again, state)
    assert isinstance(again["s"]["milestones"], Counter)


def test_a_value_that_can_not_be_sent_is_named() -> None:
    with pytest.raises(JobError, match=r"state\.scheduler\[1\]\.rule is function"):
        flatten({"scheduler": [1, {"rule": lambda: None}]})
