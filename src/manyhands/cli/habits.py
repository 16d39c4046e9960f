"""Flags that people know from other trainers, and what to type here instead."""

from __future__ import annotations

import ast
import dataclasses
import shlex
from collections.abc import Sequence
from contextlib import suppress

from manyhands.errors import JobError, UsageError
from manyhands.job import Job, find_job

WITH_SET = ("train", "resume", "launch")
SYNONYMS = {
    "learning_rate": "lr",
    "bs": "batch_size",
    "batch": "batch_size",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "n_epochs": "epochs",
    "wd": "weight_decay",
    "gradient_accumulation_steps": "accumulate",
    "accumulate_grad_batches": "accumulate",
    "gradient_clip_val": "clip_norm",
    "max_grad_norm": "clip_norm",
    "num_workers": "loader_processes",
}
"""Names in other trainers to fields of a job."""


def check_set(words: Sequence[str]) -> None:
    """Refuse `--set lr 0.1`: the value would be read as another argument."""
    if not words or words[0] not in WITH_SET:
        return
    for flag, name, value in zip(words, words[1:], words[2:], strict=False):
        if flag == "--set" and name.isidentifier() and not value.startswith("--"):
            if ".py" in value or "/" in value:  # the job or the run
                raise UsageError(f"--set {name}: write it as NAME=VALUE, such as  --set {name}=0.1")
            raise UsageError(
                f"--set {name} {value}: write it with an equals sign:  "
                f"--set {shlex.quote(f'{name}={value}')}"
            )


def fields_meant(flags: Sequence[str], words: Sequence[str]) -> dict[str, str]:
    """Map each unknown flag that is a field of the job to the NAME=VALUE that was meant, shell-quoted."""
    known = {"lr", *(field.name for field in dataclasses.fields(Job))}
    for word in words[1:]:
        if not word.startswith("-"):
            known |= _own_fields(word)
    meant = {}
    for flag in flags:
        name = flag.lstrip("-").replace("-", "_")
        name = name if name in known else SYNONYMS.get(name, "")
        if name in known:
            meant[flag] = shlex.quote(f"{name}={_value(flag, words)}")
    return meant


def _value(flag: str, words: Sequence[str]) -> str:
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag and equals:
            return value
        if name == flag:
            following = words[at + 1 : at + 2]
            return next((text for text in following if not text.startswith("--")), "true")
    return "true"


def _own_fields(reference: str) -> set[str]:
    """Return the annotated names in the classes of a job file, which is parsed but not run."""
    with suppress(JobError, OSError, SyntaxError, ValueError):
        tree = ast.parse(find_job(reference).path.read_text())
        return {
            line.target.id
            for cls in ast.walk(tree)
            if isinstance(cls, ast.ClassDef)
            for line in cls.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }
    return set()
