"""Fake programs of Slurm, and a fake manyhands, on PATH, to run the scripts that we write.

`sbatch` reads the directives, runs the script, and runs it again if the job was requeued; `srun` starts
the tasks with the variables that the real one sets, and forwards SIGUSR1; `scontrol` records the request;
`manyhands` records its arguments and environment, and exits as the test's plan says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SBATCH = """
import os, shlex, signal, subprocess, sys
script, options = sys.argv[1], {}
for line in open(script):
    if line.startswith("#SBATCH "):
        name, _, value = shlex.split(line)[1].removeprefix("--").partition("=")
        options[name] = value
    elif not line.startswith("#"):
        break
nodes, tasks = int(options["nodes"]), int(options["ntasks-per-node"])
assert options["signal"].startswith("B:USR1@") and "requeue" in options, options
state, restarts = os.environ["STATE"], 0
while True:
    environ = os.environ | {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": f"node[0-{nodes - 1}]",
        "SLURM_NTASKS": str(nodes * tasks), "SLURM_TASKS_PER_NODE": f"{tasks}(x{nodes})",
        "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    if restarts:
        environ["SLURM_RESTART_COUNT"] = str(restarts)
    job = subprocess.Popen(["bash", script], env=environ)
    # As Slurm does for B:, signal only the script itself.
    signal.signal(signal.SIGUSR1, lambda *_: job.send_signal(signal.SIGUSR1))
    open(f"{state}/job-{restarts}", "w").close()
    code = job.wait()
    if not os.path.exists(f"{state}/requeue"):
        sys.exit(code)
    os.remove(f"{state}/requeue")
    restarts += 1
"""
SRUN = """
import os, signal, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
per_node = int(os.environ["SLURM_TASKS_PER_NODE"].partition("(")[0])
tasks = []
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
for rank in range(int(os.environ["SLURM_NTASKS"])):
    environ = os.environ | {"SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank // per_node), "SLURM_LOCALID": str(rank % per_node)}
    tasks.append(subprocess.Popen(words, env=environ))
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""
SCONTROL = """
import os, sys
assert sys.argv[1:] == ["requeue", "4711"], sys.argv
open(os.environ["STATE"] + "/requeue", "w").close()
"""
MANYHANDS = """
import json, os, signal, sys
state, start = os.environ["STATE"], os.environ.get("SLURM_RESTART_COUNT", "0")
rank = int(os.environ["SLURM_PROCID"])
plan = json.load(open(state + "/plan.json"))[int(start)]
me = {"argv": sys.argv[1:], "environ": dict(os.environ)}
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
with open(f"{state}/{start}-{rank}.json", "w") as file:
    json.dump(me, file)
code = plan["codes"][rank]
if plan["waits"]:
    signal.sigwait([signal.SIGUSR1])
run = os.environ["RUN_DIR"]
if rank == 0 and "outcome" in plan:
    os.makedirs(run, exist_ok=True)
    for name, value in (("config", {}), ("summary", {"outcome": plan["outcome"], "steps": 3})):
        with open(f"{run}/{name}.json", "w") as file:
            json.dump(value, file, indent=2)
sys.exit(code)
"""


class Slurm:
    """The programs in a folder, and what they recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.key_file = folder / "home" / ".manyhands" / "key"
        for path in (self.state, folder / "bin", self.key_file.parent):
            path.mkdir(parents=True)
        programs = {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "manyhands": MANYHANDS}
        for name, code in programs.items():
            program = folder / "bin" / name
            program.write_text(f"#!{sys.executable} -IS{code}")
            program.chmod(0o755)
        self.key_file.touch(mode=0o600)
        self.key_file.write_text("sesame\n")

    @property
    def setup(self) -> str:
        """A line of shell that puts the fake programs first on PATH."""
        return f"export PATH='{self.folder}/bin':$PATH"

    @contextmanager
    def submitted(
        self, script: str, *plans: dict[str, Any], run: str = "runs/job-4711"
    ) -> Iterator[subprocess.Popen[str]]:
        """Submit a script. `plans`: for each start the exit codes, whether tasks wait, the outcome."""
        (self.state / "plan.json").write_text(json.dumps(plans))
        path = self.folder / "job.sbatch"
        path.write_text(script)
        environ = os.environ | {"STATE": str(self.state), "HOME": str(self.folder / "home")}
        environ |= {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "RUN_DIR": run}
        process = subprocess.Popen(
            ["sbatch", str(path)],
            cwd=self.folder,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=10)

    def tasks(self, start: int) -> list[dict[str, Any]]:
        """Return what the tasks of a start recorded, by rank."""
        found = []
        for path in self.state.glob(f"{start}-*.json"):
            try:
                found.append(json.loads(path.read_text()))
            except json.JSONDecodeError:
                continue  # being written
        return sorted(found, key=lambda task: int(task["environ"]["SLURM_PROCID"]))
