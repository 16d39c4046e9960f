"""The loop of a worker, from top to bottom.

    build the job's model, optimizer and data; say ready
    for what the coordinator says:
        view        the learner joins its peers
        steps       for each: share of the data -> learner.step -> report
        evaluate    this worker's part of the evaluation data
        checkpoint  rank 0 copies the state and writes it while training goes on
        stop        save what is being saved
        leave       all have: nobody needs this worker any more

Reports are gathered and sent a few times a second, and losses are read from the device only then, so
that a step costs no message and no synchronisation of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from manyhands.cluster.devices import describe_device, device_id, pick_device
from manyhands.cluster.member import Member
from manyhands.cluster.view import Me, Seat, View
from manyhands.errors import JobError
from manyhands.job import Job, load_job
from manyhands.state.files import jsonable
from manyhands.state.saver import Saver, load_state
from manyhands.train.course import Syllabus
from manyhands.train.evaluate import evaluate
from manyhands.train.feed import Feed, Loaders, Portion, Share, check_dataset
from manyhands.train.seeds import seed_compute, seed_loading
from manyhands.train.step import StepReport
from manyhands.train.trainee import Trainee

REPORT_EVERY_S = 0.1


class Learner(Protocol):
    """The run-time half of a strategy, as the loop uses it (see strategies/base.py)."""

    def prepare(self, trainee: Trainee, me: Me) -> None: ...
    def on_view(self, view: View) -> None: ...
    def step(self, share: Share) -> StepReport: ...
    def eval_model(self) -> torch.nn.Module: ...
    def transport(self) -> str: ...
    def collect(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Worker:
    """One worker's training, driven by the coordinator's orders."""

    def __init__(self, member: Member, learner: Learner) -> None:
        task = member.assignment
        self.member = member
        self.learner = learner
        self.job: Job = load_job(task["job"], task["settings"])
        self.device = pick_device(task["device"], member.local_rank)
        # A random split must be the same one in every process, and in every resumed run.
        seed_loading(self.job.seed, "data")
        self.data = self.job.data()
        check_dataset(self.job, "data", self.data)
        seed_loading(self.job.seed, "eval_data")
        self.eval_data = self.job.eval_data()
        if self.eval_data is not None:
            check_dataset(self.job, "eval_data", self.eval_data)
        syllabus = Syllabus(len(self.data), self.job.batch_size, self.job.epochs)
        trainee = Trainee.of(self.job, device=self.device, num_steps=syllabus.num_steps)
        self.trainee = trainee
        loaders = None
        if self.job.loader_processes:
            loaders = Loaders(task["job"], task["settings"], self.job.loader_processes)
        self.loaders = loaders
        self.feed = Feed(self.job, self.data, device=self.device, loaders=loaders)
        seat = Seat(member.name, member.host, device=self.device, device_id=device_id(self.device))
        self.me = Me(
            member.name,
            member.host,
            self.device,
            Path(member.scratch),
            View(0, (seat,)),
            board=member,
            timeouts=member.timeouts,
        )
        self.learner.prepare(trainee, self.me)
        if task["checkpoint"]:
            with member.phase("loading the checkpoint"):
                load_state(task["checkpoint"], trainee, learner)
            self._check_schedule(syllabus.num_steps)
        self.saver = Saver(Path(task["run"]))
        self._reports: list[StepReport] = []
        self._flushed = time.monotonic()

    def ready(self) -> None:
        model = self.trainee.model
        self.member.say(
            "ready",
            seat=vars(self.me.view.seats[0]),
            job=type(self.job).__name__,
            fields=jsonable(self.job.fields()),
            metrics=self._try_metrics(),
            device=describe_device(self.device),
            torch=torch.__version__,
            parameters=sum(p.numel() for p in model.parameters()),
            train_samples=len(self.data),
            eval_samples=0 if self.eval_data is None else len(self.eval_data),
        )

    def run(self) -> None:
        self.ready()
        agenda: deque[dict[str, Any]] = deque()
        while True:
            if not agenda:
                self._flush()
                self._listen(agenda, timeout_s=0.05 if self.saver.busy else None)
                self._mind_the_saver()
                continue
            head = agenda.popleft()
            match head:
                case {"kind": "view", "view": view}:
                    with self.member.phase("joining its peers"):
                        self._on_view(View.from_dict(view))
                case {"order": "steps", "portions": portions}:
                    with self.member.phase(f"training from step {portions[0].step}"):
                        self._train(portions, agenda)
                case {"order": "evaluate"}:
                    with self.member.phase("evaluating"):
                        self._evaluate()
                case {"order": "checkpoint", "step": int(step)}:
                    with self.member.phase(f"saving the checkpoint of step {step}"):
                        self._checkpoint(step)
                case {"order": "rehearse"}:
                    with self.member.phase("rehearsing"):
                        self._rehearse()
                case {"order": "stop"}:
                    with self.member.phase("finishing the last checkpoint"):
                        self._stop()
                case {"order": "leave"}:
                    self.learner.close()
                    return

    def _listen(self, agenda: deque[dict[str, Any]], *, timeout_s: float | None = 0) -> None:
        """Put what was heard on the agenda; the feed can begin with what it will need."""
        while (head := self.member.hear(timeout_s=timeout_s)) is not None:
            if head.get("order") == "steps":
                head["portions"] = [_portion(row) for row in head["portions"]]
                self.feed.expect(head["portions"])
            agenda.append(head)
            timeout_s = 0

    def _on_view(self, view: View) -> None:
        self.me.view = view
        self.learner.on_view(view)
        self.member.say(
            "report", what="joined", view=view.number, transport=self.learner.transport()
        )

    def _train(self, portions: Sequence[Portion], agenda: deque[dict[str, Any]]) -> None:
        seed, rank = self.job.seed, self.me.rank
        began = time.perf_counter()
        for portion in portions:
            share = self.feed.share(portion)
            seed_compute(self.device, seed, "step", portion.step, rank)
            report = self.learner.step(share)
            self._reports.append(report)
            self._tick()
            # On a GPU a step returns before it is done; but reading the losses, below, waits for all,
            # so that the times of many steps add up to the truth.
            ended = time.perf_counter()
            report.step_s, began = ended - began, ended
            if time.monotonic() - self._flushed > REPORT_EVERY_S:
                self._flush()
                self._mind_the_saver()
            if self.member.heard():
                self._listen(agenda)

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if not self._reports:
            return
        reports, self._reports = self._reports, []
        losses = read_all([report.loss for report in reports])
        weights = read_all([report.weight for report in reports])
        rows = [
            [r.step, weight, loss, r.lr, r.step_s, r.compute_s, r.wait_s, r.bytes_sent]
            for r, weight, loss in zip(reports, weights, losses, strict=True)
        ]
        self.member.say("report", what="steps", rows=rows)

    def _evaluate(self) -> None:
        self._flush()
        assert self.eval_data is not None
        started = time.perf_counter()
        part = evaluate(
            self.job,
            self.learner.eval_model(),
            self.eval_data,
            rank=self.me.rank,
            world=self.me.world,
            device=self.device,
            progress=self._tick,
        )
        seconds = time.perf_counter() - started
        self.member.say("report", what="evaluated", seconds=seconds, **part)

    def _tick(self) -> None:
        self.member.ticks += 1

    def _checkpoint(self, step: int) -> None:
        self._flush()
        if self.me.rank == 0:
            self.saver.finish()
            self._mind_the_saver()
            self.learner.collect()
            self.saver.start(step, self.trainee, self.learner)

    def _mind_the_saver(self) -> None:
        if (outcome := self.saver.outcome()) is not None:
            self.member.say("report", what="saved", **outcome)

    def _rehearse(self) -> None:
        """Everything but training: one sample through the loss, backward and the metrics."""
        portion = Portion(0, 0, 1, ((0, 1),))
        self.feed.expect([portion])
        share = self.feed.share(portion)
        self.trainee.loss(self.trainee.model, share.batches[0][0]).backward()
        self.trainee.optimizer.zero_grad(set_to_none=True)
        self.member.say("report", what="rehearsed")

    def _try_metrics(self) -> list[str]:
        """The names that an evaluation gives: its mistakes should not wait for the end of an epoch."""
        if self.eval_data is None:
            return []
        first = range(min(self.job.batch_size, len(self.eval_data)))
        few = torch.utils.data.Subset(self.eval_data, first)
        part = evaluate(self.job, self.trainee.model, few, rank=0, world=1, device=self.device)
        return list(part["sums"])

    def _check_schedule(self, num_steps: int) -> None:
        total = getattr(self.trainee.scheduler, "total_steps", None)
        if total is not None and num_steps > total:
            kind = type(self.trainee.scheduler).__name__
            raise JobError(
                f"The saved {kind} ends after {total} steps, and {num_steps} are asked for now. It can't "
                "be stretched: start a new run for more epochs, or give the job another schedule."
            )

    def _stop(self) -> None:
        self._flush()
        self.saver.finish()
        self._mind_the_saver()
        if self.loaders is not None:
            self.loaders.close()
        # Not before all are done: another may still need what this one holds, to save it.
        self.member.say("report", what="stopped")


def _portion(row: Sequence[Any]) -> Portion:
    step, epoch, total, ranges = row
    return Portion(step, epoch, total, tuple((start, stop) for start, stop in ranges))


def read_all(values: Sequence[float | torch.Tensor]) -> list[float]:
    """Numbers of which some are still on a device, read at once."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(numbers) if isinstance(value, torch.Tensor) else value for value in values]
