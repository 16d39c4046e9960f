"""Stands in for Ray in the fuzz test of the broker: a cluster of one node, whose actors never return."""

from __future__ import annotations

from typing import Any

from ray import exceptions, util  # noqa: F401


class Anything:
    """An actor, a class of actors, a result."""

    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self, *args: Any, **options: Any) -> Any:
        return Anything()


def remote(actor: type) -> Any:
    return Anything()


def get_runtime_context() -> Any:
    context = Anything()
    context.gcs_address = "127.0.0.1:1"
    return context


init = kill = shutdown = get = Anything()


def nodes() -> list[dict[str, Any]]:
    return []


def wait(results: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
    return [], results


def available_resources() -> dict[str, float]:
    return {"CPU": 1.0}


cluster_resources = available_resources
