"""Loads the weights that a member starts with."""

from __future__ import annotations

from manyhands.compute.train_state import TrainState, begin_with
from manyhands.contract import Learner
from manyhands.control.messages import Assignment
from manyhands.job import Job
from manyhands.runs.checkpoints import checkpoint_step
from manyhands.runs.saver import load_state


def restore(
    assignment: Assignment,
    train_state: TrainState,
    job: Job,
    *,
    num_steps: int,
    learner: Learner | None = None,
) -> None:
    """Load the checkpoint or the initial weights that the assignment names, if any."""
    if folder := assignment.checkpoint:
        state = load_state(folder, train_state, learner)
        step = checkpoint_step(folder)
        train_state.resume(state, step=step, num_steps=num_steps, mode=assignment.schedule)
    elif assignment.init_from:
        begin_with(assignment.init_from, train_state, job)
