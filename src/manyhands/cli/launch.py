"""Write the file that starts a job on a cluster: for Slurm, or for Kubernetes.

The file is for people: read it, edit it, keep it. In it every process runs the same command,
`manyhands train JOB --on env`; the first coordinates, the others serve it. A run that is preempted saves a
checkpoint, is started again by the scheduler, and goes on from there.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from manyhands.cli.options import number_or_range, parse_set, parse_workers
from manyhands.coordinator.batch_scaling import RULES
from manyhands.errors import UsageError
from manyhands.job import find_job
from manyhands.launch import KINDS, KubernetesJob, SlurmJob
from manyhands.strategies.registry import make_strategy

HELP = "write the file that starts a job on Slurm or Kubernetes"
EXAMPLES = """\
examples:
  manyhands launch slurm job.py --nodes 4 --gpus 8 --time 24:00:00 --output job.sbatch
  manyhands launch slurm job.py --nodes 2 --cpus 16 --strategy ps:async --set lr=0.05 | sbatch
  manyhands launch kubernetes job.py --image registry.example.org/train:1.0 --pods 4 --gpus 8
  manyhands launch kubernetes job.py --image train:1.0 --kind jobset --output job.yaml

See docs/guides/slurm.md and docs/guides/kubernetes.md.
"""

LEAST = {
    "threads": 1,
    "max_restarts": 0,
    "max_bad_steps": 0,
    "stuck_after": 0,
    "checkpoint_every": 0,
    "keep": 1,
    "scale_reference": 1,
    "scale_warmup": 0,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    places = parser.add_subparsers(metavar="SCHEDULER", required=True)
    for name, add, write in (
        ("slurm", _add_slurm, _slurm),
        ("kubernetes", _add_kubernetes, _kubernetes),
    ):
        place = places.add_parser(
            name,
            help=(add.__doc__ or "").rstrip("."),
            description=add.__doc__,
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        place.add_argument("job", metavar="JOB", help="path.py, path.py:Name or pkg.module:Name")
        add(place)
        _add_passed(place)
        group = place.add_argument_group("the file")
        group.add_argument("--name", help="of the job (default: from JOB)")
        group.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
        group.add_argument("--force", action="store_true", help="write over a file that is there")
        place.set_defaults(write=write)


def run(arguments: argparse.Namespace) -> int:
    text, hint = arguments.write(arguments)
    if arguments.output is None:
        sys.stdout.write(text)
        return 0
    try:
        with open(arguments.output, "w" if arguments.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"--output {arguments.output}: it is there already. Give another name, or write over it "
            "with  --force."
        ) from None
    except OSError as error:
        raise UsageError(
            f"--output {arguments.output} can't be written: {error.strerror}."
        ) from None
    print(f"{arguments.output} is written. {hint}")
    return 0


# Slurm --------------------------------------------------------------------------------------------


def _add_slurm(parser: argparse.ArgumentParser) -> None:
    """A script for sbatch."""
    group = parser.add_argument_group("what the job asks of Slurm")
    group.add_argument("--nodes", type=int, default=2, metavar="N", help="default: 2")
    group.add_argument(
        "--tasks-per-node",
        type=int,
        metavar="N",
        help="processes on each node, a member each (default: its GPUs, or 1)",
    )
    group.add_argument("--cpus", type=int, metavar="N", help="cores of each task")
    group.add_argument("--gpus", metavar="N", help="of each node, as 4 or a100:4")
    group.add_argument("--memory", metavar="SIZE", help="of each node, as 64G")
    group.add_argument("--time", metavar="T", help="90 (minutes), 12:00:00 or 2-12:00:00")
    group.add_argument("--partition", metavar="NAME")
    group.add_argument("--account", metavar="NAME")
    group.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="any other option of sbatch, as constraint=a100; may be repeated",
    )
    group = parser.add_argument_group("how it is started")
    group.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="COMMAND",
        help='run before the tasks, as "module load cuda"; may be repeated',
    )
    group.add_argument(
        "--run-dir", metavar="DIR", help="on a disk that all nodes see (default: runs/NAME-JOBID)"
    )
    group.add_argument(
        "--key-file", metavar="FILE", help="with the run's key (default: ~/.manyhands/key)"
    )
    group.add_argument(
        "--warn",
        type=int,
        default=120,
        metavar="SECONDS",
        help="how long before its end the job saves a checkpoint and stops (default: 120)",
    )
    group.add_argument(
        "--requeues",
        type=int,
        default=100,
        metavar="N",
        help="how often it may be queued again after that (default: 100)",
    )


def _slurm(arguments: argparse.Namespace) -> tuple[str, str]:
    find_job(arguments.job)
    tasks = arguments.tasks_per_node
    if tasks is None:
        gpus = (arguments.gpus or "1").rpartition(":")[2]
        tasks = int(gpus) if gpus.isdecimal() else 1
    # The file is written where the job would be started by hand: the same environment serves it.
    inside = [] if sys.prefix == sys.base_prefix else [_activate()]
    job = SlurmJob(
        job=arguments.job,
        name=arguments.name or _name(arguments.job, r"[^\w.-]+"),
        flags=list(_passed(arguments)),
        nodes=arguments.nodes,
        tasks_per_node=tasks,
        cpus_per_task=arguments.cpus,
        gpus_per_node=arguments.gpus,
        memory=arguments.memory,
        time=arguments.time,
        partition=arguments.partition,
        account=arguments.account,
        options=tuple(option.removeprefix("--") for option in arguments.sbatch),
        warn_s=arguments.warn,
        requeues=arguments.requeues,
        run=arguments.run_dir,
        key_file=arguments.key_file,
        setup=(*inside, *arguments.setup),
    )
    _check_room(arguments, job.num_tasks, "tasks", "--nodes or --tasks-per-node")
    return job.script(), f"Submit it with:  sbatch {shlex.quote(str(arguments.output))}"


def _activate() -> str:
    return f"source {shlex.quote(str(Path(sys.prefix) / 'bin' / 'activate'))}"


# Kubernetes ---------------------------------------------------------------------------------------


def _add_kubernetes(parser: argparse.ArgumentParser) -> None:
    """A manifest for kubectl apply."""
    group = parser.add_argument_group("what the job asks of Kubernetes")
    group.add_argument(
        "--kind",
        default="job",
        metavar="KIND",
        help=f"{', '.join(f'{name}: {what}' for name, what in KINDS.items())} (default: job)",
    )
    group.add_argument(
        "--image", required=True, help="with manyhands and the job file; JOB is a path in it"
    )
    group.add_argument("--namespace", metavar="NAME")
    group.add_argument("--pods", type=int, default=2, metavar="N", help="default: 2")
    group.add_argument("--cpus", metavar="N", help="of each pod, as 4 or 500m")
    group.add_argument("--memory", metavar="SIZE", help="of each pod, as 16Gi")
    group.add_argument("--gpus", type=int, default=0, metavar="N", help="of each pod")
    group.add_argument(
        "--gpu-resource",
        default="nvidia.com/gpu",
        metavar="NAME",
        help="what the cluster calls them (default: nvidia.com/gpu)",
    )
    group.add_argument(
        "--slots", type=int, metavar="N", help="members of each pod (default: its GPUs, or 1)"
    )
    group = parser.add_argument_group("where the run is kept")
    group.add_argument(
        "--runs",
        default="/runs",
        metavar="DIR",
        help="where pods mount the volume (default: /runs)",
    )
    group.add_argument("--claim", metavar="NAME", help="of a volume that is there already")
    group.add_argument(
        "--storage", default="20Gi", metavar="SIZE", help="of a volume that is made (default: 20Gi)"
    )
    group.add_argument("--storage-class", metavar="NAME", help="of a volume that is made")
    group = parser.add_argument_group("how it is started")
    group.add_argument(
        "--secret", metavar="NAME", help="with the run's key (default: NAME-key); see the file"
    )
    group.add_argument(
        "--grace",
        type=int,
        default=120,
        metavar="SECONDS",
        help="how long a pod that has to go may save a checkpoint (default: 120)",
    )
    group.add_argument(
        "--retries",
        type=int,
        default=10,
        metavar="N",
        help="failed pods that are replaced; preempted ones don't count (default: 10)",
    )


def _kubernetes(arguments: argparse.Namespace) -> tuple[str, str]:
    slots = arguments.slots if arguments.slots is not None else max(1, arguments.gpus)
    job = KubernetesJob(
        job=arguments.job,
        name=arguments.name or _name(arguments.job.lower(), r"[^a-z0-9]+"),
        image=arguments.image,
        flags=list(_passed(arguments)),
        kind=arguments.kind,
        pods=arguments.pods,
        slots=slots,
        namespace=arguments.namespace,
        cpus=arguments.cpus,
        memory=arguments.memory,
        gpus=arguments.gpus,
        gpu_resource=arguments.gpu_resource,
        claim=arguments.claim,
        storage=arguments.storage,
        storage_class=arguments.storage_class,
        folder=arguments.runs,
        secret=arguments.secret,
        grace_s=arguments.grace,
        retries=arguments.retries,
    )
    _check_room(arguments, job.pods * job.slots, "slots", "--pods or --slots")
    return job.manifest(), "Its first lines say how to start it."


# What is passed on to `manyhands train` -----------------------------------------------------------


def _add_passed(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("passed on", "as  manyhands train --help  has them")
    group.add_argument("--strategy", metavar="SPEC")
    group.add_argument("--workers", type=number_or_range, metavar="N")
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    group.add_argument("--device", metavar="D")
    group.add_argument("--init-from", metavar="RUN")
    group.add_argument("--scale-batch", metavar="RULE", choices=RULES)
    for name in LEAST:
        group.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    for flag in ("--equal-shares", "--trust-network"):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
    group.add_argument("--quiet", action="store_true", default=None)


def _passed(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """The flags that were given, each with its value; wrong ones are refused here, not on the cluster."""
    if arguments.strategy is not None:
        make_strategy(arguments.strategy)
        yield ["--strategy", arguments.strategy]
    if arguments.workers is not None:
        yield ["--workers", str(arguments.workers)]
    parse_set(arguments.set)
    for pair in arguments.set:
        yield ["--set", pair]
    if arguments.device is not None:
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", arguments.device):
            raise UsageError(
                f"--device {arguments.device}: allowed are auto, cpu, cuda and cuda:N."
            )
        yield ["--device", arguments.device]
    if arguments.init_from is not None:
        yield ["--init-from", arguments.init_from]
    if arguments.scale_batch is not None:
        yield ["--scale-batch", arguments.scale_batch]
    for name, least in LEAST.items():
        flag, value = f"--{name.replace('_', '-')}", getattr(arguments, name)
        if value is not None:
            if value < least:
                raise UsageError(f"{flag} {value}: it must be at least {least}.")
            yield [flag, str(value)]
    for name in ("equal_shares", "trust_network", "quiet"):
        value = getattr(arguments, name)
        if value is not None:
            yield [f"--{'' if value else 'no-'}{name.replace('_', '-')}"]


def _check_room(arguments: argparse.Namespace, room: int, noun: str, flags: str) -> None:
    """Refuse what the processes do not suffice for; with MIN:MAX others may come later."""
    if arguments.workers is None:
        return
    config = make_strategy(arguments.strategy or "allreduce")
    _, count = parse_workers(arguments.workers)
    config.check(count)
    servers = config.servers_for(count)
    if ":" not in str(arguments.workers) and count + servers > room:
        beside = f" and {servers} servers of their own" if servers else ""
        raise UsageError(
            f"--workers {arguments.workers}{beside}: this file starts {room} {noun}. Give more with "
            f"{flags}, or leave --workers out: then there is one worker for each."
        )


def _name(job: str, forbidden: str) -> str:
    """A name from that of the job: examples/My Job.py:Large is my-job-large."""
    path, _, chosen = job.partition(":")
    stem = Path(path).stem if path.endswith(".py") else path.rpartition(".")[2]
    text = "-".join(part for part in (stem, chosen) if part)
    slug = re.sub(forbidden, "-", text).strip("-._")
    return slug if slug[:1].isalpha() else f"run-{slug}".rstrip("-")
