"""A member's job as it builds it: data, model, optimizer and schedule.

    load       the job, its data and its model, when the member starts
    build      the layout of the model, then the optimizer and schedule for it, the weights to start with, and
               a try of the metrics

A worker builds at once, while the others do the same. If the strategy lays the model out over the workers
(`Traits.wraps`), it builds in each view instead, because it needs the others for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhands.compute.evaluation import EvalSamples, evaluate
from manyhands.compute.feed import check_dataset
from manyhands.compute.param_groups import describe_optimizer
from manyhands.compute.seeds import seed_loading
from manyhands.compute.train_state import TrainState, begin_with
from manyhands.contract import Learner
from manyhands.control.messages import Assignment, BuiltFacts
from manyhands.errors import CheckpointError
from manyhands.job import Job, load_job
from manyhands.job_length import steps_per_epoch, total_steps
from manyhands.runs.checkpoints import checkpoint_step, read_manifest
from manyhands.runs.saver import learner_states, load_state
from manyhands.strategies.registry import make_strategy
from manyhands.strategies.spec import parse_spec


class BuiltJob:
    def __init__(self, assignment: Assignment, *, device: str, evaluates: bool = True) -> None:
        """Load the job, its data and its model. `evaluates`: if true, also the data for evaluation."""
        self.job: Job = load_job(assignment.job, assignment.settings)
        # A random split must be the same one in every process, and in every resumed run.
        seed_loading(self.job.seed, "data")
        self.data: Any = self.job.data()
        check_dataset(self.job, "data", self.data)
        self.eval_samples: EvalSamples | None = None
        if evaluates:
            seed_loading(self.job.seed, "eval_data")
            if (eval_data := self.job.eval_data()) is not None:
                check_dataset(self.job, "eval_data", eval_data)
                self.eval_samples = EvalSamples.of(self.job, eval_data)
        self.train_state = TrainState.of_model(self.job, device=device)
        self._assignment = assignment
        self.facts: BuiltFacts | None = None
        """None until `build`."""
        self._laid_out = False
        self._restored = False

    def build(self, learner: Learner | None = None, *, loads: bool = True) -> None:
        """Build the optimizer and the schedule for the model's layout in this view.

        If `loads` is true, start with the weights that the assignment names; otherwise the learner brings
        those of its last view.
        """
        state, job = self.train_state, self.job
        if self._laid_out:
            state.renew_model(job)
        self._laid_out = True
        if learner is not None:
            state.model = learner.wrap(state.model)  # does nothing, unless this is in a view
        num_steps = total_steps(job, len(self.data))
        state.build_optimizer(
            job, num_steps=num_steps, steps_per_epoch=steps_per_epoch(job, len(self.data))
        )
        if loads:
            self._load(learner, num_steps)
        self.facts = BuiltFacts(
            metrics=self._try_metrics(),
            optimizer=describe_optimizer(state.model, state.optimizer),
            notes=state.notes,
        )

    def _load(self, learner: Learner | None, num_steps: int) -> None:
        assignment, state = self._assignment, self.train_state
        if folder := assignment.checkpoint:
            saved = load_state(folder, state)
            step = checkpoint_step(folder)
            state.resume(saved, step=step, num_steps=num_steps, mode=assignment.schedule)
            if learner is not None:
                self._restore(learner, Path(folder), saved)
        elif assignment.init_from:
            begin_with(assignment.init_from, state, self.job)

    def _restore(self, learner: Learner, folder: Path, saved: Mapping[str, Any]) -> None:
        """Restore the state of the saved run's learners, if they were of the same strategy."""
        spec, manifest = self._assignment.strategy, read_manifest(folder)
        config, before = make_strategy(spec), parse_spec(manifest.strategy)
        ranks: Sequence[int] = (0,)
        if config.traits.holds_state:
            first, every = self._assignment.takes
            ranks = range(first, manifest.states, every)
        fits = (config.name, config.traits.holds_state) == (
            before.strategy.name,
            manifest.states > 0,
        )
        if not fits:
            if saved.get("learner") or manifest.states > 1:
                self.train_state.notes.append(
                    f"{spec} does not use what the workers of {before} kept besides the weights"
                )
            return
        states = [] if self._restored else learner_states(folder, saved, ranks)
        self._restored = True  # it keeps its state if all is built again
        if states:
            try:
                learner.restore(states)
            except (KeyError, RuntimeError, ValueError) as error:
                raise CheckpointError(
                    f"{folder} was saved by {before} and does not fit {spec}: {error}"
                ) from error

    def _try_metrics(self) -> list[str]:
        """Return the names of the metrics, from a small evaluation: errors in it show before training."""
        if self.eval_samples is None:
            return []
        few = self.eval_samples.first(self.job.batch_size)
        state = self.train_state
        return list(evaluate(self.job, state.model, few, device=state.device)["sums"])
