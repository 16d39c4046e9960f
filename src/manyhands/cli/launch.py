"""Write the file that starts a job on a cluster: for Slurm, or for Kubernetes.

The file is for you to read, edit and keep. In it every process runs the same command,
`manyhands train JOB --on env`; the first one coordinates, the others are its agents. A preempted run saves
a checkpoint, is restarted by the scheduler, and resumes from there.

Flags after -- are passed on to `manyhands train`.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from manyhands.api.options import Resolved, resolve_options
from manyhands.cli import train
from manyhands.cli.options import parse_set
from manyhands.cli.parser import Parser
from manyhands.errors import UsageError
from manyhands.job import find_job
from manyhands.launch import KubernetesJob, SlurmJob
from manyhands.launch.flags import add_flags
from manyhands.strategies.registry import make_strategy

HELP = "write the file that starts a job on Slurm or Kubernetes"
EXAMPLES = """\
examples:
  manyhands launch slurm job.py --nodes 4 --gpus 8 --time 24:00:00 --output job.sbatch
  manyhands launch slurm job.py --nodes 2 --cpus 16 -- --strategy ps:async --set lr=0.05 | sbatch
  manyhands launch kubernetes job.py --image registry.example.org/train:1.0 --pods 4 --gpus 8
  manyhands launch kubernetes job.py --image train:1.0 --kind jobset --output job.yaml

See docs/guides/slurm.md and docs/guides/kubernetes.md.
"""
J = TypeVar("J", SlurmJob, KubernetesJob)
SET_BY_THE_FILE = ("on", "cluster", "as", "slots", "key_file", "run_dir", "debug")
"""Flags of `manyhands train` that the file sets itself, or that make no sense in it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    schedulers = parser.add_subparsers(metavar="SCHEDULER", required=True)
    for name, help, job_type, write in (
        ("slurm", "A script for sbatch", SlurmJob, _slurm),
        ("kubernetes", "A manifest for kubectl apply", KubernetesJob, _kubernetes),
    ):
        sub = schedulers.add_parser(
            name,
            help=help,
            description=f"{help}.",
            usage=f"manyhands launch {name} JOB [flags] [-- flags of manyhands train]",
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # or --set, which belongs after --, would be --setup
        )
        sub.add_argument("job", metavar="JOB", help="path.py, path.py:Name or pkg.module:Name")
        add_flags(sub, job_type)
        group = sub.add_argument_group("the file")
        group.add_argument("--name", help="name of the job (default: from JOB)")
        group.add_argument(
            "--output", type=Path, metavar="FILE", help="file to write (default: standard output)"
        )
        group.add_argument("--force", action="store_true", help="overwrite an existing file")
        sub.set_defaults(write=write, explain=refuse_train_flags)


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
            f"--output {arguments.output}: the file exists. Choose another name, or overwrite it with  "
            "--force."
        ) from None
    except OSError as error:
        raise UsageError(
            f"--output {arguments.output} can't be written: {error.strerror}."
        ) from None
    print(f"Wrote {arguments.output}. {hint}")
    return 0


def _slurm(arguments: argparse.Namespace) -> tuple[str, str]:
    find_job(arguments.job)
    # This command runs where the job would be started by hand: tasks use the same environment.
    activate = shlex.quote(str(Path(sys.prefix) / "bin" / "activate"))
    inside = [] if sys.prefix == sys.base_prefix else [f"source {activate}"]
    job = _from_flags(
        SlurmJob,
        arguments,
        name=arguments.name or _name(arguments.job, r"[^\w.-]+"),
        options=tuple(option.removeprefix("--") for option in arguments.options),
        setup=(*inside, *arguments.setup),
    )
    _check_passed(arguments, job.num_tasks, "tasks", "--nodes or --tasks-per-node")
    return job.script(), f"Submit it with:  sbatch {shlex.quote(str(arguments.output))}"


def _kubernetes(arguments: argparse.Namespace) -> tuple[str, str]:
    job = _from_flags(
        KubernetesJob,
        arguments,
        name=arguments.name or _name(arguments.job.lower(), r"[^a-z0-9]+"),
    )
    _check_passed(arguments, job.num_slots, "slots", "--pods or --slots")
    return job.manifest(), "Its first lines say how to start it."


def _from_flags(job_type: type[J], arguments: argparse.Namespace, **computed: Any) -> J:
    """Make a job whose fields are the flags of the same name, and these."""
    names = {field.name for field in fields(job_type)} & vars(arguments).keys()
    flags = {name: getattr(arguments, name) for name in names}
    return job_type(**{**flags, "flags": tuple(arguments.passed), **computed})


# Flags of `manyhands train` -----------------------------------------------------------------------


def _train_parser() -> Parser:
    parser = Parser(prog="manyhands train")
    train.add_arguments(parser)
    return parser


def refuse_train_flags(parser: Parser, words: Sequence[str]) -> None:
    """Refuse flags of `manyhands train` before --, with the line to type instead."""
    train_parser = _train_parser()
    own: list[str] = []
    moved: list[str] = []
    left = [word for word in words if word != "--"]
    while left:
        word = left.pop(0)
        num_values, target = parser.num_values(word), own
        if num_values is None and (num_values := train_parser.num_values(word)) is not None:
            target = moved
        target += [word, *left[: num_values or 0]]
        del left[: num_values or 0]
    if moved:
        raise UsageError(
            f"{moved[0]} is a flag of  manyhands train, and those come after --. Type:\n"
            f"    manyhands {shlex.join([*own, '--', *moved])}"
        )


def _check_passed(arguments: argparse.Namespace, room: int, noun: str, flags: str) -> None:
    """Refuse here what `manyhands train` would refuse on the cluster."""
    parser = _train_parser()
    train_flags, left_over = parser.parse_known_args([arguments.job, *arguments.passed])
    if left_over:
        parser.refuse(left_over, ["train", arguments.job, *arguments.passed])
    for name in SET_BY_THE_FILE:
        if getattr(train_flags, name):
            raise UsageError(
                f"--{name.replace('_', '-')} can't stand after --: the file decides that. See  "
                "manyhands launch --help."
            )
    resolved = Resolved(vars(train_flags))
    options = resolve_options(
        resolved, job=train_flags.job, settings=parse_set(train_flags.set), elsewhere=True
    )
    servers = make_strategy(options.strategy).servers_for(options.workers)
    # With MIN:MAX more processes may join later.
    if (
        train_flags.workers is None
        or ":" in str(train_flags.workers)
        or options.workers + servers <= room
    ):
        return
    and_servers = f" and {servers} dedicated servers" if servers else ""
    raise UsageError(
        f"--workers {train_flags.workers}{and_servers}: this file starts {room} {noun}. Start more with "
        f"{flags}, or leave --workers out: then each gets one worker."
    )


def _name(job: str, forbidden: str) -> str:
    """Derive a name from the job: examples/My Job.py:Large is my-job-large."""
    path, _, chosen = job.partition(":")
    stem = Path(path).stem if path.endswith(".py") else path.rpartition(".")[2]
    text = "-".join(part for part in (stem, chosen) if part)
    slug = re.sub(forbidden, "-", text).strip("-._")
    return slug if slug[:1].isalpha() else f"run-{slug}".rstrip("-")
