"""How long a job trains, and how often it is evaluated: in epochs or in steps. Pure.

`steps` and `epochs` exclude each other. What is typed wins over the job file, and what is typed later (in a
resumed run) over what was typed before:

    job file             typed                  the training ends after
    epochs = 20                                 20 epochs
    epochs = 20          --set steps=500        500 steps; job.epochs is None
    steps = 500          --set epochs=3         3 epochs; job.steps is None
    neither                                     1 epoch
    both, or both typed                         an error
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from manyhands.errors import UsageError

if TYPE_CHECKING:
    from manyhands.job import Job

LENGTHS = STEPS, EPOCHS = ("steps", "epochs")
"""Fields for the length of the training. Also the units of `eval_every`."""
ONE_LENGTH = "training ends after a number of steps or of epochs"

_INTERVAL = re.compile(r"0*([1-9][0-9]{0,17})\s*(epochs?|steps?)?")


def choose_length(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the typed values of fields, where a typed length replaces the other one of the job file."""
    given = [name for name in LENGTHS if values.get(name) is not None]
    if len(given) > 1:
        both = " ".join(f"--set {name}={values[name]}" for name in given)
        raise UsageError(f"{both}: {ONE_LENGTH}. Type one of them:  --set steps={values[STEPS]}")
    return {**dict.fromkeys(LENGTHS), **values} if given else dict(values)


def merge_settings(before: Mapping[str, str], changed: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a resumed run: what is typed now replaces what was typed before."""
    replaced = LENGTHS if any(name in changed for name in LENGTHS) else ()
    kept = {name: value for name, value in before.items() if name not in replaced}
    return {**kept, **changed}


def source_of(field: str, settings: Mapping[str, str]) -> str:
    """Describe where the value of a field comes from."""
    if field in settings:
        return "--set"
    typed = [name for name in LENGTHS if field in LENGTHS and name in settings]
    return f"--set {typed[0]}" if typed else "job file"


def length_of(config: Mapping[str, Any]) -> str:
    """Return the field of a run's config.json that says when its training ends: STEPS or EPOCHS."""
    steps = config.get("fields", {}).get(STEPS, {}).get("value")
    return EPOCHS if steps is None else STEPS


def total_steps(job: Job, num_samples: int) -> int:
    """Return the number of steps of the whole training, in batches of the job's own size."""
    if job.steps is not None:
        return job.steps
    return steps_per_epoch(job, num_samples) * (job.epochs or 1)


def steps_per_epoch(job: Job, num_samples: int) -> int:
    return math.ceil(num_samples / job.batch_size)


def parse_interval(value: object) -> tuple[int, str]:
    """Parse `eval_every` into a number and its unit, STEPS or EPOCHS; raise ValueError for anything else."""
    text = "" if isinstance(value, bool) else str(value).strip().lower()
    match = _INTERVAL.fullmatch(text)
    if match is None:
        raise ValueError(value)
    return int(match[1]), STEPS if (match[2] or "").startswith("step") else EPOCHS


def is_interval(value: object) -> bool:
    try:
        parse_interval(value)
    except ValueError:
        return False
    return True
