"""Placement groups of the stub."""

from __future__ import annotations

from typing import Any


def placement_group(bundles: list[dict[str, float]], strategy: str) -> Any:
    return object()


def remove_placement_group(group: Any) -> None: ...
