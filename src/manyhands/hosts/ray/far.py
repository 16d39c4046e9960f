"""A coordinator on the cluster, for a person outside of it: `--on ray://HOST:10001`.

The nodes can't reach the machine where the command was typed. So the same command runs in a process on Ray's
head node, beside an actor that this side holds through Ray's client:

    this side   sends the command line, prints what comes back, hands on signals, ends with its exit code
    there       the run folder, the coordinator, its broker; and the members, as with  --on ray

When this side is gone, Ray waits for half a minute and ends the actor, and the kernel sends SIGTERM to the
coordinator, which saves and stops.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from manyhands.errors import ManyhandsError, UsageError
from manyhands.hosts.key import VARIABLE
from manyhands.hosts.member import die_with
from manyhands.hosts.ray.broker import dial, trouble
from manyhands.hosts.stop_signals import STOP_SIGNALS, on_stop_signals
from manyhands.job import find_job

COMMAND = "manyhands.cli.main"
PROGRAM = "manyhands.hosts.ray.far"
POLL_S = 0.2
MAX_BYTES = 1 << 20
"""Of what was printed, in one message."""
NOT_THEIRS = ("RAY_JOB_ID", "RAY_RAYLET_PID", "PYTHONBREAKPOINT")
"""Variables of an actor that a command beside it does not get: it is a driver of its own."""
HEAD = "node:__internal_head__"
"""A resource that Ray's head node alone has."""


# Here ---------------------------------------------------------------------------------------------


def command_there(
    argv: Sequence[str], *, job: str | None, ship: Path | None, run_dir: object
) -> list[str]:
    """The command line as it is there: paths are of that machine, but for the job, where it is sent. Of a
    flag that is given twice the last one counts. `job`: as it was given, if it was."""
    words = [*argv, "--on", "ray"]
    if ship is None:
        return words
    words += ["--ray-ship", "."]  # from there to the other nodes
    if job is not None:
        found = find_job(job)
        try:
            there = found.path.relative_to(ship.resolve())
        except ValueError:
            raise UsageError(
                f"--ray-ship {ship}: the job {job} is not in that folder. Give one that it is in."
            ) from None
        text = f"{there}:{found.name}" if found.name else str(there)
        words = [text if word == job else word for word in words]
        if run_dir is None:  # Ray removes the folder that was sent
            title = f"{found.title}-{time.strftime('%Y%m%d-%H%M%S')}"
            words += ["--run-dir", f"~/runs/{title}"]
    return words


def run_there(address: str, command: Sequence[str], *, ship: Path | None) -> int:
    """Run a command of ours on the cluster; its exit code."""
    dial(address)
    import ray

    runtime = {"working_dir": str(ship.resolve())} if ship is not None else {}
    told = {
        "command": list(command),
        "folder": os.getcwd(),
        "shipped": ship is not None,
        "variables": {
            name: value
            for name, value in os.environ.items()
            if name.startswith("MANYHANDS_") and name not in (VARIABLE, "MANYHANDS_ON")
        },
    }
    try:
        ray.init(
            address,
            namespace="manyhands",
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env=runtime,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise UsageError(trouble(address, error)) from None
    try:
        return _follow(ray, told)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ManyhandsError(f"The coordinator on {address} is lost: {reason}") from None
    finally:
        ray.shutdown()


def _follow(ray: Any, told: Mapping[str, Any]) -> int:
    heard: list[int] = []
    on_stop_signals(lambda got, _frame: heard.append(got))
    # On the head node: with any other, the coordinator could be lost alone.
    actor = ray.remote(_actor_class()).options(num_cpus=0, resources={HEAD: 0.001}).remote()
    began = ray.get(actor.begin.remote(dict(told)))
    if "refused" in began:
        raise UsageError(began["refused"])
    print(
        f"coordinated on {began['host']}, in {began['folder']}; paths are of that machine",
        flush=True,
    )
    while True:
        while heard:
            ray.get(actor.signal.remote(heard.pop(0)))
        said = ray.get(actor.read.remote())
        for text, stream in ((said["out"], sys.stdout), (said["err"], sys.stderr)):
            stream.write(text)
            stream.flush()
        if said["code"] is not None and not said["out"] and not said["err"]:
            ray.kill(actor)
            return int(said["code"])


def _actor_class() -> type:
    class ManyhandsCoordinator:
        def begin(self, told: dict[str, Any]) -> dict[str, Any]:
            try:
                from manyhands.hosts.ray.far import ActorCommand
            except ImportError as error:
                import platform

                return {
                    "refused": f"Ray's head node, {platform.node()}, can't load manyhands ({error}). "
                    "Install it there and on the other nodes: pip install 'manyhands[ray]'"
                }
            self.command = ActorCommand(told)
            return {"host": self.command.host, "folder": self.command.folder}

        def read(self) -> dict[str, Any]:
            return self.command.read()

        def signal(self, number: int) -> None:
            self.command.signal(number)

    return ManyhandsCoordinator


# There --------------------------------------------------------------------------------------------


class ActorCommand:
    """A command of ours that runs beside an actor."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        import ray

        self.host = os.uname().nodename
        here = Path(told["folder"])
        if told["shipped"]:
            here = Path.cwd()
        elif not here.is_dir():
            here = Path.home()
        self.folder = str(here)
        words = [
            os.path.expanduser(word) if word.startswith("~/") else word for word in told["command"]
        ]
        context = ray.get_runtime_context()
        theirs = {name: value for name, value in os.environ.items() if name not in NOT_THEIRS}
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        # Files, not pipes: it goes on for a while when nobody reads any more.
        self._process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            process_group=0,
            cwd=here,
            env={**theirs, **told["variables"], "RAY_ADDRESS": context.gcs_address},
        )
        self._read_bytes: dict[IO[bytes], int] = {self._out: 0, self._err: 0}

    def read(self) -> dict[str, Any]:
        """What it has printed since, and its exit code when it has ended."""
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(POLL_S)
        return {"out": self._fresh(self._out), "err": self._fresh(self._err), "code": code}

    def _fresh(self, file: IO[bytes]) -> str:
        data = os.pread(file.fileno(), MAX_BYTES, self._read_bytes[file])
        data = data[: data.rfind(b"\n") + 1] or data  # whole lines
        self._read_bytes[file] += len(data)
        return data.decode(errors="replace")

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def main() -> int:
    """Between the actor and the command: Ray kills an actor's children with it, and the command is asked."""
    parent, *words = sys.argv[1:]
    die_with(int(parent))
    # The command gets these, too, being in the same group. Ray has blocked SIGINT in what it starts.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    own = os.getpid()
    process = subprocess.Popen(
        [sys.executable, "-m", COMMAND, *words],
        preexec_fn=lambda: die_with(own, signal.SIGTERM),  # there is no other thread here
    )
    code = process.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
