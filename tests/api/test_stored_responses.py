"""Responses of the store over HTTP: their events, and the items that they were made from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlx_tandem import demo
from mlx_tandem.engine.messages import Output, Submit
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.types import Delta
from tests.api.scripted import Peer, scripted_server

TOKENIZER = Tokenizer.load(demo.MODEL_PATH)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[httpx.Client, Peer]]:
    with scripted_server() as (client, peer, _):
        yield client, peer


def asked(served: tuple[httpx.Client, Peer], said: str = "Yes, of course.", **body: Any) -> httpx.Response:
    """The reply of a model that says this, a token at a time."""
    client, peer = served
    replies: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: replies.append(client.post("/v1/responses", json=body)))
    thread.start()
    request = peer.hear(Submit).request
    for token in TOKENIZER.encode_plain(said):
        peer.say(Output([Delta(request.id, 0, (token,), None, None)]))
    peer.say(Output([Delta(request.id, 0, (), None, "stop")]))
    thread.join()
    assert replies[0].status_code == 200, replies[0].text
    return replies[0]


def id_of(stream: str) -> str:
    """The id of a streamed response."""
    return stream.partition('"id":"')[2].partition('"')[0]


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_the_events_of_a_response_can_be_had_again(served: tuple[httpx.Client, Peer], prefix: str) -> None:
    stream = asked(served, input="hi", stream=True).text
    path = f"{prefix}/responses/{id_of(stream)}"
    for query in ("?stream=true", "?stream=true&include_obfuscation=false&include[]=message.output_text.logprobs"):
        again = served[0].get(path + query)
        assert (again.status_code, again.text) == (200, stream)
        assert again.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = stream.split("\n\n")
    assert len(events) > 8
    for after in (0, 4, len(events) - 3):
        rest = served[0].get(f"{path}?stream=true&starting_after={after}").text
        assert rest == "\n\n".join(events[after + 1 :])
    assert served[0].get(f"{path}?stream=true&starting_after=1000").text == ""
    assert served[0].get(f"{path}?stream=false").json()["status"] == "completed"


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("?starting_after=3", 400, "starting_after"),
        ("?stream=true&starting_after=-1", 400, "starting_after"),
        ("?stream=true&starting_after=x", 400, "starting_after"),
        ("?stream=maybe", 400, "stream"),
        ("?nonsense=1", 400, "nonsense"),
        ("/input_items?limit=0", 400, "limit"),
        ("/input_items?limit=101", 400, "limit"),
        ("/input_items?limit=ten", 400, "limit"),
        ("/input_items?order=up", 400, "order"),
        ("/input_items?after=msg_nothing", 404, "after"),
        ("/input_items?before=x", 400, "before"),
    ],
)
def test_wrong_queries_are_refused_by_name(
    served: tuple[httpx.Client, Peer], query: str, status: int, param: str
) -> None:
    path = f"/v1/responses/{asked(served, input='hi').json()['id']}"
    reply = served[0].get(path + query)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
    assert param in reply.json()["error"]["message"] or status == 404


@pytest.mark.parametrize("query", ["?stream=true", "/input_items"])
def test_a_response_that_is_not_there_is_a_404(served: tuple[httpx.Client, Peer], query: str) -> None:
    reply = served[0].get(f"/v1/responses/resp_nothing{query}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "response_id")
    kept = asked(served, input="hi", store=False).json()
    assert served[0].get(f"/v1/responses/{kept['id']}{query}").status_code == 404


def listed(served: tuple[httpx.Client, Peer], response: str, **query: Any) -> dict[str, Any]:
    """A page of the input of a response."""
    reply = served[0].get(f"/v1/responses/{response}/input_items", params=query)
    assert reply.status_code == 200, reply.text
    page: dict[str, Any] = reply.json()
    assert page["object"] == "list"
    assert [page["first_id"], page["last_id"]] == [page["data"][i]["id"] if page["data"] else None for i in (0, -1)]
    return page


def test_the_input_of_a_response_comes_in_pages(served: tuple[httpx.Client, Peer]) -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": f"m{i}"} for i in range(25)]
    items[3] = {"type": "message", "role": "assistant", "id": "msg_own", "content": "m3"}
    items[4] = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "in_progress"}
    items[5] = {"type": "function_call_output", "call_id": "c", "output": "m5"}
    items[6] = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "m6"}]}
    response = asked(served, input=items).json()["id"]
    newest = listed(served, response)
    assert (len(newest["data"]), newest["has_more"]) == (20, True)
    assert newest["data"][0]["content"] == [{"type": "input_text", "text": "m24"}]
    rest = listed(served, response, after=newest["last_id"])
    assert (len(rest["data"]), rest["has_more"]) == (5, False)
    whole = listed(served, response, order="asc", limit=100)
    assert whole["data"] == [*reversed(newest["data"] + rest["data"])]
    assert len({item["id"] for item in whole["data"]}) == 25
    said = {"type": "output_text", "text": "m3", "annotations": [], "logprobs": []}
    assert whole["data"][3]["content"] == [said] and whole["data"][3]["id"] == "msg_own"
    assert (whole["data"][4]["status"], whole["data"][5]["output"]) == ("in_progress", "m5")
    assert whole["data"][6]["summary"] == []
    seen: list[Any] = []
    page: dict[str, Any] = {"last_id": None, "has_more": True}
    while page["has_more"]:
        more = {} if page["last_id"] is None else {"after": page["last_id"]}
        page = listed(served, response, order="asc", limit=7, **more)
        seen += page["data"]
    assert seen == whole["data"]
    assert listed(served, response, order="asc", after=whole["last_id"]) == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False
    }  # fmt: skip


def test_the_input_has_what_came_before(served: tuple[httpx.Client, Peer]) -> None:
    first = asked(served, "Yes.", input="one").json()
    assert listed(served, first["id"])["data"][0]["content"][0]["text"] == "one", "the answer is no part of it"
    second = asked(served, input="two", previous_response_id=first["id"]).json()["id"]
    found = listed(served, second, order="asc")["data"]
    assert [item["content"][0]["text"] for item in found] == ["one", "Yes.", "two"]
    assert found[1] == first["output"][0], "it is an item of the earlier response"


def test_the_input_of_a_response_without_an_answer_is_whole(served: tuple[httpx.Client, Peer]) -> None:
    first = asked(served, "", input="one").json()
    assert first["output"] == []
    assert [item["content"][0]["text"] for item in listed(served, first["id"])["data"]] == ["one"]
    second = asked(served, "", input="two", previous_response_id=first["id"]).json()["id"]
    found = listed(served, second, order="asc")["data"]
    assert [item["content"][0]["text"] for item in found] == ["one", "two"]
