from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.events import events as ev
from manyhands.events import text, units


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (units.count(3_412.4), "3,412"),
        (units.short(0), "0"),
        (units.short(999), "999"),
        (units.short(1_234_567), "1.2 M"),
        (units.short(999_960), "1.0 M"),
        (units.short(7e9), "7.0 B"),
        (units.size(512), "512 B"),
        (units.size(12_345_678), "12.3 MB"),
        (units.size(5e18), "5000.0 PB"),
        (units.duration(0.04), "0.0 s"),
        (units.duration(9.94), "9.9 s"),
        (units.duration(9.96), "10 s"),
        (units.duration(59.7), "1 m 00 s"),
        (units.duration(72.4), "1 m 12 s"),
        (units.duration(3_599.8), "1 h 00 m"),
        (units.duration(90_000), "1 d 01 h"),
        (units.duration(math.inf), "unknown"),
        (units.figure(0.21309), "0.2131"),
        (units.figure(0.00001234), "1.23e-05"),
        (units.figure(12_345.67), "12,345.7"),
        (units.figure(math.nan), "nan"),
        (units.figure(None), "unknown"),
        (units.plural(1, "step"), "1 step"),
        (units.plural(2_000, "step"), "2,000 steps"),
    ],
)
def test_units(said: str, expected: str) -> None:
    assert said == expected


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("500ms", 0.5), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5h", 5400), ("2D", 172_800)],
)
def test_times_are_parsed(said: str, seconds: float) -> None:
    assert units.parse_time(said) == seconds


@pytest.mark.parametrize("said", ["", "10", "0s", "m", "10 m", "-1s", "1e3s", "10x", "9999999d"])
def test_wrong_times_are_refused(said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        units.parse_time(said)


@given(st.integers(1, 10**11))
def test_times_are_shown_as_they_are_parsed(ms: int) -> None:
    assert units.parse_time(units.show_time(ms / 1_000)) == ms / 1_000


def test_clean_keeps_words_and_drops_what_moves_the_cursor() -> None:
    coloured = (
        "\x1b[1;31mValueError\x1b[0m: \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\r\x07 ü\tend\n"
    )
    assert units.clean(coloured) == "ValueError: link ü\tend\n"


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=st.sampled_from("\x1b[]0;38mKHab\x07\r\n\x9b")))
def test_clean_text_has_no_control_characters(words: str) -> None:
    assert not set(units.clean(words)) & set("\x1b\x07\r\x9b")


def fold(events: list[ev.Event]) -> text.RunStatus:
    status = text.RunStatus()
    for event in events:
        status.fold(event)
    return status


def test_progress_is_the_mean_of_the_recent_steps(
    start: list[ev.Event], step: Callable[..., ev.StepCommitted], evaluated: ev.Evaluated
) -> None:
    status = fold([*start, *(step(number) for number in range(1, 11)), evaluated, step(11, 0.5)])
    now = text.progress(status)
    assert (now.epoch, now.steps, now.done) == ("epoch 2/2", "11/20", 11 / 20)
    # 32 samples in 0.02 s; nine steps to go; a quarter of the time is waiting.
    assert now.figures == (
        "loss 0.5000",
        "1,600 samples/s",
        "eta 0.2 s",
        "wait 25%",
        "eval loss 0.4321  accuracy 0.8765",
    )


def test_a_single_worker_shows_no_wait(
    start: list[ev.Event], step: Callable[..., ev.StepCommitted]
) -> None:
    alone = ev.ViewChanged(view=1, members=("worker-0",), transport="none")
    line = text.progress_line(fold([*start[:2], alone, step(1)]))
    assert "wait" not in line
    assert "step 1/20  5%  loss 0.2500" in line


def test_resuming_forgets_void_steps(
    start: list[ev.Event], step: Callable[..., ev.StepCommitted], evaluated: ev.Evaluated
) -> None:
    back = ev.Resumed(step=5, epoch=0, checkpoint="checkpoints/step-5", workers=2)
    status = fold([*start, step(10), evaluated, back])
    assert (status.step, status.evaluation, status.saved_step) == (5, None, 5)
    assert len(status.recent) == 0


def test_a_long_traceback_keeps_its_start_and_end() -> None:
    traceback = "\n".join(f"line {number}" for number in range(100))
    failed = ev.MemberFailed(member="w", reason="r", traceback=traceback, log="l")
    _, lines, log = text.failure(failed)
    assert lines[:12] == [f"line {number}" for number in range(12)]
    assert lines[12] == "  ... 70 more lines, in the log"
    assert lines[13:] == [f"line {number}" for number in range(82, 100)]
    assert log == "l (full traceback)"


def test_a_summary_of_nothing_is_short() -> None:
    keys = ("outcome", "steps", "wall_s", "final_metrics", "best_metrics", "checkpoint", "error")
    nothing = ev.RunFinished(outcome="failed", summary=dict.fromkeys(keys), resume_command=None)
    assert text.outcome(nothing) == "failed"
    assert text.summary_rows(nothing, None) == []
    assert text.summary_tail(nothing, None) == ""


@pytest.mark.parametrize("given_as", ["checkpoints/s", "runs/x/checkpoints/s"])
def test_the_checkpoint_can_be_typed_from_here(given_as: str) -> None:
    end = ev.RunFinished(outcome="finished", summary={"checkpoint": given_as}, resume_command=None)
    assert ("checkpoint", "runs/x/checkpoints/s") in text.summary_rows(end, "runs/x")


def test_a_loss_and_a_recovery() -> None:
    lost = ev.MemberLost(member="worker-1", reason="killed by SIGKILL", view=1, workers=3)
    assert (
        text.lost_line(lost) == "worker-1 was lost (killed by SIGKILL); continuing with 3 workers"
    )
    last = ev.MemberLost(member="worker-0", reason="killed by SIGKILL", view=1, workers=0)
    assert text.lost_line(last) == (
        "worker-0 was lost (killed by SIGKILL); the run can't continue without it"
    )
    alone = ev.MemberLost(member="server-0", reason="killed by SIGKILL", view=1, workers=1)
    assert (
        text.lost_line(alone) == "server-0 was lost (killed by SIGKILL); continuing with 1 worker"
    )
    went = ev.Recovered(view=2, seconds=0.314, redone_steps=0)
    assert text.recovered_line(went) == "recovered in 0.31 s"
    again = ev.Recovered(view=2, seconds=0.314, redone_steps=2)
    assert text.recovered_line(again) == "recovered in 0.31 s, 2 steps to redo"
    times = {"detection_s": 120.1, "view_s": 0.3, "redo_s": 0.6}
    split = ev.Recovered(view=2, seconds=121.0, redone_steps=2, **times)
    assert text.recovered_line(split) == (
        "recovered in 121.00 s: 120.10 s to notice, 0.30 s to reconnect, 0.60 s to the next step; "
        "2 steps dispatched again"
    )


def test_injected_faults() -> None:
    kill = ev.Injected(fault="kill", member="worker-1")
    assert text.injected_line(kill) == "chaos: kill worker-1"
    pause = ev.Injected(fault="pause", member="server-0", seconds=2.0)
    assert text.injected_line(pause) == "chaos: pause server-0 for 2.0 s"
    cut = ev.Injected(fault="cut link", member="worker-0")
    assert text.injected_line(cut) == "chaos: cut link of worker-0"
    for told, said in [
        ({"recovered": 2, "median_pause_s": 0.314}, "3 faults, 2 recovered, median pause 0.31 s"),
        ({"recovered": 0, "median_pause_s": None}, "3 faults, 0 recovered"),
    ]:
        summary = {"injected": 3, "chaos": told}
        end = ev.RunFinished(outcome="finished", summary=summary, resume_command=None)
        assert text.summary_rows(end, None) == [("chaos", said)]


def test_servers_do_not_count_as_workers() -> None:
    members = ("worker-0", "worker-2", "server-0")
    view = ev.ViewChanged(view=3, members=members, transport="tcp", servers=1)
    said = "continuing with 2 workers and 1 server: worker-0, worker-2, server-0; tcp"
    assert text.view_line(view) == said


def test_steps_in_any_order_never_go_backward(step: Callable[..., ev.StepCommitted]) -> None:
    status = fold([step(3), step(5), step(4)])
    assert status.step == 5


def test_the_summary_shows_losses_and_staleness() -> None:
    staleness = {"mean": 1.2345, "p95": 3, "max": 7, "count": 9, "histogram": {}}
    summary = {"lost": 2, "replaced": 1, "staleness": staleness}
    event = ev.RunFinished(outcome="finished", summary=summary, resume_command=None)
    rows = dict(text.summary_rows(event, None))
    assert rows["members"] == "2 lost, 1 replaced"
    assert rows["staleness"] == "mean 1.2, p95 3, max 7"
    nothing = {"lost": 0, "replaced": 0, "staleness": None}
    quiet = ev.RunFinished(outcome="finished", summary=nothing, resume_command=None)
    assert text.summary_rows(quiet, None) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"factor": 2.0, "over": 100, "batch_size": 64, "reason": "4 workers"},
            "step 1,021: learning rate x 2 over 100 steps, batches of 64 samples (4 workers)",
        ),
        (
            {"factor": 0.05, "reason": "loss has not been better than 0.1 for 3 evaluations"},
            "step 1,021: learning rate x 0.05 (loss has not been better than 0.1 for 3 "
            "evaluations)",
        ),
    ],
)
def test_another_learning_rate(start: list[ev.Event], changes: dict[str, float], said: str) -> None:
    told = {"step": 1021, "over": 0, "batch_size": 32, "steps": 15, **changes}
    event = ev.RateChanged(**told)  # type: ignore[arg-type]
    status = fold([*start, event])
    assert text.rate_line(event, status) == said


def test_another_batch_makes_another_number_of_steps(
    start: list[ev.Event], step: Callable[..., ev.StepCommitted]
) -> None:
    grown = ev.RateChanged(step=6, factor=2.0, over=0, batch_size=64, steps=10, reason="4 workers")
    status = fold([*start, *(step(number) for number in range(1, 6))])
    assert text.progress_line(status).startswith("epoch 1/2  step 5/20  25%")
    status.fold(grown)
    assert text.progress_line(status).startswith("epoch 1/2  step 5/10  50%")
    back = ev.RateChanged(step=8, factor=1.0, over=0, batch_size=32, steps=16, reason="2 workers")
    status.fold(back)
    said = text.rate_line(back, status)
    assert said == "step 8: learning rate x 1, batches of 32 samples (2 workers)"


def test_a_training_of_a_number_of_steps_has_no_last_epoch(start: list[ev.Event]) -> None:
    by_steps = [
        replace(event, epochs=None, steps=25) if isinstance(event, ev.MemberReady) else event
        for event in start
    ]
    status = fold(by_steps)
    assert ("training", "25 steps of 32 samples (2.5 epochs)") in text.ready_rows(status)
    assert text.progress(status).epoch == "epoch 1"
    evaluated = ev.Evaluated(
        step=25, epoch=2, samples=64, metrics={"loss": 0.5}, best=True, seconds=0.1
    )
    assert text.evaluation_line(evaluated, status) == "epoch 3  step 25  eval loss 0.5000"


def test_a_target_that_was_reached() -> None:
    event = ev.TargetReached(
        step=1_115,
        epoch=4,
        samples=71_185,
        metric="accuracy",
        value=0.97222,
        target=0.97,
        time_to_target_s=83.2,
        startup_s=6.683,
        evaluation_s=0.0351,
    )
    head = "accuracy 0.9722 reaches 0.97 at step 1,115"
    assert text.target_line(event) == (
        f"{head}, after 1 m 23 s of training (start-up 6.68 s, evaluation 0.04 s)"
    )
    unknown = replace(event, time_to_target_s=None, startup_s=None, evaluation_s=None)
    assert text.target_line(unknown) == head
    summary = {"target": "accuracy=0.97", "steps_to_target": None, "time_to_target_s": None}
    end = ev.RunFinished(outcome="finished", summary=summary, resume_command=None)
    assert text.summary_rows(end, None) == [("target", "accuracy=0.97 was not reached")]
    summary |= {"steps_to_target": 1_115, "samples_to_target": 71_185}
    took = "accuracy=0.97 took 1,115 steps, 71,185 samples"
    assert text.summary_rows(end, None) == [("target", took)]
    summary |= {"time_to_target_s": 83.2}
    took = "accuracy=0.97 took 1 m 23 s of training, 1,115 steps, 71,185 samples"
    assert text.summary_rows(end, None) == [("target", took)]
