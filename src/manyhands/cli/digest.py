"""The facts of a run for `list` and `show`, from its config, its summary and its events.

A run that is training, or was killed, has no summary; its events are read instead.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.coordinator.metric_monitor import formerly_lower, metric_name
from manyhands.events.history import History, read_history
from manyhands.runs import checkpoints
from manyhands.runs.folder import EVENTS, RunFolder

TRAINS, CUT_OFF = "training now", "cut off"
DONE = ("finished", "early-stopped")


@dataclass(frozen=True)
class Digest:
    path: Path
    job: str
    """As typed."""
    job_class: str
    changed: Mapping[str, str]
    """Fields set with --set."""
    strategy: str
    workers: Any
    started: str
    outcome: str
    limit: str | None
    """The flag that ended it, if the outcome is "limit" or "target"."""
    error: str | None
    seconds: float
    """Over all starts."""
    step: int
    epochs: float | None
    samples: int | None
    samples_per_s: float | None
    monitor: str
    """Such as "max accuracy"."""
    best: Mapping[str, Any] | None
    """Metrics of the best evaluation."""
    best_step: int | None
    final: Mapping[str, Any] | None
    history: History

    @property
    def best_value(self) -> float | None:
        """The monitored metric of the best evaluation."""
        value = (self.best or {}).get(metric_name(self.monitor))
        return float(value) if isinstance(value, int | float) else None

    @property
    def rank(self) -> tuple[bool, str, float]:
        """A sort key: by metric, the best first, runs without one last."""
        value = self.best_value
        if value is None or not math.isfinite(value):
            return (True, "", 0.0)
        lower = self.monitor.startswith("min ")
        return (False, metric_name(self.monitor), value if lower else -value)

    @property
    def best_checkpoint(self) -> Path | None:
        """Its path, if it is on disk."""
        if self.best_step is None:
            return None
        path = checkpoints.final(self.path, self.best_step)
        return path if path.is_dir() else None

    @property
    def last_checkpoint(self) -> Path | None:
        steps = checkpoints.steps(self.path)
        return checkpoints.final(self.path, steps[-1]) if steps else None

    @property
    def resume_command(self) -> str | None:
        if self.outcome in (*DONE, TRAINS) or self.history.ended:
            return self.history.resume_command
        return f"manyhands resume {shlex.quote(str(self.path))}"

    def to_dict(self) -> dict[str, Any]:
        """Return the facts for `--json`."""
        best, last = self.best_checkpoint, self.last_checkpoint
        renamed = ("path", "job_class", "step", "history")
        return {
            "run": str(self.path),
            "class": self.job_class,
            **{name: value for name, value in vars(self).items() if name not in renamed},
            "seconds": round(self.seconds, 3),
            "steps": self.step,
            "num_steps": self.history.num_steps,
            "best_checkpoint": None if best is None else str(best),
            "last_checkpoint": None if last is None else str(last),
            "lost": [vars(each) for each in self.history.lost],
            "resume_command": self.resume_command,
        }


def digest(run: RunFolder, *, with_steps: bool) -> Digest:
    """Read a run. Raises RunFolderError, KeyError or TypeError if it is not readable."""
    config, trains = run.config, run.locked
    summary = None if trains else run.summary  # else that of an earlier start
    history = read_history(run.path / EVENTS, with_steps=with_steps or summary is None)
    known = summary or {}
    job, options = config["job"], config["options"]
    reference = str(job["reference"])
    _, _, name = reference.partition(":")
    best = dict(known.get("best_metrics") or {})
    best_step = best.pop("step", None)
    if not best and (found := history.best) is not None:
        best, best_step = dict(found["metrics"]), found["step"]
    last = history.evaluations[-1]["metrics"] if history.evaluations else None
    speed = known.get("samples_per_s")
    if speed is None and history.train_s > 0:
        speed = round(history.samples / history.train_s, 1)
    return Digest(
        path=run.path,
        job=reference,
        job_class=str(job.get("class") or name),
        changed={str(key): str(value) for key, value in config.get("settings", {}).items()},
        strategy=str(options["strategy"]["value"]),
        workers=options["workers"]["value"],
        started=str(config.get("created", "")),
        outcome=str(known.get("outcome") or (TRAINS if trains else CUT_OFF)),
        limit=known.get("limit"),
        error=known.get("error") or history.failure,
        seconds=history.seconds or known.get("wall_s") or 0.0,
        step=known["steps"] if known.get("steps") is not None else history.step,
        epochs=known.get("epochs"),
        samples=known.get("samples") or history.samples or None,
        samples_per_s=speed,
        monitor=_monitor(config, known),
        best=best or None,
        best_step=best_step,
        final=known.get("final_metrics") or last,
        history=history,
    )


def _monitor(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return the metric with its direction; old runs implied it by the metric's name."""
    monitor = summary.get("monitor") or config.get("fields", {}).get("monitor", {}).get("value")
    text = str(monitor or "loss")
    if text.startswith(("min ", "max ")):
        return text
    return f"{'min' if formerly_lower(text) else 'max'} {text}"
