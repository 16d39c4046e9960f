"""Named measures: numbers that steps report, each with a unit and a rule by which values are combined.

    sum     the sum over micro-batches and workers
    mean    their mean, weighted
    max     the largest; NaN if there is one
    last    the last, in the order of micro-batches, then of parts of the step

A strategy, a codec or a learner registers its measures where it is defined:

    DISTANCE = register(Measure("consensus_distance", help="between workers' weights"))

and sets `report.measures[DISTANCE.name]` in the reports of its steps. A job declares its own in measures(),
and logs them. Workers tell the coordinator what is registered, so that the process that combines need not
import the code that reports.

Values travel and combine as pairs (number, weight). A job's values have the weight of their micro-batch, a
learner's have weight 1. Pure; combining costs about half a microsecond per value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from manyhands.errors import JobError

Rule = Literal["sum", "mean", "max", "last"]
RULES: tuple[Rule, ...] = get_args(Rule)
Pair = tuple[float, float]
"""(number, weight). For a mean, the number is the sum of values times their weights."""


@dataclass(frozen=True)
class Measure:
    name: str
    unit: str = ""
    """Such as "s", "bytes" or "tokens"; empty if it has none."""
    rule: Rule = "mean"
    """How values of micro-batches and workers are combined: "sum", "mean", "max" or "last"."""
    help: str = ""
    """What it measures, for TensorBoard; may be empty."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise JobError(
                f"The rule of measure {self.name!r} must be {', '.join(map(repr, RULES[:-1]))} or "
                f'{RULES[-1]!r}, and is {self.rule!r}, such as  mh.Measure("tokens", rule="sum").'
            )

    def pair(self, value: float, weight: float) -> Pair:
        """Return one value as a pair."""
        return (value * weight if self.rule == "mean" else value), weight

    def describe(self) -> str:
        """Return one line of text: how it is combined, its unit, and what it is."""
        head = f"{self.rule}, in {self.unit}" if self.unit else self.rule
        return f"{head}: {self.help}" if self.help else head


STEP_MEASURES: Mapping[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure("loss", "", "mean", "over all samples of the step"),
        Measure("lr", "", "mean", "learning rate that was applied"),
        Measure("step_s", "s", "max", "time of the step; without lockstep, the mean over workers"),
        Measure("compute_s", "s", "mean", "computing, over workers"),
        Measure("wait_s", "s", "mean", "waiting for other members, over workers"),
        Measure("bytes_sent", "bytes", "sum", "sent by all members"),
        Measure("staleness", "updates", "mean", "between reading the weights and changing them"),
        Measure("samples_per_s", "samples/s", "mean", "samples of the step divided by its time"),
        Measure("lr_factor", "", "last", "factor on the scheduled learning rate"),
        Measure("batch_size", "samples", "last", "global batch"),
    )
}
"""What every step has, in fields of its own. No other measure may have one of these names."""

_registered: dict[str, Measure] = {}


def register(measure: Measure) -> Measure:
    """Register a measure. ValueError if there is a different one of that name."""
    known = STEP_MEASURES.get(measure.name) or _registered.setdefault(measure.name, measure)
    if known != measure:
        raise ValueError(f"there is another measure {measure.name!r}: {known}")
    return measure


def registered() -> dict[str, Measure]:
    """Return what has been registered in this process, by name."""
    return dict(_registered)


def add_to(sums: dict[str, Pair], name: str, pair: Pair, rule: Rule) -> None:
    """Combine a pair with what `sums` has of that name. It counts as the later one."""
    known = sums.get(name)
    if known is None:
        sums[name] = pair
        return
    number, weight = pair
    if rule in ("mean", "sum"):
        sums[name] = known[0] + number, known[1] + weight
    elif rule == "last":
        sums[name] = number, known[1] + weight
    else:
        larger = number if number > known[0] or number != number else known[0]
        sums[name] = larger, known[1] + weight


def combine(
    parts: Iterable[Mapping[str, Sequence[float]]], measures: Mapping[str, Measure]
) -> dict[str, float]:
    """Return the value of each measure over all parts, given in order. Not all parts need all measures; one
    that `measures` does not have is a mean."""
    sums: dict[str, Pair] = {}
    for part in parts:
        for name, (number, weight) in part.items():
            add_to(sums, name, (number, weight), rule_of(name, measures))
    return {name: value_of(pair, rule_of(name, measures)) for name, pair in sums.items()}


def rule_of(name: str, measures: Mapping[str, Measure]) -> Rule:
    measure = measures.get(name)
    return "mean" if measure is None else measure.rule


def value_of(pair: Pair, rule: Rule) -> float:
    """Return the value that a pair stands for."""
    if rule != "mean":
        return pair[0]
    return pair[0] / pair[1] if pair[1] else math.nan
