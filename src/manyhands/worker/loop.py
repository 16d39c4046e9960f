"""The loop of a worker, from top to bottom.

    build the job's data, model and optimizer; send Ready
    for each message of the coordinator:
        View             the learner joins its peers; all earlier orders are void
        TrainOrder       for each step: share of the data -> learner.step -> report (reporter.py)
        RestOrder        nothing to do before the others are done, too
        EvaluateOrder    this worker's part of the evaluation data
        CheckpointOrder  copy the state and write it while training continues: rank 0 the weights
        HandOverOrder    workers are about to leave: they send what they hold alone to others
        StopOrder        finish what is being saved
        LeaveOrder       all have stopped: no member needs this worker any more

When a view arrives, the thread that receives it interrupts the learner at once, which raises ViewChanging out
of any wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from manyhands.collectives.group import lost_peer_as_consequence, view_change_on_lost_peer
from manyhands.compute.evaluation import evaluate, forwards_each
from manyhands.compute.feed import Feed, Share
from manyhands.compute.gradients import rehearse
from manyhands.compute.loaders import Loaders
from manyhands.compute.model_size import model_size
from manyhands.contract import Context, Joined, Strategy
from manyhands.control import messages
from manyhands.embeddings.modules import RowModel
from manyhands.errors import LinkError, ViewChanging
from manyhands.hosts.activity import EVALUATING, LOADING, SAVING
from manyhands.hosts.devices import describe_device, device_id, pick_device
from manyhands.hosts.member import Member
from manyhands.hosts.messages import ViewFormed
from manyhands.hosts.view import Seat, View
from manyhands.measure import registered
from manyhands.runs.files import jsonable
from manyhands.runs.saver import Saver, help_gather_state, not_finite
from manyhands.transport.fields import read
from manyhands.worker.built_job import BuiltJob
from manyhands.worker.received_states import ReceivedStates
from manyhands.worker.reporter import Reporter

POLL_S = 0.02
"""How often to check whether reports are resolved, while there is nothing else to do."""

Agenda = deque[View | messages.Order]
"""What the coordinator has sent and the worker has not done yet."""


class Worker:
    """One worker's training, driven by the coordinator's orders."""

    def __init__(self, member: Member, strategy: Strategy) -> None:
        assignment = read(messages.Assignment, member.assignment)
        self.member = member
        self.reporter = Reporter(member)
        device = pick_device(assignment.device, member.invitation.local_rank)
        self._shared_cores = assignment.shared_cores
        self._threads = torch.get_num_threads()
        self.built = BuiltJob(assignment, device=device)
        self.job, self.train_state = self.built.job, self.built.train_state
        self.train_state.activity = member.activity
        loaders = None
        if self.job.loader_processes and not member.debugged:
            loaders = Loaders(
                assignment.job,
                assignment.settings,
                self.job.loader_processes,
                notice=self.reporter.notice,
            )
            member.on_stacks = loaders.write_stacks
        uniform = strategy.traits.uniform
        self.feed = Feed(self.job, self.built.data, device=device, loaders=loaders, uniform=uniform)
        self.saver = Saver(
            Path(assignment.run), member.name, soon=assignment.saves, on_done=self._saved
        )
        seat = Seat(member.name, member.host, device=device, device_id=device_id(device))
        self.me = member.me(seat)
        self.learner = strategy.build(Context(self.train_state, self.me))
        self._received_states = ReceivedStates(self.learner)
        self._traits = strategy.traits
        if not self._traits.wraps:
            self._build()
        member.on_view = self._on_new_view
        member.before_exit = lambda: self.saver.finish(timeout_s=member.timeouts.stop_s)
        self._joined = Joined()
        """What the learner found in this view; no longer catching up once that was reported."""
        self._cleaned_view = 0
        """The last view at which the files of earlier views were deleted."""

    def ready(self) -> None:
        """Tell the coordinator that this worker can join a view, and what it knows about the job by then."""
        fields, state = jsonable(self.job.fields()), self.train_state
        facts = messages.WorkerFacts(
            job=type(self.job).__name__,
            fields=read(messages.JobFields, fields),
            all_fields=fields,
            device=describe_device(self.me.device),
            torch=torch.__version__,
            parameters=sum(p.numel() for p in state.model.parameters()),
            train_samples=len(self.built.data),
            eval_samples=len(self.built.eval_samples or ()),
            unit=self.job.unit(),
            tables={name: t.describe() for name, t in state.tables.specs.items()},
            measures=[*registered().values(), *state.measures.declared.values()],
            row_model=type(state.model).__name__ if isinstance(state.model, RowModel) else "",
            built=self.built.facts,
        )
        self.member.send(messages.Ready(self.me.view.seats[0], facts))

    def _build(self) -> None:
        """Build the optimizer and the schedule for the model's layout in this view."""
        with self.member.phase("loading the weights"):
            self.built.build(self.learner, loads=not self.reporter.view)
        self.saver.infinite = set(not_finite(dict(self.train_state.model.named_parameters())))

    def run(self) -> None:
        self.ready()
        agenda: Agenda = deque()
        while True:
            if not agenda:
                self.reporter.flush()
                self._receive(agenda, timeout_s=POLL_S if self.reporter.waiting else None)
                continue
            message = agenda.popleft()
            if isinstance(message, messages.LeaveOrder):
                break
            if not isinstance(message, View) and self.me.view_changing:
                continue  # of a view that is over: a checkpoint of it would claim steps that are void
            try:
                with self.me.view_change_on_lost_peer(), self._lost_peer():
                    self._do(message, agenda)
            except ViewChanging:
                continue  # the view is on the agenda, or about to be
        self.reporter.send(messages.Left, applied=self.learner.close())
        self.feed.close()

    def _lost_peer(self) -> AbstractContextManager[None]:
        """Return a context for the errors of collectives outside the learner: a model that is laid out sends
        in its forward, also in an evaluation, and when its state is gathered."""
        if not self._traits.wraps:
            return nullcontext()
        elastic = self._traits.elastic
        return (view_change_on_lost_peer if elastic else lost_peer_as_consequence)(self.me)

    def _do(self, message: View | messages.Order, agenda: Agenda) -> None:
        match message:
            case View():
                with self.member.phase("joining its peers"):
                    self._on_view(self._newest(message, agenda))
            case messages.TrainOrder(portions):
                if self._cleaned_view != self.me.view.number:
                    self._cleaned_view = self.me.view.number
                    self.me.forget_views()  # the first order of a view: all have joined it
                with self.member.phase(f"training from step {portions[0].step}"):
                    self._train(portions, agenda)
            case messages.RestOrder():
                with self.member.phase("resting"):
                    self._drain()
                    self.learner.rest()
            case messages.EvaluateOrder(part=part):
                with self.member.phase("evaluating"):
                    self._evaluate(part)
            case messages.CheckpointOrder(step):
                with self.member.phase(f"saving the checkpoint of step {step}"):
                    self._checkpoint(step)
            case messages.HandOverOrder(number, receivers):
                with self.member.phase("handing over state"):
                    self._hand_over(number, receivers)
            case messages.RehearseOrder():
                with self.member.phase("rehearsing"):
                    self._rehearse()
            case messages.StopOrder():
                with self.member.phase("finishing the last checkpoint"):
                    self._stop()

    def _receive(self, agenda: Agenda, *, timeout_s: float | None = 0) -> None:
        """Put what has arrived on the agenda. The feed can start on what it will need."""
        while (message := self.member.next_message(timeout_s=timeout_s)) is not None:
            if isinstance(message, messages.TrainOrder):
                self.feed.expect(message.portions)
            agenda.append(message.view if isinstance(message, ViewFormed) else message)
            timeout_s = 0

    def _on_new_view(self) -> None:
        """Called in the thread that receives a view, before it is on the agenda."""
        self.me.newest_view = self.member.newest_view
        self.learner.interrupt()

    def _newest(self, view: View, agenda: Agenda) -> View:
        """The last view that has arrived; earlier orders are dropped."""
        self._receive(agenda)
        later = [index for index, message in enumerate(agenda) if isinstance(message, View)]
        if later:
            for _ in range(later[-1]):
                agenda.popleft()
            newest = agenda.popleft()
            assert isinstance(newest, View)
            view = newest
        self.feed.forget()
        return view

    def _share_cores(self, view: View) -> None:
        """Use fewer threads with more workers than at the start: their threads would wait for each other.
        Never use more than at the start: sums may depend on the number of threads."""
        if cores := self._shared_cores:
            torch.set_num_threads(min(self._threads, max(1, cores // view.world)))

    def _on_view(self, view: View) -> None:
        self.reporter.flush()
        self._received_states.begin_view(view)
        if self.member.name not in view.names:
            self.learner.close()  # it stands by, until a view that it is in
            return
        self.me.view = view
        self._share_cores(view)
        if self._traits.wraps:
            self._build()
        for name in self._received_states.restore():
            self.reporter.notice(f"got the state of {name}, which has left")
        joined = self.learner.on_view(view)
        if joined.rescued is not None:
            joined.rescued.logged = self.train_state.measures.take()
            self.reporter.add(joined.rescued)
        self.reporter.join(view.number)
        self._joined = joined
        self.reporter.send(
            messages.ViewJoined,
            transport=joined.transport,
            applied=joined.applied,
            placement=joined.placement,
            catching_up=joined.catching_up,
            whole_steps=joined.whole_steps,
            built=self.built.facts if self._traits.wraps else None,
        )

    def _train(self, portions: Sequence[messages.Portion], agenda: Agenda) -> None:
        self._received_states.drop()
        began = time.perf_counter()
        coming: Share | None = None
        for portion, following in zip(portions, [*portions[1:], None], strict=True):
            self._check_view()
            with self.member.activity.in_step(portion.step):
                share, coming = coming or self._load(portion), None
                if self._joined.prefetches and following is not None:
                    coming = self._load(following)
                    self.learner.prefetch(coming)
                self.train_state.lr_factor, self.train_state.ticks = (
                    portion.lr_factor,
                    portion.ticks,
                )
                report = self.learner.step(share)
            report.part, logged = portion.part, self.train_state.measures.take()
            # The others of a replica log the same.
            report.logged = logged if self.me.rank % self.me.view.replica_size == 0 else []
            self.member.activity.ticks += 1
            # On a GPU a step returns before it is done. Reading the losses below waits for all of them, so
            # the times of many steps add up to the real time.
            ended = time.perf_counter()
            report.step_s, began = ended - began, ended
            self.reporter.add(report)
            if report.caught_up:
                self._report_caught_up()
            self.reporter.flush_in_time()
            if self.member.has_message():
                self._receive(agenda)

    def _load(self, portion: messages.Portion) -> Share:
        with self.member.activity.during(LOADING):
            return self.feed.share(portion)

    def _report_caught_up(self) -> None:
        if self._joined.catching_up:
            self._joined = replace(self._joined, catching_up=False)
            self.reporter.send(messages.CaughtUp)

    def _drain(self) -> None:
        """Wait until every step so far is resolved, and report it."""
        self.learner.drain()
        self._report_caught_up()
        self.reporter.flush()

    def _evaluate(self, part: tuple[float, float, float]) -> None:
        self._drain()
        samples, num_forwards = self.built.eval_samples, 0
        assert samples is not None
        if self._traits.uniform:
            num_forwards = forwards_each(self.job, samples, parts=len(self.me.view.replicas))
        started = time.perf_counter()
        with self.learner.eval_model() as model, self.member.activity.during(EVALUATING):
            found = evaluate(
                self.job,
                model,
                samples,
                part=part,
                num_forwards=num_forwards,
                device=self.me.device,
                progress=self._tick_and_check_view,
            )
        seconds = time.perf_counter() - started
        self.reporter.send(messages.EvaluationReport, seconds=seconds, **found)

    def _tick_and_check_view(self) -> None:
        self.member.activity.ticks += 1
        self._check_view()

    def _check_view(self) -> None:
        if self.me.view_changing:
            raise ViewChanging(f"view {self.me.newest_view} is coming")

    def _checkpoint(self, step: int) -> None:
        self._drain()
        first = self.me.rank == 0
        if self._traits.wraps and not first:
            help_gather_state(self.train_state)
        if first or self._traits.holds_state:
            with self.member.activity.during(SAVING):
                self.saver.finish()
            self.train_state.tables.now = step  # others may have come further than this worker
            own = self.learner.snapshot()
            with self.member.activity.during(SAVING):
                trained = self.train_state if first else None
                self.saver.start(step, trained, own, view=self.me.view.number)
            # From here on the weights may change.
            self.reporter.send(messages.Saving, step=step)

    def _hand_over(self, number: int, receivers: Mapping[str, str]) -> None:
        self._drain()
        if (group := self._joined.group) is not None:
            with view_change_on_lost_peer(self.me):
                self._received_states.exchange(receivers, self.me.view, group)
        elif self.member.name in receivers:
            self.reporter.notice(
                "its state is lost when it leaves: the strategy has no group to send it"
            )
        self.reporter.send(messages.HandedOver, number=number)

    def _saved(self, outcome: dict[str, Any]) -> None:
        """Called in the thread that writes, so that it is reported even if this worker waits or fails."""
        with suppress(LinkError):  # the coordinator is gone
            self.member.send(read(messages.Saved, outcome))

    def _rehearse(self) -> None:
        """Do everything but train: one sample through the loss, backward and the metrics."""
        portion = messages.Portion(0, 0, 1, ((0, 1),))
        self.feed.expect([portion])
        share = self.feed.share(portion)
        rows = rehearse(self.train_state, share)
        self.reporter.send(messages.Rehearsed, model=model_size(self.train_state, rows))

    def _stop(self) -> None:
        self._drain()
        with self.member.activity.during(SAVING):
            self.saver.finish()
        # Leave only when all are done: another worker may need what this one holds to save it.
        self.reporter.send(messages.Stopped)
