from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import RunningServer


@pytest.fixture(autouse=True)
def survives(server: RunningServer) -> Iterator[None]:
    """Whatever a test does, the same engine answers a normal request rightly afterwards and nothing is left over."""
    yield
    reply = server.chat("What is 12 + 5?", temperature=0)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == "12 + 5 = 17."
    health = server.client.get("/health").json()
    assert (health["status"], health["engine_restarts"], health["open_requests"]) == ("ok", 0, 0)
