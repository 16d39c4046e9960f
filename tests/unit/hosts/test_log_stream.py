"""What members print arrives in order, and never holds them up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.hosts.log_stream import BUFFER_BYTES, CHUNK_BYTES, LogFiles, LogStream
from manyhands.threads import fail_process

LONG_S = 20.0


class Far:
    """The other end, which can be told to stall."""

    def __init__(self) -> None:
        self.got: dict[str, bytes] = {}
        self.sizes: list[int] = []
        self.stalled = threading.Event()
        self.open = threading.Event()
        self.open.set()

    def __call__(self, name: str, data: bytes) -> None:
        if not self.open.is_set():
            self.stalled.set()
            self.open.wait(LONG_S)
        self.got[name] = self.got.get(name, b"") + data
        self.sizes.append(len(data))


@pytest.fixture
def far() -> Far:
    return Far()


@pytest.fixture
def stream(far: Far) -> Iterator[LogStream]:
    made = LogStream(far, on_error=fail_process)
    yield made
    made.close()


def test_two_members_arrive_whole_and_in_order(stream: LogStream, far: Far) -> None:
    texts = {f"worker-{n}": b"".join(b"%d %d\n" % (n, i) for i in range(20_000)) for n in (0, 1)}
    readers = []
    for name, text in texts.items():
        reading, writing = os.pipe()
        readers.append(stream.follow(name, os.fdopen(reading, "rb", buffering=0)))

        def write(writing: int = writing, text: bytes = text) -> None:
            with os.fdopen(writing, "wb") as file:
                file.write(text)

        threading.Thread(target=write).start()
    for reader in readers:
        reader.join(LONG_S)
    assert stream.flush(LONG_S)
    assert far.got == texts
    assert max(far.sizes) <= CHUNK_BYTES


def test_output_beyond_the_buffer_is_dropped_and_counted(stream: LogStream, far: Far) -> None:
    far.open.clear()
    stream.add("worker-0", b"first\n")
    assert far.stalled.wait(LONG_S)
    line = b"x" * 999 + b"\n"
    for _ in range(2 * BUFFER_BYTES // len(line)):
        stream.add("worker-0", line)
    assert not stream.flush(0)
    far.open.set()
    assert stream.flush(LONG_S)
    stream.add("worker-0", b"last\n")
    assert stream.flush(LONG_S)
    got = far.got["worker-0"]
    kept = got.count(line)
    assert kept == BUFFER_BYTES // len(line)
    left_out = (2 * BUFFER_BYTES // len(line) - kept) * len(line)
    assert got.endswith(f"[{left_out:,} bytes were left out: the link is slow]\nlast\n".encode())


def test_flush_does_not_wait_after_close(stream: LogStream, far: Far) -> None:
    far.open.clear()
    stream.add("worker-0", b"a")
    stream.add("worker-0", b"b")
    stream.close()
    assert stream.flush(LONG_S)
    far.open.set()


def test_a_full_disk_is_reported_once_and_the_loss_is_in_the_log(tmp_path: Path) -> None:
    told: list[str] = []
    files = LogFiles(tmp_path, told.append)
    log = tmp_path / "worker-0.log"
    files.add("worker-0", b"")
    assert log.read_bytes() == b""
    log.unlink()
    log.symlink_to("/dev/full")  # as a disk or a quota that is used up
    (tmp_path / "worker-1.log").mkdir()  # can't be opened at all, as with too many open files
    for name in ("worker-0", "worker-1", "worker-0"):
        files.add(name, memoryview(b"12345"))
    assert len(told) == 1
    assert "the log of worker-0 can't be written" in told[0]
    log.unlink()
    files.add("worker-0", b"there is room\n")
    assert log.read_text() == "\n[10 bytes were left out: the disk]\nthere is room\n"


def test_a_partial_write_is_counted(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from manyhands.hosts.log_stream import LogFiles
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
files = LogFiles(Path(sys.argv[1]), print)
files.add("w", b"123456789012345")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
files.add("w", b"end")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=LONG_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("can't be written") == 1
    assert (tmp_path / "w.log").read_text() == "1234567890\n[5 bytes were left out: the disk]\nend"
