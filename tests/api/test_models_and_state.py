"""Models, adapters coming and going, health and metrics."""

from __future__ import annotations

import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_tandem import demo
from tests.streams import until_token

QUESTION = "What is 12 + 5?"


def answer(server, model: str) -> str:
    response = server.chat(QUESTION, model=model, temperature=0)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_models(server):
    listed = {m["id"]: m for m in server.client.get("/v1/models").json()["data"]}
    assert list(listed)[:4] == ["tandem-demo", "shout", "json", "down"]
    assert listed["tandem-demo"]["parent"] is None
    assert listed["shout"]["parent"] == "tandem-demo"
    assert listed["shout"]["root"] == "shout@1"
    assert all(m["object"] == "model" for m in listed.values())
    for name in ("tandem-demo", "shout"):
        assert server.client.get(f"/v1/models/{name}").json() == listed[name]
    assert server.client.get("/v1/models/shout@1").json()["root"] == "shout@1"
    assert all((m["loaded"], m["status"]) == (True, "loaded") for m in listed.values())
    missing = server.client.get("/v1/models/nobody")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("name", ["base", "default_model", "tandem-demo"])
def test_names_of_the_base(server, name):
    reply = server.chat(QUESTION, model=name, temperature=0).json()
    assert (reply["model"], reply["choices"][0]["message"]["content"]) == ("tandem-demo", "12 + 5 = 17.")
    assert server.client.get(f"/v1/models/{name}").json()["id"] == "tandem-demo"


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("shuot", "did you mean 'shout'?"),
        ("SHOUT", "did you mean 'shout'?"),
        ("Base", "did you mean 'base'?"),
        ("shout@99", "did you mean 'shout'?"),
        ("tandem_demo", "did you mean 'tandem-demo'?"),
        ("gpt-4o", "does not exist"),
    ],
)
def test_an_unknown_model_is_told_what_is_spelled_like_it(server, asked, hint):
    replies = [
        server.chat(QUESTION, model=asked),
        server.chat(QUESTION, lora_adapter=asked),
        server.client.get(f"/v1/models/{asked}"),
    ]
    for reply in replies:
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (404, "model_not_found")
        assert hint in error["message"]
        assert "Models here: 'tandem-demo', 'base', " in error["message"]
        assert str(demo.MODEL_PATH) not in error["message"]


def test_a_path_that_does_not_exist_has_a_code_of_its_own(server):
    reply = server.client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "does-not-exist"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (404, "adapter_not_found", "lora_path")


@pytest.mark.parametrize("name", ["Base", "BASE", "default_model", "Tandem-Demo"])
def test_an_alias_cannot_be_called_like_the_base(server, name):
    reply = server.client.put(f"/v1/aliases/{name}", json={"arms": [{"adapter": "shout", "weight": 1}]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (409, "name")


def test_an_adapter_comes_changes_and_goes(server):
    load, began = {"name": "guest", "path": str(demo.ADAPTER_PATHS["shout"])}, int(time.time())
    reply = server.client.post("/v1/adapters", json=load)
    assert began <= server.client.get("/v1/models/guest").json()["created"] <= time.time()
    assert reply.status_code == 200, reply.text
    first = reply.json()
    assert (first["status"], first["name"], first["id"], first["format"]) == ("loaded", "guest", "guest@1", "mlx-lm")
    assert answer(server, "guest") == "12 + 5 = 17!"

    second = server.client.post("/v1/adapters", json=load | {"path": str(demo.ADAPTER_PATHS["json"])}).json()
    assert second["id"] == "guest@2"
    assert answer(server, "guest") == '{"answer": 17}'
    assert answer(server, "guest@1") == "12 + 5 = 17!"
    (listed,) = [a for a in server.client.get("/v1/adapters").json()["adapters"] if a["name"] == "guest"]
    assert (listed["version"], listed["versions"]) == (2, [1, 2])
    counters = server.client.get("/v1/engine/metrics").json()["adapters"]
    assert counters["guest@2"]["requests"] == 1
    assert counters["guest@2"]["generated_tokens"] > 0

    assert server.client.delete("/v1/adapters/guest").json()["status"] == "unloaded"
    for model in ("guest", "guest@1", "guest@2"):
        assert server.chat(QUESTION, model=model).status_code == 404
    again = server.client.delete("/v1/adapters/guest")
    assert (again.status_code, again.json()["error"]["param"]) == (404, "name")
    assert answer(server, "shout") == "12 + 5 = 17!"  # the same content under another name


def test_removal_does_not_touch_a_request_that_runs(server):
    server.client.post("/v1/adapters", json={"name": "leaving", "path": str(demo.ADAPTER_PATHS["down"])})
    expected = server.chat(QUESTION, model="leaving", temperature=0, max_tokens=200, ignore_eos=True).json()
    body = {
        "model": "leaving",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
    }
    with server.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        until_token(lines)  # it runs
        assert server.client.delete("/v1/adapters/leaving").status_code == 200
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert expected["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"name": "../x", "path": "/tmp"}, 400, "name"),
        ({"name": "", "path": "/tmp"}, 400, "name"),
        ({"name": "a" * 65, "path": "/tmp"}, 400, "name"),
        ({"name": "a@1", "path": "/tmp"}, 400, "name"),
        ({"name": "SHOUT", "path": "/tmp"}, 400, "name"),
        ({"name": "base", "path": "/tmp"}, 409, "name"),
        ({"name": "tandem-demo", "path": "/tmp"}, 409, "name"),
        ({"name": "Base", "path": "shout"}, 409, "name"),
        ({"name": "Tandem-DEMO", "path": "shout"}, 409, "name"),
        ({"name": "default_model", "path": "shout"}, 409, "name"),
        ({"name": "Default_Model", "path": "shout"}, 409, "name"),
        ({"name": "x", "path": ""}, 400, "path"),
        ({"name": "x", "path": "a\0b"}, 400, "path"),
        ({"name": "x", "path": "/does/not/exist"}, 400, "path"),
        ({"name": "x", "path": "does-not-exist"}, 404, "path"),
        ({"name": "x", "path": "shout/does-not-exist"}, 404, "path"),
        ({"name": "x", "path": "../adapters/../.."}, 400, "path"),
        ({"name": "x", "path": "."}, 400, "path"),
        ({"name": "x", "path": "shout", "pin": 1}, 400, "pin"),
        ({"name": "x"}, 404, "name"),
        ({"path": "/tmp"}, 400, "name"),
        ({"name": "x", "path": "/tmp", "rank": 3}, 400, "rank"),
        ({"name": 3, "path": "/tmp"}, 400, "name"),
    ],
)
def test_loads_that_are_refused(server, body, status, param):
    before = server.client.get("/v1/adapters").json()
    response = server.client.post("/v1/adapters", json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    names = [a["name"] for a in before["adapters"]]
    assert [a["name"] for a in server.client.get("/v1/adapters").json()["adapters"]] == names


def test_loading_beside_running_streams(server):
    """Every answer is that of the version that was current when it was asked for."""
    wrong: list[str] = []

    def ask() -> None:
        for _ in range(6):
            text = answer(server, "shout")
            if text != "12 + 5 = 17!":
                wrong.append(text)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for t in threads:
        t.start()
    for i in range(6):
        path = str(demo.ADAPTER_PATHS["json" if i % 2 else "down"])
        assert server.client.post("/v1/adapters", json={"name": "churn", "path": path}).status_code == 200
        assert answer(server, "churn") == ('{"answer": 17}' if i % 2 else "12 + 5 = 17.")
    for t in threads:
        t.join()
    server.client.delete("/v1/adapters/churn")
    assert wrong == []


def test_health(server):
    reply = server.client.get("/health")
    assert reply.status_code == 200
    body = reply.json()
    assert (body["status"], body["model"]) == ("ok", "tandem-demo")
    assert body["adapters_loaded"] >= 3
    assert body["engine"]["model_type"] == "qwen3"
    assert server.client.get("/livez").json() == {"status": "ok"}
    assert server.client.get("/readyz").json() == {"status": "ok"}


def test_metrics(server):
    def values() -> dict[str, float]:
        text = server.client.get("/metrics").text
        return {
            s.name + str(sorted(s.labels.items())): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }

    base, shout = (f"[('engine', '0'), ('model_name', '{model}')]" for model in ("tandem-demo", "shout"))
    before = values()
    replies = [server.chat(QUESTION, max_tokens=4, ignore_eos=True, model=m, n=2) for m in ("base", "shout")]
    server.chat(QUESTION, model="nobody")
    after = values()

    def grown(key: str) -> float:
        return after[key] - before.get(key, 0)

    assert grown("vllm:generation_tokens_total" + base) == 8
    assert grown("vllm:generation_tokens_total" + shout) == 8
    assert grown("vllm:prompt_tokens_total" + shout) == replies[1].json()["usage"]["prompt_tokens"]
    assert (
        grown("vllm:request_success_total[('engine', '0'), ('finished_reason', 'length'), ('model_name', 'shout')]")
        == 2
    )
    assert grown("vllm:time_to_first_token_seconds_count" + base) == 2
    assert grown("vllm:e2e_request_latency_seconds_count" + base) == 2
    assert grown("tandem_errors_total[('code', 'model_not_found')]") == 1
    assert 0 <= after["vllm:kv_cache_usage_perc" + base] <= 1
    assert "nobody" not in server.client.get("/metrics").text


def test_engine_metrics(server):
    before = server.client.get("/v1/engine/metrics").json()
    server.chat(QUESTION, max_tokens=4, ignore_eos=True, n=2)
    server.chat(QUESTION, max_tokens=0)  # refused
    body = server.client.get("/v1/engine/metrics").json()
    assert body["total_tokens_generated"] == body["generated_tokens"] == before["generated_tokens"] + 8
    assert body["requests_completed"] == before["requests_completed"] + 1
    assert body["state"] == "ready"
    assert body["engine"]["steps"] > 0
    assert set(body["adapters"]["shout@1"]) == {
        "requests",
        "prompt_tokens",
        "generated_tokens",
        "errors",
        "open",
        "seconds",
    }


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/adapters", 405, "method_not_allowed"),
        ("DELETE", "/v1/adapters/..%2f..%2fetc", 404, None),
        ("POST", "//v1/chat/completions", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/v1/openapi.json", 404, "not_found"),
    ],
)
def test_routes_that_are_not_there(server, method, path, status, code):
    response = server.client.request(method, server.url + path)  # as it stands there: a client may take // for a host
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code
