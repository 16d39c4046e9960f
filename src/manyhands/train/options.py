"""How a job is trained, apart from what the job and the strategy say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Options:
    job: str
    """path.py or path.py:Name"""
    strategy: str
    """The spec."""
    workers: int
    settings: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    threads: int = 1
    """Compute threads of each worker."""
    checkpoint_every: int = 0
    """Steps between checkpoints besides those after each epoch."""
    keep: int = 3
    """How many of the newest checkpoints are kept, besides the best."""
    rehearse: bool = False
    """Do everything but train."""
