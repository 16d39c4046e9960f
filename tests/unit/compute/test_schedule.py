"""The learning rate of a resumed run: unchanged, another one, or over more steps."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from manyhands.compute.train_state import TrainState
from manyhands.errors import JobError, UsageError
from manyhands.runs.saver import gather_state, put_state

SCHEDULES: dict[str, Any] = {
    "cosine": lr_scheduler.CosineAnnealingLR,
    "lambda": lambda o, n: lr_scheduler.LambdaLR(o, lambda step: 1 - 0.9 * step / n),
    "onecycle": lambda o, n: lr_scheduler.OneCycleLR(
        o, [3 * float(group["lr"]) for group in o.param_groups], total_steps=n
    ),
    "warmup": lambda o, n: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, n - 3)],
        milestones=[3],
    ),
}


def build(make_job: Any, schedule: Any, *, lr: float = 0.1, num_steps: int = 10) -> TrainState:
    def optimizer(self: Any, params: Any, model: Any) -> Any:
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 2 * lr}]
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)

    job = make_job(optimizer=optimizer, schedule=lambda self, o, n: schedule(o, n))
    return TrainState.of(job, device="cpu", num_steps=num_steps)


def train(train_state: TrainState, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(train_state.lr)
        for p in train_state.model.parameters():
            p.grad = torch.ones_like(p)
        train_state.update()
    return rates


def resumed(
    make_job: Any,
    saved: Any,
    schedule: Any,
    *,
    at: int,
    mode: str = "",
    old: bool = False,
    **how: Any,
) -> TrainState:
    """Resume from what was saved after `at` steps; `old`: by an earlier version."""
    train_state = build(make_job, schedule, **how)
    state = copy.deepcopy(saved)
    if old:
        del state["schedule"]
    put_state(state, train_state, None)
    train_state.resume(state, step=at, num_steps=how.get("num_steps", 10), mode=mode)
    return train_state


def save(train_state: TrainState) -> Any:
    return gather_state(train_state, {})


def weights(train_state: TrainState) -> list[torch.Tensor]:
    return [p.detach().clone() for p in train_state.model.parameters()]


@pytest.mark.parametrize("old", [False, True], ids=["", "of an earlier version"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_unchanged_job_resumes_bit_for_bit(make_job: Any, name: str, old: bool) -> None:
    whole = build(make_job, SCHEDULES[name])
    rates = train(whole, 10)
    first = build(make_job, SCHEDULES[name])
    train(first, 4)
    again = resumed(make_job, save(first), SCHEDULES[name], at=4, old=old)
    assert train(again, 6) == rates[4:]
    assert all(map(torch.equal, weights(again), weights(whole)))
    assert not again.notes


@pytest.mark.parametrize("old", [False, True], ids=["", "of an earlier version"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_another_rate_continues_at_the_position_of_the_schedule(
    make_job: Any, name: str, old: bool
) -> None:
    """With the saved moments, in every group, also on servers."""
    first = build(make_job, SCHEDULES[name])
    train(first, 4)
    whole = train(build(make_job, SCHEDULES[name], lr=0.5), 10)
    again = resumed(make_job, save(first), SCHEDULES[name], at=4, old=old, lr=0.5)
    assert again.base_lr == build(make_job, SCHEDULES[name], lr=0.5).base_lr
    groups = again.optimizer.param_groups
    assert groups[1]["lr"] == pytest.approx(2 * groups[0]["lr"])
    bias = first.model.bias
    moment = first.optimizer.state[bias]["momentum_buffer"]
    assert torch.equal(again.optimizer.state[groups[1]["params"][0]]["momentum_buffer"], moment)
    block = torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(3))]} for _ in groups], lr=1.0, momentum=0.1
    )
    block._opt_called = True  # type: ignore[attr-defined]
    scheduler = again.schedule_for(block)
    (note,) = again.notes
    assert note.startswith(f"the learning rate is {whole[4]:.4g} from step 5 on; it was saved at ")
    theirs = []
    for _ in range(6):
        theirs.append(block.param_groups[0]["lr"])
        scheduler.step()
    assert theirs == train(again, 6) == pytest.approx(whole[4:])


def test_other_settings_of_the_optimizer_apply_too(make_job: Any) -> None:
    def step_lr(gamma: float) -> Any:
        return lambda o, n: lr_scheduler.StepLR(o, 2, gamma=gamma)

    first = build(make_job, step_lr(0.5))
    train(first, 4)
    again = resumed(make_job, save(first), step_lr(0.1), at=4)
    assert again.lr == pytest.approx(0.1 * 0.1**2)
    gone = resumed(make_job, save(first), lambda o, n: None, at=4)
    assert gone.lr == 0.1
    train(gone, 2)
    new = resumed(make_job, save(gone), step_lr(0.5), at=6)
    assert new.lr == pytest.approx(0.1 * 0.5**3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_more_steps_need_a_choice(make_job: Any, name: str) -> None:
    schedule = SCHEDULES[name]
    first = build(make_job, schedule)
    train(first, 10)
    saved = save(first)
    longer = train(build(make_job, schedule, num_steps=16), 16)
    anew = train(build(make_job, schedule, num_steps=6), 6)
    end = first.lr
    with pytest.raises(UsageError) as caught:
        resumed(make_job, saved, schedule, at=10, num_steps=16)
    assert str(caught.value) == (
        "The learning-rate schedule was made for 10 steps, 10 of which are done, and the run now has 16. "
        "Choose how it continues:\n"
        f"  --schedule stretch   over all 16 steps; the next rate is {longer[10]:.4g}\n"
        f"  --schedule restart   anew, over the remaining 6; the next rate is {anew[0]:.4g}\n"
        f"  --schedule keep      as it was; from step 11 on, the rate stays at {end:.4g}"
    )
    how = {"at": 10, "num_steps": 16}
    stretched = resumed(make_job, saved, schedule, mode="stretch", **how)
    assert train(stretched, 6) == pytest.approx(longer[10:])
    restarted = resumed(make_job, saved, schedule, mode="restart", **how)
    kept = resumed(make_job, saved, schedule, mode="keep", **how)
    for train_state, rates in ((restarted, anew), (kept, [end] * 6)):
        # Also if it is interrupted once more.
        assert train(train_state, 3) == pytest.approx(rates[:3])
        again = resumed(make_job, save(train_state), schedule, at=13, num_steps=16)
        assert train(again, 3) == pytest.approx(rates[3:])
    more = {"at": 16, "num_steps": 20}
    with pytest.raises(
        UsageError, match="for 16 steps, 16 of which are done, and the run now has 20"
    ):
        resumed(make_job, save(again), schedule, **more)
    at_last = resumed(make_job, save(again), schedule, mode="stretch", **more)
    longest = train(build(make_job, schedule, num_steps=20), 20)
    assert train(at_last, 4) == pytest.approx(longest[16:])
    faster = resumed(make_job, saved, schedule, mode="stretch", lr=0.2, **how)
    assert train(faster, 6) == pytest.approx([2 * rate for rate in longer[10:]])


def test_a_schedule_independent_of_the_steps_needs_no_choice(make_job: Any) -> None:
    def steps(o: Any, n: int) -> Any:
        return lr_scheduler.StepLR(o, 4, gamma=0.5)

    whole = train(build(make_job, steps, num_steps=16), 16)
    first = build(make_job, steps)
    train(first, 10)
    again = resumed(make_job, save(first), steps, at=10, num_steps=16)
    assert train(again, 6) == whole[10:]
    none = build(make_job, lambda o, n: None)
    train(none, 10)
    assert resumed(make_job, save(none), lambda o, n: None, at=10, num_steps=16).lr == 0.1


@pytest.mark.parametrize("name", SCHEDULES)
def test_fewer_steps_truncate_the_schedule(make_job: Any, name: str) -> None:
    whole = train(build(make_job, SCHEDULES[name]), 10)
    first = build(make_job, SCHEDULES[name])
    train(first, 4)
    again = resumed(make_job, save(first), SCHEDULES[name], at=4, num_steps=7)
    assert train(again, 3) == whole[4:7]


def test_a_schedule_that_would_fail_before_the_end_is_refused(make_job: Any) -> None:
    with pytest.raises(
        JobError, match=r"OneCycleLR for 5 steps, and .* has 10: .* total_steps=num_"
    ):
        build(make_job, lambda o, n: lr_scheduler.OneCycleLR(o, 1.0, total_steps=5))


def test_a_plan_survives_json(make_job: Any) -> None:
    first = build(make_job, SCHEDULES["onecycle"])
    assert json.loads(json.dumps(first.schedule_state)) == first.schedule_state
