"""A script for `sbatch`: one `manyhands train JOB --on env` per task, requeued after a preemption.

Some time before the job ends, Slurm sends SIGUSR1 to the script, which forwards it to srun, and srun to the
tasks. The coordinator saves a checkpoint and exits with 75; the script then requeues the job. The next
start of the same script finds the run folder and calls `manyhands resume`.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial

from manyhands.events.units import plural
from manyhands.launch.flags import check_fields, flag, matching, one_line
from manyhands.launch.template import fill, shell_lines

NAME = r"[A-Za-z0-9][\w.+-]*"
TIMES = "90 (minutes), 12:00:00 or 2-12:00:00"
TIME = r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}"
PARTITIONS = rf"{NAME}(,{NAME})*"
OPTION = r"[a-z][a-z-]*(=\S([ -~]*\S)?)?"
GPUS = r"([A-Za-z][\w.-]*:)?[1-9][0-9]*"
MEMORY = r"[0-9]+[KMGT]?"


DEFAULT_KEY_FILE = '"$HOME/.manyhands/key"'

_resource = partial(flag, "resources")
_start = partial(flag, "how it is started")


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    job: str
    """The job file, as `manyhands train` takes it."""
    name: str
    flags: tuple[str, ...] = ()
    """Passed on to `manyhands train`."""
    nodes: int = _resource("--nodes", "N", "number of nodes", default=2)
    tasks_per_node: int | None = _resource(
        "--tasks-per-node",
        "N",
        "processes on each node, one member each (default: its GPUs, or 1)",
    )
    cpus_per_task: int | None = _resource("--cpus", "N", "cores per task")
    gpus_per_node: str | None = _resource(
        "--gpus", "N", "GPUs per node, such as 4 or a100:4", GPUS, "4 or a100:4"
    )
    memory: str | None = _resource(
        "--memory", "SIZE", "memory per node, such as 64G", MEMORY, "64G"
    )
    time: str | None = _resource("--time", "T", f"time limit: {TIMES}", TIME, TIMES)
    partition: str | None = _resource(
        "--partition", "NAME", "partition, or several: gpu,long", PARTITIONS, "gpu or gpu,long"
    )
    account: str | None = _resource("--account", "NAME", "account to charge", NAME, "lab-42")
    options: tuple[str, ...] = _resource(
        "--sbatch",
        "OPTION",
        "any other option of sbatch, such as constraint=a100; may be repeated",
        OPTION,
        "constraint=a100",
        default=(),
    )
    setup: tuple[str, ...] = _start(
        "--setup",
        "COMMAND",
        'shell command to run before the tasks, such as "module load cuda"; may be repeated',
        default=(),
    )
    run_dir: str | None = _start(
        "--run-dir",
        "DIR",
        "folder of the run, on a disk that all nodes share (default: runs/NAME-JOBID)",
    )
    key_file: str | None = _start(
        "--key-file", "FILE", "file with the run's key (default: ~/.manyhands/key)"
    )
    warn_s: int = _start(
        "--warn",
        "SECONDS",
        "how long before the time limit the job saves a checkpoint and stops",
        default=120,
    )
    requeues: int = _start(
        "--requeues", "N", "number of times that a preempted job is requeued", default=100, least=0
    )

    def __post_init__(self) -> None:
        one_line("JOB", self.job)
        matching("--name", self.name, NAME, "digits-large")
        check_fields(self)

    @property
    def num_tasks(self) -> int:
        return self.nodes * self._tasks_per_node

    @property
    def _tasks_per_node(self) -> int:
        if self.tasks_per_node is not None:
            return self.tasks_per_node
        return int((self.gpus_per_node or "1").rpartition(":")[2])

    def script(self) -> str:
        resources = {
            "cpus-per-task": self.cpus_per_task,
            "gpus-per-node": self.gpus_per_node,
            "mem": self.memory,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
        }
        given = [f"{name}={value}" for name, value in resources.items() if value is not None]
        setup = ["", "# The environment of all tasks.", *self.setup] if self.setup else []
        values = vars(self) | {
            "quoted_job": shlex.quote(self.job),
            "flags": "\n".join(shell_lines(self.flags)),
            "nodes_text": plural(self.nodes, "node"),
            "tasks_per_node": self._tasks_per_node,
            "tasks_text": plural(self._tasks_per_node, "task"),
            "options": "\n".join(f"#SBATCH --{option}" for option in (*given, *self.options)),
            "srun_cpus": f" --cpus-per-task={self.cpus_per_task}" if self.cpus_per_task else "",
            "setup": "\n".join(setup),
            "key_file": shlex.quote(self.key_file) if self.key_file else DEFAULT_KEY_FILE,
            "run": shlex.quote(self.run_dir) if self.run_dir else f"runs/{self.name}-$SLURM_JOB_ID",
        }
        return fill("slurm.sh", values)
