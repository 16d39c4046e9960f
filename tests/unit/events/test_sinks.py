from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from manyhands.errors import RecordError
from manyhands.events import JsonlSink, Queued, Sink, Stream, read_events
from manyhands.events.events import Event, Noticed


class Recorder(Sink):
    """Keeps what it gets; can be told to raise, to be slow, to wait at a gate."""

    def __init__(self, *, fail_at: int | None = None, fail_closing: bool = False) -> None:
        self.messages: list[str] = []
        self.fail_at = fail_at
        self.fail_closing = fail_closing
        self.num_closed = 0
        self.gate = threading.Event()
        self.gate.set()

    def handle(self, event: Event) -> None:
        assert isinstance(event, Noticed)
        assert self.gate.wait(10)
        if len(self.messages) == self.fail_at:
            raise RuntimeError("the lamp is broken")
        self.messages.append(event.message)

    def close(self) -> None:
        self.num_closed += 1
        if self.fail_closing:
            raise RuntimeError("the door is stuck")


def notes(number: int) -> list[Noticed]:
    return [Noticed(message=str(index)) for index in range(number)]


def test_a_failing_sink_is_reported_once_and_the_others_get_everything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, broken, last = Recorder(), Recorder(fail_at=2), Recorder()
    stream = Stream([first, broken, last])
    with caplog.at_level(logging.WARNING, logger="manyhands.events"):
        for event in notes(5):
            stream.emit(event)
        stream.close()
    assert first.messages == last.messages == ["0", "1", "2", "3", "4"]
    assert broken.messages == ["0", "1"]
    assert [sink.num_closed for sink in (first, broken, last)] == [1, 1, 1]
    (report,) = caplog.messages
    assert "Recorder" in report
    assert "the lamp is broken" in report


def test_an_essential_sink_that_fails_ends_the_run() -> None:
    stream = Stream([JsonlSink("/dev/full")])
    with pytest.raises(RecordError, match="No space left"):
        stream.emit(Noticed(message="x"))
    stream.close()


def test_close_closes_all_even_if_one_raises(caplog: pytest.LogCaptureFixture) -> None:
    sinks = [Recorder(), Recorder(fail_closing=True), Recorder()]
    stream = Stream(sinks)
    stream.close()
    stream.close()
    assert [sink.num_closed for sink in sinks] == [1, 1, 1]
    assert "the door is stuck" in caplog.text


def test_queued_passes_everything_in_order_and_closes_in_its_thread() -> None:
    recorder = Recorder()
    queued = Queued(recorder)
    for event in notes(500):
        queued.handle(event)
    queued.close()
    assert recorder.messages == [str(index) for index in range(500)]
    assert recorder.num_closed == 1
    assert queued.dropped == 0


def test_queued_drops_and_counts_and_never_blocks(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    recorder.gate.clear()
    queued = Queued(recorder, limit=10)
    began = time.monotonic()
    for event in notes(1_000):
        queued.handle(event)
    # The sink is stuck for good: had one call waited for it, this would never end.
    assert time.monotonic() - began < 5
    # Ten wait, and one may be in the sink's hands.
    assert queued.dropped in (989, 990)
    recorder.gate.set()
    queued.close()
    assert len(recorder.messages) + queued.dropped == 1_000
    assert recorder.messages == [str(index) for index in range(len(recorder.messages))]
    assert f"{queued.dropped} events dropped" in caplog.text


def test_queued_close_gives_up_on_a_stuck_sink_in_time() -> None:
    recorder = Recorder()
    queued = Queued(recorder)
    recorder.gate.clear()
    for event in notes(5):
        queued.handle(event)
    began = time.monotonic()
    queued.close(timeout_s=0.2)
    assert 0.1 < time.monotonic() - began < 5
    assert queued.dropped >= 4
    queued.handle(Noticed(message="late"))
    recorder.gate.set()
    queued.close()
    assert "late" not in recorder.messages
    assert recorder.num_closed == 1


def test_a_failure_behind_the_queue_reaches_the_stream_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, healthy = Recorder(fail_at=1), Recorder()
    stream = Stream([Queued(broken), healthy])
    deadline = time.monotonic() + 10
    sent = 0
    while len(stream.sinks) == 2 and time.monotonic() < deadline:
        stream.emit(Noticed(message=str(sent)))
        sent += 1
        time.sleep(0.005)
    stream.emit(Noticed(message="after"))
    stream.close()
    assert broken.messages == ["0"]
    assert broken.num_closed == 1
    assert len(healthy.messages) == sent + 1
    (report,) = [message for message in caplog.messages if "the lamp is broken" in message]
    assert "Recorder" in report


def test_a_failure_of_the_last_event_is_raised_at_close() -> None:
    queued = Queued(Recorder(fail_at=0))
    queued.handle(Noticed(message="x"))
    with pytest.raises(RuntimeError, match="the lamp is broken"):
        queued.close()


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, and is 0"):
        Queued(Recorder(), limit=0)


def test_stream_order_is_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    stream = Stream([JsonlSink(path)])
    for event in notes(20):
        stream.emit(event)
    # Nothing waits in a buffer: the file is whole before it is closed.
    assert [record["message"] for record in read_events(path)] == [str(n) for n in range(20)]
    stream.close()
