"""The language of `--chaos`: which faults are injected, into which members, and when. Pure.

chaos    = clause (";" clause)*
clause   = fault [timing]  |  "seed" N
fault    = "kill" target                            SIGKILL
         | "pause" target duration                  SIGSTOP, then SIGCONT
         | "cut link" ["of" target] [duration]      one TCP connection of a member is reset; with a
                                                    duration, repeatedly for that time
target   = "worker" | "server" | "member" | a name such as worker-1
timing   = "every" duration | "at" duration | "after step" N | "once"
duration = 500ms, 2s, 1m

Times count from the first step of this start. `once` is some moment of the first minute; a clause
without a timing happens every 10 s. `seed` makes the choices repeatable: each clause draws its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.errors import UsageError, closest
from manyhands.events.units import parse_time, show_time
from manyhands.hosts.view import SERVER, WORKER

KILL, PAUSE, CUT = "kill", "pause", "cut link"
EVERY, AT, AFTER_STEP, ONCE = "every", "at", "after step", "once"
MEMBER = "member"
TARGETS = (WORKER, SERVER, MEMBER)
EXAMPLE = "kill worker every 10s; pause server 2s; cut link"
WORKERS_LEFT = 2
"""A kill leaves this many, and one server if there are any."""

GRAMMAR = """\
--chaos "CLAUSE; CLAUSE; ...", each of them a fault and when it happens, or  seed N:
  kill TARGET                    SIGKILL
  pause TARGET DURATION          SIGSTOP, then SIGCONT after DURATION
  cut link [of TARGET]           reset one TCP connection of a member; with a
                                 DURATION, repeatedly for that time
  TARGET    worker, server (a dedicated one), member, or a name such as worker-1
  when      every 10s (default), at 30s, after step 100, or once (in the first minute)
  DURATION  500ms, 2s, 1m
"""


@dataclass(frozen=True)
class FaultTiming:
    kind: str = EVERY
    value: float = 10.0
    """Seconds, or a step; nothing for `once`."""

    def __str__(self) -> str:
        if self.kind == ONCE:
            return ONCE
        value = str(int(self.value)) if self.kind == AFTER_STEP else show_time(self.value)
        return f"{self.kind} {value}"


@dataclass(frozen=True)
class FaultClause:
    fault: str
    target: str = MEMBER
    length_s: float = 0.0
    timing: FaultTiming = FaultTiming()

    def __str__(self) -> str:
        words = [self.fault, f"of {self.target}" if self.fault == CUT else self.target]
        if self.length_s:
            words.append(show_time(self.length_s))
        return " ".join([*words, str(self.timing)])


@dataclass(frozen=True)
class FaultSpec:
    clauses: tuple[FaultClause, ...]
    seed: int | None = None

    def __str__(self) -> str:
        seed = [] if self.seed is None else [f"seed {self.seed}"]
        return "; ".join([*map(str, self.clauses), *seed])


def possible_targets(
    clause: FaultClause, workers: Sequence[str], servers: Sequence[str]
) -> list[str]:
    """Return the members that a clause may hit: a kill leaves enough of them to continue."""
    if clause.fault == KILL:
        can_die = len(workers) > WORKERS_LEFT, len(workers) >= WORKERS_LEFT and len(servers) > 1
        workers, servers = workers if can_die[0] else (), servers if can_die[1] else ()
    eligible = {WORKER: workers, SERVER: servers}.get(clause.target, [*workers, *servers])
    return [name for name in eligible if clause.target in (*TARGETS, name)]


def check(chaos: FaultSpec, *, workers: int, servers: int) -> None:
    """Refuse faults that could never happen in such a run."""
    for clause in chaos.clauses:
        role = clause.target.partition("-")[0]
        if role == SERVER and not servers:
            raise UsageError(
                f'--chaos "{clause}": this run has no dedicated servers. Use worker or member, or '
                "--strategy 'ps:sync(placement=dedicated)'."
            )
        anybody = FaultClause(clause.fault, role)
        if not possible_targets(anybody, ["worker"] * workers, ["server"] * servers):
            raise UsageError(
                f'--chaos "{clause}": a kill leaves {WORKERS_LEFT} workers, and a server if there are any; '
                f"this run has {workers} workers and {servers} servers. "
                + ("Use two servers." if role == SERVER else f"Use  --workers {WORKERS_LEFT + 1}.")
            )


# The parser ---------------------------------------------------------------------------------------


def parse_chaos(text: str) -> FaultSpec:
    clauses: list[FaultClause] = []
    seed: int | None = None
    for part in filter(str.strip, text.split(";")):
        words = _Words(part)
        if not words.accept("seed"):
            clauses.append(_clause(words))
            continue
        if seed is not None:
            raise words.error("the seed is given twice.", "one of them")
        seed = words.number("seed 7")
        words.end("seed 7")
    if not clauses:
        raise UsageError(f'--chaos "{text}": it names no fault. Write  --chaos "{EXAMPLE}".')
    return FaultSpec(tuple(clauses), seed)


_NAME = re.compile(f"({WORKER}|{SERVER})-[0-9]+")


class _Words:
    """The words of a clause that are not parsed yet."""

    def __init__(self, clause: str) -> None:
        self._clause = " ".join(clause.split())
        self._left = clause.lower().split()

    @property
    def next(self) -> str:
        return self._left[0] if self._left else ""

    def accept(self, word: str) -> bool:
        there = self.next == word
        if there:
            self._left.pop(0)
        return there

    def error(self, complaint: str, example: str) -> UsageError:
        return UsageError(f'--chaos "{self._clause}": {complaint} Write  {example}.')

    def unknown(self, what: str, allowed: Sequence[str], example: str) -> UsageError:
        near = closest(self.next, allowed) if self.next else "."
        return self.error(f"{self._no(what)}{near} There are: {', '.join(allowed)}.", example)

    def number(self, example: str) -> int:
        if not re.fullmatch("[0-9]{1,18}", self.next):
            raise self.error(self._no("whole number") + ".", example)
        return int(self._left.pop(0))

    def duration(self, example: str) -> float:
        try:
            seconds = parse_time(self.next)
        except ValueError:
            complaint = f"{self._no('duration')}, such as 500ms, 2s or 1m."
            raise self.error(complaint, example) from None
        self._left.pop(0)
        return seconds

    def target(self, example: str) -> str:
        if self.next not in TARGETS and not _NAME.fullmatch(self.next):
            raise self.unknown("target", (*TARGETS, f"{WORKER}-0", f"{SERVER}-0"), example)
        return self._left.pop(0)

    def _no(self, what: str) -> str:
        return f"{self.next!r} is not a {what}" if self.next else f"the {what} is missing"

    def end(self, example: str) -> None:
        if self._left:
            raise self.error(f"{' '.join(self._left)!r} is not expected here.", example)


def _clause(words: _Words) -> FaultClause:
    if words.accept("kill"):
        fault, target, length_s = KILL, words.target("kill worker"), 0.0
        example = "kill worker every 10s"
    elif words.accept("pause"):
        fault, target = PAUSE, words.target("pause worker 2s")
        length_s = words.duration(f"pause {target} 2s every 10s")
        example = "pause worker 2s every 10s"
    elif words.accept("cut"):
        example = "cut link of worker-1 every 10s"
        if not words.accept("link"):
            raise words.error("only a link can be cut.", example)
        fault, target = CUT, words.target(example) if words.accept("of") else MEMBER
        length_s = words.duration(example) if words.next[:1].isdigit() else 0.0
    else:
        raise words.unknown("fault", (KILL, PAUSE, CUT, "seed"), EXAMPLE)
    clause = FaultClause(fault, target, length_s, _timing(words, example))
    words.end(example)
    return clause


def _timing(words: _Words, example: str) -> FaultTiming:
    if not words.next:
        return FaultTiming()
    if words.accept("every"):
        return FaultTiming(EVERY, words.duration(example))
    if words.accept("at"):
        return FaultTiming(AT, words.duration("at 30s"))
    if words.accept("once"):
        return FaultTiming(ONCE, 0.0)
    if words.accept("after"):
        if not words.accept("step"):
            raise words.error("a step is missing.", "after step 100")
        return FaultTiming(AFTER_STEP, words.number("after step 100"))
    raise words.unknown("moment", (EVERY, AT, AFTER_STEP, ONCE), example)
