"""A script for `sbatch`: one `manyhands train JOB --on env` a task, started again when it was preempted.

Slurm warns the script some time before the job's end (SIGUSR1); the script hands that on to srun, which
hands it to the tasks; the coordinator saves a checkpoint and ends with 75; the script asks Slurm to queue
the job again; the same script then finds the run's folder and goes on by `manyhands resume`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from manyhands.launch.shell import Flags, at_least, matching, one_line, quoted

NAME = r"[A-Za-z0-9][\w.+-]*"
TIME = r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}"
GPUS = r"([A-Za-z][\w.-]*:)?[1-9][0-9]*"
MEMORY = r"[0-9]+[KMGT]?"


@dataclass(frozen=True)
class SlurmJob:
    job: str
    """The job file, as `manyhands train` takes it."""
    name: str
    flags: Flags = ()
    nodes: int = 2
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: str | None = None
    """`4`, or `a100:4`."""
    memory: str | None = None
    """Of a node."""
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    options: tuple[str, ...] = ()
    """Further ones of sbatch: `constraint=a100`."""
    warn_s: int = 120
    """How long before its end the job is told."""
    requeues: int = 100
    """How often it is queued again, at most."""
    run: str | None = None
    key_file: str | None = None
    setup: tuple[str, ...] = field(default=())
    """Lines of shell before anything is started."""

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
        for flag, text in (("--run-dir", self.run), ("--key-file", self.key_file)):
            if text is not None:
                one_line(flag, text)
        for line in self.setup:
            one_line("--setup", line)

    @property
    def num_tasks(self) -> int:
        return self.nodes * self.tasks_per_node

    def script(self) -> str:
        return "\n".join(
            [
                *self._head(),
                *self._environment(),
                *self._key(),
                *self._command(),
                *self._start(),
                "",
            ]
        )

    def _head(self) -> Iterator[str]:
        tasks = f"{self.tasks_per_node} task{'s' * (self.tasks_per_node > 1)}"
        yield "#!/bin/bash"
        yield f"# {self.job} on {self.nodes} node{'s' * (self.nodes > 1)}, {tasks} on each."
        yield "# Written by  manyhands launch slurm; it is yours to edit. Submit it with  sbatch FILE."
        yield f"#SBATCH --job-name={self.name}"
        yield f"#SBATCH --nodes={self.nodes}"
        yield f"#SBATCH --ntasks-per-node={self.tasks_per_node}"
        for option, value in (
            ("cpus-per-task", self.cpus_per_task),
            ("gpus-per-node", self.gpus_per_node),
            ("mem", self.memory),
            ("time", self.time),
            ("partition", self.partition),
            ("account", self.account),
        ):
            if value is not None:
                yield f"#SBATCH --{option}={value}"
        for option in self.options:
            yield f"#SBATCH --{option}"
        yield f"#SBATCH --output={self.name}-%j.log"
        yield "# A job that is queued again goes on in the same log."
        yield "#SBATCH --open-mode=append"
        yield "#SBATCH --requeue"
        yield f"# {self.warn_s} s before the job's end this script gets SIGUSR1: time to save a checkpoint."
        yield f"#SBATCH --signal=B:USR1@{self.warn_s}"

    def _environment(self) -> Iterator[str]:
        if self.setup:
            yield "\n# The environment that all tasks get."
            yield from self.setup

    def _key(self) -> Iterator[str]:
        where = '"$HOME/.manyhands/key"' if self.key_file is None else shlex.quote(self.key_file)
        yield f"""
set -u  # not before: what sets up an environment is rarely made for it

# The run's key: whoever has it can take part in the run. It is read from a file that only you can read and
# handed on in the environment, never on a command line, which everybody on a host can see.
KEY_FILE={where}
if [ ! -s "$KEY_FILE" ]; then
    echo "error: there is no key in $KEY_FILE. Make one:" >&2
    echo "  mkdir -p \\"$(dirname "$KEY_FILE")\\" && (umask 077; manyhands key > \\"$KEY_FILE\\")" >&2
    exit 2
fi
case "$(stat -L -c %a "$KEY_FILE")" in
    600 | 400) ;;
    *)
        echo "error: others may read or change $KEY_FILE. Type:  chmod 600 \\"$KEY_FILE\\"" >&2
        exit 2
        ;;
esac
MANYHANDS_KEY=$(<"$KEY_FILE")
export MANYHANDS_KEY"""

    def _command(self) -> Iterator[str]:
        run = f"runs/{self.name}-$SLURM_JOB_ID" if self.run is None else shlex.quote(self.run)
        flags = "".join(f"\n        {words}" for words in quoted(self.flags))
        yield f"""
# The run's folder, on a disk that all nodes see. If it is there, this is a second start, and the run goes
# on from its last checkpoint with the flags that it had.
RUN={run}
if [ -e "$RUN/config.json" ]; then
    command=(manyhands resume "$RUN" --on env)
else
    command=(
        manyhands train {shlex.quote(self.job)} --on env --run-dir "$RUN"{flags}
    )
fi"""

    def _start(self) -> Iterator[str]:
        cpus = "" if self.cpus_per_task is None else f" --cpus-per-task={self.cpus_per_task}"
        yield f"""
# One process for each task: the first coordinates, the others serve it. One that dies does not end the
# others: the run goes on without it.
step='' warned='' again=''
on_warning() {{
    again=1
    if [ -n "$step" ] && [ -z "$warned" ]; then
        warned=1
        kill -USR1 "$step"
    fi
}}
trap on_warning USR1
mkdir -p "$(dirname "$RUN")" && touch "$RUN.started"
srun --export=ALL --kill-on-bad-exit=0{cpus} "${{command[@]}}" &
step=$!
[ -z "$again" ] || on_warning

# A signal ends `wait` early: then it waits again, and a second look at what has ended says 127.
code=127 again=1
while [ -n "$again" ]; do
    again=''
    wait "$step"
    got=$?
    [ "$got" -eq 127 ] || code=$got
done"""
        yield """
# srun ends with the highest code of all tasks. What counts is how the run ended, also if a host was lost.
if [ "$RUN/summary.json" -nt "$RUN.started" ]; then
    case "$(sed -n 's/.*"outcome": "\\([a-z-]*\\)".*/\\1/p' "$RUN/summary.json")" in
        preempted) code=75 ;;
        diverged) code=65 ;;
        finished | early-stopped) code=0 ;;
    esac
fi
rm -f "$RUN.started"
"""
        yield f"""# 75: preempted, and saved. The same job is queued again, and goes on from there.
if [ "$code" -eq 75 ]; then
    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {self.requeues} ]; then
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "It was queued again $SLURM_RESTART_COUNT times. Go on with:  manyhands resume $RUN" >&2
    fi
fi
exit "$code\""""
