"""The commands as people use them: output, run folder, resume."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from manyhands.runs import checkpoints
from manyhands.testing import harness
from manyhands.testing.conformance import assert_same_bits

SUMMARY_KEYS = {
    *("outcome", "strategy", "workers", "steps", "samples", "epochs", "wall_s", "samples_per_s"),
    *("final_metrics", "best_metrics", "bytes_sent", "checkpoint", "error"),
    *("pushes", "staleness", "lost", "replaced", "begun_again", "injected"),
    *("chaos", "monitor", "limit"),
    *("target", "time_to_target_s", "samples_to_target", "steps_to_target"),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> harness.Finished:
    """One ordinary run on two workers, for all tests that only read it."""
    run = tmp_path_factory.mktemp("ordinary") / "run"
    finished = harness.train("Regression", run, strategy="allreduce", workers=2, epochs=5)
    assert finished.code == 0, finished.err
    return finished


def test_the_summary_has_the_outcome(done: harness.Finished) -> None:
    summary = json.loads((done.run / "summary.json").read_text())
    assert set(summary) == SUMMARY_KEYS
    assert summary["outcome"] == "finished"
    assert (summary["strategy"], summary["workers"]) == ("allreduce", 2)
    assert (summary["steps"], summary["epochs"], summary["samples"]) == (35, 5, 5 * 98)
    assert summary["bytes_sent"] == sum(e["bytes_sent"] for e in done.steps)
    evaluations = done.of("Evaluated")
    assert len(evaluations) == 5
    assert summary["final_metrics"] == evaluations[-1]["metrics"]
    best = min(evaluations, key=lambda e: e["metrics"]["loss"])
    assert summary["best_metrics"] == {**best["metrics"], "step": best["step"]}
    assert summary["checkpoint"] == "checkpoints/step-35"
    assert summary["error"] is None


def test_the_config_has_the_source_of_each_value(done: harness.Finished) -> None:
    config = json.loads((done.run / "config.json").read_text())
    assert config["fields"]["epochs"] == {"value": 5, "from": "--set"}
    assert config["fields"]["lr"] == {"value": 0.05, "from": "job file"}
    assert config["options"]["strategy"] == {"value": "allreduce", "from": "--strategy"}
    assert config["options"]["checkpoint_every"] == {"value": 0, "from": "default"}


def test_the_console_shows_the_course_of_a_run(done: harness.Finished) -> None:
    for fact in (
        "allreduce, 2 workers",
        "98 samples",
        "2 x cpu (1 thread), shared memory",
        "35 steps of 16",
        "finished in",
    ):
        assert fact in done.out
    assert f"tensorboard --logdir {done.run}/tb" in done.out
    assert done.err == ""
    assert "\x1b" not in done.out


def test_the_shares_of_a_step_are_even_and_cover_it(done: harness.Finished) -> None:
    for record in done.steps:
        counts = {
            name: sum(stop - start for start, stop in ranges)
            for name, ranges in record["shares"].items()
        }
        assert sum(counts.values()) == record["samples"]
        assert max(counts.values()) - min(counts.values()) <= 1


def test_every_member_has_a_log_and_tensorboard_its_file(done: harness.Finished) -> None:
    assert sorted(p.name for p in (done.run / "logs").iterdir()) == ["worker-0.log", "worker-1.log"]
    assert list((done.run / "tb").glob("events.out.tfevents.*"))


def test_the_best_checkpoint_and_the_newest_are_kept(done: harness.Finished) -> None:
    best = json.loads((done.run / "summary.json").read_text())["best_metrics"]["step"]
    kept = checkpoints.steps(done.run)
    assert kept[-3:] == [21, 28, 35]
    assert best in kept
    for step in kept:
        checkpoints.verify(checkpoints.final(done.run, step))


def test_a_finished_run_is_not_trained_again(done: harness.Finished) -> None:
    before = (done.run / "events.jsonl").read_bytes()
    again = harness.resume(done.run)
    assert again.code == 0
    assert "--set epochs=N" in again.out
    assert (done.run / "events.jsonl").read_bytes() == before


def test_a_resume_that_trains_nothing_keeps_the_summary(
    members: ModuleType, tmp_path: Path
) -> None:
    """It fails before training, and in its first step: the earlier summary stays."""
    job, run = tmp_path / "job.py", tmp_path / "run"
    job.write_text(
        "from dataclasses import dataclass\n"
        "from manyhands.testing.jobs import Regression\n"
        "@dataclass\n"
        "class Mine(Regression):\n"
        "    broken: bool = False\n"
        "    def loss(self, output, batch):\n"
        "        if self.broken:\n"
        "            raise ValueError('on purpose')\n"
        "        return super().loss(output, batch)\n"
    )
    assert members.train(job, run, epochs=1, anneal=False).code == 0
    before = (run / "summary.json").read_bytes()
    failed = members.resume(run, "--set", "epochs=2", "--set", "broken=true")
    assert failed.code == 1
    assert failed.of("RunFinished")[-1]["outcome"] == "failed"
    assert (run / "summary.json").read_bytes() == before
    longer = members.resume(run, "--set", "epochs=2", "--set", "broken=false")
    assert longer.code == 0, longer.err
    assert json.loads((run / "summary.json").read_text())["steps"] == 14


def test_list_shows_the_runs(done: harness.Finished, tmp_path: Path) -> None:
    with harness.command("list", str(done.run.parent), run=tmp_path) as running:
        listed = running.wait()
    assert str(done.run) in listed.out
    assert re.search("Regression +finished +allreduce +2 +35 ", listed.out)
    assert "epochs=5" in listed.out
    with harness.command("show", str(done.run), "--json", run=tmp_path) as running:
        shown = json.loads(running.wait().out)
    assert (shown["class"], shown["outcome"], shown["steps"]) == ("Regression", "finished", 35)
    assert shown["curves"]["loss"] == [[n, loss] for n, loss in enumerate(done.losses, start=1)]
    assert Path(shown["best_checkpoint"]).is_dir()
    with harness.command("list", str(tmp_path / "none"), run=tmp_path) as running:
        assert "No runs in" in running.wait().out


def test_training_longer_continues_from_the_end(members: ModuleType, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert members.train("Adam", run, epochs=2).code == 0
    refused = members.resume(run, "--set", "epochs=3")
    assert refused.code == 2
    for line in (
        "  --schedule stretch   over all 21 steps; the next rate is ",
        "  --schedule restart   anew, over the remaining 7; the next rate is 0.03\n",
        "  --schedule keep      as it was; from step 15 on, the rate stays at 0\n",
    ):
        assert line in refused.err
    unknown = members.resume(run, "--set", "epochs=3", "--schedule", "strech")
    assert unknown.code == 2
    assert "it must be one of keep, stretch, restart; did you mean 'stretch'?" in unknown.err
    longer = members.resume(run, "--set", "epochs=3", "--schedule", "restart")
    assert longer.code == 0, longer.err
    assert "note: the learning rate is 0.03 from step 15 on; it was saved at 0\n" in longer.out
    assert [e["step"] for e in longer.steps] == list(range(1, 22))
    assert longer.of("Resumed")[0]["step"] == 14


def test_check_tests_everything_but_training(tmp_path: Path) -> None:
    arguments = harness.train_arguments(
        *("Regression", tmp_path / "run", "--check"),
        strategy="allreduce",
        workers=2,
        epochs=1_000_000,  # training it would take hours
        grouped=True,
    )
    with harness.command(*arguments, run=tmp_path / "run") as running:
        checked = running.wait()
    assert checked.code == 0, checked.err
    assert "Check passed" in checked.out
    assert "7,000,000 steps" in checked.out
    assert "  best        lowest loss\n" in checked.out
    assert "  group 1     2 tensors, 26 numbers: lr 0.15, momentum 0.9, weight_dec" in checked.out
    assert not (tmp_path / "run").exists()


def test_check_finds_a_loss_that_is_no_scalar(members: ModuleType, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "from dataclasses import dataclass\n"
        "from manyhands.testing.jobs import Regression\n"
        "@dataclass\n"
        "class Vector(Regression):\n"
        "    def loss(self, output, batch):\n"
        "        return ((output - batch[1]) ** 2).mean(dim=1)\n"
    )
    with members.command("train", str(job), "--check", run=tmp_path / "run") as running:
        checked = running.wait()
    assert checked.code == 2
    assert "Vector.loss() must return a scalar tensor" in checked.err


def test_check_finds_a_monitor_without_a_direction(members: ModuleType, tmp_path: Path) -> None:
    done = members.train("Regression", tmp_path / "run", "--check", monitor="worst")
    assert done.code == 2
    assert 'Write  monitor="min worst"  if lower is better,  monitor="max worst"  if' in done.err


def test_resume_remembers_the_flags_and_applies_what_is_set(
    members: ModuleType, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert members.train("Regression", run, "--checkpoint-every", "5", "--keep", "2").code == 0
    longer = members.resume(run, "--set", "epochs=4", "--set", "lr=7", "--schedule", "stretch")
    assert longer.code == 0, longer.err
    config = json.loads((run / "config.json").read_text())
    assert config["options"]["checkpoint_every"] == {"value": 5, "from": "--checkpoint-every"}
    assert config["options"]["keep"]["value"] == 2
    assert 25 in [e["step"] for e in longer.of("CheckpointSaved")]
    assert config["fields"]["lr"] == {"value": 7.0, "from": "--set"}
    rates = [event["lr"] for event in longer.steps]
    assert rates[20] < 0.05
    expected = [7 / 2 * (1 + math.cos(math.pi * step / 28)) for step in range(21, 28)]
    assert rates[21:] == pytest.approx(expected)


def test_patience_stops_early_and_keeps_the_best(members: ModuleType, tmp_path: Path) -> None:
    # A step that is far too large: the first evaluation stays the best.
    done = members.train(
        *("Regression", tmp_path / "run"),
        lr=30,
        epochs=20,
        patience=2,
        monitor="min worst",
    )
    assert done.code == 0, done.err
    assert "  best        lowest worst\n" in done.out
    assert "lowest worst)\n" in done.out
    summary = json.loads((done.run / "summary.json").read_text())
    assert summary["monitor"] == "min worst"
    assert summary["outcome"] == "early-stopped"
    assert summary["epochs"] < 20
    losses = [e["metrics"]["worst"] for e in done.of("Evaluated")]
    best = min(range(len(losses)), key=lambda i: math.inf if math.isnan(losses[i]) else losses[i])
    assert len(losses) == best + 1 + 2
    assert summary["best_metrics"]["step"] in checkpoints.steps(done.run)


def test_a_killed_loader_process_is_replaced(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        """
import os, signal
from dataclasses import dataclass
from pathlib import Path
from torch.utils.data import Dataset
from manyhands.testing.jobs import Regression

class Deadly(Dataset):
    def __init__(self, data): self.data = data
    def __len__(self): return len(self.data)
    def __getitem__(self, index):
        mark = Path(__file__).with_name("mark")
        if index == 50 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.data[index]

@dataclass
class Killing(Regression):
    def data(self): return Deadly(super().data())
"""
    )
    done = harness.train(job, tmp_path / "run", loader_processes=1, epochs=1)
    assert done.code == 0, done.err
    note = "worker-0: a loader process was killed by SIGKILL; another one loads its batch again"
    assert note in [event["message"] for event in done.of("Noticed")]
    assert sorted(done.uses_by_epoch()[0]) == list(range(98))


def test_loader_processes_change_nothing(tmp_path: Path) -> None:
    without = harness.train("Regression", tmp_path / "without", accumulate=2)
    with_two = harness.train("Regression", tmp_path / "with", accumulate=2, loader_processes=2)
    assert with_two.code == 0, with_two.err
    assert with_two.losses == without.losses
    assert_same_bits(with_two.state(), without.state())


def test_control_over_tls_trains_the_same(tmp_path: Path, done: harness.Finished) -> None:
    over_tls = harness.train(
        *("Regression", tmp_path / "run", "--control", "tcp"),
        strategy="allreduce",
        workers=2,
        epochs=5,
    )
    assert over_tls.code == 0, over_tls.err
    assert over_tls.losses == done.losses
    secrets = ["PRIVATE KEY", "BEGIN CERTIFICATE"]
    for path in over_tls.run.rglob("*"):
        if path.is_file():
            assert not any(secret in path.read_text(errors="replace") for secret in secrets), path


def test_quiet_prints_one_line(tmp_path: Path) -> None:
    done = harness.train("Regression", tmp_path / "run", "--quiet", epochs=1)
    assert done.code == 0
    assert len(done.out.strip().splitlines()) == 1


def test_the_live_line_on_a_terminal_is_drawn_and_removed(tmp_path: Path) -> None:
    arguments = harness.train_arguments("Regression", tmp_path / "run", epochs=2, pause_s=0.02)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "manyhands.cli.main", *arguments],
        stdout=slave,
        stderr=slave,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"},
    )
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:  # how a pseudo-terminal says that the other side is closed
        pass
    finally:
        os.close(master)
        assert process.wait(timeout=60) == 0
    text = shown.decode()
    assert "step" in text
    assert "\x1b[" in text
    assert "/tb\x1b[0m\r\n" in text
    last_line = text.rstrip().splitlines()[-1]
    assert "tensorboard --logdir" in last_line
    assert "step" not in last_line


def test_an_interrupt_before_training_ends_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = harness.train_arguments("Regression", run, strategy="allreduce", workers=2)
    with harness.command(*arguments, run=run) as running:
        running.wait_for(lambda events: any(e["event"] == "MemberStarted" for e in events))
        running.signal(signal.SIGINT)
        done = running.wait()
        pids = list(running.pids().values())
    assert done.code == 130
    assert harness.gone(pids)
