"""The Ray broker and the coordinator's client of it: each gets anything from the other, over its pipes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from generator import Variant
from variants import ANSWER_S, Dialect, answered, as_line, sample, variants, watching

from manyhands.errors import ManyhandsError
from manyhands.hosts.ray import broker_client
from manyhands.hosts.ray.broker_client import BrokerClient
from manyhands.hosts.ray.messages import FROM_BROKER, TO_BROKER, ConnectRay, RayConnected
from manyhands.transport.fields import encode

HERE = Path(__file__).parent
TO = Dialect.of("coordinator to broker", TO_BROKER)
FROM = Dialect.of("broker to coordinator", FROM_BROKER)
VOCABULARY: dict[str, Any] = {
    "address": ("local",),
    "rank": (1, 2),
    "num_together": (0, 1),
    "role": ("worker",),
    "placement": ("spread",),
    "cpus": (1,),
}
NO_MESSAGES = ("", "nonsense", "[]", "[" * 9999, '{"kind": "nonsense"}')
AT_ONCE = 4


class BrokerProcess:
    """A real broker of a cluster that is a stub."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(HERE / "stub_ray"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", broker_client.PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(encode(ConnectRay("local", 1)) + "\n")
        self._process.stdin.flush()

    def check(self, line: str) -> None:
        """After a line that is no message, it releases everything and ends, without a crash."""
        process = self._process
        try:
            assert process.stdout is not None
            assert '"RayConnected"' in process.stdout.readline()
            with answered(line[:300]):
                _, errors = process.communicate(f"{line}\nnonsense\n", timeout=2 * ANSWER_S)
            assert "Traceback" not in errors, f"{errors} after {line[:300]}"
        finally:
            process.kill()
            process.communicate()


def attack_broker(lines: list[str]) -> None:
    with watching():
        for start in range(0, len(lines), AT_ONCE):
            batch = [(BrokerProcess(), line) for line in lines[start : start + AT_ONCE]]
            for process, line in batch:
                process.check(line)


def test_a_coordinator_sends_anything_to_its_broker() -> None:
    these = sample(variants(TO, vocabulary=VOCABULARY), each=1)
    attack_broker([*map(as_line, these), *NO_MESSAGES[1:3]])


@pytest.mark.long
def test_a_coordinator_sends_everything_to_its_broker() -> None:
    these = sample(variants(TO, vocabulary=VOCABULARY, examples=30), each=20)
    attack_broker([*map(as_line, these), *NO_MESSAGES])


def attack_client(lines: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of a broker before and after it has connected."""
    monkeypatch.setattr(broker_client, "PROGRAM", "broker_program")
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    monkeypatch.setenv("FUZZ_LINES", str(folder / "lines"))
    connected = encode(RayConnected("a:1", "b", True, False, ()))
    with watching() as watched:
        for number, line in enumerate(lines):
            first = [connected] if number % 3 else []
            (folder / "lines").write_text("\n".join([*first, line, "nonsense", ""]))
            heard: list[Any] = []
            with answered(line[:300]):
                try:
                    client = BrokerClient("local", cpus=1)
                except ManyhandsError:
                    continue
                client.listen(heard.append)
                deadline = time.monotonic() + ANSWER_S
                while None not in heard:
                    assert time.monotonic() < deadline, f"not given up after {line[:300]}"
                    time.sleep(0.005)
                client.close()
            watched.check(line[:300])


def lines_of(these: list[Variant]) -> list[str]:
    return [*map(as_line, these), *NO_MESSAGES]


def test_a_broker_sends_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attack_client(lines_of(sample(variants(FROM), each=2)), tmp_path, monkeypatch)


@pytest.mark.long
def test_a_broker_sends_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attack_client(lines_of(sample(variants(FROM, examples=40), each=30)), tmp_path, monkeypatch)
