"""Flags of `train` and `resume`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from manyhands.coordinator.bad_steps import MAX_BAD_STEPS
from manyhands.coordinator.batch_scaling import WARMUP
from manyhands.coordinator.fault_spec import EXAMPLE
from manyhands.coordinator.stuck import STUCK_AFTER_S
from manyhands.errors import UsageError
from manyhands.strategies.registry import STRATEGIES


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how")
    _add_worker_flags(group)
    _add_batch_flags(group)
    _add_end_flags(parser.add_argument_group("when to stop"))
    _add_fault_flags(group)
    _add_place_flags(parser)
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


def parse_set(pairs: Sequence[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {pair}: write it as NAME=VALUE, for example --set lr=0.05")
        settings[name.strip()] = value.strip()
    return settings


def _add_place_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    group.add_argument(
        "--on",
        metavar="WHERE",
        help="where members run. local: on this machine (default; required if torchrun, srun or the like has "
        "started several processes and each should train alone). env: on all hosts on which torchrun, srun, "
        "Kubernetes or you have started this command; the first process coordinates, the others serve it. "
        "ray: on the Ray cluster of this machine or of RAY_ADDRESS; ray=HOST:PORT: on that cluster; "
        "ray=local: on one that is started for the run. From outside of a cluster, use  ray job submit",
    )
    group.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="with --on env: a file that lists the hosts, instead of the environment; the same on each of "
        "them",
    )
    group.add_argument(
        "--as",
        metavar="NAME",
        help="with --cluster: this host's entry in the file (default: the one with its host name)",
    )
    group.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="with --on env: number of members that each process may start (default: 1)",
    )
    group.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help="with --on env: how long processes wait for each other at the start (default: 300); with "
        "--on ray: how long to wait for free resources and new nodes (default: 300)",
    )
    group.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="with --on env: a file with the run's key, which only its owner can read (default: the "
        "variable MANYHANDS_KEY); see  manyhands key --help",
    )
    _add_ray_flags(group)


def _add_ray_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ray-placement",
        metavar="HOW",
        help="with --on ray: spread (default), on as many nodes as possible, or pack, on as few",
    )
    group.add_argument(
        "--ray-ship",
        metavar="FOLDER",
        type=Path,
        help="with --on ray: a folder with the job that Ray copies to the nodes, for those that don't see "
        "it (default: they see the same files)",
    )
