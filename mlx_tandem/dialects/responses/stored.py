"""Handing out and removing the responses of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.response_store import Stored
from mlx_tandem.dialects.responses.bodies import ItemsQuery, RetrieveQuery
from mlx_tandem.dialects.responses.items import Item
from mlx_tandem.dialects.responses.replay import replayed
from mlx_tandem.errors import InvalidRequest, NotFound
from mlx_tandem.strict_json import dumps


def retrieve(front: ServerFront, response_id: str, query: RetrieveQuery) -> bytes | Iterator[bytes]:
    """Return a response from the store, or its events. Raises NotFound and InvalidRequest."""
    if query.stream:
        return replayed(front.responses.get(response_id), query.starting_after)
    if query.starting_after is not None:
        raise InvalidRequest("starting_after needs stream to be true", param="starting_after")
    return front.responses.body(response_id)


def delete(front: ServerFront, response_id: str) -> dict[str, Any]:
    """Remove a response from the store. Raises NotFound."""
    front.responses.delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


async def input_items(front: ServerFront, response_id: str, query: ItemsQuery) -> bytes:
    """Return a page of the items that a response of the store was made from, including those of earlier responses.

    Raises NotFound for the response, and for an item that `after` names.
    """
    # A page may have as many bytes as several bodies, so they are made one after another.
    async with front.responses.turn:
        return await asyncio.to_thread(_page, response_id, front.responses.get(response_id), query)


class _Named(Struct):
    """An item as far as its id."""

    id: str | None = None


def _page(response_id: str, stored: Stored, query: ItemsQuery) -> bytes:
    """Return a page of the items of a response's input as JSON. Only the items of the page are decoded."""
    named = [item.id for items in stored.input for item in msgspec.json.decode(items, type=list[_Named])]
    raw = [item for items in stored.input for item in msgspec.json.decode(items, type=list[msgspec.Raw])]
    made = f"in_{response_id.partition('_')[2]}"
    ids = [id or f"{made}{i:04d}" for i, id in enumerate(named)]
    order = list(range(len(ids)))
    if query.order == "desc":
        order.reverse()
    if query.after is not None:
        if query.after not in ids:
            raise NotFound(f"this response has no input item {query.after[:64]!a}", param="after")
        order = order[order.index(ids.index(query.after)) + 1 :]
    page = order[: query.limit]
    found = {
        "object": "list",
        "data": [_listed(msgspec.json.decode(raw[i]), ids[i]) for i in page],
        "first_id": ids[page[0]] if page else None,
        "last_id": ids[page[-1]] if page else None,
        "has_more": len(order) > len(page),
    }
    return dumps(found)


def _listed(item: Item, id: str) -> Item:
    """Return an item in the form in which OpenAI's API lists it: with an id, and a message as a list of parts."""
    kind = item.get("type") or "message"
    listed: Item = {"status": "completed"} | item | {"id": id, "type": kind}
    if kind == "message":
        content = item["content"]
        said = {"type": "output_text", "annotations": [], "logprobs": []} if item["role"] == "assistant" else {}
        if isinstance(content, str):
            listed["content"] = [{"type": "input_text", "text": content} | said]
        elif said:
            # Those of earlier responses have no logprobs in the store.
            listed["content"] = [said | part if part["type"] == "output_text" else part for part in content]
    if kind == "reasoning":
        listed["summary"] = item.get("summary") or []
    return listed
