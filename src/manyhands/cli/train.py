"""Train a job: a Python file with a subclass of mh.Job. See docs/writing-a-job.md."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

from manyhands.api.job_source import job_source
from manyhands.api.options import Resolved
from manyhands.api.starts import NewRun
from manyhands.api.where import ResolvedCluster, find_cluster, launching
from manyhands.cli.options import add_training_flags, fit_debug, parse_set
from manyhands.coordinator.driver import Driver
from manyhands.coordinator.fault_spec import GRAMMAR
from manyhands.coordinator.options import LaunchPlan, RunOptions
from manyhands.coordinator.run import rehearse
from manyhands.costs import CostFacts
from manyhands.errors import MemberError
from manyhands.events import Sink, events, make_console
from manyhands.events.console import LABEL_CELLS
from manyhands.events.events import Event
from manyhands.events.text import direction
from manyhands.hosts.scratch import Scratch
from manyhands.strategies.costs import cost_rows

HELP = "train a job; progress, run folder, checkpoints, TensorBoard"
EXAMPLES = """\
examples:
  manyhands train examples/digits.py
  manyhands train examples/mnist.py:MnistConv --workers 2 --set lr=0.05 --set epochs=5
  manyhands train mypackage.jobs.digits:Digits    a module, found as by python -m
  manyhands train job.py --strategy single --run-dir runs/reference
  manyhands train job.py --debug        breakpoint() in the job gets the terminal
  manyhands train job.py --init-from runs/first:best    start with the weights of another run
  manyhands train job.py --set steps=5000 --set eval_every="200 steps"
                                        for 5,000 steps, whatever the number of epochs
  manyhands train job.py --max-time 50m   stop in time; manyhands resume continues
  manyhands train job.py --target accuracy=0.97   until it is that good, and how long that takes
  manyhands train job.py --check        test job, strategy and cluster without training
  manyhands train job.py --workers 4 --scale-batch linear --scale-reference 1
                                        four times the batch and learning rate of one worker
  manyhands train job.py --set plateau="factor=0.5; patience=3"
                                        halve the learning rate when the evaluation stops improving
  torchrun --nnodes 2 ... --no-python manyhands train job.py --on env   see docs/guides/many-machines.md
  manyhands train job.py --on ray --workers 4           see docs/guides/ray.md
  manyhands train job.py --workers 3 --chaos "kill worker every 10s; pause worker 2s"

"""
EXAMPLES += GRAMMAR


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job",
        metavar="JOB",
        help="path.py, or path.py:Name for one of several jobs; or a module, pkg.module:Name",
    )
    add_training_flags(parser)
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder of the run (default: runs/<job>-<time>)"
    )
    parser.add_argument(
        "--init-from",
        metavar="RUN",
        help="start with the weights of another run, including rows of tables: RUN for its best checkpoint, "
        "RUN:last, or RUN:N for that of step N. Optimizer, schedule and step count start fresh",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="test job, strategy and cluster with one sample, without training, then stop",
    )


def run(arguments: argparse.Namespace) -> int:
    fit_debug(arguments)
    resolved = Resolved(vars(arguments))
    cluster = find_cluster(resolved)
    if isinstance(cluster, ResolvedCluster) and not cluster.is_coordinator:
        return cluster.serve()
    start = NewRun.resolve(
        job_source(arguments.job),
        resolved,
        cluster,
        parse_set(arguments.set),
        debug=arguments.debug,
    )
    if arguments.check:
        with launching(cluster, resolved, start.options, arguments.launch_plan) as (plan, done):
            return done(_check(start.options, plan))
    console = make_console(quiet=arguments.quiet, shared=arguments.debug)
    return start.launch(console, arguments.launch_plan).exit_code


class _Failures(Sink):
    """Shows where a member failed, without its log, which is deleted with the scratch folder."""

    def __init__(self) -> None:
        self._console = make_console(quiet=True)
        self.shown = False

    def handle(self, event: Event) -> None:
        if isinstance(event, events.MemberFailed):
            self._console.handle(replace(event, log=""))
            self.shown = True

    def close(self) -> None:
        pass


def _check(options: RunOptions, launch_plan: LaunchPlan) -> int:
    started = time.monotonic()
    failures = _Failures()
    try:
        with Scratch() as folder:
            driver = rehearse(options, folder / "run", launch_plan, sinks=[failures])
    except MemberError as error:
        if not failures.shown:
            raise
        return error.exit_code
    facts = driver.membership.roster.facts
    assert driver.plan is not None
    plan_config = driver.plan.config
    print(
        f"Check passed in {time.monotonic() - started:.1f} s, nothing trained: {facts.job} with "
        f"{facts.parameters:,} parameters, {facts.train_samples:,} samples, "
        f"{plan_config.num_steps:,} steps, by {options.strategy} on "
        f"{options.workers} x {facts.device}."
    )
    best = [("best", direction(str(plan_config.monitor)))] if plan_config.has_eval else []
    assert facts.built is not None
    for label, value in [*facts.built.optimizer, *best, *_costs(driver)]:
        print(f"  {label:<{LABEL_CELLS}}{value}")
    for note in facts.built.notes:
        print(f"note: {note}")
    return 0


def _costs(driver: Driver) -> list[tuple[str, str]]:
    """Return labels and values: what a step sends, and what members need memory for."""
    options, training = driver.options, driver.training
    assert training is not None
    if training.model_size is None:
        return []
    view = driver.membership.views.current
    facts = CostFacts(
        training.model_size,
        workers=view.world,
        servers=len(view.seats) - view.world,
        hosts=len({seat.host for seat in view.seats}),
        batch_size=training.plan.batch_size,
        gpu=any(seat.device.startswith("cuda") for seat in view.workers),
        spans_hosts=driver.coordinator.launcher.spans_hosts,
        encrypted=not options.trust_network,
    )
    return cost_rows(options.config, facts, view)
