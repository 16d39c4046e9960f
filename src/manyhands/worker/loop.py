"""The loop of a worker, from top to bottom.

    build the job's model, optimizer and data; say ready
    for what the coordinator says:
        view        the learner joins its peers; whatever was ordered before is void
        steps       for each: share of the data -> learner.step -> report
        rest        nothing to do before the others are done, too
        evaluate    this worker's part of the evaluation data
        checkpoint  rank 0 copies the state and writes it while training goes on
        stop        save what is being saved
        leave       all have: nobody needs this worker any more

Reports are gathered and sent a few times a second, and losses are read from the device only then, so
that a step costs no message and no synchronisation of its own. A report whose step may still be left
out of the weights is kept until the learner knows.

When a view arrives, the learner is interrupted at once, from the thread that hears it, and raises
ViewChanging out of whatever it waits for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from manyhands.compute.evaluation import evaluate
from manyhands.compute.feed import Feed, Portion, Share, check_dataset
from manyhands.compute.gradients import DeviceTime, StepReport, rehearse
from manyhands.compute.loaders import Loaders
from manyhands.compute.measures import Sums, add_up
from manyhands.compute.param_groups import describe_optimizer
from manyhands.compute.seeds import seed_compute, seed_loading
from manyhands.compute.train_state import TrainState, begin_with
from manyhands.contract import Learner
from manyhands.control.messages import JobFields, Ready, WorkerFacts
from manyhands.errors import LinkError, ViewChanging
from manyhands.hosts.activity import EVALUATING, LOADING, SAVING
from manyhands.hosts.devices import describe_device, device_id, pick_device
from manyhands.hosts.member import Member
from manyhands.hosts.view import Seat, View
from manyhands.job import Job, load_job, total_steps
from manyhands.runs.checkpoints import checkpoint_step
from manyhands.runs.files import jsonable
from manyhands.runs.saver import Saver, load_state, not_finite
from manyhands.transport.fields import read, write

REPORT_EVERY_S = 0.1
POLL_S = 0.02
"""How often to look whether reports are resolved, while nothing else is to do."""


class Worker:
    """One worker's training, driven by the coordinator's orders."""

    def __init__(self, member: Member, learner: Learner) -> None:
        task = member.assignment
        self.member = member
        self.learner = learner
        self.job: Job = load_job(task["job"], task["settings"])
        self.device = pick_device(task["device"], member.invitation.local_rank)
        self._shared_cores = int(task.get("shared_cores", 0))
        self._threads = torch.get_num_threads()
        # A random split must be the same one in every process, and in every resumed run.
        seed_loading(self.job.seed, "data")
        self.data = self.job.data()
        check_dataset(self.job, "data", self.data)
        seed_loading(self.job.seed, "eval_data")
        self.eval_data = self.job.eval_data()
        if self.eval_data is not None:
            check_dataset(self.job, "eval_data", self.eval_data)
        num_steps = total_steps(self.job, len(self.data))
        train_state = TrainState.of(self.job, device=self.device, num_steps=num_steps)
        self.train_state = train_state
        self.activity = train_state.activity = member.activity
        loaders = None
        if self.job.loader_processes and not member.debugged:
            loaders = Loaders(
                *(task["job"], task["settings"], self.job.loader_processes), notice=self._notice
            )
            member.on_stacks = loaders.write_stacks
        self.loaders = loaders
        self.feed = Feed(self.job, self.data, device=self.device, loaders=loaders)
        seat = Seat(member.name, member.host, device=self.device, device_id=device_id(self.device))
        self.me = member.me(seat)
        self.learner.prepare(train_state, self.me)
        member.on_view = self._view_coming
        if task["checkpoint"]:
            with member.phase("loading the checkpoint"):
                state = load_state(task["checkpoint"], train_state, learner)
                train_state.resume(
                    state,
                    step=checkpoint_step(task["checkpoint"]),
                    num_steps=num_steps,
                    mode=task.get("schedule", ""),
                )
        elif task["init_from"]:
            with member.phase("loading the weights to begin with"):
                begin_with(task["init_from"], train_state, self.job)
        self.saver = Saver(
            Path(task["run"]),
            member.name,
            soon=bool(task.get("saves")),
            infinite=not_finite(dict(train_state.model.named_parameters())),
            on_done=self._saved,
        )
        member.before_exit = lambda: self.saver.finish(timeout_s=member.timeouts.stop_s)
        self._reports: list[StepReport] = []
        self._flushed = time.monotonic()
        self._catching_up = False
        self._tidied = 0
        """The last view whose predecessors' files were deleted."""
        self._joined = 0
        """The number of the view that this worker has joined, and reports of."""

    def ready(self) -> None:
        model = self.train_state.model
        fields = jsonable(self.job.fields())
        facts = WorkerFacts(
            job=type(self.job).__name__,
            fields=read(JobFields, fields),
            all_fields=fields,
            metrics=self._try_metrics(),
            device=describe_device(self.device),
            torch=torch.__version__,
            parameters=sum(p.numel() for p in model.parameters()),
            train_samples=len(self.data),
            eval_samples=0 if self.eval_data is None else len(self.eval_data),
            unit=self.job.unit(),
            optimizer=describe_optimizer(model, self.train_state.optimizer),
            notes=self.train_state.notes,
            tables={name: t.describe() for name, t in self.train_state.tables.specs.items()},
        )
        self.member.say("ready", **write(Ready(self.me.view.seats[0], facts)))

    def run(self) -> None:
        self.ready()
        agenda: deque[dict[str, Any]] = deque()
        while True:
            if not agenda:
                self._flush()
                self._listen(agenda, timeout_s=POLL_S if self._reports else None)
                continue
            head = agenda.popleft()
            if head.get("order") == "leave":
                break
            if head.get("kind") != "view" and self.me.view_changing:
                continue  # of a view that is over: a checkpoint of it would claim steps that are void
            try:
                with self.me.heeding_views():
                    self._do(head, agenda)
            except ViewChanging:
                continue  # the view is on the agenda, or about to be
        self._report("left", settled=self.learner.settled())  # nothing changes any more
        self.learner.close()
        if self.loaders is not None:
            self.loaders.close()

    def _do(self, head: dict[str, Any], agenda: deque[dict[str, Any]]) -> None:
        match head:
            case {"kind": "view", "view": view}:
                with self.member.phase("joining its peers"):
                    self._on_view(View.from_dict(self._newest(view, agenda)))
            case {"order": "steps", "portions": portions}:
                if self._tidied != self.me.view.number:
                    self._tidied = self.me.view.number
                    self.me.forget_views()  # the first order of a view: all have joined it
                with self.member.phase(f"training from step {portions[0].step}"):
                    self._train(portions, agenda)
            case {"order": "rest"}:
                with self.member.phase("resting"):
                    self._drain()
                    self.learner.rest()
            case {"order": "evaluate", "part": [low, high, whole]}:
                with self.member.phase("evaluating"):
                    self._evaluate((low, high, whole))
            case {"order": "checkpoint", "step": int(step)}:
                with self.member.phase(f"saving the checkpoint of step {step}"):
                    self._checkpoint(step)
            case {"order": "rehearse"}:
                with self.member.phase("rehearsing"):
                    self._rehearse()
            case {"order": "stop"}:
                with self.member.phase("finishing the last checkpoint"):
                    self._stop()

    def _listen(self, agenda: deque[dict[str, Any]], *, timeout_s: float | None = 0) -> None:
        """Put what was heard on the agenda; the feed can begin with what it will need."""
        while (head := self.member.hear(timeout_s=timeout_s)) is not None:
            if head.get("order") == "steps":
                head["portions"] = [_portion(row) for row in head["portions"]]
                self.feed.expect(head["portions"])
            agenda.append(head)
            timeout_s = 0

    def _view_coming(self) -> None:
        """In the thread that hears it, before it is on the agenda."""
        self.me.newest_view = self.member.newest_view
        self.learner.interrupt()

    def _newest(self, view: dict[str, Any], agenda: deque[dict[str, Any]]) -> dict[str, Any]:
        """The last view heard so far; all that was ordered before it is dropped."""
        self._listen(agenda)
        later = [index for index, head in enumerate(agenda) if head.get("kind") == "view"]
        if later:
            view = agenda[later[-1]]["view"]
            for _ in range(later[-1] + 1):
                agenda.popleft()
        self.feed.forget()
        return view

    def _share_cores(self, view: View) -> None:
        """More workers than at first would wait for each other's threads. Never more than at first: another
        number of threads may add up in another order."""
        if cores := self._shared_cores:
            torch.set_num_threads(min(self._threads, max(1, cores // view.world)))

    def _on_view(self, view: View) -> None:
        self._flush()
        self.me.view = view
        self._share_cores(view)
        self.learner.on_view(view)
        # Still as reports of the view before: what on_view has found to be in the weights counts there.
        if (report := self.learner.rescued()) is not None:
            report.logged = self.train_state.measures.take()
            self._reports.append(report)
        self._flush()
        self._reports.clear()
        self._joined = view.number
        self._report(
            "joined",
            transport=self.learner.transport(),
            settled=self.learner.settled(),
            placement=self.learner.placement(),
            catching_up=self.learner.catching_up,
            whole_steps=self.learner.whole_steps,
        )
        self._catching_up = self.learner.catching_up

    def _train(self, portions: Sequence[Portion], agenda: deque[dict[str, Any]]) -> None:
        began = time.perf_counter()
        coming: Share | None = None
        for portion, following in zip(portions, [*portions[1:], None], strict=True):
            self._heed_the_view()
            with self.activity.in_step(portion.step):
                share, coming = coming or self._load(portion), None
                if self.learner.looks_ahead and following is not None:
                    coming = self._load(following)
                    self.learner.ahead(coming)
                seed_compute(self.device, self.job.seed, "step", portion.step, portion.part)
                self.train_state.lr_factor, self.train_state.ticks = (
                    portion.lr_factor,
                    portion.ticks,
                )
                report = self.learner.step(share)
            report.part, report.logged = portion.part, self.train_state.measures.take()
            self._reports.append(report)
            self._tick()
            # On a GPU a step returns before it is done; but reading the losses, below, waits for all,
            # so that the times of many steps add up to the truth.
            ended = time.perf_counter()
            report.step_s, began = ended - began, ended
            self._tell_when_caught_up()
            if time.monotonic() - self._flushed > REPORT_EVERY_S:
                self._flush()
            if self.member.heard():
                self._listen(agenda)

    def _load(self, portion: Portion) -> Share:
        with self.activity.during(LOADING):
            return self.feed.share(portion)

    def _tell_when_caught_up(self) -> None:
        if self._catching_up and not self.learner.catching_up:
            self._catching_up = False
            self._report("caught_up")

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        # Looked at once each: another thread may resolve one at any moment.
        flags = [report.resolved for report in self._reports]
        reports = [r for r, resolved in zip(self._reports, flags, strict=True) if resolved]
        if not reports:
            return
        self._reports = [
            r for r, resolved in zip(self._reports, flags, strict=True) if not resolved
        ]
        losses = read_all([report.loss for report in reports])
        weights = read_all([report.weight for report in reports])
        rows = [
            [
                *(r.step, weight, loss, r.lr, r.step_s, _seconds(r), r.wait_s, r.bytes_sent),
                *(r.part, r.staleness, r.dropped),
                *([measures] if measures else []),
            ]
            for r, weight, loss, measures in zip(
                *(reports, weights, losses, _read_measures(reports)), strict=True
            )
        ]
        self._report("steps", rows=rows)

    def _drain(self) -> None:
        """Every step so far is in the weights, or left out, and reported."""
        self.learner.drain()
        self._tell_when_caught_up()
        self._flush()

    def _evaluate(self, part: tuple[float, float, float]) -> None:
        self._drain()
        assert self.eval_data is not None
        started = time.perf_counter()
        model = self.learner.eval_model()
        with self.activity.during(EVALUATING):
            found = evaluate(
                self.job,
                model,
                self.eval_data,
                part=part,
                device=self.device,
                progress=self._tick_and_heed,
            )
        seconds = time.perf_counter() - started
        self._report("evaluated", seconds=seconds, **found)

    def _tick(self) -> None:
        self.activity.ticks += 1

    def _tick_and_heed(self) -> None:
        self._tick()
        self._heed_the_view()

    def _heed_the_view(self) -> None:
        if self.me.view_changing:
            raise ViewChanging(f"view {self.me.newest_view} is coming")

    def _report(self, what: str, **fields: Any) -> None:
        self.member.say("report", what=what, view=self._joined, **fields)

    def _notice(self, message: str) -> None:
        """From any thread: something that a person should know."""
        with suppress(LinkError):
            self._report("noticed", message=message)

    def _checkpoint(self, step: int) -> None:
        self._drain()
        if self.me.rank == 0:
            with self.activity.during(SAVING):
                self.saver.finish()
            self.saver.outcome()
            self.train_state.tables.now = step  # others may have come further than this worker
            self.learner.collect()
            with self.activity.during(SAVING):
                self.saver.start(step, self.train_state, self.learner)
            # From here on the weights may change.
            self._report("saving", step=step)

    def _saved(self, outcome: dict[str, Any]) -> None:
        """In the thread that writes, so that it is told also while this worker waits or fails."""
        with suppress(LinkError):  # the coordinator is gone
            self._report("saved", **outcome)

    def _rehearse(self) -> None:
        """Everything but training: one sample through the loss, backward and the metrics."""
        portion = Portion(0, 0, 1, ((0, 1),))
        self.feed.expect([portion])
        share = self.feed.share(portion)
        rehearse(self.train_state, share)
        self._report("rehearsed")

    def _try_metrics(self) -> list[str]:
        """The names that an evaluation gives: its mistakes should not wait for the end of an epoch."""
        if self.eval_data is None:
            return []
        first = range(min(self.job.batch_size, len(self.eval_data)))
        few = torch.utils.data.Subset(self.eval_data, first)
        part = evaluate(self.job, self.train_state.model, few, device=self.device)
        return list(part["sums"])

    def _stop(self) -> None:
        self._drain()
        with self.activity.during(SAVING):
            self.saver.finish()
        # Not before all are done: another may still need what this one holds, to save it.
        self._report("stopped")


def _seconds(report: StepReport) -> float | None:
    spent = report.compute_s
    return spent.seconds() if isinstance(spent, DeviceTime) else spent


def _read_measures(reports: Sequence[StepReport]) -> list[Sums]:
    """What the job has logged in each step, read from its device at once."""
    logged = [each for report in reports for each in report.logged]
    values = iter(read_all([value for _, value, _ in logged]))
    weights = iter(read_all([weight for _, _, weight in logged]))
    return [
        add_up((name, next(values), next(weights)) for name, _, _ in report.logged)
        for report in reports
    ]


def _portion(row: Sequence[Any]) -> Portion:
    step, epoch, total, ranges, part, *unusual = row
    pieces = tuple((start, stop) for start, stop in ranges)
    return Portion(step, epoch, total, pieces, part, *unusual)


def read_all(values: Sequence[float | torch.Tensor]) -> list[float]:
    """Numbers of which some are still on a device, read at once."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(numbers) if isinstance(value, torch.Tensor) else value for value in values]
