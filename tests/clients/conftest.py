"""Clients of others, kept to this machine: to fetch or report elsewhere is switched off, and fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import loopback
from tests.clients.elsewhere import Elsewhere
from tests.clients.elsewhere import elsewhere as listening

# Read when the packages are imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LITELLM_TELEMETRY"] = "False"
os.environ["LANGSMITH_TRACING"] = "false"
os.environ["LANGCHAIN_TRACING_V2"] = "false"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder: they need the clients."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("programs")


@pytest.fixture(scope="session")
def guarded() -> None:
    loopback.guard()


@pytest.fixture(autouse=True)
def loopback_only(guarded: None) -> Iterator[None]:
    """Libraries swallow errors of what they do in passing, so the attempts are looked at too."""
    del loopback.tried[:]
    yield
    assert not loopback.tried


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    """The environment for a program that must not reach for anything but this machine."""
    with listening() as found:
        yield found
    assert not found.tried
