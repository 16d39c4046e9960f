"""The options of a training, and the rule for every value: given > environment > default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manyhands.api.where import check_room, default_workers, fit_strategy
from manyhands.contract import Strategy
from manyhands.coordinator.bad_steps import MAX_BAD_STEPS
from manyhands.coordinator.batch_scaling import LINEAR, NONE, RULES, SQRT, WARMUP, Scaling
from manyhands.coordinator.fault_spec import FaultSpec, check, parse_chaos
from manyhands.coordinator.options import RunOptions
from manyhands.coordinator.stuck import STUCK_AFTER_S
from manyhands.coordinator.target import target_text
from manyhands.errors import UsageError, check_choice
from manyhands.events.units import parse_time
from manyhands.hosts.devices import check_device
from manyhands.hosts.environment import PREFIX, option
from manyhands.hosts.launchers.local import cores
from manyhands.hosts.rendezvous import one_host
from manyhands.hosts.spec import ClusterSpec
from manyhands.job import PARSED, parse_bool
from manyhands.pairs import (
    ACCUMULATION,
    ELASTIC,
    FP32,
    HOSTS,
    SCALING,
    TRUST,
    Feature,
)
from manyhands.strategies.pairs import check_pairs
from manyhands.strategies.registry import make_strategy

ParseText = Callable[[str], Any]
"""Parses the text of an option; raises ValueError."""


def number_or_range(text: str) -> int | str:
    """Parse --workers: N, or MIN:MAX, which stays a string."""
    least, colon, most = text.partition(":")
    if not colon:
        return int(text)
    if not 1 <= int(least) <= int(most):
        raise ValueError(text)
    return text


WANTED = PARSED | {
    parse_time: "a time with its unit, such as 90s, 10m or 1h30m",
    target_text: 'METRIC=NUMBER, such as accuracy=0.97 or "min perplexity=20"',
    number_or_range: "a number, such as 4, or MIN:MAX (MIN at least 1), such as 2:4",
}
"""Values that parsers of options accept, in words for errors."""


class Resolved:
    """Option values and where each came from: flag > environment > the resumed run > default.

    A flag is a flag of the command line, or an argument of `mh.train()` and `mh.resume()`.
    """

    def __init__(
        self, given: Mapping[str, Any], before: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """`given`: flags by name, such as {"max_steps": "100"}; None means not given."""
        self._given = given
        self._before = before or {}
        self.sources: dict[str, dict[str, Any]] = {}

    def get(
        self, name: str, default: Any, parse: ParseText = str, *, least: float | None = None
    ) -> Any:
        """Return the value of an option. Raises UsageError if it is below `least`."""
        flag = f"--{name.replace('_', '-')}"
        before = self._before.get(name, {"from": "default"})
        if (value := self._given.get(name)) is not None:
            source, given = flag, f"{flag} {value}"
        elif (value := option(name)) is not None:
            source, given = PREFIX + name.upper(), f"{PREFIX}{name.upper()}={value}"
        elif before["from"] != "default":
            value, source, given = before["value"], before["from"], flag
        else:
            value, source, given = default, "default", flag
        if isinstance(value, str):
            try:
                value = parse(value)
            except ValueError:
                raise UsageError(f"{given}: it must be {WANTED[parse]}.") from None
        if least is not None and value is not None and value < least:
            raise UsageError(f"{given}: it must be at least {least}.")
        self.sources[name] = {
            "value": str(value) if isinstance(value, Path) else value,
            "from": source,
        }
        return value

    def forget(self, name: str) -> None:
        """Ignore the value of the resumed run."""
        self._before = {key: value for key, value in self._before.items() if key != name}


def resolve_options(
    resolved: Resolved,
    *,
    job: str,
    settings: dict[str, str],
    cluster: ClusterSpec | None = None,
    elsewhere: bool = False,
    debug: bool = False,
) -> RunOptions:
    """Resolve and check all options.

    Args:
        cluster: Where members run, if the environment or a file describes it.
        elsewhere: If true, not all members run on this machine.
    """
    spec = resolved.get("strategy", "ps:async" if cluster and cluster.servers else "allreduce")
    if cluster is not None:
        spec = fit_strategy(spec, cluster)
        resolved.sources["strategy"]["value"] = spec
    config = make_strategy(spec)
    minimum, count = _num_workers(resolved, config, cluster, elsewhere=elsewhere)
    check_pairs(config, _features(resolved, settings, cluster), workers=count)
    # Hosts differ in their number of cores: 0 lets each host decide. Ray needs a number.
    share = 0 if cluster is not None else 1 if elsewhere else max(1, cores() // count)
    threads = resolved.get("threads", share, int, least=min(1, share))
    own_threads = resolved.sources["threads"]["from"] != "default"
    stuck_after = resolved.get("stuck_after", STUCK_AFTER_S, float, least=0)
    device = resolved.get("device", "auto")
    check_device(device)
    return RunOptions(
        job=job,
        strategy=spec,
        workers=count,
        config=config,
        settings=settings,
        device=device,
        threads=threads,
        shared_cores=0 if own_threads or cluster is not None or elsewhere else cores(),
        checkpoint_every=resolved.get("checkpoint_every", 0, int, least=0),
        keep=resolved.get("keep", 3, int, least=1),
        min_workers=minimum,
        max_restarts=resolved.get("max_restarts", 3, int, least=0),
        max_bad_steps=resolved.get("max_bad_steps", MAX_BAD_STEPS, int, least=0),
        max_steps=resolved.get("max_steps", None, int, least=1),
        max_time_s=resolved.get("max_time", None, parse_time),
        target=resolved.get("target", None, target_text) or "",
        stuck_after_s=0.0 if debug else stuck_after,  # a debugger stops the worker for any time
        equal_shares=resolved.get("equal_shares", False, parse_bool),
        scaling=_scaling(resolved, count),
        trust_network=resolved.get("trust_network", False, parse_bool),
        chaos=_chaos(resolved.get("chaos", None), config, count),
        debug=debug,
    )


def _features(
    resolved: Resolved, settings: Mapping[str, str], cluster: ClusterSpec | None
) -> dict[Feature, str]:
    """Return the features that the command line combines with the strategy."""
    given = {FP32: "float32"}
    if (
        cluster is not None
        and len({e.host for e in cluster.entries} - {""}) > 1
        and not one_host(cluster)
    ):
        given[HOSTS] = f"a run on the hosts of {cluster.source}"
    if (rule := resolved.get("scale_batch", NONE)) != NONE:
        given[SCALING] = f"--scale-batch {rule}"
    if (chaos := resolved.get("chaos", None)) is not None:
        given[ELASTIC] = f'--chaos "{chaos}"'
    if resolved.get("trust_network", False, parse_bool):
        given[TRUST] = "--trust-network"
    if settings.get("accumulate", "1") != "1":
        given[ACCUMULATION] = f"--set accumulate={settings['accumulate']}"
    return given


def _num_workers(
    resolved: Resolved, config: Strategy, cluster: ClusterSpec | None, *, elsewhere: bool
) -> tuple[int, int]:
    """Return the minimum number of workers, and the number at the start."""
    default = config.traits.default_workers if cluster is None else default_workers(config, cluster)
    workers = resolved.get("workers", default, number_or_range)
    *minimum, count = map(int, str(workers).split(":"))
    config.check(count)
    most = max(64, 8 * cores())
    if cluster is not None:
        check_room(config, cluster, count, is_range=":" in str(workers))
    elif not elsewhere and count > most:
        raise UsageError(
            f"--workers {count}: this machine has {cores()} cores; more than {most} workers would only "
            "wait for each other."
        )
    return minimum[0] if minimum else 1, count


def _scaling(resolved: Resolved, workers: int) -> Scaling:
    rule = resolved.get("scale_batch", NONE)
    reference = resolved.get("scale_reference", workers, int, least=1)
    warmup = resolved.get("scale_warmup", WARMUP, int, least=0)
    sources = resolved.sources
    check_choice("--scale-batch", rule, RULES)
    for flag, name in (
        ("--scale-reference", "scale_reference"),
        ("--scale-warmup", "scale_warmup"),
    ):
        if rule == NONE and sources[name]["from"] == flag:
            raise UsageError(
                f"{flag} {sources[name]['value']}: nothing is scaled. Add  --scale-batch {LINEAR}  or  "
                f"--scale-batch {SQRT}."
            )
    if sources["scale_reference"]["from"] == "default":
        # A resumed run may have another number of workers: the reference stays that of the first start.
        sources["scale_reference"]["from"] = "the first start"
    return Scaling(rule, reference, warmup)


def _chaos(text: str | None, config: Strategy, workers: int) -> FaultSpec | None:
    if text is None:
        return None
    chaos = parse_chaos(text)
    servers = config.servers_for(workers)
    check(chaos, workers=workers, servers=servers)
    return chaos
