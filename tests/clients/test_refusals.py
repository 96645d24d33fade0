"""Every field of the request types of `openai` and `anthropic`: docs/refusals.md says what becomes of it."""

from __future__ import annotations

import pytest

from scripts.refusals import PAGE, page, walked
from tests.clients import lazily

lazily.imported("anthropic")


@pytest.fixture(scope="module")
def walks(server):
    return walked(server.client)


def test_every_answer_accepts_the_field_or_names_it(walks):
    assert [one for walk in walks for one in walk.unnamed] == []


def test_the_walk_sees_fields_at_every_depth(walks):
    found = {walk.api.name: walk.lines for walk in walks}
    assert len(found["Responses"]) > 150 and len(found["Messages"]) > 150 and len(found["Chats"]) > 100
    assert "messages[assistant].tool_calls[function].function.arguments" in found["Chats"]
    assert "messages[user].content[tool_result].content[text].text" in found["Messages"]
    assert found["Responses"]["background"].accepted == [False]
    assert found["Responses"]["background"].refused == [True]


def test_the_page_is_what_the_server_does(walks):
    assert page(walks) == PAGE.read_text(encoding="utf-8"), "run: make clients"
