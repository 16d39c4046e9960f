"""Flags of `train` and `resume`, and the rule for every value: flag > environment > default."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhands.cli.where import add_place_flags, check_room, default_workers, fit_strategy
from manyhands.contract import Strategy
from manyhands.coordinator.bad_steps import MAX_BAD_STEPS
from manyhands.coordinator.batch_scaling import LINEAR, NONE, RULES, SQRT, WARMUP, Scaling
from manyhands.coordinator.fault_spec import EXAMPLE, FaultSpec, check, parse_chaos
from manyhands.coordinator.options import RunOptions
from manyhands.coordinator.stuck import STUCK_AFTER_S
from manyhands.errors import UsageError, closest
from manyhands.hosts.devices import check_device
from manyhands.hosts.environment import PREFIX, option
from manyhands.hosts.launchers import cores
from manyhands.hosts.spec import ClusterSpec
from manyhands.strategies.registry import make_strategy


class Resolved:
    """Option values and where each came from: flag > environment > the resumed run > default."""

    def __init__(
        self, arguments: argparse.Namespace, before: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._arguments = arguments
        self._before = before or {}
        self.sources: dict[str, dict[str, Any]] = {}

    def get(self, name: str, default: Any, parse: Callable[[str], Any] = str) -> Any:
        flag = f"--{name.replace('_', '-')}"
        before = self._before.get(name, {"from": "default"})
        if (value := getattr(self._arguments, name, None)) is not None:
            source = flag
        elif (text := option(name)) is not None:
            source = PREFIX + name.upper()
            try:
                value = parse(text)
            except ValueError:
                raise UsageError(f"{source}={text} is not valid: see {flag}.") from None
        elif before["from"] != "default":
            value, source = before["value"], before["from"]
        else:
            value, source = default, "default"
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
    _add_fault_flags(group)
    add_place_flags(parser)
    _add_output_flags(parser.add_argument_group("saving and output"))


def _add_worker_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--strategy",
        metavar="SPEC",
        help="how the workers agree on the weights: allreduce (default), single, ps:sync, ps:async, ps:ssp, "
        "ps:backup; with options in brackets, such as ps:ssp(staleness=4)",
    )
    group.add_argument(
        "--workers",
        "--nproc-per-node",
        type=number_or_range,
        metavar="N",
        help="how many workers (default: 2, or 1 for single); MIN:MAX starts MAX, and fails when fewer than "
        "MIN are left and they can't be replaced",
    )
    group.add_argument(
        "--device",
        metavar="D",
        help="auto (default), cpu, cuda or cuda:N; or a list that workers take in turn, such as cuda,cpu",
    )
    group.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="compute threads per worker (default: the cores, divided among them); with --on ray, the CPUs "
        "that a worker requests from Ray (default: 1)",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a field of the job (a hyperparameter); may be repeated",
    )


def _add_batch_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--equal-shares",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="give all workers the same share of a batch, even if some are faster",
    )
    group.add_argument(
        "--scale-batch",
        metavar="RULE",
        help="scale the global batch with the number of workers, and the learning rate with it: linear, sqrt "
        "(by the square root), or none (default: the batch and the mathematics stay the same). batch_size "
        "and learning rate are meant for the number of workers at the start",
    )
    group.add_argument(
        "--scale-reference",
        type=int,
        metavar="N",
        help="with --scale-batch: batch_size and learning rate are for N workers instead; 1: per worker",
    )
    group.add_argument(
        "--scale-warmup",
        type=int,
        metavar="STEPS",
        help="with --scale-batch: the learning rate grows over this many steps "
        f"(default: {WARMUP}); it falls at once",
    )


def _add_fault_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="how many dead members are replaced (default: 3); 0: continue with fewer. If the weights are "
        "lost, all members restart from the last checkpoint, also up to N times",
    )
    group.add_argument(
        "--max-bad-steps",
        type=int,
        metavar="N",
        help=f"end as diverged after N steps in a row without a finite loss (default: {MAX_BAD_STEPS}); "
        "0: never",
    )
    group.add_argument(
        "--stuck-after",
        type=float,
        metavar="SECONDS",
        help="report a worker that hangs in the job's code for this long, with the stacks of its threads in "
        f"its log (default: {STUCK_AFTER_S:.0f}), and kill it after ten times as long; 0: never",
    )
    group.add_argument(
        "--chaos",
        metavar="FAULTS",
        help=f'inject faults while it trains, such as "{EXAMPLE}"; see the end of  manyhands train --help',
    )
    group.add_argument(
        "--debug",
        action="store_true",
        help="give the terminal to the worker, so that breakpoint() works in the job: strategy single, no "
        "loader processes, no timeouts; Ctrl-C and the debugger's quit end the run at once",
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="STEPS",
        help="save every STEPS steps, in addition to after each epoch",
    )
    group.add_argument(
        "--keep",
        type=int,
        metavar="N",
        help="how many of the newest checkpoints to keep, besides the best (default: 3)",
    )
    group.add_argument(
        "--quiet", action="store_true", help="print only failures and one line at the end"
    )
    group.add_argument(
        "--control",
        metavar="HOW",
        help="how members connect to the coordinator: unix (default), tcp, or tcp://HOST:PORT; tcp is TLS "
        "1.3 with mutual certificates; with --on env, the coordinator's address",
    )
    group.add_argument(
        "--trust-network",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="authenticate bulk data without encrypting it: for private networks",
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
    default = config.default_workers if cluster is None else default_workers(config, cluster)
    workers = resolved.get("workers", default, number_or_range)
    minimum, count = parse_workers(workers)
    config.check(count)
    if cluster is not None:
        check_room(config, cluster, count, is_range=":" in str(workers))
    elif not elsewhere and count > max(64, 8 * cores()):
        raise UsageError(
            f"--workers {count}: this machine has {cores()} cores; more than {max(64, 8 * cores())} "
            "workers would only wait for each other."
        )
    # Hosts differ in their number of cores: 0 lets each host decide. Ray has to be asked for a number.
    share = 0 if cluster is not None else 1 if elsewhere else max(1, cores() // count)
    threads = resolved.get("threads", share, int)
    every = resolved.get("checkpoint_every", 0, int)
    keep = resolved.get("keep", 3, int)
    restarts = resolved.get("max_restarts", 3, int)
    bad_steps = resolved.get("max_bad_steps", MAX_BAD_STEPS, int)
    stuck_after = resolved.get("stuck_after", STUCK_AFTER_S, float)
    for flag, value, least in (
        ("threads", threads, min(1, share)),
        ("keep", keep, 1),
        ("checkpoint-every", every, 0),
        ("max-restarts", restarts, 0),
        ("max-bad-steps", bad_steps, 0),
        ("stuck-after", stuck_after, 0),
    ):
        if value < least:
            raise UsageError(f"--{flag} {value}: it must be at least {least}.")
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
        shared_cores=_shared_cores(resolved, local=cluster is None and not elsewhere),
        checkpoint_every=every,
        keep=keep,
        min_workers=minimum,
        max_restarts=restarts,
        max_bad_steps=bad_steps,
        stuck_after_s=0.0 if debug else stuck_after,  # someone is debugging
        equal_shares=resolved.get("equal_shares", False, _yes_or_no),
        scaling=_scaling(resolved, config, count),
        trust_network=resolved.get("trust_network", False, _yes_or_no),
        chaos=_chaos(resolved.get("chaos", None), config, count),
        debug=debug,
    )


def fit_debug(arguments: argparse.Namespace) -> None:
    """Set one worker on this machine for --debug, and refuse flags that contradict it."""
    if not arguments.debug:
        return
    for flag, value, allowed in (
        ("--strategy", arguments.strategy, ("single",)),
        ("--workers", arguments.workers, (1,)),
        ("--on", arguments.on, ("local",)),
    ):
        if value is not None and value not in allowed:
            raise UsageError(
                f"{flag} {value} with --debug: only one worker, on this machine, can have the terminal. "
                f"Leave {flag} out: --debug uses the strategy single."
            )
    arguments.strategy, arguments.workers, arguments.on = "single", 1, "local"


def _shared_cores(resolved: Resolved, *, local: bool) -> int:
    """Return the cores that workers of this machine share, if --threads is at its default; else 0."""
    return cores() if local and resolved.sources["threads"]["from"] == "default" else 0


def _scaling(resolved: Resolved, config: Strategy, workers: int) -> Scaling:
    rule = resolved.get("scale_batch", NONE)
    reference = resolved.get("scale_reference", workers, int)
    warmup = resolved.get("scale_warmup", WARMUP, int)
    sources = resolved.sources
    if rule not in RULES:
        raise UsageError(
            f"--scale-batch {rule}: there is no such rule{closest(rule, RULES)} "
            f"There are: {', '.join(RULES)}."
        )
    for name, value, least in (("scale-reference", reference, 1), ("scale-warmup", warmup, 0)):
        if value < least:
            raise UsageError(f"--{name} {value}: it must be at least {least}.")
        if rule == NONE and sources[name.replace("-", "_")]["from"] == f"--{name}":
            raise UsageError(
                f"--{name} {value}: nothing is scaled. Add  --scale-batch {LINEAR}  or  "
                f"--scale-batch {SQRT}."
            )
    if rule != NONE and not config.updates_whole_batches:
        raise UsageError(
            f"--scale-batch {rule}: with {config.name} each worker's push is already an update of its own: "
            "more workers make more updates, not larger ones. Set the size of a push with  --set "
            "batch_size=...  (of all workers together), and the learning rate with it, or use a synchronous "
            f"strategy:  --strategy ps:sync --scale-batch {rule}"
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
    check(chaos, strategy=config.name, elastic=config.elastic, workers=workers, servers=servers)
    return chaos


def number_or_range(text: str) -> int | str:
    """Parse --workers only so far that `parse_workers` can check it later."""
    try:
        return int(text)
    except ValueError:
        return text


def parse_workers(text: int | str) -> tuple[int, int]:
    """Parse N or MIN:MAX into (minimum, number at the start)."""
    first, colon, last = str(text).partition(":")
    try:
        least, count = (int(first), int(last)) if colon else (1, int(first))
    except ValueError:
        raise UsageError(
            f"--workers {text}: write a number, such as 4, or MIN:MAX, such as 2:4."
        ) from None
    if colon and not 1 <= least <= count:
        raise UsageError(
            f"--workers {text}: MIN must be at least 1, and MAX at least MIN, such as 2:4."
        )
    return least, count


def _yes_or_no(text: str) -> bool:
    """Parse a boolean environment variable."""
    if text.lower() not in ("1", "true", "yes", "0", "false", "no"):
        raise ValueError(text)
    return text.lower() in ("1", "true", "yes")


def parse_set(pairs: Sequence[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {pair}: write it as NAME=VALUE, for example --set lr=0.05")
        settings[name.strip()] = value.strip()
    return settings
