"""The `ai` package for Node with `@ai-sdk/openai-compatible`, unmodified."""

from __future__ import annotations

import pytest

from tests.clients import node
from tests.clients.weather import is_answer

node.needs("ai")


@pytest.mark.parametrize("way", ["generateObject", "generateText"])
def test_an_object_with_any_keys(server, elsewhere, way):
    """The package writes the schema of a record with `propertyNames`."""
    found = node.run("ai_sdk.mjs", server.url, way, environment=elsewhere.environment)
    assert found["object"] == {"name": "Ana", "age": 34, "city": "Oslo"}
    assert found["usage"]["outputTokens"] > 10


def test_a_stream_with_a_tool(server, elsewhere):
    found = node.run("ai_sdk.mjs", server.url, "streamText", environment=elsewhere.environment)
    assert found["cities"] == ["Oslo"]
    assert is_answer("".join(found["pieces"]), "Oslo")
    assert len(found["pieces"]) > 5
    assert (found["finish"], found["steps"]) == ("stop", 2)
