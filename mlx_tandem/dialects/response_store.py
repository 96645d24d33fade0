"""The store of responses, which later requests may continue. It is in memory and forgets the oldest ones."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mlx_tandem.errors import NotFound, TooLarge
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.limits import MAX_MESSAGES, MAX_STORED_BYTES, MAX_STORED_RESPONSES
from mlx_tandem.strict_json import dumps

Item = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """The items of a conversation as JSON: a list of items for each request, shared with the responses before it."""

    requests: tuple[bytes, ...] = ()
    count: int = 0  # items

    @property
    def size(self) -> int:
        """The number of bytes."""
        return sum(map(len, self.requests))

    def followed_by(self, items: Sequence[Item]) -> Conversation:
        """Return the conversation with the items of one more request, or with those of the answer to its last one."""
        return Conversation((*self.requests, dumps(items)), self.count + len(items)) if items else self


@dataclass(frozen=True)
class Stored:
    """One response as JSON: its body, all items of the conversation up to its end, and its own items by their ids.

    `deltas` says in which pieces it was streamed; it is empty if it was not. `owner` is the tenant it was made for.
    """

    body: bytes
    conversation: Conversation
    items: Mapping[str, bytes]
    deltas: bytes = b""
    owner: str = ""

    @property
    def input(self) -> tuple[bytes, ...]:
        """The items that the response was made from: the lists of the conversation without that of the answer."""
        return self.conversation.requests[:-1] if self.items else self.conversation.requests

    @property
    def size(self) -> int:
        """The number of bytes. What a conversation shares with other responses counts for each of them."""
        return len(self.body) + self.conversation.size + sum(map(len, self.items.values())) + len(self.deltas)


class ResponseStore:
    """The newest responses, at most `MAX_STORED_RESPONSES` in at most `MAX_STORED_BYTES`. It belongs to one event loop.

    Nothing is decoded before its size is known. A caller sees the responses of its own tenant only; for others they do
    not exist.
    """

    def __init__(self, most: int = MAX_STORED_RESPONSES, most_bytes: int = MAX_STORED_BYTES):
        self._most = most
        self._most_bytes = most_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._responses: dict[str, str] = {}  # the response of each item
        self._bytes = 0
        self.turn = asyncio.Lock()
        """Held while a long conversation is put together, so that the loop can do other work between two of them."""

    def put(
        self,
        id: str,
        body: bytes,
        conversation: Conversation,
        output: Sequence[Item],
        deltas: bytes = b"",
        owner: str = "",
    ) -> None:
        """Keep a response for the tenant `owner`, and forget the oldest ones that no longer fit. One that is too large
        is not kept.

        `conversation` ends with the items of the request. The logprobs of `output` are kept in `body` only, since no
        prompt has them.
        """
        kept = [_without_logprobs(item) for item in output]
        items = {item["id"]: dumps(item) for item in kept}
        stored = Stored(body, conversation.followed_by(kept), items, deltas, owner)
        if stored.size > self._most_bytes:
            return
        self._stored[id] = stored
        self._responses |= dict.fromkeys(items, id)
        self._bytes += stored.size
        while len(self._stored) > self._most or self._bytes > self._most_bytes:
            self._forget(next(iter(self._stored)))

    def get(self, id: str) -> Stored:
        """Return a response. Raises NotFound."""
        return self._get(id, "response_id")

    def body(self, id: str) -> bytes:
        """Return the JSON of a response. Raises NotFound."""
        return self.get(id).body

    def conversation(self, id: str, most_bytes: int) -> Conversation:
        """Return all items up to the end of a response. Raises NotFound, and TooLarge for a longer conversation."""
        param = "previous_response_id"
        found = self._get(id, param).conversation
        if found.count > MAX_MESSAGES:
            raise TooLarge(f"{param}: the conversation has over {MAX_MESSAGES} items", param=param)
        if found.size > most_bytes:
            raise TooLarge(f"{param}: the conversation has over {most_bytes} bytes", param=param)
        return found

    async def decoded(self, conversation: Conversation) -> list[Item]:
        """Return the items of a conversation. The loop can do other work between the requests."""
        items: list[Item] = []
        for request in conversation.requests:
            items += msgspec.json.decode(request)
            await asyncio.sleep(0)
        return items

    def item(self, id: str) -> bytes | None:
        """Return the JSON of an item of a response's output; None if no response that the caller sees has it."""
        found = self._stored.get(self._responses.get(id, ""))
        return found.items[id] if found is not None and CALLER.get().sees(found.owner) else None

    def delete(self, id: str) -> None:
        """Forget a response. Raises NotFound."""
        self._get(id, "response_id")
        self._forget(id)

    def _get(self, id: str, param: str) -> Stored:
        """Return a response. Raises NotFound naming `param`."""
        found = self._stored.get(id)
        if found is None or not CALLER.get().sees(found.owner):
            raise NotFound(f"the response {id[:64]!a} does not exist here, or no longer", param=param)
        return found

    def _forget(self, id: str) -> None:
        stored = self._stored.pop(id)
        self._bytes -= stored.size
        for item in stored.items:
            del self._responses[item]


def _without_logprobs(item: Item) -> Item:
    """Return an item of an answer without the logprobs of its parts."""
    if "content" not in item:
        return item
    return item | {"content": [{k: v for k, v in part.items() if k != "logprobs"} for part in item["content"]]}
