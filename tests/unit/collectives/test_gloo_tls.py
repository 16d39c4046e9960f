"""gloo over TLS: refused with a reason if torch was built without it, or if there are no certificates."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from manyhands.collectives import gloo_tls
from manyhands.errors import SpecError
from manyhands.transport import Authority


@pytest.fixture(autouse=True)
def _own_variables() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


REFUSED = """
from manyhands.collectives import gloo_tls
from manyhands.errors import SpecError
from manyhands.transport import Authority
try:
    gloo_tls.use_tls(Authority.create("test").issue("worker-0"))
except SpecError as error:
    print(error, gloo_tls.in_use())
"""


def test_a_torch_without_gloo_tls_is_refused_with_an_alternative() -> None:
    """In a process of its own: gloo looks once which transport to use."""
    command = [sys.executable, "-c", REFUSED]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if not text:
        pytest.skip("this torch has TLS in gloo")
    assert "was built without" in text
    assert "Use ps:sync" in text
    assert text.endswith(" False\n"), "a group that is formed all the same is an ordinary one"


def test_gloo_can_read_key_and_certificates() -> None:
    credentials = Authority.create("test").issue("worker-0")
    try:
        gloo_tls.use_tls(credentials)
    except SpecError:
        pass
    for name, variable in gloo_tls.FILES.items():
        with open(os.environ[f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{variable}"]) as file:
            assert file.read() == getattr(credentials, name)
