"""Every thread has a handler for its failure."""

from __future__ import annotations

import ast
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import manyhands
from manyhands import threads
from manyhands.errors import LinkError
from manyhands.events.events import Event, Noticed
from manyhands.events.sinks import Queued, Sink, Stream
from manyhands.threads import describe, fail_process, on_process_failure, start_thread, start_timer
from manyhands.transport import Link, Listener, connect

LONG_S = 30.0
HOME = Path(manyhands.__file__).parent
STARTS = {"Thread", "Timer", "_start_new_thread", "start_new_thread", "start_joinable_thread"}


@pytest.fixture
def heard() -> queue.SimpleQueue[BaseException]:
    return queue.SimpleQueue()


@pytest.fixture
def process_failures(heard: queue.SimpleQueue[BaseException]) -> Iterator[None]:
    before = threads._on_process_failure
    on_process_failure(heard.put)
    yield
    on_process_failure(before)


@pytest.mark.parametrize("kind", [ValueError, MemoryError, SystemExit, KeyboardInterrupt])
def test_an_exception_in_a_thread_reaches_its_owner(
    heard: queue.SimpleQueue[BaseException], kind: type[BaseException]
) -> None:
    def fail(what: str) -> None:
        raise kind(what)

    start_thread(fail, "no", name="fails", on_error=heard.put).join(LONG_S)
    assert repr(heard.get_nowait()) == repr(kind("no"))
    start_timer(0.0, fail, "late", name="fails", on_error=heard.put).join(LONG_S)
    assert repr(heard.get_nowait()) == repr(kind("late"))


@pytest.mark.usefixtures("process_failures")
def test_a_failing_error_handler_fails_the_process(
    heard: queue.SimpleQueue[BaseException],
) -> None:
    def fail() -> None:
        raise ValueError("first")

    def fail_again(error: BaseException) -> None:
        raise RuntimeError("second")

    start_thread(fail, name="fails", on_error=fail_again).join(LONG_S)
    second = heard.get_nowait()
    assert str(second) == "second"
    assert str(second.__cause__) == "first"
    start_thread(fail, name="fails", on_error=fail_process).join(LONG_S)
    assert str(heard.get_nowait()) == "first"


def test_an_error_is_described_with_its_location() -> None:
    with pytest.raises(KeyError) as caught:
        raise KeyError("text")
    assert describe(caught.value).startswith("KeyError: 'text' (")
    assert "test_threads.py:" in describe(caught.value)
    assert describe(ValueError("x")) == "ValueError: x"


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_a_sink_that_fails_in_its_thread_fails_for_the_stream(
    caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    failed = threading.Event()

    class Bad(Sink):
        def handle(self, event: Event) -> None:
            raise kind("broken")

        def close(self) -> None:
            failed.set()

    stream = Stream([Queued(Bad())])
    stream.emit(Noticed(message="one"))
    assert failed.wait(LONG_S)
    stream.emit(Noticed(message="two"))
    assert not stream.sinks
    assert "gets no more events" in caplog.text


def test_waiting_for_a_failed_listener_raises(
    tmp_path: Path, heard: queue.SimpleQueue[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(who: str, why: object) -> None:
        raise ZeroDivisionError

    with Listener("tcp://127.0.0.1:0", secret="s" * 32, on_refused=refuse) as listener:
        listener.hand_over(lambda link: None, name="take", on_error=heard.put)
        with pytest.raises(LinkError):
            connect(listener.address, secret="other" * 8, name="x", timeout_s=1.0)
        failure = heard.get(timeout=LONG_S)
    assert isinstance(failure, LinkError)
    assert "failed: ZeroDivisionError" in str(failure)


def test_a_connection_whose_thread_failed_is_closed(
    tmp_path: Path, heard: queue.SimpleQueue[BaseException]
) -> None:
    def take(link: Link) -> None:
        raise MemoryError

    with Listener(f"unix:{tmp_path}/s") as listener:
        listener.hand_over(take, name="take", on_error=heard.put)
        with connect(listener.address, timeout_s=LONG_S) as link, pytest.raises(LinkError):
            link.recv(timeout_s=LONG_S)
    assert isinstance(heard.get(timeout=LONG_S), MemoryError)


def starts_of_threads(tree: ast.AST) -> Iterator[str]:
    """Find code that starts a thread without a guard, or drops its exception."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(alias.name == "_thread" for alias in names):
                yield f"line {node.lineno}: imports _thread"
            case ast.ImportFrom(module="_thread"):
                yield f"line {node.lineno}: imports from _thread"
            case ast.ImportFrom(module="threading", names=names):
                if STARTS & {alias.name for alias in names}:
                    yield f"line {node.lineno}: imports a thread's class"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="threading"), attr=attr)):
                if attr in STARTS:
                    yield f"line {node.lineno}: threading.{attr}()"
            case ast.ClassDef(bases=bases):
                for base in bases:
                    if isinstance(base, ast.Attribute) and base.attr in STARTS:
                        yield f"line {node.lineno}: {node.name} is a thread"
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="submit"))):
                yield f"line {node.lineno}: nobody looks at the future"
            case ast.keyword(arg="on_error", value=ast.Lambda(body=ast.Constant())):
                yield f"line {node.value.lineno}: on_error drops the error"


def test_threads_are_started_with_a_guard() -> None:
    wrong = [
        f"{path.relative_to(HOME)} {what}"
        for path in sorted(HOME.rglob("*.py"))
        if path != HOME / "threads.py"
        for what in starts_of_threads(ast.parse(path.read_text()))
    ]
    assert not wrong, "start threads with manyhands.threads.start_thread"


@pytest.mark.parametrize(
    "code",
    [
        "threading.Thread(target=f).start()",
        "t = threading.Timer(1, f)",
        "from threading import Thread",
        "import _thread",
        "class Mine(threading.Thread): pass",
        "pool.submit(f)",
        "start_thread(f, name='x', on_error=lambda error: None)",
    ],
)
def test_the_rule_finds_violations(code: str) -> None:
    assert list(starts_of_threads(ast.parse(code)))
