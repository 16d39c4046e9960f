"""Flags of `train` and `resume`, and the rule for every value: flag > environment > default."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from manyhands.cli.where import add_place_flags, check_room, default_workers, fit_strategy
from manyhands.contract import Strategy
from manyhands.coordinator.bad_steps import MAX_BAD_STEPS
from manyhands.coordinator.batch_scaling import LINEAR, NONE, RULES, SQRT, WARMUP, Scaling
from manyhands.coordinator.fault_spec import EXAMPLE, FaultSpec, check, parse_chaos
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
from manyhands.strategies.registry import STRATEGIES, make_strategy

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
    """Option values and where each came from: flag > environment > the resumed run > default."""

    def __init__(
        self, arguments: argparse.Namespace, before: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._arguments = arguments
        self._before = before or {}
        self.sources: dict[str, dict[str, Any]] = {}

    def get(
        self, name: str, default: Any, parse: ParseText = str, *, least: float | None = None
    ) -> Any:
        """Return the value of an option. Raises UsageError if it is below `least`."""
        flag = f"--{name.replace('_', '-')}"
        before = self._before.get(name, {"from": "default"})
        if (value := getattr(self._arguments, name, None)) is not None:
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


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how")
    _add_worker_flags(group)
    _add_batch_flags(group)
    _add_end_flags(parser.add_argument_group("when to stop"))
    _add_fault_flags(group)
    add_place_flags(parser)
    _add_output_flags(parser.add_argument_group("saving and output"))


def _add(group: argparse._ArgumentGroup, usage: str, text: str) -> None:
    """Add a flag with a value, given as in a usage line: "--keep N". `Resolved.get` parses the value."""
    *names, metavar = usage.split()
    group.add_argument(*names, metavar=metavar, help=text)


def _add_worker_flags(group: argparse._ArgumentGroup) -> None:
    add = partial(_add, group)
    add(
        "--strategy SPEC",
        f"how the workers agree on the weights: {', '.join(STRATEGIES)} (default: allreduce); with options "
        "and a codec, quoted for the shell, such as 'ps:ssp(staleness=4)' or 'allreduce + int8'",
    )
    add(
        "--workers --nproc-per-node N",
        "number of workers (default: 2, or 1 for single); MIN:MAX starts MAX, and the run fails when fewer "
        "than MIN are left and they can't be replaced",
    )
    add(
        "--device D",
        "device of each worker: auto (default), cpu, cuda or cuda:N; or a list that workers take in turn, "
        "such as cuda,cpu",
    )
    add(
        "--threads N",
        "compute threads per worker (default: the cores, divided among them); with --on ray, the CPUs that a "
        "worker requests from Ray (default: 1)",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a field of the job (a hyperparameter), such as lr=0.05; may be repeated",
    )


def _add_batch_flags(group: argparse._ArgumentGroup) -> None:
    add = partial(_add, group)
    group.add_argument(
        "--equal-shares",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="give all workers the same share of a batch, even if some are faster",
    )
    add(
        "--scale-batch RULE",
        "scale the global batch with the number of workers, and the learning rate with it: linear, sqrt (by "
        "the square root), or none (default: the batch and the mathematics stay the same). The job's "
        "batch_size and learning rate are those of the number of workers at the start",
    )
    add(
        "--scale-reference N",
        "with --scale-batch: the job's batch_size and learning rate are those of N workers instead; 1: of "
        "each worker",
    )
    add(
        "--scale-warmup STEPS",
        f"with --scale-batch: raise the learning rate over this many steps (default: {WARMUP}); lowering it "
        "takes effect at once",
    )


def _add_end_flags(group: argparse._ArgumentGroup) -> None:
    add = partial(_add, group)
    group.description = (
        "The length of the training is the job's: --set epochs=N or --set steps=N. Its learning-rate\n"
        "schedule is made for that. These flags stop earlier and leave the schedule alone:"
    )
    add(
        "--max-steps N",
        "stop after N more steps, save a checkpoint and exit with 0; manyhands resume continues",
    )
    add(
        "--max-time TIME",
        "do the same after this time since the command was started, such as 90s, 10m or 1h30m",
    )
    add(
        "--target METRIC=NUMBER",
        "do the same after the first evaluation that reaches it, such as accuracy=0.97; the summary has the "
        'time, steps and samples until then. Write "min NAME=NUMBER" or "max NAME=NUMBER" if the name does '
        "not show what is better",
    )


def _add_fault_flags(group: argparse._ArgumentGroup) -> None:
    add = partial(_add, group)
    add(
        "--max-restarts N",
        "number of dead members to replace (default: 3); 0: continue with fewer. If the weights are lost, "
        "all members restart from the last checkpoint, also up to N times",
    )
    add(
        "--max-bad-steps N",
        f"end as diverged after N steps in a row without a finite loss (default: {MAX_BAD_STEPS}); 0: never",
    )
    add(
        "--stuck-after SECONDS",
        "report a worker that hangs in the job's code for this long, write the stacks of its threads to its "
        f"log (default: {STUCK_AFTER_S:.0f}), and kill it after ten times as long; 0: never",
    )
    add(
        "--chaos FAULTS",
        f'inject faults during training, such as "{EXAMPLE}"; see the end of  manyhands train --help',
    )
    group.add_argument(
        "--debug",
        action="store_true",
        help="give the terminal to the worker, so that breakpoint() works in the job: strategy single, no "
        "loader processes, no timeouts; Ctrl-C and the debugger's quit end the run at once",
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    add = partial(_add, group)
    add("--checkpoint-every STEPS", "save every STEPS steps, in addition to after each epoch")
    add("--keep N", "keep the N newest checkpoints (default: 3), and always the best")
    group.add_argument(
        "--quiet", action="store_true", help="print only failures, and one line at the end"
    )
    add(
        "--control HOW",
        "control link between members and coordinator: unix (default), tcp, or tcp://HOST:PORT; tcp is TLS "
        "1.3 with mutual certificates; with --on env, the address at which the coordinator listens",
    )
    group.add_argument(
        "--trust-network",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="authenticate gradients and parameters without encrypting them: for private networks",
    )


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


def fit_debug(arguments: argparse.Namespace) -> None:
    """Set one worker on this machine for --debug, and refuse flags that contradict it."""
    if not arguments.debug:
        return
    for flag, value, allowed in (
        ("--strategy", arguments.strategy, ("single",)),
        ("--workers", arguments.workers, ("1",)),
        ("--on", arguments.on, ("local",)),
    ):
        if value is not None and value not in allowed:
            raise UsageError(
                f"{flag} {value} with --debug: only one worker, on this machine, can have the terminal. "
                f"Leave {flag} out: --debug uses the strategy single."
            )
    arguments.strategy, arguments.workers, arguments.on = "single", 1, "local"


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


def parse_set(pairs: Sequence[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {pair}: write it as NAME=VALUE, for example --set lr=0.05")
        settings[name.strip()] = value.strip()
    return settings
