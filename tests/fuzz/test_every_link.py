"""Every set of messages in the package is fuzzed, and messages are derived from its annotations alone."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest
from variants import Dialect, sample, variants

import manyhands
from manyhands.errors import ProtocolError
from manyhands.transport.fields import MessageSet

VOCABULARY = {"role": ("worker",), "slots": (1,), "nonce": ("0" * 64,), "proof": ("f" * 64,)}
"""Formats that a generator does not find by chance."""


def modules() -> list[ModuleType]:
    found = []
    for info in pkgutil.walk_packages(manyhands.__path__, "manyhands."):
        if "messages" in info.name or "MessageSet(" in source(info):
            found.append(importlib.import_module(info.name))
    return found


def source(info: pkgutil.ModuleInfo) -> str:
    path = Path(manyhands.__path__[0]).parent / Path(*info.name.split("."))
    path = path / "__init__.py" if info.ispkg else path.with_suffix(".py")
    return path.read_text()


def message_sets() -> dict[str, MessageSet]:
    return {
        f"{module.__name__}.{name}": value
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, MessageSet)
    }


def dialects() -> list[Dialect]:
    tests = [importlib.import_module(path.stem) for path in Path(__file__).parent.glob("test_*.py")]
    return [value for test in tests for value in vars(test).values() if isinstance(value, Dialect)]


def test_every_set_of_messages_is_fuzzed_on_its_link() -> None:
    found = message_sets()
    assert found
    fuzzed = [id(dialect.messages) for dialect in dialects()]
    missing = sorted({name for name, each in found.items() if id(each) not in fuzzed})
    assert not missing, f"no test in tests/fuzz has a Dialect of {missing}"


@pytest.mark.parametrize("dialect", dialects(), ids=lambda dialect: dialect.name)
def test_broken_messages_are_refused_and_good_ones_are_read(dialect: Dialect) -> None:
    for variant in variants(dialect, vocabulary=VOCABULARY):
        if not variant.flaw:
            dialect.accepts(variant.head)
        elif "payload" not in variant.flaw and "unknown field" not in variant.flaw:
            with pytest.raises(ProtocolError):
                dialect.accepts(variant.head)


def test_messages_are_the_same_for_the_same_seed() -> None:
    dialect = next(each for each in dialects() if each.name == "agent to coordinator")

    def some(seed: int) -> list[str]:
        return list(map(str, sample(variants(dialect, seed=seed, vocabulary=VOCABULARY), each=9)))

    assert some(1) == some(1)
    assert some(1) != some(2)
