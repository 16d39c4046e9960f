"""Downloads from a mirror on loopback: what can go wrong, and several processes at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manyhands.data.download import LOCK_NAME, DownloadTimeouts, RemoteFile, fetch
from manyhands.errors import DataError

A, B = b"first file" * 20_000, b"second file"
DEADLINE_S = 20.0

# What the processes of the tests below run.
SCRIPT = """
import json, sys
from pathlib import Path
from manyhands.data.download import RemoteFile, fetch
from manyhands.errors import DataError
files, folder, url = json.loads(sys.argv[1])
try:
    files = [RemoteFile(*file) for file in files]
    fetch(files, folder=Path(folder), mirrors=[url], title="T", remedy="R")
except DataError as error:
    print(error, flush=True)
    sys.exit(1)
"""


@pytest.fixture
def files(mirror, remote) -> list[RemoteFile]:
    mirror.files = {"a.gz": A, "b.gz": B}
    return [remote("a.gz", A), remote("b.gz", B)]


def get(files, folder, *mirrors, **timeouts) -> None:
    fetch(
        files,
        folder=folder,
        mirrors=[getattr(mirror, "url", mirror) for mirror in mirrors],
        title="Toys",
        remedy="Do this.",
        timeouts=DownloadTimeouts(**timeouts),
    )


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_files_arrive_whole_and_nothing_else_is_left(files, mirror, tmp_path, capfd):
    get(files, tmp_path / "new" / "folder", mirror)
    folder = tmp_path / "new" / "folder"
    assert (folder / "a.gz").read_bytes() == A
    assert (folder / "b.gz").read_bytes() == B
    assert names(folder) == {"a.gz", "b.gz", LOCK_NAME}
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"Downloading {mirror.url}/a.gz (0.2 MB)"
    assert len(lines) == 2


def test_existing_files_are_not_fetched_again(files, mirror, tmp_path):
    (tmp_path / "a.gz").write_bytes(A)
    get(files, tmp_path, mirror)
    get(files, tmp_path, mirror)
    assert mirror.requests == {"b.gz": 1}


def test_the_second_mirror_is_tried_if_the_first_fails(files, mirror, make_mirror, tmp_path):
    other = make_mirror()
    other.files = {"a.gz": A}
    get(files, tmp_path, other, mirror)
    assert other.requests == {"a.gz": 1, "b.gz": 1}
    assert mirror.requests == {"b.gz": 1}


def test_a_file_with_a_wrong_checksum_is_dropped_and_the_next_mirror_tried(
    files, mirror, make_mirror, tmp_path
):
    wrong = make_mirror()
    wrong.files = {"a.gz": A[::-1], "b.gz": B}
    get(files, tmp_path, wrong, mirror)
    assert (tmp_path / "a.gz").read_bytes() == A


def test_a_wrong_checksum_everywhere_names_both_sums_and_the_remedy(
    files, mirror, remote, tmp_path
):
    mirror.files["a.gz"] = A[::-1]
    with pytest.raises(DataError) as caught:
        get(files, tmp_path, mirror)
    message = str(caught.value)
    assert f"{mirror.url}/a.gz: expected SHA-256 {files[0].sha256}" in message
    assert f"got {remote('', A[::-1]).sha256}" in message
    assert message.endswith("Do this.")
    assert names(tmp_path) == {LOCK_NAME}


def test_every_mirror_tried_is_named_with_its_reason(files, mirror, make_mirror, tmp_path):
    mirror.files.clear()
    gone = make_mirror()
    gone.close()
    with pytest.raises(DataError) as caught:
        get(files, tmp_path, mirror, gone)
    message = str(caught.value)
    assert f"{mirror.url}/a.gz: HTTP 404" in message
    assert f"{gone.url}/a.gz: [Errno 111] Connection refused" in message
    assert message.startswith("Toys can't be downloaded.")


def _cut(handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(A)))
    handler.end_headers()
    handler.wfile.write(A[:1000])


def _endless(handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"x" * 100_000)


def _silent(handler) -> None:
    handler.mirror.closing.wait(DEADLINE_S)


def _drip(handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while not handler.mirror.closing.wait(0.02):
        handler.wfile.write(b"x")


def _garbage(handler) -> None:
    handler.wfile.write(b"\x00\xff not http\r\n\r\n")


@pytest.mark.parametrize(
    ("trick", "reason"),
    [
        (_cut, "expected 200,000 bytes, and got 1,000"),
        (_endless, "expected 200,000 bytes, and got more"),
        (_silent, "no answer within 0.3 s"),
        (_drip, "too slow: "),
        (_garbage, "BadStatusLine"),
    ],
)
def test_a_misbehaving_mirror_is_reported_and_skipped(trick, reason, files, mirror, tmp_path):
    mirror.tricks["a.gz"] = trick
    begin = time.monotonic()
    with pytest.raises(DataError, match=reason):
        get(files, tmp_path, mirror, answer_s=0.3, file_s=0.5)
    assert time.monotonic() - begin < 5
    assert names(tmp_path) == {LOCK_NAME}


def test_a_folder_that_cannot_be_created_is_reported(files, mirror, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"Toys can't be stored in .*file/folder.*\nDo this\."):
        get(files, tmp_path / "file" / "folder", mirror)


def launch(start, files, folder: Path, url: str) -> subprocess.Popen[str]:
    argument = json.dumps([[(f.name, f.num_bytes, f.sha256) for f in files], str(folder), url])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return start(sys.executable, "-c", SCRIPT, argument, **pipes)


def wait_for_line(process: subprocess.Popen[str], start: str) -> None:
    """Read stderr up to the line; the process's end, at its deadline if need be, ends the wait."""
    for line in process.stderr:
        if line.startswith(start):
            return
    pytest.fail(f"the process ended without saying {start!r}")


def race(start, files, mirror, folder: Path) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Two processes: the first is in the middle of its download, the second waits for it."""
    mirror.gate.clear()
    first = launch(start, files, folder, mirror.url)
    wait_for_line(first, "Downloading")
    second = launch(start, files, folder, mirror.url)
    wait_for_line(second, "Waiting for another process that downloads T")
    return first, second


def test_two_processes_at_once_fetch_each_file_once(start, files, mirror, tmp_path):
    first, second = race(start, files, mirror, tmp_path)
    mirror.gate.set()
    assert first.wait(DEADLINE_S) == 0
    assert second.wait(DEADLINE_S) == 0
    assert mirror.requests == {"a.gz": 1, "b.gz": 1}
    assert (tmp_path / "a.gz").read_bytes() == A
    assert names(tmp_path) == {"a.gz", "b.gz", LOCK_NAME}


def test_a_waiting_process_takes_over_from_a_killed_one(start, files, mirror, tmp_path):
    first, second = race(start, files, mirror, tmp_path)
    first.send_signal(signal.SIGKILL)
    assert first.wait(DEADLINE_S) == -signal.SIGKILL
    mirror.gate.set()
    assert second.wait(DEADLINE_S) == 0
    assert (tmp_path / "a.gz").read_bytes() == A
    assert names(tmp_path) == {"a.gz", "b.gz", LOCK_NAME}


def test_a_waiting_process_reports_the_failure_and_a_later_call_retries(
    start, files, mirror, tmp_path
):
    mirror.files.clear()
    first, second = race(start, files, mirror, tmp_path)
    mirror.gate.set()
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in (first, second)]
    assert outputs[0] == outputs[1]
    assert f"{mirror.url}/a.gz: HTTP 404" in outputs[1]
    assert mirror.requests == {"a.gz": 1}
    mirror.files = {"a.gz": A, "b.gz": B}
    get(files, tmp_path, mirror)
    assert (tmp_path / "a.gz").read_bytes() == A


def test_waiting_for_another_process_times_out(start, files, mirror, tmp_path):
    mirror.gate.clear()
    first = launch(start, files, tmp_path, mirror.url)
    wait_for_line(first, "Downloading")
    with pytest.raises(DataError, match=r"Waited 0\.2 s for another process.*fuser -v"):
        get(files, tmp_path, mirror, lock_s=0.2)


def test_a_terminal_shows_a_bar_per_file(start, files, mirror, tmp_path):
    ours, theirs = os.openpty()
    argument = json.dumps(
        [[(f.name, f.num_bytes, f.sha256) for f in files], str(tmp_path), mirror.url]
    )
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = start(sys.executable, "-c", SCRIPT, argument, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        # A closed terminal reads as an error on Linux: the end of what the process showed.
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:
        pass
    finally:
        os.close(ours)
    assert process.wait(DEADLINE_S) == 0
    assert b"a.gz" in shown
    assert b"b.gz" in shown
    assert b"200.0/200.0 kB" in shown
    assert b"Downloading" not in shown
