"""Scheduling strategies of the stub."""

from __future__ import annotations

from typing import Any


class PlacementGroupSchedulingStrategy:
    def __init__(self, group: Any, **options: Any) -> None: ...
