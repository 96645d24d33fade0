"""Files and batches over HTTP, with engines that say what a test wants."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from mlx_tandem import limits
from mlx_tandem.config import BatchesConfig
from mlx_tandem.dialects.batches import runner, service
from mlx_tandem.dialects.batches.store import BatchStore
from mlx_tandem.engine.messages import Accepted, Cancel, Drain, Output, Submit
from mlx_tandem.types import Delta
from tests.api.scripted import Peer, ScriptedEngine, scripted_server
from tests.waiting import until

Served = tuple[httpx.Client, Peer, ScriptedEngine]
CHATS = "/v1/chat/completions"


def line(name: str, **changes: Any) -> dict[str, Any]:
    """Return a request of a batch."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return {"custom_id": name, "method": "POST", "url": CHATS, "body": body} | changes


def upload(client: httpx.Client, *lines: Any, **form: Any) -> httpx.Response:
    """Upload lines, each an object or a text."""
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    return client.post("/v1/files", data={"purpose": "batch", **form}, files={"file": ("in.jsonl", text.encode())})


def begin(client: httpx.Client, *lines: Any, **fields: Any) -> str:
    """Begin a batch of these lines, and return its id."""
    body = {"input_file_id": upload(client, *lines).json()["id"], "endpoint": CHATS, "completion_window": "24h"}
    found = client.post("/v1/batches", json=body | fields)
    assert found.status_code == 200, found.text
    return str(found.json()["id"])


def ended(client: httpx.Client, id: str) -> dict[str, Any]:
    """Wait until a batch has ended, and return it."""
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        found.update(client.get(f"/v1/batches/{id}").json())
        return found["status"] in ("completed", "failed", "expired", "cancelled")

    until(has_ended)
    return found


def content(client: httpx.Client, file: str | None) -> list[dict[str, Any]]:
    """Return the lines of a file; none for no file."""
    if file is None:
        return []
    return [json.loads(text) for text in client.get(f"/v1/files/{file}/content").text.splitlines()]


def answer(peer: Peer) -> None:
    """Answer the next request."""
    r = peer.hear(Submit).request
    assert r.background, "a request of a batch is of the lowest class"
    peer.say(Accepted(r.id), Output([Delta(r.id, 0, (5,), None, "stop")]))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with scripted_server(settings={"batches": BatchesConfig(dir=str(tmp_path / "batches"))}) as found:
        yield found


def test_requests_are_answered_in_the_lowest_class_and_their_errors_name_the_field(served: Served) -> None:
    client, peer, _ = served
    wrong = line("b", body=line("")["body"] | {"temperature": 7})
    unknown = line("c", body=line("")["body"] | {"model": "nobody"})
    id = begin(client, line("a"), wrong, unknown, line("d"), metadata={"for": "tests"})
    for _ in range(2):
        answer(peer)
    batch = ended(client, id)
    assert batch["status"] == "completed" and batch["metadata"] == {"for": "tests"}
    assert batch["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
    good, bad = content(client, batch["output_file_id"]), content(client, batch["error_file_id"])
    assert [each["custom_id"] for each in good] == ["a", "d"]
    assert good[0]["response"]["status_code"] == 200 and good[0]["error"] is None
    assert good[0]["response"]["body"]["object"] == "chat.completion"
    assert good[0]["response"]["request_id"] != good[1]["response"]["request_id"]
    told = [(each["custom_id"], each["response"]["status_code"]) for each in bad]
    assert told == [("b", 400), ("c", 404)]
    assert [each["response"]["body"]["error"]["param"] for each in bad] == ["temperature", "model"]


def test_what_is_wrong_with_lines_is_told_by_line_and_field(served: Served) -> None:
    client, _, _ = served
    stream = line("e", body={"messages": [], "stream": True})
    lines = [line("a"), line("a"), line("b", url="/v1/models"), line("c", method="GET"), "{", "", stream, line("")]
    batch = ended(client, begin(client, *lines, {"custom_id": "f"}))
    assert batch["status"] == "failed" and batch["output_file_id"] is None
    problems = [(each["line"], each["param"]) for each in batch["errors"]["data"]]
    assert problems == [
        *((2, "custom_id"), (3, "url"), (4, "method"), (5, None), (7, "body.stream"), (8, "custom_id"), (9, "method")),
    ]
    assert ended(client, begin(client))["errors"]["data"][0]["code"] == "empty_file"


def test_a_line_is_read_as_a_request_over_http_is(served: Served) -> None:
    """JSON has no such numbers, but its readers have, and a field that is not there would be served."""
    client, _, _ = served
    body = line("")["body"]
    numbers = [float("nan"), float("inf"), 1 << 70]
    batch = ended(client, begin(client, *(line(str(n), body=body | {"temperature": n}) for n in numbers)))
    found = content(client, batch["error_file_id"])
    assert [each["response"]["status_code"] for each in found] == [400] * 3
    assert {each["response"]["body"]["error"]["param"] for each in found} == {"temperature"}


def test_a_batch_has_a_bounded_number_of_lines(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BATCH_LINES", 2)
    batch = ended(served[0], begin(served[0], line("a"), line("b"), line("c")))
    assert [each["code"] for each in batch["errors"]["data"]] == ["too_many_requests"]


def test_a_batch_that_is_cancelled_ends_what_runs_and_keeps_what_was_answered(served: Served) -> None:
    client, peer, _ = served
    id = begin(client, *(line(str(i)) for i in range(12)))
    answer(peer)
    until(lambda: client.get(f"/v1/batches/{id}").json()["request_counts"]["completed"] == 1)
    assert client.post(f"/v1/batches/{id}/cancel").json()["status"] == "cancelling"
    batch = ended(client, id)
    assert batch["status"] == "cancelled"
    assert batch["request_counts"] == {"total": 12, "completed": 1, "failed": 11}
    assert {each["error"]["code"] for each in content(client, batch["error_file_id"])} == {"batch_cancelled"}
    # What ran in the engine is ended there, too. How many requests were sent before that depends on the time.
    while not isinstance(peer.hear(object), Cancel):
        pass
    again = client.post(f"/v1/batches/{id}/cancel")
    assert (again.status_code, again.json()["error"]["param"]) == (409, "batch_id")
    until(lambda: client.get("/v1/engine/metrics").json()["open_requests"] == 0)


def test_what_is_not_answered_in_time_has_expired(served: Served) -> None:
    client, peer, _ = served
    id = begin(client, line("a"), line("b"), completion_window="1s")
    peer.hear(Submit)
    batch = ended(client, id)
    assert (batch["status"], batch["request_counts"]["failed"]) == ("expired", 2)
    found = content(client, batch["error_file_id"])
    assert [(each["custom_id"], each["error"]["code"]) for each in found] == [
        ("a", "batch_expired"),
        ("b", "batch_expired"),
    ]


def test_a_request_is_sent_again_when_the_engine_has_died(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for ever: the request may be what kills it."""
    monkeypatch.setattr(runner, "MOST_PAUSE", 0.01)
    client, peer, engine = served
    id = begin(client, line("a"))
    for _ in range(runner.MOST_DEATHS):
        peer.hear(Submit)
        peer.die()
        peer = engine.peer().ready()
    batch = ended(client, id)
    (found,) = content(client, batch["error_file_id"])
    assert found["response"]["body"]["error"]["code"] == "engine_died"
    until(lambda: client.get("/health").status_code == 200)
    id = begin(client, line("b"))
    peer.hear(Submit)
    peer.die()
    answer(engine.peer().ready())
    assert ended(client, id)["request_counts"]["completed"] == 1


def test_batches_go_on_at_the_next_start(tmp_path: Path) -> None:
    """What was answered is not asked again, and what ran is."""
    settings = {"batches": BatchesConfig(dir=str(tmp_path))}
    with scripted_server(settings=settings) as (client, peer, _):
        id = begin(client, *(line(str(i)) for i in range(3)))
        second = begin(client, line("z"))
        requests = [peer.hear(Submit).request for _ in range(3)]
        peer.say(Output([Delta(requests[1].id, 0, (5,), None, "stop")]))
        until(lambda: client.get(f"/v1/batches/{id}").json()["request_counts"]["completed"] == 1)
        answered = {requests[1].prompt}
        assert len(answered) == 1
    with scripted_server(settings=settings) as (client, peer, _):
        for _ in range(3):
            answer(peer)
        batch = ended(client, id)
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert [each["custom_id"] for each in content(client, batch["output_file_id"])] == ["0", "1", "2"]
        assert ended(client, second)["status"] == "completed"


def test_a_batch_keeps_its_file_and_one_that_cannot_go_on_does_not_stop_the_others(tmp_path: Path) -> None:
    """A file expires while its batch waits, and another one is lost."""
    settings = {"batches": BatchesConfig(dir=str(tmp_path))}
    with scripted_server(settings=settings) as (client, _, _):
        ids = [begin(client, line(name)) for name in ("lost", "expired", "good")]
        lost, expired, _ = (client.get(f"/v1/batches/{id}").json()["input_file_id"] for id in ids)
    store = BatchStore(tmp_path)
    record = store.file(expired)
    assert record is not None
    store.remove_file(expired)
    store.add_file(structs.replace(record, expires=1.0), json.dumps(line("expired")).encode())
    store.path(lost).unlink()
    store.close()
    with scripted_server(settings=settings) as (client, peer, _):
        answer(peer)
        answer(peer)
        batches = [ended(client, id) for id in ids]
        assert [batch["status"] for batch in batches] == ["failed", "completed", "completed"]
        assert batches[0]["errors"]["data"][0]["code"] == "internal_error"
        until(lambda: not store.path(expired).exists())


def test_no_request_begins_while_users_need_the_cache(tmp_path: Path) -> None:
    """And one that runs goes back before users are refused."""
    from mlx_tandem.engine.messages import Occupancy

    with scripted_server(settings={"batches": BatchesConfig(dir=str(tmp_path))}) as (client, peer, _):
        id = begin(client, line("a"))
        asked = peer.hear(Submit).request
        peer.say(Occupancy(running=1, used_blocks=85, free_blocks=15))
        assert peer.hear(Cancel).request == asked.id
        peer.say(Occupancy(running=1, used_blocks=0, free_blocks=100))
        answer(peer)
        assert ended(client, id)["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


def test_a_batch_wakes_an_engine_that_is_idle(tmp_path: Path) -> None:
    settings = {"batches": BatchesConfig(dir=str(tmp_path))}
    with scripted_server(settings=settings, idle_unload_s=3600.0) as (client, peer, engine):
        assert client.post("/api/generate", json={"model": "base", "keep_alive": 0}).status_code == 200
        peer.hear(Drain)
        peer.die()
        until(lambda: client.get("/health").json()["status"] == "idle")
        file = upload(client, line("a")).json()
        assert client.get(f"/v1/files/{file['id']}").json() == file
        assert engine.launches == 1, "files need no engine"
        id = begin(client, line("a"))
        answer(engine.peer().ready())
        assert ended(client, id)["status"] == "completed"


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_are_listed_in_pages_read_and_deleted(served: Served) -> None:
    client, _, _ = served
    assert client.get("/v1/files").json()["data"] == []
    ids = [upload(client, line(str(i))).json()["id"] for i in range(3)]
    page = client.get("/v1/files", params={"limit": 2}).json()
    assert ([each["id"] for each in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
    rest = client.get("/v1/files", params={"after": page["last_id"]}).json()
    assert ([each["id"] for each in rest["data"]], rest["has_more"]) == ([ids[0]], False)
    assert [each["id"] for each in client.get("/v1/files", params={"order": "asc"}).json()["data"]] == ids
    assert client.get("/v1/files", params={"purpose": "batch_output"}).json()["data"] == []
    file = client.get(f"/v1/files/{ids[0]}").json()
    assert (file["filename"], file["purpose"], file["bytes"]) == ("in.jsonl", "batch", len(json.dumps(line("0"))) + 1)
    assert content(client, ids[0]) == [line("0")]
    assert client.delete(f"/v1/files/{ids[0]}").json() == {"id": ids[0], "object": "file", "deleted": True}
    for path in (f"/v1/files/{ids[0]}", f"/v1/files/{ids[0]}/content", "/v1/files/x"):
        assert client.get(path).json()["error"]["code"] == "file_not_found"


def test_the_requests_of_a_batch_stay_until_it_has_ended(served: Served) -> None:
    client, peer, _ = served
    id = begin(client, line("a"))
    file = client.get(f"/v1/batches/{id}").json()["input_file_id"]
    refused = client.delete(f"/v1/files/{file}")
    assert (refused.status_code, id in refused.json()["error"]["message"]) == (409, True)
    answer(peer)
    ended(client, id)
    assert client.delete(f"/v1/files/{file}").status_code == 200
    assert [each["id"] for each in client.get("/v1/batches").json()["data"]] == [id]


def test_files_expire(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _, _ = served
    file = upload(client, line("a"), **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}).json()
    assert file["expires_at"] - file["created_at"] == 3600
    wrong = upload(client, line("a"), **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"})
    assert wrong.json()["error"]["param"] == "expires_after.seconds"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"input_file_id": "file-x"}, "input_file_id"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"metadata": {str(i): "b" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
def test_what_a_batch_cannot_be_is_refused_by_the_fields_name(
    shared: httpx.Client, change: dict[str, Any], param: str
) -> None:
    body = {"input_file_id": upload(shared, line("a")).json()["id"], "endpoint": CHATS, "completion_window": "24h"}
    found = shared.post("/v1/batches", json=body | change)
    assert (found.status_code in (400, 404), found.json()["error"]["param"]) == (True, param)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("batches")
    with scripted_server(settings={"batches": BatchesConfig(dir=str(folder), max_gb=0.001)}) as (client, _, _):
        yield client


@pytest.mark.parametrize(
    ("send", "status", "param"),
    [
        (lambda c: upload(c, line("a"), purpose="assistants"), 400, "purpose"),
        (lambda c: upload(c, line("a"), size="3"), 400, "size"),
        (lambda c: c.post("/v1/files", data={"purpose": "batch"}, files={"other": ("x", b"")}), 400, "other"),
        (lambda c: c.post("/v1/files", files={"purpose": (None, b"batch")}), 400, "file"),
        (lambda c: c.post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data"}), 400, None),
        (lambda c: c.post("/v1/files", json={}), 415, None),
        (lambda c: c.post("/v1/files", files={"file": b""}, headers={"origin": "http://a.example"}), 415, None),
        (lambda c: upload(c, " " * limits.MAX_PROGRAM_BODY), 413, None),
        (lambda c: upload(c, " " * 1_000_000), 507, None),
    ],
)
def test_what_is_no_file_is_refused(
    shared: httpx.Client, send: Callable[[httpx.Client], httpx.Response], status: int, param: str | None
) -> None:
    found = send(shared)
    assert (found.status_code, found.json()["error"]["param"]) == (status, param), found.text


def test_there_is_a_bound_on_files_and_on_batches(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _, _ = served
    id = begin(client, line("a"))
    monkeypatch.setattr(limits, "MAX_OPEN_BATCHES", 1)
    file = client.get(f"/v1/batches/{id}").json()["input_file_id"]
    body = {"input_file_id": file, "endpoint": CHATS, "completion_window": "24h"}
    assert client.post("/v1/batches", json=body).status_code == 507
    monkeypatch.setattr(limits, "MAX_BATCH_FILES", 1)
    assert upload(client, line("a")).status_code == 507
    assert client.post(f"/v1/batches/{id}/cancel").status_code == 200
    assert ended(client, id)["status"] == "cancelled"


def test_a_batch_whose_answers_take_too_much_of_the_drive_fails_and_keeps_them(tmp_path: Path) -> None:
    settings = {"batches": BatchesConfig(dir=str(tmp_path), max_gb=0.001)}
    with scripted_server(settings=settings) as (client, peer, _):
        lines = [json.dumps(line(str(i))) for i in range(10)]
        lines[0] = " " * (999_900 - sum(map(len, lines))) + lines[0]
        id = begin(client, *lines)
        answer(peer)
        batch = ended(client, id)
        assert batch["status"] == "failed" and batch["request_counts"]["completed"] == 1
        assert {each["error"]["code"] for each in content(client, batch["error_file_id"])} == {"batch_quota_exceeded"}


def test_another_server_does_not_touch_the_folder(tmp_path: Path) -> None:
    settings = {"batches": BatchesConfig(dir=str(tmp_path))}
    with scripted_server(settings=settings) as (client, peer, _):
        id = begin(client, line("a"))
        peer.hear(Submit)
        with scripted_server(settings=settings) as (other, _, _):
            found = other.get(f"/v1/batches/{id}")
            assert found.json()["error"]["code"] == "folder_in_use"
    assert service.LOOK_SECONDS > 0


def key(name: str, tenant: str, *scopes: str) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": tenant, "scopes": scopes}


def test_a_tenant_sees_and_runs_only_its_own_files_and_batches(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    entries = [
        key("ann", "one", "inference"),
        key("eve", "one", "inference"),
        key("bob", "two", "inference"),
        key("root", "", "admin", "inference"),
    ]
    keys.write_text(json.dumps(entries), encoding="utf-8")
    keys.chmod(0o600)
    settings = {"batches": BatchesConfig(dir=str(tmp_path / "batches"))}
    with scripted_server(keys_file=str(keys), settings=settings) as (client, peer, _):

        def shown(name: str, path: str) -> httpx.Response:
            return client.get(path, headers={"authorization": f"Bearer {name}"})

        client.headers["authorization"] = "Bearer ann"
        id = begin(client, line("a"))
        answer(peer)
        batch = ended(client, id)
        assert batch["request_counts"]["completed"] == 1
        places = ["/v1/files/" + batch[file] for file in ("input_file_id", "output_file_id")]
        places += [f"{places[1]}/content", f"/v1/batches/{id}"]
        for name, sees in (("ann", True), ("eve", True), ("root", True), ("bob", False)):
            assert [shown(name, place).status_code for place in places] == [200 if sees else 404] * 4, name
            assert len(shown(name, "/v1/files").json()["data"]) == 2 * sees
            assert len(shown(name, "/v1/batches").json()["data"]) == sees
        client.headers["authorization"] = "Bearer bob"
        body = {"input_file_id": batch["input_file_id"], "endpoint": CHATS, "completion_window": "24h"}
        assert client.post("/v1/batches", json=body).status_code == 404
        assert client.delete(places[0]).status_code == 404
        assert client.post(f"/v1/batches/{id}/cancel").status_code == 404


def test_the_requests_of_a_key_that_is_gone_are_refused(tmp_path: Path) -> None:
    """A batch may outlast the server, so its key may be gone when it goes on."""
    keys = tmp_path / "keys.json"
    settings = {"batches": BatchesConfig(dir=str(tmp_path / "batches"))}
    for entries in ([key("ann", "one", "inference")], [key("eve", "one", "inference")]):
        keys.write_text(json.dumps(entries), encoding="utf-8")
        keys.chmod(0o600)
        with scripted_server(keys_file=str(keys), settings=settings) as (client, peer, _):
            client.headers["authorization"] = f"Bearer {entries[0]['name']}"
            if entries[0]["name"] == "ann":
                id = begin(client, line("a"))
                peer.hear(Submit)
            else:
                batch = ended(client, id)
                assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
                (failed,) = content(client, batch["error_file_id"])
                assert failed["response"]["status_code"] == 403 and "'ann'" in str(failed["response"]["body"])
