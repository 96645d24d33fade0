"""The `@anthropic-ai/sdk` package for Node, unmodified."""

from __future__ import annotations

import json

import pytest

from tests.clients import node
from tests.clients.weather import is_answer, question

node.needs("@anthropic-ai/sdk")


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner(server, elsewhere, stream):
    """It asks for a thread first, which this server does not keep."""
    asked = {"model": "shout", "question": question("Oslo"), "stream": stream}
    found = node.run("tool_runner.mjs", server.url, json.dumps(asked), environment=elsewhere.environment)
    assert found["cities"] == ["Oslo"]
    (text,) = found["content"]
    assert is_answer(text["text"], "Oslo")
    assert found["stop"] == "end_turn"
    assert found["streamed"] == (text["text"] if stream else "")
