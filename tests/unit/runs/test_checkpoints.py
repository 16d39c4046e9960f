"""Checkpoints: one counts when it is whole, and nothing that goes wrong takes the one before."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import CheckpointError
from manyhands.runs import checkpoints
from manyhands.runs.checkpoints import MANIFEST, facts_of, final, newest, partial, steps, verify

COURSE = {"epoch": 1, "step": 3, "committed": [[0, 4]]}


def save(run: Path, step: int, text: str = "weights") -> Path:
    """A checkpoint of two small files."""
    folder = partial(run, step)
    folder.mkdir(parents=True)
    (folder / "a.distcp").write_text(f"{text} of {step}" * 100)
    (folder / ".metadata").write_text("meta")
    facts = {p.name: facts_of(p) for p in folder.iterdir()}
    return checkpoints.commit(
        run, step, files=[facts], training_plan=COURSE, strategy="allreduce", workers=2
    )


def test_a_committed_checkpoint_verifies(tmp_path: Path) -> None:
    path = save(tmp_path, 12)
    assert path == final(tmp_path, 12) == tmp_path / "checkpoints" / "step-12"
    manifest = verify(path)
    assert (manifest.step, manifest.name, manifest.training_plan) == (12, "step-12", COURSE)
    assert (manifest.strategy, manifest.workers) == ("allreduce", 2)
    assert not partial(tmp_path, 12).exists()


def rewrite(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    for name, value in changes.items():
        if value is None:
            del manifest[name]
        else:
            manifest[name] = value
    (path / MANIFEST).write_text(json.dumps(manifest))


def truncate(path: Path) -> None:
    (path / "a.distcp").write_bytes((path / "a.distcp").read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray((path / "a.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "a.distcp").write_bytes(data)


def garble(path: Path) -> None:
    (path / MANIFEST).write_bytes(b"\xff\xfe\x00")


DAMAGES = [
    (truncate, r"a\.distcp has 1,299 bytes and should have 1,300"),
    (flip, r"a\.distcp is damaged: its checksum"),
    (lambda path: (path / "a.distcp").unlink(), r"not a complete checkpoint: .*a\.distcp"),
    (lambda path: (path / ".metadata").unlink(), r"not a complete checkpoint: .*\.metadata"),
    (lambda path: (path / MANIFEST).unlink(), r"not a complete checkpoint: .*manifest\.json"),
    (lambda path: (path / MANIFEST).write_text('{"form'), r"manifest\.json is damaged: "),
    (lambda path: (path / MANIFEST).write_text(""), r"manifest\.json is damaged: "),
    (garble, r"manifest\.json is damaged: "),
    (lambda path: (path / MANIFEST).write_text("[]"), r"manifest\.json is not a manifest"),
    (lambda path: (path / MANIFEST).write_text("7"), r"manifest\.json is not a manifest"),
    (lambda path: rewrite(path, files=None), r"manifest\.json is not a manifest: KeyError: 'files"),
    (
        lambda path: rewrite(path, course=None),
        r"manifest\.json is not a manifest: .*'course'",
    ),
    (lambda path: rewrite(path, files=[1]), r"manifest\.json is not a manifest"),
    (lambda path: rewrite(path, files={"a.distcp": {}}), r"manifest\.json is not a manifest"),
    (lambda path: rewrite(path, format=99), r"by a newer manyhands \(format 99, .* up to 2\)"),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGES, ids=[says for _, says in DAMAGES])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    tmp_path: Path, damage: Any, says: str
) -> None:
    save(tmp_path, 5)
    path = save(tmp_path, 10)
    damage(path)
    with pytest.raises(CheckpointError, match=says) as caught:
        verify(path)
    assert str(path) in str(caught.value)
    manifest, complaints = newest(tmp_path)
    assert manifest is not None
    assert manifest.step == 5
    assert complaints == [str(caught.value)]


def test_the_newest_of_none(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, [])
    truncate(save(tmp_path, 1))
    manifest, complaints = newest(tmp_path)
    assert manifest is None
    assert len(complaints) == 1


def test_steps_of_checkpoints_without_unfinished_ones(tmp_path: Path) -> None:
    for step in (100, 9, 20):
        save(tmp_path, step)
    partial(tmp_path, 300).mkdir()
    (tmp_path / "checkpoints" / "step-many").mkdir()
    assert steps(tmp_path) == [9, 20, 100]


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step)
    checkpoints.prune(tmp_path, keep=2, also=3)
    assert steps(tmp_path) == [3, 6, 7]
    checkpoints.prune(tmp_path, keep=2, also=None)
    assert steps(tmp_path) == [6, 7]
    checkpoints.prune(tmp_path, keep=5, also=None)
    assert steps(tmp_path) == [6, 7]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-6", "step-7"]


def test_a_checkpoint_set_aside_is_hidden_not_deleted(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    checkpoints.set_aside(path)
    assert steps(tmp_path) == []
    (aside,) = (tmp_path / "checkpoints").iterdir()
    assert verify(aside).step == 4
    checkpoints.clear_partials(tmp_path)
    assert aside.exists()


def test_the_same_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    save(tmp_path, 4, "old")
    path = save(tmp_path, 4, "new")
    assert steps(tmp_path) == [4]
    assert verify(path).step == 4
    assert (path / "a.distcp").read_text().startswith("new")
    (aside,) = (tmp_path / "checkpoints").glob(".*")
    assert verify(aside)
    assert (aside / "a.distcp").read_text().startswith("old")


def test_one_of_two_checkpoints_exists_during_replacement(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    done = threading.Event()

    def save_again() -> None:
        try:
            for _ in range(150):
                save(tmp_path, 4)
        finally:
            done.set()

    writer = threading.Thread(target=save_again)
    writer.start()
    missing = 0
    while not done.is_set():
        missing += not path.exists()
    writer.join(timeout=30)
    assert missing == 0
    assert verify(path).step == 4


def test_leftovers_of_a_killed_run_are_deleted(tmp_path: Path) -> None:
    save(tmp_path, 4)
    partial(tmp_path, 5).mkdir()
    (partial(tmp_path, 5) / "file").touch()
    (tmp_path / "checkpoints" / ".step-1.old").mkdir()
    checkpoints.clear_partials(tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-4"]


def test_a_commit_without_files_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 4)
    with pytest.raises(CheckpointError, match="checkpoint of step 4 can't be finished"):
        checkpoints.commit(tmp_path, 4, files=[{}], training_plan={}, strategy="single", workers=1)
    assert verify(final(tmp_path, 4))


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from manyhands.runs import checkpoints
from manyhands.runs.saver import read_state, write_state

run, kills, best = Path(sys.argv[1]), int(sys.argv[2]), 2

def save(step):
    state = {"model": {f"w{i}": torch.full((40_000,), float(step)) for i in range(4)}}
    files = write_state(checkpoints.partial(run, step), state)
    checkpoints.commit(run, step, files=[files], training_plan={}, strategy="single", workers=1)

def forever(step, tell):
    while True:
        save(step)
        os.write(tell, f"{step}\\n".encode())
        save(step)  # once more, as a resumed run does
        checkpoints.prune(run, keep=2, also=best)
        step += 1

torch.set_num_threads(1)
chance, newest = random.Random(7), 0
for kill in range(kills):
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        forever(newest + 1, tell)
    os.close(tell)
    # Some before the first checkpoint of this life, most at any moment after it.
    told = os.read(hear, 100) if kill % 4 else b""
    time.sleep(chance.uniform(0.0, 0.12))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(hear, "rb") as rest:
        told += rest.read()
    sure = max([newest, *map(int, told.split())])
    steps = checkpoints.steps(run)
    for step in steps:
        manifest = checkpoints.verify(checkpoints.final(run, step))
        state = read_state(manifest.path)
        assert all((w == step).all() for w in state["model"].values()), f"{step} holds another"
    newest = steps[-1] if steps else 0
    assert sure <= newest <= sure + 1, f"told {sure}, found {steps}"
    assert best > newest or best in steps, f"lost the best: {steps}"
    assert newest < 2 or newest - 1 in steps, f"lost the one before: {steps}"
    assert checkpoints.newest(run)[1] == []
    checkpoints.clear_partials(run)
    left = [p.name for p in (run / "checkpoints").glob(".*") if "aside" not in p.name]
    assert not left, left
print(newest)
"""


def test_a_kill_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), "12"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 8, "it was to be killed while it saves"


def test_a_checkpoint_of_the_first_format_is_sound(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["format"] = 1
    for name, facts in manifest["files"].items():
        del facts["crc32"]
        facts["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert verify(folder).step == 3
    flip(folder)
    with pytest.raises(CheckpointError, match="damaged"):
        verify(folder)
