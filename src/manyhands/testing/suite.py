"""Runs the conformance suite on a strategy, in this process: the first thing to do with one of your own.

    from manyhands.testing.suite import check_strategy

    check_strategy(Mine)                      a Strategy, on two and three workers
    check_strategy("mine(every=4)")           one that is in the registry, with its options

    python -m manyhands.testing.suite mypackage.mine:Mine --workers 2 4

Which checks are made depends on the traits that the strategy declares and on what it refuses. Members are
threads (thread_members.py), so all of it takes some ten seconds. What only processes show is in
conformance.py: kills in the middle of anything, and bytes on the wire.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from manyhands.contract import Strategy
from manyhands.strategies.registry import STRATEGIES, spec_of
from manyhands.testing.conformance import (
    ACCURACY,
    PAIRS,
    Case,
    Check,
    checks_for,
    checks_of_pairs,
)
from manyhands.testing.in_process import folder_in_memory


@dataclass(frozen=True)
class CheckResult:
    """What a check of a strategy has found."""

    check: str
    workers: int
    seconds: float
    error: str = ""
    """The traceback of what failed; empty if it passed."""

    def __str__(self) -> str:
        verdict = "FAILED" if self.error else "passed"
        return f"{self.check:<40} {self.workers} workers  {verdict}  {self.seconds:5.2f} s"


def checks_of(case: Case) -> list[Check]:
    """Return all checks that a strategy has to pass: of its traits, and of the features that it does not
    refuse."""
    works, tried = set(checks_of_pairs(case)), set(PAIRS.values())
    checks = dict.fromkeys([*checks_for(case), *PAIRS.values()])
    return [check for check in checks if check in works or check not in tried]


def check_strategy(
    strategy: str | type[Strategy] | Strategy,
    *,
    workers: Sequence[int] = (2, 3),
    accuracy: float = ACCURACY,
    raises: bool = True,
) -> list[CheckResult]:
    """Make all checks of the suite on a strategy, and print a line for each.

    Args:
        strategy: A spec, or a config, or the class of one; it need not be in the registry.
        workers: Numbers of workers to try.
        accuracy: What it must reach on the digits if it does not equal `single`.
        raises: If true, raise an AssertionError with all failures at the end.
    """
    results: list[CheckResult] = []
    with _registered(strategy) as spec, folder_in_memory() as folder:
        for number in workers:
            case = Case(spec, workers=number, accuracy=accuracy, in_process=True)
            for check in checks_of(case):
                results.append(_result(case, check, folder / f"{number}-{check.__name__}"))
                print(results[-1], flush=True)
    failed = [result for result in results if result.error]
    seconds = sum(result.seconds for result in results)
    print(
        f"{spec}: {len(results) - len(failed)} of {len(results)} checks passed in {seconds:.1f} s"
    )
    if failed and raises:
        texts = [f"{result.check} on {result.workers} workers\n{result.error}" for result in failed]
        raise AssertionError("\n".join(texts))
    return results


def _result(case: Case, check: Check, folder: Path) -> CheckResult:
    folder.mkdir()
    began = time.monotonic()
    try:
        check(case, folder)
        error = ""
    except Exception:  # of the strategy, or of the assertions
        error = traceback.format_exc()
    return CheckResult(check.__name__, case.workers, time.monotonic() - began, error)


@contextmanager
def _registered(strategy: str | type[Strategy] | Strategy) -> Iterator[str]:
    """Yield the spec of a strategy, which is in the registry for the time of the context."""
    if isinstance(strategy, str):
        yield strategy
        return
    cls = strategy if isinstance(strategy, type) else type(strategy)
    before = STRATEGIES.get(cls.name)
    STRATEGIES[cls.name] = cls
    try:
        yield cls.name if isinstance(strategy, type) else spec_of(strategy)
    finally:
        if before is None:
            del STRATEGIES[cls.name]
        else:
            STRATEGIES[cls.name] = before


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m manyhands.testing.suite", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("strategy", help="a spec, or MODULE:CLASS of a Strategy of your own")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3], metavar="N")
    parser.add_argument("--accuracy", type=float, default=ACCURACY, help="default: %(default)s")
    given = parser.parse_args(arguments)
    module, _, name = given.strategy.rpartition(":")
    strategy: str | type[Strategy] = given.strategy
    if module and given.strategy.partition("(")[0] not in STRATEGIES:
        sys.path.insert(0, "")
        strategy = getattr(importlib.import_module(module), name)
    results = check_strategy(strategy, workers=given.workers, accuracy=given.accuracy, raises=False)
    for result in results:
        if result.error:
            print(f"\n{result.check} on {result.workers} workers\n{result.error}")
    return int(any(result.error for result in results))


if __name__ == "__main__":
    sys.exit(main())
