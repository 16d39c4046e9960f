from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

import pytest

from manyhands.events import Console, make_console
from manyhands.events import events as ev
from manyhands.events.console import PlainConsole

FAILED = ev.MemberFailed(
    member="worker-1",
    reason="ValueError: the loss is [red]not[/red] finite",
    traceback='Traceback (most recent call last):\n  File "job.py", line 3\nValueError: \x1b[31mno',
    log="runs/a b/logs/worker-1.log",
)
RESUME = "manyhands resume 'runs/a b'"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def plain(clock: Clock) -> PlainConsole:
    return PlainConsole(io.StringIO(), io.StringIO(), every_s=5, clock=clock)


def written(stream: TextIO) -> str:
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def test_plain_shows_a_whole_run(
    plain: PlainConsole,
    start: list[ev.Event],
    step: Callable[..., ev.StepCommitted],
    evaluated: ev.Evaluated,
    finish: Callable[..., ev.RunFinished],
) -> None:
    note = ev.Noticed(message="worker-1 is slow")
    for event in [*start, step(1, loss=0.7654), evaluated, note, finish()]:
        plain.handle(event)
    said = written(plain.out)
    for fact in [
        "manyhands 0.1.0 (python 3.11.9, torch 2.11.0)",
        "allreduce, 2 workers",
        "1.2 M parameters",
        "320 samples for training, 64 for evaluation",
        "2 epochs, 20 steps of 32 samples",
        "2 x cuda (NVIDIA H200), gloo on lo",
        "epoch 1/2  step 1/20  5%  loss 0.7654  1,600 samples/s",
        "step 10  eval loss 0.4321  accuracy 0.8765  best\n",
        "note: worker-1 is slow\n",
        "finished in 1 m 12 s\n",
        "20 (2 epochs, 640 samples)",
        "3,412 samples/s",
        "12.3 MB",
        "loss 0.1234  accuracy 0.9753",
        "loss 0.1111  accuracy 0.9797  (step 10)",
        "runs/a b/checkpoints/step-20",
        "tensorboard --logdir 'runs/a b/tb'",
    ]:
        assert fact in said
    assert "go on with" not in said
    assert "\x1b" not in said
    assert written(plain.err) == ""


def test_plain_progress_comes_every_few_seconds(
    plain: PlainConsole, clock: Clock, start: list[ev.Event], step: Callable[..., ev.StepCommitted]
) -> None:
    for event in start:
        plain.handle(event)
    for number in range(1, 21):
        clock.now += 1
        plain.handle(step(number))
        plain.tick()
    clock.now += 100
    plain.tick()
    plain.tick()
    said = re.findall(r"step (\d+)/20", written(plain.out))
    # Every five seconds, and no line says again what the last one said.
    assert said == ["1", "6", "11", "16", "20"]


def test_plain_shows_a_slow_start(plain: PlainConsole, clock: Clock, start: list[ev.Event]) -> None:
    plain.handle(start[0])
    plain.handle(start[1])
    plain.tick()
    assert "starting" not in written(plain.out)
    clock.now += 6
    plain.tick()
    plain.tick()
    assert written(plain.out).count("starting 2 workers ... 1 of 2 ready  6.0 s\n") == 1


def test_waiting_for_hosts_is_shown(
    plain: PlainConsole, clock: Clock, start: list[ev.Event]
) -> None:
    plain.handle(start[0])
    clock.now += 6
    plain.tick()
    assert written(plain.out).endswith("waiting for hosts for 2 workers ...  6.0 s\n")
    plain.handle(ev.MemberStarted(member="worker-0", host="host-1", pid=1, log="x"))
    clock.now += 6
    plain.tick()
    assert written(plain.out).endswith("starting 2 workers ... 0 of 2 ready  12 s\n")


def test_a_failure_names_the_first_member_its_traceback_and_its_log(
    plain: PlainConsole, start: list[ev.Event], finish: Callable[..., ev.RunFinished]
) -> None:
    later = ev.MemberFailed(member="worker-0", reason="lost its peer", traceback="", log="x")
    for event in [*start, FAILED, later, finish("failed", RESUME)]:
        plain.handle(event)
    assert written(plain.err) == (
        "error: worker-1 failed: ValueError: the loss is [red]not[/red] finite\n"
        "    Traceback (most recent call last):\n"
        '      File "job.py", line 3\n'
        "    ValueError: no\n"
        "  log: runs/a b/logs/worker-1.log (full traceback)\n"
    )
    assert "failed after 1 m 12 s\n" in written(plain.out)
    assert written(plain.out).endswith(f"continue with:  {RESUME}\n")


def test_a_failure_without_a_member_shows_the_error(plain: PlainConsole) -> None:
    end = ev.RunFinished(
        outcome="failed", summary={"error": "no worker could start"}, resume_command=None
    )
    plain.handle(end)
    assert written(plain.err) == "error: no worker could start\n"
    assert "failed\n" in written(plain.out)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("Ctrl-C", "stopping: Ctrl-C; saving a checkpoint (press again to stop at once)\n"),
        ("no better accuracy in 3 evaluations", "stopping: no better accuracy in 3 evaluations\n"),
    ],
)
def test_stopping_shows_the_reason(plain: PlainConsole, reason: str, expected: str) -> None:
    plain.handle(ev.Stopping(reason=reason))
    assert written(plain.out) == expected


def test_quiet_shows_only_the_failure_and_one_line(
    start: list[ev.Event],
    step: Callable[..., ev.StepCommitted],
    finish: Callable[..., ev.RunFinished],
) -> None:
    out, err = io.StringIO(), io.StringIO()
    console = make_console(out, err, quiet=True)
    for event in [*start, step(1), ev.Noticed(message="x"), FAILED, finish("failed", RESUME)]:
        console.handle(event)
        console.tick()
    assert "worker-1 failed" in err.getvalue()
    assert out.getvalue() == (
        "failed after 1 m 12 s; 20 steps; loss 0.1234  accuracy 0.9753; runs/a b; "
        f"continue with:  {RESUME}\n"
    )


def test_an_ascii_stream_gets_every_word() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    make_console(out, io.StringIO()).handle(ev.Noticed(message="Größe"))
    assert raw.getvalue() == b"note: Gr\\xf6\\xdfe\n"


TALK_TO_NO_ONE = """
import os, sys
from manyhands.events import Stream, make_console
from manyhands.events.events import Noticed
sys.stdin.readline()
stream = Stream([make_console()])
stream.emit(Noticed(message="x"))
print(len(stream.sinks), "sinks left", file=sys.stderr, flush=True)
os._exit(0)
"""


def test_a_closed_pipe_does_not_end_the_run() -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", TALK_TO_NO_ONE]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            assert child.stdout is not None
            child.stdout.close()
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.close()
            assert child.wait(30) == 0
            assert child.stderr is not None
            said = child.stderr.read()
        finally:
            child.kill()
    assert said.strip() == "0 sinks left", "nothing to complain of: whoever read has had enough"


class Terminal:
    """A real pseudo-terminal of 100 columns; `read` gives what was written to it so far."""

    def __init__(self, master: int, stream: TextIO) -> None:
        os.set_blocking(master, False)
        self.master = master
        self.stream = stream

    def read(self) -> str:
        self.stream.flush()
        chunks = b""
        while True:
            try:
                chunks += os.read(self.master, 65_536)
            except BlockingIOError:
                return chunks.decode().replace("\r\n", "\n")

    def console(self) -> Console:
        return make_console(self.stream, self.stream)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    master, slave = os.openpty()
    with open(slave, "w", encoding="utf-8") as stream:
        yield Terminal(master, stream)
    os.close(master)


def screen(output: str) -> list[str]:
    """What a person sees: each line from where it was last erased, without colours."""
    lines = [line.rsplit("\r\x1b[2K", 1)[-1] for line in output.split("\n")]
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]


def test_a_terminal_has_one_live_line_below_the_lines_that_stay(
    terminal: Terminal,
    start: list[ev.Event],
    step: Callable[..., ev.StepCommitted],
    evaluated: ev.Evaluated,
    finish: Callable[..., ev.RunFinished],
) -> None:
    clock = Clock()
    console = terminal.console()
    console.clock, console.started_at = clock, clock.now
    seen = ""
    for event in start[:2]:
        clock.now += 1
        console.handle(event)
    seen += terminal.read()
    assert screen(seen)[-1][2:] == "starting 2 workers ... 1 of 2 ready  2.0 s"
    for event in [*start[2:], step(10, loss=0.7654), evaluated]:
        clock.now += 1
        console.handle(event)
    seen += terminal.read()
    live = screen(seen)[-1]
    assert "epoch 1/2 ━" in live
    assert "10/20  loss 0.7654  1,600 samples/s" in live
    assert len(live) < 100
    assert screen(seen)[-2] == "epoch 1/2  step 10  eval loss 0.4321  accuracy 0.8765  best"
    console.handle(FAILED)
    console.handle(finish("failed", RESUME))
    console.tick()
    console.close()
    seen += terminal.read()
    lines = screen(seen)
    assert not [line for line in lines if "━" in line or "starting" in line]
    assert "error: worker-1 failed: ValueError: the loss is [red]not[/red] finite" in lines
    assert '      File "job.py", line 3' in lines
    assert lines[-2:] == [f"continue with:  {RESUME}", ""]
    assert "\x1b[1;31m" in seen


def test_the_live_line_is_drawn_at_most_ten_times_a_second(
    terminal: Terminal, start: list[ev.Event], step: Callable[..., ev.StepCommitted]
) -> None:
    clock = Clock()
    console = terminal.console()
    console.clock = clock
    for event in start:
        console.handle(event)
    terminal.read()
    num_drawn = 0
    for number in range(1_000):  # two seconds
        clock.now += 0.002
        console.handle(step(number % 20 + 1))
        num_drawn += terminal.read().count("\x1b[2K")
    assert 15 <= num_drawn <= 20
    console.close()


@pytest.mark.parametrize("columns", ["20", "60", "200"])
def test_the_live_line_fits_its_terminal(
    terminal: Terminal,
    columns: str,
    monkeypatch: pytest.MonkeyPatch,
    start: list[ev.Event],
    step: Callable[..., ev.StepCommitted],
    evaluated: ev.Evaluated,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    console = terminal.console()
    for event in [*start, step(10), evaluated]:
        console.handle(event)
    live = screen(terminal.read())[-1]
    assert 15 < len(live) < int(columns)
    assert ("eval loss" in live) == (columns == "200")
    console.close()


def test_no_color_leaves_nothing_but_the_live_line(
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
    start: list[ev.Event],
    step: Callable[..., ev.StepCommitted],
    finish: Callable[..., ev.RunFinished],
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = terminal.console()
    for event in [*start, step(10), FAILED, finish()]:
        console.handle(event)
    seen = terminal.read()
    assert "\r\x1b[2K" in seen
    assert "\x1b" not in seen.replace("\r\x1b[2K", "")


def test_a_dumb_terminal_gets_plain_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, start: list[ev.Event]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = terminal.console()
    assert isinstance(console, PlainConsole)
    for event in start:
        console.handle(event)
    assert "\x1b" not in terminal.read()


def test_a_death_is_two_lines_and_a_replacement_one(
    plain: PlainConsole, start: list[ev.Event]
) -> None:
    for event in start:
        plain.handle(event)
    before = len(written(plain.out))
    for event in [
        ev.Injected(fault="kill", member="worker-1"),
        ev.MemberLost(member="worker-1", reason="killed by SIGKILL", view=1, workers=1),
        ev.ViewChanged(view=2, members=("worker-0",), transport="gloo on lo"),
        ev.Recovered(view=2, seconds=0.25, redone_steps=0),
        ev.ViewChanged(
            view=3, members=("worker-0", "worker-2"), transport="gloo on lo", placement="on both"
        ),
    ]:
        plain.handle(event)
    assert written(plain.out)[before:].splitlines() == [
        "chaos: kill worker-1",
        "worker-1 was lost (killed by SIGKILL); continuing with 1 worker",
        "recovered in 0.25 s",
        "continuing with 2 workers: worker-0, worker-2; gloo on lo",
        "  weights     on both",
    ]
