"""Messages of a conversation: what is read of them, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.messages import chat_messages


def test_an_earlier_refusal_is_the_text_of_its_message() -> None:
    parts = [{"type": "text", "text": "No. "}, {"type": "refusal", "refusal": "I will not."}]
    (made,) = chat_messages([{"role": "assistant", "content": parts}])
    assert made["content"] == "No. I will not."


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "tool_calls": [{"type": "custom", "id": "x"}]}, "messages[0].tool_calls[0].type"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].image_url"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages[0].content[0].refusal"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        chat_messages([message])
    assert found.value.param == param
