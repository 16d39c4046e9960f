"""Scratch folders: private, gone after use, and after a kill gone with the next one; nothing else ever is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from manyhands.errors import ManyhandsError
from manyhands.hosts.me import Me
from manyhands.hosts.scratch import LOCK, Scratch, remove_abandoned
from manyhands.hosts.view import Seat, View
from manyhands.runs.folder import RunFolder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


MAKER = """
import sys, time
from pathlib import Path
from manyhands.coordinator.coordinator import Coordinator
from manyhands.hosts.launchers.local import LocalLauncher
from manyhands.hosts.scratch import Scratch
if sys.argv[1:]:
    made = Scratch(sys.argv[1])
    folder = made.path
else:
    made = Coordinator(LocalLauncher(), logs=Path("logs"))
    folder = made._scratch.path
(folder / "view-1").mkdir()
(folder / "view-1" / "socket").touch()
print(folder, flush=True)
time.sleep(60)
"""


def make_elsewhere(temporary: Path, *arguments: str) -> tuple[subprocess.Popen[str], Path]:
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert maker.stdout is not None
    return maker, Path(maker.stdout.readline().strip())


def end(maker: subprocess.Popen[str]) -> None:
    maker.kill()
    maker.communicate(timeout=30)


def test_the_folder_of_a_killed_coordinator_is_deleted_by_the_next_start(temporary: Path) -> None:
    maker, left = make_elsewhere(temporary)
    try:
        remove_abandoned()
        assert (left / "view-1" / "socket").exists(), "its maker lives"
    finally:
        end(maker)
    assert left.is_dir()
    with Scratch() as mine:
        assert [path.name for path in temporary.iterdir()] == [mine.name]
        assert mine.stat().st_mode & 0o777 == 0o700
        (mine / "folder").mkdir()
        (mine / "folder" / "file").touch()
    assert list(temporary.iterdir()) == []


def test_a_shared_folder_is_deleted_by_its_last_process(temporary: Path) -> None:
    first, second = Scratch("run-1"), Scratch("run-1")
    assert first.path == second.path == temporary / "manyhands-run-1"
    first.close()
    assert second.path.is_dir()
    second.close()
    second.close()
    assert list(temporary.iterdir()) == []
    maker, left = make_elsewhere(temporary, "run-1")
    with Scratch("run-1"):
        end(maker)
        assert (left / "view-1").exists(), "the same folder, and somebody is in it"
    assert list(temporary.iterdir()) == []


def test_nothing_else_is_deleted(temporary: Path, tmp_path: Path) -> None:
    """Folders without the file, what symlinks lead to, and files: whoever has them, they are not ours."""
    (temporary / "manyhands-data").mkdir()
    (temporary / "manyhands-data" / "lock").touch()
    (temporary / "manyhands-file").touch()
    (temporary / "other" / "deep").mkdir(parents=True)
    (temporary / "other" / LOCK).touch()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / LOCK).touch()
    (temporary / "manyhands-link").symlink_to(precious)
    (temporary / "manyhands-named").symlink_to(tmp_path / "nowhere")
    (temporary / "manyhands-inner").mkdir()
    (temporary / "manyhands-inner" / LOCK).symlink_to(precious / LOCK)
    before = sorted(temporary.rglob("*"))
    with Scratch():
        pass
    assert sorted(temporary.rglob("*")) == before
    assert (precious / LOCK).exists()
    for name in ("link", "named"):
        with pytest.raises(ManyhandsError, match="belongs to another user"):
            Scratch(name)


def test_a_symlink_in_an_abandoned_folder_is_not_followed(temporary: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    left = temporary / "manyhands-left"
    left.mkdir()
    (left / LOCK).touch()
    (left / "link").symlink_to(precious)
    (left / "view-1").mkdir()
    (left / "view-1" / "link").symlink_to(precious)
    remove_abandoned()
    assert not left.exists()
    assert (precious / "file").exists()


def test_a_lock_of_a_run_names_nothing_that_is_deleted(temporary: Path, tmp_path: Path) -> None:
    """Older versions wrote folders into it, which the next start deleted; anybody can write them."""
    run = RunFolder.create("job", path=tmp_path / "run")
    precious = temporary / "manyhands-precious"
    precious.mkdir()
    (run.path / "run.lock").write_text(f"1\n{precious}\n")
    run.lock()
    run.unlock()
    assert precious.is_dir()


def test_files_of_a_run_are_not_written_through_symlinks(tmp_path: Path) -> None:
    run = RunFolder.create("job", path=tmp_path / "run")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("run.lock", ".config.json.new"):
        (run.path / name).symlink_to(precious)
    with pytest.raises(ManyhandsError, match="can't be written"):
        run.lock()
    with pytest.raises(OSError, match=r"\.config\.json\.new"):
        run.write_config({})
    assert precious.read_text() == "mine"


def test_the_files_of_past_views_are_deleted(tmp_path: Path) -> None:
    seat = Seat("worker-0", "here", device="cpu", device_id="cpu")
    me = Me("worker-0", "here", "cpu", tmp_path, View(1, (seat,)))
    for number in (1, 2, 3):
        me.view = View(number, (seat,))
        folder = me.view_folder(me.view)
        assert me.view_folder(me.view) == folder
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(folder / "bell-worker-1"))  # of a member that died
        sock.close()
    (tmp_path / "control").touch()
    me.view = View(2, (seat,))
    me.forget_views()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "control",
        "tmp",
        "view-2",
        "view-3",
    ]
