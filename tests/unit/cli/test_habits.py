"""Flags known from other trainers: the error says what to type instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.cli.habits import check_set, fields_meant
from manyhands.cli.main import main
from manyhands.errors import SpecError, UsageError
from manyhands.strategies.registry import make_strategy

EXAMPLE = str(Path(__file__).parents[3] / "examples" / "digits.py")


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        ([EXAMPLE, "--lr", "0.1"], "--set lr=0.1"),
        (["--lr=0.1", EXAMPLE], "--set lr=0.1"),
        (["--hidden", "7", EXAMPLE], "--set hidden=7"),
        ([EXAMPLE, "--learning-rate", "1e-3", "--num-epochs", "5"], "--set lr=1e-3 --set epochs=5"),
        ([EXAMPLE, "--batch-size", "8"], "--set batch_size=8"),
        (
            [EXAMPLE, "--plateau", "factor=0.5; patience=3"],
            "--set 'plateau=factor=0.5; patience=3'",
        ),
        ([EXAMPLE, "--num-workers", "4"], "--set loader_processes=4"),
    ],
)
@pytest.mark.parametrize("verb", [["train"], ["launch", "slurm"]])
def test_a_field_as_a_flag(
    verb: list[str], words: list[str], typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*verb, *words])
    assert caught.value.code == 2
    typed = f"-- {typed}" if verb[0] == "launch" else typed
    assert capsys.readouterr().err.splitlines()[0].endswith(f"is a field of the job. Type  {typed}")


def test_other_flags_are_not_fields() -> None:
    words = ["train", EXAMPLE, "--fast", "--lr", "0.1"]
    assert fields_meant(["--fast", "--lr"], words) == {"--lr": "lr=0.1"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "job.py", "--set", "lr", "0.1"], "sign:  --set lr=0.1$"),
        (["resume", "--set", "name", "a b", "runs/x"], "sign:  --set 'name=a b'$"),
        (["train", "--set", "lr", "job.py"], "write it as NAME=VALUE, such as  --set lr=0.1$"),
    ],
)
def test_set_without_an_equals_sign(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_set(words)


def test_correct_uses_of_set_are_accepted() -> None:
    check_set(["train", "--set", "lr=0.1", "job.py", "--set", "x=1"])
    check_set(["lab", "run", "--", "python", "x.py", "--set", "lr", "0.1"])
    check_set([])


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("ddp", "no strategy 'ddp': it is called 'allreduce' here. Type  --strategy allreduce"),
        ("DDP", "Type  --strategy allreduce"),
        ("fsdp", "'fsdp': it is called 'sharded' here, which is planned .* --strategy allreduce"),
        ("ps", "say how .* --strategy ps:sync, ps:async, ps:ssp or ps:backup"),
        ("diloco(every=500)", "'diloco' is planned and doesn't exist yet. .* --strategy local"),
        ("gossip", "'gossip' is planned .* --strategy local"),
        ("Int8", r"'Int8' is a codec, .* --strategy allreduce\+int8$"),
        ("sharded", "'sharded' is planned"),
        ("mesh", "'mesh' is planned"),
        (
            "allreduce + topk",
            r"'topk' is planned .* There are: int8. Type  --strategy allreduce\+int8$",
        ),
        ("ps:sync(servers=2) + topk", r"'topk' is planned .* Type  --strategy allreduce\+int8$"),
        ("allreduce + int9", "no codec 'int9'; did you mean 'int8'. There are: int8"),
        ("allreduc", "did you mean 'allreduce'"),
    ],
)
def test_strategies_by_other_names_and_planned_ones(spec: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        make_strategy(spec)
