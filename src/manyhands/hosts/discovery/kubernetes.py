"""Pods of an Indexed Job or a JobSet, with the variables that `manyhands launch kubernetes` sets. Pure.

    JOB_COMPLETION_INDEX     the pod's number; Kubernetes sets it
    MANYHANDS_PODS           how many pods there are
    MANYHANDS_COORDINATOR    HOST:PORT of pod 0, where HOST is its name in the headless service
    MANYHANDS_SLOTS          how many members a pod takes (default: 1)

The index alone is not enough: it gives neither the number of pods nor their names.
"""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.errors import ClusterError
from manyhands.hosts.discovery import values
from manyhands.hosts.spec import ClusterSpec

INDEX = "JOB_COMPLETION_INDEX"
PODS, FIRST, SLOTS = "MANYHANDS_PODS", "MANYHANDS_COORDINATOR", "MANYHANDS_SLOTS"
MAX_SLOTS = 1024


def applies(environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in (PODS, FIRST))


def read(environ: Mapping[str, str], *, hostname: str = "") -> ClusterSpec:
    for name in (INDEX, PODS, FIRST):
        if name not in environ:
            given = PODS if PODS in environ else FIRST
            raise ClusterError(
                f"{given} is set, but {name} is not: pods of a job need {INDEX} (an Indexed Job has "
                f"it), {PODS} and {FIRST}. Write the file with  manyhands launch kubernetes."
            )
    pods = values.number(environ, PODS, least=1, most=values.MAX_ENTRIES)
    rank = values.number(environ, INDEX)
    if rank >= pods:
        raise ClusterError(
            f"{INDEX} is {rank} and {PODS} is {pods}: pods go from 0 to {pods - 1}. {PODS} must be "
            "what the Job has as completions and parallelism."
        )
    slots = values.number(environ, SLOTS, least=1, most=MAX_SLOTS, default=1)
    try:
        where, port = values.split_address(environ[FIRST].strip())
    except ValueError as error:
        raise ClusterError(
            f"{FIRST} is {environ[FIRST]!r}: {error}. It is like  digits-0.digits:29600."
        ) from None
    hosts = [_sibling(where, number) for number in range(pods)]
    if rank:
        hosts[rank] = hostname
    entries = values.ranked_entries("pod", ((host, 0) for host in hosts), slots=slots)
    return ClusterSpec(entries, host=where, port=port, source="Kubernetes", mine=entries[rank])


def _sibling(first: str, number: int) -> str:
    """Return the name of a pod, from that of pod 0: digits-0.digits, digits-1.digits, ..."""
    pod, dot, service = first.partition(".")
    if number == 0:
        return first
    return f"{pod[:-1]}{number}{dot}{service}" if pod.endswith("-0") else ""
