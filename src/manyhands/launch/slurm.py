"""A script for `sbatch`: one `manyhands train JOB --on env` per task, requeued after a preemption.

Some time before the job ends, Slurm sends SIGUSR1 to the script, which forwards it to srun, and srun to the
tasks. The coordinator saves a checkpoint and exits with 75; the script then requeues the job. The next
start of the same script finds the run folder and calls `manyhands resume`.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from manyhands.events.units import plural
from manyhands.launch.template import at_least, fill, matching, one_line, shell_lines

NAME = r"[A-Za-z0-9][\w.+-]*"
TIME = r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}"
GPUS = r"([A-Za-z][\w.-]*:)?[1-9][0-9]*"
MEMORY = r"[0-9]+[KMGT]?"


@dataclass(frozen=True)
class SlurmJob:
    job: str
    """The job file, as `manyhands train` takes it."""
    name: str
    flags: tuple[str, ...] = ()
    """Passed on to `manyhands train`."""
    nodes: int = 2
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: str | None = None
    """`4`, or `a100:4`."""
    memory: str | None = None
    """Per node."""
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    options: tuple[str, ...] = ()
    """Other options of sbatch: `constraint=a100`."""
    warn_s: int = 120
    """How long before its end the job is warned."""
    requeues: int = 100
    """The maximum number of times the job is requeued."""
    run_dir: str | None = None
    key_file: str | None = None
    setup: tuple[str, ...] = ()
    """Lines of shell to run before the tasks."""

    def __post_init__(self) -> None:
        one_line("JOB", self.job)
        matching("--name", self.name, NAME, "digits-large")
        at_least("--nodes", self.nodes, 1)
        at_least("--tasks-per-node", self.tasks_per_node, 1)
        at_least("--warn", self.warn_s, 1)
        at_least("--requeues", self.requeues, 0)
        if self.cpus_per_task is not None:
            at_least("--cpus", self.cpus_per_task, 1)
        for flag, text, pattern, example in (
            ("--gpus", self.gpus_per_node, GPUS, "4 or a100:4"),
            ("--memory", self.memory, MEMORY, "64G"),
            ("--time", self.time, TIME, "90 (minutes), 12:00:00 or 2-12:00:00"),
            ("--partition", self.partition, rf"{NAME}(,{NAME})*", "gpu or gpu,long"),
            ("--account", self.account, NAME, "lab-42"),
        ):
            if text is not None:
                matching(flag, text, pattern, example)
        for text in self.options:
            matching("--sbatch", text, r"[a-z][a-z-]*(=\S([ -~]*\S)?)?", "constraint=a100")
        for flag, text in (("--run-dir", self.run_dir), ("--key-file", self.key_file)):
            if text is not None:
                one_line(flag, text)
        for line in self.setup:
            one_line("--setup", line)

    @property
    def num_tasks(self) -> int:
        return self.nodes * self.tasks_per_node

    def script(self) -> str:
        resources = {
            "cpus-per-task": self.cpus_per_task,
            "gpus-per-node": self.gpus_per_node,
            "mem": self.memory,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
        }
        options = [f"{name}={value}" for name, value in resources.items() if value is not None]
        cpus = "" if self.cpus_per_task is None else f" --cpus-per-task={self.cpus_per_task}"
        key_file = '"$HOME/.manyhands/key"' if self.key_file is None else shlex.quote(self.key_file)
        run = (
            f"runs/{self.name}-$SLURM_JOB_ID" if self.run_dir is None else shlex.quote(self.run_dir)
        )
        setup = ["", "# The environment of all tasks.", *self.setup] if self.setup else []
        values = {
            "job": self.job,
            "quoted_job": shlex.quote(self.job),
            "flags": "\n".join(shell_lines(self.flags)),
            "name": self.name,
            "nodes": self.nodes,
            "nodes_text": plural(self.nodes, "node"),
            "tasks_per_node": self.tasks_per_node,
            "tasks_text": plural(self.tasks_per_node, "task"),
            "options": "\n".join(f"#SBATCH --{option}" for option in [*options, *self.options]),
            "srun_cpus": cpus,
            "warn_s": self.warn_s,
            "requeues": self.requeues,
            "setup": "\n".join(setup),
            "key_file": key_file,
            "run": run,
        }
        return fill("slurm.sh", values)
