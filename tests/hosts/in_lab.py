"""One command on every host of a lab, started by hand: each host has a process, its output a file."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from together import KEY, LONG_S, manyhands, step_reached, until

from manyhands.events.jsonl import read_events
from manyhands.testing.harness import Finished
from manyhands.testing.lab import Lab, LabHost


class Cast:
    """The command's processes; the one on host-0 is the coordinator."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        command: Sequence[str],
        run: Path,
        *,
        environ: Mapping[str, str] | None = None,
        hosts: Sequence[LabHost] | None = None,
    ) -> None:
        """`environ`: other variables than a host should have. `hosts`: where it starts at once, if not on
        all."""
        self.run = run
        self._environ = environ or {}
        self._lab = lab
        self._folder = folder
        self._command = manyhands(*command)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for host in lab.hosts if hosts is None else hosts:
            self.start(host)

    def start(self, host: LabHost) -> None:
        """Once more, if it has been started before."""
        environ = {
            "RANK": str(host.index),
            "WORLD_SIZE": str(len(self._lab.hosts)),
            "MASTER_ADDR": self._lab.hosts[0].name,
            "MASTER_PORT": "29500",
            "MANYHANDS_KEY": KEY,
            "NO_COLOR": "1",
            **self._environ,
        }
        with open(self._folder / host.name, "ab") as out:
            self._processes[host.name] = host.start(
                self._command, env=environ, stdout=out, stderr=subprocess.STDOUT
            )

    def kill(self, host: LabHost) -> None:
        """All that runs there, as a power cut would."""
        host.kill_all()
        del self._processes[host.name]

    def out(self, name: str) -> str:
        return (self._folder / name).read_text()

    def saw(self, kind: str, **wanted: object) -> bool:
        path = self.run / "events.jsonl"
        events = read_events(path) if path.exists() else []
        return any(
            e["event"] == kind and all(e[name] == value for name, value in wanted.items())
            for e in events
        )

    def wait_for(self, kind: str, **wanted: object) -> None:
        until(lambda: self._check() or self.saw(kind, **wanted), 2 * LONG_S)

    def wait_for_step(self, step: int) -> None:
        until(lambda: self._check() or step_reached(self.run, step), 3 * LONG_S)

    def ended(self, name: str) -> bool:
        return self._processes[name].poll() is not None

    def codes(self) -> dict[str, int]:
        """When all have ended."""
        return {name: one.wait(4 * LONG_S) for name, one in self._processes.items()}

    def finish(self) -> Finished:
        """When all that were not killed have ended, each with code 0."""
        codes = self.codes()
        out = self.out("host-0")
        assert not any(codes.values()), f"{codes}\n{out}"
        return Finished(0, out, out, 0.0, self.run)

    def _check(self) -> None:
        """The coordinator is there, as long as something is waited for."""
        assert self._processes["host-0"].poll() is None, self.out("host-0")
