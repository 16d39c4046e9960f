"""Options of a training: what a strategy requires, and flags that don't fit it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyhands.api.options import Resolved, resolve_options
from manyhands.cli.options import add_training_flags, fit_debug
from manyhands.contract import Traits
from manyhands.coordinator.batch_scaling import Scaling
from manyhands.coordinator.options import RunOptions
from manyhands.errors import UsageError
from manyhands.hosts.timeouts import Timeouts
from manyhands.strategies.registry import make_strategy
from manyhands.strategies.single import Single


class Restless(Single):
    """A strategy that overrides every default."""

    @property
    def traits(self) -> Traits:
        return Traits(lockstep=False, elastic=True)

    def parts(self, workers: int) -> int:
        return 2 * workers

    def servers_for(self, workers: int) -> int:
        return workers + 1

    def needs_keys(self, workers: int) -> bool:
        return workers > 1


def options(*flags: str, before: dict[str, Any] | None = None) -> tuple[RunOptions, Resolved]:
    parser = argparse.ArgumentParser()
    add_training_flags(parser)
    resolved = Resolved(vars(parser.parse_args(flags)), before)
    return resolve_options(resolved, job="job.py", settings={}), resolved


@pytest.mark.parametrize(("spec", "elastic"), [("single", False), ("allreduce", True)])
def test_lockstep_strategies_need_no_servers(spec: str, elastic: bool) -> None:
    found = options("--strategy", spec, "--workers", "1")[0]
    assert found.config == make_strategy(spec)
    assert (found.config.traits.lockstep, found.config.traits.elastic) == (True, elastic)
    assert (found.servers, found.needs_keys) == (0, False)


def test_the_strategy_decides_on_servers_and_keys() -> None:
    found = RunOptions("job.py", "restless", 3, Restless())
    assert (found.servers, found.needs_keys) == (4, True)
    assert not replace(found, trust_network=True).needs_keys


def test_debugging_has_no_timeouts() -> None:
    parser = argparse.ArgumentParser()
    add_training_flags(parser)
    arguments = parser.parse_args(["--debug", "--stuck-after", "5"])
    fit_debug(arguments)
    given = resolve_options(Resolved(vars(arguments)), job="job.py", settings={}, debug=True)
    assert (given.strategy, given.workers, given.stuck_after_s) == ("single", 1, 0)
    assert given.assignment(Path("run"), None).debug
    endless = Timeouts.endless()
    assert min(endless.silence_s, endless.step_s, endless.ready_s) > 24 * 3600
    assert endless.beat_s == Timeouts().beat_s


def test_restarts_are_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--max-restarts -1: it must be at least 0"):
        options("--strategy", "single", "--max-restarts", "-1")
    assert options("--strategy", "single")[0].max_restarts == 3
    monkeypatch.setenv("MANYHANDS_MAX_RESTARTS", "5")
    assert options("--strategy", "single")[0].max_restarts == 5


def test_trust_network_is_kept_by_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options()[0].trust_network is False
    given, resolved = options("--trust-network")
    assert given.trust_network is True
    assert options(before=resolved.sources)[0].trust_network is True
    assert options("--no-trust-network", before=resolved.sources)[0].trust_network is False
    monkeypatch.setenv("MANYHANDS_TRUST_NETWORK", "yes")
    assert options()[0].trust_network is True
    monkeypatch.setenv("MANYHANDS_TRUST_NETWORK", "perhaps")
    with pytest.raises(
        UsageError, match="MANYHANDS_TRUST_NETWORK=perhaps: it must be true or false"
    ):
        options()


def test_workers_are_a_number_or_a_range() -> None:
    assert (options("--workers", "3")[0].workers, options("--workers", "3")[0].min_workers) == (
        3,
        1,
    )
    given, resolved = options("--workers", "2:4")
    assert (given.workers, given.min_workers) == (4, 2)
    again = options(before=resolved.sources)[0]
    assert (again.workers, again.min_workers) == (4, 2)


def test_scaling_refers_to_the_workers_of_the_first_start() -> None:
    assert options()[0].scaling == Scaling("none", 2)
    given, resolved = options("--scale-batch", "linear", "--workers", "3")
    assert given.scaling == Scaling("linear", reference=3, warmup=100)
    again, _ = options("--workers", "5", before=resolved.sources)
    assert (again.workers, again.scaling.reference) == (5, 3)
    later, _ = options("--workers", "5", "--scale-batch", "sqrt", before=options()[1].sources)
    assert later.scaling == Scaling("sqrt", reference=2)
    one, _ = options("--scale-batch", "sqrt", "--scale-reference", "1", "--scale-warmup", "0")
    assert one.scaling == Scaling("sqrt", reference=1, warmup=0)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--scale-batch", "liner"], "one of none, linear, sqrt; did you mean 'linear'"),
        (["--scale-batch", "sqrt", "--scale-warmup", "-1"], "--scale-warmup -1: it must be at le"),
        (["--scale-batch", "sqrt", "--scale-reference", "0"], "--scale-reference 0: it must be a"),
        (["--scale-warmup", "5"], "--scale-warmup 5: nothing is scaled. Add  --scale-batch linear"),
        (
            ["--scale-batch", "linear", "--strategy", "ps:async"],
            "linear does not work with ps:async: each push is an update of its own",
        ),
        (["--scale-batch", "linear", "--strategy", "ps:ssp"], "--strategy ps:sync --scale-batch l"),
    ],
)
def test_invalid_scaling_is_refused(flags: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        options(*flags)
