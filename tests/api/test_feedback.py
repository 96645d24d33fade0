"""Feedback on completions over HTTP, on a server that learns nothing: what is kept, refused, listed and imported."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_tandem import demo
from mlx_tandem.cli import learned
from mlx_tandem.config import CheckpointingConfig, FeedbackConfig
from mlx_tandem.engine.messages import Output, Submit
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.training.store.database import Database
from mlx_tandem.types import Delta
from tests.api.scripted import Peer, scripted_server

TOKENIZER = Tokenizer.load(demo.MODEL_PATH)
END = 2
"""The scripted engine's token that ends an answer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("feedback") / "checkpoints"


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[httpx.Client, Peer]]:
    settings = {"checkpointing": CheckpointingConfig(str(folder)), "feedback": FeedbackConfig(remember_mb=1)}
    with scripted_server(settings=settings) as (client, peer, _):
        yield client, peer


def said(served: tuple[httpx.Client, Peer], *texts: str, path: str = "/v1/chat/completions", **body: Any) -> str:
    """The id of a reply whose choices are these texts."""
    client, peer = served
    asked = {"messages": [{"role": "user", "content": "Sort down: 5 3 9 1"}], "n": len(texts), "max_tokens": 64}
    replies: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: replies.append(client.post(path, json=body or asked)))
    thread.start()
    request = peer.hear(Submit).request
    for choice, text in enumerate(texts):
        for token in TOKENIZER.encode_plain(text):
            peer.say(Output([Delta(request.id, choice, (token,), None, None)]))
        peer.say(Output([Delta(request.id, choice, (END,), None, "stop")]))
    thread.join()
    assert replies[0].status_code == 200, replies[0].text
    text = replies[0].text
    return text.partition('"id":"')[2].partition('"')[0]


def give(served: tuple[httpx.Client, Peer], id: str, **body: Any) -> httpx.Response:
    return served[0].post("/v1/feedback", json={"completion_id": id} | body)


def stored(served: tuple[httpx.Client, Peer], id: str) -> list[dict[str, Any]]:
    """What the server lists of a completion."""
    reply = served[0].get("/v1/feedback?limit=100")
    assert reply.status_code == 200, reply.text
    return [each for each in reply.json()["data"] if each["completion_id"] == id]


def test_what_is_said_of_a_completion_is_kept_in_full(served: tuple[httpx.Client, Peer], folder: Path) -> None:
    id = said(served, "1 3 5 9", "9 5 3 1")
    reply = give(served, id, thumb="down", corrected="9 5 3 1", comment="the wrong way", metadata={"user": "ana"})
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert (found["object"], found["completion_id"], found["choice"], found["score"]) == ("feedback", id, 0, 0.0)
    assert (found["answers"], found["corrected"], found["model"]) == (["1 3 5 9"], "9 5 3 1", "base")
    assert (found["comment"], found["metadata"]) == ("the wrong way", {"user": "ana"})
    assert give(served, id, preferred=1).json()["answers"] == ["1 3 5 9", "9 5 3 1"]
    first, second = stored(served, id)
    assert (first["choice"], first["preferred"], first["learned"]) == (None, 1, 0)
    assert second["number"] < first["number"] and second["corrected"] == "9 5 3 1"
    lines = [line for line in learned.feedback(Database.read_only(folder)) if line["completion_id"] == id]
    assert lines[0]["answers"][0][-1] == lines[0]["corrected"][-1] == END, "a correction ends as the answer did"
    assert TOKENIZER.decode(lines[0]["prompt_token_ids"]).endswith("assistant\n")


def test_a_correction_keeps_the_thoughts_before_the_answer(served: tuple[httpx.Client, Peer], folder: Path) -> None:
    id = said(served, "<think>\nhm\n</think>\n\n1 3 5 9")
    reply = give(served, id, corrected="9 5 3 1")
    assert reply.status_code == 200, reply.text
    lines = [line for line in learned.feedback(Database.read_only(folder)) if line["completion_id"] == id]
    assert TOKENIZER.decode(lines[0]["corrected"], show_special=True).startswith("<think>\nhm\n</think>\n\n9 5 3 1")


def test_a_second_feedback_takes_the_place_of_the_first(served: tuple[httpx.Client, Peer]) -> None:
    id = said(served, "1 3 5 9")
    for body in ({"thumb": "up"}, {"score": 0.25}, {"score": 0.25}):
        assert give(served, id, **body).status_code == 200
    (found,) = stored(served, id)
    assert found["score"] == 0.25


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_replies_of_every_api_can_be_judged(served: tuple[httpx.Client, Peer], path: str, stream: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 32, "stream": stream}
    if path == "/v1/messages":
        body |= {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
    elif path == "/v1/responses":
        body = {"input": "hi", "stream": stream}
    else:
        body |= {"prompt": "hi"}
    id = said(served, "1 3 5 9", path=path, **body)
    assert give(served, id, thumb="up").json()["answers"] == ["1 3 5 9"]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "thumb", "missing_required_parameter"),
        ({"thumb": "sideways"}, "thumb", "invalid_value"),
        ({"score": 1.5}, "score", "invalid_value"),
        ({"thumb": "up", "score": 1.0}, "score", "invalid_value"),
        ({"thumb": "up", "choice": 1}, "choice", "invalid_value"),
        ({"preferred": 0}, "preferred", "invalid_value"),
        ({"corrected": " "}, "corrected", "invalid_value"),
        ({"corrected": "1 " * 300}, "corrected", "invalid_value"),
        ({"comment": "x" * 20_000}, "comment", "invalid_value"),
        ({"thumb": "up", "metadata": {"x": "y" * 70_000}}, "metadata", "invalid_value"),
        ({"thumb": "up", "user": "ana"}, "user", "unknown_parameter"),
    ],
)
def test_what_is_wrong_is_named(served: tuple[httpx.Client, Peer], body: dict[str, Any], param: str, code: str) -> None:
    id = said(served, "1 3 5 9")
    reply = give(served, id, **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert not stored(served, id)


def test_an_unknown_completion_says_how_long_they_are_remembered(served: tuple[httpx.Client, Peer]) -> None:
    reply = give(served, "chatcmpl-1", thumb="up")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (404, "completion_not_found", "completion_id")
    assert "86400 s" in error["message"] and "1 MiB" in error["message"]


def test_pages_follow_each_other(served: tuple[httpx.Client, Peer]) -> None:
    ids = [said(served, "1") for _ in range(3)]
    for id in ids:
        give(served, id, thumb="up")
    page = served[0].get("/v1/feedback?limit=2").json()
    assert [each["completion_id"] for each in page["data"]] == [ids[2], ids[1]] and page["has_more"]
    rest = served[0].get(f"/v1/feedback?limit=2&after={page['last_id']}").json()
    assert rest["data"][0]["completion_id"] == ids[0]
    up = served[0].get(f"/v1/feedback?order=asc&after={rest['data'][0]['number']}").json()
    assert [each["completion_id"] for each in up["data"]] == ids[1:] and not up["has_more"]


# -- exports ----------------------------------------------------------------------------------------------------------


def chat_of(*, rating: int | None = 1, **message: Any) -> dict[str, Any]:
    """An entry of Open WebUI's export, with the fields that it has: a question, two answers, the first one rated."""
    answer = {
        "id": "a1",
        "parentId": "q",
        "childrenIds": [],
        "role": "assistant",
        "content": "9 5 3 1",
        "model": "policy",
    }
    messages = {
        "q": {"id": "q", "parentId": None, "childrenIds": ["a1"], "role": "user", "content": "Sort down: 5 3 9 1"},
        "a1": answer | message,
    }
    history = {"messages": messages, "currentId": "a1"}
    inner = {"id": "", "title": "Sorting", "models": ["policy"], "params": {}, "history": history, "files": []}
    return {
        "id": "6d2f2c2e",
        "user_id": "u",
        "version": 0,
        "type": "rating",
        "data": {"rating": rating, "model_id": "policy", "sibling_model_ids": None, "reason": "accurate_information",
                 "comment": "right", "tags": ["sorting"], "details": {"rating": 9}},
        "meta": {"arena": False, "model_id": "policy", "message_id": "a1", "message_index": 2, "chat_id": "c"},
        "snapshot": {"chat": {"id": "c", "user_id": "u", "title": "Sorting", "chat": inner, "archived": False}},
        "created_at": 1_730_000_000,
        "updated_at": 1_730_000_001,
    }  # fmt: skip


def imported(served: tuple[httpx.Client, Peer], *entries: Any) -> list[dict[str, Any]]:
    reply = served[0].post("/v1/feedback/import", json=list(entries))
    assert reply.status_code == 200, reply.text
    results: list[dict[str, Any]] = reply.json()["data"]
    return results


def test_an_export_of_open_webui_is_taken_as_it_is(served: tuple[httpx.Client, Peer]) -> None:
    assert imported(served, chat_of()) == [{"id": "6d2f2c2e", "status": "stored"}]
    (found,) = stored(served, "6d2f2c2e")
    assert (found["source"], found["score"], found["answers"]) == ("open_webui", 1.0, ["9 5 3 1"])
    assert (found["model"], found["comment"]) == ("policy", "right")
    assert found["metadata"] == {"reason": "accurate_information", "tags": ["sorting"]}
    imported(served, chat_of())
    assert stored(served, "6d2f2c2e") == [found], "an export that comes again changes nothing"


def test_an_answer_that_was_edited_there_is_a_correction(served: tuple[httpx.Client, Peer]) -> None:
    thought = '<details type="reasoning" done="true">\n<summary>Thought</summary>\nhm\n</details>\n'
    imported(served, chat_of(rating=None, originalContent=f"{thought}1 3 5 9") | {"id": "edited"})
    (found,) = stored(served, "edited")
    assert (found["answers"], found["corrected"], found["score"]) == (["1 3 5 9"], "9 5 3 1", None)


def test_an_answer_that_won_over_its_siblings_is_preferred(served: tuple[httpx.Client, Peer]) -> None:
    entry = chat_of() | {"id": "won"}
    messages = entry["snapshot"]["chat"]["chat"]["history"]["messages"]
    messages["q"]["childrenIds"].append("a2")
    messages["a2"] = messages["a1"] | {"id": "a2", "content": "1 3 5 9", "model": "shout"}
    imported(served, entry)
    (found,) = stored(served, "won")
    assert (found["choice"], found["preferred"], found["answers"]) == (None, 0, ["9 5 3 1", "1 3 5 9"])


def test_stored_completions_are_taken_one_a_line(served: tuple[httpx.Client, Peer]) -> None:
    own = said(served, "9 5 3 1")
    choice = {"index": 0, "message": {"role": "assistant", "content": "9 5 3 1"}, "finish_reason": "stop"}
    one = {"object": "chat.completion", "created": 1, "model": "base", "choices": [choice]}
    lines = [
        one | {"id": own, "metadata": {"score": "0.75"}},
        one | {"id": "chatcmpl-shown", "messages": [{"role": "user", "content": "Sort down: 5 3 9 1"}]},
        one | {"id": "chatcmpl-elsewhere", "metadata": {"thumb": "up"}},
    ]
    body = "".join(json.dumps(line) + "\n" for line in lines)
    reply = served[0].post("/v1/feedback/import", content=body, headers={"content-type": "application/jsonl"})
    assert [each["status"] for each in reply.json()["data"]] == ["stored", "stored", "skipped"], reply.text
    assert stored(served, own)[0]["score"] == 0.75
    assert stored(served, "chatcmpl-shown")[0]["corrected"] == "9 5 3 1"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"anything": 1}, "no feedback of Open WebUI"),
        (chat_of() | {"snapshot": None}, "does not have the rated message"),
        (chat_of(rating=None), "no rating"),
        (chat_of(content=""), "empty"),
        (chat_of(parentId=None), "question"),
        (chat_of(content="1 " * 300), "at most"),
        ({"object": "chat.completion", "id": "x", "choices": []}, "no choice"),
        ({"object": "chat.completion", "id": 3, "choices": {"0": 1}, "metadata": [1], "messages": "x"}, "no id"),
    ],
)
def test_what_cannot_be_used_is_skipped_with_its_reason(
    served: tuple[httpx.Client, Peer], entry: dict[str, Any], reason: str
) -> None:
    bad, good = imported(served, entry, chat_of() | {"id": "good"})
    assert bad["status"] == "skipped" and reason in bad["reason"]
    assert good["status"] == "stored"


@pytest.mark.parametrize(
    ("body", "media", "status"),
    [
        (b"[]", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"[{}]", "application/json", 400),
        (b"{}\n{", "application/json", 400),
        (b"\xff", "application/json", 400),
        (b"[{}]", "text/plain", 415),
    ],
)
def test_what_is_no_export_is_refused(served: tuple[httpx.Client, Peer], body: bytes, media: str, status: int) -> None:
    reply = served[0].post("/v1/feedback/import", content=body, headers={"content-type": media})
    assert reply.status_code == status, reply.text
