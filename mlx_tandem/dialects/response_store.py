"""The store of responses, which later requests may continue. It is in memory and forgets the oldest ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mlx_tandem.errors import NotFound
from mlx_tandem.limits import MAX_STORED_BYTES, MAX_STORED_RESPONSES
from mlx_tandem.strict_json import dumps

Item = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """One response as JSON: its body, all items of the conversation up to its end, and its own items by their ids.

    `deltas` says in which pieces it was streamed; it is empty if it was not.
    """

    body: bytes
    conversation: bytes
    items: Mapping[str, bytes]
    deltas: bytes = b""

    @property
    def size(self) -> int:
        """The number of bytes."""
        return len(self.body) + len(self.conversation) + sum(map(len, self.items.values())) + len(self.deltas)


class ResponseStore:
    """The newest responses, at most `MAX_STORED_RESPONSES` in at most `MAX_STORED_BYTES`."""

    def __init__(self, most: int = MAX_STORED_RESPONSES, most_bytes: int = MAX_STORED_BYTES):
        self._most = most
        self._most_bytes = most_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._owners: dict[str, str] = {}  # the response of each item
        self._bytes = 0

    def put(
        self, id: str, body: bytes, conversation: Sequence[Item], output: Sequence[Item], deltas: bytes = b""
    ) -> None:
        """Keep a response, and forget the oldest ones that no longer fit. One that is too large is not kept."""
        items = {item["id"]: dumps(item) for item in output}
        stored = Stored(body, dumps([*conversation, *output]), items, deltas)
        if stored.size > self._most_bytes:
            return
        self._stored[id] = stored
        self._owners |= dict.fromkeys(items, id)
        self._bytes += stored.size
        while len(self._stored) > self._most or self._bytes > self._most_bytes:
            self._forget(next(iter(self._stored)))

    def get(self, id: str) -> Stored:
        """Return a response. Raises NotFound."""
        return self._get(id, "response_id")

    def body(self, id: str) -> bytes:
        """Return the JSON of a response. Raises NotFound."""
        return self.get(id).body

    def conversation(self, id: str) -> list[Item]:
        """Return all items up to the end of a response. Raises NotFound."""
        found: list[Item] = msgspec.json.decode(self._get(id, "previous_response_id").conversation)
        return found

    def item(self, id: str) -> Item | None:
        """Return an item of a response's output; None if no response has it."""
        owner = self._owners.get(id)
        if owner is None:
            return None
        found: Item = msgspec.json.decode(self._stored[owner].items[id])
        return found

    def delete(self, id: str) -> None:
        """Forget a response. Raises NotFound."""
        self._get(id, "response_id")
        self._forget(id)

    def _get(self, id: str, param: str) -> Stored:
        """Return a response. Raises NotFound naming `param`."""
        if id not in self._stored:
            raise NotFound(f"the response {id[:64]!a} does not exist here, or no longer", param=param)
        return self._stored[id]

    def _forget(self, id: str) -> None:
        stored = self._stored.pop(id)
        self._bytes -= stored.size
        for item in stored.items:
            del self._owners[item]
