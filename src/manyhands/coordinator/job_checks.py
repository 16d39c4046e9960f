"""Checks of the job that workers have built, and the plan config that follows from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from manyhands.control.messages import WorkerFacts
from manyhands.coordinator.batch_scaling import FIXED, Scaling
from manyhands.coordinator.metric_monitor import (
    Monitor,
    lower_is_better,
    metric_name,
    read_monitor,
    saved_monitor,
)
from manyhands.coordinator.options import RunOptions
from manyhands.coordinator.plan import PlanConfig
from manyhands.coordinator.plateau import Plateau, parse_plateau, resolve, saved_watch
from manyhands.coordinator.target import target_of
from manyhands.errors import JobError, UsageError
from manyhands.events import events
from manyhands.hosts.view import Seat, gpu_each
from manyhands.job_length import EPOCHS, STEPS, parse_interval
from manyhands.pairs import (
    ACCUMULATION,
    ELASTIC,
    FP32,
    GPUS,
    HOSTS,
    ROW_MODEL,
    SHRINKING,
    TABLES,
    WORKERS,
    Feature,
)
from manyhands.strategies.pairs import refusal_of


def check_job(
    facts: WorkerFacts,
    *,
    workers: int,
    replica_size: int = 1,
    scaling: Scaling = FIXED,
    saved: Mapping[str, Any] | None = None,
    target: str = "",
) -> None:
    """Refuse mistakes that show only when the job is loaded, or when its metrics are known. `replica_size`:
    number of workers in each replica. `saved`: the plan of a resumed run; `target`: that of this start, as
    typed."""
    fields, samples, metrics = facts.fields, facts.train_samples, facts.metrics
    batch, monitor = fields.batch_size, metric_name(fields.monitor)
    if batch > samples:
        raise JobError(
            f"The data set has {samples} samples, and the global batch_size is {batch}. "
            f"Use  --set batch_size={samples}  or fewer."
        )
    if scaling.on:
        _check_scaling(scaling, batch, workers=workers, samples=samples)
    elif (replicas := workers // replica_size) > batch:
        each = "worker" if replica_size == 1 else f"replica of {replica_size} workers"
        raise UsageError(
            f"{workers} workers share a global batch of {batch}: every {each} needs "
            "at least one sample. Use fewer workers, or a larger batch: "
            f"--set batch_size={replicas}"
        )
    if metrics and monitor not in metrics:
        raise JobError(
            f"monitor is {monitor!r}, and the evaluation gives {', '.join(metrics)}. "
            "Set monitor to one of these, or return it from metrics()."
        )
    if not facts.eval_samples and fields.patience is not None:
        raise JobError("patience needs something to watch: eval_data() must return a data set.")
    if not facts.eval_samples and fields.eval_samples is not None:
        raise JobError(
            f"eval_samples={fields.eval_samples} needs samples to choose from: eval_data() must return a "
            "data set. To evaluate nothing:  --set eval_samples=none."
        )
    monitor_found = monitor_of(facts, saved)
    plateau_of(facts, saved)
    if target:
        target_of(target, facts, monitor=monitor_found, saved=saved)


def _check_scaling(scaling: Scaling, batch: int, *, workers: int, samples: int) -> None:
    flag, reference = f"--scale-batch {scaling.rule}", scaling.reference
    if reference > batch:
        raise UsageError(
            f"{flag}: a batch_size of {batch} is for {reference} workers, and every worker needs at "
            f"least one sample. Use a larger batch:  --set batch_size={reference}"
        )
    whole = scaling.batch(batch, workers)
    if whole > samples:
        raise UsageError(
            f"{flag}: a batch_size of {batch} for {reference} makes a global batch of {whole} for "
            f"{workers} workers, and the data set has {samples} samples. Use fewer workers, or a "
            f"smaller batch:  --set batch_size={max(1, samples * reference // workers)}"
        )


def check_same(first: WorkerFacts, other: WorkerFacts) -> None:
    """Refuse workers that do not train the same."""
    for key in ("train_samples", "eval_samples", "parameters", "all_fields", "measures"):
        ours, theirs = getattr(first, key), getattr(other, key)
        if ours != theirs:
            raise JobError(
                f"The workers disagree on the job's {key.removeprefix('all_')}: {ours} and {theirs}. "
                "model(), data() and measures() must give the same in every process."
            )


def features_of(
    facts: WorkerFacts, *, seats: Collection[Seat] = (), spans_hosts: bool = False
) -> dict[Feature, str]:
    """Return the features that the job and its members combine with the strategy. `seats`: those of all
    workers, once they are known."""
    given = {FP32: "float32"}
    if (number := facts.all_fields.get("accumulate", 1)) != 1:
        given[ACCUMULATION] = f"accumulate={number}"
    if facts.tables:
        given[TABLES] = f"a model with sparse tables ({', '.join(facts.tables)})"
    if facts.row_model:
        given[ROW_MODEL] = f"{facts.row_model}, which changes rows itself,"
    if spans_hosts:
        given[HOSTS] = "a run on several hosts"
    if gpu_each(seats):
        given[GPUS] = "a GPU for each worker"
    return given


def why_not(
    workers: int,
    present: int,
    options: RunOptions,
    facts: WorkerFacts,
    *,
    spans_hosts: bool = False,
) -> str:
    """Return why the run can't have so many workers, with `present` now; empty if it can."""
    config, samples = options.config, facts.train_samples
    if workers < 1:
        return "at least 1 is needed"
    features = {*features_of(facts, spans_hosts=spans_hosts), ELASTIC}
    features |= {SHRINKING} if workers < present else set()
    features |= {WORKERS} if workers > 1 else set()
    if (refusal := refusal_of(config, features)) is not None:
        return f"{refusal.feature.title} do not work with {options.strategy}: {refusal.why}"
    size = config.replica_size(workers)
    if config.refit(workers) != workers:
        return f"{config.name} trains with whole replicas of {size} workers"
    batch = options.scaling.batch(facts.fields.batch_size, workers)
    if workers // size > batch:
        return f"they would share a global batch of {batch}"
    if batch > samples:
        return f"their global batch would be {batch}, of {samples} samples"
    return ""


def monitor_of(facts: WorkerFacts, saved: Mapping[str, Any] | None = None) -> Monitor:
    """Return the metric that decides which model is best. `saved`: the plan of a resumed run, which keeps its
    direction."""
    text = facts.fields.monitor
    if not facts.eval_samples:
        return Monitor(metric_name(text), lower=True)
    before = saved_monitor(saved, metric_name(text))
    return read_monitor(text, option='monitor="{}"', saved=before)


def monitor_note(monitor: Monitor, facts: WorkerFacts) -> str:
    """Return a note if a resumed run keeps a direction that the metric's name does not show; else an empty
    string."""
    text = facts.fields.monitor
    unsaid = text.strip() == monitor.name and lower_is_better(monitor.name) != monitor.lower
    if not facts.eval_samples or not unsaid:
        return ""
    other = Monitor(monitor.name, not monitor.lower)
    return f'the best model is still chosen by "{monitor}"; to change it: --set monitor="{other}"'


def plateau_of(facts: WorkerFacts, saved: Mapping[str, Any] | None = None) -> Plateau | None:
    """Return the job's plateau rule, if it has one, with the name and direction of what it watches."""
    fields, metrics = facts.fields, facts.metrics
    if not fields.plateau:
        return None
    rule = parse_plateau(fields.plateau)
    monitor = str(monitor_of(facts, saved)) if facts.eval_samples else fields.monitor
    return resolve(rule, monitor=monitor, metrics=metrics, saved=saved_watch(saved))


def plan_config_of(
    facts: WorkerFacts, options: RunOptions, saved: Mapping[str, Any] | None = None
) -> PlanConfig:
    fields, step = facts.fields, (saved or {}).get("step", 0)
    every, unit = parse_interval(fields.eval_every)
    return PlanConfig(
        num_samples=facts.train_samples,
        batch_size=fields.batch_size,
        epochs=fields.epochs or 1,
        steps=fields.steps,
        eval_every=every if unit == EPOCHS else 1,
        eval_steps=every if unit == STEPS else 0,
        has_eval=facts.eval_samples > 0,
        checkpoint_every=options.checkpoint_every,
        max_step=None if options.max_steps is None else step + options.max_steps,
        monitor=monitor_of(facts, saved),
        patience=fields.patience,
        scaling=options.scaling,
        plateau=plateau_of(facts, saved),
        round_steps=options.config.traits.round_steps,
    )


def ready_event(member: str, facts: WorkerFacts, plan_config: PlanConfig) -> events.MemberReady:
    return events.MemberReady(
        member=member,
        device=facts.device,
        parameters=facts.parameters,
        train_samples=facts.train_samples,
        eval_samples=facts.eval_samples,
        batch_size=plan_config.batch_size,
        epochs=facts.fields.epochs,
        steps=plan_config.num_steps,
        unit=facts.unit[0],
        units_per_sample=facts.unit[1],
        tables=facts.tables,
        monitor=str(plan_config.monitor) if plan_config.has_eval else "",
        measures={m.name: {"unit": m.unit, "rule": m.rule, "help": m.help} for m in facts.measures},
    )
