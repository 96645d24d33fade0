"""Messages in gpt-oss's form as tests of other projects make them, and their text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from public.parsers import Tokens
from public.values import Unread


@dataclass(frozen=True)
class Message:
    """One message of an answer."""

    content: str
    channel: str = "final"
    recipient: str = ""
    kind: str = ""

    def public_attribute(self, name: str) -> Callable[[str], Message]:
        """Return a method for a test."""
        fields = {"with_channel": "channel", "with_recipient": "recipient", "with_content_type": "kind"}
        if name not in fields:
            raise Unread(f"the message's {name}")
        return lambda value: replace(self, **{fields[name]: str(value)})

    @property
    def text(self) -> str:
        """The text that the model writes for the message, behind its role."""
        to = f" to={self.recipient}" if self.recipient else ""
        kind = f" {self.kind}" if self.kind else ""
        end = "<|call|>" if self.recipient else "<|end|>"
        return f"{to}<|channel|>{self.channel}{kind}<|message|>{self.content}{end}"


def message(role: Any, content: Any) -> Message:
    """Return a message with a role and a content. Raises Unread for a content that is no text."""
    if not isinstance(content, str):
        raise Unread("a message that is no text")
    return Message(content)


def tokens_of(messages: Iterable[Message]) -> Any:
    """Return the tokens that a model writes for messages, behind the role of the first."""
    return Tokens().encode("<|start|>assistant".join(each.text for each in messages))


def text_of(messages: Iterable[Message]) -> str:
    """Return the text that a model writes for messages, behind the role of the first."""
    return Tokens().decode(tokens_of(messages))
